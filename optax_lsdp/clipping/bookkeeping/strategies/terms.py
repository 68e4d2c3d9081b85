"""Round the recorded arrays, and compute the terms and weighted sums of gradients from them.

Norms and sums both use the rounded arrays. The gradient that the rounded arrays define depends only
on its own example, so clipping it is as private as clipping the exact gradient. This module also
maps the gradient of a weight back to the leaf, through scans, views and concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import compute_once, wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._backward import Recorded
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf, Term
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._uses import Path, Use
from optax_lsdp.clipping.bookkeeping.strategies.bounds import Factors, is_one_hot

_CACHE_FLOATS = 2**20  # 4 MiB, which fit into a CPU's cache


class Rounded(NamedTuple):
    """The rounded operands and cotangents of all uses, with a leading axis of examples.

    Attributes:
        pairs: the factors a and g of each use. Each scan around the use adds an axis after that of
            the examples. If a rule has factors that are larger than the operand, such as patches,
            `pairs` holds the operand and the cotangent instead. Each g or cotangent is multiplied
            by the scale of the use.
        gradients: for each leaf with uses that have no rule, the gradient from those uses,
            multiplied by the scale of the leaf.
        scales: for each leaf, the power of two nearest to 1/C. Multiplied by it, clip norms are
            near 1, so that squares neither overflow nor underflow.
        use_scales: the scale of each use, which is the scale of one of its leaves.
        leaves: the parameters themselves.
        platform: the kind of device that all arrays are rounded for.
    """

    pairs: dict[Path, tuple[jax.Array, jax.Array]]
    gradients: dict[int, jax.Array]
    scales: list[ArrayLike]
    use_scales: dict[Path, ArrayLike]
    leaves: Sequence[jax.Array]
    platform: Platform

    def of(self, term: Term, index: int) -> tuple[jax.Array, jax.Array]:
        """Return the pair of a term, multiplied by the scale of leaf `index`."""
        (a, g), scale = self.pairs[term.path], self.use_scales[term.path]
        same = scale is self.scales[index]
        return a, g if same else _scaled(g, self.scales[index] / scale)


def round_recorded(
    recorded: Recorded,
    leaves: Sequence[jax.Array],
    uses: Mapping[Path, Use],
    groups: Sequence[ClipGroup],
    platform: Platform,
) -> Rounded:
    """Round all recorded arrays, and multiply cotangents and gradients by their scales."""
    by_group = {path: _scale(clip_norm) for path, clip_norm in groups}
    scales = [by_group[path] for path, _ in groups]
    # If the leaves of a use have different scales, `Rounded.of` converts.
    use_scales = {path: scales[min(use.pieces[0].weight.leaves)] for path, use in uses.items()}
    pairs, known = {}, dict[object, jax.Array]()
    for path, use in uses.items():
        a, g = recorded.operands[use.operand], _scaled(recorded.cotangents[path], use_scales[path])
        if not use.rule.expands:
            a, g = _factors(use)(a, g)
        if wide_dtype(a, g) == jnp.float64 and not use.rule.is_one_hot:
            a, g = a.astype(jnp.float64), g.astype(jnp.float64)  # bounds assume one precision
        key = use.operand, use.rule.operand_key(use.equation, use.place), a.dtype
        if key not in known:  # uses of one operand share its rounded copy
            known[key] = _round_once(a, platform)
        pairs[path] = known[key], _round_once(g, platform)
    gradients = {
        i: compute_once(_scaled(widen(x), scales[i])) for i, x in recorded.gradients.items()
    }
    return Rounded(pairs, gradients, scales, use_scales, leaves, platform)


def _round_once(x: jax.Array, platform: Platform) -> jax.Array:
    """Return a rounded array that XLA computes once, so that norms and sums use equal numbers.

    Axes of length 1 are removed before the rounding and restored after it. On a TPU, they would
    keep XLA from fusing the rounding with the product that computes x.
    """
    dense = x.reshape(x.shape[0], *(size for size in x.shape[1:] if size != 1))
    return compute_once(platform.rounded(dense)).reshape(x.shape)


def _scale(clip_norm: ArrayLike) -> ArrayLike:
    """Return the power of two nearest to 1/C; C may be traced."""
    if isinstance(clip_norm, int | float):
        return 2.0 ** -round(math.log2(clip_norm))
    inverse = 1 / jnp.asarray(clip_norm)
    bits = 11 if inverse.dtype == jnp.float64 else 8
    return lax.reduce_precision(inverse, exponent_bits=bits, mantissa_bits=0)


def _scaled(x: jax.Array, scale: ArrayLike) -> jax.Array:
    """Return x times a power of two, in float32 if x is float16, whose range is too small."""
    if isinstance(scale, float) and scale == 1:
        return x
    x = widen(x) if x.dtype == jnp.float16 else x
    return x * jnp.asarray(scale, x.dtype)


def _factors(use: Use) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return a function that applies a use's rule to all iterations of scans and all examples."""
    factors = partial(use.rule.factors, use.equation, use.place)
    for _ in range(len(use.loops) + 1):
        factors = jax.vmap(factors)
    return factors


