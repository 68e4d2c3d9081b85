"""How to bound the norms of a leaf's gradients, and how to add them up: one file per strategy."""

from optax_lsdp.clipping.bookkeeping.strategies._bounds import NormBound, joint_bound
from optax_lsdp.clipping.bookkeeping.strategies._leaf import LeafGradient, leaf_gradients

__all__ = ["LeafGradient", "NormBound", "joint_bound", "leaf_gradients"]
