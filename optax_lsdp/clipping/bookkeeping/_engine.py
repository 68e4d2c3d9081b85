"""The bookkeeping engine: a clipped sum by one backward pass, without per-example gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._isolation import ValueAndAux
from optax_lsdp._mesh import all_under_vmap, vary, varying_axes
from optax_lsdp._trees import compute_once, wide_dtype
from optax_lsdp.clipping._factors import ClipGroup, ClipStyle
from optax_lsdp.clipping.bookkeeping._book import (
    Book,
    keep_book,
    leaf_factors,
    leaf_gradients,
    leaf_sum,
)
from optax_lsdp.clipping.bookkeeping._grams import (
    factor_scales,
    outer_norms,
    outer_squares,
    product,
    squared_norms,
)
from optax_lsdp.clipping.bookkeeping._norms import (
    Clipping,
    are_certain,
    clip_carefully,
    clip_quickly,
    flat,
    group_squares,
    row_squares,
)

Sums = dict[int, jax.Array]
Scales = dict[int, tuple[jax.Array, jax.Array]]  # of a and g, to divide them by


def clip_by_bookkeeping(
    loss_fn: ValueAndAux,
    params: optax.Params,
    batch: Any,
    mask: jax.Array | None,
    *,
    groups: list[ClipGroup],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    1. One backward pass leaves operands and cotangents at every use of every parameter.
    2. Norms come from these, with a bound on their rounding that is added to them.
    3. Where the bound is too large for some example, where squares left the range of floats, or
       where an example is not finite, the gradients that Gram matrices avoid are formed after
       all, one example at a time: slow, rare and exact. Only those examples are clipped and
       summed by what is found then, or one of them would change what the others add.
    4. The sums are products of operands and weighted cotangents, as in ordinary training.
    """
    outputs, book, scheme = keep_book(loss_fn, params, batch)
    book = compute_once(book)
    kinds = [plan.kind for plan in scheme.plans]
    grams = [index for index, kind in enumerate(kinds) if kind == "Gram"]
    outer = [index for index, kind in enumerate(kinds) if kind == "outer product"]
    formed = [index for index, plan in enumerate(scheme.plans) if plan.is_formed]
    rows = compute_once({index: leaf_gradients(book, scheme, index) for index in formed})
    squares = {index: row_squares(row) for index, row in rows.items()}
    squares |= {index: outer_squares(leaf_factors(book, scheme, index)) for index in outer}
    squares |= {index: squared_norms(leaf_factors(book, scheme, index)) for index in grams}

    counted = jnp.ones(outputs[0].shape, bool) if mask is None else mask
    dtype = wide_dtype(*scheme.leaves, *jax.tree.leaves(book))
    totals = group_squares(squares, groups, jnp.zeros(counted.shape, dtype))
    finite = jnp.stack([jnp.isfinite(values) for values, _ in totals.values()]).all(axis=0)
    broken = ~finite & jnp.isnan(outputs[0])  # however it is computed
    certain = are_certain(totals, groups, style)
    settled = certain | broken | ~counted
    # Gram leaves are summed without selection, and 0 · NaN is NaN.
    safe = all_under_vmap((settled & finite if grams else settled).all())

    def quickly(book: Book, rows: Sums) -> tuple[Clipping, Scales, Sums]:
        del rows
        clipping = clip_quickly(totals, groups, style, counted & finite)
        weights = {index: clipping.factors[groups[index].path] for index in grams}
        ones = vary(jnp.ones(counted.shape, dtype), varying_axes((book, counted)))
        scales = {index: (ones, ones) for index in outer}
        return clipping, scales, {i: leaf_sum(book, scheme, i, w) for i, w in weights.items()}

    def carefully(book: Book, rows: Sums) -> tuple[Clipping, Scales, Sums]:
        lengths = {index: outer_norms(leaf_factors(book, scheme, index)) for index in outer}
        rounding = max((length.rounding for length in lengths.values()), default=0.0)

        def clip(entry: Any, counted: jax.Array) -> tuple[Clipping, Sums]:
            book, rows, lengths, totals, certain = entry
            formed = compute_once({index: leaf_gradients(book, scheme, index) for index in grams})
            columns = {index: length[:, None] for index, length in lengths.items()}
            columns |= {index: flat(row) for index, row in (rows | formed).items()}
            columns = {index: column.astype(dtype) for index, column in columns.items()}
            careful = clip_carefully(columns, rounding, groups, style, counted)
            quick = clip_quickly(totals, groups, style, counted)
            clipping = jax.tree.map(lambda q, c: jnp.where(certain, q, c), quick, careful)
            rest = {path: jnp.where(certain, 0, x) for path, x in clipping.factors.items()}
            return clipping, {i: _weighted(x, rest[groups[i].path]) for i, x in formed.items()}

        values = {index: length.values for index, length in lengths.items()}
        entry = (book, rows, values, totals, certain)
        clipping, sums = _one_by_one(clip, entry, counted) if grams else clip(entry, counted)
        for index in grams:  # the others are summed as ever, to the bit
            weights = jnp.where(certain, clipping.factors[groups[index].path], 0)
            sums[index] += leaf_sum(_finite(book, weights > 0), scheme, index, weights)
        factors = {index: leaf_factors(book, scheme, index) for index in outer}
        scales = {index: factor_scales(parts) for index, parts in factors.items()}
        scales = jax.tree.map(lambda x: jnp.where(certain, 1, x).astype(dtype), scales)
        return clipping, scales, sums

    clipping, scales, sums = jax.lax.cond(safe, quickly, carefully, book, rows)
    for index, group in enumerate(groups):
        weights = clipping.factors[group.path]
        if index in rows:
            sums[index] = _weighted(rows[index], weights)
        elif index in outer:
            finite_book = _finite(book, weights > 0)
            sums[index] = leaf_sum(finite_book, scheme, index, weights, scales[index])
        elif index not in grams:
            sums[index] = jnp.zeros_like(scheme.leaves[index], wide_dtype(scheme.leaves[index]))
    total = [sums[index] for index in range(len(groups))]
    return outputs, clipping.norms, jax.tree.unflatten(jax.tree.structure(params), total)


