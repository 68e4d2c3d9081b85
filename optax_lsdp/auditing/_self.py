"""The library on trial: on this machine, with these versions, each claim is held to an audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing._canaries import audit_epsilon
from optax_lsdp.auditing._noise import audit_noise
from optax_lsdp.auditing._report import Report
from optax_lsdp.auditing._samplers import audit_sampler
from optax_lsdp.auditing._sensitivity import audit_sensitivity
from optax_lsdp.clipping import clip_per_example, clipped_grad
from optax_lsdp.noise import add_gaussian_noise
from optax_lsdp.optimizers import privatize
from optax_lsdp.sampling import FixedSizeSampler, PoissonSampler

_CLIP_NORM, _NOISE_MULTIPLIER, _DELTA = 0.5, 2.0, 1e-5
_SIZE, _COUNT, _RATE = 16, 1000, 0.05


def audit_library(key: jax.Array) -> Iterator[tuple[str, Report]]:
    """Audit clipping, noise, samplers and a whole step of this installation, one after another.

    It is what `optax-lsdp audit` runs.

    >>> name, report = next(audit_library(jax.random.key(0)))
    >>> name, bool(report)
    ("sensitivity of clipping, engine 'bookkeeping'", True)
    """
    keys = iter(jax.random.split(key, 8))
    params = {"kernel": jax.random.normal(next(keys), (12, 8)), "bias": jnp.zeros(8)}
    batch = jax.random.normal(next(keys), (_SIZE, 12))
    search = next(keys)
    for engine in ("bookkeeping", "vmap"):
        yield (
            f"sensitivity of clipping, engine {engine!r}",
            audit_sensitivity(_clipping(engine, params), batch, declared=_CLIP_NORM, key=search),
        )
    scale = _NOISE_MULTIPLIER * _CLIP_NORM
    many = {"kernel": jnp.zeros((120, 80)), "bias": jnp.zeros(80)}
    yield "noise", audit_noise(_noise(many, scale, next(keys)), scale=scale)
    facts: Any = {"dataset_size": _COUNT, "sampling_rate": _RATE}
    poisson = PoissonSampler(_COUNT, _RATE, next(keys))
    yield "Poisson sampler", audit_sampler(poisson, **facts)
    fixed = FixedSizeSampler(_COUNT, round(_RATE * _COUNT), next(keys))
    yield "fixed-size sampler", audit_sampler(fixed, **facts, sampling="without_replacement")
    one = SampledGaussian(_NOISE_MULTIPLIER, sampling_rate=1.0, steps=1, sampling="full")
    yield (
        "a step of DP-LSSGD, with and without a canary",
        audit_epsilon(
            _step,
            delta=_DELTA,
            claimed=one.epsilon(_DELTA),
            trials=40_000,
            gaussian=True,
            key=next(keys),
        ),
    )


def _loss(params: Any, example: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(example @ params["kernel"] + params["bias"]) ** 2)


def _clipping(engine: Any, params: Any) -> Callable[[Any, jax.Array], Any]:
    gradient = clipped_grad(_loss, clip_norm=_CLIP_NORM, engine=engine)
    link = clip_per_example(_CLIP_NORM)

    def release(batch: Any, mask: jax.Array) -> Any:
        return link.update(gradient(params, batch, mask), link.init(params), params)[0]

    return release


def _noise(params: Any, scale: float, key: jax.Array) -> Callable[[Any], Any]:
    link = add_gaussian_noise(scale, key=key)
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.jit(lambda step: link.update(zeros, link.init(params)._replace(step=step))[0])


def _step(key: jax.Array, is_in: jax.Array) -> jax.Array:
    """Take a smoothed step on a batch of one, whose gradient is all of the clip norm."""
    params = jnp.zeros(4)
    canary = jnp.full((1, 4), 100.0)
    optimizer = privatize(
        optax.sgd(1.0),
        clip_norm=_CLIP_NORM,
        noise_multiplier=_NOISE_MULTIPLIER,
        expected_batch_size=1,
        smoothing=1.0,
        key=key,
    )
    total = clipped_grad(jnp.vdot, clip_norm=_CLIP_NORM)(params, canary, is_in[None])
    updates, _ = optimizer.update(total, optimizer.init(params), params)
    return -jnp.sum(updates)  # along the canary's gradient, which smoothing leaves as it is
