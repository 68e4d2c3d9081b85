"""The privacy of one or several phases on the same data.

A phase is a number of equal steps, such as a `SampledGaussian`. `Mechanism` holds the methods that
a phase, a `Composition` of phases and a `Ledger` share.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from optax_lsdp._checks import check_delta, check_non_negative, check_whole, refusal
from optax_lsdp._schemes import SCHEMES
from optax_lsdp.accounting import _analysis as analysis

if TYPE_CHECKING:
    import dp_accounting

    from optax_lsdp.accounting._mechanisms import Phase, SampledGaussian

_MOST_KINDS = 64  # if there are more different sampled phases, similar phases are made equal


class Mechanism:
    """Training steps, each of which may depend on the results of earlier steps.

    `a + b` is the steps of a, followed by the steps of b on the same data. Every method that
    returns ε or δ errs towards a larger ε.
    """

    if TYPE_CHECKING:  # a real property would keep `Composition` from storing its field `phases`

        @property
        def phases(self) -> tuple[Phase, ...]:
            """The phases, in order."""

    @property
    def parts(self) -> "tuple[SampledGaussian, ...]":
        """The phases in no particular order, with equal phases merged.

        A phase with correlated noise is replaced by its `dominating` phase.
        """
        return merge(phase.dominating for phase in self.phases)

    def group(self, size: int) -> "Mechanism":
        """Return the same steps with a guarantee for any `size` examples that change together.

        How tight ε is depends on the batches:

        - For full batches, shuffled batches and one fixed order, ε is as tight as for one example.
        - For Poisson batches without `max_batch_size`, with "add_remove" or "zero_out", ε is tight.
          The exception is a group whose members in one batch are likely to move the sum by more
          than 20 standard deviations of the noise.
        - All other cases use the *generic bound*, which may be far above the true ε.
        """
        check_whole("size", size)
        return Composition(tuple(phase.group(size) for phase in self.phases))

    def to_dp_event(self) -> "dp_accounting.DpEvent":
        """Return the steps as a `DpEvent` for an accountant of the package dp-accounting.

        Pass the neighbouring relation to that accountant, because a `DpEvent` does not contain it.
        """
        try:
            import dp_accounting as dp
        except ModuleNotFoundError as error:
            message = "to_dp_event needs dp-accounting; run `pip install dp-accounting`."
            raise ModuleNotFoundError(message) from error
        phases = [phase.dominating for phase in self.phases]
        events = [dp.SelfComposedDpEvent(_step_event(one, dp), one.steps) for one in phases]
        return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε for which (ε, δ)-differential privacy is certified."""
        check_delta("delta", delta)
        return profile(self.parts).epsilon(float(delta))

    def delta(self, epsilon: float) -> float:
        """Return the smallest δ for which (ε, δ)-differential privacy is certified."""
        check_non_negative("epsilon", epsilon)
        return profile(self.parts).delta(float(epsilon))

    def epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """Return certified lower and upper bounds on the smallest ε.

        The lower bound is the ε of two particular neighbouring datasets. It is 0 for shuffled
        batches and for correlated noise. For groups with the generic bound (see `group`), it is the
        lower bound for one example. If large privacy losses are rare, the lower bound may be far
        below the true ε, or 0. This happens at noise multipliers below 1 with sampling rates near
        1/steps.
        """
        check_delta("delta", delta)
        found = profile(self.parts)
        upper = found.epsilon(float(delta))
        lower = found.lower_epsilon(float(delta), upper)
        if lower > upper:
            raise ArithmeticError(
                f"the bounds on ε contradict each other, {lower!r} and {upper!r}; report the "
                "arguments of this call as a bug of optax_lsdp."
            )
        return lower, upper

    def trade_off(self, alpha: float | np.ndarray) -> float | np.ndarray:
        """Return f(α) of f-differential privacy at one or more false-positive rates α.

        No test between neighbouring datasets has a false-negative rate below f(α).
        """
        rates = np.asarray(alpha, float)
        if not np.all((rates >= 0) & (rates <= 1)):
            raise refusal("alpha", "between 0 and 1", alpha)
        missed = profile(self.parts).trade_off(rates.ravel()).reshape(rates.shape)
        return float(missed) if rates.ndim == 0 else missed

    def advantage(self) -> float:
        """Return δ(0), the largest value of 1 − α − f(α), where f is `trade_off`.

        In every test between neighbouring datasets, the rate of true positives exceeds the rate of
        false positives by at most this number.
        """
        return self.delta(0.0)

    def __add__(self, other: "Mechanism") -> "Composition":
        if not isinstance(other, Mechanism):
            return NotImplemented
        return Composition((*self.phases, *other.phases))

    def __radd__(self, other: object) -> "Mechanism":
        return self if other == 0 else NotImplemented  # sum() starts at 0


