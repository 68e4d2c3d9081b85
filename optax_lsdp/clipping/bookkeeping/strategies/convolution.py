"""Convolutions on accelerators, without storing patches or gradients.

The gradient of a kernel is a sum over positions t of patch_t ⊗ g_t. Patches that do not overlap are
a reshape of the image. Otherwise a loop over the window's offsets either forms the part of the
gradient that belongs to an offset, squares it and forgets it, or adds to the Gram matrix of the
patches, which is cheaper if there are few positions. The sum is XLA's own weight gradient of
weighted cotangents.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._jaxpr import shape_of
from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._trees import wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._leaves import Term
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping.strategies._bounds import (
    Factors,
    NormBound,
    sum_of_rows,
    weighting_error,
)
from optax_lsdp.clipping.bookkeeping.strategies._terms import select, weigh
from optax_lsdp.clipping.bookkeeping.strategies.forgotten import bound_by_squares
from optax_lsdp.clipping.bookkeeping.strategies.gram import Gram, bound_by_grams

_AXES = "bxyzuvw"  # of an image, after those of examples and channels


def convolution_bound(
    term: Term, image: jax.Array, cotangent: jax.Array, platform: Platform, *, by_gram: bool
) -> NormBound:
    """Return the bound of the gradient of a kernel; `by_gram` chooses Gram matrices."""
    x, g = _channels_first(term, image, cotangent)
    if by_gram:
        return _bound_by_gram(term, x, g, platform)
    return _bound_by_offset(term, x, g, platform)


def _channels_first(
    term: Term, image: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the padded image and the cotangent as (n, channels, batch, *space)."""
    params = term.use.equation.params
    numbers = params["dimension_numbers"]

    def move(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        batch, features, *space = spec
        return x.transpose([0, 1 + features, 1 + batch, *(1 + axis for axis in space)])

    edges = zip(params["padding"], params["lhs_dilation"], strict=True)
    padding = [(0, 0, 0)] * 3 + [(low, high, dilation - 1) for (low, high), dilation in edges]
    x = lax.pad(move(image, numbers.lhs_spec), jnp.zeros([], image.dtype), padding)
    return x, move(cotangent, numbers.out_spec)


def _window(term: Term) -> list[int]:
    equation = term.use.equation
    kernel = shape_of(equation.invars[1])
    return [kernel[axis] for axis in equation.params["dimension_numbers"].rhs_spec[2:]]


def _shifted(term: Term, x: jax.Array, positions: tuple[int, ...], offset: jax.Array) -> jax.Array:
    """Return what the window sees at one of its offsets: (n, channels, batch, *positions)."""
    params = term.use.equation.params
    starts = list[jax.Array]()
    for size, dilation in reversed(list(zip(_window(term), params["rhs_dilation"], strict=True))):
        starts.insert(0, (offset % size) * dilation)
        offset = offset // size
    zero = jnp.zeros_like(offset)
    strides = params["window_strides"]
    reach = [stride * (size - 1) + 1 for stride, size in zip(strides, positions, strict=True)]
    part = lax.dynamic_slice(x, [zero] * 3 + starts, [*x.shape[:3], *reach])
    return lax.slice(part, [0] * part.ndim, part.shape, [1, 1, 1, *strides])


def _bound_by_offset(term: Term, x: jax.Array, g: jax.Array, platform: Platform) -> NormBound:
    """Form the gradient offset by offset, add up its squares, and forget it."""
    window, positions = _window(term), g.shape[3:]
    dtype, offsets, axes = wide_dtype(x, g), math.prod(window), _AXES[: g.ndim - 2]

    def square(offset: jax.Array, total: jax.Array) -> jax.Array:
        part = _shifted(term, x, positions, offset)
        formed = platform.product(f"nc{axes},no{axes}->nco", part, g)
        return total + sum_of_rows(platform, formed * formed)[0]

    zeros = vary(jnp.zeros(len(x), dtype), varying_axes((x, g)))
    total = lax.fori_loop(0, offsets, square, zeros)
    reach = _reach(term, x, g, platform)
    shape = (offsets, x.shape[1], g.shape[1])
    bound = bound_by_squares(total, reach, shape, math.prod(g.shape[2:]), platform)
    weighting = weighting_error(Factors(x, g), platform)
    return bound._replace(rounding=bound.rounding + weighting * reach)


def _reach(term: Term, x: jax.Array, g: jax.Array, platform: Platform) -> jax.Array:
    """Return Σ_t ‖patch_t‖‖g_t‖, rounded up: (n,)."""
    params = term.use.equation.params
    window, dtype = _window(term), wide_dtype(x, g)
    pixels, cotangents = (jnp.sum(jnp.square(widen(z)), axis=1) for z in (x, g))
    patches = lax.reduce_window(
        pixels,
        jnp.zeros([], pixels.dtype),
        lax.add,
        (1, 1, *window),
        (1, 1, *params["window_strides"]),
        "VALID",
        window_dilation=(1, 1, *params["rhs_dilation"]),
    )
    entries = x.shape[1] * math.prod(window) + g.shape[1]
    tiny = 2 * entries * float(jnp.finfo(dtype).tiny)
    lengths = jnp.sqrt(patches + tiny) * jnp.sqrt(cotangents + tiny)
    rows = math.prod(g.shape[2:])
    total = jnp.sum(lengths, axis=tuple(range(1, lengths.ndim)))
    return total * platform.growth(entries + rows + 4, dtype)


def _bound_by_gram(term: Term, x: jax.Array, g: jax.Array, platform: Platform) -> NormBound:
    """Add up the Gram matrices of all offsets; together they are the Gram matrix of the patches."""
    offsets, rows = math.prod(_window(term)), math.prod(g.shape[2:])

    def inner(part: jax.Array) -> jax.Array:
        flat = part.reshape(*part.shape[:2], rows)
        return platform.product("nct,ncs->nts", flat, flat)

    def add(offset: jax.Array, total: jax.Array) -> jax.Array:
        return total + inner(_shifted(term, x, g.shape[3:], offset))

    zeros = jnp.zeros((len(x), rows, rows), wide_dtype(x, g))
    patches = lax.fori_loop(0, offsets, add, vary(zeros, varying_axes((x, g))))
    rounded = x.shape[1] + offsets, g.shape[1]
    weighting = weighting_error(Factors(x, g), platform)
    gram = Gram(patches[:, None], inner(g)[:, None], *rounded, weighting)
    return bound_by_grams([gram], platform)


def convolution_sum(
    term: Term, image: jax.Array, cotangent: jax.Array, factors: jax.Array, platform: Platform
) -> jax.Array:
    """Return Σᵢ cᵢGᵢ of a kernel: XLA's weight gradient of a batch of all examples."""
    equation = term.use.equation
    params, numbers = equation.params, equation.params["dimension_numbers"]

    def merged(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.moveaxis(x, 0, axis)
        return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])

    x = merged(select(image, factors), numbers.lhs_spec[0])
    weighted = platform.rounded(weigh(cotangent, factors), image, cotangent)
    g = merged(weighted, numbers.out_spec[0])
    dtype = wide_dtype(x, g)
    if x.dtype != g.dtype:
        x, g = x.astype(dtype), g.astype(dtype)

    def convolve(kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            numbers,
            precision=platform.precision,
        )

    kernel = jax.ShapeDtypeStruct(shape_of(equation.invars[1]), x.dtype)
    (gradient,) = jax.linear_transpose(convolve, kernel)(g)
    return gradient.astype(dtype)
