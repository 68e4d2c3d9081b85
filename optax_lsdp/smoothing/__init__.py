"""Laplacian smoothing of noisy gradients."""

from optax_lsdp.smoothing._auto import auto_smooth, chosen_smoothing
from optax_lsdp.smoothing._layout import Grid
from optax_lsdp.smoothing._spectrum import grid_beta, grid_gamma, ring_beta, ring_gamma
from optax_lsdp.smoothing._transform import laplacian_smooth

__all__ = [
    "Grid",
    "auto_smooth",
    "chosen_smoothing",
    "grid_beta",
    "grid_gamma",
    "laplacian_smooth",
    "ring_beta",
    "ring_gamma",
]
