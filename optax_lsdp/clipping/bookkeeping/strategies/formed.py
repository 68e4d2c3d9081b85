"""Store the gradients of all examples, and add them up with weights.

This is also the fallback for leaves whose uses have no rule: automatic differentiation forms their
gradients during the backward pass.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._jaxpr import Equation, evaluate, shape_of
from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import compute_once, widen
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._strategy import Leaf, is_plain_convolution
from optax_lsdp.clipping.bookkeeping._uses import Use
from optax_lsdp.clipping.bookkeeping.strategies.bounds import NormBound, is_one_hot, kept_bound
from optax_lsdp.clipping.bookkeeping.strategies.factors import (
    Rounded,
    examples_in_cache,
    scatter,
    select,
    to_leaves,
    to_weight,
    use_factors,
    weigh,
)


class Formed(NamedTuple):
    """Stored gradients of one or several leaves: arrays (n, *shape), by the index of the leaf."""

    rows: dict[int, jax.Array]
    platform: Platform

    def joined(self) -> jax.Array:
        """Return the gradients as one array of shape (n, …)."""
        if len(self.rows) == 1:
            return next(iter(self.rows.values()))
        flat = [x.reshape(len(x), math.prod(x.shape[1:])) for x in self.rows.values()]
        return jnp.concatenate(flat, axis=1)

    def bounds(self) -> list[NormBound]:
        """Return the bound of all leaves together."""
        return [kept_bound(self.joined(), self.platform)]

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ. Only CPUs use a matmul, because a matrix unit would round gradients."""
        joined = self.joined()
        if self.platform is CPU:
            vectors = select(joined, factors).reshape(len(joined), math.prod(joined.shape[1:]))
            total = self.platform.product("n,nd->d", factors.astype(joined.dtype), vectors)
        else:
            total = jnp.sum(weigh(joined, factors), axis=0)
        ends = list(accumulate(math.prod(x.shape[1:]) for x in self.rows.values()))
        parts = jnp.split(total, ends[:-1]) if len(self.rows) > 1 else [total]
        leaves = zip(self.rows.items(), parts, strict=True)
        return {index: part.reshape(x.shape[1:]) for (index, x), part in leaves}


def form_gradients(leaf: Leaf, rounded: Rounded) -> dict[int, jax.Array]:
    """Return every example's gradient of a leaf, or of each concatenated leaf, as (n, *shape).

    The gradients are float32 or wider. But if a convolution has already rounded them to bfloat16,
    they stay in bfloat16, which holds the same numbers in half the bytes.
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
    use: Use, leaf: Leaf, rounded: Rounded, operand: jax.Array, cotangent: jax.Array
) -> dict[int, jax.Array]:
    """Return one use's part of every example's gradient of a leaf."""
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
    """Return whether XLA's own transposed convolution forms a use's part of the gradients."""
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
    use: Use, leaf: Leaf, rounded: Rounded, operand: jax.Array, cotangent: jax.Array
) -> dict[int, jax.Array]:
    """Return `_form(…)`, computed for a few examples at a time, so that patches fit the cache.

    Do not call this on a mesh of several devices: slicing the batch would gather it.
    """
    blocks, rows, inputs, outputs = use.size
    arrays, form = (operand, cotangent), partial(_form, use, leaf, rounded)
    n, most = len(operand), examples_in_cache(blocks * rows * (inputs + outputs))
    if n <= most:
        return form(*arrays)

    def step(i: jax.Array, formed: dict[int, jax.Array]) -> dict[int, jax.Array]:
        start = jnp.minimum(i * most, n - most)  # the last chunk may overlap the previous one
        new = form(*(jax.lax.dynamic_slice_in_dim(x, start, most) for x in arrays))
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return {index: put(x, new[index]) for index, x in formed.items()}

    some = jax.eval_shape(form, *(x[:most] for x in arrays))
    zeros = {index: jnp.zeros((n, *x.shape[1:]), x.dtype) for index, x in some.items()}
    return jax.lax.fori_loop(0, -(-n // most), step, vary(zeros, varying_axes(arrays)))
