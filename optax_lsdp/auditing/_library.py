"""Audit the installed library: `AUDITS` is the table of all audits of `optax-lsdp audit`."""

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import IO, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.auditing import _claims as claims
from optax_lsdp.auditing import _clipping as clipping
from optax_lsdp.auditing._epsilon import EpsilonReport, audit_epsilon
from optax_lsdp.auditing._report import AuditReport, ClaimsReport, StatisticsReport
from optax_lsdp.auditing._statistics import audit_noise, audit_sampler
from optax_lsdp.auditing._training import (
    audit_correlated_runs,
    audit_one_step_of_fit,
    audit_one_step_with_users,
    audit_resumed_runs,
)
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
_LAST = 2**31 - 2  # the last step for which the library draws noise
_POWERS = {*(2**power for power in range(5, 31)), *(10**power for power in range(2, 10))}
# For every period p up to LONGEST_PERIOD, two of these steps are a multiple of p apart.
FAR_STEPS = sorted(
    {*range(32), *range(0, LONGEST_PERIOD + 1, 32), *range(_LAST - 7, _LAST + 1)}
    | {power + more for power in _POWERS for more in (0, 1)}
)
_Shapes = dict[str, tuple[int, ...]]
_CHILD = "from optax_lsdp.auditing._library import _serve_parent; _serve_parent()"


def _zeros(shapes: _Shapes) -> dict[str, jax.Array]:
    return {name: jnp.zeros(shape) for name, shape in shapes.items()}


def _audit_gaussian_noise(
    shapes: _Shapes, steps: int | Sequence[int], key: jax.Array
) -> StatisticsReport:
    """Test the noise that `add_gaussian_noise` adds to leaves of these shapes, at these steps."""
    stddev = _NOISE_MULTIPLIER * _CLIP_NORM
    noise, zeros = add_gaussian_noise(stddev, key=key), _zeros(shapes)
    first = jax.jit(noise.init)(zeros)
    update = jax.jit(lambda state: noise.update(zeros, state)[0])
    return audit_noise(lambda step: update(first._replace(step=step)), scale=stddev, steps=steps)


def _audit_sharded_noise(key: jax.Array) -> StatisticsReport:
    """Test the noise of leaves that `shard_map` splits over devices."""
    n, split, columns = clipping.DEVICES, clipping.SPLIT, clipping.COLUMNS
    zeros = _zeros({"kernel": (8 * n, 6), "small": (n, 2), "columns": (5, 2 * n), "bias": (12,)})
    specs = {"kernel": split, "small": split, "columns": columns, "bias": clipping.WHOLE}
    noise = add_gaussian_noise(1.0, key=key, shard_specs=specs)

    def update(zeros: optax.Updates, step: jax.Array) -> optax.Updates:
        return noise.update(zeros, noise.init(zeros)._replace(step=step))[0]

    shards = clipping.shard_map(update, (specs, clipping.WHOLE), specs)
    return audit_noise(lambda step: shards(zeros, jnp.int32(step)), scale=1.0, steps=24)


def _sum_of_leaves(params: optax.Params, example: jax.Array) -> jax.Array:
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * example


def _noise_of_steps(
    optimizer: optax.GradientTransformation,
    gradient: Callable[..., optax.Updates],
    params: optax.Params,
    steps: int,
) -> list[optax.Updates]:
    """Return the updates of the first steps. Batches are empty, so updates are pure noise."""

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
    """Test whether a plan's optimizer adds as much noise as the plan says."""
    plan = claims.poisson_plan()
    optimizer, gradient = plan.optimizer(optax.sgd(1.0), key), plan.clipped_grad(_sum_of_leaves)
    noises = _noise_of_steps(optimizer, gradient, _zeros(_OF_PLAN), plan.steps)
    scale = plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size
    return audit_noise(noises.__getitem__, scale=scale, steps=plan.steps)


