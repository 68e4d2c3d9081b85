"""Run an engine on a few examples at a time, so that memory does not grow with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._types import PyTree

Outputs = TypeVar("Outputs")
Norms = TypeVar("Norms")


def in_microbatches(
    run: Callable[[PyTree, jax.Array | None], tuple[Outputs, Norms, optax.Updates]],
    batch: PyTree,
    mask: jax.Array | None,
    size: int,
) -> tuple[Outputs, Norms, optax.Updates]:
    """Return `run(batch, mask)`, computed on `size` examples at a time.

    `run` returns two trees with a leading axis of examples, which are concatenated, and a sum over
    examples, which is added up. If `size` does not divide the number of examples, the last two
    microbatches overlap, and the last one masks the examples in the overlap.
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

    def zeros_like(x: jax.ShapeDtypeStruct) -> jax.Array:  # zeros that vary over the axes of x
        return vary(jnp.zeros(x.shape, x.dtype), varying_axes(x))

    shapes = jax.eval_shape(lambda: microbatch(jnp.zeros([], jnp.int32))[2])
    zeros = jax.tree.map(zeros_like, shapes)
    sums, stacked = jax.lax.scan(accumulate, zeros, jnp.arange(count, dtype=jnp.int32))
    outputs, norms = jax.tree.map(concatenate, stacked)
    return outputs, norms, sums
