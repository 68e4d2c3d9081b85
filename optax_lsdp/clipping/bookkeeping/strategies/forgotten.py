"""Formed and forgotten: form each gradient, add up its squares, and do not store it.

XLA fuses the product with the sum of squares on accelerators, so that nothing of the size
examples × parameters reaches memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from optax_lsdp._trees import wide_dtype
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping.strategies._bounds import (
    Factors,
    NormBound,
    added_in_rows,
    block_bound,
    root,
    sum_of_rows,
    weighting_error,
)


def forgotten_bound(terms: Sequence[Factors], platform: Platform) -> NormBound:
    """Return the bound of the gradient Σ_t a_t ⊗ g_t over the rows t of all terms.

    An entry of the formed gradient F adds up T products, so ‖F − G‖ ≤ T·u·R with
    R = Σ_t ‖a_t‖‖g_t‖, and ‖G‖ ≤ ‖F‖ + T·u·R.
    """
    parts = [platform.product("nbtp,nbtq->nbpq", term.a, term.g) for term in terms]
    formed = sum(parts[1:], parts[0])
    (square,) = sum_of_rows(platform, formed * formed)
    reaches = [_reach(term, platform) for term in terms]
    reach = sum(reaches[1:], reaches[0])
    weighting = sum(weighting_error(t, platform) * r for t, r in zip(terms, reaches, strict=True))
    rows = sum(term.g.shape[2] for term in terms)
    bound = bound_by_squares(square, reach, formed.shape[2:], rows, platform)
    return block_bound(bound._replace(rounding=bound.rounding + weighting), platform)


def bound_by_squares(
    square: jax.Array, reach: jax.Array, shape: Sequence[int], rows: int, platform: Platform
) -> NormBound:
    """Return the bound of a formed gradient F, without the error of weighting its rows.

    Args:
        square: the computed ‖F‖².
        reach: R, an upper bound on Σ_t ‖a_t‖‖g_t‖.
        shape: the shape of F; sums over its last two axes are those of `sum_of_rows`.
        rows: T, how many products each entry of F adds up.
        platform: the kind of device.
    """
    dtype = square.dtype
    roundings = added_in_rows(platform, *shape[-2:]) + math.prod(shape[:-2])
    underflow = 2 * math.prod(shape) * float(jnp.finfo(dtype).tiny)
    exact = root(square + underflow, reach) * platform.growth(roundings / 2 + 1, dtype)
    adding = rows * platform.unit(dtype) * reach
    upper = jnp.minimum(exact + adding, reach)
    return NormBound(root(square, upper), upper, adding)


def _reach(term: Factors, platform: Platform) -> jax.Array:
    """Return Σ_t ‖a_t‖‖g_t‖, rounded up: (n, blocks)."""
    a, g = (_row_lengths(x, platform) for x in term)
    return jnp.sum(a * g, axis=-1) * platform.growth(term.g.shape[2] + 1, a.dtype)


def _row_lengths(rows: jax.Array, platform: Platform) -> jax.Array:
    """Return ‖row‖ over the last axis, rounded up."""
    dtype, entries = wide_dtype(rows), rows.shape[-1]
    square = jnp.sum(jnp.square(rows.astype(dtype)), axis=-1)
    underflow = 2 * entries * float(jnp.finfo(dtype).tiny)
    return jnp.sqrt(square + underflow) * platform.growth(entries / 2 + 1, dtype)
