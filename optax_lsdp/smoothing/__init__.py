"""Laplacian smoothing of noisy gradients."""

from optax_lsdp.smoothing._auto import auto_smooth, chosen_smoothing
from optax_lsdp.smoothing._layout import Grid
from optax_lsdp.smoothing._spectrum import (
    TimeFilter,
    grid_beta,
    grid_gamma,
    low_pass_gain,
    read_filter,
    ring_beta,
    ring_gamma,
)
from optax_lsdp.smoothing._transform import Denoiser, laplacian_smooth

__all__ = [
    "Denoiser",
    "Grid",
    "TimeFilter",
    "auto_smooth",
    "chosen_smoothing",
    "grid_beta",
    "grid_gamma",
    "laplacian_smooth",
    "low_pass_gain",
    "read_filter",
    "ring_beta",
    "ring_gamma",
]
