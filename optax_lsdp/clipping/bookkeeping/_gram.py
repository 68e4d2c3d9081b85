"""Compute norms and sums of gradients Σ_t a_t ⊗ g_t from their factors a and g.

Every norm comes with a bound on its rounding error, so that callers can compute an upper bound on
the exact norm. Arrays have a leading axis of n examples. a is (n, blocks, rows, inputs), and g is
(n, blocks, rows, outputs). If the rows of a are one-hot, a is an array of integers instead,
(n, blocks, rows).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._trees import norm_rounding, row_norms, sums_of_squares, usable_scale, wide_dtype

EXACT = jax.lax.Precision.HIGHEST  # by default, accelerators round the operands of products
_LONGEST = 1024  # terms to add at a time: fewer terms tighten the bound, more terms are faster


class Factors(NamedTuple):
    """The factors a and g of one term of a gradient."""

    a: jax.Array
    g: jax.Array


class Lengths(NamedTuple):
    """Each example's computed ‖gradient‖. The exact norm is at most (1 + rounding) · values."""

    values: jax.Array
    rounding: float


class Squares(NamedTuple):
    """Each example's computed ‖gradient‖². The exact square is at most values + slack."""

    values: jax.Array
    slack: jax.Array


def _is_one_hot(rows: jax.Array) -> bool:
    return jnp.issubdtype(rows.dtype, jnp.integer)


