"""Noise: what some steps have added goes in, a verdict on its scale and independence comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Any

import jax
import numpy as np
from scipy.stats import chi2, kstest, norm, poisson
from scipy.stats import t as student

from optax_lsdp._checks import check_delta, check_positive
from optax_lsdp.auditing._report import StatisticsReport
from optax_lsdp.auditing._steps import chosen_steps

_MOST_PAIRS = 2000  # of leaves that are compared; of more, any
_PARTS = (2, 3, 4, 8)  # into which an axis may be cut, over devices
_MOST_VALUES = 50_000  # among which equal ones are looked for, and compared with Gaussians
_EQUAL = 4e-7  # thrice the probability that two float32 magnitudes of Gaussian noise are equal


def audit_noise(
    release: Callable[[Any], Any],
    *,
    scale: float,
    steps: int | Sequence[int] = 32,
    failure: float = 1e-5,
) -> StatisticsReport:
    """Compare what steps add with independent Gaussians of a given scale.

    A scale that is wrong by a share s is seen from some 40/s² numbers on: by a tenth from 4,000,
    by a hundredth from 400,000. Noise on a grid, such as that of `discrete`, repeats its numbers
    and is rejected for that.

    Every two of the steps are compared, so that noise which repeats after p steps is seen if two
    of them are a multiple of p apart. The first 32 steps show periods up to 31. To see every
    period up to 4,096, list `[*range(32), *range(32, 4097, 32)]`; a step may have any number.

    Args:
        release: `release(step)`: what a step makes of a batch without examples, which is noise
            alone, before it is smoothed or divided. To try a run that was resumed, let the later
            steps come from it.
        scale: the standard deviation that each entry should have.
        steps: how many are looked at, from the first on; or a list of their numbers.
        failure: the probability that good noise is rejected.

    >>> def release(step):
    ...     return 3.0 * jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (100,))
    >>> bool(audit_noise(release, scale=3.0)), bool(audit_noise(release, scale=4.0))
    (True, False)
    >>> bool(audit_noise(lambda step: release(step % 1000), scale=3.0, steps=[0, 5, 900, 1005]))
    False
    """
    check_positive("scale", scale)
    check_delta("failure", failure)
    drawn = [jax.tree.leaves(jax.device_get(release(step))) for step in chosen_steps(steps)]
    shaped = [
        np.stack([np.asarray(leaf, np.float64) for leaf in parts]) / scale
        for parts in zip(*drawn, strict=True)
    ]
    leaves = [leaf.reshape(len(drawn), -1) for leaf in shaped]
    everything = np.concatenate(leaves, axis=1)
    if everything.size < 100:
        raise ValueError(f"`release` must give 100 numbers in all steps, got {everything.size}.")
    squares = float(np.sum(everything**2))
    p_values = {
        "scale": _two_sided(chi2.cdf(squares, everything.size)),
        "scale of each leaf": _of_scales([leaf.reshape(1, -1) for leaf in leaves], axes=[0]),
        "scale of each step": _of_scales([everything], axes=[0]),
        "scale of each row and column": _of_scales(shaped),
        "Gaussian": _of_shapes([*leaves, everything]),
        "tails": _of_tails(everything),
        "independent steps": _of_steps(everything),
        "independent leaves": _of_pairs(_prefixes(leaves)),
        "independent parts of leaves": _of_pairs(_parts(shaped)),
    }
    if all(leaf.dtype in (np.float32, np.float64) for leaf in drawn[0]):  # else values are few
        p_values["no number twice"] = _of_equal_values(_some_steps(everything))
        p_values["no two numbers twice"] = _of_equal_couples(everything)
    seen = scale * float(np.sqrt(squares / everything.size))
    return StatisticsReport("standard deviation", scale, seen, p_values, failure)


def _two_sided(share: Any) -> float:
    """Return a p-value from a share of the distribution."""
    return float(2 * min(share, 1 - share))


def _of_scales(leaves: list[np.ndarray], axes: Iterable[int] | None = None) -> float:
    """Return how likely the strangest sum of squares is, of all that lies at one place of an axis.

    By default that is of all axes but the first, which has the steps.
    """
    shares = []
    for leaf in leaves:
        for axis in range(1, leaf.ndim) if axes is None else axes:
            others = tuple(other for other in range(leaf.ndim) if other != axis)
            sums = np.sum(leaf**2, axis=others)
            shares.append(chi2.cdf(sums, leaf.size / len(sums)))
    if not shares:
        return 1.0
    every = np.concatenate(shares)
    return min(1.0, 2 * every.size * float(np.minimum(every, 1 - every).min()))


def _of_shapes(parts: list[np.ndarray]) -> float:
    """Return how likely the strangest distribution among parts of the noise is."""
    rng = np.random.default_rng(0)
    values = [
        kstest(rng.choice(part.ravel(), min(part.size, _MOST_VALUES), replace=False), norm.cdf)
        for part in parts
    ]
    return min(1.0, len(values) * min(float(value.pvalue) for value in values))


def _of_tails(drawn: np.ndarray) -> float:
    """Return how likely a largest entry so large, or so small, is."""
    largest = float(np.max(np.abs(drawn)))
    return _two_sided(np.exp(drawn.size * np.log1p(-2 * norm.sf(largest))))


def _of_correlations(correlations: np.ndarray, freedom: int) -> float:
    """Return how likely the largest of some correlations is, between Gaussian vectors."""
    largest = min(float(np.max(np.abs(correlations))), 1.0)
    spread = np.sqrt(max(1 - largest**2, 1e-300) / freedom)
    return min(1.0, 2 * correlations.size * float(student.sf(largest / spread, freedom)))


def _of_steps(everything: np.ndarray) -> float:
    """Return how likely the largest correlation between two steps is."""
    lengths = np.sqrt(np.sum(everything**2, axis=1, keepdims=True))
    unit = everything / np.where(lengths > 0, lengths, 1)
    products = np.where((lengths > 0) & (lengths > 0).T, unit @ unit.T, 1.0)
    return _of_correlations(products[np.triu_indices(len(unit), 1)], everything.shape[1] - 1)


def _of_pairs(pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> float:
    """Return how likely the largest correlation among pairs of vectors is."""
    values = []
    for one, other in pairs:
        length = np.sqrt((one @ one) * (other @ other))
        correlation = one @ other / length if length else 1.0
        if len(one) > 1:
            values.append(_of_correlations(np.array([correlation]), len(one) - 1))
    return min(1.0, len(values) * min(values)) if values else 1.0


def _prefixes(leaves: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return pairs of leaves, as far as both reach: one key draws one sequence."""
    pairs = list(combinations(leaves, 2))
    chosen = np.random.default_rng(0).permutation(len(pairs))[:_MOST_PAIRS]
    for one, other in (pairs[i] for i in chosen):
        size = min(one.shape[1], other.shape[1])
        yield one[:, :size].ravel(), other[:, :size].ravel()


