"""Audit `fit`: the effect of an example or a user on a model, and the noise of resumed runs.

The keys of a run's steps are derived from a nonce, a random label. If a run is resumed with
different data, it must draw a new nonce. The audits of resumed runs fix the clock, the process
number and all seeds. If nonces depended only on these values, two nonces would be equal.
"""

import contextlib
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._schemes import Unit
from optax_lsdp.accounting import Ledger
from optax_lsdp.auditing._report import ClaimsReport
from optax_lsdp.correlation import Correlation
from optax_lsdp.planning import PrivacyPlan

if TYPE_CHECKING:
    from optax_lsdp.training import StepReport, UserData

_SIZE, _WIDTH, _CLIP_NORM = 8, 4, 0.5
_plan = partial(PrivacyPlan, noise_multiplier=2.0, delta=1e-5, clip_norm=_CLIP_NORM)
_MICROBATCH = 3  # does not divide the batch, so the last microbatch is padded
_SCALES = (30.0, 1e6, 0.01, 2.0, 1e3, 0.1, 1.0, 300.0)
_CHANGED = (0, 2, 7)  # a large and a small example of the first microbatch, and the last example
_OWNERS = (2, 0, 1, 3, 1, 2, 3, 3, 1, 3)  # the users of ten examples
_MOST = 3  # the most examples of a user in a step; user 3 has four
_ROUNDING = 1e-4  # accepted error, in clip norms: parameters hold sum plus noise in float32
_SAVED, _INTERRUPTED = 2, 3  # a run saves after 2 steps, and is interrupted after 3
_BANDS, _MANY = 5, 4000  # bands of the correlated noise, and entries of each step's noise
_MOST_ERRORS = 8.0  # accepted error of an inner product of noise vectors, in standard errors
_LEAST_DIFFERENT = 10  # two random 64-bit numbers differ in fewer bits with P < 1e-8
_FIXED_TIME = 1_750_000_000


def audit_one_step_of_fit(key: jax.Array) -> ClaimsReport:
    """Check that steps with and without an example differ by its clipped gradient.

    Both steps use the same key, so their noise cancels.
    """
    keys = jax.random.split(key)
    rows = np.asarray(jax.random.normal(keys[0], (_SIZE, _WIDTH)))
    data = np.asarray(_SCALES, np.float32)[:, None] * rows
    everyone = _params_after_one_step(data, keys[1])
    claims = {}
    for index in _CHANGED:
        without = np.where(np.arange(_SIZE)[:, None] == index, 0, data).astype(np.float32)
        added = _SIZE * (_params_after_one_step(without, keys[1]) - everyone)
        claims[f"example {index} adds its clipped gradient"] = _wrong_sum(added, data[index][None])
    return ClaimsReport(claims)


def audit_one_step_with_users(key: jax.Array) -> ClaimsReport:
    """Check that steps with and without a user differ by a clipped mean of the user's examples."""
    from optax_lsdp.training import UserData  # needs Orbax, which is optional

    keys, owners = jax.random.split(key), np.asarray(_OWNERS)
    rows = np.asarray(jax.random.normal(keys[0], (len(owners), _WIDTH)))
    data = np.asarray((0.1, 0.01, 1e3, 30.0))[owners, None].astype(np.float32) * rows
    users = partial(UserData, users=owners, max_examples=_MOST)
    everyone, size = _params_after_one_step(users(data), keys[1]), max(owners) + 1
    claims = {}
    for user in range(size):
        without = np.where(owners[:, None] == user, 0, data)
        added = size * (_params_after_one_step(users(without), keys[1]) - everyone)
        own = data[owners == user]
        means = [np.mean(some, axis=0) for some in combinations(own, min(_MOST, len(own)))]
        claims[f"user {user} adds a clipped average"] = _wrong_sum(added, np.stack(means))
    return ClaimsReport(claims)


def _wrong_sum(added: np.ndarray, gradients: np.ndarray) -> str:
    """Return "" if `added` equals one of the clipped gradients. Otherwise describe the error."""
    norms = np.linalg.norm(gradients.astype(np.float64), axis=1, keepdims=True)
    wanted = gradients / np.maximum(norms / _CLIP_NORM, 1.0)
    error = np.linalg.norm(added - wanted, axis=1).min() / _CLIP_NORM
    wrong = f"it adds {np.linalg.norm(added) / _CLIP_NORM:.6g} clip norms, an error of {error:.3g}"
    return "" if error <= _ROUNDING else wrong


