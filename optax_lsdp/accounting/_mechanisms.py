"""The mechanisms that the accountant analyses: independent, correlated and discrete noise."""

import math
import sys
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import ClassVar, Literal, Self, TypeAlias, cast

import numpy as np
from scipy.optimize import minimize_scalar

import optax_lsdp._checks as checks
from optax_lsdp._schemes import (
    CORRELATED,
    INDEPENDENT,
    RELATIONS,
    SCHEMES,
    Neighbouring,
    Sampling,
)
from optax_lsdp.accounting._analysis import analyse
from optax_lsdp.accounting._composition import Mechanism
from optax_lsdp.correlation import Correlation

_ROUNDING = 1e-9  # relative amount that covers rounding, for discrete and correlated noise
DEFAULT_RELATION = cast(Neighbouring, None)  # `SampledGaussian` replaces None by the default


@dataclass(frozen=True)
class SampledGaussian(Mechanism):
    """A phase of `steps` noisy clipped sums, each over a sampled batch.

    Attributes:
        noise_multiplier: z, the standard deviation of the noise on the clipped *sum*, divided by C,
            the largest norm that one example can contribute. If groups of parameters are clipped
            to separate norms Cᵢ, C is √ΣCᵢ². Do not double C for "replace_one": the accountant
            knows that the sum can then move by 2C.
        sampling_rate: q, the expected share of the dataset in a batch.
        steps: T, the number of noisy sums that are released.
        sampling: the sampling scheme:
            "poisson": every batch contains every example with probability q, independently;
            "without_replacement": every batch is a uniform subset of q·n examples;
            "full": every batch is the whole dataset, q = 1, and its size is public;
            "shuffled": the dataset is cut into ⌊1/q⌋ batches per epoch. No tight analysis is known,
            so ε holds for every order, even one that the attacker knows.
        neighbouring: the neighbouring relation. An attacker must not be able to distinguish two
            datasets that differ in this way:
            "add_remove": one dataset has one more example;
            "zero_out": one example is replaced by a blank, which contributes nothing: it is masked,
            or its loss has weight zero;
            "replace_one": one example has a different value.
            The default is "add_remove" with "poisson" and "full". Other schemes have no default.
        max_batch_size: larger Poisson batches are truncated to a random subset of this size.
        dataset_size: n, required with `max_batch_size`.
        group_size: how many examples one person contributes; see `group`.

    Every answer errs towards a larger ε. The accountant ignores sampling if one example can move
    the sum by more than 12 standard deviations of the noise.

    >>> phase = SampledGaussian(noise_multiplier=1.1, sampling_rate=256 / 60_000, steps=14_100)
    >>> round(phase.epsilon(delta=1e-5), 3)
    2.385

    The same noise on shuffled batches, 60 epochs of 235 batches each:

    >>> shuffled = SampledGaussian(
    ...     1.1, 1 / 235, 14_100, sampling="shuffled", neighbouring="zero_out"
    ... )
    >>> round(shuffled.epsilon(delta=1e-5), 1)
    54.0
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    _: KW_ONLY
    sampling: Sampling = "poisson"
    neighbouring: Neighbouring = DEFAULT_RELATION
    max_batch_size: int | None = None
    dataset_size: int | None = None
    group_size: int = 1
    has_group_analysis: ClassVar[bool] = True  # whether `analyse` may cover groups
    is_exact: ClassVar[bool] = True  # False if the mechanism may reveal less than this phase

    def __post_init__(self) -> None:
        is_zero = checks.is_number(self.noise_multiplier) and self.noise_multiplier == 0
        why = "without noise ε is infinite" if is_zero else ""
        checks.check_positive("noise_multiplier", self.noise_multiplier, why)
        checks.check_rate("sampling_rate", self.sampling_rate)
        checks.check_whole("steps", self.steps, least=0)
        checks.check_whole("group_size", self.group_size)
        if self.sampling in CORRELATED:
            demand = f"one of {', '.join(map(repr, INDEPENDENT))} for independent noise"
            remedy = "use CorrelatedGaussian for correlated noise"
            raise checks.refusal("sampling", demand, self.sampling, remedy)
        checks.check_choice("sampling", self.sampling, INDEPENDENT)
        scheme = SCHEMES[self.sampling]
        if self.neighbouring is None and scheme.default_neighbouring is not None:
            object.__setattr__(self, "neighbouring", scheme.default_neighbouring)
        if self.neighbouring not in scheme.neighbouring:
            choices = " or ".join(map(repr, scheme.neighbouring))
            why = "there is no default" if self.neighbouring is None else "no other relation works"
            demand, remedy = f"{choices} with sampling={self.sampling!r}", f"pass {choices}: {why}"
            raise checks.refusal("neighbouring", demand, self.neighbouring, remedy)
        if scheme.whole_dataset and self.sampling_rate != 1:
            raise checks.refusal("sampling_rate", "1 for full batches", self.sampling_rate)
        if self.dataset_size is not None:
            checks.check_whole("dataset_size", self.dataset_size)
        if self.max_batch_size is not None:
            checks.check_whole("max_batch_size", self.max_batch_size)
            if not scheme.random_size or self.dataset_size is None:
                got = f"sampling={self.sampling!r} and dataset_size={self.dataset_size!r}"
                demand = "must come with sampling='poisson' and a `dataset_size`"
                raise ValueError(f"`max_batch_size` {demand}, got {got}.")
        _use_python_numbers(self)

    @property
    def phases(self) -> tuple[Self, ...]:
        """A tuple of this phase alone."""
        return (self,)

    @property
    def dominating(self) -> Self:
        """This phase itself; see `CorrelatedGaussian.dominating`."""
        return self

    @property
    def mu(self) -> float | None:
        """μ if the accountant treats this phase as one Gaussian mechanism, otherwise None."""
        return analyse(self).mu if self.steps else 0.0

    def group(self, size: int) -> Self:
        """Return this phase for groups of `size` examples; see `Mechanism.group`."""
        checks.check_whole("size", size)
        return replace(self, group_size=self.group_size * size)


@dataclass(frozen=True)
class _Dominating(SampledGaussian):
    """A phase that dominates correlated noise, so its ε is an upper but not a lower bound."""

    is_exact: ClassVar[bool] = False


@dataclass(frozen=True)
class _Cycles(_Dominating):
    """A phase that dominates correlated noise on cyclic Poisson batches, with one step per cycle.

    Members of a group may be in different parts of the data, so the tight analysis of groups does
    not hold. The generic bound holds, as for any mechanism.
    """

    has_group_analysis: ClassVar[bool] = False


@dataclass(frozen=True)
class CorrelatedGaussian(Mechanism):
    """Steps of `add_correlated_noise`, with cyclic Poisson batches or one order for all epochs.

    With `sampling_rate`, batches come from a `CyclicPoissonSampler`. It assigns each example to one
    of `cycle` parts of the data beforehand, and step t draws from part t mod `cycle`. So two uses
    of an example are a multiple of `cycle` steps apart. The matrix of the correlation must have at
    most `cycle` bands. Then no row of the matrix is nonzero in the columns of two uses, and T steps
    reveal at most as much as ⌈T/cycle⌉ steps of a Poisson-sampled Gaussian at the rate q·cycle
    (Choquette-Choo et al. 2023, (Amplified) Banded Matrix Factorization, arXiv 2306.08153, Theorem
    4). For "add_remove", the part of an example must not depend on other examples, as in
    `CyclicPoissonSampler`. An equal split of the data supports "zero_out" and "replace_one" only. A
    matrix with a banded inverse has T bands, so it gains nothing from this analysis.

    With `min_separation`, two uses of an example are at least `min_separation` steps apart. If a
    `ShuffledSampler(…, reshuffle=False)` draws batches of b out of n examples, `min_separation` is
    ⌊n/b⌋. With a new order in every epoch, it would be 1. All steps together are one Gaussian
    mechanism, whose sensitivity is `correlation.sensitivity`. No amplification is claimed, so the
    order need not be secret.

    The noise multiplier is the same in all steps. A run that continues with new noise is a second
    mechanism: add both mechanisms, or append the second one to a `Ledger` with `continues=False`.

    Attributes:
        noise_multiplier: z, the standard deviation of the noise before it is correlated, divided by
            the largest norm that one example can contribute to a sum; see `SampledGaussian`.
        correlation: the matrix that correlates the noise.
        steps: how many steps of the correlation are taken. None means all.
        sampling_rate: q, the expected share of the dataset in a batch.
        cycle: the number of parts of the data. None means the number of bands.
        min_separation: the smallest number of steps between two uses of an example.
        neighbouring: the neighbouring relation; see `SampledGaussian`. The default is "add_remove"
            with `sampling_rate`. With `min_separation`, it must be "zero_out" or "replace_one".
        group_size: how many examples one person contributes; see `group`. With `sampling_rate`,
            ε of a group is the generic bound.

    >>> from optax_lsdp.correlation import optimize_banded
    >>> run = CorrelatedGaussian(1.0, optimize_banded(100, bands=64), sampling_rate=0.01)
    >>> round(run.epsilon(1e-5), 2)  # 2 steps at the rate 0.64
    5.45
    """

    noise_multiplier: float
    correlation: Correlation
    steps: int = cast(int, None)  # __post_init__ replaces None
    _: KW_ONLY
    sampling_rate: float | None = None
    cycle: int | None = None
    min_separation: int | None = None
    neighbouring: Neighbouring = DEFAULT_RELATION
    group_size: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.correlation, Correlation):
            raise TypeError(
                f"`correlation` must be a Correlation, got {self.correlation!r}; make one with "
                "optax_lsdp.correlation."
            )
        if callable(self.noise_multiplier):
            demand = "one number, because schedules of correlated noise have no analysis"
            raise checks.refusal("noise_multiplier", demand, self.noise_multiplier)
        checks.check_positive("noise_multiplier", self.noise_multiplier)
        if self.steps is None:
            object.__setattr__(self, "steps", self.correlation.steps)
        checks.check_whole("steps", self.steps, least=0)
        most = self.correlation.steps
        checks.check_at_most("steps", self.steps, most, "the steps of the correlation")
        checks.check_whole("group_size", self.group_size)
        if (self.sampling_rate is None) == (self.min_separation is None):
            got = f"{self.sampling_rate!r} and {self.min_separation!r}"
            raise ValueError(
                "Either `sampling_rate` or `min_separation` must be given, and not both, got "
                f"{got}; pass the one that describes the batches."
            )
        if self.sampling_rate is None:
            if self.cycle is not None:
                demand = "None without `sampling_rate`"
                raise checks.refusal("cycle", demand, self.cycle)
            checks.check_whole("min_separation", self.min_separation)
        else:
            self._check_cycle(self.sampling_rate)
        relations = SCHEMES[self.sampling].neighbouring
        if self.neighbouring is None and "add_remove" in relations:
            object.__setattr__(self, "neighbouring", "add_remove")
        if self.neighbouring not in relations:
            choices = " or ".join(map(repr, relations))
            why = "a fixed order of the data" if self.sampling_rate is None else "these batches"
            demand = f"{choices}, because the analysis of {why} covers no other relation"
            raise checks.refusal("neighbouring", demand, self.neighbouring, "pass one of these")
        _use_python_numbers(self)

    def _check_cycle(self, sampling_rate: float) -> None:
        """Check and set `cycle`."""
        checks.check_rate("sampling_rate", sampling_rate)
        bands = self.correlation.bands
        if self.cycle is None:
            object.__setattr__(self, "cycle", bands)
        checks.check_whole("cycle", self.cycle)
        cycle = cast(int, self.cycle)
        if cycle < bands:
            demand = f"at least the number of bands of the correlation, {bands}"
            is_inverse = self.correlation.is_inverse
            remedy = "use one fixed order and `min_separation` if only the inverse is banded"
            raise checks.refusal("cycle", demand, cycle, remedy if is_inverse else "")
        if sampling_rate * cycle > 1 + 1e-12:
            demand = f"at most 1/{cycle}, because it is multiplied by the cycle of {cycle} steps"
            remedy = "take smaller batches or fewer bands"
            raise checks.refusal("sampling_rate", demand, sampling_rate, remedy)

    @property
    def sampling(self) -> Sampling:
        """The sampling scheme."""
        return "fixed_order" if self.sampling_rate is None else "cyclic_poisson"

    @property
    def phases(self) -> tuple[Self, ...]:
        """A tuple of this phase alone."""
        return (self,)

    def group(self, size: int) -> Self:
        """Return this phase for groups of `size` examples; see `Mechanism.group`."""
        checks.check_whole("size", size)
        return replace(self, group_size=self.group_size * size)

    @property
    def use(self) -> SampledGaussian:
        """A step with independent noise. With `sampling_rate`, it dominates all steps of a cycle.

        With `min_separation`, it reveals at least as much as all steps reveal about an example that
        is used once.
        """
        noise, relation, size = self.noise_multiplier, self.neighbouring, self.group_size
        noise *= 1 - _ROUNDING
        if self.sampling_rate is None or self.cycle is None:
            full = _Dominating(noise, 1.0, 1, sampling="full", neighbouring=relation)
            return full.group(size)
        rate = min(1.0, self.sampling_rate * self.cycle * (1 + 1e-15))
        return _Cycles(noise, rate, 1, neighbouring=relation, group_size=size)

    def uses(self) -> np.ndarray:
        """Return, for each step, how many times `use` is composed to dominate all steps so far.

        With `sampling_rate`, this is the number of cycles. With `min_separation`, it is the squared
        sensitivity, which need not be a whole number.
        """
        if self.sampling_rate is None:
            return self.correlation.sensitivities(self.min_separation or 1, self.steps) ** 2
        return np.ceil(np.arange(1, self.steps + 1) / (self.cycle or 1))

    @property
    def dominating(self) -> SampledGaussian:
        """A phase with independent noise that reveals at least as much about one example."""
        if not self.steps:
            return replace(self.use, steps=0)
        uses = float(self.uses()[-1])
        if self.sampling_rate is not None:
            return replace(self.use, steps=int(uses))
        return replace(self.use, noise_multiplier=self.use.noise_multiplier / math.sqrt(uses))


Phase: TypeAlias = SampledGaussian | CorrelatedGaussian


@dataclass(frozen=True)
class DiscreteGaussian:
    """Steps of `discrete.add_discrete_gaussian_noise` on full batches.

    In any dimension, T steps satisfy ρ-zero-concentrated differential privacy with ρ = T/(2z²), or
    4T/(2z²) with "replace_one", as with continuous noise. Then ε is the minimum over α > 1 of
    αρ + log(1 − 1/α) − log(αδ)/(α − 1). Every α gives a valid bound (Canonne, Kamath, Steinke 2020,
    The Discrete Gaussian for Differential Privacy). Continuous noise has an exact analysis, so its
    ε is somewhat smaller than this one.

    Args:
        noise_multiplier: z, the scale of the noise, divided by the largest norm that one example
            can contribute.
        steps: T, the number of noisy sums that are released.
        sampling: must be "full", because sampled batches with discrete noise have no analysis.
        neighbouring: the neighbouring relation; see `SampledGaussian`. The size of the dataset is
            public.

    >>> round(DiscreteGaussian(noise_multiplier=10.0, steps=25).epsilon(1e-5), 3)
    2.166
    """

    noise_multiplier: float
    steps: int
    sampling: Literal["full"] = "full"
    neighbouring: Neighbouring = "add_remove"

    def __post_init__(self) -> None:
        checks.check_positive("noise_multiplier", self.noise_multiplier)
        checks.check_whole("steps", self.steps)
        if self.sampling != "full":
            demand = "'full', because discrete noise on sampled batches has no analysis"
            remedy = "use `add_gaussian_noise` and `SampledGaussian`"
            raise checks.refusal("sampling", demand, self.sampling, remedy)
        checks.check_choice("neighbouring", self.neighbouring, SCHEMES["full"].neighbouring)

    @property
    def rho(self) -> float:
        """ρ of zero-concentrated differential privacy, for all steps together."""
        shift = RELATIONS[self.neighbouring].sensitivity / float(self.noise_multiplier)
        return self.steps * shift * shift / 2

    def epsilon(self, delta: float) -> float:
        """Return an ε for which (ε, δ)-differential privacy is certified."""
        checks.check_delta("delta", delta)

        def bound(log_excess: float) -> float:
            excess = math.exp(log_excess)  # α − 1
            order = 1 + excess
            return order * self.rho - math.log(order * delta) / excess - math.log1p(1 / excess)

        return max(0.0, _smallest(bound) * (1 + _ROUNDING))

    def delta(self, epsilon: float) -> float:
        """Return a δ for which (ε, δ)-differential privacy is certified."""
        checks.check_non_negative("epsilon", epsilon)

        def log_bound(log_excess: float) -> float:
            excess = math.exp(log_excess)
            order = 1 + excess
            grown = excess * (order * self.rho - epsilon)
            return grown - log_excess - order * math.log1p(1 / excess)

        smallest = math.exp(_smallest(log_bound)) * (1 + _ROUNDING)
        return min(1.0, max(sys.float_info.min, smallest))  # δ is never zero


def _smallest(bound: Callable[[float], float]) -> float:
    return float(minimize_scalar(bound, bounds=(-20.0, 30.0), method="bounded").fun)


def _use_python_numbers(phase: SampledGaussian | CorrelatedGaussian) -> None:
    """Replace NumPy numbers by Python numbers, which JSON can save."""
    for field in fields(phase):
        value = getattr(phase, field.name)
        if checks.is_number(value):
            kind = float if field.name in ("noise_multiplier", "sampling_rate") else int
            object.__setattr__(phase, field.name, kind(value))
