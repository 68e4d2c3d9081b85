"""Smooth with a banded matrix, if σ is a known number.

Smoothing multiplies by the inverse of an `Operator` A. Far from the diagonal, the entries of A⁻¹
are too small to change a float. Without these entries, A⁻¹ is a band matrix. `smooth_banded`
supports any order. It cuts the input into blocks and multiplies them by a few small matrices, which
together hold the band.

`smooth_in_blocks` smooths large leaves on TPUs. A leaf is an array of shape (space, inputs,
outputs), and blocks are ranges of its inputs. A TPU takes longer to transpose or pad an array than
to multiply it by a block's matrix. So nothing is padded, and the axes keep their order. Products
take three passes of the matrix unit (`Precision.HIGH`), not six. Three passes round each operand to
a sum of two bfloat16 numbers, so an entry has an error of at most `ERROR` times the largest entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._layout import Arrangement, Leaf
from optax_lsdp.smoothing._spectrum import Boundary, line_kernel
from optax_lsdp.smoothing.methods.spectral import Operator

_WIDTHS = (32, 64, 128, 256)
# The largest error, in units of the largest entry. Rounding either operand costs 2⁻¹⁸, and so does
# leaving out the product of the lower halves. The weights of an entry add up to 1.
ERROR = 2.0**-15
_PACKED = 2**16  # leaves with at most this many entries are smoothed together; see `halo`
_LANES, _SUBLANES = 128, 8  # a TPU stores arrays in tiles of 8 × 128
_STEP = 2**20  # most entries per step of a loop, for few columns; vectors take a quarter of this
_WIDE = 2048  # with fewer columns, one product per step would be too small
_ROWS = 256  # entries per column in one product of a step
_PRECISION = jax.lax.Precision.HIGH


def band_reach(operator: Operator, dtype: jnp.dtype) -> int:
    """Return how many entries the band has on either side of the diagonal."""
    return len(_half_kernel(operator, dtype)) - 1


def _half_kernel(operator: Operator, dtype: jnp.dtype) -> np.ndarray:
    error = float(jnp.finfo(dtype).eps) / 8
    return line_kernel(float(operator.smoothing), operator.order, error)


def smooth_banded(x: jax.Array, operator: Operator, dims: int) -> jax.Array:
    """Return A⁻¹ x along the last axis of x. σ must be a number, and `dims` must be 1."""
    del dims
    half = _half_kernel(operator, x.dtype)
    reach, size = len(half) - 1, x.shape[-1]
    rows = x.shape[:-1]
    beside_rows = [(0, 0)] * len(rows)
    width = next((w for w in _WIDTHS if w >= reach), _WIDTHS[-1])
    beside = -(-reach // width)  # how many blocks on each side the band touches
    count = -(-size // width)
    halo = beside * width
    mode = "wrap" if operator.boundary == "periodic" else "symmetric"
    near = min(halo, size)  # the band does not reach around the ring more than once
    padded = jnp.pad(x, [*beside_rows, (near, near)], mode=mode)
    missing = count * width - size
    padded = jnp.pad(padded, [*beside_rows, (halo - near, halo - near + missing)])
    blocks = padded.reshape(*rows, count + 2 * beside, width)
    place = np.arange(width)
    total = jnp.zeros((*rows, count, width), x.dtype)
    for offset in range(2 * beside + 1):
        distance = np.abs(place + (beside - offset) * width - place[:, None])
        weights = np.where(distance <= reach, half[np.minimum(distance, reach)], 0)
        total += jnp.matmul(
            blocks[..., offset : offset + count, :],
            jnp.asarray(weights, x.dtype),
            precision=jax.lax.Precision.HIGHEST,
        )
    return total.reshape(*rows, count * width)[..., :size]


class Blocking(NamedTuple):
    """How to smooth a leaf in blocks; hashable."""

    shape: tuple[int, int, int]  # (space, inputs, outputs); a vector is (1, entries, 1)
    is_transposed: bool  # whether the leaf is stored as (outputs, inputs)
    width: int | None  # inputs per block, a divisor of `inputs`; None to smooth in steps
    half: tuple[float, ...]  # the kernel from its centre to one side
    boundary: Boundary

    @property
    def reach(self) -> int:
        """The number of neighbours on each side on which a smoothed entry depends."""
        return len(self.half) - 1


def choose_blocking(leaf: Leaf, operator: Operator) -> Blocking | None:
    """Return how to smooth a leaf in blocks, or None if blocks do not suit the leaf or σ."""
    array, arrangement = leaf.array, leaf.arrangement
    if not isinstance(operator.smoothing, float) or operator.order > 1 or leaf.is_split:
        return None
    if any(leaf.spec) or array.size <= _PACKED or wide_dtype(array) != jnp.float32:
        return None
    found = _as_columns(arrangement)
    if found is None:
        return None
    half = tuple(map(float, _half_kernel(operator, jnp.dtype("float32"))))
    shape, is_transposed = found
    space, inputs, outputs = shape
    if len(half) - 1 > _LANES:
        return None
    blocking = Blocking(shape, is_transposed, None, half, operator.boundary)
    if outputs == 1:
        return blocking if inputs >= _STEP // 2 else None
    if space == 1:
        widths = range(_LANES, blocking.reach - 1, -_SUBLANES)
        fitting = (width for width in widths if inputs % width == 0 and inputs >= 2 * width)
        blocking = blocking._replace(width=next(fitting, None))
    rows, beside = _step(blocking)
    return blocking if blocking.width or inputs >= rows + 2 * beside else None


def smooth_in_blocks(array: jax.Array, blocking: Blocking) -> jax.Array:
    """Return the smoothed leaf, in float32."""
    _, inputs, outputs = blocking.shape
    if outputs == 1:
        return _smooth_vector(array.reshape(-1), blocking).reshape(array.shape)
    if blocking.shape[0] > 1:
        return _smooth_kernels(array.reshape(blocking.shape), blocking).reshape(array.shape)
    smooth = _smooth_blocks if blocking.width else _smooth_in_steps
    if blocking.is_transposed:
        return smooth(array.T, blocking).T
    return smooth(array.reshape(inputs, outputs), blocking).reshape(array.shape)


def _as_columns(arrangement: Arrangement) -> tuple[tuple[int, int, int], bool] | None:
    """Return a leaf's sizes (space, inputs, outputs), and whether it is stored transposed.

    Return None if the leaf is not one row of neighbours, or if its order does not suit blocks.
    """
    shape, order, rank = arrangement.shape, arrangement.order, len(arrangement.shape)
    if arrangement.trailing != rank or len(arrangement.grid) > 1 or arrangement.reshapes:
        return None
    if rank == 1:
        return (1, shape[0], 1), False
    if order == (rank - 1, rank - 2, *range(rank - 2)):
        return (math.prod(shape[:-2]), shape[-2], shape[-1]), False
    if order == (0, 1):
        return (1, shape[1], shape[0]), True
    return None


def _band(blocking: Blocking, results: np.ndarray, operands: np.ndarray) -> jax.Array:
    """Return the submatrix of A⁻¹ with the row indices `results` and columns `operands`."""
    distance = np.abs(results[:, None] - operands)
    weights = np.asarray(blocking.half)[np.minimum(distance, blocking.reach)]
    return jnp.asarray(np.where(distance <= blocking.reach, weights, 0), jnp.float32)


def _block_matrices(blocking: Blocking, width: int) -> jax.Array:
    """Return the matrices that multiply the previous block, the block itself and the next block."""
    place = np.arange(width)
    return jnp.stack([_band(blocking, place, place + shift * width).T for shift in (-1, 0, 1)])


def _beyond(first: jax.Array, last: jax.Array, boundary: Boundary) -> tuple[jax.Array, jax.Array]:
    """Return the entries before the `first` and after the `last` entries of each column.

    All four arrays have shape (entries, columns). The last entry of a column is the neighbour of
    the first entry of the next column. On a ring, the first column follows the last. Otherwise,
    both ends are reflected.
    """
    before, after = jnp.roll(last, 1, axis=1), jnp.roll(first, -1, axis=1)
    if boundary == "neumann":
        before = before.at[:, 0].set(first[::-1, 0])
        after = after.at[:, -1].set(last[::-1, -1])
    return before, after


def _convolve(blocks: jax.Array, matrices: jax.Array, padding: int) -> jax.Array:
    """Return Σ_d matrices[d]ᵀ blocks[b + d] for every block b, of shape (entries, columns).

    `padding` blocks of zeros are first added on either side.
    """
    return jax.lax.conv_general_dilated(
        blocks,
        matrices,
        (1,),
        [(padding, padding)],
        dimension_numbers=("HCN", "HIO", "HCN"),
        precision=_PRECISION,
    )


def _smooth_blocks(columns: jax.Array, blocking: Blocking) -> jax.Array:
    """Smooth all blocks at once. `columns` has shape (inputs, outputs)."""
    inputs, outputs = columns.shape
    width = blocking.width or inputs
    blocks = columns.reshape(inputs // width, width, outputs)
    matrices = _block_matrices(blocking, width)
    before, after = _beyond(blocks[0], blocks[-1], blocking.boundary)
    smoothed = _convolve(blocks, matrices, padding=1)
    smoothed = smoothed.at[0].add(_product(matrices[0].T, before))
    smoothed = smoothed.at[-1].add(_product(matrices[2].T, after))
    return smoothed.reshape(inputs, outputs)


def _step(blocking: Blocking) -> tuple[int, int]:
    """Return how many inputs a step smooths, and how many more it reads on either side."""
    space, inputs, outputs = blocking.shape
    if space > 1:
        beside = -(-blocking.reach // (space * _SUBLANES)) * _SUBLANES
        return max(1, _ROWS // (space * _SUBLANES)) * _SUBLANES, beside
    if outputs >= _WIDE:
        return _ROWS, -(-blocking.reach // _SUBLANES) * _SUBLANES
    blocks = min(_STEP // (_LANES * outputs), inputs // _LANES - 2)
    return max(1, blocks) * _LANES, _LANES


def _smooth_in_steps(columns: jax.Array, blocking: Blocking) -> jax.Array:
    """Smooth a few inputs at a time. `columns` has shape (inputs, outputs)."""
    outputs = columns.shape[1]
    rows, beside = _step(blocking)
    matrices = _block_matrices(blocking, _LANES)
    weights = _band(blocking, np.arange(rows), np.arange(-beside, rows + beside))

    def filtered(slab: jax.Array) -> jax.Array:
        if outputs >= _WIDE:
            return _product(weights, slab)
        blocks = slab.reshape(-1, _LANES, outputs)
        return _convolve(blocks, matrices, padding=0).reshape(-1, outputs)

    before, after = _beyond(columns[:beside], columns[-beside:], blocking.boundary)
    return _in_steps(columns, filtered, rows, (before, after))


def _smooth_kernels(kernels: jax.Array, blocking: Blocking) -> jax.Array:
    """Smooth a few inputs at a time. `kernels` has shape (space, inputs, outputs)."""
    space, _, outputs = kernels.shape
    count, beside = _step(blocking)

    def places(start: int, stop: int) -> np.ndarray:
        return (np.arange(space)[:, None] + space * np.arange(start, stop)).reshape(-1)

    weights = _band(blocking, places(0, count), places(-beside, count + beside))
    weights = weights.reshape(space, count, space, count + 2 * beside)

    def filtered(slab: jax.Array) -> jax.Array:
        return jnp.einsum("tjsi,sic->tjc", weights, slab, precision=_PRECISION)

    start, stop = (end.reshape(-1, outputs) for end in (kernels[:, :beside], kernels[:, -beside:]))
    beyond = _beyond(start, stop, blocking.boundary)
    before, after = (end.reshape(space, beside, outputs) for end in beyond)
    return _in_steps(kernels, filtered, count, (before, after), axis=1)


def _smooth_vector(vector: jax.Array, blocking: Blocking) -> jax.Array:
    """Smooth a long vector in steps of 2¹⁸ entries, by products with blocks of 128 entries."""
    matrices = _block_matrices(blocking, _LANES)

    def filtered(slab: jax.Array) -> jax.Array:
        blocks = slab.reshape(-1, _LANES)
        parts = (blocks[:-2], blocks[1:-1], blocks[2:])
        return sum(map(_product, parts, matrices), jnp.zeros([], slab.dtype)).reshape(-1)

    ends = vector[:_LANES, None], vector[-_LANES:, None]
    before, after = (side[:, 0] for side in _beyond(*ends, blocking.boundary))
    return _in_steps(vector, filtered, _STEP // 4, (before, after))


def _in_steps(
    line: jax.Array,
    filtered: Callable[[jax.Array], jax.Array],
    size: int,
    beyond: tuple[jax.Array, jax.Array],
    axis: int = 0,
) -> jax.Array:
    """Smooth `size` entries of an axis at a time.

    `beyond` is a pair of arrays of equal length k: the entries before and after the line. A slab is
    `size` entries with k more on each side. `filtered` maps a slab to its smoothed middle. If
    `size` does not divide the length of the line, the last slab starts earlier and smooths some
    entries again, so nothing is padded.
    """
    before, after = beyond
    beside, length = before.shape[axis], line.shape[axis]
    cut = partial(jax.lax.dynamic_slice_in_dim, line, axis=axis)
    put = partial(jax.lax.dynamic_update_slice_in_dim, axis=axis)
    head, tail = cut(0, size + beside), cut(length - size - beside, size + beside)
    first, last = (filtered(jnp.concatenate(x, axis)) for x in ([before, head], [tail, after]))
    smoothed = vary(jnp.zeros(line.shape, line.dtype), varying_axes(line))

    def step(index: jax.Array, smoothed: jax.Array) -> jax.Array:
        start = jnp.minimum((index + 1) * size, length - size - beside)
        slab = cut(start - beside, size + 2 * beside)
        return put(smoothed, filtered(slab), start)

    smoothed = jax.lax.fori_loop(0, max(0, -(-(length - 2 * size) // size)), step, smoothed)
    return put(put(smoothed, first, 0), last, length - size)


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=_PRECISION)
