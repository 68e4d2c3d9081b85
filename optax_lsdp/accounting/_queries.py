"""Mechanism: what can be asked of a run, and of several runs one after the other."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from optax_lsdp._checks import check_delta, check_non_negative, check_whole
from optax_lsdp.accounting._composed import Composed
from optax_lsdp.accounting._dominate import at_worst, has_group_analysis, reveal, steps_per_epoch
from optax_lsdp.accounting._events import to_dp_event

if TYPE_CHECKING:
    from optax_lsdp.accounting._mechanism import SampledGaussian

_MOST_PARTS = 64  # sampled steps that differ; of more, similar ones count as equal


class Mechanism:
    """What can be asked of a run; `a + b` is run a, and then run b on the same data.

    Every answer errs towards less privacy, and holds for adaptively chosen steps.
    """

    phases: "tuple[SampledGaussian, ...]"

    @property
    def parts(self) -> "tuple[SampledGaussian, ...]":
        """The runs that this one consists of, equal ones merged."""
        return merge(self.phases)

    def group(self, size: int) -> "Mechanism":
        """Return the same, accounted for groups of `size` examples that change together.

        Tight for Poisson batches with "add_remove" and "zero_out", as long as no more members than
        move the sum by 20 standard deviations of the noise are likely in a batch, and exact for
        full batches; otherwise a general bound, which may be far above the truth.
        """
        check_whole("size", size)
        return Composition(tuple(run.group(size) for run in self.phases))

    def to_dp_event(self) -> Any:
        """Return an event of dp-accounting, which must be installed.

        An event does not say which datasets are neighbours: tell the accountant.
        """
        return to_dp_event(self.phases)

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε for which (ε, δ)-differential privacy can be certified."""
        check_delta("delta", delta)
        return compose(self.parts).epsilon(float(delta))

    def delta(self, epsilon: float) -> float:
        """Return the smallest δ for which (ε, δ)-differential privacy can be certified."""
        check_non_negative("epsilon", epsilon)
        return compose(self.parts).delta(float(epsilon))

    def epsilon_bounds(self, delta: float) -> tuple[float, float]:
        """Return certified bounds, from below and from above, on the smallest ε.

        The lower bound is what two particular datasets reveal. It is 0 for shuffled batches, where
        no good pair is known; that of one example for groups by the general bound; and it may be
        far below, or 0, where losses are rare and large: at noise multipliers under 1 with rates
        near one over the steps.
        """
        check_delta("delta", delta)
        composed = compose(self.parts)
        upper = composed.epsilon(float(delta))
        lower = composed.epsilon_below(float(delta), upper)
        if lower > upper:
            raise ArithmeticError(
                f"the bounds on ε contradict each other, {lower!r} and {upper!r}; please report "
                "the settings."
            )
        return lower, upper

    def trade_off(self, alpha: float | np.ndarray) -> float | np.ndarray:
        """Return how often any test for an example misses it, if false alarms have rate α.

        That is the function f of f-differential privacy, from below, at a number or an array.
        """
        rates = np.asarray(alpha, float)
        if not np.all((rates >= 0) & (rates <= 1)):
            raise ValueError(f"`alpha` must be between 0 and 1, got {alpha!r}.")
        missed = compose(self.parts).trade_off(rates.ravel()).reshape(rates.shape)
        return float(missed) if rates.ndim == 0 else missed

    def advantage(self) -> float:
        """Return what any test for an example can gain over guessing: max 1 − α − f(α) = δ(0)."""
        return self.delta(0.0)

    def __add__(self, other: "Mechanism") -> "Composition":
        """Return this run, and then another on the same data."""
        if not isinstance(other, Mechanism):
            return NotImplemented
        return Composition((*self.phases, *other.phases))

    def __radd__(self, other: object) -> "Mechanism":
        return self if other == 0 else NotImplemented  # where sum() begins


@dataclass(frozen=True)
class Composition(Mechanism):
    """Several runs on the same data, one after the other: `run + run`, or `sum(runs)`.

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
            values = {getattr(run, name) for run in self.phases}
            if len(values) > 1:
                raise ValueError(
                    f"`{name}` must be the same in all runs that are added, got "
                    f"{' and '.join(sorted(map(repr, values)))}; ask for one guarantee at a time."
                )


def merge(runs: "Iterable[SampledGaussian]") -> "tuple[SampledGaussian, ...]":
    """Return runs with the steps of equal ones added up.

    Shuffled runs are merged if they are whole epochs: two parts of different epochs may use the
    same example.
    """
    counts: dict[SampledGaussian, int] = {}
    apart = []
    for run in runs:
        if run.sampling == "shuffled" and run.steps % steps_per_epoch(run):
            apart.append(run)
        else:
            size = None if run.max_batch_size is None else run.dataset_size
            key = replace(run, steps=1, dataset_size=size)
            counts[key] = counts.get(key, 0) + run.steps
    return *(replace(key, steps=steps) for key, steps in counts.items() if steps), *apart


def compose(runs: "tuple[SampledGaussian, ...]") -> Composed:
    """Return what all runs together reveal."""
    group_size = 1
    if not all(map(has_group_analysis, runs)):
        group_size = runs[0].group_size
        runs = tuple(replace(run, group_size=1) for run in runs)
    worst = group_size * math.hypot(*map(at_worst, runs)) * (1 + 1e-15)
    above = [reveal(run) for run in simplify(runs)]
    below = [reveal(run) for run in simplify(runs, more_private=True)]
    return Composed.of(above, below, group_size, worst)


def simplify(
    runs: "tuple[SampledGaussian, ...]", *, more_private: bool = False
) -> "tuple[SampledGaussian, ...]":
    """Return not too many different runs, if need be less private, or more."""
    if len(runs) <= _MOST_PARTS:
        return runs
    return merge(simplify_in_order(runs, more_private=more_private))


def simplify_in_order(
    runs: "Sequence[SampledGaussian]", *, more_private: bool = False
) -> "Sequence[SampledGaussian]":
    """Return the runs on a grid of noise and rates, so coarse that not too many are different."""
    rounded, ratio = runs, 1e-4
    while len({replace(run, steps=1) for run in rounded if run.mu is None}) > _MOST_PARTS:
        ratio *= 1.5
        if ratio > 1:
            break
        grid = math.log1p(ratio)
        rounded = [run if run.mu is not None else _rounded(run, grid, more_private) for run in runs]
    return rounded


def _rounded(run: "SampledGaussian", grid: float, more_private: bool) -> "SampledGaussian":
    down, up = (math.ceil, math.floor) if more_private else (math.floor, math.ceil)
    worst, least = (max, min) if more_private else (min, max)
    noise = math.exp(grid * down(math.log(run.noise_multiplier) / grid))
    rate = math.exp(grid * up(math.log(run.sampling_rate) / grid))
    if run.max_batch_size is not None:  # more is not always worse
        rate = run.sampling_rate
    return replace(
        run,
        noise_multiplier=worst(noise, run.noise_multiplier),
        sampling_rate=min(1.0, least(rate, run.sampling_rate)),
    )
