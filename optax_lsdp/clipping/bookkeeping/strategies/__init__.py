"""How to bound the norms of a leaf's gradients, and how to add them up."""
