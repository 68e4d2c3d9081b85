"""Handle convolutions on accelerators without storing gradients.

The gradient of a kernel is the sum of patch_t ⊗ g_t over all positions t of the window, where g_t
is the cotangent at t. The part that belongs to one offset o in the window is G_o = X_oᵀg, where row
t of X_o is the pixel that the window at position t sees at offset o. There are three strategies:

- "by offset" forms G_o for one offset after the other, squares it, and forgets it.
- "by patches", for few channels, makes patches, and forms all G_o in one product.
- "Gram matrices of patches", for few positions, adds up the Gram matrices X_oX_oᵀ. Their sum is the
  Gram matrix of the patches.

For the weighted sum, XLA computes the weight gradient from weighted cotangents.

Arrays have the shape (batch, *space, n, channels) for n examples. XLA:TPU stores the activations of
a convolution in this order of axes, in which a shift of an image costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._jaxpr import shape_of
from optax_lsdp._mesh import is_multi_device_mesh
from optax_lsdp._trees import compute_once, wide_dtype
from optax_lsdp.clipping.bookkeeping._backward import Rounded
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping._rules import Movement, movements
from optax_lsdp.clipping.bookkeeping._strategy import Kind, ParameterLeaf
from optax_lsdp.clipping.bookkeeping._uses import Use
from optax_lsdp.clipping.bookkeeping.strategies.bounds import (
    Gram,
    NormBound,
    bound_by_grams,
    root,
    spectral_square,
)
from optax_lsdp.clipping.bookkeeping.strategies.leaves import to_leaves, weigh

_AXES = "bxyzuvw"  # einsum letters for the axes (batch, *space)


class Convolved(NamedTuple):
    """The gradients of a leaf that is the kernel of one convolution, outside of any scan."""

    leaf: ParameterLeaf
    kind: Kind
    rounded: Rounded

    def bounds(self) -> list[NormBound]:
        """Return the bound of the kernel's gradients."""
        (use,), platform = self.leaf.uses, self.rounded.platform
        return [convolution_bound(use, *self.rounded.pairs[use.path], platform, self.kind)]

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ of the kernel: cᵢ is `factors[i]`, and Gᵢ the gradient of example i."""
        (use,), platform = self.leaf.uses, self.rounded.platform
        total = convolution_sum(use, *self.rounded.pairs[use.path], factors, platform)
        return to_leaves(use, self.leaf, self.rounded, total)


def convolution_bound(
    use: Use, image: jax.Array, cotangent: jax.Array, platform: Platform, kind: Kind
) -> NormBound:
    """Return the bound of the gradient of a kernel, computed by the strategy `kind`.

    Proof for "by offset" and "by patches". Let X be a matrix with one row per pixel of the image.
    Let P be a matrix with one row per position t: the patch at t. Norms are Frobenius norms.

    1. The window has k offsets, and each offset covers a pixel at most once. So ‖P‖ ≤ √k·‖X‖. This
       also holds for the spectral norms of P and X.
    2. The gradient G = Σ_t patch_t ⊗ g_t has ‖G‖ ≤ R = ‖P‖‖g‖.
    3. An entry of the formed gradient F adds up T products, one per position. So ‖F − G‖ ≤ T·u′·R,
       where u′ bounds the error of an addition.
    4. Weighting g by clip factors rounds each entry, which multiplies it by a factor from 1 − u to
       1 + u. This changes the gradient by at most u·‖g‖ times the spectral norm of P.
    """
    params, moves = use.equation.params["dimension_numbers"], movements(use.equation)
    x, g = _space_first(image, params.lhs_spec), _space_first(cotangent, params.out_spec)
    folded, shorter = _folded(x, g.shape[1:-2], moves)
    if kind == "Gram matrices of patches":
        few = platform.fuses and x.shape[-1] < platform.lanes // 4
        seen = [_patches(use, x, platform)] if few else list(_seen(folded, g, shorter))
        return _bound_by_gram(seen, g, platform)
    if kind == "by patches":
        patches = _patches(use, x, platform)
        abreast, channels = _abreast(platform, patches, g), patches.shape[-1]
        seen, wide = [_side_by_side(patches, abreast)], _side_by_side(g, abreast)
        frobenius, spectral = _squared_norms(patches, platform)
    else:
        abreast, channels = _abreast(platform, folded, g), folded.shape[-1]
        arrange = _examples_first if abreast == 1 else partial(_side_by_side, abreast=abreast)
        arranged, wide = arrange(folded), arrange(g)
        seen = list(_seen(arranged, wide, shorter))
        image_square, image_spectral = _squared_norms(folded, platform)
        frobenius = len(seen) * image_square
        spectral = len(seen) * jnp.minimum(image_square, image_spectral)
    formed = [_product(part, wide, abreast, platform) for part in seen]
    total = _sum(sum((part * part for part in formed[1:]), formed[0] * formed[0]), abreast)
    dtype, entries = total.dtype, (len(seen), channels, g.shape[-1])
    length, grow = jnp.sqrt(_squared_norms(g, platform)[0]), platform.growth(4, dtype)
    reach = grow * jnp.sqrt(frobenius) * length
    underflow = 2 * math.prod(entries) * float(jnp.finfo(dtype).tiny)
    exact = root(total + underflow, reach) * platform.growth(sum(entries) / 2 + 1, dtype)
    adding = math.prod(g.shape[:-2]) * platform.unit(dtype) * reach
    upper = jnp.minimum(exact + adding, reach)
    weighting = platform.weighting_error(x, g) * (grow * jnp.sqrt(spectral) * length)
    found = root(total, upper), upper, adding + weighting
    return NormBound(*(x[:, None] for x in found))


def _bound_by_gram(seen: list[jax.Array], g: jax.Array, platform: Platform) -> NormBound:
    """Return the bound from the patches' Gram matrix: the sum of Gram matrices of all offsets."""
    flat = [x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) for x in (*seen, g)]
    *grams, gram_g = (platform.product("tnc,snc->nts", x, x) for x in flat)
    rounded = seen[0].shape[-1] + len(seen), g.shape[-1]
    weighting = 0.0, platform.weighting_error(seen[0], g)
    gram = Gram(sum(grams[1:], grams[0])[:, None], gram_g[:, None], *rounded, weighting)
    return bound_by_grams([gram], platform, gram.g.dtype)


