"""The vmap engine: form the gradients of all examples, clip them, and add them up.

This engine is the plain reference to which the tests compare the bookkeeping engine.
"""

from __future__ import annotations

import jax
import optax

from optax_lsdp._isolation import ValueAndAux, trace_loss
from optax_lsdp._layers import warn_of_batch_norms
from optax_lsdp._mesh import varying_axes
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import ClipGroup, ClipStyle, ExampleNorms, clip_and_sum


def clip_by_vmap(
    loss_fn: ValueAndAux,
    params: optax.Params,
    batch: PyTree,
    mask: jax.Array | None,
    *,
    groups: list[ClipGroup],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, PyTree], ExampleNorms, optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    Inside `shard_map`, a mesh axis splits a leaf if the leaf varies over the axis and the batch
    does not. Each shard then has a part of every example's gradient, and norms cover all parts.
    """
    batch_axes = varying_axes((batch, mask))
    split = [frozenset(varying_axes(leaf) - batch_axes) for leaf in jax.tree.leaves(params)]

    def one_example(example: PyTree) -> tuple[tuple[jax.Array, PyTree], optax.Updates]:
        program = trace_loss(loss_fn, params, example)  # raises if the loss could mix examples
        warn_of_batch_norms(program.closed)
        return jax.value_and_grad(loss_fn, has_aux=True)(params, example)

    outputs, grads = jax.vmap(one_example)(batch)
    norms, total = clip_and_sum(grads, groups, style=style, mask=mask, split=split)
    return outputs, norms, total
