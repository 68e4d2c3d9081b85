"""Outer products: if each block of a gradient has one row, ‖a ⊗ g‖ = ‖a‖‖g‖."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from optax_lsdp._trees import wide_dtype
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping.strategies._bounds import (
    Factors,
    NormBound,
    block_bound,
    is_one_hot,
    sum_of_squares,
)


def outer_bound(terms: list[Factors], platform: Platform) -> NormBound:
    """Return the bound of a single term with one row per block.

    A weighted row is rounded once more, so ‖Ĝ − G‖ ≤ u·‖G‖.
    """
    (term,) = terms
    (a, rounded_a), (g, rounded_g) = (_row_lengths(x, platform) for x in term)
    lengths = a.astype(g.dtype) * g
    upper = lengths * platform.growth(rounded_a + rounded_g + 1, g.dtype)
    unit = platform.unit(g.dtype) if term.is_one_hot else platform.weighting_error(*term)
    return block_bound(NormBound(lengths, upper, unit * upper), platform)


def _row_lengths(rows: jax.Array, platform: Platform) -> tuple[jax.Array, float]:
    """Return ‖row‖ for each example and block, (n, blocks), and how often it is rounded.

    The length is rounded up by what squares can lose to underflow.
    """
    if is_one_hot(rows):
        return (rows[..., 0] >= 0).astype(jnp.float32), 0
    shape = rows.shape[:2]
    squares, roundings = sum_of_squares(rows.reshape(math.prod(shape), rows.shape[-1]), platform)
    underflow = 2 * rows.shape[-1] * float(jnp.finfo(wide_dtype(rows)).tiny)
    return jnp.sqrt(squares + underflow).reshape(shape), roundings / 2 + 1
