"""The vmap engine: the plain reference, which forms every example's gradient."""

from typing import Any

import jax
import optax

from optax_lsdp._isolation import ValueAndAux, trace_loss, warn_of_batch_norms
from optax_lsdp._mesh import varying_axes
from optax_lsdp.clipping._factors import ClipGroup, ClipStyle, clip_and_sum


def clip_by_vmap(
    loss_fn: ValueAndAux,
    params: optax.Params,
    batch: Any,
    mask: jax.Array | None,
    *,
    groups: list[ClipGroup],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    Inside shard_map, a leaf that varies over a mesh axis over which the batch does not is split
    over it: each shard has a part of every example's gradient, and norms are those of the whole.
    """
    by_example = varying_axes((batch, mask))
    split = [frozenset(varying_axes(leaf) - by_example) for leaf in jax.tree.leaves(params)]

    def one_example(example: Any) -> Any:
        program = trace_loss(loss_fn, params, example)  # which checks it
        warn_of_batch_norms(program.closed)
        return jax.value_and_grad(loss_fn, has_aux=True)(params, example)

    outputs, grads = jax.vmap(one_example)(batch)
    norms, total = clip_and_sum(grads, groups, style=style, mask=mask, split=split)
    return outputs, norms, total
