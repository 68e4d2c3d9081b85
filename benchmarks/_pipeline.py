"""Our own pipeline as it is: a seed goes in, an audit that must pass comes out."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing import audit_epsilon, audit_noise, audit_sampler, audit_sensitivity

SIZE, CLIP, NOISE, DELTA = 16, 1.0, 2.0, 1e-5
COUNT, RATE = 1000, 0.05
STEPS = 48  # of which noise is looked at: a tenth too little is seen by then
PARAMS = {
    "first": jax.random.normal(jax.random.key(1), (8, 6)),
    "second": jax.random.normal(jax.random.key(2), (6, 6)),
    "bias": jnp.zeros(6),
}
BATCH = {
    "x": jax.random.normal(jax.random.key(3), (SIZE, 8)),
    "y": jax.random.normal(jax.random.key(4), (SIZE, 6)),
}
ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)


class Audit(NamedTuple):
    """Who looks for it, and the audit, which is falsy if it rejects."""

    by: str
    run: Callable[[int], Any]


def loss(params: Any, example: Any) -> jax.Array:
    """Return the loss of a network with one hidden layer."""
    hidden = jnp.tanh(example["x"] @ params["first"] + params["bias"])
    return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)


def tied_loss(params: Any, example: Any) -> jax.Array:
    """Return the loss of one that uses a square matrix twice."""
    hidden = jnp.tanh(example["y"] @ params["second"])
    return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)


def norm(tree: Any) -> jax.Array:
    """Return the ℓ₂ norm of a tree."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def clipped(batch: Any, mask: jax.Array, engine: Any = "auto", loss_fn: Any = loss) -> Any:
    """Return the clipped sum of the library."""
    gradient = lsdp.clipped_grad(loss_fn, clip_norm=CLIP, engine=engine)
    link = lsdp.clip_per_example(CLIP)
    return link.update(gradient(PARAMS, batch, mask), link.init(PARAMS), PARAMS)[0]


def sensitivity(release: Any, declared: float, seed: int, **options: Any) -> Any:
    """Audit a release on the batch."""
    key = jax.random.key(seed)
    return audit_sensitivity(release, BATCH, declared=declared, searches=12, key=key, **options)


def _step(make: Any, engine: str) -> Any:
    """Return a whole step, whose noise is the same on both sides and cancels."""
    options = {"smoothing": 1.0} if make is lsdp.dp_lssgd else {}
    optimizer = make(
        1.0,
        clip_norm=CLIP,
        noise_multiplier=NOISE,
        expected_batch_size=SIZE,
        key=jax.random.key(7),
        **options,
    )
    gradient = lsdp.clipped_grad(loss, clip_norm=CLIP, engine=engine)

    def release(batch: Any, mask: jax.Array) -> Any:
        return optimizer.update(gradient(PARAMS, batch, mask), optimizer.init(PARAMS), PARAMS)[0]

    return release


@partial(jax.jit, static_argnums=0)
def library_noise(deviation: float, key: jax.Array, step: Any) -> Any:
    """Return what the library's link adds in a step."""
    link = lsdp.add_gaussian_noise(deviation, key=key)
    return link.update(ZEROS, link.init(PARAMS)._replace(step=jnp.asarray(step)))[0]


def noise_audit(make: Callable[[int], Any], seed: int) -> Any:
    """Audit the noise that a function of the seed makes."""
    return audit_noise(make(seed), scale=NOISE * CLIP, steps=STEPS)


def scaled(factor: float, seed: int) -> Any:
    """Return the library's noise, of which there is more or less than there should be."""
    return partial(library_noise, factor * NOISE * CLIP, jax.random.key(seed))


def resumed(seed: int) -> Any:
    """Sixteen steps of `fit`; it falls back to the eighth, and goes on with other data."""
    plan = lsdp.PrivacyPlan(
        dataset_size=SIZE,
        expected_batch_size=1,
        steps=2 * STEPS,
        noise_multiplier=NOISE,
        delta=DELTA,
        clip_norm=CLIP,
    )
    # Parameters are the noise of the last step.
    last = optax.stateless(lambda updates, params: jax.tree.map(jnp.subtract, updates, params))
    seen: list[Any] = []

    def remember(report: training.StepReport) -> None:
        seen.append(jax.tree.map(np.array, report.params))
        if len(seen) == 16:
            raise InterruptedError

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        for data in (BATCH, jax.tree.map(jnp.add, BATCH, BATCH)):
            with contextlib.suppress(InterruptedError):
                training.fit(
                    plan,
                    lambda params, example: 0 * loss(params, example),
                    ZEROS,
                    data,
                    optimizer=last,
                    folder=folder,
                    save_every=8,
                    callbacks=[remember],
                    progress=False,
                    key=jax.random.key(seed),
                )
    return seen.__getitem__


