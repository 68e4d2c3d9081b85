"""Audit the installed library: `AUDITS` is the table of all audits of `optax-lsdp audit`.

To add an audit, write a function of a key that returns a report, and add it to the table.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing import _claims as claims
from optax_lsdp.auditing import _clipping as clipping
from optax_lsdp.auditing import _devices as devices
from optax_lsdp.auditing._epsilon import EpsilonReport, audit_epsilon
from optax_lsdp.auditing._report import AuditReport, ClaimsReport, StatisticsReport
from optax_lsdp.auditing._statistics import audit_noise, audit_sampler
from optax_lsdp.auditing._training import audit_one_step_of_fit, audit_resumed_runs
from optax_lsdp.clipping import clipped_grad
from optax_lsdp.discrete import add_discrete_gaussian_noise, quantized_grad
from optax_lsdp.noise import add_gaussian_noise
from optax_lsdp.optimizers import privatize
from optax_lsdp.planning import PrivacyPlan

_CLIP_NORM, _NOISE_MULTIPLIER, _DELTA = 0.5, 2.0, 1e-5
_SMALL = {"kernel": (24, 40), "bias": (40,), "a": (5,), "b": (5,), "c": (2, 3), "d": (7,), "e": ()}
_LARGE = {"matrix": (96, 96), "odd": (2**13 + 1,), "even": (2**13 + 2,)}
_OF_PLAN = {"kernel": (20, 30), "bias": (30,), "scale": (30,), "shift": (7,)}
_QUANTIZED = {"a": (240,), "b": (40,), "c": (40,), "d": (3, 5)}
LONGEST_PERIOD = 4096
_DENSE = 32  # audit all steps below 32, and all multiples of 32 up to the longest period
_LAST = 2**31 - 2  # the last step for which the library draws noise
_POWERS = {*(2**power for power in range(5, 31)), *(10**power for power in range(2, 10))}
FAR_STEPS = sorted(
    {*range(_DENSE), *range(0, LONGEST_PERIOD + 1, _DENSE), *range(_LAST - 7, _LAST + 1)}
    | _POWERS
    | {power + 1 for power in _POWERS}
)
_Shapes = dict[str, tuple[int, ...]]


def _zeros(shapes: _Shapes) -> dict[str, jax.Array]:
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def _audit_gaussian_noise(
    shapes: _Shapes, steps: int | Sequence[int], key: jax.Array
) -> StatisticsReport:
    """Test the noise of `add_gaussian_noise` for leaves of these shapes, at these steps."""
    stddev = _NOISE_MULTIPLIER * _CLIP_NORM
    noise, zeros = add_gaussian_noise(stddev, key=key), _zeros(shapes)
    first = jax.jit(noise.init)(zeros)
    update = jax.jit(lambda state: noise.update(zeros, state)[0])
    return audit_noise(lambda step: update(first._replace(step=step)), scale=stddev, steps=steps)


def _sum_of_leaves(params: optax.Params, example: jax.Array) -> jax.Array:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * example


def _noise_of_steps(
    optimizer: optax.GradientTransformation,
    gradient: Callable[..., optax.Updates],
    params: optax.Params,
    steps: int,
) -> list[optax.Updates]:
    """Return the updates of consecutive steps on batches without examples."""

    @jax.jit
    def update(state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
        nobody = gradient(params, jnp.zeros(2), jnp.zeros(2, bool))
        return optimizer.update(nobody, state, params)

    noises, state = [], jax.jit(optimizer.init)(params)
    for _ in range(steps):
        noise, state = update(state)
        noises.append(noise)
    return noises


def _audit_plan_noise(key: jax.Array) -> StatisticsReport:
    """Test whether a plan's optimizer adds the noise that the plan states."""
    plan = claims.poisson_plan()
    optimizer, gradient = plan.optimizer(optax.sgd(1.0), key), plan.clipped_grad(_sum_of_leaves)
    noises = _noise_of_steps(optimizer, gradient, _zeros(_OF_PLAN), plan.steps)
    scale = plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size
    return audit_noise(noises.__getitem__, scale=scale, steps=plan.steps)


def _audit_discrete_noise(key: jax.Array) -> StatisticsReport:
    """Compare discrete noise, in quanta, with a Gaussian of the same scale."""
    params, steps, resolution = _zeros(_QUANTIZED), 16, 2**10
    gradient = quantized_grad(_sum_of_leaves, clip_norm=_CLIP_NORM, resolution=resolution)
    marked = jax.eval_shape(gradient, params, jnp.zeros(2), jnp.zeros(2, bool))["a"]
    noise = add_discrete_gaussian_noise(_NOISE_MULTIPLIER, key=key)

    def quanta(x: jax.Array) -> np.ndarray:  # integers, which `audit_noise` allows to repeat
        return np.rint(np.asarray(x) * resolution / _CLIP_NORM).astype(int)

    noises = jax.tree.map(quanta, _noise_of_steps(noise, gradient, params, steps))
    scale = _NOISE_MULTIPLIER * marked.sensitivity
    return audit_noise(noises.__getitem__, scale=scale, steps=steps)


