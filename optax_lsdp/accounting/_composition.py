"""Questions about the privacy of one phase, or of several phases on the same data.

A phase is a number of equal steps, described by a `SampledGaussian`. `Mechanism` holds the
questions that a phase, a `Composition` of phases and a `Ledger` all answer.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from optax_lsdp._checks import check_delta, check_non_negative, check_whole
from optax_lsdp._schemes import SCHEMES
from optax_lsdp.accounting._analysis import (
    PrivacyProfile,
    analyse,
    has_group_analysis,
    steps_per_epoch,
    unamplified_mu,
)

if TYPE_CHECKING:
    import dp_accounting

    from optax_lsdp.accounting._mechanisms import SampledGaussian

_MOST_KINDS = 64  # different sampled steps; if there are more, similar ones count as equal


class Mechanism:
    """Questions about the privacy of steps; `a + b` takes a's steps and then b's on the same data.

    Answers hold for adaptively chosen steps. Every answer errs towards less privacy.
    """

    if TYPE_CHECKING:  # a real property would keep `Composition` from storing its field

        @property
        def phases(self) -> tuple[SampledGaussian, ...]:
            """The phases in the order in which they take place."""
            ...

    @property
    def parts(self) -> "tuple[SampledGaussian, ...]":
        """The phases with equal ones merged, in no particular order."""
        return merge(self.phases)

    def group(self, size: int) -> "Mechanism":
        """Return the same steps, accounted for groups of `size` examples that change together.

        Full batches are accounted for exactly. Poisson batches with "add_remove" or "zero_out" have
        a tight analysis, unless a batch is likely to draw so many members that they move the sum by
        more than 20 standard deviations of the noise. In all other cases ε comes from a bound that
        holds for every mechanism, and may be far above the true ε.
        """
        check_whole("size", size)
        return Composition(tuple(phase.group(size) for phase in self.phases))

    def to_dp_event(self) -> "dp_accounting.DpEvent":
        """Return the steps as an event of dp-accounting, which must be installed.

        An event does not contain the neighbouring relation: pass it to the accountant.
        """
        try:
            import dp_accounting as dp
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "to_dp_event needs dp-accounting; pip install dp-accounting."
            ) from error
        events = [
            dp.SelfComposedDpEvent(_step_event(phase, dp), phase.steps) for phase in self.phases
        ]
        return events[0] if len(events) == 1 else dp.ComposedDpEvent(events)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε for which (ε, δ)-differential privacy is certified."""
        check_delta("delta", delta)
        return privacy_profile(self.parts).epsilon(float(delta))

    def delta(self, epsilon: float) -> float:
        """Return the smallest δ for which (ε, δ)-differential privacy is certified."""
        check_non_negative("epsilon", epsilon)
        return privacy_profile(self.parts).delta(float(epsilon))

    def epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """Return certified lower and upper bounds on the smallest ε.

        The lower bound is the ε of two particular neighbouring datasets. For shuffled batches it is
        0, because no good datasets are known. For groups without an analysis of their own it is the
        bound for one example. It may be far below the true ε, or 0, where losses are rare and
        large: at noise multipliers below 1 with sampling rates near 1/steps.
        """
        check_delta("delta", delta)
        profile = privacy_profile(self.parts)
        upper = profile.epsilon(float(delta))
        lower = profile.lower_epsilon(float(delta), upper)
        if lower > upper:
            raise ArithmeticError(
                f"the bounds on ε contradict each other, {lower!r} and {upper!r}; please report "
                "the settings."
            )
        return lower, upper

    def trade_off(self, alpha: float | np.ndarray) -> float | np.ndarray:
        """Return a lower bound on the false-negative rate of any test for one example.

        This is the function f of f-differential privacy. `alpha` is the test's false-positive rate,
        a number or an array of numbers.
        """
        rates = np.asarray(alpha, float)
        if not np.all((rates >= 0) & (rates <= 1)):
            raise ValueError(f"`alpha` must be between 0 and 1, got {alpha!r}.")
        missed = privacy_profile(self.parts).trade_off(rates.ravel()).reshape(rates.shape)
        return float(missed) if rates.ndim == 0 else missed

    def advantage(self) -> float:
        """Return the most that a test for one example gains over guessing, δ(0).

        This is the largest 1 − α − f(α), where f is the `trade_off`.
        """
        return self.delta(0.0)

    def __add__(self, other: "Mechanism") -> "Composition":
        """Return these steps, followed by the other's steps on the same data."""
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

    phases: "tuple[SampledGaussian, ...]"

    def __post_init__(self) -> None:
        object.__setattr__(self, "phases", tuple(self.phases))
        for name in ("neighbouring", "group_size"):
            values = {getattr(phase, name) for phase in self.phases}
            if len(values) > 1:
                raise ValueError(
                    f"`{name}` must be the same in all phases of a composition, got "
                    f"{' and '.join(sorted(map(repr, values)))}; ask for one guarantee at a time."
                )


