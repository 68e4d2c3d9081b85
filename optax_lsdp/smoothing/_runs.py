"""Runs: rows of numbers go in, what (I − σL)⁻¹ makes of each comes out, whatever lies beyond.

The kernel of (I − σL)⁻¹ on an endless line is gain·ρ^|k|. What flows into a run from beyond its
ends falls by ρ with each entry, so one number at either end is all that a run has to know: of its
own other end, where it is a ring, of its mirror image, where it ends, or of the next run, which
may lie on another device.

Within a run it is the same: blocks are products with one small matrix, and two numbers pass from
block to block. That is exact and linear in time for every σ, traced ones too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp.smoothing._blocks import (
    add_flows,
    block_ends,
    block_width,
    causal,
    filter_alone,
    filter_blocks,
    pad_to,
    shifted,
)
from optax_lsdp.smoothing._decay import Decay


class Ends(NamedTuple):
    """A number for each end of each row: (rows,), or (rows, runs)."""

    left: jax.Array
    right: jax.Array


class Run(NamedTuple):
    """Rows that are to be filtered, and what is known of them before they are.

    Attributes:
        rows: (rows, length), zeros behind the entries that count; or (length, rows).
        inflow: what flows into each block from its neighbours on either side: (rows, blocks).
        ends: what the first and the last entry of each row will be, if zeros lie beyond.
        sizes: how many entries of each row count: one number for all, or one for each.
        kernel: the one that filters them.
        upright: whether rows are columns.
        alone: the blocks of one row, each filtered as if it were alone, if that is done already.
    """

    rows: jax.Array
    inflow: Ends
    ends: Ends
    sizes: tuple[int, ...]
    kernel: Decay
    upright: bool
    alone: jax.Array | None


def numbers(values: Sequence[int], dtype: Any) -> jax.Array:
    """Return an array that is no constant of the program, which partitioning would not allow."""
    return jnp.concatenate([jax.lax.full((1,), value, dtype) for value in values])


def read_rows(
    rows: jax.Array, sizes: Sequence[int], kernel: Decay, *, upright: bool, copied: bool
) -> Run:
    """Read rows (rows, length), of which the first `sizes` entries count, the others being zero.

    `sizes` has one entry for each row, or one for all. Upright rows are columns, (length, rows),
    all of one size: what is stored so need not be transposed. One row that was `copied` from
    a transposed array is filtered at once, as XLA would transpose it whenever it is read.
    """
    width = block_width(rows.shape[0 if upright else 1], kernel)
    alone = filter_alone(rows[0], width, kernel) if copied and len(rows) == 1 else None
    if alone is None:
        ends = block_ends(rows if upright else _line(rows, width), width, kernel)
    else:
        ends = jnp.stack([alone[:, 0], alone[:, -1]], axis=1)
    if upright:
        firsts, lasts = ends[:, 0].T, ends[:, 1].T
    else:
        firsts, lasts = (ends[:, side].reshape(len(rows), -1) for side in (0, 1))
    falling = kernel.every(width)
    inflow = Ends(
        shifted(causal(lasts, falling)), shifted(causal(firsts[:, ::-1], falling))[:, ::-1]
    )
    row: Any = slice(None)
    last: Any = sizes[0] - 1
    if len(sizes) > 1:
        row, last = jnp.arange(len(sizes), dtype=jnp.int32), numbers(sizes, jnp.int32) - 1
    block, entry = last // width, last % width
    if len(sizes) > 1:
        own = pad_to(rows, width, axis=1).reshape(len(rows), -1, width)[row, block]
        distance = jnp.abs(entry[:, None] - jnp.arange(width, dtype=jnp.int32))
    else:
        own = rows[last - entry : last + 1].T if upright else rows[:, last - entry : last + 1]
        distance = entry - jnp.arange(entry + 1, dtype=jnp.int32)
    tails = kernel.gain * (own * kernel.powers(distance)).sum(axis=1)
    tails += inflow.left[row, block] * kernel.powers(entry + 1)
    heads = firsts[:, 0] + inflow.right[:, 0] * kernel.powers(width)
    return Run(rows, inflow, Ends(heads, tails), tuple(sizes), kernel, upright, alone)


def filter_rows(run: Run, inflow: Ends) -> jax.Array:
    """Return the rows, or columns, when so much flows into them from either end."""
    rows, between, _, sizes, kernel, upright, alone = run
    length = rows.shape[0 if upright else 1]
    width = block_width(length, kernel)
    starts = width * jnp.arange(between.left.shape[1], dtype=jnp.int32)
    ends = numbers(sizes, jnp.int32)[:, None]
    beyond = ends - starts - width  # entries between a block and the end of its row
    left = between.left + inflow.left[:, None] * kernel.powers(starts)
    reaching = jnp.where(beyond >= 0, kernel.powers(jnp.maximum(beyond, 0)), 0)
    right = between.right + inflow.right[:, None] * reaching.astype(rows.dtype)
    if upright:
        flows = jnp.stack([left.T, right.T], axis=1)
    else:
        flows = jnp.stack([left.reshape(-1), right.reshape(-1)], axis=1)
    if upright or len(rows) == 1:  # a last block that is not full is told what flows in at the end
        if alone is None:
            line = filter_blocks(rows if upright else rows[0], flows, width, kernel)
        else:
            line = add_flows(alone, flows, kernel).reshape(-1)[:length]
        part = sizes[0] % width
        if part:
            weights = kernel.powers(part - jnp.arange(part, dtype=jnp.int32))
            line = line.at[sizes[0] - part : sizes[0]].add(
                weights[:, None] * inflow.right if upright else weights * inflow.right
            )
        return line if upright else line[None]
    if any(size % width for size in sizes):  # as above, by an entry that the kernel spreads
        rows = pad_to(rows, width, axis=1)
        place = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 1)
        is_next = (place == ends) & (ends % width > 0)
        rows = jnp.where(is_next, inflow.right[:, None] / kernel.gain, rows)
    line = filter_blocks(_line(rows, width), flows, width, kernel)
    return line.reshape(len(rows), -1)


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
    left = causal(ends.right, falling)
    right = causal(ends.left[:, ::-1], falling)
    inflow = Ends(shifted(left), shifted(right)[:, ::-1])
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


def _line(rows: jax.Array, width: int) -> jax.Array:
    """Put whole blocks of all rows one after the other."""
    return rows[0] if len(rows) == 1 else pad_to(rows, width, axis=1).reshape(-1)
