"""SampledGaussian: the description of a private training run, and what it guarantees."""

import math
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Literal, Self, get_args

from optax_lsdp._checks import (
    MOST_STEPS,
    check_choice,
    check_positive,
    check_rate,
    check_whole,
    is_number,
)
from optax_lsdp.accounting._dominate import ANALYSED, reveal
from optax_lsdp.accounting._queries import Mechanism

Sampling = Literal["poisson", "without_replacement", "full", "shuffled"]
Neighbouring = Literal["add_remove", "replace_one", "zero_out"]


@dataclass(frozen=True)
class SampledGaussian(Mechanism):
    """A run of `steps` noisy clipped sums, each over a sample of the dataset.

    Attributes:
        noise_multiplier: z, the noise's standard deviation on the clipped *sum*, divided by C, the
            most that one example can contribute (√ΣC² with groups of parameters). It is the same
            z for every relation: that replacing an example moves the sum by 2C is counted here.
        sampling_rate: q, the share of the dataset that is expected in a batch.
        steps: how many noisy sums are released.
        sampling: how batches are drawn:
            "poisson": every example is in every batch with probability q, independently;
            "without_replacement": every batch is a uniform subset of q·n examples;
            "full": every batch is the dataset, q = 1, and its size is public;
            "shuffled": the dataset is cut into batches, in any order, ⌊1/q⌋ of them an epoch. No
            tight analysis is known; what is reported holds for every order, as if each example's
            batch were known.
        neighbouring: what differs between two datasets that are to be confused:
            "add_remove": one example is there, or it is not;
            "zero_out": one example contributes, or a blank in its place that contributes nothing;
            "replace_one": one example has another value.
            The default is "add_remove" where that is analysed, and none otherwise.
        max_batch_size: a Poisson batch that would be larger is cut, uniformly at random.
        dataset_size: n, needed with `max_batch_size`.
        group_size: how many examples one person contributes; see `group`.

    Every number that is reported errs towards a larger ε. Where one example can move the sum by
    more than 12 standard deviations of the noise, sampling is not counted.

    >>> run = SampledGaussian(noise_multiplier=1.1, sampling_rate=256 / 60_000, steps=14_100)
    >>> round(run.epsilon(delta=1e-5), 3)
    2.385

    The same noise, if 60 epochs of 235 batches, the last one smaller, are made by shuffling:

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
    neighbouring: Neighbouring = None  # type: ignore[assignment]  # None is filled in below
    max_batch_size: int | None = None
    dataset_size: int | None = None
    group_size: int = 1

    def __post_init__(self) -> None:
        is_zero = is_number(self.noise_multiplier) and self.noise_multiplier == 0
        why = "without noise ε is infinite" if is_zero else ""
        check_positive("noise_multiplier", self.noise_multiplier, why)
        check_rate("sampling_rate", self.sampling_rate)
        check_whole("steps", self.steps, least=0)
        check_whole("group_size", self.group_size)
        check_choice("sampling", self.sampling, ANALYSED)
        if self.neighbouring is None and "add_remove" in ANALYSED[self.sampling]:
            object.__setattr__(self, "neighbouring", "add_remove")
        if self.neighbouring not in ANALYSED[self.sampling]:
            choices = " or ".join(map(repr, ANALYSED[self.sampling]))
            why = "there is no default" if self.neighbouring is None else "nothing else is analysed"
            raise ValueError(
                f"`neighbouring` must be {choices} with sampling={self.sampling!r}, "
                f"got {self.neighbouring!r}; {why}."
            )
        if self.sampling == "full" and self.sampling_rate != 1:
            raise ValueError(
                f"`sampling_rate` must be 1 for full batches, got {self.sampling_rate!r}."
            )
        if self.dataset_size is not None:
            check_whole("dataset_size", self.dataset_size)
        if self.max_batch_size is not None:
            check_whole("max_batch_size", self.max_batch_size)
            if self.sampling != "poisson" or self.dataset_size is None:
                raise ValueError(
                    "`max_batch_size` must come with sampling='poisson' and a `dataset_size`, "
                    f"got sampling={self.sampling!r} and dataset_size={self.dataset_size!r}."
                )
        for field in fields(self):  # plain numbers, whatever kind they came as
            value = getattr(self, field.name)
            if not isinstance(value, str | None):
                kind = float if field.name in ("noise_multiplier", "sampling_rate") else int
                object.__setattr__(self, field.name, kind(value))

    @property
    def phases(self) -> tuple[Self, ...]:  # type: ignore[override]  # a property serves
        """The runs that this one consists of: itself."""
        return (self,)

    @property
    def mu(self) -> float | None:
        """μ of the one Gaussian mechanism that the run is as private as, if it is one."""
        return reveal(self).mu if self.steps else 0.0

    def group(self, size: int) -> Self:
        """Return the same run for groups of `size` examples; see `Mechanism.group`."""
        check_whole("size", size)
        return replace(self, group_size=self.group_size * size)


def steps_of_epochs(
    epochs: float, *, dataset_size: int, batch_size: int, sampling: Sampling = "poisson"
) -> int:
    """Return how many steps so many epochs take, rounded up.

    Args:
        epochs: passes over the data; a part of one counts too.
        dataset_size: n.
        batch_size: b, which is expected, or fixed.
        sampling: as in `SampledGaussian`. An epoch is n/b steps, but ⌊n/b⌋ of shuffled batches, as
            the rest of their order is left out.

    >>> steps_of_epochs(60, dataset_size=60_000, batch_size=256)
    14063
    >>> steps_of_epochs(60, dataset_size=60_000, batch_size=256, sampling="shuffled")
    14040
    """
    check_positive("epochs", epochs)
    check_whole("dataset_size", dataset_size)
    check_whole("batch_size", batch_size)
    check_choice("sampling", sampling, get_args(Sampling))
    if batch_size > dataset_size:
        raise ValueError(
            f"`batch_size` must be at most `dataset_size`, got {batch_size} of {dataset_size}."
        )
    epoch = dataset_size // batch_size if sampling == "shuffled" else dataset_size / batch_size
    steps = epochs * epoch * (1 - 1e-12)
    if steps > MOST_STEPS:
        raise ValueError(
            f"`epochs` must take {MOST_STEPS:.0e} steps at most, got {epochs!r}, which take "
            f"{steps:.2g}."
        )
    return math.ceil(steps)  # 3 epochs of 100/30 are 10, not 11
