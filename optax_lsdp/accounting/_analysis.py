"""The privacy analysis of each sampling scheme, and of several phases together.

`analyse` returns the dominating pairs of one phase. `PrivacyProfile` composes the pairs of all
phases and computes δ(ε). To add a sampling scheme, add its analysis to `_AMPLIFIED`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self, TypeVar

import numpy as np
from scipy.special import ndtr, ndtri

from optax_lsdp._checks import MOST_STEPS
from optax_lsdp._schemes import RELATIONS, SCHEMES, Sampling
from optax_lsdp.accounting import _bounds as bounds
from optax_lsdp.accounting import _dominating_pairs as dominating
from optax_lsdp.accounting._dominating_pairs import Pair, Step
from optax_lsdp.accounting._quadrature import Steps

if TYPE_CHECKING:
    from optax_lsdp.accounting._mechanisms import SampledGaussian

# Beyond these limits the analysis ignores sampling, or assumes less noise or a higher rate.
_LARGEST_SHIFT = 12.0  # standard deviations of the noise by which one example moves the sum
_LARGEST_DATASET = 10**12  # above this size, rounding hides how often batches are truncated
_MOST_NOISE, _LEAST_RATE, _MOST_RATE = 1e7, 1e-12, 1 - 1e-9
_MOST_MEMBERS = 500  # members of a group in one batch
_MOST_MISSING = 1e-3  # probability of drawing more members than the pair models
_LARGEST_MU = 4.0  # μ of one Gaussian mechanism on the lattice
_LARGEST_DELTA, _LEAST_TRUNCATED = 0.9, 1e-300  # the latter replaces a probability of zero
_PROFILE = 400  # number of ε at which δ(ε) is computed for a trade-off curve

T = TypeVar("T")


class PhaseAnalysis(NamedTuple):
    """Bounds on what one phase reveals: a step, and how often it is composed."""

    mu: float | None  # μ if the whole phase is one Gaussian mechanism, which counts as one step
    # For each case, such as adding or removing an example, a step that dominates one step of the
    # phase. A single entry covers every case.
    upper: tuple[Step, ...]
    # Pairs for lower bounds. For each, one step of the phase reveals at least as much about two
    # particular neighbouring datasets. Empty if no useful pair is known.
    lower: tuple[Pair, ...]
    steps: int  # how often the steps in `upper`, or the pairs in `lower`, are composed


def analyse(phase: "SampledGaussian") -> PhaseAnalysis:
    """Return the pairs that dominate one step of a phase, and the number of steps.

    Where double precision does not suffice, the analysis assumes less noise, a higher sampling
    rate or no sampling instead. Each of these assumptions can only raise ε.
    """
    if phase.noise_multiplier > _MOST_NOISE or phase.sampling_rate < _LEAST_RATE:
        noise = min(phase.noise_multiplier, _MOST_NOISE)
        rate = max(phase.sampling_rate, _LEAST_RATE)
        worse = dataclasses.replace(phase, noise_multiplier=noise, sampling_rate=rate)
        if phase.max_batch_size is not None and rate > phase.sampling_rate:
            # In truncated batches a higher rate can reveal less. This size selects a bound that
            # grows with the rate.
            worse = dataclasses.replace(worse, dataset_size=_LARGEST_DATASET + 1)
        return analyse(worse)._replace(lower=())
    if is_gaussian(phase) or _ignores_sampling(phase):
        mu = unamplified_mu(phase)
        pair = dominating.removal_pair(1.0, mu)
        is_attained = is_gaussian(phase) and phase.sampling != "shuffled"
        return PhaseAnalysis(mu, (((1.0, pair),),), (pair,) if is_attained else (), 1)
    return _AMPLIFIED[phase.sampling](phase)


def is_gaussian(phase: "SampledGaussian") -> bool:
    """Return whether the phase is one Gaussian mechanism, whatever its noise."""
    always_drawn = phase.sampling_rate == 1 and phase.max_batch_size is None
    return always_drawn or not SCHEMES[phase.sampling].amplified


def has_group_analysis(phase: "SampledGaussian") -> bool:
    """Return whether `analyse` handles groups. If not, a bound for all mechanisms covers them."""
    if phase.sampling == "poisson" and phase.max_batch_size is None:
        return phase.neighbouring != "replace_one" or phase.sampling_rate == 1
    return is_gaussian(phase)


def unamplified_mu(phase: "SampledGaussian") -> float:
    """Return μ without any gain from sampling. This μ bounds what the phase reveals.

    An example is used in every step, or once per epoch. A part of an epoch counts as an epoch.
    """
    once_per_epoch = SCHEMES[phase.sampling].once_per_epoch
    uses = math.ceil(phase.steps / (steps_per_epoch(phase) if once_per_epoch else 1))
    return math.sqrt(uses) * _shift(phase)


def steps_per_epoch(phase: "SampledGaussian") -> int:
    """Return ⌊1/q⌋. If q is the float nearest to 1/235, return 235 despite rounding."""
    return math.floor(1 / phase.sampling_rate * (1 + 1e-12))


def _shift(phase: "SampledGaussian") -> float:
    """Return the largest distance of neighbouring sums, in standard deviations of the noise.

    Truncation can replace an example, so the sensitivity is then 2 clip norms.
    """
    truncated = phase.max_batch_size is not None
    sensitivity = 2.0 if truncated else RELATIONS[phase.neighbouring].sensitivity
    return sensitivity * (phase.group_size / phase.noise_multiplier)


def _ignores_sampling(phase: "SampledGaussian") -> bool:
    """Return whether a step reveals too much, steps are too many, or q is almost 1."""
    is_sure = phase.sampling_rate > _MOST_RATE and phase.max_batch_size is None
    if phase.steps > MOST_STEPS or is_sure:
        return True
    if phase.group_size == 1 or phase.sampling != "poisson":
        return _shift(phase) > _LARGEST_SHIFT
    if phase.group_size > _LARGEST_DATASET or phase.noise_multiplier * _LARGEST_SHIFT < 1:
        return True
    shift = 1 / phase.noise_multiplier
    last, missing = dominating.group_members(phase.sampling_rate, shift, phase.group_size)
    return last > _MOST_MEMBERS or missing > _MOST_MISSING


def _without_replacement(phase: "SampledGaussian") -> PhaseAnalysis:
    """Analyse fixed-size batches: an upper bound, and two pairs that some datasets attain."""
    rate, shift = phase.sampling_rate, _shift(phase)
    upper = ((1.0, dominating.fixed_size_pair(rate, shift)),)
    attained = dominating.removal_pair(rate, shift), dominating.addition_pair(rate, shift)
    return PhaseAnalysis(None, (upper,), attained, phase.steps)


def _poisson(phase: "SampledGaussian") -> PhaseAnalysis:
    """Analyse Poisson batches, truncated or not."""
    if phase.max_batch_size is not None:
        return _truncated_poisson(phase, phase.max_batch_size)
    upper = tuple(((1.0, pair),) for pair in _poisson_pairs(phase, phase.sampling_rate))
    lower = _poisson_pairs(phase, phase.sampling_rate, optimistic=True)
    return PhaseAnalysis(None, upper, lower, phase.steps)


def _poisson_pairs(
    phase: "SampledGaussian", rate: float, *, optimistic: bool = False
) -> tuple[Pair, ...]:
    shift = 1 / phase.noise_multiplier
    if phase.neighbouring == "replace_one":
        return (dominating.replacement_pair(rate, shift),)
    if phase.group_size > 1:
        both = dominating.group_removal_pair, dominating.group_addition_pair
        return tuple(pair(rate, shift, phase.group_size, optimistic=optimistic) for pair in both)
    return dominating.removal_pair(rate, shift), dominating.addition_pair(rate, shift)


def _truncated_poisson(phase: "SampledGaussian", most: int) -> PhaseAnalysis:
    """Analyse Poisson batches that are truncated to `most` = B examples.

    Let N be the number of other examples that were drawn. N does not depend on the example. If
    N < B, the step is an ordinary Poisson step. If N ≥ B, the batch has B examples. With
    probability q·B/(N + 1), the example is one of them and takes the place of another example.
    Otherwise the batch is a uniform subset of the other examples. So the step at most replaces an
    example, as in a batch of fixed size. The analysis assumes that the attacker learns whether
    N < B. This knowledge can only reveal more. A dataset of n examples has n − 1 other examples, or
    n if the example is added to the dataset.

    Lower bounds use datasets whose other examples contribute zero. In such datasets, truncation
    only makes it less likely that the example is in the batch.

    The probabilities of N < B and N ≥ B are known up to rounding. The uncertain remainder gets a
    pair that dominates both cases: `fixed_size_pair` at rate q, with an example replaced. It also
    dominates `replacement_pair`, because the centres of `replacement_pair` are no further apart.
    """
    rate, shift, size = phase.sampling_rate, 2 / phase.noise_multiplier, phase.dataset_size or 0
    in_any_case = dominating.fixed_size_pair(rate, shift)
    if size > _LARGEST_DATASET:
        return PhaseAnalysis(None, (((1.0, in_any_case),),), (), phase.steps)
    pairs = _poisson_pairs(phase, rate)
    upper: list[Step] = []
    lower: list[Pair] = []
    for others in (size - 1, size) if phase.neighbouring == "add_remove" else (size - 1,):
        if most > others:
            upper += [((1.0, pair),) for pair in pairs]
            lower += pairs
            continue
        rounding = dominating.binomial_rounding(others)
        tail = dominating.binomial_upper_tail
        truncated = max(tail(most, others, rate), _LEAST_TRUNCATED)
        ordinary = dominating.binomial_lower_tail(most, others, rate)
        replaced = most * tail(most + 1, others + 1, rate) / (others + 1)
        share = (replaced + _LEAST_TRUNCATED) / truncated * (1 + 3 * rounding)
        worst = dominating.fixed_size_pair(min(rate, share), shift)
        unknown = 2 * rounding * min(truncated, ordinary)
        if ordinary < truncated:
            is_truncated, is_ordinary = 1 - ordinary * (1 + rounding), ordinary * (1 - rounding)
        else:
            is_truncated, is_ordinary = truncated * (1 - rounding), 1 - truncated * (1 + rounding)
        upper += [
            ((is_ordinary, pair), (is_truncated, worst), (unknown, in_any_case)) for pair in pairs
        ]
        if (least := (rate * is_ordinary + replaced) * (1 - 2 * rounding)) >= _LEAST_RATE:
            lower += _poisson_pairs(phase, least)
    return PhaseAnalysis(None, tuple(upper), tuple(lower), phase.steps)


_AMPLIFIED: dict[Sampling, Callable[["SampledGaussian"], PhaseAnalysis]] = {
    "poisson": _poisson,
    "without_replacement": _without_replacement,
}


_Analyses = Sequence[PhaseAnalysis]  # one for each phase


@dataclass(frozen=True)
class PrivacyProfile:
    """The function δ(ε) of several phases together, bounded from above and from below.

    All phases that are Gaussian mechanisms are combined into one Gaussian mechanism.
    """

    mu: float  # μ of all Gaussian phases together
    # For each case, the steps to compose for upper bounds; see `PhaseAnalysis`. Empty if all phases
    # are Gaussian mechanisms. Then δ(ε) has a closed form, and `lower` is empty, too.
    upper: tuple[Steps, ...]
    mu_lower: float  # the same for lower bounds
    lower: tuple[Sequence[tuple[Pair, int]], ...]
    group_size: int  # the size of groups that only the bound for all mechanisms covers, otherwise 1
    mu_unamplified: float  # μ without any gain from sampling: no answer exceeds its ε or δ

    @classmethod
    def of(cls, upper: _Analyses, lower: _Analyses, group_size: int, mu_unamplified: float) -> Self:
        """Return the profile of phases from their analyses."""
        mu = math.hypot(*(one.mu for one in upper if one.mu is not None))
        mu = min(mu * (1 + 1e-15), mu_unamplified)
        mu_lower = math.hypot(*(one.mu for one in lower if one.mu is not None and one.lower))
        most = _cases([(one.upper, one.steps) for one in upper if one.mu is None])
        least = _cases([(one.lower, one.steps) for one in lower if one.mu is None and one.lower])
        if mu:
            pair, count = _split_gaussian(mu)
            most = [[*case, (((1.0, pair),), count)] for case in most]
        if mu_lower:
            least = [[*case, _split_gaussian(mu_lower)] for case in least]
        return cls(mu, tuple(most), mu_lower, tuple(least), group_size, mu_unamplified)

    def epsilon(self, delta: float) -> float:
        """Return an upper bound on the smallest ε: the maximum over all cases."""
        delta = min(delta, _LARGEST_DELTA)
        if not self.upper and self.group_size == 1:
            return bounds.gaussian_epsilon(delta, self.mu) if self.mu else 0.0
        most = bounds.gaussian_epsilon(delta, self.mu_unamplified)
        if self.group_size > 1:
            return min(most, self._group_epsilon(delta, most))
        return min(most, max(bounds.upper_epsilon(case, delta, most) for case in self.upper))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ(ε): the maximum over all cases."""
        if not self.upper and self.group_size == 1:
            return bounds.gaussian_delta(epsilon, self.mu) if self.mu else 0.0
        most = bounds.gaussian_delta(epsilon, self.mu_unamplified)
        if self.group_size > 1:
            return min(most, math.exp(min(0.0, self._log_group_delta(epsilon))))
        return min(most, max(bounds.upper_delta(case, epsilon) for case in self.upper))

    def lower_epsilon(self, delta: float, upper: float) -> float:
        """Return a lower bound on the smallest ε. `upper` must be an upper bound on the same ε."""
        if not self.lower:
            return bounds.gaussian_lower_epsilon(delta, self.mu_lower) if self.mu_lower else 0.0
        highest = 0.0
        for case in self.lower:
            if highest < 0.9997 * upper:
                highest = max(highest, bounds.lower_epsilon(case, delta, upper))
        return highest

    def trade_off(self, rates: np.ndarray) -> np.ndarray:
        """Return a lower bound on the false-negative rate at each false-positive rate α.

        Every valid (ε, δ) gives two lines below the curve: 1 − δ − e^ε α and e^(−ε)(1 − δ − α).
        """
        if not self.upper and self.group_size == 1:
            return ndtr(-ndtri(rates) - self.mu) * (1 - 1e-12)
        epsilons = np.linspace(0.0, min(self.epsilon(1e-12), 600.0), _PROFILE)
        deltas = self._deltas(epsilons)
        steep = 1 - deltas[:, None] - np.exp(epsilons)[:, None] * rates
        flat = np.exp(-epsilons)[:, None] * (1 - deltas[:, None] - rates)
        return np.maximum(0.0, np.maximum(steep, flat).max(axis=0))

    def _deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return an upper bound on δ at each of several increasing ε.

        For groups, δ is computed at every 20th ε. The larger ε in between get the same bound.
        """
        if self.group_size > 1:
            few = np.array([self.delta(one) for one in epsilons[::20]])
            return np.repeat(few, 20)[: len(epsilons)]
        most = [bounds.gaussian_delta(one, self.mu_unamplified) for one in epsilons]
        cases = [bounds.upper_profile(case, epsilons) for case in self.upper]
        return np.minimum(most, np.max(cases, axis=0))

    @property
    def _single(self) -> Self:
        return dataclasses.replace(self, group_size=1)

    def _log_group_delta(self, epsilon: float) -> float:
        """Return log Σ e^(iε/k)·δ(ε/k) over i < k, the bound for a chain of k neighbours."""
        each = epsilon / self.group_size
        single = max(self._single.delta(each), 1e-300)
        return math.log(single) + _log_powers(each, self.group_size)

    def _group_epsilon(self, delta: float, most: float) -> float:
        """Return an ε with `_log_group_delta(ε)` ≤ log δ, or `most` if the search finds none.

        An ε below k times the ε of one example cannot suffice, as δ(ε/k) must be at most δ.
        """
        low = high = self.group_size * self._single.epsilon(delta)
        previous = math.inf
        while (excess := self._log_group_delta(high) - math.log(delta)) > 0:
            low, high = high, 1.5 * high + 1e-9
            if high > most or excess >= previous:  # δ(ε/k) is below the smallest double
                return most
            previous = excess
        while high - low > 1e-4 * high:
            middle = (low + high) / 2
            is_over = self._log_group_delta(middle) > math.log(delta)
            low, high = (middle, high) if is_over else (low, middle)
        return high


def _log_powers(x: float, count: int) -> float:
    """Return log Σ e^(ix) over i < count, for x ≥ 0."""
    if x * count < 1e-12:
        return math.log(count) + x * count
    return (count - 1) * x + math.log(math.expm1(-count * x) / math.expm1(-x))


def _cases(parts: list[tuple[tuple[T, ...], int]]) -> list[list[tuple[T, int]]]:
    """Return the parts of all phases for each case. A phase with fewer cases repeats its cases."""
    return [
        [(cases[case % len(cases)], count) for cases, count in parts]
        for case in range(max((len(cases) for cases, _ in parts), default=0))
    ]


def _split_gaussian(mu: float) -> tuple[Pair, int]:
    """Split a Gaussian mechanism into equal mechanisms whose μ the lattice can handle."""
    count = math.ceil(max(1.0, min(mu / _LARGEST_MU, 1e100)) ** 2)
    return dominating.removal_pair(1.0, mu / math.sqrt(count)), count
