"""The book: a loss and a batch go in, what one backward pass leaves at each site comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._isolation import TracedLoss, ValueAndAux, trace_loss, warn_of_batch_norms
from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._grams import Factors, gradients, weighted_sum
from optax_lsdp.clipping.bookkeeping._plan import (
    LeafPlan,
    Use,
    leave_long_loops,
    piece_size,
    plan_leaves,
)
from optax_lsdp.clipping.bookkeeping._replay import Value, replay
from optax_lsdp.clipping.bookkeeping._rules import Matrix
from optax_lsdp.clipping.bookkeeping._sites import Path, Piece, Site, find_uses

_CACHE_FLOATS = 2**20  # factors that are made at a time: 4 MiB, which stay in a CPU's cache


class Book(NamedTuple):
    """What each example left behind, with a leading axis of examples.

    Attributes:
        operands: what each site's factors are made of.
        cotangents: the cotangent of each site's output.
        gradients: of the leaves that are left to automatic differentiation, by their number.
    """

    operands: dict[Path, jax.Array]
    cotangents: dict[Path, jax.Array]
    gradients: dict[int, jax.Array]


class Scheme(NamedTuple):
    """How to read a book: the sites, the plan of each leaf, and the leaves themselves."""

    sites: dict[Path, Site]
    plans: list[LeafPlan]
    leaves: list[jax.Array]


def make_scheme(
    loss_fn: ValueAndAux, params: optax.Params, example: Any
) -> tuple[TracedLoss, Scheme]:
    """Trace the loss of one example and plan what to do with each leaf."""
    leaves = jax.tree.leaves(params)
    program = trace_loss(loss_fn, params, example)
    warn_of_batch_norms(program.closed)
    shapes = [leaf.shape for leaf in leaves]
    uses = leave_long_loops(find_uses(program.closed, len(leaves)), shapes)
    plans = plan_leaves(uses, shapes)
    return program, Scheme(uses.sites, plans, leaves)


def keep_book(
    loss_fn: ValueAndAux, params: optax.Params, batch: Any
) -> tuple[tuple[jax.Array, Any], Book, Scheme]:
    """Return each example's (value, aux), the book of one backward pass, and how to read it."""
    found: list[Scheme] = []
    axes = varying_axes(batch)

    def backward(example: Any) -> tuple[Any, Book]:
        program, scheme = make_scheme(loss_fn, params, example)
        found.append(scheme)
        taps = {path: _tap(site) for path, site in scheme.sites.items()}
        left = {
            i: leaf for i, leaf in enumerate(scheme.leaves) if scheme.plans[i].is_differentiated
        }

        def tapped(taps: Any, left: Any) -> tuple[jax.Array, Any]:
            values = [Value(left.get(i, leaf), leaf) for i, leaf in enumerate(scheme.leaves)]
            values += map(Value, jax.tree.leaves(example))
            results, operands = replay(program.closed, values, scheme.sites, taps)
            outputs = [result.active for result in results]
            value, aux = jax.tree.unflatten(program.outputs, outputs)
            return value, (aux, operands)

        run = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        (value, (aux, operands)), (cotangents, grads) = run(vary(taps, axes), left)
        return (value, aux), Book(operands, cotangents, grads)

    outputs, book = jax.vmap(backward)(batch)
    return outputs, book, found[-1]


def _tap(site: Site) -> jax.Array:
    """Return the zeros that are added to the output of a site, once for each iteration."""
    output: Any = site.equation.outvars[0].aval
    return jnp.zeros((*(loop.length for loop in site.loops), *output.shape), output.dtype)


def use_factors(book: Book, scheme: Scheme, use: Use) -> Factors:
    """Return the factors of one use of a leaf, for each example."""
    site = scheme.sites[use.path]
    entry = book.operands[use.path], book.cotangents[use.path]
    return _factors(site, site.pieces[use.piece], *entry)


def leaf_factors(book: Book, scheme: Scheme, index: int) -> list[list[Factors]]:
    """Return the factors of a leaf, for each of its disjoint parts, all laid out alike."""
    parts = []
    for part in scheme.plans[index].parts:
        pairs = [use_factors(book, scheme, use) for use in part]
        turned = zip(pairs, part, strict=True)
        parts.append([Factors(p.g, p.a) if use.swapped else p for p, use in turned])
    return parts


