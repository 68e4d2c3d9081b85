"""Compute norms and weighted sums of gradients from their factors, or form and store gradients.

If norms and weighted sums are computed from factors, no gradient has to be formed. Stored gradients
are also the fallback for leaves whose uses have no rule: automatic differentiation forms these
gradients during the backward pass. This module maps the gradient of a weight back to the
leaves, through scans, views and concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._jaxpr import Equation, evaluate, shape_of
from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import compute_once, wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._backward import Rounded, apply_rule
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._strategy import Kind, ParameterLeaf, is_plain_convolution
from optax_lsdp.clipping.bookkeeping._uses import Use, Weight
from optax_lsdp.clipping.bookkeeping.strategies.bounds import (
    Factors,
    NormBound,
    gram_bound,
    is_one_hot,
    kept_bound,
    outer_bound,
)

_CACHE_FLOATS = 2**20  # 4 MiB, which fit into a CPU's cache


def use_factors(use: Use, a: jax.Array, g: jax.Array) -> Factors:
    """Return the factors of one use for every example, from `a, g = rounded.pairs[use.path]`.

    The iterations of a scan that slices the weight become blocks. The iterations of other scans
    become rows.
    """
    if use.rule.expands:
        a, g = apply_rule(use, a, g)
    sliced = [1 + i for i, loop in enumerate(use.loops) if loop in use.weight.sliced]
    shared = [1 + i for i, loop in enumerate(use.loops) if loop not in use.weight.sliced]
    block, split = 1 + len(use.loops), 2 + len(sliced)
    merged = []
    for x in (a, g):
        x = x.transpose([0, *sliced, block, *shared, *range(block + 1, x.ndim)])
        height = math.prod(x.shape[split : block + 2])
        merged.append(x.reshape(len(x), use.size.blocks, height, *x.shape[block + 2 :]))
    return Factors(*merged)


class ByFactors(NamedTuple):
    """The gradients of a leaf whose strategy is "outer product" or "Gram matrices"."""

    leaf: ParameterLeaf
    kind: Kind
    rounded: Rounded

    def bounds(self) -> list[NormBound]:
        """Return the bound of each part. In transposed uses, a and g are swapped."""
        found, platform = list[NormBound](), self.rounded.platform
        dtype = wide_dtype(*(self.rounded.leaves[index] for index in self.leaf.indices))
        for part in self.leaf.parts or ():
            pairs = [(use, use_factors(use, *self.rounded.pairs[use.path])) for use in part]
            terms = [Factors(p.g, p.a) if use.is_transposed else p for use, p in pairs]
            is_outer = self.kind == "outer product"
            bound = outer_bound(terms, platform) if is_outer else gram_bound(terms, platform, dtype)
            found.append(bound)
        return found

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ of each leaf, from one product per use, as in ordinary training."""
        sums: dict[int, jax.Array] = {}
        for use in self.leaf.uses:
            pair = use_factors(use, *self.rounded.pairs[use.path])
            matrix = weighted_sum(pair, factors, use.size.inputs, self.rounded.platform)
            for index, x in to_leaves(use, self.leaf, self.rounded, to_weight(use, matrix)).items():
                sums[index] = sums[index] + x if index in sums else x
        return sums


