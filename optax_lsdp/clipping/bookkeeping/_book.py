"""The book: a loss and a batch go in, what one backward pass leaves at each site comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._shards import vary, varying_axes
from optax_lsdp._trees import wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._grams import Factors, gradients
from optax_lsdp.clipping.bookkeeping._jaxpr import trace
from optax_lsdp.clipping.bookkeeping._plan import LeafPlan, plan_leaves
from optax_lsdp.clipping.bookkeeping._replay import Value, replay
from optax_lsdp.clipping.bookkeeping._rules import aval_shape
from optax_lsdp.clipping.bookkeeping._sites import Path, Site, find_uses

Loss = Callable[[optax.Params, Any], tuple[jax.Array, Any]]


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


def make_scheme(loss_fn: Loss, params: optax.Params, example: Any) -> tuple[Any, Scheme]:
    """Trace the loss of one example and plan what to do with each leaf."""
    leaves = jax.tree.leaves(params)
    program = trace(loss_fn, params, example)
    uses = find_uses(program.closed, len(leaves))
    plans = plan_leaves(uses, [leaf.shape for leaf in leaves])
    return program, Scheme(uses.sites, plans, leaves)


def keep_book(
    loss_fn: Loss, params: optax.Params, batch: Any
) -> tuple[tuple[jax.Array, Any], Book, Scheme]:
    """Return each example's (value, aux), the book of one backward pass, and how to read it."""
    found: list[Scheme] = []
    axes = varying_axes(batch)

    def backward(example: Any) -> tuple[Any, Book]:
        program, scheme = make_scheme(loss_fn, params, example)
        found.append(scheme)
        taps = {path: _tap(site) for path, site in scheme.sites.items()}
        left = {i: leaf for i, leaf in enumerate(scheme.leaves) if scheme.plans[i].is_automatic}

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
    output = site.equation.outvars[0].aval
    return jnp.zeros((*(loop.length for loop in site.loops), *output.shape), output.dtype)


def factors_of(site: Site, operand: jax.Array, cotangent: jax.Array) -> Factors:
    """Return the factors of a site; scans that slice the weight make blocks, the others rows."""
    rows: Callable[..., Any] = partial(site.rule.rows, site.equation, site.place)
    for _ in range(len(site.loops) + 1):  # and the examples
        rows = jax.vmap(rows)
    depths = {depth for depth, _ in site.weight.sliced}
    sliced = [1 + i for i, loop in enumerate(site.loops) if loop.depth in depths]
    shared = [1 + i for i, loop in enumerate(site.loops) if loop.depth not in depths]
    block = 1 + len(site.loops)

    def merge(x: jax.Array) -> jax.Array:
        rest = range(block + 2, x.ndim)
        x = x.transpose([0, *sliced, block, *shared, block + 1, *rest])
        sizes = x.shape
        cut = 2 + len(sliced)
        return x.reshape(
            sizes[0], math.prod(sizes[1:cut]), math.prod(sizes[cut : block + 2]), *sizes[block + 2 :]
        )

    a, g = rows(operand, cotangent)
    return Factors(merge(a), merge(g))


def to_leaf(site: Site, index: int, gradient: jax.Array, leaves: Sequence[jax.Array]) -> jax.Array:
    """Return what a gradient of the weight, (blocks, inputs, outputs), is for leaf `index`."""
    weight, matrix = site.weight, site.matrix
    stack = [size for _, (size, _) in weight.sliced]
    ordered = [matrix.split[axis] for axis in matrix.order]
    lead = len(stack)
    back = [lead + matrix.order.index(axis) for axis in range(len(matrix.split))]
    moved = gradient.reshape(*stack, *ordered).transpose([*range(lead), *back])
    moved = moved.reshape(*stack, *aval_shape(site.equation.invars[site.place]))
    leaf = widen(leaves[index])
    if weight.view is not None:
        (result,) = jax.linear_transpose(weight.show, leaf)(moved)
        return result

    def build(leaf: jax.Array) -> jax.Array:
        return weight.value([*leaves[:index], leaf, *leaves[index + 1 :]])

    value, pull = jax.vjp(build, leaves[index])
    return widen(pull(moved.astype(value.dtype))[0])


def leaf_gradients(book: Book, scheme: Scheme, index: int) -> jax.Array:
    """Return every example's gradient of a leaf: (n, *shape), float32 at least."""
    total = None
    if index in book.gradients:
        total = widen(book.gradients[index])
    for part in scheme.plans[index].parts:
        for use in part:
            site = scheme.sites[use.path]
            factors = factors_of(site, book.operands[use.path], book.cotangents[use.path])
            formed = gradients(factors, site.matrix.shape[1])
            pull = partial(to_leaf, site, index, leaves=scheme.leaves)
            pulled = jax.vmap(pull)(formed)
            total = pulled if total is None else total + pulled
    if total is None:
        size = jax.tree.leaves(book)[0].shape[0]
        total = jnp.zeros((size, *scheme.leaves[index].shape), wide_dtype(scheme.leaves[index]))
    return total
