"""The engine that never forms a per-example gradient, where that is cheaper."""

from optax_lsdp.clipping.bookkeeping._engine import clip_by_bookkeeping
from optax_lsdp.clipping.bookkeeping._explain import explain_clipping

__all__ = ["clip_by_bookkeeping", "explain_clipping"]
