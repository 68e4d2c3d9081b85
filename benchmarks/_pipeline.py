"""Audits of correct pipelines, made of the library's parts; each must pass.

`SOUND` is the table of these audits. `_planted.py` breaks the same pipelines.
"""

import contextlib
import tempfile
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing import (
    EpsilonReport,
    SensitivityReport,
    StatisticsReport,
    audit_epsilon,
    audit_noise,
    audit_sampler,
    audit_sensitivity,
)
from optax_lsdp.sampling import Batch

Tree = optax.Params  # any tree of arrays
Report = EpsilonReport | SensitivityReport | StatisticsReport
Engine = Literal["auto", "bookkeeping", "vmap"]
Loss = Callable[[Tree, Tree], jax.Array]
Release = Callable[[Tree, jax.Array], Tree]  # of a batch and a mask
Noise = Callable[[int], Tree]  # of a step
MakeOptimizer = Callable[[jax.Array], optax.GradientTransformation]  # of a key

SIZE, CLIP, NOISE, DELTA = 16, 1.0, 2.0, 1e-5
COUNT, RATE = 1000, 0.05
STEPS = 48  # enough to detect noise that is 10 % too small
INTERRUPTED = 16  # steps of a run before it is resumed with other data
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


class Sampler(Protocol):
    """What `audit_sampler` needs."""

    def batch(self, step: int, /) -> Batch:
        """Return the batch of a step."""


class Audit(NamedTuple):
    """The kind of an audit, and a function of a seed; its result is false if the audit rejects."""

    by: str
    run: Callable[[int], Report | bool]


def loss(params: Tree, example: Tree) -> jax.Array:
    """Return the loss of a network with one hidden layer."""
    hidden = jnp.tanh(example["x"] @ params["first"] + params["bias"])
    return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)


def tied_loss(params: Tree, example: Tree) -> jax.Array:
    """Return the loss of a network that uses one square matrix twice."""
    hidden = jnp.tanh(example["y"] @ params["second"])
    return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)


def norm(tree: Tree) -> jax.Array:
    """Return the ℓ₂ norm of a tree."""
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def clipped(batch: Tree, mask: jax.Array, engine: Engine = "auto", loss_fn: Loss = loss) -> Tree:
    """Return the clipped sum that the library computes."""
    gradient = lsdp.clipped_grad(loss_fn, clip_norm=CLIP, engine=engine)
    clip = lsdp.clip_per_example(CLIP)
    return clip.update(gradient(PARAMS, batch, mask), clip.init(PARAMS), PARAMS)[0]


def sensitivity(
    release: Release, declared: float, seed: int, **options: int | str
) -> SensitivityReport:
    """Audit the sensitivity of a release of `BATCH`."""
    key = jax.random.key(seed)
    return audit_sensitivity(release, BATCH, declared=declared, searches=12, key=key, **options)


def step(make: Callable[..., optax.GradientTransformation], engine: Engine) -> Release:
    """Return a whole step with a fixed key, so that its noise cancels in differences."""
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

    def release(batch: Tree, mask: jax.Array) -> Tree:
        return optimizer.update(gradient(PARAMS, batch, mask), optimizer.init(PARAMS), PARAMS)[0]

    return release


@partial(jax.jit, static_argnums=0)
def library_noise(stddev: float, key: jax.Array, step: int) -> Tree:
    """Return the noise that `add_gaussian_noise` adds in a step."""
    noise = lsdp.add_gaussian_noise(stddev, key=key)
    return noise.update(ZEROS, noise.init(PARAMS)._replace(step=jnp.asarray(step)))[0]


def noise_audit(make: Callable[[int], Noise], seed: int) -> StatisticsReport:
    """Audit the noise that `make(seed)` returns for each step."""
    return audit_noise(make(seed), scale=NOISE * CLIP, steps=STEPS)


def scaled(factor: float, seed: int) -> Noise:
    """Return the library's noise with `factor` times the right scale."""
    return partial(library_noise, factor * NOISE * CLIP, jax.random.key(seed))


