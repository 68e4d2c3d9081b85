"""Compute the factors, the gradients or the clipped sum of one leaf from a backward pass.

The backward pass records the operand and the cotangent of each use. The rules turn them into the
factors of the gradient with respect to the weight in the use. This module also maps this gradient
back to the leaf, through scans, views and concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import jax
import jax.numpy as jnp

from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._backward import Recorded
from optax_lsdp.clipping.bookkeeping._gram import Factors, gradients, weighted_sum
from optax_lsdp.clipping.bookkeeping._rules import Matrix
from optax_lsdp.clipping.bookkeeping._strategy import LossAnalysis, Term, piece_size
from optax_lsdp.clipping.bookkeeping._uses import Piece, Use

_CACHE_FLOATS = 2**20  # entries of factors to make at a time: 4 MiB, which fit into a CPU's cache


def leaf_factors(recorded: Recorded, analysis: LossAnalysis, index: int) -> list[list[Factors]]:
    """Return the factors of a leaf, part by part; transposed terms have a and g swapped."""
    parts = []
    for part in analysis.strategies[index].parts:
        pairs = [_term_factors(recorded, analysis, term) for term in part]
        terms = zip(pairs, part, strict=True)
        parts.append([Factors(p.g, p.a) if term.is_transposed else p for p, term in terms])
    return parts


def leaf_gradients(recorded: Recorded, analysis: LossAnalysis, index: int) -> jax.Array:
    """Return every example's gradient of a leaf: (n, *shape), float32 or wider."""
    parts = [widen(recorded.gradients[index])] if index in recorded.gradients else []
    for term in chain.from_iterable(analysis.strategies[index].parts):
        arrays = recorded.operands[term.path], recorded.cotangents[term.path]
        form = partial(_term_gradients, analysis, term, index)
        parts.append(_in_chunks(form, analysis.uses[term.path], arrays))
    return sum(parts[1:], parts[0])


def leaf_sum(
    recorded: Recorded,
    analysis: LossAnalysis,
    index: int,
    clip_factors: jax.Array,
    scales: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Return Σᵢ cᵢ gᵢ of a leaf from its factors. `weighted_sum` explains `scales`."""
    leaf = analysis.leaves[index]
    total = jnp.zeros(leaf.shape, wide_dtype(leaf))
    for term in chain.from_iterable(analysis.strategies[index].parts):
        inputs = analysis.uses[term.path].pieces[term.piece].matrix.shape[1]
        factors = _term_factors(recorded, analysis, term)
        weighted = weighted_sum(factors, clip_factors, inputs, scales)
        total = total + _to_leaf(analysis, term, index, weighted)
    return total


def _term_factors(recorded: Recorded, analysis: LossAnalysis, term: Term) -> Factors:
    """Return the factors of one term, for every example."""
    use = analysis.uses[term.path]
    arrays = recorded.operands[term.path], recorded.cotangents[term.path]
    return _piece_factors(use, use.pieces[term.piece], *arrays)


def _piece_factors(use: Use, piece: Piece, operand: jax.Array, cotangent: jax.Array) -> Factors:
    """Return the factors of one piece of a use, for every example.

    The iterations of a scan that slices the weight become blocks. The iterations of other scans
    become rows.
    """

    def factors(operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        pair = use.rule.factors(use.equation, use.place, operand, cotangent)
        return pair if piece.start is None else _cut(use.matrix, piece, *pair)

    for _ in range(len(use.loops) + 1):  # one more for the examples
        factors = jax.vmap(factors)
    depths = {depth for depth, _ in piece.weight.sliced}
    sliced = [1 + i for i, loop in enumerate(use.loops) if loop.depth in depths]
    shared = [1 + i for i, loop in enumerate(use.loops) if loop.depth not in depths]
    block, cut = 1 + len(use.loops), 2 + len(sliced)

    def merge(x: jax.Array) -> jax.Array:
        x = x.transpose([0, *sliced, block, *shared, block + 1, *range(block + 2, x.ndim)])
        blocks, height = math.prod(x.shape[1:cut]), math.prod(x.shape[cut : block + 2])
        return x.reshape(x.shape[0], blocks, height, *x.shape[block + 2 :])

    a, g = factors(operand, cotangent)
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
        part = jax.lax.slice_in_dim(split, start, start + size, axis=cut_axis)
        return part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return cut(cut(a, 0, blocks), 2, inputs), cut(cut(g, 0, blocks), 2, outputs)


def _to_leaf(analysis: LossAnalysis, term: Term, index: int, gradient: jax.Array) -> jax.Array:
    """Convert the gradient of a weight, (blocks, inputs, outputs), to the gradient of a leaf."""
    use, leaves = analysis.uses[term.path], analysis.leaves
    weight, matrix, *_ = use.pieces[term.piece]
    stack = [size for _, (size, _) in weight.sliced]
    sizes = [matrix.split[axis] for axis in matrix.order]
    back = [len(stack) + matrix.order.index(axis) for axis in range(len(matrix.split))]
    moved = gradient.reshape(*stack, *sizes).transpose([*range(len(stack)), *back])
    moved = moved.astype(wide_dtype(leaves[index]))
    if weight.view is not None:
        shape = (*stack, *(size for size, _ in weight.view.axes))
        (result,) = jax.linear_transpose(weight.show, widen(leaves[index]))(moved.reshape(shape))
        return result

    def build(leaf: jax.Array) -> jax.Array:
        return weight.value([*leaves[:index], leaf, *leaves[index + 1 :]])

    value, pull = jax.vjp(build, leaves[index])
    return widen(pull(moved.reshape(value.shape).astype(value.dtype))[0])


def _term_gradients(
    analysis: LossAnalysis, term: Term, index: int, operand: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """Return one term of every example's gradient of leaf `index`."""
    use = analysis.uses[term.path]
    piece = use.pieces[term.piece]
    formed = gradients(_piece_factors(use, piece, operand, cotangent), piece.matrix.shape[1])
    return jax.vmap(partial(_to_leaf, analysis, term, index))(formed)


def _in_chunks(
    form: Callable[..., jax.Array], use: Use, arrays: tuple[jax.Array, ...]
) -> jax.Array:
    """Return `form(*arrays)`. On a CPU, form large patches for a few examples at a time.

    On a mesh of several devices, form all patches at once: slicing the batch would gather it.
    """
    blocks, rows, inputs, outputs = piece_size(use, use.pieces[0])
    n, floats = len(arrays[0]), blocks * rows * (inputs + outputs)
    most = max(1, _CACHE_FLOATS // max(floats, 1))
    if not use.rule.expands or n <= most or is_multi_device_mesh():
        return form(*arrays)

    def form_few(*arrays: jax.Array) -> jax.Array:
        def cut(start: jax.Array) -> list[jax.Array]:
            return [jax.lax.dynamic_slice_in_dim(x, start, most) for x in arrays]

        def step(i: jax.Array, formed: jax.Array) -> jax.Array:
            start = jnp.minimum(i * most, n - most)  # the last chunk may overlap the previous one
            return jax.lax.dynamic_update_slice_in_dim(formed, form(*cut(start)), start, 0)

        some = jax.eval_shape(form, *(x[:most] for x in arrays))
        formed = vary(jnp.zeros((n, *some.shape[1:]), some.dtype), varying_axes(arrays))
        return jax.lax.fori_loop(0, -(-n // most), step, formed)

    return jax.lax.platform_dependent(*arrays, cpu=form_few, default=form)
