"""Runs: rows of numbers go in, what (I − σL)⁻¹ makes of each comes out, whatever lies beyond.

The kernel of (I − σL)⁻¹ on an endless line is gain·ρ^|k|, ρ = e^(−rate). A run is first filtered as
if zeros lay beyond its ends. What flows in from there falls by ρ with each entry, so one number
at either end is all that a run has to know: of its own other end, where it is a ring, of its
mirror image, where it ends, or of the next run, which may lie on another device.

Within a run it is the same: blocks are products with one small matrix, and two numbers pass from
block to block. That is exact and linear in time for every σ, traced ones too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._checks import is_number

_BLOCK, _SHORT_BLOCK = 64, 32  # entries that are filtered by one product


class Decay(NamedTuple):
    """How the kernel falls.

    Attributes:
        rate: ρ = e^(−rate) is the decay per entry.
        gain: the kernel at its centre.
        reach: the number of entries after which it is too small to count, if σ is known.
    """

    rate: jax.Array
    gain: jax.Array
    reach: float = math.inf

    def powers(self, exponents: Any) -> jax.Array:
        """Return ρ^k for k ≥ 0."""
        if not isinstance(exponents, jax.Array):
            return jnp.exp(-self.rate * exponents)
        return jnp.exp(-self.rate * exponents.astype(self.rate.dtype))

    def every(self, width: int) -> Decay:
        """Return how it falls from one block to the next."""
        return Decay(width * self.rate, self.gain, self.reach / width)


class Ends(NamedTuple):
    """A number for each end of each row: (rows,), or (rows, runs)."""

    left: jax.Array
    right: jax.Array


class Filtered(NamedTuple):
    """Rows that were filtered as if zeros lay beyond them.

    Attributes:
        inner: (rows, blocks, width): every block as if it were alone; or (blocks, width, rows).
        inflow: what flows into each block from its neighbours on either side: (rows, blocks).
        ends: the first and the last entry of each row when all is added up.
        sizes: how many entries of each row count: one number for all, or one for each.
        kernel: the one that filtered them.
        upright: whether rows are columns.
    """

    inner: jax.Array
    inflow: Ends
    ends: Ends
    sizes: tuple[int, ...]
    kernel: Decay
    upright: bool


def decay(smoothing: jax.Array | float, dtype: Any) -> Decay:
    """Return rate = 2 arsinh(1/(2√σ)) and gain = tanh(rate/2) = 1/√(1 + 4σ).

    So written, neither loses digits where ρ is close to 1. Where a schedule says σ = 0 another
    number stands in: what comes of it is not used.
    """
    positive = jnp.asarray(smoothing, dtype)
    positive = jnp.where(positive == 0, jnp.ones_like(positive), positive)
    rate = 2 * jnp.arcsinh(0.5 / jnp.sqrt(positive))
    reach = math.inf
    if is_number(smoothing):
        known = 2 * math.asinh(0.5 / math.sqrt(smoothing))
        reach = -math.log(float(jnp.finfo(dtype).eps) / 8) / known
    return Decay(rate, jnp.tanh(rate / 2), reach)


def numbers(values: Sequence[int], dtype: Any) -> jax.Array:
    """Return an array that is no constant of the program, which partitioning would not allow."""
    return jnp.concatenate([jax.lax.full((1,), value, dtype) for value in values])


def filter_rows(
    rows: jax.Array, sizes: Sequence[int], kernel: Decay, *, upright: bool = False
) -> Filtered:
    """Filter rows (rows, length), of which the first `sizes` entries count, the others being zero.

    `sizes` has one entry for each row, or one for all. Upright rows are columns, (length, rows),
    all of one size: what is stored so need not be transposed.
    """
    width = _block_width(rows.shape[0 if upright else 1], kernel)
    place = jnp.arange(width, dtype=jnp.int32)
    toeplitz = kernel.gain * kernel.powers(jnp.abs(place[:, None] - place))
    if upright:
        blocks = jnp.pad(rows, ((0, -len(rows) % width), (0, 0))).reshape(-1, width, rows.shape[1])
        inner = _product(toeplitz, blocks)
        firsts, lasts = inner[:, 0].T, inner[:, -1].T
    else:
        inner = _product(_blocks(rows, width), toeplitz)
        firsts, lasts = inner[:, :, 0], inner[:, :, -1]
    falling = kernel.every(width)
    inflow = Ends(
        _shifted(_causal(lasts, falling)), _shifted(_causal(firsts[:, ::-1], falling))[:, ::-1]
    )
    row: Any = slice(None)
    last: Any = sizes[0] - 1
    if len(sizes) > 1:
        row, last = jnp.arange(len(sizes), dtype=jnp.int32), numbers(sizes, jnp.int32) - 1
    block, entry = last // width, last % width
    alone = inner[block, entry] if upright else inner[row, block, entry]
    tails = alone + inflow.left[row, block] * kernel.powers(entry + 1)
    heads = firsts[:, 0] + inflow.right[:, 0] * kernel.powers(width)
    return Filtered(inner, inflow, Ends(heads, tails), tuple(sizes), kernel, upright)


def add_inflow(filtered: Filtered, inflow: Ends, *, apart: bool = False) -> jax.Array:
    """Return the rows, or columns, when so much flows into them from either end.

    They may be longer than they were. Rows that are to be taken apart are made by a product:
    everything else XLA computes again in each of the kernels that take one.
    """
    inner, between, _, sizes, kernel, upright = filtered
    width = inner.shape[1 if upright else 2]
    count = inner.shape[0 if upright else 1]
    place = jnp.arange(width, dtype=jnp.int32)
    starts = width * jnp.arange(count, dtype=jnp.int32)
    ends = numbers(sizes, jnp.int32)[:, None]
    beyond = ends - starts - width  # entries between a block and the end of its row
    left = between.left + inflow.left[:, None] * kernel.powers(starts)
    reaching = jnp.where(beyond >= 0, kernel.powers(jnp.maximum(beyond, 0)), 0)
    right = between.right + inflow.right[:, None] * reaching.astype(inner.dtype)

    def spread(flow: jax.Array, weights: jax.Array) -> jax.Array:
        """Return flow ⊗ weights: (rows, blocks) and (1 or rows, width)."""
        if upright:
            return flow.T[:, None, :] * weights.T[None]
        return flow[:, :, None] * weights[:, None, :]

    result = inner + spread(left, kernel.powers(place + 1)[None])
    result += spread(right, kernel.powers(width - place)[None])
    if any(size % width for size in sizes):  # the last block ends before its width does
        is_last = ((beyond < 0) & (beyond > -width)).astype(inner.dtype)
        weights = kernel.powers(jnp.maximum(ends % width - place, 0))
        result += spread(inflow.right[:, None] * is_last, weights)
    if apart:
        result = _product(result, jnp.eye(width, dtype=result.dtype))
    return result.reshape(-1, inner.shape[2]) if upright else result.reshape(len(inner), -1)


def ring(ends: Ends, sizes: Sequence[int], kernel: Decay) -> Ends:
    """Return what flows into rows that are rings: their own other ends, again and again."""
    rounds = -1 / jnp.expm1(-kernel.rate * numbers(sizes, kernel.rate.dtype))
    return Ends(ends.right * rounds, ends.left * rounds)


def mirrored(ends: Ends, sizes: Sequence[int], kernel: Decay) -> Ends:
    """Return what flows into rows whose ends reflect: Neumann's condition."""
    distance = kernel.rate * numbers(sizes, kernel.rate.dtype)
    across, rounds = jnp.exp(-distance), -1 / jnp.expm1(-2 * distance)
    left, right = ends
    return Ends((left + across * right) * rounds, (right + across * left) * rounds)


