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
_MOST_MISSING = 1e-3  # probability that a batch has more members of a group than the pair models
_LARGEST_MU = 4.0  # largest μ of a Gaussian mechanism that counts as one step on the lattice
_LARGEST_DELTA = 0.9
_LEAST_TRUNCATED = 1e-300  # replaces a probability of zero
_PROFILE = 400  # number of ε at which δ(ε) is computed for a trade-off curve

T = TypeVar("T")


class PhaseAnalysis(NamedTuple):
    """Bounds on what one phase reveals.

    A case is one way in which neighbouring datasets may differ, such as one example added, or one
    example removed. Each case has its own bounds. A guarantee must hold in all cases.

    If the whole phase is treated as one Gaussian mechanism, the mechanism counts as one step.
    """

    mu: float | None  # μ of the one Gaussian mechanism; None for other phases
    upper: tuple[Step, ...]  # for each case, a `Step` that dominates one step of the phase
    lower: tuple[Pair, ...]  # for each case, a pair that one step dominates; empty if none is known
    steps: int  # how often `upper` and `lower` are composed


def analyse(phase: "SampledGaussian") -> PhaseAnalysis:
    """Return the analysis of a phase.

    Where double precision does not suffice, the analysis assumes less noise, a higher sampling
    rate or no sampling. Each of these assumptions can only raise ε.
    """
    if phase.noise_multiplier > _MOST_NOISE or phase.sampling_rate < _LEAST_RATE:
        noise = min(phase.noise_multiplier, _MOST_NOISE)
        rate = max(phase.sampling_rate, _LEAST_RATE)
        worse = dataclasses.replace(phase, noise_multiplier=noise, sampling_rate=rate)
        if phase.max_batch_size is not None and rate > phase.sampling_rate:
            # With truncated batches, a higher rate can reveal less. For a dataset of this size,
            # `_truncated_poisson` instead uses a bound that grows with the rate.
            worse = dataclasses.replace(worse, dataset_size=_LARGEST_DATASET + 1)
        return analyse(worse)._replace(lower=())
    if is_gaussian(phase) or _ignores_sampling(phase):
        mu = unamplified_mu(phase)
        pair = dominating.removal_pair(1.0, mu)
        is_attained = phase.is_exact and is_gaussian(phase) and phase.sampling != "shuffled"
        return PhaseAnalysis(mu, (((1.0, pair),),), (pair,) if is_attained else (), 1)
    found = _AMPLIFIED[phase.sampling](phase)
    return found if phase.is_exact else found._replace(lower=())


def is_gaussian(phase: "SampledGaussian") -> bool:
    """Return whether a phase is treated as one Gaussian mechanism, whatever its noise multiplier.

    This holds if sampling is not claimed to lower ε, or if every batch contains every example.
    """
    always_drawn = phase.sampling_rate == 1 and phase.max_batch_size is None
    return always_drawn or not SCHEMES[phase.sampling].amplified


def has_group_analysis(phase: "SampledGaussian") -> bool:
    """Return whether `analyse` covers groups of the phase.

    If not, `PrivacyProfile` uses the generic bound for groups; see `Mechanism.group`.
    """
    if not phase.has_group_analysis:
        return False
    if phase.sampling == "poisson" and phase.max_batch_size is None:
        return phase.neighbouring != "replace_one" or phase.sampling_rate == 1
    return is_gaussian(phase)


def unamplified_mu(phase: "SampledGaussian") -> float:
    """Return the μ of a Gaussian mechanism that dominates a phase whose batches are public.

    The bound assumes that every step uses every example. With shuffled batches, it assumes that
    every epoch uses every example once. A part of an epoch counts as a whole epoch.
    """
    once_per_epoch = SCHEMES[phase.sampling].once_per_epoch
    uses = math.ceil(phase.steps / (steps_per_epoch(phase) if once_per_epoch else 1))
    return math.sqrt(uses) * _shift(phase)


def steps_per_epoch(phase: "SampledGaussian") -> int:
    """Return ⌊1/q⌋ for the sampling rate q, in spite of rounding: 235 if q is the float 1/235."""
    return math.floor(1 / phase.sampling_rate * (1 + 1e-12))


def _shift(phase: "SampledGaussian") -> float:
    """Return how far sums of neighbouring datasets can differ, in standard deviations of noise."""
    is_truncated = phase.max_batch_size is not None  # truncation can replace an example
    sensitivity = 2.0 if is_truncated else RELATIONS[phase.neighbouring].sensitivity
    return sensitivity * (phase.group_size / phase.noise_multiplier)


