"""Turn recorded operands and cotangents into the terms of a leaf's gradient, and back.

The backward pass records the operand and the cotangent of each use. The rules turn them into the
factors of the gradient with respect to the weight in the use. This module also maps the gradient of
a weight back to the leaf, through scans, views and concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf, Term
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._rounded import Rounded
from optax_lsdp.clipping.bookkeeping._rules import Matrix
from optax_lsdp.clipping.bookkeeping._uses import Piece, Use
from optax_lsdp.clipping.bookkeeping.strategies._bounds import Factors

_CACHE_FLOATS = 2**20  # 4 MiB, which fit into a CPU's cache


def part_factors(leaf: ParameterLeaf, rounded: Rounded) -> list[list[Factors]]:
    """Return the factors of a leaf, part by part; transposed terms have a and g swapped."""
    parts = []
    for part in leaf.parts or ():
        pairs = [(term, term_factors(term, leaf.index, rounded)) for term in part]
        parts.append([Factors(p.g, p.a) if term.is_transposed else p for term, p in pairs])
    return parts


def term_factors(term: Term, index: int, rounded: Rounded) -> Factors:
    """Return the factors of one term of the leaf `index`, for every example."""
    return piece_factors(term.use, term.piece, *rounded.of(term, index))


def piece_factors(use: Use, piece: Piece, a: jax.Array, g: jax.Array) -> Factors:
    """Return the factors of one piece of a use, for every example.

    The iterations of a scan that slices the weight become blocks. The iterations of other scans
    become rows.
    """
    if use.rule.expands:
        factors = partial(use.rule.factors, use.equation, use.place)
        for _ in range(len(use.loops) + 1):  # one more for the examples
            factors = jax.vmap(factors)
        a, g = factors(a, g)
    if piece.start is not None:
        cut = partial(_cut, use.matrix, piece)
        for _ in range(len(use.loops) + 1):
            cut = jax.vmap(cut)
        a, g = cut(a, g)
    sliced = [1 + i for i, loop in enumerate(use.loops) if loop in piece.weight.sliced]
    shared = [1 + i for i, loop in enumerate(use.loops) if loop not in piece.weight.sliced]
    block, split = 1 + len(use.loops), 2 + len(sliced)

    def merge(x: jax.Array) -> jax.Array:
        x = x.transpose([0, *sliced, block, *shared, block + 1, *range(block + 2, x.ndim)])
        blocks, height = math.prod(x.shape[1:split]), math.prod(x.shape[split : block + 2])
        return x.reshape(x.shape[0], blocks, height, *x.shape[block + 2 :])

    return Factors(merge(a), merge(g))


def _cut(whole: Matrix, piece: Piece, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the entries of a and g that belong to one of several concatenated weights."""
    blocks, inputs, outputs = whole.axes
    start, size = piece.start or 0, piece.matrix.split[piece.axis]

    def cut(x: jax.Array, axis: int, merged: Sequence[int]) -> jax.Array:
        if piece.axis not in merged:
            return x
        split = x.reshape(*x.shape[:axis], *(whole.split[i] for i in merged), *x.shape[axis + 1 :])
        cut_axis = axis + list(merged).index(piece.axis)
        part = lax.slice_in_dim(split, start, start + size, axis=cut_axis)
        return part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return cut(cut(a, 0, blocks), 2, inputs), cut(cut(g, 0, blocks), 2, outputs)


def weighted_leaves(
    leaf: ParameterLeaf, rounded: Rounded, factors: jax.Array
) -> dict[int, jax.Array]:
    """Return Σᵢ cᵢ Gᵢ of a leaf, or of the leaves that it joins, from its factors.

    There is one product per term, as in ordinary training.
    """
    sums: dict[int, jax.Array] = {}
    for whole in leaf.terms:
        pair, inputs = term_factors(whole, leaf.index, rounded), whole.piece.matrix.shape[1]
        weighted = to_weight(whole, weighted_sum(pair, factors, inputs, rounded.platform))
        for index, term in leaf.pieces or [(leaf.index, whole)]:
            start, size = term.piece.start or 0, term.piece.matrix.split[term.piece.axis]
            part = weighted
            if leaf.pieces:
                axis = len(whole.piece.weight.sliced) + term.piece.axis
                part = lax.slice_in_dim(weighted, start, start + size, axis=axis)
            gradient = to_leaf(term, index, rounded, part)
            sums[index] = sums[index] + gradient if index in sums else gradient
    return sums


