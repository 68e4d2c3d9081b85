"""Discrete noise: gradients on a grid go in, a sum with exact noise comes out, in whole numbers."""

from optax_lsdp.discrete._grid import OnGrid, grid_grad, sensitivity_in_cells
from optax_lsdp.discrete._transform import AddDiscreteNoiseState, add_discrete_gaussian_noise

__all__ = ["AddDiscreteNoiseState", "OnGrid", "add_discrete_gaussian_noise", "grid_grad"]
__all__ += ["sensitivity_in_cells"]
