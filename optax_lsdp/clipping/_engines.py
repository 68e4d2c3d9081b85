"""Choose the engine that computes a clipped sum, and run it on some examples at a time.

The vmap engine forms the gradients of all examples, clips them, and adds them up. The tests compare
the bookkeeping engine, which is in `bookkeeping/`, with this plain reference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._isolation import ValueAndAux, is_example_split, trace_loss, warn_of_batch_norms
from optax_lsdp._mesh import manual_axes, vary, varying_axes
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import ClipGroup, ClipStyle, ExampleNorms, clip_and_sum
from optax_lsdp.clipping.bookkeeping import clip_by_bookkeeping

# Each example's (value, aux), the norms of each group, and the clipped sum.
ClippedSum = tuple[tuple[jax.Array, PyTree], ExampleNorms, optax.Updates]
Engine = Callable[..., ClippedSum]
Outputs = TypeVar("Outputs")
Norms = TypeVar("Norms")


def clip_by_vmap(
    loss_fn: ValueAndAux,
    params: optax.Params,
    batch: PyTree,
    mask: jax.Array | None,
    *,
    groups: list[ClipGroup],
    style: ClipStyle,
) -> ClippedSum:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    Inside `shard_map`, a mesh axis splits a leaf if the leaf varies over the axis and the batch
    does not. Each shard then has a part of every example's gradient, and each norm covers all parts
    of a gradient.
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


ENGINES: dict[str, Engine] = {"bookkeeping": clip_by_bookkeeping, "vmap": clip_by_vmap}


def choose_engine(engine: str, loss_fn: ValueAndAux, params: optax.Params, batch: PyTree) -> Engine:
    """Return the engine with the name `engine`, or the engine that "auto" chooses.

    Bookkeeping cannot compute norms if the shards of a `shard_map` split the work on one example.
    In that case, "auto" chooses vmap, and "bookkeeping" raises an error.
    """
    name = "bookkeeping" if engine == "auto" else engine
    if name == "vmap" or not manual_axes():
        return ENGINES[name]
    if not is_example_split(loss_fn, params, jax.tree.map(lambda x: x[0], batch)):
        return ENGINES[name]
    if engine == "auto":
        return ENGINES["vmap"]
    raise ValueError(
        f"`engine` must be 'auto' or 'vmap' if shards of a shard_map split the work on one "
        f"example, got {engine!r}; pass engine='auto', or shard the arrays with `jit` instead of "
        "shard_map."
    )


def in_microbatches(
    run: Callable[[PyTree, jax.Array | None], tuple[Outputs, Norms, optax.Updates]],
    batch: PyTree,
    mask: jax.Array | None,
    size: int,
) -> tuple[Outputs, Norms, optax.Updates]:
    """Return `run(batch, mask)`, computed on `size` examples at a time.

    `run` returns two trees with a leading axis of examples, and a sum over examples. This function
    concatenates the trees and adds up the sums of all microbatches. If `size` does not divide the
    number of examples, the last two microbatches overlap, and the last one masks the examples that
    are in both.
    """
    total = len(jax.tree.leaves(batch)[0])
    if size >= total:
        return run(batch, mask)
    count = -(-total // size)
    given_mask = jnp.ones(total, bool) if mask is None else mask

    def microbatch(index: jax.Array) -> tuple[Outputs, Norms, optax.Updates]:
        start = jnp.minimum(index * size, total - size)

        def window(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        is_new = start + jnp.arange(size, dtype=jnp.int32) >= index * size
        return run(jax.tree.map(window, batch), window(given_mask) & is_new)

    def accumulate(
        carry: optax.Updates, index: jax.Array
    ) -> tuple[optax.Updates, tuple[Outputs, Norms]]:
        outputs, norms, sums = microbatch(index)
        return jax.tree.map(jnp.add, carry, sums), (outputs, norms)

    def concatenate(x: jax.Array) -> jax.Array:
        overlap = count * size - total
        return jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, overlap:]])

    def zeros_like(x: jax.ShapeDtypeStruct) -> jax.Array:  # zeros that vary over the mesh axes of x
        return vary(jnp.zeros(x.shape, x.dtype), varying_axes(x))

    shapes = jax.eval_shape(lambda: microbatch(jnp.zeros([], jnp.int32))[2])
    zeros = jax.tree.map(zeros_like, shapes)
    sums, stacked = jax.lax.scan(accumulate, zeros, jnp.arange(count, dtype=jnp.int32))
    outputs, norms = jax.tree.map(concatenate, stacked)
    return outputs, norms, sums