def weighted_sum(term: Factors, factors: jax.Array, inputs: int, platform: Platform) -> jax.Array:
    """Return Σᵢ cᵢ Σ_t a_it ⊗ g_it, of shape (blocks, inputs, outputs).

    This function multiplies a or g, whichever has shorter rows, by cᵢ and rounds the product. Where
    cᵢ is 0, zeros replace both operands, because 0 · NaN is NaN. On a CPU, this function weights a
    few examples at a time, so that the weighted copies fit into the cache. If the result is large,
    it weights all examples at once: otherwise it would read and write the whole result for every
    few examples.
    """
    if is_one_hot(term.a):
        pair = term.a, weigh(term.g, factors)
        ids, added = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in pair)
        return scatter(ids, added, inputs)
    (n, blocks, rows, _), outputs = term.a.shape, term.g.shape[-1]
    few = examples_in_cache(2 * blocks * rows * (inputs + outputs))  # copies fill half the cache
    is_large = blocks * inputs * outputs > _CACHE_FLOATS // 4
    if platform is not CPU or is_large or few >= n or is_multi_device_mesh():
        return _weighted_product(term, factors, platform)

    flat = [x.reshape(n, -1) for x in term]  # axes of length 1 would cost a copy

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(i * few, n - few)  # the last chunk may overlap the previous one
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

    `ids` has shape (blocks, count), `rows` has shape (blocks, count, outputs), and the result has
    shape (blocks, inputs, outputs). Rows with a negative index are dropped.
    """
    zeros = jnp.zeros((len(ids), inputs, rows.shape[-1]), rows.dtype)
    places = jnp.where(ids >= 0, ids, inputs)  # an index beyond the end is dropped
    return jax.vmap(lambda zeros, places, rows: zeros.at[places].add(rows, mode="drop"))(
        zeros, places, rows
    )


def to_weight(use: Use, gradient: jax.Array) -> jax.Array:
    """Convert a gradient of shape (blocks, inputs, outputs) to the shape of the weight.

    The result has a leading axis for each scan that slices the weight.
    """
    matrix, stack = use.matrix, [loop.length for loop in use.weight.sliced]
    order = (*matrix.blocks, *matrix.inputs, *matrix.outputs)
    sizes = [matrix.split[axis] for axis in order]
    back = [len(stack) + order.index(axis) for axis in range(len(order))]
    return gradient.reshape(*stack, *sizes).transpose([*range(len(stack)), *back])


def to_leaves(
    use: Use, leaf: ParameterLeaf, rounded: Rounded, gradient: jax.Array
) -> dict[int, jax.Array]:
    """Return the gradient of each leaf, computed from the gradient of a weight.

    The gradient of the weight and the results are multiplied by `rounded.scales`.
    """
    weight, leaves = use.weight, rounded.leaves
    members = [leaves[index] for index in leaf.indices]
    stack = [loop.length for loop in weight.sliced]
    gradient = gradient.reshape(*stack, *shape_of(use.equation.invars[use.place]))
    gradient = gradient.astype(wide_dtype(*members))
    if leaf.parts is not None or weight.entries is not None:
        build = partial(_weight_value, weight, (), leaf.indices, False)
        pulled = jax.linear_transpose(build, *map(widen, members))(gradient)
        return dict(zip(leaf.indices, pulled, strict=True))
    # A weight may be float16, where scaled gradients may overflow: pull back without a scale.
    build = partial(_weight_value, weight, leaves, leaf.indices, True)
    value, pull = jax.vjp(build, *members)
    unscaled = gradient / jnp.asarray(rounded.scales[min(weight.leaves)], gradient.dtype)
    pulled = map(widen, pull(unscaled.astype(value.dtype)))
    pairs = zip(leaf.indices, pulled, strict=True)
    return {i: x * jnp.asarray(rounded.scales[i], x.dtype) for i, x in pairs}


def _weight_value(
    weight: Weight,
    leaves: Sequence[jax.Array],
    indices: Sequence[int],
    casts: bool,
    *members: jax.Array,
) -> jax.Array:
    """Return the value of a weight if `members` are the leaves at `indices`; see `Weight.value`."""
    return weight.value(
        dict(enumerate(leaves)) | dict(zip(indices, members, strict=True)), {}, casts
    )


class Formed(NamedTuple):
    """Stored gradients of one or several leaves: arrays of shape (n, *shape), indexed by leaf."""

    rows: dict[int, jax.Array]
    platform: Platform

    def bounds(self) -> list[NormBound]:
        """Return the bound of all leaves together."""
        return [kept_bound(list(self.rows.values()), self.platform)]

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ of each leaf. Only CPUs use a matmul, because matrix units would round."""
        sums = {}
        for index, x in self.rows.items():
            if self.platform is CPU:
                vectors = select(x, factors).reshape(len(x), math.prod(x.shape[1:]))
                total = self.platform.product("n,nd->d", factors.astype(x.dtype), vectors)
                sums[index] = total.reshape(x.shape[1:])
            else:
                sums[index] = jnp.sum(weigh(x, factors), axis=0)
        return sums


