"""The privacy accountant: compute (ε, δ) from noise, sampling and steps, and back, without JAX."""

from optax_lsdp.accounting._calibrate import (
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_scale,
    calibrate_steps,
    steps_of_epochs,
)
from optax_lsdp.accounting._composition import Composition
from optax_lsdp.accounting._ledger import Ledger
from optax_lsdp.accounting._mechanisms import (
    CorrelatedGaussian,
    DiscreteGaussian,
    SampledGaussian,
)
from optax_lsdp.accounting._paper import PaperNoise, paper_noise
from optax_lsdp.accounting._statement import show_epsilon, statement

__all__ = ["Composition", "CorrelatedGaussian", "DiscreteGaussian", "Ledger", "PaperNoise"]
__all__ += [
    "SampledGaussian",
    "calibrate_batch_size",
    "calibrate_noise_multiplier",
    "calibrate_scale",
]
__all__ += ["calibrate_steps", "paper_noise", "show_epsilon", "statement", "steps_of_epochs"]
