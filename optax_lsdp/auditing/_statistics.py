"""Test noise and samplers against the distributions that the accountant assumes.

Each audit runs several tests, and each test returns a p-value. If a test has many parts, such as
all pairs of leaves, its p-value is the smallest p-value of a part times the number of parts.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Literal, Protocol

import jax
import numpy as np
from scipy.stats import binom, chi2, gamma, kstest, norm, poisson
from scipy.stats import t as student

from optax_lsdp._checks import check_choice, check_delta, check_positive, check_rate, check_whole
from optax_lsdp._types import PyTree
from optax_lsdp.auditing._report import StatisticsReport
from optax_lsdp.sampling import Batch

_MOST_PAIRS = 2000  # the most pairs of leaves to test; if there are more, choose at random
_DEVICE_COUNTS = (2, 3, 4, 8)  # an axis may be split over this many devices, with different noise
_MOST_VALUES = 50_000  # the most numbers to search for repetitions or compare with a Gaussian
_COLLISION = 4e-7  # 3 × the probability that two float32 Gaussians have the same magnitude
_LEAST_VARIANCE = 10  # of a count, so that the gamma approximation in `_spread_p_value` is good
_CHUNK = 2**16  # examples in one matrix product
_MOST_EXAMPLES = 2**12  # examples of which all pairs are tested

_Pairs = Iterator[tuple[np.ndarray, np.ndarray]]


class _Sampler(Protocol):
    def batch(self, step: int, /) -> Batch: ...


def audit_noise(
    release: Callable[[int], PyTree],
    *,
    scale: float,
    steps: int | Sequence[int] = 32,
    failure: float = 1e-5,
) -> StatisticsReport:
    """Test whether steps add independent Gaussian noise of a given scale.

    To detect a relative error s of the scale, the audit needs about 40/s² numbers: 4,000 for 10 %,
    and 400,000 for 1 %. The audit rejects noise whose floats repeat. So if the noise is quantized,
    like that of `discrete`, `release` must return integers: entries divided by the quantum.

    The audit detects noise that repeats with period p if two audited steps are a multiple of p
    apart. The first 32 steps reveal periods up to 31. To detect every period up to 4,096, pass
    `[*range(32), *range(32, 4097, 32)]`.

    Args:
        release: `release(step)` returns the noisy value of a step before smoothing. The batch of
            the step must have no examples, so that the value is only noise. To audit resuming, take
            later steps from a resumed run.
        scale: the claimed standard deviation of each entry.
        steps: how many steps to audit, starting with step 0; or a list of step numbers.
        failure: an upper bound on the probability that the audit rejects correct noise.

    >>> def release(step):
    ...     return 3.0 * jax.random.normal(jax.random.fold_in(jax.random.key(0), step), (100,))
    >>> bool(audit_noise(release, scale=3.0)), bool(audit_noise(release, scale=4.0))
    (True, False)
    >>> bool(audit_noise(lambda step: release(step % 1000), scale=3.0, steps=[0, 5, 900, 1005]))
    False
    """
    check_positive("scale", scale)
    check_delta("failure", failure)
    drawn = [jax.tree.leaves(jax.device_get(release(step))) for step in _step_numbers(steps)]
    leaves = [  # each (steps, *shape)
        np.stack([np.asarray(leaf, np.float64) for leaf in same_leaf]) / scale
        for same_leaf in zip(*drawn, strict=True)
    ]
    rows = [leaf.reshape(len(drawn), -1) for leaf in leaves]
    everything = np.concatenate(rows, axis=1)
    if everything.size < 100:
        raise ValueError(
            "`release` must return 100 numbers or more in all steps together, got "
            f"{everything.size}; audit more steps or larger leaves."
        )
    squares, largest = float(np.sum(everything**2)), float(np.abs(everything).max())
    axes = [(leaf, axis) for leaf in leaves for axis in range(1, leaf.ndim)]
    p_values = {
        "scale": _two_sided(chi2.cdf(squares, everything.size)),
        "scale of each leaf": _scale_p_value([(leaf.reshape(1, -1), 0) for leaf in rows]),
        "scale of each step": _scale_p_value([(everything, 0)]),
        "scale of each row and column": _scale_p_value(axes),
        "Gaussian distribution": _distribution_p_value([*rows, everything]),
        "largest number": _two_sided(np.exp(everything.size * np.log1p(-2 * norm.sf(largest)))),
        "independent steps": _steps_p_value(everything),
        "independent leaves": _pairs_p_value(_pairs_of_leaves(rows)),
        "independent parts of leaves": _pairs_p_value(_pairs_of_parts(leaves)),
    }
    # Integers and half-precision numbers repeat by chance.
    if all(leaf.dtype in (np.float32, np.float64) for leaf in drawn[0]):
        sizes = np.abs(everything)
        few = min(len(sizes), max(2, _MOST_VALUES // sizes.shape[1]))
        some = sizes[np.linspace(0, len(sizes) - 1, few).astype(int)]
        pairs = sizes[:, :-1] + 1j * sizes[:, 1:]
        # The first test finds many numbers that are reused in any order. The second test finds
        # even a few numbers that are reused in the same order.
        p_values["no number twice"] = _repetitions_p_value(some, _COLLISION)
        p_values["no two numbers twice"] = _repetitions_p_value(pairs, _COLLISION**2)
    seen = scale * float(np.sqrt(squares / everything.size))
    return StatisticsReport("standard deviation", scale, seen, p_values, failure)


def audit_sampler(
    sampler: _Sampler,
    *,
    dataset_size: int,
    sampling_rate: float,
    sampling: Literal["poisson", "without_replacement"] = "poisson",
    steps: int | Sequence[int] = 500,
    failure: float = 1e-5,
) -> StatisticsReport:
    """Test whether a sampler draws batches as `sampling` says.

    If `sampling` is "poisson", the audit rejects batches of fixed size and shuffled epochs.

    Args:
        sampler: an object whose `batch(step)` returns `indices` and a `mask`.
        dataset_size: the number of examples.
        sampling_rate: the expected share of the examples in a batch.
        sampling: "poisson" if each example is in each batch independently of all others, or
            "without_replacement" if each step draws a fresh subset of fixed size.
        steps: how many batches to audit, starting with step 0; or a list of step numbers. One
            test compares the first batch with the second, the third with the fourth, and so on.
        failure: an upper bound on the probability that the audit rejects a correct sampler.

    >>> from optax_lsdp import FixedSizeSampler, PoissonSampler
    >>> facts = {"dataset_size": 1000, "sampling_rate": 0.05}
    >>> bool(audit_sampler(PoissonSampler(1000, 0.05, jax.random.key(0)), **facts))
    True
    >>> bool(audit_sampler(FixedSizeSampler(1000, 50, jax.random.key(0)), **facts))
    False
    """
    check_whole("dataset_size", dataset_size, 2)
    check_rate("sampling_rate", sampling_rate)
    check_choice("sampling", sampling, ("poisson", "without_replacement"))
    check_delta("failure", failure)
    numbers = _step_numbers(steps)
    count, rate = len(numbers), sampling_rate
    least = math.ceil(_LEAST_VARIANCE / max(rate * (1 - rate), 1e-9))
    if min(count, dataset_size) < least:
        raise ValueError(
            f"`steps` and examples must be enough for a test, got {count} steps and {dataset_size} "
            f"examples at a sampling rate of {rate}; pass at least {least:,} of each."
        )
    included = np.zeros((count, dataset_size), np.uint8)
    for row, step in zip(included, numbers, strict=True):
        batch = sampler.batch(step)
        np.add.at(row, np.asarray(batch.indices)[np.asarray(batch.mask)], 1)
    sizes, counts = (included.sum(axis=axis, dtype=np.int64) for axis in (1, 0))
    overlaps = _overlaps(included)
    pairs = overlaps[np.triu_indices(count, 1)]
    extremes = [binom.cdf(counts.min(), count, rate), binom.sf(counts.max() - 1, count, rate)]
    size = round(rate * dataset_size)
    together = rate**2  # the probability that two examples are in one batch
    if sampling == "without_replacement":
        together = rate * (size - 1) / (dataset_size - 1)
    consecutive, chances = int(np.diagonal(overlaps, 1)[::2].sum()), dataset_size * (count // 2)
    most_similar = [binom.sf(pairs.max() - 1, dataset_size, rate**2)]
    p_values = {
        "no example twice in a batch": float(included.max() <= 1),
        "equal rates of all examples": _spread_p_value(counts, count, rate),
        "no example far too often or rarely": _smallest(extremes, 2 * len(counts)),
        "independent consecutive batches": _count_p_value(consecutive, chances, rate**2),
        "no two batches too similar": _smallest(most_similar, len(pairs)),
        "independent examples": _companions_p_value(included, together),
        "no two examples too often together": _couples_p_value(included, together),
    }
    if sampling == "poisson":
        p_values["total of batch sizes"] = _count_p_value(int(sizes.sum()), included.size, rate)
        p_values["spread of batch sizes"] = _spread_p_value(sizes, dataset_size, rate)
    else:
        p_values["equal batch sizes"] = float(np.all(sizes == size))
    seen = float(sizes.sum() / included.size)
    return StatisticsReport("sampling rate", rate, seen, p_values, failure)


def _step_numbers(steps: int | Sequence[int]) -> list[int]:
    """Return the steps to audit. Raise if there are fewer than two, or if two are equal."""
    if not isinstance(steps, Sequence):
        check_whole("steps", steps, 2)
        return list(range(steps))
    for step in steps:
        check_whole("steps", step, 0)
    if len(steps) < 2 or len(set(steps)) < len(steps):
        raise ValueError(
            f"`steps` must list 2 or more different steps, got {len(steps)} steps, "
            f"{len(set(steps))} of them different; list each step once."
        )
    return list(steps)


def _two_sided(cdf: float) -> float:
    return float(2 * min(cdf, 1 - cdf))


def _smallest(p_values: Sequence[float] | np.ndarray, count: int | None = None) -> float:
    """Return min(1, count · smallest p-value), the Bonferroni bound for `count` tests.

    By default, `count` is the number of p-values. Without tests, return 1.
    """
    count = len(p_values) if count is None else count
    return min(1.0, count * float(np.min(p_values))) if count else 1.0


def _scale_p_value(parts: list[tuple[np.ndarray, int]]) -> float:
    """Test whether every slice of some arrays has a standard deviation of 1.

    Each part is an array and an axis. All entries with the same index along the axis form a slice.
    """
    shares = []
    for array, axis in parts:
        sums = np.sum(array**2, axis=tuple(i for i in range(array.ndim) if i != axis))
        shares.append(chi2.cdf(sums, array.size / len(sums)))
    every = np.concatenate([[], *shares])
    return _smallest(2 * np.minimum(every, 1 - every))


def _distribution_p_value(parts: list[np.ndarray]) -> float:
    """Compare each part with a standard Gaussian by the Kolmogorov–Smirnov test."""
    rng = np.random.default_rng(0)
    some = [rng.choice(x.ravel(), min(x.size, _MOST_VALUES), replace=False) for x in parts]
    return _smallest([float(kstest(values, norm.cdf).pvalue) for values in some])


def _correlation_p_value(correlations: np.ndarray, freedom: int) -> float:
    """Test the largest of several correlations, each with `freedom` degrees of freedom."""
    largest = min(float(np.max(np.abs(correlations))), 1.0)
    spread = np.sqrt(max(1 - largest**2, 1e-300) / freedom)
    return _smallest([2 * student.sf(largest / spread, freedom)], correlations.size)


def _steps_p_value(everything: np.ndarray) -> float:
    """Test the largest correlation of two steps. Steps without noise count as correlated."""
    lengths = np.sqrt(np.sum(everything**2, axis=1, keepdims=True))
    unit = everything / np.where(lengths > 0, lengths, 1)
    products = np.where((lengths > 0) & (lengths > 0).T, unit @ unit.T, 1.0)
    return _correlation_p_value(products[np.triu_indices(len(unit), 1)], everything.shape[1] - 1)


def _pairs_p_value(pairs: _Pairs) -> float:
    """Test the correlation of each pair of vectors."""
    values = []
    for one, other in pairs:
        length = np.sqrt((one @ one) * (other @ other))
        correlation = one @ other / length if length else 1.0
        if len(one) > 1:
            values.append(_correlation_p_value(np.array([correlation]), len(one) - 1))
    return _smallest(values)


def _pairs_of_leaves(leaves: list[np.ndarray]) -> _Pairs:
    """Yield pairs of leaves, cut to equal length. Leaves with one key begin with equal numbers."""
    pairs = list(combinations(leaves, 2))
    chosen = np.random.default_rng(0).permutation(len(pairs))[:_MOST_PAIRS]
    for one, other in (pairs[i] for i in chosen):
        size = min(one.shape[1], other.shape[1])
        yield one[:, :size].ravel(), other[:, :size].ravel()


def _pairs_of_parts(leaves: list[np.ndarray]) -> _Pairs:
    """Yield pairs of vectors from the same leaf, whose noise must be independent.

    One pair is the leaf and a copy moved by one entry. Other pairs split an axis into equal parts,
    one for each of several devices. Such a pair is the first two parts.
    """
    for leaf in leaves:
        flat = leaf.reshape(len(leaf), -1)
        if flat.shape[1] > 1:
            yield flat[:, 1:].ravel(), flat[:, :-1].ravel()
        for axis, count in product(range(1, leaf.ndim), _DEVICE_COUNTS):
            size = leaf.shape[axis] // count
            if size > 0:
                along = np.moveaxis(leaf, axis, 1)
                yield along[:, :size].ravel(), along[:, size : 2 * size].ravel()


def _repetitions_p_value(values: np.ndarray, collision: float) -> float:
    """Test the number of repetitions. Independent values are equal with probability `collision`."""
    repeated = values.size - len(np.unique(values))
    return float(poisson.sf(repeated - 1, collision * values.size**2 / 2))


def _overlaps(included: np.ndarray) -> np.ndarray:
    """Return a (steps, steps) matrix: how many examples each pair of batches shares."""
    total = np.zeros((len(included), len(included)))
    for start in range(0, included.shape[1], _CHUNK):
        part = included[:, start : start + _CHUNK].astype(np.float32)
        total += part @ part.T  # exact: the counts are below 2²⁴
    return total


def _count_p_value(count: int, trials: int, rate: float) -> float:
    """Test whether too few or too many of `trials` events of probability `rate` happened."""
    return _smallest([binom.cdf(count, trials, rate), binom.sf(count - 1, trials, rate)])


def _spread_p_value(counts: np.ndarray, trials: int, rate: float) -> float:
    """Test the variance of binomial counts.

    The sum of the squared deviations from the mean is nearly gamma-distributed.
    """
    variance = trials * rate * (1 - rate)
    excess = (1 - 6 * rate * (1 - rate)) / variance
    spread = float(np.sum((counts - trials * rate) ** 2)) / variance
    shape, scale = len(counts) / (2 + excess), 2 + excess
    return 2 * min(float(f(spread, shape, scale=scale)) for f in (gamma.cdf, gamma.sf))


def _companions_p_value(included: np.ndarray, together: float) -> float:
    """Test how often pairs of consecutive examples, and random pairs, share a batch.

    Two examples should share a batch with probability `together`.
    """
    steps, size = included.shape
    values = []
    for order in (np.arange(size), np.random.default_rng(0).permutation(size)):
        one, other = order[: size // 2 * 2].reshape(-1, 2).T
        met = int((included[:, one] & included[:, other]).sum(dtype=np.int64))
        values.append(_count_p_value(met, steps * (size // 2), together))
    return _smallest(values)


def _couples_p_value(included: np.ndarray, together: float) -> float:
    """Test the pair of examples that is most often in one batch.

    Two examples should share a batch with probability `together`.
    """
    steps, size = included.shape
    some = np.sort(np.random.default_rng(0).permutation(size)[:_MOST_EXAMPLES])
    part = included[:, some].astype(np.float32)
    most = np.max(np.triu(part.T @ part, 1))
    return _smallest([binom.sf(most - 1, steps, together)], math.comb(len(some), 2))
