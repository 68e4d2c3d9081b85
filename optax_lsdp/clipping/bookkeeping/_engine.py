"""The bookkeeping engine: one backward pass → norms → clip factors → clipped sum.

There are two ways to compute norms. The quick way adds up squares and bounds their rounding errors.
The careful way forms the gradients and scales them, so that no square overflows or underflows. The
careful way runs only if the quick way is not accurate enough for some example of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._isolation import ValueAndAux
from optax_lsdp._mesh import all_under_vmap, vary, varying_axes
from optax_lsdp._trees import compute_once, norm_rounding, row_norms, sums_of_squares, wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import STABILITY, ClipGroup, ClipStyle, clip_factors
from optax_lsdp.clipping.bookkeeping._backward import Recorded, run_backward
from optax_lsdp.clipping.bookkeeping._gradients import leaf_factors, leaf_gradients, leaf_sum
from optax_lsdp.clipping.bookkeeping._gram import (
    Squares,
    factor_scales,
    outer_norms,
    outer_squares,
    product,
    squared_norms,
)

_INFLATION = 0.005  # the careful way runs if a bound on rounding is above this fraction of the norm

ByLeaf = dict[int, jax.Array]  # by the index of the leaf
Scales = dict[int, tuple[jax.Array, jax.Array]]  # by leaf, the scales of a and g


class Clipping(NamedTuple):
    """Each example's norms and clip factors, by group."""

    norms: dict[str, jax.Array]
    factors: dict[str, jax.Array]


def clip_by_bookkeeping(
    loss_fn: ValueAndAux,
    params: optax.Params,
    batch: PyTree,
    mask: jax.Array | None,
    *,
    groups: list[ClipGroup],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, PyTree], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    1. One backward pass records the operands and cotangents of all uses of parameters.
    2. The quick way computes norms from these records, and bounds on the norms' rounding errors.
       The clip factors use each norm plus its bound.
    3. The careful way replaces step 2 for an example if the bound is too large, if squares
       overflow or underflow, or if the example is not finite. It forms the gradients that Gram
       matrices avoid, for one example at a time, so it is slow, rare and exact. It affects only
       the examples that need it; otherwise one example would change the contributions of others.
    4. The sums are products of operands and weighted cotangents, as in ordinary training.
    """
    outputs, recorded, analysis = run_backward(loss_fn, params, batch)
    recorded = compute_once(recorded)
    kinds = [strategy.kind for strategy in analysis.strategies]
    grams = [index for index, kind in enumerate(kinds) if kind == "Gram matrices"]
    outer = [index for index, kind in enumerate(kinds) if kind == "outer product"]
    formed = [i for i, strategy in enumerate(analysis.strategies) if strategy.is_materialised]
    rows = compute_once({index: leaf_gradients(recorded, analysis, index) for index in formed})
    squares = {index: row_squares(row) for index, row in rows.items()}
    squares |= {index: outer_squares(leaf_factors(recorded, analysis, index)) for index in outer}
    squares |= {index: squared_norms(leaf_factors(recorded, analysis, index)) for index in grams}

    counted = jnp.ones(outputs[0].shape, bool) if mask is None else mask
    dtype = wide_dtype(*analysis.leaves, *jax.tree.leaves(recorded))
    totals = group_squares(squares, groups, jnp.zeros(counted.shape, dtype))
    finite = jnp.stack([jnp.isfinite(values) for values, _ in totals.values()]).all(axis=0)
    broken = ~finite & jnp.isnan(outputs[0])  # the careful way would find no finite norm either
    certain = are_certain(totals, groups, style)
    settled = certain | broken | ~counted
    # The quick sum of a Gram leaf multiplies all examples by their factors, and 0 · NaN is NaN.
    safe = all_under_vmap((settled & finite if grams else settled).all())

    def quickly(recorded: Recorded, rows: ByLeaf) -> tuple[Clipping, Scales, ByLeaf]:
        del rows
        clipping = clip_quickly(totals, groups, style, counted & finite)
        weights = {index: clipping.factors[groups[index].path] for index in grams}
        ones = vary(jnp.ones(counted.shape, dtype), varying_axes((recorded, counted)))
        scales = {index: (ones, ones) for index in outer}
        sums = {i: leaf_sum(recorded, analysis, i, weight) for i, weight in weights.items()}
        return clipping, scales, sums

    def carefully(recorded: Recorded, rows: ByLeaf) -> tuple[Clipping, Scales, ByLeaf]:
        lengths = {index: outer_norms(leaf_factors(recorded, analysis, index)) for index in outer}
        rounding = max((length.rounding for length in lengths.values()), default=0.0)

        def clip(inputs: PyTree, counted: jax.Array) -> tuple[Clipping, ByLeaf]:
            recorded, rows, lengths, totals, certain = inputs
            formed = compute_once({i: leaf_gradients(recorded, analysis, i) for i in grams})
            columns = {index: length[:, None] for index, length in lengths.items()}
            columns |= {index: _flat(row) for index, row in (rows | formed).items()}
            columns = {index: column.astype(dtype) for index, column in columns.items()}
            careful = clip_carefully(columns, rounding, groups, style, counted)
            quick = clip_quickly(totals, groups, style, counted)
            clipping = jax.tree.map(lambda q, c: jnp.where(certain, q, c), quick, careful)
            rest = {path: jnp.where(certain, 0, x) for path, x in clipping.factors.items()}
            return clipping, {i: _weighted(x, rest[groups[i].path]) for i, x in formed.items()}

        values = {index: length.values for index, length in lengths.items()}
        inputs = (recorded, rows, values, totals, certain)
        clipping, sums = _one_by_one(clip, inputs, counted) if grams else clip(inputs, counted)
        for index in grams:  # examples with certain norms get the same bits as in the quick way
            weights = jnp.where(certain, clipping.factors[groups[index].path], 0)
            sums[index] += leaf_sum(_finite(recorded, weights > 0), analysis, index, weights)
        factors = {index: leaf_factors(recorded, analysis, index) for index in outer}
        scales = {index: factor_scales(parts) for index, parts in factors.items()}
        scales = jax.tree.map(lambda x: jnp.where(certain, 1, x).astype(dtype), scales)
        return clipping, scales, sums

    clipping, scales, sums = jax.lax.cond(safe, quickly, carefully, recorded, rows)
    for index, group in enumerate(groups):
        weights = clipping.factors[group.path]
        if index in rows:
            sums[index] = _weighted(rows[index], weights)
        elif index in outer:
            selected = _finite(recorded, weights > 0)
            sums[index] = leaf_sum(selected, analysis, index, weights, scales[index])
        elif index not in grams:
            leaf = analysis.leaves[index]
            sums[index] = jnp.zeros_like(leaf, wide_dtype(leaf))
    total = [sums[index] for index in range(len(groups))]
    return outputs, clipping.norms, jax.tree.unflatten(jax.tree.structure(params), total)


def row_squares(rows: jax.Array) -> Squares:
    """Return each example's ‖gradient‖² from its gradient, (n, …)."""
    values, roundings = sums_of_squares(rows)
    limits = jnp.finfo(values.dtype)
    underflow = _flat(rows).shape[1] * float(limits.tiny)
    return Squares(values, roundings * float(limits.eps) / 2 * values + underflow)