def term_factors(term: Term, a: jax.Array, g: jax.Array) -> Factors:
    """Return the factors of one term for every example, from its pair in `Rounded`.

    The iterations of a scan that slices the weight become blocks. The iterations of other scans
    become rows.
    """
    use, piece = term.use, term.piece
    if use.rule.expands:
        a, g = _factors(use)(a, g)
    if piece.start is not None:
        _, blocks, inputs, outputs = use.matrix
        a = _cut(_cut(a, term, -3, blocks), term, -1, inputs)
        g = _cut(_cut(g, term, -3, blocks), term, -1, outputs)
    sliced = [1 + i for i, loop in enumerate(use.loops) if loop in piece.weight.sliced]
    shared = [1 + i for i, loop in enumerate(use.loops) if loop not in piece.weight.sliced]
    block, split = 1 + len(use.loops), 2 + len(sliced)
    merged = []
    for x in (a, g):
        x = x.transpose([0, *sliced, block, *shared, *range(block + 1, x.ndim)])
        height = math.prod(x.shape[split : block + 2])
        merged.append(x.reshape(len(x), term.size.blocks, height, *x.shape[block + 2 :]))
    return Factors(*merged)


def part_factors(leaf: ParameterLeaf, rounded: Rounded) -> list[list[Factors]]:
    """Return the factors of each term in each part of a leaf. Swap a and g of transposed terms."""
    parts = []
    for part in leaf.parts or ():
        pairs = [(term, term_factors(term, *rounded.of(term, leaf.index))) for term in part]
        parts.append([Factors(p.g, p.a) if term.is_transposed else p for term, p in pairs])
    return parts


def _cut(x: jax.Array, term: Term, axis: int, merged: tuple[int, ...]) -> jax.Array:
    """Cut the piece of a term out of x along `axis`.

    The axes `merged` of the concatenated weight were merged to `axis` of x.
    """
    piece, whole = term.piece, term.use.matrix.split
    if piece.start is None or piece.axis not in merged:
        return x
    before, after = x.shape[: x.ndim + axis], x.shape[x.ndim + axis + 1 :]
    split = x.reshape(*before, *(whole[i] for i in merged), *after)
    place, stop = len(before) + merged.index(piece.axis), piece.start + piece.length
    return lax.slice_in_dim(split, piece.start, stop, axis=place).reshape(*before, -1, *after)


def weighted_leaves(
    leaf: ParameterLeaf, rounded: Rounded, factors: jax.Array
) -> dict[int, jax.Array]:
    """Return Σᵢ cᵢ Gᵢ of a leaf, or of the leaves that it joins, from its factors.

    There is one product per term, as in ordinary training.
    """
    sums: dict[int, jax.Array] = {}
    for whole in leaf.terms:
        pair, inputs = term_factors(whole, *rounded.of(whole, leaf.index)), whole.size.inputs
        weighted = to_weight(whole, weighted_sum(pair, factors, inputs, rounded.platform))
        for index, term in leaf.pieces or [(leaf.index, whole)]:
            part = weighted
            if leaf.pieces:
                start, axis = term.piece.start or 0, term.piece.axis + len(term.piece.weight.sliced)
                part = lax.slice_in_dim(weighted, start, start + term.piece.length, axis=axis)
            gradient = to_leaf(term, index, rounded, part)
            sums[index] = sums[index] + gradient if index in sums else gradient
    return sums