def _space_first(x: jax.Array, spec: tuple[int, ...]) -> jax.Array:
    """Transpose x to (batch, *space, n, channels). `spec` names the axes of one example."""
    batch, features, *space = (1 + axis for axis in spec)
    return x.transpose([batch, *space, 0, features])


def _as_batch(x: jax.Array) -> jax.Array:
    """Reshape x to (n·batch, *space, channels)."""
    x = jnp.moveaxis(x, -2, 0)
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _folded(
    x: jax.Array, positions: Sequence[int], moves: Sequence[Movement]
) -> tuple[jax.Array, list[Movement]]:
    """Move s neighbouring pixels into the channels if the stride s divides the window.

    The window then has stride 1 and fewer offsets: one offset if windows do not overlap.
    """
    shorter = []
    for axis, (move, size) in enumerate(zip(moves, positions, strict=True), start=1):
        if move.stride == 1 or move.offsets == move.window:
            shorter.append(move)
            continue
        length, stride = size + move.offsets - 1, move.stride
        edges = [(0, 0, 0)] * x.ndim
        edges[axis] = move.padding, stride * length - move.padding - x.shape[axis], 0
        x = lax.pad(x, jnp.zeros([], x.dtype), edges)
        x = x.reshape(*x.shape[:axis], length, stride, *x.shape[axis + 1 :])
        x = jnp.moveaxis(x, axis + 1, -2)
        x = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
        shorter.append(Movement(move.offsets, 1, 0, 1, 1))
    return x, shorter


def _seen(x: jax.Array, g: jax.Array, moves: Sequence[Movement]) -> Iterator[jax.Array]:
    """Yield, for each offset, the pixels that the window sees at all positions."""
    positions = g.shape[1:-2]
    sizes = zip(moves, x.shape[1:-2], positions, strict=True)
    edges = [move.padded(*size) for move, *size in sizes]
    x = lax.pad(x, jnp.zeros([], x.dtype), [(0, 0, 0), *edges, (0, 0, 0), (0, 0, 0)])
    steps = [1, *(move.stride for move in moves), 1, 1]
    reach = [(size - 1) * move.stride + 1 for size, move in zip(positions, moves, strict=True)]
    for offsets in product(*(range(move.window) for move in moves)):
        firsts = [o * move.window_dilation for o, move in zip(offsets, moves, strict=True)]
        lasts = [first + length for first, length in zip(firsts, reach, strict=True)]
        yield lax.slice(x, [0, *firsts, 0, 0], [len(x), *lasts, *x.shape[-2:]], steps)


