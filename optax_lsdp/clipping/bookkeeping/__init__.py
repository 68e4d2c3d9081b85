"""The bookkeeping engine: clip without forming per-example gradients, where that is cheaper."""

from optax_lsdp.clipping.bookkeeping._engine import clip_by_bookkeeping
from optax_lsdp.clipping.bookkeeping._strategy import explain_clipping

__all__ = ["clip_by_bookkeeping", "explain_clipping"]
