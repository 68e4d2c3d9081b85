"""The library on trial: on this machine, with these versions, each claim is held to an audit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing._canaries import EpsilonReport, audit_epsilon
from optax_lsdp.auditing._child import Child
from optax_lsdp.auditing._clipping import (
    audit_cancelling_rows,
    audit_clipping,
    audit_hard_models,
    audit_microbatches,
)
from optax_lsdp.auditing._devices import (
    DEVICES,
    audit_collectives,
    audit_sharded_clipping,
    audit_sharded_noise,
    audit_split_parameters,
)
from optax_lsdp.auditing._grids import audit_grid, audit_grid_noise
from optax_lsdp.auditing._misuse import audit_misuse
from optax_lsdp.auditing._noise import audit_noise
from optax_lsdp.auditing._plans import audit_plan, audit_plan_noise
from optax_lsdp.auditing._renewal import audit_renewal
from optax_lsdp.auditing._report import ClaimsReport, Report, StatisticsReport
from optax_lsdp.auditing._samplers import audit_sampler
from optax_lsdp.auditing._steps import FAR_STEPS
from optax_lsdp.auditing._training import audit_training
from optax_lsdp.clipping import clipped_grad
from optax_lsdp.noise import add_gaussian_noise
from optax_lsdp.optimizers import privatize
from optax_lsdp.planning import PrivacyPlan

_CLIP_NORM, _NOISE_MULTIPLIER, _DELTA = 0.5, 2.0, 1e-5
_COUNT, _RATE = 1000, 0.05
_RUNS = ("runs on neighbouring data", "resumed runs")  # which need Orbax
_SAMPLED = sorted({*range(300), *FAR_STEPS})
_SMALL = {"kernel": (24, 40), "bias": (40,), "a": (5,), "b": (5,), "c": (2, 3), "d": (7,), "e": ()}
_LARGE = {"matrix": (96, 96), "odd": (2**13 + 1,), "even": (2**13 + 2,)}


def audit_library(
    key: jax.Array, started: Callable[[str], Any] = lambda name: None
) -> Iterator[tuple[str, Report]]:
    """Audit clipping, noise, samplers, plans and whole steps of this installation, one by one.

    It is what `optax-lsdp audit` runs. What needs eight devices runs beside the rest, in a process
    of its own with as many simulated CPU devices, unless there are so many here. Runs of
    `fit` are left out, with a warning, where Orbax is not installed.

    Args:
        key: of all audits, of JAX's default generator, Threefry.
        started: is told the name of each audit before it begins.

    >>> name, report = next(audit_library(jax.random.key(0)))
    >>> name, bool(report)
    ("sensitivity of clipping, engine 'bookkeeping'", True)
    """
    here, apart = list(AUDITS), list(AUDITS_APART)
    if find_spec("orbax") is None or find_spec("tqdm") is None:
        apart = [name for name in apart if name not in _RUNS]
        warnings.warn(
            f"{' and '.join(_RUNS)} are not audited without Orbax and tqdm: pip install "
            "'optax-lsdp[training]'.",
            stacklevel=2,
        )
    if jax.device_count() >= DEVICES:
        here, apart = [*here, *apart], []
    with Child(apart, key, DEVICES) as child:
        for name in here:
            started(name)
            yield name, run_audit(name, key)
        for name in apart:
            started(name)
            yield name, child.report(name)


def run_audit(name: str, key: jax.Array) -> Report:
    """Run one audit of the library; one that breaks off is a rejection."""
    audits = AUDITS | AUDITS_APART
    place = list(audits).index(name)
    try:
        return audits[name](jax.random.fold_in(key, place))
    except Exception as error:
        return ClaimsReport({"it can be audited": f"{type(error).__name__}: {error}"})


def _noise(shapes: Any, steps: Any, key: jax.Array) -> StatisticsReport:
    scale = _NOISE_MULTIPLIER * _CLIP_NORM
    link = add_gaussian_noise(scale, key=key)
    zeros = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    first = link.init(zeros)
    update = jax.jit(lambda state: link.update(zeros, state)[0])
    return audit_noise(lambda step: update(first._replace(step=step)), scale=scale, steps=steps)


def _sampler(facts: dict[str, Any], key: jax.Array) -> StatisticsReport:
    """Audit the sampler of a plan."""
    plan = PrivacyPlan(
        dataset_size=_COUNT,
        expected_batch_size=round(_RATE * _COUNT),
        steps=1000,
        noise_multiplier=100.0,
        delta=_DELTA,
        **facts,
    )
    return audit_sampler(
        plan.sampler(key),
        dataset_size=_COUNT,
        sampling_rate=_RATE,
        sampling=facts["sampling"],
        steps=_SAMPLED,
    )


def _canary(key: jax.Array) -> EpsilonReport:
    one = SampledGaussian(_NOISE_MULTIPLIER, sampling_rate=1.0, steps=1, sampling="full")
    return audit_epsilon(
        _step, delta=_DELTA, claimed=one.epsilon(_DELTA), trials=40_000, gaussian=True, key=key
    )


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


AUDITS: dict[str, Callable[[jax.Array], Report]] = {
    "sensitivity of clipping, engine 'bookkeeping'": partial(audit_clipping, "bookkeeping"),
    "sensitivity of clipping, engine 'vmap'": partial(audit_clipping, "vmap"),
    "clipping of hard models, engine 'bookkeeping'": partial(audit_hard_models, "bookkeeping"),
    "noise": partial(_noise, _SMALL, FAR_STEPS),
    "noise of large leaves": partial(_noise, _LARGE, 6),
    "Poisson sampler": partial(_sampler, {"sampling": "poisson"}),
    "fixed-size sampler": partial(
        _sampler, {"sampling": "without_replacement", "neighbouring": "replace_one"}
    ),
    "a step of DP-LSSGD, with and without a canary": _canary,
    "a plan": audit_plan,
    "noise of a plan's optimizer": audit_plan_noise,
    "likely mistakes": audit_misuse,
    "sums on a grid": audit_grid,
    "noise on a grid": audit_grid_noise,
}
AUDITS_APART: dict[str, Callable[[jax.Array], Report]] = {  # half of the work, beside the rest
    "clipping of hard models, engine 'vmap'": partial(audit_hard_models, "vmap"),
    "clipping of rows that cancel": audit_cancelling_rows,
    "clipping in microbatches": audit_microbatches,
    "noise on several devices": audit_sharded_noise,
    "clipping on several devices": audit_sharded_clipping,
    "parameters split over devices": audit_split_parameters,
    "collectives on several devices": audit_collectives,
    _RUNS[0]: audit_training,
    _RUNS[1]: audit_renewal,
}
