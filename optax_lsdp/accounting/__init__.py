"""Accounting: noise, sampling and steps go in, a privacy guarantee comes out; no JAX."""

from optax_lsdp.accounting._mechanism import SampledGaussian
from optax_lsdp.accounting._queries import Composition

__all__ = ["Composition", "SampledGaussian"]