def form_gradients(leaf: ParameterLeaf, rounded: Rounded) -> dict[int, jax.Array]:
    """Return every example's gradient of a leaf or of each concatenated leaf, indexed by leaf.

    The gradients have shape (n, *shape) and are float32 or wider. But if a convolution has already
    rounded them to bfloat16, they stay in bfloat16, which holds the same numbers in half the bytes.
    """
    sums = {i: rounded.gradients[i] for i in leaf.indices if i in rounded.gradients}
    for use in leaf.uses:
        operand, cotangent = rounded.pairs[use.path]
        few = rounded.platform is CPU and use.rule.expands and not is_multi_device_mesh()
        form = _form_in_chunks if few else _form
        formed = form(use, leaf, rounded, operand, cotangent)
        is_view = use.weight.entries is not None and len(leaf.uses) == 1
        for index, rows in formed.items():
            if is_view and _is_formed_by_xla(use, rounded.platform):
                rows = rows.astype(jnp.result_type(operand, cotangent))
            sums[index] = sums[index] + rows if index in sums else rows
    return compute_once(sums)


def _form(
    use: Use, leaf: ParameterLeaf, rounded: Rounded, operand: jax.Array, cotangent: jax.Array
) -> dict[int, jax.Array]:
    """Return the term that one use contributes to every example's gradient of a leaf."""
    platform, inputs = rounded.platform, use.size.inputs
    if _is_formed_by_xla(use, platform):
        formed = jax.vmap(partial(_transposed_convolution, use.equation))(operand, cotangent)
    else:
        a, g = use_factors(use, operand, cotangent)
        if is_one_hot(a):
            products = jax.vmap(partial(scatter, inputs=inputs))(a, widen(g))
        elif platform is CPU and inputs > g.shape[-1]:  # fastest with the longer side last
            products = platform.product("nbtp,nbtq->nbqp", a, g).swapaxes(-1, -2)
        else:
            products = platform.product("nbtp,nbtq->nbpq", a, g)
        formed = jax.vmap(partial(to_weight, use))(products)
    return jax.vmap(partial(to_leaves, use, leaf, rounded))(formed)


def _is_formed_by_xla(use: Use, platform: Platform) -> bool:
    """Return whether XLA's own transposed convolution computes the gradient from a use."""
    return platform is not CPU and is_plain_convolution(use)


def _transposed_convolution(
    equation: Equation, image: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """Return the gradient of a kernel for one example, by XLA's own transposed convolution."""

    def convolve(kernel: jax.Array) -> jax.Array:
        return evaluate(equation, [image, kernel])[0].astype(cotangent.dtype)

    kernel = jax.ShapeDtypeStruct(shape_of(equation.invars[1]), image.dtype)
    return widen(jax.linear_transpose(convolve, kernel)(cotangent)[0])


def _form_in_chunks(
    use: Use, leaf: ParameterLeaf, rounded: Rounded, operand: jax.Array, cotangent: jax.Array
) -> dict[int, jax.Array]:
    """Return `_form(…)`, computed for a few examples at a time, so that patches fit into the cache.

    Do not call this on a mesh of several devices: slicing the batch would gather it.
    """
    blocks, rows, inputs, outputs = use.size
    arrays, form = (operand, cotangent), partial(_form, use, leaf, rounded)
    n, most = len(operand), examples_in_cache(blocks * rows * (inputs + outputs))
    if n <= most:
        return form(*arrays)

    def step(i: jax.Array, formed: dict[int, jax.Array]) -> dict[int, jax.Array]:
        start = jnp.minimum(i * most, n - most)  # the last chunk may overlap the previous one
        new = form(*(lax.dynamic_slice_in_dim(x, start, most) for x in arrays))
        put = partial(lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return {index: put(x, new[index]) for index, x in formed.items()}

    some = jax.eval_shape(form, *(x[:most] for x in arrays))
    zeros = {index: jnp.zeros((n, *x.shape[1:]), x.dtype) for index, x in some.items()}
    return lax.fori_loop(0, -(-n // most), step, vary(zeros, varying_axes(arrays)))