def _audit_correlated_noise(key: jax.Array) -> StatisticsReport:
    """Test whether the matrix C of a plan turns its correlated noise into independent noise."""
    cyclic, ordered = claims.correlated_plans()
    whitened: list[dict[str, np.ndarray]] = [{} for _ in range(cyclic.steps)]
    for plan, one_key in zip((cyclic, ordered), jax.random.split(key), strict=True):
        optimizer = plan.optimizer(optax.sgd(1.0), one_key)
        gradient = plan.clipped_grad(_sum_of_leaves)
        noises = _noise_of_steps(optimizer, gradient, _zeros(_OF_PLAN), plan.steps)
        scale = plan.noise_multiplier * plan.clip_norm / plan.expected_batch_size
        for name in _OF_PLAN:
            rows = np.stack([np.asarray(noise[name], np.float64) for noise in noises]) / scale
            drawn = np.einsum("ts,s...->t...", claims.dense_matrix(plan), rows)
            for step, row in enumerate(drawn):
                whitened[step][f"{name}, {plan.sampling}"] = row
    return audit_noise(whitened.__getitem__, scale=1.0, steps=cyclic.steps)


def _audit_discrete_noise(key: jax.Array) -> StatisticsReport:
    """Test whether discrete noise, in quanta, is close to Gaussian noise of the same scale."""
    params, steps, resolution = _zeros(_QUANTIZED), 16, 2**10
    gradient = quantized_grad(_sum_of_leaves, clip_norm=_CLIP_NORM, resolution=resolution)
    marked = jax.eval_shape(gradient, params, jnp.zeros(2), jnp.zeros(2, bool))["a"]
    noise = add_discrete_gaussian_noise(_NOISE_MULTIPLIER, key=key)

    def quanta(x: jax.Array) -> np.ndarray:  # `audit_noise` allows integers to repeat
        return np.rint(np.asarray(x) * resolution / _CLIP_NORM).astype(int)

    noises = jax.tree.map(quanta, _noise_of_steps(noise, gradient, params, steps))
    scale = _NOISE_MULTIPLIER * marked.sensitivity
    return audit_noise(noises.__getitem__, scale=scale, steps=steps)


def _audit_sampler(
    sampling: Literal["poisson", "without_replacement"], key: jax.Array
) -> StatisticsReport:
    plan = PrivacyPlan(
        dataset_size=1000,
        expected_batch_size=50,
        steps=1000,
        noise_multiplier=100.0,
        delta=_DELTA,
        sampling=sampling,
        neighbouring="add_remove" if sampling == "poisson" else "replace_one",
    )
    steps = sorted({*range(300), *FAR_STEPS})
    return audit_sampler(
        plan.sampler(key), dataset_size=1000, sampling_rate=0.05, sampling=sampling, steps=steps
    )


def _audit_step_with_canary(key: jax.Array) -> EpsilonReport:
    """Attack one step of DP-LSSGD with the worst canary, whose gradient exceeds the clip norm."""
    params, canary = jnp.zeros(4), jnp.full((1, 4), 100.0)
    privatize_sgd = partial(privatize, optax.sgd(1.0), expected_batch_size=1, smoothing=1.0)

    def take_step(key: jax.Array, is_in: jax.Array) -> jax.Array:
        optimizer = privatize_sgd(clip_norm=_CLIP_NORM, noise_multiplier=_NOISE_MULTIPLIER, key=key)
        total = clipped_grad(jnp.vdot, clip_norm=_CLIP_NORM)(params, canary, is_in[None])
        updates, _ = optimizer.update(total, optimizer.init(params), params)
        return -jnp.sum(updates)  # the part along the canary's gradient, which smoothing keeps

    claimed = SampledGaussian(_NOISE_MULTIPLIER, 1.0, 1, sampling="full").epsilon(_DELTA)
    return audit_epsilon(
        take_step, delta=_DELTA, claimed=claimed, trials=40_000, gaussian=True, key=key
    )


class Audit(NamedTuple):
    """An audit of the library: a function of a key that returns a report."""

    run: Callable[[jax.Array], AuditReport]
    in_child: bool = False  # whether the child process, if there is one, runs this audit
    needs_orbax: bool = False  # whether the audit calls `fit`, which needs Orbax and tqdm