@dataclass(frozen=True)
class Composition(Mechanism):
    """Several phases on the same data, one after the other: `first + second`, or `sum(phases)`.

    >>> from optax_lsdp.accounting import SampledGaussian
    >>> warm_up = SampledGaussian(4.0, 0.01, 500)
    >>> main = SampledGaussian(2.0, 0.02, 1000)
    >>> round((warm_up + main).epsilon(1e-5), 2)
    1.35
    """

    phases: "tuple[Phase, ...]"

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        for phase in self.phases:
            if not hasattr(phase, "group_size"):
                demand = "SampledGaussians or CorrelatedGaussians"
                raise TypeError(f"`phases` must be {demand}, got {repr(phase)[:200]}.")
        for name in ("neighbouring", "group_size"):
            values = {getattr(phase, name) for phase in self.phases}
            if len(values) > 1:
                got = " and ".join(sorted(map(repr, values)))
                raise ValueError(
                    f"`{name}` must be the same in all phases of a composition, got {got}."
                )


def merge(phases: "Iterable[SampledGaussian]") -> "tuple[SampledGaussian, ...]":
    """Return the phases, with equal phases merged into one phase that has all their steps.

    A phase that ends in the middle of a shuffled epoch is not merged. Its last epoch may use the
    same examples as the last epoch of another phase.
    """
    counts: Counter[SampledGaussian] = Counter()
    apart = []
    for phase in phases:
        if SCHEMES[phase.sampling].once_per_epoch and phase.steps % analysis.steps_per_epoch(phase):
            apart.append(phase)
        else:
            size = None if phase.max_batch_size is None else phase.dataset_size
            counts[replace(phase, steps=1, dataset_size=size)] += phase.steps
    return *(replace(key, steps=steps) for key, steps in counts.items() if steps), *apart


def profile(phases: "tuple[SampledGaussian, ...]") -> analysis.PrivacyProfile:
    """Return the privacy profile of all phases together."""
    group_size = 1
    if not all(map(analysis.has_group_analysis, phases)):
        group_size = phases[0].group_size
        phases = tuple(replace(phase, group_size=1) for phase in phases)
    unamplified = group_size * math.hypot(*map(analysis.unamplified_mu, phases)) * (1 + 1e-15)
    upper = [analysis.analyse(phase) for phase in merge(simplify(phases))]
    lower = [analysis.analyse(phase) for phase in merge(simplify(phases, more_private=True))]
    return analysis.PrivacyProfile.of(upper, lower, group_size, unamplified)


def simplify(
    phases: "Sequence[SampledGaussian]", *, more_private: bool = False
) -> "Sequence[SampledGaussian]":
    """Return the phases. If too many are different, make similar phases equal by rounding.

    Round noise down and rates up, which can only raise ε. If `more_private`, round noise up and
    rates down, which can only lower ε.
    """
    rounded, ratio = phases, 1e-4
    while len({replace(phase, steps=1) for phase in rounded if phase.mu is None}) > _MOST_KINDS:
        ratio *= 1.5
        if ratio > 1:
            break
        rounded = [_rounded(phase, math.log1p(ratio), more_private) for phase in phases]
    return rounded


def _rounded(phase: "SampledGaussian", grid: float, more_private: bool) -> "SampledGaussian":
    if phase.mu is not None:
        return phase
    down, up = (math.ceil, math.floor) if more_private else (math.floor, math.ceil)
    smaller, larger = (max, min) if more_private else (min, max)
    noise = math.exp(grid * down(math.log(phase.noise_multiplier) / grid))
    rate = math.exp(grid * up(math.log(phase.sampling_rate) / grid))
    if phase.max_batch_size is not None:  # truncated batches: a higher rate can reveal less
        rate = phase.sampling_rate
    return replace(
        phase,
        noise_multiplier=smaller(noise, phase.noise_multiplier),
        sampling_rate=min(1.0, larger(rate, phase.sampling_rate)),
    )


def _step_event(phase: "SampledGaussian", dp: ModuleType) -> "dp_accounting.DpEvent":
    """Return one step as a `DpEvent`. `dp` is the module dp_accounting."""
    if SCHEMES[phase.sampling].once_per_epoch:
        demand = "'poisson', 'without_replacement' or 'full' for to_dp_event"
        raise refusal(
            "sampling",
            demand,
            phase.sampling,
            "use `epsilon`, because dp-accounting has no event for shuffled batches",
        )
    if phase.group_size != 1:
        demand = "1 for to_dp_event, because a DpEvent describes single examples"
        raise refusal("group_size", demand, phase.group_size, "call to_dp_event before `group`")
    event = dp.GaussianDpEvent(phase.noise_multiplier)
    if phase.max_batch_size is not None:
        return dp.dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=phase.dataset_size,
            sampling_probability=phase.sampling_rate,
            truncated_batch_size=phase.max_batch_size,
            noise_multiplier=phase.noise_multiplier,
        )
    if phase.sampling == "poisson":
        return dp.PoissonSampledDpEvent(phase.sampling_rate, event)
    if phase.sampling == "without_replacement":
        if phase.dataset_size is None:
            demand = "a number for to_dp_event with sampling='without_replacement'"
            raise refusal("dataset_size", demand, None, "pass `dataset_size` to SampledGaussian")
        size = math.ceil(phase.sampling_rate * phase.dataset_size * (1 - 1e-12))
        return dp.SampledWithoutReplacementDpEvent(phase.dataset_size, size, event)
    return event
