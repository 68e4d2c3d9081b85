"""The discrete Gaussian on full batches: noise and steps go in, a guarantee comes out.

It is ½/z²-zero-concentrated in every step, whatever the dimension, as the continuous one is.
"""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from optax_lsdp._checks import (
    check_choice,
    check_delta,
    check_non_negative,
    check_positive,
    check_whole,
)

_ROUNDING = 1e-9  # by which answers are larger than what was computed


@dataclass(frozen=True)
class DiscreteGaussian:
    """Steps of `discrete.add_discrete_gaussian_noise` on full batches.

    ρ = T/2z² of zero-concentrated privacy, four times that if an example is replaced; then
    ε = min over α of αρ + log(1 − 1/α) − log(αδ)/(α − 1). Any α gives a true bound. It is
    somewhat above what the continuous Gaussian has, for which more is known.

    Args:
        noise_multiplier: z, the noise in units of the sensitivity.
        steps: T.
        sampling: "full". How discrete noise and sampling go together is not analysed here, so
            anything else is refused.
        neighbouring: "add_remove" and "zero_out" (n is public), or "replace_one".

    References:
        Canonne, Kamath, Steinke 2020, The Discrete Gaussian for Differential Privacy.

    >>> round(DiscreteGaussian(noise_multiplier=10.0, steps=25).epsilon(1e-5), 3)
    2.166
    """

    noise_multiplier: float
    steps: int
    sampling: str = "full"
    neighbouring: str = "add_remove"

    def __post_init__(self) -> None:
        check_positive("noise_multiplier", self.noise_multiplier)
        check_whole("steps", self.steps)
        if self.sampling != "full":
            raise ValueError(
                f'`sampling` must be "full", got {self.sampling!r}; discrete noise on sampled '
                "batches is not analysed: use `SampledGaussian` with `add_gaussian_noise`."
            )
        check_choice("neighbouring", self.neighbouring, ("add_remove", "zero_out", "replace_one"))

    @property
    def rho(self) -> float:
        """The ρ of zero-concentrated differential privacy."""
        moved = (2 if self.neighbouring == "replace_one" else 1) / float(self.noise_multiplier)
        return self.steps * moved * moved / 2

    def epsilon(self, delta: float) -> float:
        """Return an ε for which (ε, δ)-differential privacy is certain."""
        check_delta("delta", delta)

        def bound(log_excess: float) -> float:
            excess = math.exp(log_excess)  # α − 1
            order = 1 + excess
            return order * self.rho - math.log(order * delta) / excess - math.log1p(1 / excess)

        return max(0.0, _smallest(bound) * (1 + _ROUNDING))

    def delta(self, epsilon: float) -> float:
        """Return a δ for which (ε, δ)-differential privacy is certain."""
        check_non_negative("epsilon", epsilon)

        def log_bound(log_excess: float) -> float:
            excess = math.exp(log_excess)
            order = 1 + excess
            grown = excess * (order * self.rho - epsilon)
            return grown - log_excess - order * math.log1p(1 / excess)

        least = sys.float_info.min  # no δ is zero
        return min(1.0, max(least, math.exp(_smallest(log_bound)) * (1 + _ROUNDING)))


def _smallest(bound: Callable[[float], float]) -> float:
    """Return a small value of a function with one minimum; any value of it would do."""
    return float(minimize_scalar(bound, bounds=(-20.0, 30.0), method="bounded").fun)