def _one_by_one(
    clip: Callable[[Any, jax.Array], tuple[Clipping, Sums]], entry: Any, counted: jax.Array
) -> tuple[Clipping, Sums]:
    """Return `clip(entry, counted)`, made of runs over one example on each device.

    The examples of a run are far apart, so that a batch that is sharded stays where it is.
    """
    at_once = math.gcd(len(counted), jax.device_count())
    if len(counted) == 0:
        return clip(entry, counted)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(at_once, len(x) // at_once, *x.shape[1:]).swapaxes(0, 1)

    def accumulate(sums: Sums, examples: Any) -> tuple[Sums, Clipping]:
        clipping, more = clip(*examples)
        return jax.tree.map(jnp.add, sums, more), clipping

    runs = jax.tree.map(split, (entry, counted))
    shapes = jax.eval_shape(lambda: clip(*jax.tree.map(lambda x: x[0], runs))[1])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, clipping = jax.lax.scan(accumulate, vary(zeros, varying_axes((entry, counted))), runs)
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(len(counted)), clipping), sums


def _finite(book: Book, keep: jax.Array) -> Book:
    """Return zeros for what is not finite: 0 · NaN is NaN.

    Operands of the examples that are kept are finite, whoever is kept: runs that differ in their
    parameters alone, under vmap, share one copy of the data.
    """

    def finite(x: jax.Array) -> jax.Array:
        return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))

    operands = jax.tree.map(finite, book.operands)
    cotangents = jax.tree.map(lambda x: _selected(x, keep), book.cotangents)
    return book._replace(operands=operands, cotangents=cotangents)


def _selected(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Return zeros for the examples that are not kept."""
    return jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))


def _weighted(rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Return Σᵢ cᵢ gᵢ for gradients gᵢ: (n, …)."""
    vectors = flat(_selected(rows, factors > 0))
    return product("n,nd->d", factors.astype(vectors.dtype), vectors).reshape(rows.shape[1:])