def _params_after_one_step(data: "np.ndarray | UserData", key: jax.Array) -> np.ndarray:
    """Return the parameters after one step on all data.

    The loss is linear: the gradient of an example's loss is the example.
    """
    from optax_lsdp.training import UserData, fit  # needs Orbax, which is optional

    size = len(data)
    unit: Unit = "user" if isinstance(data, UserData) else "example"
    plan = _plan(dataset_size=size, expected_batch_size=size, steps=1, sampling="full", unit=unit)
    run = partial(fit, plan, optimizer=optax.sgd(1.0), microbatch_size=_MICROBATCH, progress=False)
    return np.asarray(run(jnp.vdot, jnp.zeros(_WIDTH), data, key=key).params, np.float64)


def audit_resumed_runs(key: jax.Array) -> ClaimsReport:
    """Check the noise of three resumed runs: one with the same data, and two with other data.

    All three resume the same interrupted run. The first must repeat its noise; the others must not.
    """
    data = np.linspace(-1, 1, 2 * _SIZE, dtype=np.float32)
    with tempfile.TemporaryDirectory() as parent, warnings.catch_warnings(action="ignore"):
        start = Path(parent) / "first"
        noises = {"first": _noise_until_interrupted(start, data, key)[_SAVED]}
        nonces = {"first": _nonces(start)}
        for name, factor in (("same", 1), ("other", 2), ("again", 2)):
            folder = shutil.copytree(start, Path(parent) / name)
            noises[name] = _noise_until_interrupted(folder, factor * data, key)[0]
            nonces[name] = _nonces(folder)

    def are_equal(one: str, other: str) -> bool:
        return np.array_equal(noises[one], noises[other])

    changed = "the ledger counts a repeated step once, but its noise has changed"
    reused = "two sums have the same noise" if are_equal("first", "other") else ""
    repeated = "both draw the same noise" if are_equal("other", "again") else ""
    claims = {
        "noise repeats with the same data": "" if are_equal("first", "same") else changed,
        "noise changes with other data": reused,
        "two resumed runs draw different noise": repeated,
        "nonces are random": _what_is_wrong(nonces["first"], nonces["other"], nonces["again"]),
    }
    return ClaimsReport(claims)


def audit_correlated_runs(key: jax.Array) -> ClaimsReport:
    """Check correlated noise of a run that is resumed with the same data and with other data."""
    data = np.linspace(-1, 1, 2 * _SIZE, dtype=np.float32)
    plan = _run_plan(len(data), correlation=_BANDS)
    take_steps = partial(_noise_until_interrupted, key=key, plan=plan, width=_MANY)
    with tempfile.TemporaryDirectory() as parent, warnings.catch_warnings(action="ignore"):
        start, other = Path(parent) / "first", Path(parent) / "other"
        first = take_steps(start, data)
        same = take_steps(shutil.copytree(start, Path(parent) / "same"), data)
        restarted = take_steps(shutil.copytree(start, other), 2 * data)
        take_steps(other, 2 * data, steps=plan.steps)
        ledger = json.loads(sorted(other.glob("[0-9]*.json"))[-1].read_text())["ledger"]
    parts = Ledger.from_json(json.dumps(ledger)).parts
    seen, counted = f"{_INTERRUPTED} + {plan.steps - _SAVED}", sum(part.steps for part in parts)
    claims = {
        "a resumed run draws the same correlated noise": ""
        if np.array_equal(first[_SAVED], same[0])
        else "the noise of a repeated step has changed",
        "noise after a restart is independent": _what_is_remembered(plan, first, restarted),
        "a restart counts its own cycles": ""
        if counted == 3
        else f"{seen} steps with {_BANDS} bands count as {counted} cycles instead of 1 + 2",
    }
    return ClaimsReport(claims)