CLOSE = {"periodic": ring, "neumann": mirrored}


def chain(ends: Ends, size: int, kernel: Decay) -> tuple[Ends, Ends]:
    """Link runs of one size, (rows, runs), that follow one another in each row.

    Returns what flows into each run from the others, and the ends of the rows.
    """
    falling = kernel.every(size)
    left = _causal(ends.right, falling)
    right = _causal(ends.left[:, ::-1], falling)
    inflow = Ends(_shifted(left), _shifted(right)[:, ::-1])
    return inflow, Ends(right[:, -1], left[:, -1])


def chain_unequal(ends: Ends, sizes: Sequence[int], kernel: Decay) -> tuple[Ends, Ends]:
    """Link runs of different sizes, (runs,), one after the other: as `chain`, for one row."""
    falling = kernel.powers(numbers(sizes, kernel.rate.dtype))

    def add(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return one[0] * other[0], one[1] * other[0] + other[1]

    _, left = jax.lax.associative_scan(add, (falling, ends.right))
    _, right = jax.lax.associative_scan(add, (falling, ends.left), reverse=True)
    zero = jnp.zeros_like(left[:1])
    inflow = Ends(jnp.concatenate([zero, left[:-1]]), jnp.concatenate([right[1:], zero]))
    return inflow, Ends(right[0], left[-1])


def pass_through(outside: Ends, inflow: Ends, places: jax.Array, kernel: Decay) -> Ends:
    """Add what flows into a whole chain, (…,), to what flows into each of its runs, (…, runs).

    `places` are those at which runs begin, and where the last one ends.
    """
    return Ends(
        inflow.left + outside.left[..., None] * kernel.powers(places[:-1]),
        inflow.right + outside.right[..., None] * kernel.powers(places[-1] - places[1:]),
    )


def _block_width(length: int, kernel: Decay) -> int:
    """Return the width of blocks: all, or a divisor if there is a good one."""
    most = _SHORT_BLOCK if kernel.reach <= _SHORT_BLOCK else _BLOCK
    if length <= 2 * most:
        return length
    return next((width for width in range(most, most // 2, -1) if length % width == 0), most)


def _blocks(rows: jax.Array, width: int) -> jax.Array:
    missing = -rows.shape[-1] % width
    padded = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)]) if missing else rows
    return padded.reshape(*rows.shape[:-1], padded.shape[-1] // width, width)


def _causal(x: jax.Array, kernel: Decay) -> jax.Array:
    """Return Σ_l ρ^l x_(k−l) along the last axis, l ≥ 0."""
    if kernel.reach <= 1:
        return x
    width = _block_width(x.shape[-1], kernel)
    place = jnp.arange(width, dtype=jnp.int32)
    distance = place - place[:, None]
    lower = jnp.where(distance >= 0, kernel.powers(jnp.maximum(distance, 0)), 0)
    blocks = _blocks(x, width)
    inner = _product(blocks, lower.astype(x.dtype))
    if blocks.shape[-2] > 1:
        carried = _shifted(_causal(inner[..., -1], kernel.every(width)))
        inner += carried[..., None] * kernel.powers(place + 1)
    return inner.reshape(*x.shape[:-1], -1)[..., : x.shape[-1]]


def _shifted(x: jax.Array) -> jax.Array:
    """Return x one place later along the last axis, behind a zero."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(1, 0)])[..., :-1]


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=jax.lax.Precision.HIGHEST)
