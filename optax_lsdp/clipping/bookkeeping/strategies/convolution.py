"""Convolutions on accelerators, without storing patches or gradients.

The gradient of a kernel is a sum over positions t of patch_t ⊗ g_t. The part that belongs to one
offset o of the window is G_o = X_oᵀg, where row t of X_o is the pixel that the window sees at
offset o. Slices of image and cotangent leave out the padding. The engine forms G_o for one offset
after the other, squares it, and forgets it. If there are few positions, it adds up the Gram
matrices X_oX_oᵀ instead; their sum is the Gram matrix of the patches. The weighted sum is XLA's own
weight gradient of weighted cotangents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._jaxpr import shape_of
from optax_lsdp._trees import compute_once, wide_dtype
from optax_lsdp.clipping.bookkeeping._leaves import Term
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping.strategies._bounds import (
    Factors,
    NormBound,
    added_in_rows,
    root,
    sum_of_rows,
    weighting_error,
)
from optax_lsdp.clipping.bookkeeping.strategies._terms import select, weigh
from optax_lsdp.clipping.bookkeeping.strategies.forgotten import bound_by_squares
from optax_lsdp.clipping.bookkeeping.strategies.gram import Gram, bound_by_grams

_AXES = "bxyzuvw"  # of an image, between those of examples and channels


class Movement(NamedTuple):
    """How a window moves along one axis of an image."""

    window: int
    stride: int
    padding: int
    image_dilation: int
    window_dilation: int

    def meetings(self, size: int, positions: int) -> list[list[tuple[int, int]]]:
        """Return, for each offset, the pixels that it meets and the positions where it does."""
        offsets = []
        for offset in range(self.window):
            first = offset * self.window_dilation - self.padding
            places = [
                (*divmod(first + t * self.stride, self.image_dilation), t) for t in range(positions)
            ]
            offsets.append([(x, t) for x, gap, t in places if gap == 0 and 0 <= x < size])
        return offsets


def _channels_last(
    term: Term, image: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return image and cotangent as (n, batch, *space, channels)."""
    numbers = term.use.equation.params["dimension_numbers"]

    def move(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        batch, features, *space = (1 + axis for axis in spec)
        return x.transpose([0, batch, *space, features])

    return move(image, numbers.lhs_spec), move(cotangent, numbers.out_spec)


def _examples_first(x: jax.Array) -> jax.Array:
    """Return x with its axes in this order in memory: one change of layout serves all products.

    XLA:TPU keeps the axis of examples behind those of space, and would change the layout of every
    slice. Only examples, space and channels in that order merge into a matrix without a copy.
    """
    return compute_once(x.reshape(-1, x.shape[-1])).reshape(x.shape)


def convolution_bound(
    term: Term, image: jax.Array, cotangent: jax.Array, platform: Platform, *, by_gram: bool
) -> NormBound:
    """Return the bound of the gradient of a kernel; `by_gram` chooses Gram matrices."""
    x, g = map(_examples_first, _channels_last(term, image, cotangent))
    params = term.use.equation.params
    kernel = shape_of(term.use.equation.invars[1])
    window = [kernel[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    padding = [low for low, _ in params["padding"]]
    dilations = params["lhs_dilation"], params["rhs_dilation"]
    moves = [
        Movement(*items)
        for items in zip(window, params["window_strides"], padding, *dilations, strict=True)
    ]
    x, moves = _folded(x, moves, g.shape[2:-1])
    meetings = [
        move.meetings(*sizes)
        for move, *sizes in zip(moves, x.shape[2:-1], g.shape[2:-1], strict=True)
    ]
    bound = _bound_by_gram if by_gram else _bound_by_offset
    return bound(meetings, x, g, platform)


def _folded(
    x: jax.Array, moves: Sequence[Movement], positions: Sequence[int]
) -> tuple[jax.Array, list[Movement]]:
    """Move s neighbours into the channels, where a stride s divides the window.

    The window then has stride 1 and fewer offsets. Windows that do not overlap have a single one.
    """
    folded = []
    for axis, (move, size) in enumerate(zip(moves, positions, strict=True), start=2):
        window, stride, low, *dilations = move
        if stride == 1 or window % stride or dilations != [1, 1]:
            folded.append(move)
            continue
        length = size + window // stride - 1
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = low, stride * length - low - x.shape[axis], 0
        x = lax.pad(x, jnp.zeros([], x.dtype), edges)
        x = x.reshape(*x.shape[:axis], length, stride, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis + 1, -2)
        x = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
        folded.append(Movement(window // stride, 1, 0, 1, 1))
    return x, folded


def _parts(
    meetings: list[list[list[tuple[int, int]]]], x: jax.Array, g: jax.Array
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield, for each offset, the pixels that the window meets and their cotangents."""
    for axes in product(*meetings):
        if all(axes):
            pixels, places = ([[pair[i] for pair in pairs] for pairs in axes] for i in (0, 1))
            yield _slice(x, pixels), _slice(g, places)


def _slice(x: jax.Array, indices: list[list[int]]) -> jax.Array:
    """Return the entries at evenly spaced indices of each axis of space."""
    starts = [0, 0, *(index[0] for index in indices), 0]
    stops = [*x.shape[:2], *(index[-1] + 1 for index in indices), x.shape[-1]]
    steps = [index[1] - index[0] if len(index) > 1 else 1 for index in indices]
    return lax.slice(x, starts, stops, [1, 1, *steps, 1])


def _bound_by_offset(
    meetings: list[list[list[tuple[int, int]]]], x: jax.Array, g: jax.Array, platform: Platform
) -> NormBound:
    """Form the gradient offset by offset, add up its squares, and forget it.

    Let X be the image and P the patches, as matrices with a row for each pixel and each position.
    Each offset meets a pixel at most once, so ‖P‖ ≤ √k·‖X‖ in the spectral norm, for k offsets. In
    the norm of Frobenius, ‖P‖ ≤ √m·‖X‖ if the window meets each pixel at most m times. With it,
    ‖Σ_t patch_t ⊗ g_t‖ ≤ R = √m·‖X‖‖g‖. Rounding the rows of g changes each entry by a factor of at
    most 1 ± u, and the gradient by at most u·‖g‖ times the spectral norm of P.
    """
    subscripts = "n{0}c,n{0}o->nco".format(_AXES[: g.ndim - 2])
    rows, shape = math.prod(g.shape[1:-1]), (x.shape[-1], g.shape[-1])
    formed = [platform.product(subscripts, *part) for part in _parts(meetings, x, g)]
    zeros = jnp.zeros((len(x), x.shape[-1]), wide_dtype(x, g))
    squares = sum((jnp.sum(part * part, axis=-1) for part in formed), start=zeros)
    total = jnp.sum(compute_once(squares), axis=-1)  # the barrier fixes the order

    seen = math.prod(
        max(Counter(pixel for pixel, _ in chain(*axis)).values(), default=0) for axis in meetings
    )
    image, spectral = _squared_norms(platform.product(subscripts, x, x), x, platform)
    cotangent, _ = _squared_norms(platform.product(subscripts, g, g), g, platform)
    grow = platform.growth(4, total.dtype)
    reach = grow * jnp.sqrt(seen * image) * jnp.sqrt(cotangent)
    patches = jnp.sqrt(jnp.minimum(seen * image, len(formed) * spectral))
    weighting = grow * weighting_error(Factors(x, g), platform) * patches * jnp.sqrt(cotangent)
    bound = bound_by_squares(total, reach, (len(formed), *shape), rows, platform)
    return bound._replace(rounding=bound.rounding + weighting)


def _squared_norms(
    gram: jax.Array, x: jax.Array, platform: Platform
) -> tuple[jax.Array, jax.Array]:
    """Return upper bounds on ‖X‖² in the norm of Frobenius and in the spectral norm: (n,) each.

    X has a row for each pixel, and `gram` is XᵀX, (n, c, c). The first square is the trace of XᵀX.
    The second one is at most the norm of Frobenius of XᵀX.
    """
    (pixels, channels), dtype = (math.prod(x.shape[1:-1]), x.shape[-1]), gram.dtype
    unit, tiny = platform.unit(dtype), float(jnp.finfo(dtype).tiny)
    eye = jnp.eye(channels, dtype=bool)
    (trace,) = sum_of_rows(platform, jnp.where(eye, gram, jnp.zeros_like(gram)))
    (square,) = sum_of_rows(platform, gram * gram)
    added = added_in_rows(platform, channels, channels)
    trace = (trace + 2 * pixels * channels * tiny) * platform.growth(pixels + added + 1, dtype)
    spectral = root(square + 2 * channels**2 * tiny, trace) * platform.growth(added / 2 + 2, dtype)
    return trace, spectral + pixels * unit * trace


def _bound_by_gram(
    meetings: list[list[list[tuple[int, int]]]], x: jax.Array, g: jax.Array, platform: Platform
) -> NormBound:
    """Add up the Gram matrices of all offsets; together they are the Gram matrix of the patches."""
    rows = math.prod(g.shape[1:-1])

    def inner(part: jax.Array) -> jax.Array:
        flat = part.reshape(len(part), rows, part.shape[-1])
        return platform.product("ntc,nsc->nts", flat, flat)

    grams = [inner(part) for part in _padded_parts(meetings, x, g)]
    zeros = jnp.zeros((len(x), rows, rows), wide_dtype(x, g))
    patches = sum(grams, start=zeros)
    rounded = x.shape[-1] + len(grams), g.shape[-1]
    weighting = weighting_error(Factors(x, g), platform)
    gram = Gram(patches[:, None], inner(g)[:, None], *rounded, weighting)
    return bound_by_grams([gram], platform)


def _padded_parts(
    meetings: list[list[list[tuple[int, int]]]], x: jax.Array, g: jax.Array
) -> Iterator[jax.Array]:
    """Yield, for each offset, what the window sees at all positions: zeros where it is padding."""
    for axes in product(*meetings):
        if all(axes):
            places = [[t for _, t in pairs] for pairs in axes]
            part = _slice(x, [[pixel for pixel, _ in pairs] for pairs in axes])
            edges = [
                (t[0], size - 1 - t[-1], t[1] - t[0] - 1 if len(t) > 1 else 0)
                for t, size in zip(places, g.shape[2:-1], strict=True)
            ]
            zero = jnp.zeros([], x.dtype)
            yield lax.pad(part, zero, [(0, 0, 0)] * 2 + edges + [(0, 0, 0)])


def convolution_sum(
    term: Term, image: jax.Array, cotangent: jax.Array, factors: jax.Array, platform: Platform
) -> jax.Array:
    """Return Σᵢ cᵢGᵢ of a kernel: XLA's weight gradient of a batch of all examples."""
    equation = term.use.equation
    params, dtype = equation.params, wide_dtype(image, cotangent)
    weighted = platform.rounded(weigh(cotangent, factors), image, cotangent)
    pair = _channels_last(term, select(image, factors), weighted)
    x, g = (z.reshape(-1, *z.shape[2:]) for z in pair)  # all examples are one batch
    if x.dtype != g.dtype:
        x, g = x.astype(dtype), g.astype(dtype)
    rank = g.ndim - 2
    last = (0, rank + 1, *range(1, rank + 1))
    numbers = lax.ConvDimensionNumbers(last, params["dimension_numbers"].rhs_spec, last)

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
