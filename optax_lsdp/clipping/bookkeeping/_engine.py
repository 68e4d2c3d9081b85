"""The bookkeeping engine: a clipped sum by one backward pass, without per-example gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._trees import sums_of_squares, wide_dtype
from optax_lsdp.clipping._factors import STABILITY, ClipStyle, Group, clip_and_sum, clip_factors
from optax_lsdp.clipping._microbatch import in_microbatches
from optax_lsdp.clipping.bookkeeping._book import (
    Book,
    Loss,
    Scheme,
    factors_of,
    keep_book,
    leaf_gradients,
    to_leaf,
)
from optax_lsdp.clipping.bookkeeping._grams import Factors, Squares, squared_norms, weighted_sum

_INFLATION = 0.005  # of a norm, by the bound on its rounding; beyond that gradients are formed


def clip_by_bookkeeping(
    loss_fn: Loss,
    params: optax.Params,
    batch: Any,
    mask: jax.Array | None,
    *,
    groups: list[Group],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum."""
    outputs, book, scheme = keep_book(loss_fn, params, batch)
    formed = {
        index: leaf_gradients(book, scheme, index)
        for index, plan in enumerate(scheme.plans)
        if plan.is_formed
    }
    squares = _group_squares(book, formed, scheme, groups)
    finite = jnp.stack([jnp.isfinite(square.values) for square in squares.values()]).all(axis=0)
    counted = jnp.ones_like(finite) if mask is None else mask
    # Not finite, and neither is the loss: the example is broken, no matter how it is computed.
    broken = ~finite & ~jnp.isfinite(outputs[0])
    alive = finite & counted
    trusted, factors = alive, {}
    for path, clip_norm in dict(groups).items():
        values, slack = squares[path]
        limit = _negligible(clip_norm, style).astype(values.dtype)
        trusted &= slack <= 2 * _INFLATION * jnp.maximum(values, limit)
        upper = jnp.sqrt(jnp.maximum(values, 0) + slack)
        rounding = 2 * float(jnp.finfo(values.dtype).eps)  # of the root and of what follows
        scaled = clip_factors(upper, clip_norm, style=style, rounding=rounding)
        factors[path] = jnp.where(alive, scaled, 0)
    norms = {path: jnp.sqrt(jnp.maximum(s.values, 0)) for path, s in squares.items()}

    def add_up(book: Book, formed: dict[int, jax.Array]) -> Any:
        return norms, [
            _leaf_sum(book, formed, scheme, index, factors[group.path])
            for index, group in enumerate(groups)
        ]

    def select_and_add_up(book: Book, formed: dict[int, jax.Array]) -> Any:
        def select(x: jax.Array) -> jax.Array:  # 0 · NaN is NaN
            return jnp.where(alive.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x))

        return add_up(*jax.tree.map(select, (book, formed)))

    def form_and_add_up(book: Book, formed: dict[int, jax.Array]) -> Any:
        del formed

        def run(book: Book, mask: jax.Array | None) -> tuple[Any, Any, Any]:
            rows = [leaf_gradients(book, scheme, index) for index in range(len(groups))]
            return (), *clip_and_sum(rows, groups, style=style, mask=mask)

        return in_microbatches(run, book, mask, 1)[1:]

    certain = (trusted | broken | ~counted).all()
    branch = jnp.where(certain, jnp.where(finite.all(), 0, 1), 2)
    branches = (add_up, select_and_add_up, form_and_add_up)
    norms, sums = jax.lax.switch(branch, branches, book, formed)
    return outputs, norms, jax.tree.unflatten(jax.tree.structure(params), sums)


def _negligible(clip_norm: Any, style: ClipStyle) -> jax.Array:
    """Return ‖g‖² below which the bound on its rounding decides nothing about the factor."""
    reference = 0.1 * jnp.asarray(clip_norm, jnp.float32) if style == "threshold" else None
    return jnp.square(reference if reference is not None else jnp.float32(0.05 * STABILITY))


def _group_squares(
    book: Book, formed: dict[int, jax.Array], scheme: Scheme, groups: list[Group]
) -> dict[str, Squares]:
    """Return each example's squared norm in each group, and what its rounding may have taken away."""
    dtype = wide_dtype(*scheme.leaves)
    n = jax.tree.leaves((book, formed))[0].shape[0]
    zero = jnp.zeros((n,), dtype)
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
    leaf = scheme.leaves[index]
    if index in formed:
        values, rounding = sums_of_squares(formed[index])
        limits = jnp.finfo(values.dtype)
        relative, vanished = rounding * float(limits.eps) / 2, leaf.size * float(limits.tiny)
        return [Squares(values, relative * values + vanished)]
    parts = []
    for part in scheme.plans[index].parts:
        factors = []
        for use in part:
            a, g = factors_of(scheme.sites[use.path], *_entry(book, use.path))
            factors.append(Factors(g, a) if use.swapped else Factors(a, g))
        parts.append(squared_norms(factors))
    return parts


def _entry(book: Book, path: Any) -> tuple[jax.Array, jax.Array]:
    return book.operands[path], book.cotangents[path]


def _leaf_sum(
    book: Book, formed: dict[int, jax.Array], scheme: Scheme, index: int, factors: jax.Array
) -> jax.Array:
    """Return Σᵢ cᵢ gᵢ of one leaf."""
    leaf = scheme.leaves[index]
    if index in formed:
        rows = formed[index].reshape(len(factors), leaf.size)
        total = jnp.einsum(
            "n,nd->d", factors.astype(rows.dtype), rows, precision=jax.lax.Precision.HIGHEST
        )
        return total.reshape(leaf.shape)
    sums = jnp.zeros(leaf.shape, wide_dtype(leaf))
    for part in scheme.plans[index].parts:
        for use in part:
            site = scheme.sites[use.path]
            pair = factors_of(site, *_entry(book, use.path))
            total = weighted_sum(pair, factors, site.matrix.shape[1])
            sums = sums + to_leaf(site, index, total, scheme.leaves)
    return sums
