"""Audit of runs that are interrupted and resumed: which noise they draw, and from which nonce.

Clock, process number and seeds are held fixed meanwhile, so that a nonce which is made of them is
the same in two runs, and is seen.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp.auditing._report import ClaimsReport
from optax_lsdp.planning import PrivacyPlan

_SIZE, _STEPS, _SAVED, _FALLS = 16, 8, 2, 3
_BITS, _LEAST_APART = 64, 10  # two random nonces are closer with a probability below 1e-8
_NOON = 1_750_000_000


def audit_renewal(key: jax.Array) -> ClaimsReport:
    """Resume an interrupted run as it was, and twice with other data."""
    data = np.linspace(-1, 1, _SIZE, dtype=np.float32)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(action="ignore"):
        folders = {name: Path(place) / name for name in ("first", "same", "other", "again")}
        first = _noises(folders["first"], data, key)
        for name in ("same", "other", "again"):
            shutil.copytree(folders["first"], folders[name])
        same = _noises(folders["same"], data, key)
        other, again = (_noises(folders[name], 2 * data, key) for name in ("other", "again"))
        nonces = [_nonces(folders[name]) for name in ("first", "other", "again")]
    return ClaimsReport(
        {
            "the same data get the same noise": ""
            if _equal(first[_SAVED], same[0])
            else "a step that is taken again, and counted once, has other noise",
            "other data get other noise": "noise is used again on another sum"
            if _equal(first[_SAVED], other[0])
            else "",
            "which nobody can predict": "two resumed runs draw the same noise"
            if _equal(other[0], again[0])
            else "",
            "from a random nonce": _what_is_wrong(*nonces),
        }
    )


def _noises(folder: Path, data: np.ndarray, key: jax.Array) -> list[np.ndarray]:
    """Train on gradients of zero until the run falls, and return the noise of each step."""
    from optax_lsdp.training import fit  # which needs Orbax

    plan = PrivacyPlan(
        dataset_size=_SIZE,
        expected_batch_size=1,
        steps=_STEPS,
        noise_multiplier=2.0,
        epsilon=100.0,
        delta=1e-5,
    )
    noises: list[np.ndarray] = []

    def remember(report: Any) -> None:
        noises.append(np.array(report.params))
        if len(noises) == _FALLS:
            raise InterruptedError

    # Parameters are the noise of the last step.
    last = optax.stateless(lambda updates, params: jax.tree.map(jnp.subtract, updates, params))
    with contextlib.suppress(InterruptedError), at_noon():
        fit(
            plan,
            lambda params, x: 0 * jnp.sum(params) * x,
            jnp.zeros(8),
            data,
            optimizer=last,
            folder=folder,
            save_every=_SAVED,
            callbacks=[remember],
            progress=False,
            key=key,
        )
    return noises


@contextlib.contextmanager
def at_noon() -> Iterator[None]:
    """Hold fixed whatever a nonce might be made of, other than entropy."""
    before = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    try:
        with (
            mock.patch("time.time", return_value=float(_NOON)),
            mock.patch("time.time_ns", return_value=_NOON * 10**9),
            mock.patch("os.getpid", return_value=12345),
        ):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _nonces(folder: Path) -> list[str]:
    """Return all nonces of a run's journal."""
    lines = (folder / "journal.jsonl").read_text().splitlines()
    return [line["nonce"] for line in map(json.loads, lines) if "nonce" in line]


def _what_is_wrong(first: list[str], other: list[str], again: list[str]) -> str:
    """Return what speaks against the last nonces of two runs being random numbers."""
    if not (len(other) == len(again) == len(first) + 1):
        return f"runs have {len(other)} and {len(again)} nonces instead of {len(first) + 1}"
    try:
        one, two = int(other[-1], 16), int(again[-1], 16)
    except ValueError:
        return f"{other[-1]!r} is no hexadecimal number"
    return what_two_share(one, two)


def what_two_share(one: int, other: int) -> str:
    """Return what speaks against two numbers of 64 bits being random, and independent."""
    apart = (one ^ other).bit_count()
    if apart < _LEAST_APART:
        return f"{one:016x} and {other:016x} differ in {apart} of {_BITS} bits"
    return ""


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    return bool(np.array_equal(one, other))
