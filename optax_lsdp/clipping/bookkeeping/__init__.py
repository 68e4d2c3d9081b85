"""The bookkeeping engine: clip, and form per-example gradients only if no other way is cheaper."""

from optax_lsdp.clipping.bookkeeping._engine import clip_by_bookkeeping
from optax_lsdp.clipping.bookkeeping._explain import explain_clipping
from optax_lsdp.clipping.bookkeeping._platforms import emulate_platform

__all__ = ["clip_by_bookkeeping", "emulate_platform", "explain_clipping"]
