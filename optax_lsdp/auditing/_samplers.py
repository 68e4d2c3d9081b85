"""Samplers: batches go in, a verdict on whether they were drawn as the accountant counts on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy.stats import binom, gamma

from optax_lsdp._checks import check_choice, check_delta, check_rate, check_whole
from optax_lsdp.auditing._report import StatisticsReport
from optax_lsdp.auditing._steps import chosen_steps

_LEAST_VARIANCE = 10  # of counts, which the p-values of their spread need
_AT_A_TIME = 2**16  # examples
_COMPARED = 2**12  # examples, each with each


def audit_sampler(
    sampler: Any,
    *,
    dataset_size: int,
    sampling_rate: float,
    sampling: Literal["poisson", "without_replacement"] = "poisson",
    steps: int | Sequence[int] = 500,
    failure: float = 1e-5,
) -> StatisticsReport:
    """Compare batches with what a kind of sampling would draw: a shuffler is not Poisson.

    Args:
        sampler: anything with `batch(step)`, of which `indices` and `mask` are read.
        dataset_size: n.
        sampling_rate: the share of examples that a batch has, in the mean.
        sampling: "poisson": each example in each batch by its own coin; "without_replacement": a
            fresh subset of fixed size in every step.
        steps: how many batches are looked at, from the first on; or a list of their numbers, as
            in `audit_noise`. One batch should follow another: every second is held to the next.
        failure: the probability that a good sampler is rejected.

    >>> import jax
    >>> from optax_lsdp import PoissonSampler, ShuffledSampler
    >>> facts = {"dataset_size": 1000, "sampling_rate": 0.05}
    >>> bool(audit_sampler(PoissonSampler(1000, 0.05, jax.random.key(0)), **facts))
    True
    >>> bool(audit_sampler(ShuffledSampler(1000, 50, jax.random.key(0)), **facts))
    False
    """
    check_whole("dataset_size", dataset_size, 2)
    check_rate("sampling_rate", sampling_rate)
    check_choice("sampling", sampling, ("poisson", "without_replacement"))
    check_delta("failure", failure)
    numbers = chosen_steps(steps)
    count = len(numbers)
    if min(count, dataset_size) * sampling_rate * (1 - sampling_rate) < _LEAST_VARIANCE:
        raise ValueError(
            f"`steps` must be enough for each example to come often, got {count} at a rate of "
            f"{sampling_rate} of {dataset_size}: fewer than {_LEAST_VARIANCE} are expected."
        )
    is_in = np.zeros((count, dataset_size), np.uint8)
    for row, step in zip(is_in, numbers, strict=True):
        batch = sampler.batch(step)
        np.add.at(row, np.asarray(batch.indices)[np.asarray(batch.mask)], 1)
    sizes, counts = (is_in.sum(axis=axis, dtype=np.int64) for axis in (1, 0))
    overlaps = _overlaps(is_in)
    size = round(sampling_rate * dataset_size)
    together = sampling_rate**2  # the probability that two examples are in one batch
    if sampling == "without_replacement":
        together = sampling_rate * (size - 1) / (dataset_size - 1)
    p_values = {
        "no example twice in a batch": float(is_in.max() <= 1),
        "each example as often": _of_spread(counts, count, sampling_rate),
        "no example far more or less often": _of_extremes(counts, count, sampling_rate),
        "batches know nothing of the last": _of_count(
            int(np.diagonal(overlaps, 1)[::2].sum()), dataset_size * (count // 2), sampling_rate**2
        ),
        "no two batches are alike": _of_largest(overlaps, dataset_size, sampling_rate**2),
        "examples come by themselves": _of_companions(is_in, together),
        "no two examples come together": _of_couples(is_in, together),
    }
    if sampling == "poisson":
        p_values["inclusions in all"] = _of_count(int(sizes.sum()), is_in.size, sampling_rate)
        p_values["sizes of batches"] = _of_spread(sizes, dataset_size, sampling_rate)
    else:
        p_values["sizes of batches"] = float(np.all(sizes == size))
    seen = float(sizes.sum() / is_in.size)
    return StatisticsReport("sampling rate", sampling_rate, seen, p_values, failure)


def _overlaps(is_in: np.ndarray) -> np.ndarray:
    """Return how many examples each two batches share."""
    total = np.zeros((len(is_in), len(is_in)))
    for start in range(0, is_in.shape[1], _AT_A_TIME):
        part = is_in[:, start : start + _AT_A_TIME].astype(np.float32)
        total += part @ part.T  # whole numbers, which float32 holds
    return total


def _of_largest(overlaps: np.ndarray, size: int, rate: float) -> float:
    """Return how likely the largest overlap of two batches is, among so many pairs."""
    pairs = overlaps[np.triu_indices(len(overlaps), 1)]
    return float(min(1.0, len(pairs) * binom.sf(pairs.max() - 1, size, rate)))


def _of_extremes(counts: np.ndarray, steps: int, rate: float) -> float:
    """Return how likely the rarest and the most frequent of the examples are, at the least."""
    rarest = binom.cdf(counts.min(), steps, rate)
    return float(min(1.0, 2 * len(counts) * min(rarest, binom.sf(counts.max() - 1, steps, rate))))


def _of_couples(is_in: np.ndarray, together: float) -> float:
    """Return how likely it is that any two of the examples come together as often as they do."""
    steps, size = is_in.shape
    some = np.random.default_rng(0).permutation(size)[:_COMPARED]
    part = is_in[:, np.sort(some)].astype(np.float32)
    most = np.max(np.triu(part.T @ part, 1))
    pairs = part.shape[1] * (part.shape[1] - 1) / 2
    return float(min(1.0, pairs * binom.sf(most - 1, steps, together)))


def _of_companions(is_in: np.ndarray, together: float) -> float:
    """Return how likely it is that two examples come together as often as they do.

    Each example has one companion: its neighbour, and once more any other one.
    """
    steps, size = is_in.shape
    orders = (np.arange(size), np.random.default_rng(0).permutation(size))
    values = []
    for order in orders:
        one, other = order[: size // 2 * 2].reshape(-1, 2).T
        met = int((is_in[:, one] & is_in[:, other]).sum(dtype=np.int64))
        values.append(_of_count(met, steps * (size // 2), together))
    return min(1.0, len(values) * min(values))


def _of_count(count: int, trials: int, rate: float) -> float:
    """Return the p-value of a count of independent events, from both sides."""
    return float(
        min(1.0, 2 * min(binom.cdf(count, trials, rate), binom.sf(count - 1, trials, rate)))
    )


def _of_spread(counts: np.ndarray, trials: int, rate: float) -> float:
    """Return the p-value of the spread of binomial counts: too even speaks against them too.

    The sum of their squares is compared with the gamma distribution of the same mean and variance.
    """
    variance = trials * rate * (1 - rate)
    excess = (1 - 6 * rate * (1 - rate)) / variance
    spread = float(np.sum((counts - trials * rate) ** 2)) / variance
    shape = len(counts) / (2 + excess)
    share = gamma.cdf(spread, shape, scale=2 + excess)
    return float(2 * min(share, gamma.sf(spread, shape, scale=2 + excess)))