def _factors(site: Site, piece: Piece, operand: jax.Array, cotangent: jax.Array) -> Factors:
    """Return a and g; scans that slice the weight make blocks, the others make rows."""

    def rows(operand: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        pair = site.rule.rows(site.equation, site.place, operand, cotangent)
        return pair if piece.start is None else _cut(site.matrix, piece, *pair)

    for _ in range(len(site.loops) + 1):  # and the examples
        rows = jax.vmap(rows)
    depths = {depth for depth, _ in piece.weight.sliced}
    sliced = [1 + i for i, loop in enumerate(site.loops) if loop.depth in depths]
    shared = [1 + i for i, loop in enumerate(site.loops) if loop.depth not in depths]
    block, cut = 1 + len(site.loops), 2 + len(sliced)

    def merge(x: jax.Array) -> jax.Array:
        x = x.transpose([0, *sliced, block, *shared, block + 1, *range(block + 2, x.ndim)])
        blocks, height = math.prod(x.shape[1:cut]), math.prod(x.shape[cut : block + 2])
        return x.reshape(x.shape[0], blocks, height, *x.shape[block + 2 :])

    a, g = rows(operand, cotangent)
    return Factors(merge(a), merge(g))


def _cut(whole: Matrix, piece: Piece, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what concerns one of several concatenated weights: some blocks, inputs or outputs."""
    blocks, inputs, outputs = whole.groups
    start, size = piece.start or 0, piece.matrix.split[piece.axis]

    def cut(x: jax.Array, axis: int, group: Sequence[int]) -> jax.Array:
        if piece.axis not in group:
            return x
        split = x.reshape(*x.shape[:axis], *(whole.split[i] for i in group), *x.shape[axis + 1 :])
        place = axis + list(group).index(piece.axis)
        part = jax.lax.slice_in_dim(split, start, start + size, axis=place)
        return part.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    return cut(cut(a, 0, blocks), 2, inputs), cut(cut(g, 0, blocks), 2, outputs)


def _to_leaf(scheme: Scheme, use: Use, index: int, gradient: jax.Array) -> jax.Array:
    """Return what a gradient of a weight, (blocks, inputs, outputs), is for leaf `index`."""
    site, leaves = scheme.sites[use.path], scheme.leaves
    weight, matrix, *_ = site.pieces[use.piece]
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


def leaf_sum(
    book: Book,
    scheme: Scheme,
    index: int,
    factors: jax.Array,
    scales: tuple[jax.Array, ...] = (),
) -> jax.Array:
    """Return Σᵢ cᵢ gᵢ of a leaf, from factors alone; `scales` as in `weighted_sum`."""
    leaf = scheme.leaves[index]
    total = jnp.zeros(leaf.shape, wide_dtype(leaf))
    for use in chain.from_iterable(scheme.plans[index].parts):
        inputs = scheme.sites[use.path].pieces[use.piece].matrix.shape[1]
        weighted = weighted_sum(use_factors(book, scheme, use), factors, inputs, scales)
        total = total + _to_leaf(scheme, use, index, weighted)
    return total


def leaf_gradients(book: Book, scheme: Scheme, index: int) -> jax.Array:
    """Return every example's gradient of a leaf: (n, *shape), float32 at least."""
    parts = [widen(book.gradients[index])] if index in book.gradients else []
    for use in chain.from_iterable(scheme.plans[index].parts):
        site = scheme.sites[use.path]
        entry = book.operands[use.path], book.cotangents[use.path]
        parts.append(_form(partial(_use_gradients, scheme, use, index), site, entry))
    return sum(parts[1:], parts[0])


def _use_gradients(
    scheme: Scheme, use: Use, index: int, operand: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """Return what one use of a leaf gives to every example's gradient."""
    site = scheme.sites[use.path]
    piece = site.pieces[use.piece]
    formed = gradients(_factors(site, piece, operand, cotangent), piece.matrix.shape[1])
    return jax.vmap(partial(_to_leaf, scheme, use, index))(formed)


def _form(form: Callable[..., jax.Array], site: Site, entry: tuple[jax.Array, ...]) -> jax.Array:
    """Form gradients; where factors are large, on a CPU, of a few examples at a time.

    Not if examples are spread over a mesh, which would have to be gathered to be taken in turn.
    """
    blocks, rows, inputs, outputs = piece_size(site, site.pieces[0])
    n, floats = len(entry[0]), blocks * rows * (inputs + outputs)
    most = max(1, _CACHE_FLOATS // max(floats, 1))
    if not site.rule.expands or n <= most or is_multi_device_mesh():
        return form(*entry)

    def form_few(*entry: jax.Array) -> jax.Array:
        def cut(start: jax.Array) -> list[jax.Array]:
            return [jax.lax.dynamic_slice_in_dim(x, start, most) for x in entry]

        def step(i: jax.Array, formed: jax.Array) -> jax.Array:
            start = jnp.minimum(i * most, n - most)  # the last few may overlap those before
            return jax.lax.dynamic_update_slice_in_dim(formed, form(*cut(start)), start, 0)

        some = jax.eval_shape(form, *(x[:most] for x in entry))
        formed = vary(jnp.zeros((n, *some.shape[1:]), some.dtype), varying_axes(entry))
        return jax.lax.fori_loop(0, -(-n // most), step, formed)

    return jax.lax.platform_dependent(*entry, cpu=form_few, default=form)
