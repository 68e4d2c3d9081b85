"""Clip per-example gradients and sum them: (params, batch, mask) → clipped sum."""

from optax_lsdp._clipped import Clipped
from optax_lsdp._clipped import WithSlack as WithSlack
from optax_lsdp._isolation import vouch_for_callbacks
from optax_lsdp.clipping._clip_norm import AdaptiveClip, sensitivity
from optax_lsdp.clipping._clip_norm import ClipStyle as ClipStyle
from optax_lsdp.clipping._grad import PerExample, clipped_grad, value_and_clipped_grad
from optax_lsdp.clipping._slack import (
    NormEstimates,
    current_clip_norm,
    estimate_norms,
    norm_estimates,
)
from optax_lsdp.clipping._slack import has_estimates as has_estimates
from optax_lsdp.clipping._slack import last_factor as last_factor
from optax_lsdp.clipping._transform import clip_per_example
from optax_lsdp.clipping.bookkeeping import emulate_platform as emulate_platform
from optax_lsdp.clipping.bookkeeping import explain_clipping

__all__ = [
    "AdaptiveClip",
    "Clipped",
    "NormEstimates",
    "PerExample",
    "clip_per_example",
    "clipped_grad",
    "current_clip_norm",
    "estimate_norms",
    "explain_clipping",
    "norm_estimates",
    "sensitivity",
    "value_and_clipped_grad",
    "vouch_for_callbacks",
]