def group_squares(
    squares: Mapping[int, Squares], groups: list[ClipGroup], zero: jax.Array
) -> dict[str, Squares]:
    """Return each example's ‖gradient‖² in each group: the sum over the leaves of the group."""
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
    """Return for each example whether the bounds on rounding are at most 0.5 % of its norms.

    Norms far below the clip norm, or far below γ of automatic clipping, may be less accurate,
    because they hardly affect the clip factor.
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
    """Return norms from squares, and clip factors from upper bounds on the norms.

    Examples that are not `alive`, (n,), get factor 0.
    """
    norms, factors = {}, {}
    for path, clip_norm in dict(groups).items():
        values = jnp.maximum(squares[path].values, 0)
        norms[path], upper = jnp.sqrt(values), jnp.sqrt(values + squares[path].slack)
        rounding = 2 * float(jnp.finfo(upper.dtype).eps)  # of the root, and of the clipped sum
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
    """Return norms and clip factors. Scaling keeps squares from overflow and underflow.

    For each leaf, `columns` has either the gradients, (n, k), or only their norms, (n, 1). The
    relative error of these norms is at most `rounding`. Examples that are not `counted`, (n,), get
    factor 0.
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


def _one_by_one(
    clip: Callable[[PyTree, jax.Array], tuple[Clipping, ByLeaf]], inputs: PyTree, counted: jax.Array
) -> tuple[Clipping, ByLeaf]:
    """Return `clip(inputs, counted)`, computed for one example per device at a time.

    The examples of one iteration are far apart in the batch. If the batch is sharded, each example
    therefore stays on its device.
    """
    at_once = math.gcd(len(counted), jax.device_count())
    if len(counted) == 0:
        return clip(inputs, counted)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(at_once, len(x) // at_once, *x.shape[1:]).swapaxes(0, 1)

    def accumulate(sums: ByLeaf, examples: PyTree) -> tuple[ByLeaf, Clipping]:
        clipping, more = clip(*examples)
        return jax.tree.map(jnp.add, sums, more), clipping

    slices = jax.tree.map(split, (inputs, counted))
    shapes = jax.eval_shape(lambda: clip(*jax.tree.map(lambda x: x[0], slices))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, clipping = jax.lax.scan(accumulate, vary(zeros, varying_axes((inputs, counted))), slices)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(len(counted)), clipping), sums


def _finite(recorded: Recorded, keep: jax.Array) -> Recorded:
    """Set operands that are not finite, and cotangents of examples that are not kept, to zero.

    Without the zeros, such an example would spoil the sum, because 0 · NaN is NaN. Examples that
    are kept have finite operands, so the operands need not depend on `keep`. Under a `vmap` over
    only the parameters, all runs therefore share one copy of the operands.
    """

    def finite(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))

    operands = jax.tree.map(finite, recorded.operands)
    cotangents = jax.tree.map(lambda x: _selected(x, keep), recorded.cotangents)
    return recorded._replace(operands=operands, cotangents=cotangents)


def _selected(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Return x with zeros for the examples that are not kept."""
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


def _weighted(rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Return Σᵢ cᵢ gᵢ for gradients gᵢ: (n, …)."""
    vectors = _flat(_selected(rows, factors > 0))
    return product("n,nd->d", factors.astype(vectors.dtype), vectors).reshape(rows.shape[1:])


def _flat(rows: jax.Array) -> jax.Array:
    """Return one vector per example."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _members(groups: list[ClipGroup]) -> dict[str, list[int]]:
    """Return the indices of the leaves of each group."""
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group.path, []).append(index)
    return members
