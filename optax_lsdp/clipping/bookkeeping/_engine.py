"""The bookkeeping engine: a clipped sum by one backward pass, without per-example gradients."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._trees import norm_rounding, row_norms, sums_of_squares, wide_dtype
from optax_lsdp.clipping._factors import STABILITY, ClipStyle, Group, clip_factors
from optax_lsdp.clipping._microbatch import in_microbatches
from optax_lsdp.clipping.bookkeeping._book import (
    Book,
    Loss,
    Scheme,
    keep_book,
    leaf_factors,
    leaf_gradients,
    leaf_sum,
)
from optax_lsdp.clipping.bookkeeping._grams import Squares, product, squared_norms

_INFLATION = 0.005  # of a norm, by the bound on its rounding; beyond that gradients are formed


class Clipping(NamedTuple):
    """Each example's norms and factors, by group, and the sums of those leaves that have them."""

    norms: dict[str, jax.Array]
    factors: dict[str, jax.Array]
    sums: dict[int, jax.Array]


def clip_by_bookkeeping(
    loss_fn: Loss,
    params: optax.Params,
    batch: Any,
    mask: jax.Array | None,
    *,
    groups: list[Group],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    1. One backward pass leaves operands and cotangents at every use of every parameter.
    2. Norms come from these, with a bound on their rounding that is added to them.
    3. Where the bound is too large for some example, where squares left the range of floats, or
       where an example is not finite, the gradients that were to be avoided are formed, one
       example at a time: slow, rare and exact.
    4. The sums are products of operands and weighted cotangents, as in ordinary training.
    """
    outputs, book, scheme = keep_book(loss_fn, params, batch)
    formed = {
        index: leaf_gradients(book, scheme, index)
        for index, plan in enumerate(scheme.plans)
        if plan.is_formed
    }
    squares = _group_squares(book, formed, scheme, groups)
    counted = jnp.ones(len(outputs[0]), bool) if mask is None else mask
    finite = jnp.stack([jnp.isfinite(values) for values, _ in squares.values()]).all(axis=0)
    # If the loss is not finite either, the example is broken, however it is computed.
    broken = ~finite & ~jnp.isfinite(outputs[0])
    settled = _are_certain(squares, groups, style) | broken | ~counted
    grams = [index for index, plan in enumerate(scheme.plans) if plan.kind == "Gram"]
    # The sums of these leaves do without selection: 0 · NaN is NaN.
    safe = (settled & (finite if grams else True)).all()

    def from_squares(book: Book, formed: dict[int, jax.Array]) -> Clipping:
        del formed
        norms = {path: jnp.sqrt(jnp.maximum(values, 0)) for path, (values, _) in squares.items()}
        factors = _factors_from_squares(squares, groups, style, counted & finite)
        weights = {index: factors[groups[index].path] for index in grams}
        return Clipping(norms, factors, {i: leaf_sum(book, scheme, i, w) for i, w in weights.items()})

    def from_gradients(book: Book, formed: dict[int, jax.Array]) -> Clipping:
        def one_example(entry: Any, mask: jax.Array | None) -> tuple[Any, Any, Any]:
            book, formed = entry
            rows = {index: leaf_gradients(book, scheme, index) for index in grams}
            norms, factors = _clip_rows(book, formed | rows, scheme, groups, style, mask)
            sums = {i: _weighted(row, factors[groups[i].path]) for i, row in rows.items()}
            return norms, factors, sums

        return Clipping(*in_microbatches(one_example, (book, formed), counted, 1))

    norms, factors, sums = jax.lax.cond(safe, from_squares, from_gradients, book, formed)
    for index, group in enumerate(groups):
        weights = factors[group.path]
        if index in formed:
            sums[index] = _weighted(formed[index], weights)
        elif index not in sums:
            sums[index] = leaf_sum(_selected(book, weights > 0), scheme, index, weights)
    total = [sums[index] for index in range(len(groups))]
    return outputs, norms, jax.tree.unflatten(jax.tree.structure(params), total)


def _selected(tree: Any, keep: jax.Array) -> Any:
    """Return zeros for the examples that are not kept: 0 · NaN is NaN."""
    return jax.tree.map(
        lambda x: jnp.where(keep.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)), tree
    )


def _weighted(rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Return Σᵢ cᵢ gᵢ for gᵢ: (n, …)."""
    flat = _flat(_selected(rows, factors > 0))
    return product("n,nd->d", factors.astype(flat.dtype), flat).reshape(rows.shape[1:])


def _group_squares(
    book: Book, formed: dict[int, jax.Array], scheme: Scheme, groups: list[Group]
) -> dict[str, Squares]:
    """Return each example's squared norm in each group, and what its rounding may have taken away."""
    dtype = wide_dtype(*scheme.leaves)
    zero = jnp.zeros(len(jax.tree.leaves((book, formed))[0]), dtype)
    totals = {group.path: Squares(zero, zero) for group in groups}
    for index, group in enumerate(groups):
        values, slack = totals[group.path]
        for more in _leaf_squares(book, formed, scheme, index):
            values, slack = values + more.values.astype(dtype), slack + more.slack.astype(dtype)
        totals[group.path] = Squares(values, slack)
    unit = float(jnp.finfo(dtype).eps) / 2
    return {path: Squares(v, s + len(groups) * unit * v) for path, (v, s) in totals.items()}


def _leaf_squares(
    book: Book, formed: dict[int, jax.Array], scheme: Scheme, index: int
) -> list[Squares]:
    """Return the squared norms of a leaf, part by part."""
    if index in formed:
        values, roundings = sums_of_squares(formed[index])
        limits = jnp.finfo(values.dtype)
        vanished = scheme.leaves[index].size * float(limits.tiny)
        return [Squares(values, roundings * float(limits.eps) / 2 * values + vanished)]
    return [squared_norms(part) for part in leaf_factors(book, scheme, index)]


def _are_certain(squares: dict[str, Squares], groups: list[Group], style: ClipStyle) -> jax.Array:
    """Tell of which examples the bound on the rounding inflates no norm by more than it may.

    Norms far below the clip norm, or below γ of automatic clipping, decide nothing.
    """
    certain = []
    for path, clip_norm in dict(groups).items():
        values, slack = squares[path]
        reference = 0.1 * clip_norm if style == "threshold" else 0.05 * STABILITY
        floor = jnp.square(jnp.asarray(reference, values.dtype))
        inflated = slack <= 2 * _INFLATION * jnp.maximum(values, floor)
        certain.append(jnp.isfinite(values) & inflated)
    return jnp.stack(certain).all(axis=0)


def _factors_from_squares(
    squares: dict[str, Squares], groups: list[Group], style: ClipStyle, alive: jax.Array
) -> dict[str, jax.Array]:
    """Return each group's factors, from upper bounds on the norms."""
    factors = {}
    for path, clip_norm in dict(groups).items():
        values, slack = squares[path]
        upper = jnp.sqrt(jnp.maximum(values, 0) + slack)
        rounding = 2 * float(jnp.finfo(upper.dtype).eps)  # of the root and of what follows
        scaled = clip_factors(upper, clip_norm, style=style, rounding=rounding)
        factors[path] = jnp.where(alive, scaled, jnp.zeros_like(scaled))
    return factors


def _clip_rows(
    book: Book,
    rows: dict[int, jax.Array],
    scheme: Scheme,
    groups: list[Group],
    style: ClipStyle,
    mask: jax.Array | None,
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Return norms and factors of each group, whatever the size of its entries.

    All leaves but those that are outer products come as rows: (n, …).
    """
    norms, factors = {}, {}
    for path, clip_norm in dict(groups).items():
        members = [index for index, group in enumerate(groups) if group.path == path]
        flat = [_flat(rows[index]) for index in members if index in rows]
        vectors = [jnp.concatenate(flat, axis=1)] if flat else []
        rounding = 0.0
        for index in members:
            for part in [] if index in rows else leaf_factors(book, scheme, index):
                a, g = part[0]
                vectors.append((row_norms([a]) * row_norms([g]))[:, None])
                rounding = max(rounding, norm_rounding([a]) + norm_rounding([g]))
        norms[path] = row_norms(vectors)
        rounding += norm_rounding(vectors)
        factors[path] = clip_factors(norms[path], clip_norm, style=style, rounding=rounding)
    alive = jnp.stack([jnp.isfinite(norm) for norm in norms.values()]).all(axis=0)
    alive = alive if mask is None else alive & mask
    return norms, {path: jnp.where(alive, factor, 0) for path, factor in factors.items()}


def _flat(rows: jax.Array) -> jax.Array:
    """Return one vector per example."""
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))