def _patches(use: Use, x: jax.Array, platform: Platform) -> jax.Array:
    """Return patches of shape (batch, *positions, n, channels), computed by a convolution."""
    params, rank, n = use.equation.params, x.ndim - 3, x.shape[-2]
    last = (0, rank + 1, *range(1, rank + 1))
    seen = lax.conv_general_dilated_patches(
        _as_batch(x),
        [move.window for move in movements(use.equation)],
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

    On a mesh, return 1, because neighbouring examples may be on different devices.
    """
    channels = max(x.shape[-1] for x in operands)
    fitting = 1 if is_multi_device_mesh() else max(platform.lanes // channels, 1)
    return math.gcd(operands[0].shape[-2], 2 ** int(math.log2(fitting)))


def _examples_first(x: jax.Array) -> jax.Array:
    """Make examples the first axis in memory, so that XLA moves x once, not for every offset."""
    first = jnp.moveaxis(x, -2, 0)
    flat = compute_once(first.reshape(math.prod(x.shape[:-1]), x.shape[-1]))
    return jnp.moveaxis(flat.reshape(first.shape), 0, -2)


def _side_by_side(x: jax.Array, abreast: int) -> jax.Array:
    """Merge the channels of m = `abreast` examples: (…, n, channels) → (…, n/m, m·channels)."""
    n, channels = x.shape[-2:]
    return compute_once(x.reshape(*x.shape[:-2], n // abreast, abreast * channels))


def _product(x: jax.Array, g: jax.Array, abreast: int, platform: Platform) -> jax.Array:
    """Return Xᵀg of shape (n/m, m·channels, m·outputs), for m = `abreast` examples side by side.

    Blocks that combine two different examples are set to zero.
    """
    formed = platform.product("{0}nc,{0}no->nco".format(_AXES[: g.ndim - 2]), x, g)
    rows, columns = (jnp.arange(size) * abreast // size for size in formed.shape[1:])
    return jnp.where(rows[:, None] == columns, formed, jnp.zeros_like(formed))


def _sum(x: jax.Array, abreast: int) -> jax.Array:
    """Return the sum over each example's block of x; `_product` defines the blocks."""
    rows = compute_once(jnp.sum(x, axis=-1))  # the barrier fixes the order of additions
    return jnp.sum(rows.reshape(len(x) * abreast, x.shape[1] // abreast), axis=-1)


def _squared_norms(x: jax.Array, platform: Platform) -> tuple[jax.Array, jax.Array]:
    """Return upper bounds on ‖X‖² in the Frobenius norm and in the spectral norm.

    X is the matrix of one example, with one row per pixel of `x`. The first bound is the trace of
    XᵀX. The second is the Frobenius norm of XᵀX, which is at least the square of the spectral norm
    of X. Both have shape (n,) and are rounded up.
    """
    m, channels, rows = _abreast(platform, x), x.shape[-1], math.prod(x.shape[:-2])
    x = _side_by_side(x, m)
    gram = _product(x, x, m, platform)
    dtype, tiny = gram.dtype, float(jnp.finfo(gram.dtype).tiny)
    eye = jnp.eye(gram.shape[-1], dtype=bool)
    trace = _sum(jnp.where(eye, gram, jnp.zeros_like(gram)), m) + 2 * rows * channels * tiny
    trace = trace * platform.growth(rows + channels + 1, dtype)
    square = _sum(gram * gram, m)
    return trace, spectral_square(square, trace, channels, rows, platform, square.dtype)


def convolution_sum(
    use: Use, image: jax.Array, cotangent: jax.Array, factors: jax.Array, platform: Platform
) -> jax.Array:
    """Return Σᵢ cᵢGᵢ of a kernel, which XLA computes as a weight gradient from weighted cotangents.

    The operands are cast to float32, which holds the same numbers, because a convolution of
    bfloat16 numbers would round the sum to bfloat16. Zeros replace pixels that are not finite: an
    example that sees such a pixel has factor 0, and 0 · NaN is NaN.
    """
    equation = use.equation
    params, numbers = equation.params, equation.params["dimension_numbers"]
    weighted = platform.rounded(weigh(cotangent, factors), image, cotangent)
    finite = jnp.where(jnp.isfinite(image), image, jnp.zeros_like(image))
    pair = _space_first(finite, numbers.lhs_spec), _space_first(weighted, numbers.out_spec)
    x, g = (_as_batch(z).astype(wide_dtype(image, cotangent)) for z in pair)  # (n·batch, …)
    rank = g.ndim - 2
    last = (0, rank + 1, *range(1, rank + 1))

    def convolve(kernel: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            lax.ConvDimensionNumbers(last, numbers.rhs_spec, last),
            precision=platform.precision,
        )

    kernel = jax.ShapeDtypeStruct(shape_of(equation.invars[1]), x.dtype)
    (gradient,) = jax.linear_transpose(convolve, kernel)(g)
    return gradient