def merge(phases: "Iterable[SampledGaussian]") -> "tuple[SampledGaussian, ...]":
    """Return the phases with the steps of equal ones added up.

    Parts of shuffled epochs are not merged: two parts of different epochs may use an example twice.
    """
    counts: dict[SampledGaussian, int] = {}
    apart = []
    for phase in phases:
        if SCHEMES[phase.sampling].once_per_epoch and phase.steps % steps_per_epoch(phase):
            apart.append(phase)
        else:
            size = None if phase.max_batch_size is None else phase.dataset_size
            key = replace(phase, steps=1, dataset_size=size)
            counts[key] = counts.get(key, 0) + phase.steps
    return *(replace(key, steps=steps) for key, steps in counts.items() if steps), *apart


def privacy_profile(phases: "tuple[SampledGaussian, ...]") -> PrivacyProfile:
    """Return the privacy profile of all phases together."""
    group_size = 1
    if not all(map(has_group_analysis, phases)):
        group_size = phases[0].group_size
        phases = tuple(replace(phase, group_size=1) for phase in phases)
    unamplified = group_size * math.hypot(*map(unamplified_mu, phases)) * (1 + 1e-15)
    upper = [analyse(phase) for phase in simplify(phases)]
    lower = [analyse(phase) for phase in simplify(phases, more_private=True)]
    return PrivacyProfile.of(upper, lower, group_size, unamplified)


def simplify(
    phases: "tuple[SampledGaussian, ...]", *, more_private: bool = False
) -> "tuple[SampledGaussian, ...]":
    """Return few different phases that are no more private, or no less if `more_private`."""
    if len(phases) <= _MOST_KINDS:
        return phases
    return merge(simplify_in_order(phases, more_private=more_private))


def simplify_in_order(
    phases: "Sequence[SampledGaussian]", *, more_private: bool = False
) -> "Sequence[SampledGaussian]":
    """Round noise and rates of the phases so coarsely that few different ones remain.

    Noise is rounded down and rates are rounded up, or the other way if `more_private`.
    """
    rounded, ratio = phases, 1e-4
    while len({replace(phase, steps=1) for phase in rounded if phase.mu is None}) > _MOST_KINDS:
        ratio *= 1.5
        if ratio > 1:
            break
        grid = math.log1p(ratio)
        rounded = [
            phase if phase.mu is not None else _rounded(phase, grid, more_private)
            for phase in phases
        ]
    return rounded


def _rounded(phase: "SampledGaussian", grid: float, more_private: bool) -> "SampledGaussian":
    down, up = (math.ceil, math.floor) if more_private else (math.floor, math.ceil)
    smaller, larger = (max, min) if more_private else (min, max)
    noise = math.exp(grid * down(math.log(phase.noise_multiplier) / grid))
    rate = math.exp(grid * up(math.log(phase.sampling_rate) / grid))
    if phase.max_batch_size is not None:  # a higher rate is not always worse in truncated batches
        rate = phase.sampling_rate
    return replace(
        phase,
        noise_multiplier=smaller(noise, phase.noise_multiplier),
        sampling_rate=min(1.0, larger(rate, phase.sampling_rate)),
    )


def _step_event(phase: "SampledGaussian", dp: ModuleType) -> "dp_accounting.DpEvent":
    """Return the event of one step, from the module dp_accounting."""
    if SCHEMES[phase.sampling].once_per_epoch:
        raise ValueError(
            f"`sampling` must not be {phase.sampling!r} for to_dp_event, because dp-accounting has "
            "no such event; use poisson, without_replacement or full."
        )
    if phase.group_size != 1:
        raise ValueError(
            f"`group_size` must be 1 for to_dp_event, got {phase.group_size!r}; an event describes "
            "single examples."
        )
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
            raise ValueError(
                "`dataset_size` must be a number for to_dp_event without replacement, got None; "
                "give it to SampledGaussian."
            )
        size = math.ceil(phase.sampling_rate * phase.dataset_size * (1 - 1e-12))
        return dp.SampledWithoutReplacementDpEvent(phase.dataset_size, size, event)
    return event
