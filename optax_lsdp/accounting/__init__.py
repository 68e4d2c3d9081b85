"""Accounting: noise, sampling and steps go in, a privacy guarantee comes out; no JAX."""

from optax_lsdp.accounting._calibrate import (
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_steps,
)
from optax_lsdp.accounting._discrete import DiscreteGaussian
from optax_lsdp.accounting._ledger import Ledger
from optax_lsdp.accounting._mechanism import SampledGaussian, steps_of_epochs
from optax_lsdp.accounting._paper import PaperNoise, paper_noise
from optax_lsdp.accounting._queries import Composition
from optax_lsdp.accounting._statement import show_epsilon, statement

__all__ = [
    "Composition",
    "DiscreteGaussian",
    "Ledger",
    "PaperNoise",
    "SampledGaussian",
    "calibrate_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_steps",
    "paper_noise",
    "show_epsilon",
    "statement",
    "steps_of_epochs",
]