def _parts(leaves: list[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return neighbouring entries, and the parts that devices would have drawn, by every axis."""
    for leaf in leaves:
        flat = leaf.reshape(len(leaf), -1)
        if flat.shape[1] > 1:
            yield flat[:, 1:].ravel(), flat[:, :-1].ravel()
        for axis, count in product(range(1, leaf.ndim), _PARTS):
            size = leaf.shape[axis] // count
            if size > 0:
                along = np.moveaxis(leaf, axis, 1)
                yield along[:, :size].ravel(), along[:, size : 2 * size].ravel()


def _some_steps(everything: np.ndarray) -> np.ndarray:
    """Return whole steps, evenly spread, of two at least."""
    few = min(len(everything), max(2, _MOST_VALUES // everything.shape[1]))
    return everything[np.linspace(0, len(everything) - 1, few).astype(int)]


def _of_equal_values(drawn: np.ndarray) -> float:
    """Return how likely so many numbers are that occur twice, with either sign.

    What is drawn once and used twice is found in whatever order it comes, if it is much of it.
    """
    values = np.abs(drawn).ravel()
    equal = values.size - len(np.unique(values))
    return float(poisson.sf(equal - 1, _EQUAL * values.size**2 / 2))


def _of_equal_couples(drawn: np.ndarray) -> float:
    """Return how likely so many neighbours are that occur twice: few are found among many."""
    values = np.abs(drawn)
    couples = (values[:, :-1] + 1j * values[:, 1:]).ravel()
    equal = couples.size - len(np.unique(couples))
    return float(poisson.sf(equal - 1, (_EQUAL * couples.size) ** 2 / 2))