def _ignores_sampling(phase: "SampledGaussian") -> bool:
    """Return whether to ignore sampling, because the phase exceeds a limit of the analysis."""
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
    rate, shift = phase.sampling_rate, _shift(phase)
    upper = ((1.0, dominating.fixed_size_pair(rate, shift)),)
    lower = dominating.removal_pair(rate, shift), dominating.addition_pair(rate, shift)
    return PhaseAnalysis(None, (upper,), lower, phase.steps)


def _poisson(phase: "SampledGaussian") -> PhaseAnalysis:
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
    """Return the analysis of Poisson batches at rate q that are truncated to `most` = B examples.

    Neighbouring datasets differ in one example x. Let N be the number of other examples that a step
    draws before it truncates. N does not depend on x.

    1. If N < B, the step is an ordinary Poisson step.
    2. If N ≥ B, the batch has B examples. With probability q·B/(N + 1), x is in the batch and takes
       the place of another example. Otherwise, the batch is a uniform subset of the other examples.
       So x replaces at most one example, as in a batch of fixed size.

    The analysis assumes that the attacker learns whether N < B, which can only reveal more. The
    dataset has n = `dataset_size` examples, so n − 1 examples are not x. With "add_remove", x may
    also be added to the n examples, so the analysis covers n other examples too.

    Lower bounds use datasets in which all examples but x contribute zero. There, truncation only
    makes it less likely that x is in the batch.

    The probabilities of N < B and N ≥ B are known up to a rounding error. The analysis gives the
    probability of this error to a pair that dominates both cases: `fixed_size_pair` at rate q, with
    one example replaced. This pair also dominates `replacement_pair`, whose centres are no further
    apart.
    """
    rate, shift, size = phase.sampling_rate, 2 / phase.noise_multiplier, phase.dataset_size or 0
    dominates_both = dominating.fixed_size_pair(rate, shift)
    if size > _LARGEST_DATASET:
        return PhaseAnalysis(None, (((1.0, dominates_both),),), (), phase.steps)
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
        rest = (is_truncated, worst), (unknown, dominates_both)
        upper += [((is_ordinary, pair), *rest) for pair in pairs]
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
    """Upper and lower bounds on δ(ε) of several phases together."""

    mu: float  # μ of all Gaussian phases together, for upper bounds
    # For each case, the steps to compose for upper bounds. Empty if all phases are Gaussian.
    upper: tuple[Steps, ...]
    mu_lower: float  # μ of those Gaussian phases for which `PhaseAnalysis.lower` is known
    # For each case, the pairs to compose for lower bounds. Empty if only `mu_lower` is needed.
    lower: tuple[Sequence[tuple[Pair, int]], ...]
    group_size: int  # k, if only the generic bound covers groups of k examples, otherwise 1
    mu_unamplified: float  # μ of all phases if the attacker knew every batch; caps all upper bounds

    @classmethod
    def of(cls, upper: _Analyses, lower: _Analyses, group_size: int, mu_unamplified: float) -> Self:
        """Return the profile of a sequence of phases.

        Args:
            upper: the analyses for upper bounds on δ.
            lower: the analyses for lower bounds on δ. Their phases may have more noise and lower
                rates than the actual phases, because `simplify` rounds phases.
            group_size: see `PrivacyProfile`.
            mu_unamplified: see `PrivacyProfile`.
        """
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
        """Return an upper bound on ε at `delta`: the largest upper bound of all cases."""
        delta = min(delta, _LARGEST_DELTA)
        if not self.upper and self.group_size == 1:
            return bounds.gaussian_epsilon(delta, self.mu) if self.mu else 0.0
        most = bounds.gaussian_epsilon(delta, self.mu_unamplified)
        if self.group_size > 1:
            return min(most, self._group_epsilon(delta, most))
        return min(most, max(bounds.upper_epsilon(case, delta, most) for case in self.upper))

    def delta(self, epsilon: float) -> float:
        """Return an upper bound on δ at `epsilon`: the largest upper bound of all cases."""
        if not self.upper and self.group_size == 1:
            return bounds.gaussian_delta(epsilon, self.mu) if self.mu else 0.0
        most = bounds.gaussian_delta(epsilon, self.mu_unamplified)
        if self.group_size > 1:
            return min(most, math.exp(min(0.0, self._log_group_delta(epsilon))))
        return min(most, max(bounds.upper_delta(case, epsilon) for case in self.upper))

    def lower_epsilon(self, delta: float, upper: float) -> float:
        """Return a lower bound on ε at `delta`, given an upper bound `upper` on this ε."""
        if not self.lower:
            return bounds.gaussian_lower_epsilon(delta, self.mu_lower) if self.mu_lower else 0.0
        highest = 0.0
        for case in self.lower:
            if highest < 0.9997 * upper:
                highest = max(highest, bounds.lower_epsilon(case, delta, upper))
        return highest

    def trade_off(self, rates: np.ndarray) -> np.ndarray:
        """Return a lower bound on the false-negative rate at each false-positive rate α.

        For Gaussian phases, use the closed form. For all others, compute δ at several ε. Each pair
        (ε, δ) gives two lower bounds: 1 − δ − e^ε α and e^(−ε)(1 − δ − α). Return the largest one.
        """
        if not self.upper and self.group_size == 1:
            return ndtr(-ndtri(rates) - self.mu) * (1 - 1e-12)
        epsilons = np.linspace(0.0, min(self.epsilon(1e-12), 600.0), _PROFILE)
        deltas = self._deltas(epsilons)
        steep = 1 - deltas[:, None] - np.exp(epsilons)[:, None] * rates
        flat = np.exp(-epsilons)[:, None] * (1 - deltas[:, None] - rates)
        return np.maximum(0.0, np.maximum(steep, flat).max(axis=0))

    def _deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """Return an upper bound on δ at each of several increasing ε."""
        if self.group_size > 1:  # compute every 20th δ; it also bounds δ at the next 19 larger ε
            few = np.array([self.delta(one) for one in epsilons[::20]])
            return np.repeat(few, 20)[: len(epsilons)]
        most = [bounds.gaussian_delta(one, self.mu_unamplified) for one in epsilons]
        cases = [bounds.upper_profile(case, epsilons) for case in self.upper]
        return np.minimum(most, np.max(cases, axis=0))

    @property
    def _single(self) -> Self:
        return dataclasses.replace(self, group_size=1)

    def _log_group_delta(self, epsilon: float) -> float:
        """Return log Σ e^(iε/k)·δ(ε/k) over i < k, the generic bound for groups of k examples.

        Here k is `group_size`, and δ(ε/k) is the δ of one example.
        """
        each, k = epsilon / self.group_size, self.group_size
        log_single = math.log(max(self._single.delta(each), 1e-300))
        if k * each < 1e-12:
            return log_single + (math.log(k) + each * k)
        return log_single + ((k - 1) * each + math.log(math.expm1(-k * each) / math.expm1(-each)))

    def _group_epsilon(self, delta: float, most: float) -> float:
        """Return an ε with `_log_group_delta(ε)` ≤ log δ, or `most` if the search finds no such ε.

        The search starts at k = `group_size` times the ε of one example. At a smaller ε, the first
        term of the generic bound, δ(ε/k), would already exceed δ.
        """
        low = high = self.group_size * self._single.epsilon(delta)
        previous, log_delta = math.inf, math.log(delta)
        while (excess := self._log_group_delta(high) - log_delta) > 0:
            low, high = high, 1.5 * high + 1e-9
            if high > most or excess >= previous:  # δ(ε/k) is too small for a double
                return most
            previous = excess
        return bounds.narrow(low, high, lambda at: self._log_group_delta(at) <= log_delta, 1e-4)


def _cases(parts: list[tuple[tuple[T, ...], int]]) -> list[list[tuple[T, int]]]:
    """Return, for each case, a list with one (step, count) or (pair, count) per phase.

    Each entry of `parts` belongs to a phase. It has one step or pair per case, and a count. If a
    phase has fewer cases than other phases, its cases repeat in order.
    """
    most = max((len(cases) for cases, _ in parts), default=0)
    return [[(cases[i % len(cases)], count) for cases, count in parts] for i in range(most)]


def _split_gaussian(mu: float) -> tuple[Pair, int]:
    """Return a pair, and how many copies of it compose to a Gaussian mechanism with μ = `mu`."""
    count = math.ceil(max(1.0, min(mu / _LARGEST_MU, 1e100)) ** 2)
    return dominating.removal_pair(1.0, mu / math.sqrt(count)), count
