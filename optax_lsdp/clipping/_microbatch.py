"""Microbatches: an engine for a batch goes in, its result in bounded memory comes out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lsdp._mesh import vary, varying_axes


def in_microbatches(
    run: Callable[[Any, jax.Array | None], tuple[Any, Any, Any]],
    batch: Any,
    mask: jax.Array | None,
    size: int,
) -> tuple[Any, Any, Any]:
    """Return `run(batch, mask)`, made of runs over `size` examples at a time.

    The first two results of `run` are stacked along the examples, the last is summed. Where `size`
    does not divide the batch, the last microbatch overlaps the one before it, and the
    examples that were counted already are masked there.
    """
    total = len(jax.tree.leaves(batch)[0])
    if size >= total:
        return run(batch, mask)
    count = -(-total // size)
    known = jnp.ones(total, bool) if mask is None else mask

    def microbatch(index: jax.Array) -> tuple[Any, Any, Any]:
        start = jnp.minimum(index * size, total - size)

        def window(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        fresh = start + jnp.arange(size, dtype=jnp.int32) >= index * size
        return run(jax.tree.map(window, batch), window(known) & fresh)

    def accumulate(carry: Any, index: jax.Array) -> tuple[Any, Any]:
        outputs, norms, sums = microbatch(index)
        return jax.tree.map(jnp.add, carry, sums), (outputs, norms)

    def unstack(x: jax.Array) -> jax.Array:
        overlap = count * size - total
        return jnp.concatenate([x[:-1].reshape(-1, *x.shape[2:]), x[-1, overlap:]])

    shapes = jax.eval_shape(lambda: microbatch(jnp.zeros([], jnp.int32))[2])

    def zeros_like(x: Any) -> jax.Array:  # which vary over mesh axes as the sums do
        return vary(jnp.zeros(x.shape, x.dtype), varying_axes(x))

    zeros = jax.tree.map(zeros_like, shapes)
    sums, stacked = jax.lax.scan(accumulate, zeros, jnp.arange(count, dtype=jnp.int32))
    return *jax.tree.map(unstack, stacked), sums
