"""Norms and sums of gradients Σ_t a_t ⊗ g_t, from their factors alone, with bounds on every rounding.

Arrays are batched: a: (n, blocks, rows, inputs), or integers (n, blocks, rows) if its rows are unit
vectors; g: (n, blocks, rows, outputs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._trees import sums_of_squares, wide_dtype

EXACT = jax.lax.Precision.HIGHEST  # accelerators round the operands of products otherwise
_LONGEST = 1024  # entries that are summed by one product


class Factors(NamedTuple):
    """The factors of one site's gradients, a and g."""

    a: jax.Array
    g: jax.Array


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


def _lengths(rows: jax.Array) -> tuple[jax.Array, int]:
    """Return ‖row‖² of every row, (n, blocks, rows), and how often its sums are rounded."""
    if _is_units(rows):
        return (rows >= 0).astype(jnp.float32), 0
    squares, rounding = sums_of_squares(rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1]))
    return squares.reshape(rows.shape[:-1]), rounding


def squared_norms(parts: Sequence[Factors]) -> Squares:
    """Return ‖Σ_parts Σ_t a_t ⊗ g_t‖² = Σ_ts ⟨a_t, a_s⟩⟨g_t, g_s⟩ of each example.

    To add up k numbers in any order is to be off by (k − 1)u relative to the sum of their
    magnitudes, u = ε/2. So ⟨a_t, a_s⟩ is off by p·u·‖a_t‖‖a_s‖ at most, and the whole by
    (p + q + rows)·u·(Σ_t ‖a_t‖‖g_t‖)². What is smaller than the smallest normal number may
    vanish from each product, too.
    """
    dtype = wide_dtype(parts[0].g)
    unit, tiny = float(jnp.finfo(dtype).eps) / 2, float(jnp.finfo(dtype).tiny)
    total: jax.Array | float = 0.0
    reach, reach_a, reach_g, roundings, rows, entries = 0.0, 0.0, 0.0, 0, 0, 0
    for i, (a, g) in enumerate(parts):
        (la, ra), (lg, rg) = _lengths(a), _lengths(g)
        entries = max(entries, ra + rg)
        length_a, length_g = jnp.sqrt(la.astype(dtype) + ra * tiny), jnp.sqrt(lg + rg * tiny)
        reach += jnp.sum(length_a * length_g, axis=-1)
        reach_a += jnp.sum(length_a, axis=-1)
        reach_g += jnp.sum(length_g, axis=-1)
        rows += g.shape[2]
        if len(parts) == 1 and g.shape[2] == 1:
            total, roundings = (la.astype(dtype) * lg)[..., 0], ra + rg
            continue
        for j in range(i, len(parts)):
            (ka, ra), (kg, rg) = _inner(a, parts[j].a), _inner(g, parts[j].g)
            roundings = max(roundings, ra + rg)
            sums = jax.lax.optimization_barrier(jnp.sum(ka.astype(dtype) * kg, axis=-1))
            total += jnp.sum(sums, axis=-1) * (1 if i == j else 2)
    blocks = parts[0].g.shape[1]
    relative = 1.01 * (roundings + 2 * rows + blocks - 2) * unit
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
