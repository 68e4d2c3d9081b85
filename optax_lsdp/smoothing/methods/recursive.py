"""Filter rows with the kernel of (I − σL)⁻¹ in linear time, for any σ, traced or known.

On an infinite line, the kernel is gain·ρ^|k| at distance k; for ρ, see `_spectrum.ring_decay`. So
all entries beyond one end of a row act on the row through one number, the *carry* of this end. The
carry is the smoothed value just outside the row, computed from only the entries beyond this end. A
carry c adds c·ρᵏ to the k-th entry of the row, counted from this end. Blocks within a row have
carries too. So a row is filtered in three steps:

1. Cut the row into blocks. Compute the smoothed values at both ends of each block as if zeros
   surrounded the block.
2. Accumulate the values at the ends from block to block. The results are the carries of the blocks.
3. Multiply each block, with its two carries as additional entries, by one small matrix.

The carries of a whole row come from the entries outside the row. On a ring, these are the entries
of the row itself, continued from its other end. At a reflecting end, they are the row's mirror
image. Otherwise, they belong to other segments, which may be on other devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

_WIDTH = 48  # most entries per block; with 64, matrices took almost twice as long on a CPU
_CHUNK = 2**19  # entries that a CPU's cache holds while they are filtered
_LONG = 2**23  # CPUs filter lines with at least this many entries in place, chunk by chunk
_PADDED = 2**20  # the limit in place of `_LONG` for lines that must be padded to whole blocks


class Kernel(NamedTuple):
    """The kernel gain·ρ^|k| of (I − σL)⁻¹ on an infinite line."""

    rate: jax.Array  # −log ρ
    gain: jax.Array  # the kernel at its centre
    reach: float = math.inf  # at larger distances the kernel is negligible; ∞ if σ is traced

    def powers(self, exponents: jax.Array | int) -> jax.Array:
        """Return ρᵏ for each exponent k ≥ 0."""
        if isinstance(exponents, jax.Array):
            exponents = exponents.astype(self.rate.dtype)
        return jnp.exp(-self.rate * exponents)

    def every(self, width: int) -> Kernel:
        """Return the kernel between entries that are w = `width` places apart, gain·(ρʷ)^|k|."""
        return Kernel(width * self.rate, self.gain, self.reach / width)


def _make_kernel(smoothing: jax.Array | float, dtype: DTypeLike) -> Kernel:
    """Return the kernel with rate = 2 arsinh(1/(2√σ)) and gain = tanh(rate/2) = 1/√(1 + 4σ).

    In this form, neither number loses digits if ρ is close to 1. For σ = 0, return the kernel of
    σ = 1: `laplacian_smooth` then ignores the smoothed values.
    """
    positive = jnp.asarray(smoothing, dtype)
    is_zero = jnp.abs(positive) < jnp.finfo(dtype).tiny
    positive = jnp.where(is_zero, jnp.ones_like(positive), positive)
    rate = 2 * jnp.arcsinh(0.5 / jnp.sqrt(positive))
    reach = math.inf
    if isinstance(smoothing, float):
        known = 2 * math.asinh(0.5 / math.sqrt(max(smoothing, 1e-300)))
        reach = -math.log(float(jnp.finfo(dtype).eps) / 8) / known
    return Kernel(rate, jnp.tanh(rate / 2), reach)


class Ends(NamedTuple):
    """One number for each end of each row, or of each segment of the rows.

    Both arrays have shape (rows,) or (rows, segments), or (segments,) for one row.
    """

    left: jax.Array
    right: jax.Array


class Rows(NamedTuple):
    """Rows that are ready to be filtered. If they are `upright`, they are columns of `values`.

    A carry is a number at one end of a row or block: the smoothed value just outside, computed from
    only the entries beyond this end.
    """

    values: jax.Array  # (rows, length), or (length, rows) if upright; zero beyond `sizes`
    carries: Ends  # (rows, blocks): the part of each block's carries that comes from its own row
    ends: Ends  # (rows,): first and last entry, smoothed as if zeros surrounded the row
    sizes: tuple[int, ...]  # entries per row: one number for all rows, or one for each row
    kernel: Kernel
    upright: bool  # whether rows are columns of `values`, which saves a transposition
    filtered: jax.Array | None  # the blocks of a single copied row, filtered as if between zeros


def prepare_rows(
    values: jax.Array,
    sizes: Sequence[int],
    smoothing: jax.Array | float,
    *,
    upright: bool,
    copied: bool,
) -> Rows:
    """Prepare rows for filtering: compute everything that does not need the carries at their ends.

    For `values`, `sizes` and `upright`, see `Rows`. `smoothing` is σ. Upright rows must all have
    the same size. `copied` says that `values` is a transposed copy. XLA would transpose a single
    copied row again for each use, so this function filters such a row at once.
    """
    kernel = _make_kernel(smoothing, values.dtype)
    width = _block_width(values.shape[0 if upright else 1])
    filtered = None
    if copied and len(values) == 1:
        filtered = _weigh(_toeplitz(width, kernel), _pad(values[0], width).reshape(-1, width))
        ends = jnp.stack([filtered[:, 0], filtered[:, -1]], axis=1)
    else:
        ends = _block_ends(values if upright else _as_line(values, width), width, kernel)
    if upright:
        firsts, lasts = ends[:, 0].T, ends[:, 1].T
    else:
        firsts, lasts = (ends[:, side].reshape(len(values), -1) for side in (0, 1))
    carries, _ = link_equal(Ends(firsts, lasts), width, kernel)
    if len(sizes) > 1:
        row = jnp.arange(len(sizes), dtype=jnp.int32)
        last = as_array(sizes, jnp.int32) - 1
        block, entry = last // width, last % width
        tail = _pad(values, width, axis=1).reshape(len(values), -1, width)[row, block]
        distance = jnp.abs(entry[:, None] - jnp.arange(width, dtype=jnp.int32))
        carry, power = carries.left[row, block], kernel.powers(entry + 1)
    else:
        end = sizes[0]
        start = (end - 1) // width * width  # of the last block that counts
        tail = values[start:end].T if upright else values[:, start:end]
        distance = end - 1 - start - jnp.arange(end - start, dtype=jnp.int32)
        carry, power = carries.left[:, start // width], kernel.powers(end - start)
    lasts = kernel.gain * (tail * kernel.powers(distance)).sum(axis=1) + carry * power
    firsts = firsts[:, 0] + carries.right[:, 0] * kernel.powers(width)
    return Rows(values, carries, Ends(firsts, lasts), tuple(sizes), kernel, upright, filtered)


def filter_rows(rows: Rows, carry: Ends) -> jax.Array:
    """Return the smoothed rows, or columns if upright. `carry` has the carries of whole rows."""
    values, between, _, sizes, kernel, upright, filtered = rows
    length = values.shape[0 if upright else 1]
    width = _block_width(length)
    starts = width * jnp.arange(between.left.shape[1], dtype=jnp.int32)
    ends = as_array(sizes, jnp.int32)[:, None]
    beyond = ends - starts - width  # how many entries lie between a block and the end of its row
    left = between.left + carry.left[:, None] * kernel.powers(starts)
    reaching = jnp.where(beyond >= 0, kernel.powers(jnp.maximum(beyond, 0)), 0)
    right = between.right + carry.right[:, None] * reaching.astype(values.dtype)
    sides = (left.T, right.T) if upright else (left.reshape(-1), right.reshape(-1))
    carries = jnp.stack(sides, axis=1)
    if upright or len(values) == 1:
        if filtered is None:
            line = _filter_blocks(values if upright else values[0], carries, width, kernel)
        else:
            near, far = _carry_weights(width, kernel).T
            line = filtered + carries[:, :1] * near + carries[:, 1:] * far
            line = line.reshape(-1)[:length]
        part = sizes[0] % width
        if part:  # the row ends within its last block: add the right carry there
            weights = kernel.powers(part - jnp.arange(part, dtype=jnp.int32))
            line = line.at[sizes[0] - part : sizes[0]].add(
                weights[:, None] * carry.right if upright else weights * carry.right
            )
        return line if upright else line[None]
    if any(size % width for size in sizes):
        # If a row ends within a block, an entry right after its end adds the row's right carry.
        values = _pad(values, width, axis=1)
        place = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        is_next = (place == ends) & (ends % width > 0)
        values = jnp.where(is_next, carry.right[:, None] / kernel.gain, values)
    line = _filter_blocks(_as_line(values, width), carries, width, kernel)
    return line.reshape(len(values), -1)


def carry_of_rings(ends: Ends, sizes: Sequence[int], kernel: Kernel) -> Ends:
    """Return the carries of rings: the entries beyond one end are those at the other end."""
    rounds = -1 / jnp.expm1(-kernel.rate * as_array(sizes, kernel.rate.dtype))
    return Ends(ends.right * rounds, ends.left * rounds)


def carry_of_mirrors(ends: Ends, sizes: Sequence[int], kernel: Kernel) -> Ends:
    """Return the carries of rows with reflecting ends: a row continues in its mirror image."""
    distance = kernel.rate * as_array(sizes, kernel.rate.dtype)
    across, rounds = jnp.exp(-distance), -1 / jnp.expm1(-2 * distance)
    left, right = ends
    return Ends((left + across * right) * rounds, (right + across * left) * rounds)


CARRY_AT = {"periodic": carry_of_rings, "neumann": carry_of_mirrors}  # by boundary


def link_equal(ends: Ends, size: int, kernel: Kernel) -> tuple[Ends, Ends]:
    """Return each segment's carries from the other segments of its row, and the `Ends` of rows.

    The segments of a row have equal sizes. `ends` holds the first and last entry of each segment,
    smoothed as if zeros surrounded the segment, in arrays of shape (rows, segments). The `Ends` of
    rows hold the same for whole rows.
    """
    between = kernel.every(size)
    left = _accumulate(ends.right, between)
    right = _accumulate(ends.left[:, ::-1], between)
    return Ends(_delayed(left), _delayed(right)[:, ::-1]), Ends(right[:, -1], left[:, -1])


def link_unequal(ends: Ends, sizes: Sequence[int], kernel: Kernel) -> tuple[Ends, Ends]:
    """Return each segment's carries from the other segments of one row, and the `Ends` of the row.

    The segments may have different sizes. The arrays in `ends` have shape (segments,). See also
    `link_equal`.
    """
    falling = kernel.powers(as_array(sizes, kernel.rate.dtype))

    def add(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return one[0] * other[0], one[1] * other[0] + other[1]

    _, left = jax.lax.associative_scan(add, (falling, ends.right))
    _, right = jax.lax.associative_scan(add, (falling, ends.left), reverse=True)
    return Ends(_delayed(left), _delayed(right[::-1])[::-1]), Ends(right[0], left[-1])


def add_outer_carry(outer: Ends, carries: Ends, places: jax.Array, kernel: Kernel) -> Ends:
    """Return the carry into each segment of a row, from inside and outside of the row.

    `outer` holds the carry into each row from outside, in arrays of shape (…,). `carries` holds the
    carry into each segment from the other segments of its row, in arrays of shape (…, segments).
    `places` lists the index at which each segment starts. Its last entry is the row's length.
    """
    return Ends(
        carries.left + outer.left[..., None] * kernel.powers(places[:-1]),
        carries.right + outer.right[..., None] * kernel.powers(places[-1] - places[1:]),
    )


def as_array(values: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """Return the values as an array that XLA computes: custom partitioning forbids constants."""
    return jnp.concatenate([jax.lax.full((1,), value, dtype) for value in values])


def _block_width(length: int) -> int:
    """Return the number of entries per block. If possible, it divides `length`."""
    if length <= 2 * _WIDTH:
        return length
    widths = range(_WIDTH, _WIDTH // 2, -1)
    return next((width for width in widths if length % width == 0), _WIDTH)


def _block_ends(line: jax.Array, width: int, kernel: Kernel) -> jax.Array:
    """Return the first and last entry of every block, smoothed as if zeros surrounded it.

    `line` has shape (entries, …), and the result (blocks, 2, …). Each index of the other axes is a
    separate line.
    """
    place = jnp.arange(width, dtype=jnp.int32)
    weights = kernel.gain * kernel.powers(jnp.stack([place, width - 1 - place]))

    def ends(line: jax.Array) -> jax.Array:
        return _weigh(weights, _pad(line, width).reshape(-1, width, *line.shape[1:]))

    def by_chunks(line: jax.Array) -> jax.Array:
        size, count = _chunks(line, width)
        found = jnp.zeros((-(-len(line) // width), 2, *line.shape[1:]), line.dtype)

        def step(index: jax.Array, found: jax.Array) -> jax.Array:
            chunk = jax.lax.dynamic_slice_in_dim(line, index * size, size)
            at = index * (size // width)
            return jax.lax.dynamic_update_slice_in_dim(found, ends(chunk), at, axis=0)

        found = jax.lax.fori_loop(0, count, step, found)
        rest = line[count * size :]
        return found.at[count * (size // width) :].set(ends(rest)) if len(rest) else found

    if not _needs_chunks(line, width):
        return ends(line)
    return jax.lax.platform_dependent(line, cpu=by_chunks, default=ends)


def _filter_blocks(line: jax.Array, carries: jax.Array, width: int, kernel: Kernel) -> jax.Array:
    """Filter every block of the line, with its two carries, and return the line.

    `carries` has shape (blocks, 2, …): for each block, its left and its right carry.
    """
    weights = jnp.concatenate([_toeplitz(width, kernel), _carry_weights(width, kernel)], axis=1)

    def whole(line: jax.Array, carries: jax.Array) -> jax.Array:
        blocks = _pad(line, width).reshape(-1, width, *line.shape[1:])
        filtered = _weigh(weights, jnp.concatenate([blocks, carries], axis=1))
        return filtered.reshape(-1, *line.shape[1:])[: len(line)]

    def by_chunks(line: jax.Array, carries: jax.Array) -> jax.Array:
        size, count = _chunks(line, width)
        blocks = size // width

        def step(index: jax.Array, line: jax.Array) -> jax.Array:
            chunk = jax.lax.dynamic_slice_in_dim(line, index * size, size)
            mine = jax.lax.dynamic_slice_in_dim(carries, index * blocks, blocks)
            return jax.lax.dynamic_update_slice_in_dim(line, whole(chunk, mine), index * size, 0)

        line = jax.lax.fori_loop(0, count, step, line)
        rest = line[count * size :]
        done = whole(rest, carries[count * blocks :]) if len(rest) else rest
        return jax.lax.dynamic_update_slice_in_dim(line, done, count * size, axis=0)

    if not _needs_chunks(line, width):
        return whole(line, carries)
    return jax.lax.platform_dependent(line, carries, cpu=by_chunks, default=whole)


def _accumulate(x: jax.Array, kernel: Kernel) -> jax.Array:
    """Return y with y_k = Σ_l ρ^l x_(k−l), summed over l ≥ 0, along the last axis."""
    if kernel.reach <= 1:
        return x
    width = _block_width(x.shape[-1])
    place = jnp.arange(width, dtype=jnp.int32)
    distance = place - place[:, None]
    lower = jnp.where(distance >= 0, kernel.powers(jnp.maximum(distance, 0)), 0)
    blocks = _pad(x, width, axis=-1).reshape(*x.shape[:-1], -1, width)
    inner = _product(blocks, lower.astype(x.dtype))
    if blocks.shape[-2] > 1:
        carry = _delayed(_accumulate(inner[..., -1], kernel.every(width)))
        inner += carry[..., None] * kernel.powers(place + 1)
    return inner.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _delayed(x: jax.Array) -> jax.Array:
    """Return x shifted by one place along the last axis, with a zero in front."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., :-1]


