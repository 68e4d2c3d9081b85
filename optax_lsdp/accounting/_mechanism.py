"""SampledGaussian: the description of a private training run, and what it guarantees."""

import math
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from optax_lsdp._checks import (
    check_choice,
    check_delta,
    check_non_negative,
    check_positive,
    check_whole,
)
from optax_lsdp.accounting._gaussian import gaussian_delta, gaussian_epsilon

SENSITIVITY = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}  # in clip norms


@dataclass(frozen=True)
class SampledGaussian:
    """A run of `steps` noisy clipped sums, each over a sample of the dataset.

    Attributes:
        noise_multiplier: z, the noise's standard deviation on the clipped *sum*, divided by
            its sensitivity to adding or removing one example (C, or √ΣC² with groups).
        sampling_rate: the share of the dataset in a batch; 1 for full batches.
        steps: how many noisy sums are released.
        sampling: "full": every step uses the whole dataset, whose size is public.
        neighbouring: "add_remove" or "zero_out": datasets that differ by the presence of one
            example; "replace_one": by its value, which moves the sum by 2C.

    >>> run = SampledGaussian(20.0, 1.0, 1000, sampling="full")
    >>> round(run.epsilon(1e-5), 4)
    7.5113
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    _: KW_ONLY
    sampling: Literal["full"]
    neighbouring: Literal["add_remove", "replace_one", "zero_out"] = "add_remove"

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier, "without noise ε is infinite")
        check_whole("steps", self.steps)
        check_choice("sampling", self.sampling, ("full",))
        check_choice("neighbouring", self.neighbouring, SENSITIVITY)
        if self.sampling_rate != 1:
            raise ValueError(
                f"`sampling_rate` must be 1 for full batches, got {self.sampling_rate!r}."
            )

    @property
    def mu(self) -> float:
        """μ = √T·Δ/z: the run is as private as one Gaussian mechanism with this ratio."""
        return math.sqrt(self.steps) * SENSITIVITY[self.neighbouring] / self.noise_multiplier

    def epsilon(self, delta: float) -> float:
        """Return the smallest ε such that the run is (ε, δ)-differentially private."""
        check_delta("delta", delta)
        return gaussian_epsilon(delta, self.mu)

    def delta(self, epsilon: float) -> float:
        """Return the smallest δ such that the run is (ε, δ)-differentially private."""
        check_non_negative("epsilon", epsilon)
        return gaussian_delta(epsilon, self.mu)