def _what_is_remembered(
    plan: PrivacyPlan, first: list[np.ndarray], restarted: list[np.ndarray]
) -> str:
    """Return "" if the noise after a restart is independent. Otherwise describe the error.

    The plan's matrix C must turn the noise after a restart into independent unit noise. The inner
    product of two steps of this noise must be near 0. The same holds for a step of this noise and
    a step before the restart.
    """
    coefficients = cast(Correlation, plan.correlation).coefficients[: len(restarted)]
    scale = plan.noise_multiplier * _CLIP_NORM / plan.expected_batch_size
    rows = np.stack(restarted).astype(np.float64) / scale
    drawn = np.zeros_like(rows)
    for lag, one in enumerate(coefficients):
        drawn[lag:] += one * rows[: len(rows) - lag]
    both = np.concatenate([np.stack(first)[:_SAVED] / scale, drawn])
    products = both @ drawn.T / _MANY
    wanted = np.eye(len(both))[:, _SAVED:]
    error = float(np.abs(products - wanted).max() * np.sqrt(_MANY))
    return "" if error < _MOST_ERRORS else f"an error of {error:.1f} standard errors"


def _run_plan(size: int, correlation: int | None = None) -> PrivacyPlan:
    shared: dict[str, Any] = {
        "dataset_size": size,
        "expected_batch_size": 1,
        "steps": 8,
        "epsilon": 100.0,
    }
    return _plan(**shared, correlation=correlation)


def _noise_until_interrupted(
    folder: Path,
    data: np.ndarray,
    key: jax.Array,
    plan: PrivacyPlan | None = None,
    *,
    width: int = 8,
    steps: int = _INTERRUPTED,
) -> list[np.ndarray]:
    """Run `fit` with zero gradients, interrupt it after `steps` steps, and return the noise."""
    from optax_lsdp.training import fit  # needs Orbax, which is optional

    noises: list[np.ndarray] = []

    def interrupt(report: "StepReport") -> None:
        noises.append(np.array(report.params))
        if len(noises) == steps:
            raise InterruptedError

    def loss(params: jax.Array, x: jax.Array) -> jax.Array:
        return 0 * jnp.sum(params) * x

    # This optimizer replaces the parameters by the noise of the step.
    replace = optax.stateless(lambda updates, params: jax.tree.map(jnp.subtract, updates, params))
    options: dict[str, Any] = {
        "optimizer": replace,
        "callbacks": [interrupt],
        "progress": False,
        "key": key,
    }
    with contextlib.suppress(InterruptedError), fixed_surroundings():
        plan = _run_plan(len(data)) if plan is None else plan
        fit(plan, loss, jnp.zeros(width), data, folder=folder, save_every=_SAVED, **options)
    return noises


@contextlib.contextmanager
def fixed_surroundings() -> Iterator[None]:
    """Fix the clock, the process number and all seeds, but not the operating system's entropy."""
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        random.seed(0)
        np.random.seed(0)
        fixed = {"time.time": float(_FIXED_TIME), "time.time_ns": _FIXED_TIME * 10**9}
        for name, value in (fixed | {"os.getpid": 12345}).items():
            stack.enter_context(mock.patch(name, return_value=value))
        yield


def _nonces(folder: Path) -> list[str]:
    """Return all nonces in a run's journal."""
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [line["nonce"] for line in map(json.loads, lines) if "nonce" in line]


def _what_is_wrong(first: list[str], other: list[str], again: list[str]) -> str:
    """Return "" if the last nonces of two resumed runs may be random. Otherwise say why not.

    `first` lists the nonces before both runs were resumed. `other` and `again` list all nonces of
    the two runs.
    """
    if not (len(other) == len(again) == len(first) + 1):
        return f"runs have {len(other)} and {len(again)} nonces instead of {len(first) + 1}"
    try:
        one, two = int(other[-1], 16), int(again[-1], 16)
    except ValueError:
        return f"{other[-1]!r} is not a hexadecimal number"
    return too_similar(one, two)


def too_similar(one: int, other: int) -> str:
    """Return "" if two 64-bit numbers look independent. Otherwise say that they are similar."""
    different = (one ^ other).bit_count()
    wrong = f"{one:016x} and {other:016x} differ in {different} of 64 bits only"
    return wrong if different < _LEAST_DIFFERENT else ""