def resumed(seed: int) -> Noise:
    """Interrupt `fit`, resume it from step 8 with other data, and return the noise of all steps."""
    plan = lsdp.PrivacyPlan(
        dataset_size=SIZE,
        expected_batch_size=1,
        steps=2 * STEPS,
        noise_multiplier=NOISE,
        delta=DELTA,
        clip_norm=CLIP,
    )
    # This optimizer replaces the parameters by the noise of the step.
    replace = optax.stateless(lambda updates, params: jax.tree.map(jnp.subtract, updates, params))
    seen: list[Tree] = []

    def interrupt(report: training.StepReport) -> None:
        seen.append(jax.tree.map(np.array, report.params))
        if len(seen) in (INTERRUPTED, STEPS):
            raise InterruptedError

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        for data in (BATCH, jax.tree.map(jnp.add, BATCH, BATCH)):
            with contextlib.suppress(InterruptedError):
                training.fit(
                    plan,
                    lambda params, example: 0 * loss(params, example),
                    ZEROS,
                    data,
                    optimizer=replace,
                    folder=folder,
                    save_every=8,
                    callbacks=[interrupt],
                    progress=False,
                    key=jax.random.key(seed),
                )
    return seen.__getitem__


def sampled(
    make: Callable[..., Sampler],
    sampling: Literal["poisson", "without_replacement"],
    seed: int,
) -> StatisticsReport:
    """Audit a sampler as if it had the given sampling scheme."""
    sampler = make(COUNT, key=jax.random.key(seed))
    return audit_sampler(sampler, dataset_size=COUNT, sampling_rate=RATE, sampling=sampling)


def lsadam(key: jax.Array) -> optax.GradientTransformation:
    """Return DP-LSAdam for batches of one example."""
    return lsdp.dp_lsadam(
        1.0, clip_norm=CLIP, noise_multiplier=NOISE, expected_batch_size=1, key=key
    )


@cache  # equal arguments return the same function, so that it is compiled once
def _training(
    make: MakeOptimizer, engine: Engine, steps: int
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return a training on one canary, whose gradient exceeds the clip norm."""
    gradient = lsdp.clipped_grad(jnp.vdot, clip_norm=CLIP, engine=engine)

    def train(key: jax.Array, is_in: jax.Array) -> jax.Array:
        optimizer, params = make(key), jnp.zeros(4)
        state = optimizer.init(params)
        for _ in range(steps):
            total = gradient(params, jnp.full((1, 4), 100.0), is_in[None])
            updates, state = optimizer.update(total, state, params)
            params = optax.apply_updates(params, updates)
        # The score is the sum of Adam's first moment, or of the parameters without Adam.
        return jnp.sum(optax.tree.get(state, "mu", default=params))

    return train


def with_a_canary(
    make: MakeOptimizer, seed: int, *, engine: Engine = "auto", steps: int = 1
) -> EpsilonReport:
    """Attack some steps of an optimizer with a canary."""
    claimed = SampledGaussian(NOISE, 1.0, steps, sampling="full").epsilon(DELTA)
    return audit_epsilon(
        _training(make, engine, steps),
        delta=DELTA,
        claimed=claimed,
        trials=20_000,
        gaussian=True,
        key=jax.random.key(seed),
    )


def agreement(kept: int, seed: int) -> bool:
    """Tell whether one engine's sum of the first examples equals the other engine's of all."""
    order = np.random.default_rng(seed).permutation(SIZE)
    batch = jax.tree.map(lambda x: x[order], BATCH)
    bookkeeping, vmap = (
        _clipped_in_jit(batch, jnp.arange(SIZE) < count, engine)
        for count, engine in ((kept, "bookkeeping"), (SIZE, "vmap"))
    )
    return bool(norm(jax.tree.map(jnp.subtract, bookkeeping, vmap)) < 0.005 * SIZE * CLIP)


_clipped_in_jit = jax.jit(clipped, static_argnums=2)
POISSON = partial(lsdp.PoissonSampler, sampling_rate=RATE)
FIXED = partial(lsdp.FixedSizeSampler, batch_size=round(RATE * COUNT))
SOUND: dict[str, Audit] = {
    **{
        f"{make.__name__}, engine {engine!r}": Audit(
            "sensitivity", partial(sensitivity, step(make, engine), CLIP / SIZE)
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
