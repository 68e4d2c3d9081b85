"""Accounting: noise, sampling and steps go in, a privacy guarantee comes out; no JAX."""

from optax_lsdp.accounting._calibrate import calibrate_noise_multiplier
from optax_lsdp.accounting._mechanism import SampledGaussian

__all__ = ["SampledGaussian", "calibrate_noise_multiplier"]
