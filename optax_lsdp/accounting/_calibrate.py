"""Calibration: a privacy budget goes in, the smallest sufficient noise comes out."""

import math
from typing import Literal

from optax_lsdp._checks import check_delta, check_positive
from optax_lsdp.accounting._gaussian import gaussian_mu
from optax_lsdp.accounting._mechanism import SENSITIVITY, SampledGaussian


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    sampling: Literal["full"],
    neighbouring: Literal["add_remove", "replace_one", "zero_out"] = "add_remove",
) -> float:
    """Return the smallest noise multiplier z whose run is (ε, δ)-differentially private.

    The arguments are those of `SampledGaussian`. The budget is never exceeded.

    >>> z = calibrate_noise_multiplier(
    ...     epsilon=7.5113, delta=1e-5, sampling_rate=1, steps=1000, sampling="full"
    ... )
    >>> round(z, 3)
    20.0
    """
    check_positive("epsilon", epsilon)
    epsilon = min(epsilon, 1e6)  # more than that asks for nothing that noise could give
    check_delta("delta", delta)
    run = SampledGaussian(1.0, sampling_rate, steps, sampling=sampling, neighbouring=neighbouring)
    z = math.sqrt(run.steps) * SENSITIVITY[neighbouring] / gaussian_mu(epsilon, delta)
    return z * (1 + 1e-12)  # the root and the quotient were rounded
