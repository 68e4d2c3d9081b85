"""Noise: what some steps have added goes in, a verdict on its scale and independence comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations, islice
from typing import Any

import jax
import numpy as np
from scipy.stats import chi2, kstest, norm
from scipy.stats import t as student

from optax_lsdp._checks import check_delta, check_positive, check_whole
from optax_lsdp.auditing._report import StatisticsReport

_MOST_PAIRS = 2000  # of steps or leaves that are compared
_PARTS = (2, 3, 4, 8)  # into which a leaf may be cut, over devices


def audit_noise(
    release: Callable[[Any], Any],
    *,
    scale: float,
    steps: int = 32,
    failure: float = 1e-5,
) -> StatisticsReport:
    """Compare what steps add with independent Gaussians of a given scale.

    Args:
        release: `release(step)`: what a step makes of a batch without examples, which is noise
            alone, before it is smoothed or divided. To try a run that was resumed, let the later
            steps come from it.
        scale: the standard deviation that each entry should have.
        steps: how many are looked at.
        failure: the probability that good noise is rejected.
    """
    check_positive("scale", scale)
    check_whole("steps", steps, 2)
    check_delta("failure", failure)
    drawn = [jax.tree.leaves(jax.device_get(release(step))) for step in range(steps)]
    leaves = [
        np.stack([np.asarray(leaf, np.float64).ravel() for leaf in parts]) / scale
        for parts in zip(*drawn, strict=True)
    ]
    everything = np.concatenate(leaves, axis=1)
    if everything.size < 100:
        raise ValueError(f"`release` must give 100 numbers in all steps, got {everything.size}.")
    squares = float(np.sum(everything**2))
    p_values = {
        "scale": _two_sided(chi2.cdf(squares, everything.size)),
        "scale of each leaf": _of_leaves(leaves),
        "Gaussian": float(kstest(everything.ravel()[:100_000], norm.cdf).pvalue),
        "tails": _of_tails(everything),
        "independent steps": _of_pairs(combinations(everything, 2)),
        "independent leaves": _of_pairs(_prefixes(leaves)),
        "independent parts of leaves": _of_pairs(_parts(leaves)),
    }
    seen = scale * float(np.sqrt(squares / everything.size))
    return StatisticsReport("standard deviation", scale, seen, p_values, failure)


def _two_sided(share: Any) -> float:
    """Return a p-value from a share of the distribution."""
    return float(2 * min(share, 1 - share))


def _of_leaves(leaves: list[np.ndarray]) -> float:
    values = [_two_sided(chi2.cdf(np.sum(leaf**2), leaf.size)) for leaf in leaves]
    return min(1.0, len(values) * min(values))


def _of_tails(drawn: np.ndarray) -> float:
    """Return how likely a largest entry so large, or so small, is."""
    largest = float(np.max(np.abs(drawn)))
    return _two_sided(np.exp(drawn.size * np.log1p(-2 * norm.sf(largest))))


def _of_pairs(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return how likely the largest correlation among pairs of vectors is."""
    values = []
    for one, other in islice(pairs, _MOST_PAIRS):
        length = np.sqrt((one @ one) * (other @ other))
        correlation = float(np.clip(one @ other / length, -1, 1)) if length else 1.0
        freedom = len(one) - 1
        if freedom < 1:
            continue
        spread = np.sqrt(max(1 - correlation**2, 1e-300) / freedom)
        values.append(2 * float(student.sf(abs(correlation) / spread, freedom)))
    return min(1.0, len(values) * min(values)) if values else 1.0


def _prefixes(leaves: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return all pairs of leaves, as far as both reach: one key draws one sequence."""
    for one, other in combinations(leaves, 2):
        size = min(one.shape[1], other.shape[1])
        yield one[:, :size].ravel(), other[:, :size].ravel()


def _parts(leaves: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return neighbouring entries, and the parts that devices would have drawn."""
    for leaf in leaves:
        if leaf.shape[1] > 1:
            yield leaf[:, 1:].ravel(), leaf[:, :-1].ravel()
        for count in _PARTS:
            size = leaf.shape[1] // count
            if size > 0:
                yield leaf[:, :size].ravel(), leaf[:, size : 2 * size].ravel()