def weighted_sum(term: Factors, factors: jax.Array, inputs: int, platform: Platform) -> jax.Array:
    """Return Σᵢ cᵢ Σ_t a_it ⊗ g_it, of shape (blocks, inputs, outputs).

    The operand with shorter rows is multiplied by cᵢ and rounded again. Where cᵢ is 0, zeros
    replace both operands, because 0 · NaN is NaN. On a CPU, this function weights a few examples at
    a time, so that their copies fit into the cache. If the result is large, it weights all examples
    at once: otherwise it would read and write the result for every few examples.
    """
    if is_one_hot(term.a):
        pair = term.a, weigh(term.g, factors)
        ids, added = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in pair)
        return scatter(ids, added, inputs)
    (n, blocks, rows, _), outputs = term.a.shape, term.g.shape[-1]
    few = examples_in_cache(blocks * rows * (inputs + outputs))
    is_large = blocks * inputs * outputs > _CACHE_FLOATS // 4
    if platform is not CPU or is_large or few >= n or is_multi_device_mesh():
        return _weighted_product(term, factors, platform)

    flat = [x.reshape(n, -1) for x in term]  # axes of length 1 would cost a copy

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(i * few, n - few)  # the last chunk may overlap
        a, g, some = (lax.dynamic_slice_in_dim(x, start, few) for x in (*flat, factors))
        chunk = Factors(a.reshape(few, *term.a.shape[1:]), g.reshape(few, *term.g.shape[1:]))
        is_new = start + jnp.arange(few, dtype=jnp.int32) >= i * few
        return total + _weighted_product(chunk, jnp.where(is_new, some, 0), platform)

    zeros = jnp.zeros((blocks, inputs, outputs), wide_dtype(*term))
    return lax.fori_loop(0, -(-n // few), step, vary(zeros, varying_axes((term, factors))))


def examples_in_cache(floats: int) -> int:
    """Return how many examples, of `floats` floats each, fit into a CPU's cache; at least one."""
    return max(1, _CACHE_FLOATS // max(floats, 1))


def _weighted_product(term: Factors, factors: jax.Array, platform: Platform) -> jax.Array:
    """Return Σᵢ cᵢ Σ_t a_it ⊗ g_it as one product."""
    a, g = term
    if a.shape[-1] < g.shape[-1]:
        a, g = platform.rounded(weigh(a, factors), *term), select(g, factors)
    else:
        a, g = select(a, factors), platform.rounded(weigh(g, factors), *term)
    if platform is CPU and a.shape[-1] > g.shape[-1]:  # fastest with the longer side last
        return platform.product("nbtp,nbtq->bqp", a, g).swapaxes(-1, -2)
    return platform.product("nbtp,nbtq->bpq", a, g)


def weigh(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Return cᵢ·xᵢ for x of shape (n, …), in float32 or wider, with zeros where cᵢ is 0."""
    column = factors.reshape(-1, *[1] * (x.ndim - 1)).astype(wide_dtype(x))
    return jnp.where(column > 0, column * widen(x), jnp.zeros_like(x, wide_dtype(x)))


def select(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Return x, with zeros for the examples i whose factor cᵢ is 0."""
    return jnp.where(factors.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, jnp.zeros_like(x))


def scatter(ids: jax.Array, rows: jax.Array, inputs: int) -> jax.Array:
    """Add row t of `rows` to row `ids[t]` of a matrix of zeros, for each block.

    `ids` has shape (blocks, t), `rows` has shape (blocks, t, outputs), and the result has shape
    (blocks, inputs, outputs). Rows with a negative index are dropped.
    """

    def one(ids: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((inputs, rows.shape[-1]), rows.dtype)
        places = jnp.where(ids >= 0, ids, inputs)  # an index beyond the end is dropped
        return zeros.at[places].add(rows, mode="drop")

    return jax.vmap(one)(ids, rows)


def to_weight(term: Term, gradient: jax.Array) -> jax.Array:
    """Convert (blocks, inputs, outputs) to the shape of the weight, with leading axes of scans."""
    matrix = term.piece.matrix
    stack = [loop.length for loop in term.piece.weight.sliced]
    order = (*matrix.blocks, *matrix.inputs, *matrix.outputs)
    sizes = [matrix.split[axis] for axis in order]
    back = [len(stack) + order.index(axis) for axis in range(len(order))]
    return gradient.reshape(*stack, *sizes).transpose([*range(len(stack)), *back])


def to_leaf(term: Term, index: int, rounded: Rounded, gradient: jax.Array) -> jax.Array:
    """Map a weight's gradient to leaf `index`. Argument and result have the scale of the leaf."""
    leaves, scale = rounded.leaves, rounded.scales[index]
    weight, leaf = term.piece.weight, leaves[index]
    gradient = gradient.astype(wide_dtype(leaf))
    if weight.entries is not None:
        back = jax.linear_transpose(weight.show, widen(leaf))
        return back(gradient.reshape(weight.entries.shape))[0]

    def build(leaf: jax.Array) -> jax.Array:
        return weight.value([*leaves[:index], leaf, *leaves[index + 1 :]], {})

    value, pull = jax.vjp(build, leaf)  # without the scale, because the dtype may be float16
    unscaled = (gradient / jnp.asarray(scale, gradient.dtype)).reshape(value.shape)
    pulled = widen(pull(unscaled.astype(value.dtype))[0])
    return pulled * jnp.asarray(scale, pulled.dtype)
