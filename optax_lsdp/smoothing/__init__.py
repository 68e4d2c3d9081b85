"""Laplacian smoothing of noisy gradients."""

from optax_lsdp.smoothing._auto import auto_smooth, chosen_smoothing
from optax_lsdp.smoothing._auto import find_auto_state as find_auto_state
from optax_lsdp.smoothing._layout import Grid
from optax_lsdp.smoothing._spectrum import TimeFilter as TimeFilter
from optax_lsdp.smoothing._spectrum import check_followed as check_followed
from optax_lsdp.smoothing._spectrum import (
    grid_beta,
    grid_gamma,
    low_pass_gain,
    ring_beta,
    ring_gamma,
)
from optax_lsdp.smoothing._spectrum import read_filter as read_filter
from optax_lsdp.smoothing._transform import Denoiser as Denoiser
from optax_lsdp.smoothing._transform import laplacian_smooth

__all__ = [
    "Grid",
    "auto_smooth",
    "chosen_smoothing",
    "grid_beta",
    "grid_gamma",
    "laplacian_smooth",
    "low_pass_gain",
    "ring_beta",
    "ring_gamma",
]
