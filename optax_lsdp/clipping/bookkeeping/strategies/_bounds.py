"""Bound the gradient norms of examples, and the rounding errors of their weighted sums.

A strategy computes the norm of G = Σ_t a_t ⊗ g_t for each example. The factors a and g are rounded,
so that their products are exact (see `_platforms`). Only additions round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._trees import widen
from optax_lsdp.clipping.bookkeeping._platforms import Platform


class Factors(NamedTuple):
    """The factors of one term Σ_t a_t ⊗ g_t of a gradient, for n examples.

    Attributes:
        a: (n, blocks, rows, inputs). If the rows are one-hot, the index of each one instead,
            (n, blocks, rows), as integers; −1 stands for a row of zeros.
        g: (n, blocks, rows, outputs).
    """

    a: jax.Array
    g: jax.Array

    @property
    def is_one_hot(self) -> bool:
        """Return whether the rows of a are one-hot."""
        return is_one_hot(self.a)


class NormBound(NamedTuple):
    """What a strategy knows about each example's gradient of one leaf. All arrays are (n,).

    Attributes:
        norm: the computed ‖G‖.
        upper: an upper bound on ‖G‖.
        rounding: an upper bound on ‖Ĝ − G‖, where Ĝ is the sum over t of the rounded a_t ⊗ g_t.
            The weighted sum adds c·Ĝ for a clip factor c, and so its norm is at most
            c·(upper + rounding).
    """

    norm: jax.Array
    upper: jax.Array
    rounding: jax.Array


def is_one_hot(rows: jax.Array) -> bool:
    """Return whether an array holds the indices of one-hot rows."""
    return jnp.issubdtype(rows.dtype, jnp.integer)


def joint_bound(bounds: Sequence[NormBound], platform: Platform) -> NormBound:
    """Return the bound of several gradients with disjoint entries: √Σ² of each quantity."""
    if len(bounds) == 1:
        return bounds[0]
    squares = [[x * x for x in items] for items in zip(*bounds, strict=True)]
    return _roots(NormBound(*(sum(x[1:], x[0]) for x in squares)), len(bounds), platform)


def block_bound(bound: NormBound, platform: Platform) -> NormBound:
    """Return the bound over disjoint blocks: √Σ² of each quantity, (n, blocks) → (n,)."""
    blocks = bound.upper.shape[1]
    if blocks == 1:
        return NormBound(*(x[:, 0] for x in bound))
    return _roots(NormBound(*(jnp.sum(x * x, axis=1) for x in bound)), blocks, platform)


def _roots(squares: NormBound, terms: int, platform: Platform) -> NormBound:
    """Return the square roots of sums of squares, the bounds rounded up.

    Squares that underflow count as zero. With automatic clipping to a huge clip norm, the bound
    would be too small without them.
    """
    dtype = squares.upper.dtype
    grow = platform.growth(terms / 2 + 1, dtype)
    underflow = 2 * terms * float(jnp.finfo(dtype).tiny)
    upper, rounding = (grow * jnp.sqrt(x + underflow) for x in squares[1:])
    return NormBound(jnp.sqrt(squares.norm), upper, rounding)


def sum_of_squares(x: jax.Array, platform: Platform) -> tuple[jax.Array, int]:
    """Return Σx² over all axes but the first, and how often a term is rounded: (n, …) → (n,)."""
    return _sum_in_parts(jnp.square(widen(x)), platform.longest_sum, 1)


def _sum_in_parts(x: jax.Array, longest: int, roundings: int) -> tuple[jax.Array, int]:
    """Add up x over all axes but the first, in parts of at most `longest` terms.

    The barrier keeps XLA from merging the parts into one sum, whose order would be unknown.
    """
    size = math.prod(x.shape[1:])
    if size <= longest:
        return jnp.sum(x, axis=tuple(range(1, x.ndim))), roundings + size - 1
    last = x.shape[-1]
    if last > longest or x.ndim == 2:
        part = next((b for b in range(longest, longest // 4, -1) if last % b == 0), longest)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -last % part)])
        x = x.reshape(*x.shape[:-1], x.shape[-1] // part, part)
    sums = jax.lax.optimization_barrier(jnp.sum(x, axis=-1))
    return _sum_in_parts(sums, longest, roundings + x.shape[-1] - 1)


def root(square: jax.Array, fallback: jax.Array) -> jax.Array:
    """Return √square for a computed square, or `fallback` where the square overflows."""
    return jnp.where(jnp.isfinite(square), jnp.sqrt(jnp.maximum(square, 0)), fallback)


def spectral_square(
    square: jax.Array, trace: jax.Array, size: int, roundings: int, platform: Platform
) -> jax.Array:
    """Return an upper bound on the spectral norm of a Gram matrix K, which is at most ‖K‖.

    Args:
        square: ‖K‖² as computed.
        trace: an upper bound on tr K.
        size: how many rows K has.
        roundings: how often an entry of K is rounded. K is then off by at most roundings·u·tr K.
        platform: the kind of device.
    """
    dtype = square.dtype
    underflow = 2 * size**2 * float(jnp.finfo(dtype).tiny)
    computed = root(square + underflow, trace) * platform.growth(size + 2, dtype)
    return computed + roundings * platform.unit(dtype) * trace
