"""Store the gradients of all examples, and add them up with weights.

This is also the fallback for leaves whose uses have no rule: automatic differentiation forms their
gradients during the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate

import jax
import jax.numpy as jnp

from optax_lsdp._jaxpr import evaluate, shape_of
from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import compute_once, widen
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf, Term
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._strategy import is_plain_convolution
from optax_lsdp.clipping.bookkeeping.strategies.bounds import is_one_hot
from optax_lsdp.clipping.bookkeeping.strategies.terms import (
    Rounded,
    examples_in_cache,
    scatter,
    select,
    term_factors,
    to_leaf,
    to_weight,
    weigh,
)


def form_gradients(leaf: ParameterLeaf, rounded: Rounded) -> jax.Array:
    """Return every example's gradient of a leaf, as an array (n, *shape).

    The gradients are float32 or wider. But if a convolution has already rounded them to bfloat16,
    they stay in bfloat16, which holds the same numbers in half the bytes.
    """
    parts = [rounded.gradients[leaf.index]] if leaf.index in rounded.gradients else []
    for term in leaf.terms:
        form = partial(_form_term, term, leaf.index, rounded)
        arrays = rounded.of(term, leaf.index)
        few = rounded.platform is CPU and term.use.rule.expands and not is_multi_device_mesh()
        part = _in_chunks(form, term, arrays) if few else form(*arrays)
        is_view = term.piece.weight.entries is not None and len(leaf.terms) == 1
        if is_view and _is_formed_by_xla(term, rounded.platform):
            part = part.astype(jnp.result_type(*arrays))
        parts.append(part)
    return compute_once(sum(parts[1:], parts[0]))


def joined_rows(rows: Mapping[int, jax.Array]) -> jax.Array:
    """Concatenate the gradients of one or several leaves to one array of shape (n, …)."""
    if len(rows) == 1:
        return next(iter(rows.values()))
    flat = [x.reshape(len(x), math.prod(x.shape[1:])) for x in rows.values()]
    return jnp.concatenate(flat, axis=1)


def kept_sums(
    rows: Mapping[int, jax.Array], platform: Platform, factors: jax.Array
) -> dict[int, jax.Array]:
    """Return Σᵢ cᵢGᵢ of each leaf. Only CPUs use a matmul: a matrix unit would round gradients."""
    joined = joined_rows(rows)
    if platform is CPU:
        vectors = select(joined, factors).reshape(len(joined), math.prod(joined.shape[1:]))
        total = platform.product("n,nd->d", factors.astype(joined.dtype), vectors)
    else:
        total = jnp.sum(weigh(joined, factors), axis=0)
    ends = list(accumulate(math.prod(x.shape[1:]) for x in rows.values()))
    parts = jnp.split(total, ends[:-1]) if len(rows) > 1 else [total]
    leaves = zip(rows.items(), parts, strict=True)
    return {index: part.reshape(x.shape[1:]) for (index, x), part in leaves}


def _form_term(
    term: Term, index: int, rounded: Rounded, operand: jax.Array, cotangent: jax.Array
) -> jax.Array:
    """Return one term of every example's gradient of leaf `index`."""
    platform, inputs = rounded.platform, term.size.inputs
    if _is_formed_by_xla(term, platform):
        formed = _transposed_convolutions(term, operand, cotangent)
    else:
        a, g = term_factors(term, operand, cotangent)
        if is_one_hot(a):
            products = jax.vmap(partial(scatter, inputs=inputs))(a, widen(g))
        elif platform is CPU and inputs > g.shape[-1]:  # fastest with the longer side last
            products = platform.product("nbtp,nbtq->nbqp", a, g).swapaxes(-1, -2)
        else:
            products = platform.product("nbtp,nbtq->nbpq", a, g)
        formed = jax.vmap(partial(to_weight, term))(products)
    return jax.vmap(partial(to_leaf, term, index, rounded))(formed)


def _is_formed_by_xla(term: Term, platform: Platform) -> bool:
    """Return whether XLA's own transposed convolution forms a term."""
    return platform is not CPU and is_plain_convolution(term)


def _transposed_convolutions(term: Term, image: jax.Array, cotangent: jax.Array) -> jax.Array:
    """Return every example's gradient of a kernel, by XLA's own transposed convolution."""
    equation = term.use.equation
    kernel = jax.ShapeDtypeStruct(shape_of(equation.invars[1]), image.dtype)

    def form(image: jax.Array, cotangent: jax.Array) -> jax.Array:
        def convolve(kernel: jax.Array) -> jax.Array:
            return evaluate(equation, [image, kernel])[0].astype(cotangent.dtype)

        (gradient,) = jax.linear_transpose(convolve, kernel)(cotangent)
        return widen(gradient)

    return jax.vmap(form)(image, cotangent)


def _in_chunks(
    form: Callable[..., jax.Array], term: Term, arrays: tuple[jax.Array, ...]
) -> jax.Array:
    """Return `form(*arrays)`, computed for a few examples at a time, so that patches fit the cache.

    Do not call this on a mesh of several devices: slicing the batch would gather it.
    """
    blocks, rows, inputs, outputs = term.size
    n, most = len(arrays[0]), examples_in_cache(blocks * rows * (inputs + outputs))
    if n <= most:
        return form(*arrays)

    def step(i: jax.Array, formed: jax.Array) -> jax.Array:
        start = jnp.minimum(i * most, n - most)  # the last chunk may overlap the previous one
        some = [jax.lax.dynamic_slice_in_dim(x, start, most) for x in arrays]
        return jax.lax.dynamic_update_slice_in_dim(formed, form(*some), start, 0)

    some = jax.eval_shape(form, *(x[:most] for x in arrays))
    formed = vary(jnp.zeros((n, *some.shape[1:]), some.dtype), varying_axes(arrays))
    return jax.lax.fori_loop(0, -(-n // most), step, formed)
