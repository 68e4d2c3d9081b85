"""Our own pipeline as it is: a seed goes in, an audit that must pass comes out."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_lsdp as lsdp
from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing import audit_epsilon, audit_noise, audit_sampler, audit_sensitivity

SIZE, CLIP, NOISE, DELTA = 16, 1.0, 2.0, 1e-5
COUNT, RATE = 1000, 0.05
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


def library_noise(deviation: float, key: jax.Array) -> Any:
    """Return what the library's link adds in a step."""
    link = lsdp.add_gaussian_noise(deviation, key=key)
    return jax.jit(lambda step: link.update(ZEROS, link.init(PARAMS)._replace(step=step))[0])


def resumed(seed: int, *, renewed: bool) -> Any:
    """Sixteen steps; then it falls back to the eighth, on other data."""
    first = library_noise(NOISE, jax.random.key(seed))
    second = library_noise(NOISE, jax.random.key(seed + 1000 * renewed))
    return lambda step: first(step) if step < 16 else second(step - 8)


def noise_audit(make: Callable[[int], Any], seed: int) -> Any:
    """Audit the noise that a function of the seed makes."""
    return audit_noise(make(seed), scale=NOISE * CLIP)


def scaled(factor: float, seed: int) -> Any:
    """Return the library's noise, of which there is more or less than there should be."""
    return library_noise(factor * NOISE * CLIP, jax.random.key(seed))


def sampled(kind: Any, sampling: Any, seed: int) -> Any:
    """Audit a sampler as what it is declared to be."""
    sampler = kind(COUNT, key=jax.random.key(seed))
    facts: Any = {"dataset_size": COUNT, "sampling_rate": RATE, "sampling": sampling}
    return audit_sampler(sampler, **facts)


def adam_with_a_canary(engine: str, seed: int, trials: int = 20_000) -> Any:
    """Audit three steps of DP-LSAdam, whose canary has the largest gradient that it may have."""
    steps = 3

    def train(key: jax.Array, is_in: jax.Array) -> jax.Array:
        params = jnp.zeros(4)
        optimizer = lsdp.dp_lsadam(
            1.0, clip_norm=CLIP, noise_multiplier=NOISE, expected_batch_size=1, key=key
        )
        gradient = lsdp.clipped_grad(jnp.vdot, clip_norm=CLIP, engine=engine)
        state = optimizer.init(params)
        for _ in range(steps):
            total = gradient(params, jnp.full((1, 4), 100.0), is_in[None])
            updates, state = optimizer.update(total, state, params)
            params = optax.apply_updates(params, updates)
        return jnp.sum(optax.tree.get(state, "mu"))  # what Adam has kept of all noisy gradients

    claimed = SampledGaussian(NOISE, 1.0, steps, sampling="full").epsilon(DELTA)
    key = jax.random.key(seed)
    return audit_epsilon(train, delta=DELTA, claimed=claimed, trials=trials, gaussian=True, key=key)


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
        f"dp_lsadam, engine {engine!r}": Audit("canary", partial(adam_with_a_canary, engine))
        for engine in ("bookkeeping", "vmap")
    },
    "a tied weight": Audit(
        "sensitivity", partial(sensitivity, partial(clipped, loss_fn=tied_loss), CLIP)
    ),
    "the noise": Audit("noise", partial(noise_audit, partial(scaled, 1.0))),
    "a resumed run with other noise": Audit(
        "noise", partial(noise_audit, partial(resumed, renewed=True))
    ),
    "PoissonSampler": Audit("sampler", partial(sampled, POISSON, "poisson")),
    "FixedSizeSampler": Audit("sampler", partial(sampled, FIXED, "without_replacement")),
}
