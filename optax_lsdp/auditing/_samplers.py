"""Samplers: batches go in, a verdict on whether they were drawn as the accountant counts on."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from scipy.stats import binom, norm

from optax_lsdp._checks import check_choice, check_delta, check_rate, check_whole
from optax_lsdp.auditing._report import StatisticsReport


def audit_sampler(
    sampler: Any,
    *,
    dataset_size: int,
    sampling_rate: float,
    sampling: Literal["poisson", "without_replacement"] = "poisson",
    steps: int = 400,
    failure: float = 1e-5,
) -> StatisticsReport:
    """Compare batches with what a kind of sampling would draw: a shuffler is not Poisson.

    Args:
        sampler: anything with `batch(step)`, of which `indices` and `mask` are read.
        dataset_size: n.
        sampling_rate: the share of examples that a batch has, in the mean.
        sampling: "poisson": each example in each batch by its own coin; "without_replacement": a
            fresh subset of fixed size in every step.
        steps: how many batches are looked at.
        failure: the probability that a good sampler is rejected.
    """
    check_whole("dataset_size", dataset_size, 2)
    check_rate("sampling_rate", sampling_rate)
    check_choice("sampling", sampling, ("poisson", "without_replacement"))
    check_whole("steps", steps, 2)
    check_delta("failure", failure)
    is_in = np.zeros((steps, dataset_size), np.int64)
    for step in range(steps):
        batch = sampler.batch(step)
        np.add.at(is_in[step], np.asarray(batch.indices)[np.asarray(batch.mask)], 1)
    sizes, counts = is_in.sum(axis=1), is_in.sum(axis=0)
    meetings = int((is_in[1:] * is_in[:-1]).sum())
    p_values = {
        "no example twice in a batch": float(is_in.max() <= 1),
        "each example as often": _of_spread(counts, steps, sampling_rate),
        "batches know nothing of the last": _of_count(
            meetings, dataset_size * (steps - 1), sampling_rate**2
        ),
    }
    if sampling == "poisson":
        p_values["inclusions in all"] = _of_count(sizes.sum(), is_in.size, sampling_rate)
        p_values["sizes of batches"] = _of_spread(sizes, dataset_size, sampling_rate)
    else:
        size = round(sampling_rate * dataset_size)
        p_values["sizes of batches"] = float(np.all(sizes == size))
    seen = float(is_in.mean())
    return StatisticsReport("sampling rate", sampling_rate, seen, p_values, failure)


def _of_count(count: int, trials: int, rate: float) -> float:
    """Return the p-value of a count of independent events, from both sides."""
    return float(
        min(1.0, 2 * min(binom.cdf(count, trials, rate), binom.sf(count - 1, trials, rate)))
    )


def _of_spread(counts: np.ndarray, trials: int, rate: float) -> float:
    """Return the p-value of the spread of binomial counts: too even speaks against them too."""
    if rate == 1:
        return float(np.all(counts == trials))
    variance = trials * rate * (1 - rate)
    excess = (1 - 6 * rate * (1 - rate)) / variance
    spread = np.mean((counts - trials * rate) ** 2) / variance
    return float(2 * norm.sf(abs(spread - 1) * np.sqrt(len(counts) / (2 + excess))))