def sampled(kind: Any, sampling: Any, seed: int) -> Any:
    """Audit a sampler as what it is declared to be."""
    sampler = kind(COUNT, key=jax.random.key(seed))
    facts: Any = {"dataset_size": COUNT, "sampling_rate": RATE, "sampling": sampling}
    return audit_sampler(sampler, **facts)


def lsadam(key: jax.Array) -> optax.GradientTransformation:
    """Return DP-LSAdam for one example."""
    return lsdp.dp_lsadam(
        1.0, clip_norm=CLIP, noise_multiplier=NOISE, expected_batch_size=1, key=key
    )


@cache
def _training(make: Any, engine: str, steps: int) -> Any:
    """Return a training, whose canary has the largest gradient that it may have."""
    gradient = lsdp.clipped_grad(jnp.vdot, clip_norm=CLIP, engine=engine)

    def train(key: jax.Array, is_in: jax.Array) -> jax.Array:
        optimizer, params = make(key), jnp.zeros(4)
        state = optimizer.init(params)
        for _ in range(steps):
            total = gradient(params, jnp.full((1, 4), 100.0), is_in[None])
            updates, state = optimizer.update(total, state, params)
            params = optax.apply_updates(params, updates)
        # What Adam has kept of all noisy gradients, or what they add up to.
        return jnp.sum(optax.tree.get(state, "mu", default=params))

    return train


def with_a_canary(make: Any, seed: int, *, engine: str = "auto", steps: int = 1) -> Any:
    """Audit the ε of an optimizer by a canary."""
    claimed = SampledGaussian(NOISE, 1.0, steps, sampling="full").epsilon(DELTA)
    return audit_epsilon(
        _training(make, engine, steps),
        delta=DELTA,
        claimed=claimed,
        trials=20_000,
        gaussian=True,
        key=jax.random.key(seed),
    )


def agreement(keeps: int, seed: int) -> bool:
    """Return whether one engine finds with the first examples what the other finds with all."""
    order = np.random.default_rng(seed).permutation(SIZE)
    batch = jax.tree.map(lambda x: x[order], BATCH)
    book, vmap = (
        jax.jit(clipped, static_argnums=2)(batch, jnp.arange(SIZE) < count, engine)
        for count, engine in ((keeps, "bookkeeping"), (SIZE, "vmap"))
    )
    return bool(norm(jax.tree.map(jnp.subtract, book, vmap)) < 0.005 * SIZE * CLIP)


POISSON = partial(lsdp.PoissonSampler, sampling_rate=RATE)
FIXED = partial(lsdp.FixedSizeSampler, batch_size=round(RATE * COUNT))
SOUND: dict[str, Audit] = {
    **{
        f"{make.__name__}, engine {engine!r}": Audit(
            "sensitivity", partial(sensitivity, _step(make, engine), CLIP / SIZE)
        )
        for make in (lsdp.dp_sgd, lsdp.dp_lssgd)
        for engine in ("bookkeeping", "vmap")
    },
    **{
        f"dp_lsadam, engine {engine!r}": Audit(
            "canary", partial(with_a_canary, lsadam, engine=engine, steps=3)
        )
        for engine in ("bookkeeping", "vmap")
    },
    "a tied weight": Audit(
        "sensitivity", partial(sensitivity, partial(clipped, loss_fn=tied_loss), CLIP)
    ),
    "the noise": Audit("noise", partial(noise_audit, partial(scaled, 1.0))),
    "a run that goes on with other data": Audit("noise", partial(noise_audit, resumed)),
    "PoissonSampler": Audit("sampler", partial(sampled, POISSON, "poisson")),
    "FixedSizeSampler": Audit("sampler", partial(sampled, FIXED, "without_replacement")),
    "both engines": Audit("agreement of both engines", partial(agreement, SIZE)),
}