def _pad(x: jax.Array, width: int, axis: int = 0) -> jax.Array:
    """Pad an axis with zeros at its end, to a multiple of `width`."""
    after = [(0, 0)] * x.ndim
    after[axis] = (0, -x.shape[axis] % width)
    return jnp.pad(x, after) if x.shape[axis] % width else x


def _as_line(rows: jax.Array, width: int) -> jax.Array:
    """Return all rows one after the other, each padded to whole blocks."""
    return rows[0] if len(rows) == 1 else _pad(rows, width, axis=1).reshape(-1)


def _toeplitz(width: int, kernel: Kernel) -> jax.Array:
    """Return the (width, width) matrix that filters a block."""
    place = jnp.arange(width, dtype=jnp.int32)
    return kernel.gain * kernel.powers(jnp.abs(place[:, None] - place))


def _carry_weights(width: int, kernel: Kernel) -> jax.Array:
    """Return the (width, 2) weights of the left and the right carry at each entry of a block."""
    place = jnp.arange(width, dtype=jnp.int32)
    return kernel.powers(jnp.stack([place + 1, width - place], axis=1))


def _needs_chunks(line: jax.Array, width: int) -> bool:
    return line.size >= (_PADDED if len(line) % width else _LONG)


def _chunks(line: jax.Array, width: int) -> tuple[int, int]:
    """Return the size of a chunk, a multiple of `width`, and how many chunks fit into the line."""
    size = max(1, _CHUNK * len(line) // line.size // width) * width
    return size, len(line) // size


def _weigh(weights: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return Σ_j weights[i, j] blocks[:, j, …]."""
    if blocks.ndim == 2:
        return _product(blocks, weights.T)
    if blocks.shape[2] >= 4 * len(weights):  # one product per block, so nothing is transposed
        weights = jnp.broadcast_to(weights, (len(blocks), *weights.shape))
    return _product(weights, blocks)


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return the product in float32. By default, TPUs would keep only 8 bits of each factor."""
    return jnp.matmul(one, other, precision=jax.lax.Precision.HIGHEST)
