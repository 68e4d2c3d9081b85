"""Norms: what is known of each leaf goes in, each example's norms and clip factors come out.

Twice: quickly, from squares whose rounding is bounded, which may turn out too coarse; and
carefully, from the gradients themselves, whatever the size of their entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._trees import norm_rounding, row_norms, sums_of_squares, wide_dtype
from optax_lsdp.clipping._factors import STABILITY, ClipGroup, ClipStyle, clip_factors
from optax_lsdp.clipping.bookkeeping._grams import Squares

_INFLATION = 0.005  # of a norm by the bound on its rounding; beyond that, gradients are formed


class Clipping(NamedTuple):
    """Each example's norms and clip factors, by group."""

    norms: dict[str, jax.Array]
    factors: dict[str, jax.Array]


def flat(rows: jax.Array) -> jax.Array:
    """Return one vector per example."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _members(groups: list[ClipGroup]) -> dict[str, list[int]]:
    """Return the numbers of the leaves of each group."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group.path, []).append(index)
    return members


def row_squares(rows: jax.Array) -> Squares:
    """Return ‖gradient‖² of each example from its gradient, (n, …)."""
    values, roundings = sums_of_squares(rows)
    limits = jnp.finfo(values.dtype)
    vanished = flat(rows).shape[1] * float(limits.tiny)
    return Squares(values, roundings * float(limits.eps) / 2 * values + vanished)


def group_squares(
    squares: Mapping[int, Squares], groups: list[ClipGroup], zero: jax.Array
) -> dict[str, Squares]:
    """Return each example's ‖gradient‖² in each group, from those of the leaves."""
    totals = {}
    for path, members in _members(groups).items():
        parts = [squares[index] for index in members if index in squares]
        values = sum((part.values.astype(zero.dtype) for part in parts), zero)
        slack = sum((part.slack.astype(zero.dtype) for part in parts), zero)
        adding = len(parts) * float(jnp.finfo(zero.dtype).eps) / 2
        totals[path] = Squares(values, slack + adding * jnp.abs(values))
    return totals


def are_certain(
    squares: dict[str, Squares], groups: list[ClipGroup], style: ClipStyle
) -> jax.Array:
    """Tell of which examples the bound on the rounding inflates no norm by more than it may.

    Norms far below the clip norm, or far below γ of automatic clipping, decide nothing.
    """
    certain = []
    for path, clip_norm in dict(groups).items():
        values, slack = squares[path]
        reference = 0.1 * clip_norm if style == "threshold" else 0.05 * STABILITY
        floor = jnp.square(jnp.asarray(reference, values.dtype))
        small = slack <= 2 * _INFLATION * jnp.maximum(values, floor)
        certain.append(jnp.isfinite(values) & small)
    return jnp.stack(certain).all(axis=0)


def clip_quickly(
    squares: dict[str, Squares], groups: list[ClipGroup], style: ClipStyle, alive: jax.Array
) -> Clipping:
    """Return norms as computed, and the factors of their upper bounds."""
    norms, factors = {}, {}
    for path, clip_norm in dict(groups).items():
        values = jnp.maximum(squares[path].values, 0)
        norms[path], upper = jnp.sqrt(values), jnp.sqrt(values + squares[path].slack)
        rounding = 2 * float(jnp.finfo(upper.dtype).eps)  # of the root and of what follows
        scaled = clip_factors(upper, clip_norm, style=style, rounding=rounding)
        factors[path] = jnp.where(alive, scaled, jnp.zeros_like(scaled))
    return Clipping(norms, factors)


def clip_carefully(
    columns: Mapping[int, jax.Array],
    rounding: float,
    groups: list[ClipGroup],
    style: ClipStyle,
    counted: jax.Array,
) -> Clipping:
    """Return norms and factors, scaled so that no square is lost.

    Args:
        columns: by the number of the leaf, (n, k): gradients, or norms of gradients.
        rounding: how far below the truth the latter may be, relatively.
        groups: the group of each leaf.
        style: as in `clipped_grad`.
        counted: (n,), False where masked.
    """
    norms, factors = {}, {}
    dtype = wide_dtype(*columns.values())
    for path, members in _members(groups).items():
        parts = [columns[index] for index in members if index in columns]
        vectors = jnp.concatenate([jnp.zeros((len(counted), 1), dtype), *parts], axis=1)
        norms[path], limit = row_norms([vectors]), dict(groups)[path]
        rounded = norm_rounding([vectors]) + rounding
        factors[path] = clip_factors(norms[path], limit, style=style, rounding=rounded)
    alive = jnp.stack([jnp.isfinite(norm) for norm in norms.values()]).all(axis=0) & counted
    chosen = {path: jnp.where(alive, f, jnp.zeros_like(f)) for path, f in factors.items()}
    return Clipping(norms, chosen)
