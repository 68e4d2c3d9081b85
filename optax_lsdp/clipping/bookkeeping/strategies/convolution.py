"""Convolutions on accelerators, without storing gradients.

The gradient of a kernel is a sum over positions t of patch_t ⊗ g_t. The part that belongs to one
offset o of the window is G_o = X_oᵀg, where row t of X_o is the pixel that the window sees at
offset o. The engine forms G_o for one offset after the other, squares it, and forgets it. If there
are few channels, it makes patches, and forms all parts in one product. If there are few positions,
it adds up the Gram matrices X_oX_oᵀ; their sum is the Gram matrix of the patches. The weighted sum
is XLA's own weight gradient of weighted cotangents.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from optax_lsdp._jaxpr import shape_of
from optax_lsdp._mesh import is_multi_device_mesh
from optax_lsdp._trees import compute_once, wide_dtype
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf, Term
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping.strategies.bounds import (
    Gram,
    NormBound,
    bound_by_grams,
    root,
    spectral_square,
)
from optax_lsdp.clipping.bookkeeping.strategies.terms import Rounded, to_leaf, weigh

_AXES = "bxyzuvw"  # of an image, before those of examples and channels


class Movement(NamedTuple):
    """How a window moves along one axis of an image."""

    window: int
    stride: int
    padding: int
    image_dilation: int
    window_dilation: int

    def most_meetings(self, size: int, positions: int) -> int:
        """Return how often the window meets a pixel at most."""
        offsets = np.arange(self.window) * self.window_dilation - self.padding
        places = np.add.outer(offsets, np.arange(positions) * self.stride)
        pixels, gaps = np.divmod(places, self.image_dilation)
        seen = pixels[(gaps == 0) & (pixels >= 0) & (pixels < size)]
        return int(np.bincount(seen).max(initial=0))

    def padded(self, size: int, positions: int) -> tuple[int, int, int]:
        """Return how to pad the image, so that the window never leaves it."""
        reach = (self.window - 1) * self.window_dilation + (positions - 1) * self.stride + 1
        length = (size - 1) * self.image_dilation + 1
        return self.padding, reach - self.padding - length, self.image_dilation - 1


class Moved(NamedTuple):
    """An image and a cotangent with space first, and how the window moves over the image.

    XLA:TPU stores the activations of a convolution in this order, where shifting an image is free.

    Attributes:
        image: (batch, *space, n, channels).
        cotangent: (batch, *positions, n, outputs).
        moves: how the window moves along each axis of space.
    """

    image: jax.Array
    cotangent: jax.Array
    moves: list[Movement]

    def seen(self) -> Iterator[jax.Array]:
        """Yield, for each offset, the pixels that the window sees at all positions."""
        x, positions = self.image, self.cotangent.shape[1:-2]
        sizes = zip(self.moves, x.shape[1:-2], positions, strict=True)
        edges = [move.padded(*size) for move, *size in sizes]
        zero = jnp.zeros([], x.dtype)
        x = lax.pad(x, zero, [(0, 0, 0), *edges, (0, 0, 0), (0, 0, 0)])
        steps = [1, *(move.stride for move in self.moves), 1, 1]
        for offsets in product(*(range(move.window) for move in self.moves)):
            firsts = [o * move.window_dilation for o, move in zip(offsets, self.moves, strict=True)]
            starts = [0, *firsts, 0, 0]
            lengths = [x.shape[0], *positions, *x.shape[-2:]]
            stops = [
                a + (length - 1) * step + 1
                for a, length, step in zip(starts, lengths, steps, strict=True)
            ]
            yield lax.slice(x, starts, stops, steps)


def convolution_bound(
    term: Term, image: jax.Array, cotangent: jax.Array, platform: Platform, kind: str
) -> NormBound:
    """Return the bound of the gradient of a kernel by one of three strategies."""
    x, g = _space_first(term, image, cotangent)
    moves = _movements(term)
    if kind == "Gram matrices of patches":
        few = platform.fuses and x.shape[-1] < platform.lanes // 4
        seen = [_patches(term, x, g, platform)] if few else list(_folded(x, g, moves).seen())
        return _bound_by_gram(seen, g, platform)
    if kind == "by patches":
        return _bound_by_patches(term, x, g, platform)
    sizes = zip(moves, x.shape[1:-2], g.shape[1:-2], strict=True)
    meetings = math.prod(move.most_meetings(*size) for move, *size in sizes)
    return _bound_by_offset(_folded(x, g, moves), meetings, platform)


def _space_first(term: Term, image: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return image and cotangent as (batch, *space, n, channels)."""
    numbers = term.use.equation.params["dimension_numbers"]

    def move(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
        batch, features, *space = (1 + axis for axis in spec)
        return x.transpose([batch, *space, 0, features])

    return move(image, numbers.lhs_spec), move(cotangent, numbers.out_spec)


def _as_batch(x: jax.Array) -> jax.Array:
    """Return (n·batch, *space, channels)."""
    x = jnp.moveaxis(x, -2, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _movements(term: Term) -> list[Movement]:
    """Return how the window of a convolution moves along each axis of space."""
    params, kernel = term.use.equation.params, shape_of(term.use.equation.invars[1])
    window = [kernel[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    padding = [low for low, _ in params["padding"]]
    dilations = params["lhs_dilation"], params["rhs_dilation"]
    items = zip(window, params["window_strides"], padding, *dilations, strict=True)
    return [Movement(*item) for item in items]


def _folded(x: jax.Array, g: jax.Array, moves: list[Movement]) -> Moved:
    """Move s neighbours into the channels, where a stride s divides the window.

    The window then has stride 1 and fewer offsets. Windows that do not overlap have a single one.
    """
    folded = []
    for axis, (move, size) in enumerate(zip(moves, g.shape[1:-2], strict=True), start=1):
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
    return Moved(x, g, folded)


def _bound_by_offset(moved: Moved, meetings: int, platform: Platform) -> NormBound:
    """Form the gradient offset by offset, add up its squares, and forget it."""
    x, g, moves = moved
    m = _abreast(platform, x, g)
    arrange = _examples_first if m == 1 else partial(_side_by_side, abreast=m)
    wide = Moved(arrange(x), arrange(g), moves)
    parts = [_product(part, wide.cotangent, m, platform) for part in wide.seen()]
    total = _sum(sum((part * part for part in parts[1:]), parts[0] * parts[0]), m)
    image, spectral = _squared_norms(x, platform)
    patches = meetings * image, jnp.minimum(meetings * image, len(parts) * spectral)
    return _bound(total, (len(parts), x.shape[-1]), patches, (x, g), platform)


def _bound_by_patches(term: Term, x: jax.Array, g: jax.Array, platform: Platform) -> NormBound:
    """Form the gradient as one product of patches."""
    seen = _patches(term, x, g, platform)
    m = _abreast(platform, seen, g)
    formed = _product(_side_by_side(seen, m), _side_by_side(g, m), m, platform)
    patches = _squared_norms(seen, platform)
    return _bound(_sum(formed * formed, m), (1, seen.shape[-1]), patches, (x, g), platform)


def _patches(term: Term, x: jax.Array, g: jax.Array, platform: Platform) -> jax.Array:
    """Return what the window sees, (batch, *positions, n, channels), by a convolution of XLA."""
    params, rank, n = term.use.equation.params, g.ndim - 3, g.shape[-2]
    last = (0, rank + 1, *range(1, rank + 1))
    seen = lax.conv_general_dilated_patches(
        _as_batch(x),
        [move.window for move in _movements(term)],
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        lax.ConvDimensionNumbers(last, (rank + 1, rank, *range(rank)), last),
        precision=platform.precision,
    )
    return jnp.moveaxis(seen.reshape(n, len(x), *seen.shape[1:]), 0, -2)


def _abreast(platform: Platform, *operands: jax.Array) -> int:
    """Return how many examples fit side by side into the matrix unit: a divisor of n.

    On a mesh of several devices, neighbouring examples may be on different devices.
    """
    channels = max(x.shape[-1] for x in operands)
    fitting = 1 if is_multi_device_mesh() else max(platform.lanes // channels, 1)
    return math.gcd(operands[0].shape[-2], 2 ** int(math.log2(fitting)))


def _examples_first(x: jax.Array) -> jax.Array:
    """Move examples to the front in memory: XLA then does so once, and not for every offset."""
    first = jnp.moveaxis(x, -2, 0)
    flat = compute_once(first.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return jnp.moveaxis(flat.reshape(first.shape), 0, -2)


def _side_by_side(x: jax.Array, abreast: int) -> jax.Array:
    """Merge the channels of m examples: (…, n, channels) → (…, n/m, m·channels)."""
    n, channels = x.shape[-2:]
    return compute_once(x.reshape(*x.shape[:-2], n // abreast, abreast * channels))


def _product(x: jax.Array, g: jax.Array, abreast: int, platform: Platform) -> jax.Array:
    """Return XᵀG of m examples side by side: (n/m, m·channels, m·outputs).

    Only the blocks of one example with itself count; all others are set to zero.
    """
    formed = platform.product("{0}nc,{0}no->nco".format(_AXES[: g.ndim - 2]), x, g)
    rows, columns = (jnp.arange(size) * abreast // size for size in formed.shape[1:])
    return jnp.where(rows[:, None] == columns, formed, jnp.zeros_like(formed))


def _sum(x: jax.Array, abreast: int) -> jax.Array:
    """Return the sum over each example of m examples side by side: (n/m, m·c, m·o) → (n,)."""
    rows = compute_once(jnp.sum(x, axis=-1))  # the barrier fixes the order of additions
    return jnp.sum(rows.reshape(len(x) * abreast, x.shape[1] // abreast), axis=-1)


def _squared_norms(x: jax.Array, platform: Platform) -> tuple[jax.Array, jax.Array]:
    """Return upper bounds on ‖X‖² in the norm of Frobenius and in the spectral norm: (n,) each.

    The first square is the trace of XᵀX. The second one is at most the norm of Frobenius of XᵀX.
    """
    m, channels, rows = _abreast(platform, x), x.shape[-1], math.prod(x.shape[:-2])
    x = _side_by_side(x, m)
    gram = _product(x, x, m, platform)
    dtype, tiny = gram.dtype, float(jnp.finfo(gram.dtype).tiny)
    eye = jnp.eye(gram.shape[-1], dtype=bool)
    trace = _sum(jnp.where(eye, gram, jnp.zeros_like(gram)), m) + 2 * rows * channels * tiny
    trace = trace * platform.growth(rows + channels + 1, dtype)
    return trace, spectral_square(_sum(gram * gram, m), trace, channels, rows, platform)


def _bound(
    total: jax.Array,
    shape: tuple[int, int],
    patches: tuple[jax.Array, jax.Array],
    operands: tuple[jax.Array, jax.Array],
    platform: Platform,
) -> NormBound:
    """Return the bound of a gradient whose squares add up to `total`.

    Let X be the image and P the patches, as matrices with a row for each pixel and each position.
    If the window meets each pixel at most m times, ‖P‖ ≤ √m·‖X‖ in the norm of Frobenius. Each
    offset meets a pixel at most once, so ‖P‖ ≤ √k·‖X‖ in the spectral norm, for k offsets. In any
    case, ‖Σ_t patch_t ⊗ g_t‖ ≤ R = ‖P‖‖g‖. Rounding the rows of g changes each entry by a factor of
    at most 1 ± u, and the gradient by at most u·‖g‖ times the spectral norm of P. An entry of the
    formed gradient F adds up T products, so ‖F − G‖ ≤ T·u′·R, where u′ bounds the error of an
    addition.

    Args:
        total: ‖G‖² as computed, (n,).
        shape: how many products were formed, and how many rows each has.
        patches: bounds on the squares of ‖P‖, in the norm of Frobenius and the spectral norm.
        operands: the image, and the cotangent g.
        platform: the kind of device.
    """
    g = operands[1]
    cotangent, _ = _squared_norms(g, platform)
    grow, length = platform.growth(4, total.dtype), jnp.sqrt(cotangent)
    reach, spectral = (grow * jnp.sqrt(square) * length for square in patches)
    dtype, entries = total.dtype, (*shape, g.shape[-1])
    underflow = 2 * math.prod(entries) * float(jnp.finfo(dtype).tiny)
    exact = root(total + underflow, reach) * platform.growth(sum(entries) / 2 + 1, dtype)
    adding = math.prod(g.shape[:-2]) * platform.unit(dtype) * reach
    upper = jnp.minimum(exact + adding, reach)
    weighting = platform.weighting_error(*operands) * spectral
    return NormBound(root(total, upper), upper, adding + weighting)


def _bound_by_gram(seen: list[jax.Array], g: jax.Array, platform: Platform) -> NormBound:
    """Add up the Gram matrices of all offsets; together they are the Gram matrix of the patches."""

    def inner(part: jax.Array) -> jax.Array:
        flat = part.reshape(math.prod(part.shape[:-2]), *part.shape[-2:])
        return platform.product("tnc,snc->nts", flat, flat)

    grams = [inner(part) for part in seen]
    rounded = seen[0].shape[-1] + len(seen), g.shape[-1]
    weighting = 0.0, platform.weighting_error(seen[0], g)
    gram = Gram(sum(grams[1:], grams[0])[:, None], inner(g)[:, None], *rounded, weighting)
    return bound_by_grams([gram], platform)


def convolution_sums(
    leaf: ParameterLeaf, rounded: Rounded, factors: jax.Array
) -> dict[int, jax.Array]:
    """Return Σᵢ cᵢGᵢ of the leaf that is the kernel of a single convolution, by its index."""
    (term,) = leaf.terms
    weighted = convolution_sum(term, *rounded.of(term, leaf.index), factors, rounded.platform)
    return {leaf.index: to_leaf(term, leaf.index, rounded, weighted)}


def convolution_sum(
    term: Term, image: jax.Array, cotangent: jax.Array, factors: jax.Array, platform: Platform
) -> jax.Array:
    """Return Σᵢ cᵢGᵢ of a kernel: XLA's weight gradient of a batch of all examples.

    The operands are cast to float32, which holds the same numbers, because a convolution of
    bfloat16 numbers would round the sum to bfloat16. Zeros replace pixels that are not finite: an
    example that sees such a pixel has factor 0, and 0 · NaN is NaN.
    """
    equation = term.use.equation
    params, dtype = equation.params, wide_dtype(image, cotangent)
    weighted = platform.rounded(weigh(cotangent, factors), image, cotangent)
    finite = jnp.where(jnp.isfinite(image), image, jnp.zeros_like(image))
    pair = _space_first(term, finite, weighted)
    x, g = (_as_batch(z).astype(dtype) for z in pair)  # all examples are one batch
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
    return gradient