def weighted_sum(term: Factors, factors: jax.Array, inputs: int, platform: Platform) -> jax.Array:
    """Return Σᵢ cᵢ Σ_t a_it ⊗ g_it: (blocks, inputs, outputs).

    The smaller operand is multiplied by cᵢ and rounded again. Where cᵢ is 0, zeros replace both
    operands, because 0 · NaN is NaN. On a CPU, this copies a few examples at a time, not all.
    """
    if term.is_one_hot:
        rows = weigh(term.g, factors)
        ids, rows = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in (term.a, rows))
        return scatter(ids, rows, inputs)
    few = _few_examples(term)
    if platform is not CPU or few >= len(factors) or is_multi_device_mesh():
        return _weighted_product(term, factors, platform)

    flat = [x.reshape(len(x), -1) for x in term]  # axes of length 1 would cost a copy

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(i * few, len(factors) - few)  # the last chunk may overlap
        a, g, some = (lax.dynamic_slice_in_dim(x, start, few) for x in (*flat, factors))
        chunk = Factors(a.reshape(few, *term.a.shape[1:]), g.reshape(few, *term.g.shape[1:]))
        is_new = start + jnp.arange(few, dtype=jnp.int32) >= i * few
        return total + _weighted_product(chunk, jnp.where(is_new, some, 0), platform)

    shape = jax.eval_shape(partial(_weighted_product, platform=platform), term, factors)
    zeros = vary(jnp.zeros(shape.shape, shape.dtype), varying_axes((term, factors)))
    return lax.fori_loop(0, -(-len(factors) // few), step, zeros)


def _few_examples(term: Factors) -> int:
    """Return for how many examples a CPU selects operands at a time.

    A large result would have to be read and written for every chunk, so it counts as all examples.
    """
    n, blocks, rows, inputs = term.a.shape
    outputs = term.g.shape[-1]
    is_large = blocks * inputs * outputs > _CACHE_FLOATS // 4
    return n if is_large else examples_in_cache(blocks * rows * (inputs + outputs))


def examples_in_cache(floats: int) -> int:
    """Return how many examples of so many floats fit into a CPU's cache; at least one."""
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
    """Return cᵢ·xᵢ for x: (n, …), in float32 or wider, with zeros where cᵢ is 0."""
    wide = widen(x)
    column = _column(factors, x).astype(wide.dtype)
    return jnp.where(column > 0, column * wide, jnp.zeros_like(wide))


def select(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Return x with zeros where cᵢ is 0."""
    return jnp.where(_column(factors, x) > 0, x, jnp.zeros_like(x))


def _column(factors: jax.Array, x: jax.Array) -> jax.Array:
    return factors.reshape(-1, *[1] * (x.ndim - 1))


def scatter(ids: jax.Array, rows: jax.Array, inputs: int) -> jax.Array:
    """Return zeros (blocks, inputs, outputs), with row t of `rows` added at index t of `ids`.

    ids is (blocks, t), and rows is (blocks, t, outputs). Rows with a negative index are dropped.
    """

    def one(ids: jax.Array, rows: jax.Array) -> jax.Array:
        zeros = jnp.zeros((inputs, rows.shape[-1]), rows.dtype)
        places = jnp.where(ids >= 0, ids, inputs)  # an index beyond the end is dropped
        return zeros.at[places].add(rows, mode="drop")

    return jax.vmap(one)(ids, rows)


def to_weight(term: Term, gradient: jax.Array) -> jax.Array:
    """Convert (blocks, inputs, outputs) to the shape of the weight, with an axis per scan first."""
    weight, matrix = term.piece.weight, term.piece.matrix
    stack = [loop.length for loop in weight.sliced]
    sizes = [matrix.split[axis] for axis in matrix.order]
    back = [len(stack) + matrix.order.index(axis) for axis in range(len(matrix.split))]
    return gradient.reshape(*stack, *sizes).transpose([*range(len(stack)), *back])


def to_leaf(term: Term, index: int, rounded: Rounded, gradient: jax.Array) -> jax.Array:
    """Convert the gradient of a weight to the gradient of the leaf `index`, times its scale."""
    leaves, scale = rounded.leaves, rounded.scales[index]
    weight, leaf = term.piece.weight, leaves[index]
    gradient = gradient.astype(wide_dtype(leaf))
    if weight.entries is not None:
        back = jax.linear_transpose(weight.show, widen(leaf))
        return back(gradient.reshape(weight.entries.shape))[0]

    def build(leaf: jax.Array) -> jax.Array:
        return weight.build([*leaves[:index], leaf, *leaves[index + 1 :]], {})

    value, pull = jax.vjp(build, leaf)  # in its own units, which may be those of float16
    unscaled = (gradient / jnp.asarray(scale, gradient.dtype)).reshape(value.shape)
    pulled = widen(pull(unscaled.astype(value.dtype))[0])
    return pulled * jnp.asarray(scale, pulled.dtype)
