"""Blocks: a long line is cut into blocks, each is one row of a product with a small matrix.

What flows into a block from either side is one number, which is fed to the product as one more
entry of the block. Very long lines are smoothed chunk by chunk, in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from optax_lsdp.smoothing._decay import Decay

_WIDTH, _SHORT_WIDTH = 64, 32  # entries that are filtered by one product
_CHUNK = 2**19  # entries that stay in a CPU's cache while they are filtered
_LONG = 2**23  # entries whose memory a CPU must ask for anew at every step
_PADDED = 2**20  # entries that go by chunks if they would have to be padded otherwise


def block_width(length: int, kernel: Decay) -> int:
    """Return the width of blocks: all, or a divisor if there is a good one."""
    most = _SHORT_WIDTH if kernel.reach <= _SHORT_WIDTH else _WIDTH
    if length <= 2 * most:
        return length
    return next((width for width in range(most, most // 2, -1) if length % width == 0), most)


def block_ends(line: jax.Array, width: int, kernel: Decay) -> jax.Array:
    """Return the first and the last entry of every block as if it were alone: (blocks, 2, …).

    A line is (entries, …): each entry of the other axes is a line of its own.
    """
    place = jnp.arange(width, dtype=jnp.int32)
    weights = kernel.gain * kernel.powers(jnp.stack([place, width - 1 - place]))

    def ends(line: jax.Array) -> jax.Array:
        return _weigh(weights, pad_to(line, width).reshape(-1, width, *line.shape[1:]))

    def by_chunks(line: jax.Array) -> jax.Array:
        size, count = _chunks(line, width)
        room = jnp.zeros((-(-len(line) // width), 2, *line.shape[1:]), line.dtype)

        def step(index: jax.Array, room: jax.Array) -> jax.Array:
            chunk = jax.lax.dynamic_slice_in_dim(line, index * size, size)
            at = index * (size // width)
            return jax.lax.dynamic_update_slice_in_dim(room, ends(chunk), at, axis=0)

        room = jax.lax.fori_loop(0, count, step, room)
        rest = line[count * size :]
        return room.at[count * (size // width) :].set(ends(rest)) if len(rest) else room

    if not _goes_by_chunks(line, width):
        return ends(line)
    return jax.lax.platform_dependent(line, cpu=by_chunks, default=ends)


def filter_blocks(line: jax.Array, flows: jax.Array, width: int, kernel: Decay) -> jax.Array:
    """Return the line, every block filtered with what flows into it from either side.

    `flows` are (blocks, 2, …). A last block that is not full ends in zeros.
    """
    weights = jnp.concatenate([_toeplitz(width, kernel), _inflow(width, kernel)], axis=1)

    def whole(line: jax.Array, flows: jax.Array) -> jax.Array:
        blocks = pad_to(line, width).reshape(-1, width, *line.shape[1:])
        filtered = _weigh(weights, jnp.concatenate([blocks, flows], axis=1))
        return filtered.reshape(-1, *line.shape[1:])[: len(line)]

    def by_chunks(line: jax.Array, flows: jax.Array) -> jax.Array:
        size, count = _chunks(line, width)
        blocks = size // width

        def step(index: jax.Array, line: jax.Array) -> jax.Array:
            chunk = jax.lax.dynamic_slice_in_dim(line, index * size, size)
            fed = whole(chunk, jax.lax.dynamic_slice_in_dim(flows, index * blocks, blocks))
            return jax.lax.dynamic_update_slice_in_dim(line, fed, index * size, axis=0)

        line = jax.lax.fori_loop(0, count, step, line)
        rest = line[count * size :]
        done = whole(rest, flows[count * blocks :]) if len(rest) else rest
        return jax.lax.dynamic_update_slice_in_dim(line, done, count * size, axis=0)

    if not _goes_by_chunks(line, width):
        return whole(line, flows)
    return jax.lax.platform_dependent(line, flows, cpu=by_chunks, default=whole)


def filter_alone(line: jax.Array, width: int, kernel: Decay) -> jax.Array:
    """Return all blocks, each as if it were alone: (blocks, width)."""
    return _weigh(_toeplitz(width, kernel), pad_to(line, width).reshape(-1, width))


def add_flows(blocks: jax.Array, flows: jax.Array, kernel: Decay) -> jax.Array:
    """Return what `filter_blocks` returns, of blocks that were filtered alone."""
    left, right = _inflow(blocks.shape[1], kernel).T
    return blocks + flows[:, :1] * left + flows[:, 1:] * right


def causal(x: jax.Array, kernel: Decay) -> jax.Array:
    """Return Σ_l ρ^l x_(k−l) along the last axis, l ≥ 0."""
    if kernel.reach <= 1:
        return x
    width = block_width(x.shape[-1], kernel)
    place = jnp.arange(width, dtype=jnp.int32)
    distance = place - place[:, None]
    lower = jnp.where(distance >= 0, kernel.powers(jnp.maximum(distance, 0)), 0)
    blocks = pad_to(x, width, axis=-1).reshape(*x.shape[:-1], -1, width)
    inner = _product(blocks, lower.astype(x.dtype))
    if blocks.shape[-2] > 1:
        carried = shifted(causal(inner[..., -1], kernel.every(width)))
        inner += carried[..., None] * kernel.powers(place + 1)
    return inner.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def shifted(x: jax.Array) -> jax.Array:
    """Return x one place later along the last axis, behind a zero."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., :-1]


def pad_to(x: jax.Array, width: int, axis: int = 0) -> jax.Array:
    """Return x with zeros behind it, up to a multiple of `width`."""
    missing = -x.shape[axis] % width
    if not missing:
        return x
    after = [(0, 0)] * x.ndim
    after[axis] = (0, missing)
    return jnp.pad(x, after)


def _toeplitz(width: int, kernel: Decay) -> jax.Array:
    """Return the matrix that filters a block: (width, width)."""
    place = jnp.arange(width, dtype=jnp.int32)
    return kernel.gain * kernel.powers(jnp.abs(place[:, None] - place))


def _inflow(width: int, kernel: Decay) -> jax.Array:
    """Return how what flows in from the left and the right falls within a block: (width, 2)."""
    place = jnp.arange(width, dtype=jnp.int32)
    return kernel.powers(jnp.stack([place + 1, width - place], axis=1))


def _goes_by_chunks(line: jax.Array, width: int) -> bool:
    return line.size >= (_PADDED if len(line) % width else _LONG)


def _chunks(line: jax.Array, width: int) -> tuple[int, int]:
    """Return the size of chunks, whole blocks each, and how many there are."""
    size = max(1, _CHUNK * len(line) // line.size // width) * width
    return size, len(line) // size


def _weigh(weights: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return Σ_j weights[i, j] blocks[:, j, …]."""
    if blocks.ndim == 2:
        return _product(blocks, weights.T)
    if blocks.shape[2] >= 4 * len(weights):  # one product for each block: nothing is transposed
        weights = jnp.broadcast_to(weights, (len(blocks), *weights.shape))
    return _product(weights, blocks)


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=jax.lax.Precision.HIGHEST)
