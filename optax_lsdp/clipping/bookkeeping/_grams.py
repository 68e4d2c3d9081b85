"""Norms and sums of gradients Σ_t a_t ⊗ g_t, from their factors alone, every rounding bounded.

Arrays are batched: a: (n, blocks, rows, inputs), or integers (n, blocks, rows) if its rows are unit
vectors; g: (n, blocks, rows, outputs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._trees import norm_rounding, row_norms, sums_of_squares, wide_dtype

EXACT = jax.lax.Precision.HIGHEST  # accelerators round the operands of products otherwise
_LONGEST = 1024  # entries that are summed by one product


class Factors(NamedTuple):
    """The factors of one site's gradients, a and g."""

    a: jax.Array
    g: jax.Array


class Lengths(NamedTuple):
    """‖gradient‖ of each example, and how far below the truth it may be, relatively."""

    values: jax.Array
    rounding: float


class Squares(NamedTuple):
    """‖gradient‖² of each example as computed, and how far below the truth it may be."""

    values: jax.Array
    slack: jax.Array


def _is_units(rows: jax.Array) -> bool:
    return jnp.issubdtype(rows.dtype, jnp.integer)


def _inner(u: jax.Array, v: jax.Array) -> tuple[jax.Array, int]:
    """Return ⟨u_t, v_s⟩ for all t, s: (n, blocks, t, s), and how often its sums are rounded."""
    if _is_units(u) and _is_units(v):
        same = (u[..., :, None] == v[..., None, :]) & (u[..., :, None] >= 0)
        return same.astype(jnp.float32), 0
    if _is_units(v):
        transposed, roundings = _inner(v, u)
        return transposed.swapaxes(-1, -2), roundings
    if _is_units(u):
        taken = jnp.take_along_axis(v, jnp.maximum(u, 0)[..., None, :], axis=-1)  # (…, s, t)
        taken = taken.swapaxes(-1, -2).astype(wide_dtype(v))
        return jnp.where((u >= 0)[..., None], taken, jnp.zeros_like(taken)), 0
    size = u.shape[-1]
    pieces = -(-size // _LONGEST)
    step = -(-size // pieces)
    total = None
    for start in range(0, size, step):
        part = jnp.einsum(
            "nbtp,nbsp->nbts",
            u[..., start : start + step],
            v[..., start : start + step],
            precision=EXACT,
            preferred_element_type=wide_dtype(u, v),
        )
        part = part if pieces == 1 else jax.lax.optimization_barrier(part)
        total = part if total is None else total + part
    return total, step + pieces


def _squares(rows: jax.Array) -> tuple[jax.Array, int]:
    """Return ‖row‖² of every row, (n, blocks, rows), and how often it is rounded."""
    if _is_units(rows):
        return (rows >= 0).astype(jnp.float32), 0
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    squares, roundings = sums_of_squares(flat)
    return squares.reshape(rows.shape[:-1]), roundings


def outer_norms(parts: Sequence[Sequence[Factors]]) -> Lengths:
    """Return ‖a ⊗ g‖ = ‖a‖‖g‖ of each example, whatever the size of its entries.

    There may be several disjoint parts, each with one row in each block.
    """
    lengths, rounding = [], 0.0
    for (part,) in parts:
        shape = part.g.shape[:2]
        length, rounded = jnp.ones(shape, wide_dtype(part.g)), 0.0
        for x in part:
            if _is_units(x):
                length = jnp.where(x[..., 0] >= 0, length, jnp.zeros_like(length))
            else:
                rows = x.reshape(math.prod(shape), x.shape[-1])
                length = length * row_norms([rows]).reshape(shape).astype(length.dtype)
                rounded += norm_rounding([rows])
        lengths.append(length)
        rounding = max(rounding, rounded)
    eps = float(jnp.finfo(lengths[0].dtype).eps)
    return Lengths(row_norms(lengths), rounding + norm_rounding(lengths) + eps)


def outer_squares(parts: Sequence[Sequence[Factors]]) -> Squares:
    """Return ‖a ⊗ g‖² = ‖a‖²‖g‖², as long as no square leaves the range of floats."""
    squares = []
    for (part,) in parts:
        (a, rounded_a), (g, rounded_g) = (_squares(x) for x in part)
        limits = jnp.finfo(g.dtype)
        unit, tiny = float(limits.eps) / 2, float(limits.tiny)
        values = jnp.sum(a.astype(g.dtype) * g, axis=(1, 2))
        roundings = rounded_a + rounded_g + a.shape[1]
        each = 2 * tiny * sum(x.shape[-1] for x in part)
        vanished = each * jnp.sum(a.astype(g.dtype) + g + 1, axis=(1, 2))
        squares.append(Squares(values, 1.01 * roundings * unit * values + vanished))
    return _added(squares)


def squared_norms(parts: Sequence[Sequence[Factors]]) -> Squares:
    """Return ‖Σ_t a_t ⊗ g_t‖² of each example, added up over disjoint parts."""
    return _added([_squared_norms(part) for part in parts])


def _added(squares: Sequence[Squares]) -> Squares:
    """Return the sum over disjoint parts."""
    values, slack = (sum(items[1:], items[0]) for items in zip(*squares, strict=True))
    adding = (len(squares) - 1) * float(jnp.finfo(values.dtype).eps)
    return Squares(values, slack + adding * jnp.abs(values))


def _squared_norms(uses: Sequence[Factors]) -> Squares:
    """Return ‖Σ_uses Σ_t a_t ⊗ g_t‖² = Σ_ts ⟨a_t, a_s⟩⟨g_t, g_s⟩ of each example.

    To add up k numbers in any order is to be off by (k − 1)u relative to the sum of their
    magnitudes, u = ε/2. So ⟨a_t, a_s⟩ is off by p·u·‖a_t‖‖a_s‖ at most, and the whole by
    (p + q + 2·rows + blocks)·u·(Σ_t ‖a_t‖‖g_t‖)². What is smaller than the smallest normal number
    may vanish from each product, too.
    """
    dtype = wide_dtype(uses[0].g)
    limits = jnp.finfo(dtype)
    unit, tiny = float(limits.eps) / 2, float(limits.tiny)
    blocks, rows = uses[0].g.shape[1], sum(use.g.shape[2] for use in uses)
    total = reach = reach_a = reach_g = jnp.zeros(uses[0].g.shape[:2], dtype)
    roundings, entries = 0, 0
    for i, (a, g) in enumerate(uses):
        length_a, length_g = (
            jnp.sqrt(_squares(x)[0].astype(dtype) + x.shape[-1] * tiny) for x in (a, g)
        )
        reach += jnp.sum(length_a * length_g, axis=-1)
        reach_a += jnp.sum(length_a, axis=-1)
        reach_g += jnp.sum(length_g, axis=-1)
        entries = max(entries, a.shape[-1] + g.shape[-1])
        for j in range(i, len(uses)):
            (ka, ra), (kg, rg) = _inner(a, uses[j].a), _inner(g, uses[j].g)
            roundings = max(roundings, ra + rg + 1)
            # The barrier keeps XLA from merging both sums into one of rows² terms.
            sums = jnp.sum(ka.astype(dtype) * kg.astype(dtype), axis=-1)
            sums = jnp.sum(jax.lax.optimization_barrier(sums), axis=-1)
            total += sums * (1 if i == j else 2)
    relative = 1.05 * (roundings + 2 * rows + blocks + len(uses)) * unit
    vanished = 2 * tiny * entries * (jnp.square(reach_a) + jnp.square(reach_g) + rows**2)
    slack = relative * jnp.square(reach) + vanished
    return Squares(jnp.sum(total, axis=-1), jnp.sum(slack, axis=-1))


def gradients(part: Factors, inputs: int) -> jax.Array:
    """Return every example's Σ_t a_t ⊗ g_t: (n, blocks, inputs, outputs)."""
    a, g = part
    dtype = wide_dtype(g)
    if _is_units(a):
        return jax.vmap(lambda a, g: _scatter(a, g.astype(dtype), inputs))(a, g)
    if inputs > g.shape[-1]:  # XLA's CPU backend is fastest with the longer side last
        swapped = product("nbtp,nbtq->nbqp", a, g)
        return swapped.swapaxes(-1, -2)
    return product("nbtp,nbtq->nbpq", a, g)


def weighted_sum(part: Factors, weights: jax.Array, inputs: int) -> jax.Array:
    """Return Σᵢ wᵢ Σ_t a_it ⊗ g_it: (blocks, inputs, outputs), the product of ordinary training."""
    a, g = part
    dtype = wide_dtype(g)
    column = weights.astype(dtype)[:, None, None, None]
    if _is_units(a):
        rows = column * g.astype(dtype)
        merge = [x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in (a, rows)]
        return _scatter(*merge, inputs)
    if a.shape[-1] < g.shape[-1]:
        a = column * a.astype(dtype)
    else:
        g = column * g.astype(dtype)
    return product("nbtp,nbtq->bpq", a, g)


def product(subscripts: str, a: jax.Array, g: jax.Array) -> jax.Array:
    """Return an einsum, float32 at least and not rounded further than that."""
    dtype = wide_dtype(a, g)
    if a.dtype != g.dtype:
        a, g = a.astype(dtype), g.astype(dtype)
    return jnp.einsum(subscripts, a, g, precision=EXACT, preferred_element_type=dtype)


def _scatter(ids: jax.Array, rows: jax.Array, inputs: int) -> jax.Array:
    """Return Σ_t e_(id t) ⊗ row_t for each block: ids (blocks, t), rows (blocks, t, outputs)."""

    def one(ids: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((inputs, rows.shape[-1]), rows.dtype)
        places = jnp.where(ids >= 0, ids, inputs)  # beyond the end: dropped
        return zeros.at[places].add(rows, mode="drop")

    return jax.vmap(one)(ids, rows)
