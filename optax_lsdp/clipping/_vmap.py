"""The vmap engine: the plain reference, which forms every example's gradient."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from optax_lsdp.clipping._factors import ClipStyle, Group, clip_and_sum


def clip_by_vmap(
    loss_fn: Callable[[optax.Params, Any], tuple[jax.Array, Any]],
    params: optax.Params,
    batch: Any,
    mask: jax.Array | None,
    *,
    groups: list[Group],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum."""
    per_example = jax.vmap(jax.value_and_grad(loss_fn, has_aux=True), in_axes=(None, 0))
    outputs, grads = per_example(params, batch)
    norms, total = clip_and_sum(grads, groups, style=style, mask=mask)
    return outputs, norms, total