_by_search, _hard_models = clipping.audit_clipping_by_search, clipping.audit_hard_models
_bookkeeping = partial(_hard_models, "bookkeeping")
AUDITS = {
    "Poisson sampler": Audit(partial(_audit_sampler, "poisson")),
    "fixed-size sampler": Audit(partial(_audit_sampler, "without_replacement")),
    "clipping by search, engine 'bookkeeping'": Audit(partial(_by_search, "bookkeeping")),
    "clipping by search, engine 'vmap'": Audit(partial(_by_search, "vmap")),
    "clipping of hard models, engine 'bookkeeping'": Audit(_bookkeeping),
    "noise": Audit(partial(_audit_gaussian_noise, _SMALL, FAR_STEPS)),
    "noise of large leaves": Audit(partial(_audit_gaussian_noise, _LARGE, 6)),
    "a step of DP-LSSGD with and without a canary": Audit(_audit_step_with_canary),
    "a plan": Audit(claims.audit_plan),
    "noise of a plan's optimizer": Audit(_audit_plan_noise),
    "likely mistakes": Audit(claims.audit_likely_mistakes),
    "quantized sums": Audit(claims.audit_quantized_sums),
    "discrete noise": Audit(_audit_discrete_noise),
    "clipping of hard models, engine 'vmap'": Audit(partial(_hard_models, "vmap"), True),
    "clipping of cancelling rows": Audit(partial(_bookkeeping, models=clipping.UNCERTAIN), True),
    "clipping of hard models, rounded as on a TPU": Audit(
        partial(_bookkeeping, platform="tpu"), True
    ),
    "clipping in microbatches": Audit(clipping.audit_microbatches, True),
    "noise on several devices": Audit(_audit_sharded_noise, True),
    "clipping on several devices": Audit(clipping.audit_sharded_clipping, True),
    "parameters split over devices": Audit(clipping.audit_split_parameters, True),
    "collectives on several devices": Audit(clipping.audit_collectives, True),
    "a step of fit on neighbouring data": Audit(audit_one_step_of_fit, True, needs_orbax=True),
    "resumed runs": Audit(audit_resumed_runs, True, needs_orbax=True),
    "a step of fit with and without a user": Audit(
        audit_one_step_with_users, True, needs_orbax=True
    ),
    "plans with correlated noise": Audit(claims.audit_correlated_plan),
    "correlated noise": Audit(_audit_correlated_noise),
    "resumed runs with correlated noise": Audit(audit_correlated_runs, True, needs_orbax=True),
}


def audit_library(
    key: jax.Array, started: Callable[[str], object] = lambda name: None
) -> Iterator[tuple[str, AuditReport]]:
    """Audit this installation, and yield the name and the report of each audit.

    Audits test clipping, noise, samplers, plans and runs. The command `optax-lsdp audit` prints
    their reports. If there are fewer than eight devices, a child process with eight simulated CPU
    devices runs some of the audits. If Orbax or tqdm is not installed, a warning names the audits
    that are skipped.

    `key` must be a Threefry key, JAX's default. `started` is called with the name of each audit
    before it runs.

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
            "'.[training]' in a clone of the repository.",
            stacklevel=2,
        )
    has_devices = jax.device_count() >= clipping.DEVICES
    in_child = [] if has_devices else [name for name in names if AUDITS[name].in_child]
    none: Iterator[AuditReport] = iter(())
    with reports_from_child(in_child, key) if in_child else nullcontext(none) as reports:
        for name in names:
            started(name)
            yield name, next(reports) if name in in_child else run_audit(name, key)


def run_audit(name: str, key: jax.Array) -> AuditReport:
    """Run one audit of the library. An audit that raises counts as failed."""
    try:
        return AUDITS[name].run(jax.random.fold_in(key, list(AUDITS).index(name)))
    except Exception as error:
        return ClaimsReport({"the audit can run": f"{type(error).__name__}: {error}"})


@contextmanager
def reports_from_child(names: Sequence[str], key: jax.Array) -> Iterator[Iterator[AuditReport]]:
    """Run audits in a child process, one after another, and yield an iterator of their reports.

    The child process has eight simulated CPU devices. It ends when the `with` block ends.
    """
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    count = f"--xla_force_host_platform_device_count={clipping.DEVICES}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {count}"
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps([words, list(names)])],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:

        def reports() -> Iterator[AuditReport]:
            while True:
                try:
                    yield pickle.load(cast("IO[bytes]", process.stdout))  # from `_serve_parent`
                except (EOFError, pickle.UnpicklingError):
                    ended = f"the child process ended with code {process.wait()}"
                    yield ClaimsReport({"the audit can run": ended})

        try:
            yield reports()
        finally:
            process.kill()


def _serve_parent() -> None:
    """Run the audits that the parent process named, and write their reports to stdout."""
    words, names = json.loads(sys.argv[1])
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other prints go to stderr
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")
    for name in names:
        pickle.dump(run_audit(name, key), reports)
        reports.flush()