def _audit_sampler(
    sampling: Literal["poisson", "without_replacement"], key: jax.Array
) -> StatisticsReport:
    """Test the sampler of a plan."""
    size, batch_size = 1000, 50
    plan = PrivacyPlan(
        dataset_size=size,
        expected_batch_size=batch_size,
        steps=1000,
        noise_multiplier=100.0,
        delta=_DELTA,
        sampling=sampling,
        neighbouring="add_remove" if sampling == "poisson" else "replace_one",
    )
    rate, steps = batch_size / size, sorted({*range(300), *FAR_STEPS})
    return audit_sampler(
        plan.sampler(key), dataset_size=size, sampling_rate=rate, sampling=sampling, steps=steps
    )


def _audit_step_with_canary(key: jax.Array) -> EpsilonReport:
    """Attack one step of DP-LSSGD with the worst canary."""
    claimed = SampledGaussian(_NOISE_MULTIPLIER, 1.0, 1, sampling="full").epsilon(_DELTA)
    return audit_epsilon(
        _step_with_canary, delta=_DELTA, claimed=claimed, trials=40_000, gaussian=True, key=key
    )


def _step_with_canary(key: jax.Array, is_in: jax.Array) -> jax.Array:
    """Take a smoothed step on one canary, whose gradient exceeds the clip norm."""
    params, canary = jnp.zeros(4), jnp.full((1, 4), 100.0)
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
    return -jnp.sum(updates)  # along the canary's gradient, a constant, which smoothing preserves


class Audit(NamedTuple):
    """An audit of the library: a function of a key that returns a report."""

    run: Callable[[jax.Array], AuditReport]
    in_child: bool = False  # it needs eight devices, or shares the work between two processes
    needs_orbax: bool = False  # it calls `fit`, which needs Orbax and tqdm


_by_search, _hard_models = clipping.audit_clipping_by_search, clipping.audit_hard_models
AUDITS = {
    "Poisson sampler": Audit(partial(_audit_sampler, "poisson")),
    "fixed-size sampler": Audit(partial(_audit_sampler, "without_replacement")),
    "clipping by search, engine 'bookkeeping'": Audit(partial(_by_search, "bookkeeping")),
    "clipping by search, engine 'vmap'": Audit(partial(_by_search, "vmap")),
    "clipping of hard models, engine 'bookkeeping'": Audit(partial(_hard_models, "bookkeeping")),
    "noise": Audit(partial(_audit_gaussian_noise, _SMALL, FAR_STEPS)),
    "noise of large leaves": Audit(partial(_audit_gaussian_noise, _LARGE, 6)),
    "a step of DP-LSSGD with and without a canary": Audit(_audit_step_with_canary),
    "a plan": Audit(claims.audit_plan),
    "noise of a plan's optimizer": Audit(_audit_plan_noise),
    "likely mistakes": Audit(claims.audit_likely_mistakes),
    "quantized sums": Audit(claims.audit_quantized_sums),
    "discrete noise": Audit(_audit_discrete_noise),
    "clipping of hard models, engine 'vmap'": Audit(partial(_hard_models, "vmap"), True),
    "clipping of cancelling rows": Audit(
        partial(_hard_models, "bookkeeping", models=clipping.UNCERTAIN), True
    ),
    "clipping of hard models, rounded as on a TPU": Audit(
        partial(clipping.audit_rounding, "tpu"), True
    ),
    "clipping in microbatches": Audit(clipping.audit_microbatches, True),
    "noise on several devices": Audit(devices.audit_sharded_noise, True),
    "clipping on several devices": Audit(devices.audit_sharded_clipping, True),
    "parameters split over devices": Audit(devices.audit_split_parameters, True),
    "collectives on several devices": Audit(devices.audit_collectives, True),
    "a step of fit on neighbouring data": Audit(audit_one_step_of_fit, True, needs_orbax=True),
    "resumed runs": Audit(audit_resumed_runs, True, needs_orbax=True),
}


def audit_library(
    key: jax.Array, started: Callable[[str], object] = lambda name: None
) -> Iterator[tuple[str, AuditReport]]:
    """Audit clipping, noise, samplers, plans and runs of this installation, and yield each report.

    The command `optax-lsdp audit` prints these reports. If there are fewer than eight devices,
    a child process with eight simulated CPU devices runs some of the audits. If Orbax or tqdm is
    not installed, the audits of `fit` are skipped, and a warning names them.

    `key` must be a Threefry key, JAX's default. `started` is called with each audit's name.

    >>> name, report = next(audit_library(jax.random.key(0)))
    >>> name, bool(report)
    ('Poisson sampler', True)
    """
    names = list(AUDITS)
    if find_spec("orbax") is None or find_spec("tqdm") is None:
        skipped = [name for name in names if AUDITS[name].needs_orbax]
        names = [name for name in names if name not in skipped]
        warnings.warn(
            f"Skipped {' and '.join(skipped)}, which need Orbax and tqdm; run pip install "
            "'optax-lsdp[training]'.",
            stacklevel=2,
        )
    has_devices = jax.device_count() >= devices.DEVICES
    in_child = [] if has_devices else [name for name in names if AUDITS[name].in_child]
    nothing: Iterator[AuditReport] = iter(())
    child = devices.reports_from_child(in_child, key) if in_child else nullcontext(nothing)
    with child as reports:
        for name in names:
            started(name)
            yield name, next(reports) if name in in_child else run_audit(name, key)


def run_audit(name: str, key: jax.Array) -> AuditReport:
    """Run one audit of the library; an exception counts as a rejection."""
    index = list(AUDITS).index(name)
    try:
        return AUDITS[name].run(jax.random.fold_in(key, index))
    except Exception as error:
        return ClaimsReport({"the audit can run": f"{type(error).__name__}: {error}"})
