"""Mechanism: what can be asked of a run, and of several runs one after the other."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from optax_lsdp._checks import check_delta, check_non_negative
from optax_lsdp.accounting._composed import Composed
from optax_lsdp.accounting._dominate import has_group_analysis, reveal, steps_per_epoch

if TYPE_CHECKING:
    from optax_lsdp.accounting._mechanism import SampledGaussian

_MOST_PARTS = 128  # steps that differ; of more, similar ones count as the worst of them


class Mechanism:
    """What can be asked of a run; `a + b` is run a, and then run b on the same data.

    Every answer errs towards less privacy, and holds for adaptively chosen steps.
    """

    @property
    def parts(self) -> "tuple[SampledGaussian, ...]":
        """The runs that this one consists of."""
        raise NotImplementedError

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
        no good pair is known, that of one example for groups by the general bound, and far below
        at noise multipliers under ½ with rates near one over the steps.
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
        if not isinstance(other, Mechanism):
            return NotImplemented
        return Composition((*self.parts, *other.parts))

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

    runs: "tuple[SampledGaussian, ...]"

    def __post_init__(self) -> None:
        for name in ("neighbouring", "group_size"):
            values = {getattr(run, name) for run in self.runs}
            if len(values) > 1:
                raise ValueError(
                    f"`{name}` must be the same in all runs that are added, got "
                    f"{' and '.join(sorted(map(repr, values)))}; ask for one guarantee at a time."
                )

    @property
    def parts(self) -> "tuple[SampledGaussian, ...]":
        """The runs, equal ones merged."""
        return merge(self.runs)


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
            key = replace(run, steps=1)
            counts[key] = counts.get(key, 0) + run.steps
    return *(replace(key, steps=steps) for key, steps in counts.items() if steps), *apart


def compose(runs: "tuple[SampledGaussian, ...]") -> Composed:
    """Return what all runs together reveal."""
    runs, group_size = _simplify(runs), 1
    if not all(map(has_group_analysis, runs)):
        group_size = runs[0].group_size
        runs = tuple(replace(run, group_size=1) for run in runs)
    return Composed.of([reveal(run) for run in runs], group_size)


def _simplify(runs: "tuple[SampledGaussian, ...]") -> "tuple[SampledGaussian, ...]":
    """Return not too many different runs, if need be less private: less noise, higher rates."""
    ratio = 1e-4
    while len(runs) > _MOST_PARTS:
        ratio, grid = 2 * ratio, math.log1p(ratio)
        rounded = (
            replace(
                run,
                noise_multiplier=math.exp(grid * math.floor(math.log(run.noise_multiplier) / grid)),
                sampling_rate=min(
                    1.0, math.exp(grid * math.ceil(math.log(run.sampling_rate) / grid))
                ),
            )
            for run in runs
        )
        runs = merge(rounded)
    return runs