def _inner(u: jax.Array, v: jax.Array) -> tuple[jax.Array, int]:
    """Return ⟨u_t, v_s⟩ for all t, s: (n, blocks, t, s), and how many roundings each contains."""
    if _is_one_hot(u) and _is_one_hot(v):
        same = (u[..., :, None] == v[..., None, :]) & (u[..., :, None] >= 0)
        return same.astype(jnp.float32), 0
    if _is_one_hot(v):
        transposed, roundings = _inner(v, u)
        return transposed.swapaxes(-1, -2), roundings
    if _is_one_hot(u):
        taken = jnp.take_along_axis(v, jnp.maximum(u, 0)[..., None, :], axis=-1)  # (…, s, t)
        taken = taken.swapaxes(-1, -2).astype(wide_dtype(v))
        return jnp.where((u >= 0)[..., None], taken, jnp.zeros_like(taken)), 0
    size = u.shape[-1]
    pieces = -(-size // _LONGEST)
    step = -(-size // pieces)
    parts = [
        product("nbtp,nbsp->nbts", u[..., start : start + step], v[..., start : start + step])
        for start in range(0, size, step)
    ]
    if pieces > 1:
        parts = jax.lax.optimization_barrier(parts)
    return sum(parts[1:], parts[0]), step + pieces


def _squares(rows: jax.Array) -> tuple[jax.Array, int]:
    """Return the squared norm of every row, and the number of roundings behind each of them.

    The squared norms have the shape (n, blocks, rows).
    """
    if _is_one_hot(rows):
        return (rows >= 0).astype(jnp.float32), 0
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    squares, roundings = sums_of_squares(flat)
    return squares.reshape(rows.shape[:-1]), roundings


def outer_norms(parts: Sequence[Sequence[Factors]]) -> Lengths:
    """Return each example's ‖a ⊗ g‖ = ‖a‖‖g‖, without overflow or underflow of squares.

    Each of the disjoint parts has a single term with one row per block.
    """
    lengths, rounding = [], 0.0
    for (part,) in parts:
        shape = part.g.shape[:2]
        length, rounded = jnp.ones(shape, wide_dtype(part.g)), 0.0
        for x in part:
            if _is_one_hot(x):
                length = jnp.where(x[..., 0] >= 0, length, jnp.zeros_like(length))
            else:
                rows = x.reshape(math.prod(shape), x.shape[-1])
                length = length * row_norms([rows]).reshape(shape).astype(length.dtype)
                rounded += norm_rounding([rows])
        lengths.append(length)
        rounding = max(rounding, rounded)
    eps = float(jnp.finfo(lengths[0].dtype).eps)
    scaling = 2 * eps  # the sum divides and multiplies by `factor_scales`
    return Lengths(row_norms(lengths), rounding + norm_rounding(lengths) + scaling)


def factor_scales(parts: Sequence[Sequence[Factors]]) -> tuple[jax.Array, jax.Array]:
    """Return scales for a and g, (n,): the largest magnitude, as limited by `usable_scale`."""

    def largest(items: list[jax.Array]) -> jax.Array:
        kept = [x for x in items if not _is_one_hot(x)]
        if not kept:
            return jnp.ones(len(items[0]), wide_dtype(items[0]))
        dtype = wide_dtype(*kept)
        sizes = [jnp.max(jnp.abs(x.astype(dtype)), axis=(1, 2, 3)) for x in kept]
        return usable_scale(jnp.stack(sizes).max(axis=0))

    return largest([part.a for (part,) in parts]), largest([part.g for (part,) in parts])


def outer_squares(parts: Sequence[Sequence[Factors]]) -> Squares:
    """Return each example's ‖a ⊗ g‖² = ‖a‖²‖g‖². Squares may overflow or underflow."""
    squares = []
    for (part,) in parts:
        (a, rounded_a), (g, rounded_g) = (_squares(x) for x in part)
        limits = jnp.finfo(g.dtype)
        unit, tiny = float(limits.eps) / 2, float(limits.tiny)
        values = jnp.sum(a.astype(g.dtype) * g, axis=(1, 2))
        roundings = rounded_a + rounded_g + a.shape[1]
        each = 2 * tiny * sum(x.shape[-1] for x in part)
        underflow = each * jnp.sum(a.astype(g.dtype) + g + 1, axis=(1, 2))
        squares.append(Squares(values, 1.01 * roundings * unit * values + underflow))
    return _added(squares)


def squared_norms(parts: Sequence[Sequence[Factors]]) -> Squares:
    """Return each example's ‖Σ_t a_t ⊗ g_t‖², summed over disjoint parts."""
    return _added([_squared_norms(part) for part in parts])


def _added(squares: Sequence[Squares]) -> Squares:
    """Return the sum of squares over disjoint parts."""
    values, slack = (sum(items[1:], items[0]) for items in zip(*squares, strict=True))
    adding = (len(squares) - 1) * float(jnp.finfo(values.dtype).eps)
    return Squares(values, slack + adding * jnp.abs(values))


def _squared_norms(terms: Sequence[Factors]) -> Squares:
    """Return each example's ‖Σ_t a_t ⊗ g_t‖² = Σ_ts ⟨a_t, a_s⟩⟨g_t, g_s⟩ over all terms.

    Let u = ε/2, where ε is the machine epsilon. Adding m numbers in any order has an error of at
    most (m − 1)u times the sum of their magnitudes. So the error of ⟨a_t, a_s⟩ is at most
    k_a·u·‖a_t‖‖a_s‖, and the error of the result is at most u times
    Σ_ts (k_a‖a_t‖‖a_s‖|⟨g_t, g_s⟩| + k_g|⟨a_t, a_s⟩|‖g_t‖‖g_s‖ + k|⟨a_t, a_s⟩⟨g_t, g_s⟩|). Here k_a
    and k_g are the numbers of roundings of an inner product, and k is that of the outer sum. The
    slack also covers errors of second order, and products that underflow to zero.
    """
    dtype = wide_dtype(terms[0].g)
    unit, tiny = float(jnp.finfo(dtype).eps) / 2, float(jnp.finfo(dtype).tiny)
    blocks, rows = terms[0].g.shape[1], sum(term.g.shape[2] for term in terms)
    lengths = [Factors(*(_row_lengths(x).astype(dtype) for x in term)) for term in terms]
    total = slack = jnp.zeros(terms[0].g.shape[:2], dtype)
    roundings = 0
    for i, j in combinations_with_replacement(range(len(terms)), 2):
        (ka, ra), (kg, rg) = (_inner(*pair) for pair in zip(terms[i], terms[j], strict=True))
        ka, kg = ka.astype(dtype), kg.astype(dtype)
        la, lg = (
            x[..., :, None] * y[..., None, :] for x, y in zip(lengths[i], lengths[j], strict=True)
        )
        adding = 2 * rows + blocks + len(terms) ** 2
        bound = (ra * la + adding * jnp.abs(ka)) * jnp.abs(kg) + rg * lg * jnp.abs(ka)
        times = 1 if i == j else 2
        total += times * _sum_of_rows(ka * kg)
        slack += times * _sum_of_rows(bound)
        roundings = max(roundings, ra * rg)
    reach_a, reach_g, reach = (
        sum(jnp.sum(x, axis=-1) for x in items)
        for items in (
            [length.a for length in lengths],
            [length.g for length in lengths],
            [length.a * length.g for length in lengths],
        )
    )
    second = 2 * roundings * unit**2 * jnp.square(reach)
    entries = max(x.shape[-1] for term in terms for x in term)
    underflow = 4 * tiny * entries * (jnp.square(reach_a) + jnp.square(reach_g) + rows**2)
    slack = 1.05 * unit * slack + second + underflow
    return Squares(jnp.sum(total, axis=-1), jnp.sum(slack, axis=-1))


def _sum_of_rows(x: jax.Array) -> jax.Array:
    """Return the sum over the last two axes. The barrier keeps XLA from merging the two sums."""
    return jnp.sum(jax.lax.optimization_barrier(jnp.sum(x, axis=-1)), axis=-1)


def _row_lengths(rows: jax.Array) -> jax.Array:
    """Return a tight upper bound on ‖row‖ for every row: (n, blocks, rows)."""
    squares, roundings = _squares(rows)
    limits = jnp.finfo(squares.dtype)
    underflow = rows.shape[-1] * float(limits.tiny)
    return jnp.sqrt(squares * (1 + roundings * float(limits.eps)) + underflow)


def gradients(part: Factors, inputs: int) -> jax.Array:
    """Return every example's Σ_t a_t ⊗ g_t: (n, blocks, inputs, outputs)."""
    a, g = part
    dtype = wide_dtype(g)
    if _is_one_hot(a):
        return jax.vmap(lambda a, g: _scatter(a, g.astype(dtype), inputs))(a, g)
    if inputs > g.shape[-1]:  # XLA on CPUs is fastest with the longer side last
        swapped = product("nbtp,nbtq->nbqp", a, g)
        return swapped.swapaxes(-1, -2)
    return product("nbtp,nbtq->nbpq", a, g)


def weighted_sum(
    part: Factors, weights: jax.Array, inputs: int, scales: tuple[jax.Array, ...] = ()
) -> jax.Array:
    """Return Σᵢ wᵢ Σ_t a_it ⊗ g_it: (blocks, inputs, outputs).

    Without weights, ordinary training computes the same product. With `scales`, a and g are first
    divided by their scales, and wᵢ is multiplied by both scales, so that products neither overflow
    nor underflow.
    """
    a, g = part
    dtype = wide_dtype(g)
    if scales:
        low, high = jnp.minimum(*scales), jnp.maximum(*scales)
        weights = weights * high * low
        weights = jnp.where(jnp.isfinite(weights), weights, jnp.zeros_like(weights))
        a, g = (
            x if _is_one_hot(x) else x.astype(dtype) / scale.astype(dtype)[:, None, None, None]
            for x, scale in zip(part, scales, strict=True)
        )
    column = weights.astype(dtype)[:, None, None, None]
    if _is_one_hot(a):
        rows = column * g.astype(dtype)
        a, g = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in (a, rows))
        return _scatter(a, g, inputs)
    if a.shape[-1] < g.shape[-1]:
        a = column * a.astype(dtype)
    else:
        g = column * g.astype(dtype)
    return product("nbtp,nbtq->bpq", a, g)


def product(subscripts: str, a: jax.Array, g: jax.Array) -> jax.Array:
    """Return an einsum of a and g in float32 or wider, at the highest precision."""
    dtype = wide_dtype(a, g)
    if a.dtype != g.dtype:
        a, g = a.astype(dtype), g.astype(dtype)
    return jnp.einsum(subscripts, a, g, precision=EXACT, preferred_element_type=dtype)


def _scatter(ids: jax.Array, rows: jax.Array, inputs: int) -> jax.Array:
    """Return zeros (blocks, inputs, outputs), with row t of `rows` added at index t of `ids`.

    ids is (blocks, t), and rows is (blocks, t, outputs). Rows with a negative index are dropped.
    """

    def one(ids: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((inputs, rows.shape[-1]), rows.dtype)
        places = jnp.where(ids >= 0, ids, inputs)  # an index beyond the end is dropped
        return zeros.at[places].add(rows, mode="drop")

    return jax.vmap(one)(ids, rows)
