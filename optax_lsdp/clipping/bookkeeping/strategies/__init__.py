"""Bound the norms of a leaf's per-example gradients, and add up the clipped gradients."""
