"""Define the rules: each rule computes the factors of a weight's gradient for one primitive.

A rule treats the weight as a matrix, or as several matrices, called blocks. The gradient of each
block is Σ_t a_t ⊗ g_t, where a_t and g_t are the rows of two factors, a and g. The factor a depends
on the other operand, and has the shape (blocks, rows, inputs). The factor g depends on the
cotangent of the output, and has the shape (blocks, rows, outputs). All functions here are written
for one example.

To support another primitive, write a `Rule` and add it to `RULES`. Primitives without a rule work
too: the engine then differentiates with respect to the parameter, for each example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from optax_lsdp._jaxpr import Equation, shape_of


class Matrix(NamedTuple):
    """How to convert a weight to shape (blocks, inputs, outputs): reshape, transpose, merge.

    Attributes:
        split: the shape after the reshape.
        blocks: the axes of `split` that become blocks.
        inputs: the axes that become inputs.
        outputs: the axes that become outputs.
    """

    split: tuple[int, ...]
    blocks: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (blocks, inputs, outputs)."""
        return tuple(math.prod(self.split[axis] for axis in axes) for axes in self[1:])


class Rule(NamedTuple):
    """How to get the factors of a gradient for one primitive with two operands.

    All functions get the equation, and `place`: 0 if the weight is the first operand, 1 if it is
    the second.

    Attributes:
        matrix: (equation, place) → the weight as a `Matrix`, or None if the rule does not apply.
        factors: (equation, place, other operand, cotangent) → a and g. If the rows of a are
            one-hot, a holds the index of the 1 in each row instead: int32 of shape (blocks, rows),
            −1 for a row of zeros.
        operand_key: (equation, place) → a key. If two uses of one operand have equal keys, they
            have equal factors a.
        is_one_hot: whether the rows of a are one-hot.
        expands: whether a is larger than the operand, as patches are larger than their image.
    """

    matrix: Callable[[Equation, int], Matrix | None]
    factors: Callable[[Equation, int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    operand_key: Callable[[Equation, int], Hashable] = lambda equation, place: id(equation)
    is_one_hot: bool = False
    expands: bool = False


def _matmul_axes(equation: Equation, place: int) -> tuple[tuple[int, ...], ...]:
    """Return the batch, contracting and free axes of one operand of a matrix product."""
    contracting, batch = equation.params["dimension_numbers"]
    used = (*batch[place], *contracting[place])
    free = (i for i in range(len(shape_of(equation.invars[place]))) if i not in used)
    return tuple(batch[place]), tuple(contracting[place]), tuple(free)


def _matmul_matrix(equation: Equation, place: int) -> Matrix:
    return Matrix(shape_of(equation.invars[place]), *_matmul_axes(equation, place))


def _matmul_factors(
    equation: Equation, place: int, operand: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    batch, contracting, free = _matmul_axes(equation, 1 - place)
    blocks = math.prod(operand.shape[axis] for axis in batch)
    rows = math.prod(operand.shape[axis] for axis in free)
    a = operand.transpose([*batch, *free, *contracting]).reshape(blocks, rows, -1)
    if place == 0:  # the output has the weight's free axes before the operand's
        last, outputs = len(batch) + len(_matmul_axes(equation, place)[2]), cotangent.ndim
        order = [*range(len(batch)), *range(last, outputs), *range(len(batch), last)]
        cotangent = cotangent.transpose(order)
    return a, cotangent.reshape(blocks, rows, -1)


def _matmul_operand_key(equation: Equation, place: int) -> Hashable:
    return _matmul_axes(equation, 1 - place)[:2]


class Movement(NamedTuple):
    """How the window of a convolution moves along one axis of an image."""

    window: int
    stride: int
    padding: int
    image_dilation: int
    window_dilation: int

    @property
    def offsets(self) -> int:
        """Return how many offsets the window has after the engine has shortened it.

        If the stride divides the window, the engine moves `stride` neighbouring pixels into the
        channels, and window/stride offsets are left. With dilations or any other stride, all
        offsets are left.
        """
        is_plain = self.image_dilation == self.window_dilation == 1
        is_folded = is_plain and self.window % self.stride == 0
        return self.window // self.stride if is_folded else self.window

    def padded(self, size: int, positions: int) -> tuple[int, int, int]:
        """Return the padding (low, high, interior) that keeps the window inside the image.

        `size` is the length of the image axis. The window takes `positions` positions along it.
        """
        reach = (self.window - 1) * self.window_dilation + (positions - 1) * self.stride + 1
        length = (size - 1) * self.image_dilation + 1
        return self.padding, reach - self.padding - length, self.image_dilation - 1


def movements(equation: Equation) -> list[Movement]:
    """Return how the window of a convolution moves along each spatial axis."""
    params, kernel = equation.params, shape_of(equation.invars[1])
    window = [kernel[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    padding = [low for low, _ in params["padding"]]
    dilations = params["lhs_dilation"], params["rhs_dilation"]
    items = zip(window, params["window_strides"], padding, *dilations, strict=True)
    return [Movement(*item) for item in items]


def _conv_matrix(equation: Equation, place: int) -> Matrix | None:
    """Return how to convert a kernel to (feature groups, window × inputs, outputs)."""
    params = equation.params
    if place != 1 or params["batch_group_count"] != 1:
        return None
    shape, groups = shape_of(equation.invars[1]), params["feature_group_count"]
    outputs, inputs, *window = params["dimension_numbers"].rhs_spec

    split = (*shape[:outputs], groups, shape[outputs] // groups, *shape[outputs + 1 :])
    after_split = tuple(axis + (axis > outputs) for axis in (*window, inputs))
    return Matrix(split, (outputs,), after_split, (outputs + 1,))


def _conv_factors(
    equation: Equation, place: int, image: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the patches a: (groups, positions, inputs), and g: (groups, positions, outputs)."""
    del place
    groups = equation.params["feature_group_count"]
    numbers = equation.params["dimension_numbers"]
    batch, features, *space = numbers.out_spec
    g = cotangent.transpose([batch, *space, features])
    g = g.reshape(math.prod(g.shape[:-1]), groups, -1)
    a = patches(equation, image)  # (batch, *positions, *window, features)
    a = a.reshape(len(g), -1, groups, a.shape[-1] // groups)
    a = a.transpose(2, 0, 1, 3).reshape(groups, len(g), -1)
    return a, g.transpose(1, 0, 2)


def patches(equation: Equation, image: jax.Array) -> jax.Array:
    """Return an image's patches, an array of shape (batch, *positions, *window, features).

    The loop cuts one axis at a time, so the number of slices is the sum of the window's sizes, not
    their product.
    """
    params = equation.params
    batch, features, *space = params["dimension_numbers"].lhs_spec
    image = image.transpose([batch, *space, features])
    edges = zip(params["padding"], params["lhs_dilation"], strict=True)
    padding = [(0, 0, 0), *((low, high, d - 1) for (low, high), d in edges), (0, 0, 0)]
    image = jax.lax.pad(image, jnp.zeros([], image.dtype), padding)
    positions = [shape_of(equation.outvars[0])[i] for i in params["dimension_numbers"].out_spec[2:]]
    for i, move in enumerate(movements(equation)):
        reach = move.stride * (positions[i] - 1) + 1
        firsts = [k * move.window_dilation for k in range(move.window)]
        slices = [
            jax.lax.slice_in_dim(image, first, first + reach, move.stride, 1 + i)
            for first in firsts
        ]
        image = jnp.stack(slices, axis=1 + len(space) + i)
    return image


def _table_axis(equation: Equation) -> int | None:
    """Return the axis along which a gather selects whole slices, with one index per slice.

    Return None if the gather selects anything else.
    """
    numbers = equation.params["dimension_numbers"]
    shape, sizes = shape_of(equation.invars[0]), equation.params["slice_sizes"]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    axis = numbers.start_index_map[0]
    wanted = tuple(1 if i == axis else size for i, size in enumerate(shape))
    if tuple(sizes) != wanted or tuple(numbers.collapsed_slice_dims) != (axis,):
        return None
    return axis


def _gather_matrix(equation: Equation, place: int) -> Matrix | None:
    axis = _table_axis(equation) if place == 0 else None
    if axis is None:
        return None
    shape = shape_of(equation.invars[0])
    return Matrix(shape, (), (axis,), tuple(i for i in range(len(shape)) if i != axis))


def _gather_factors(
    equation: Equation, place: int, indices: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the indices of the gathered rows, of shape (1, rows), and g: (1, rows, outputs)."""
    size = shape_of(equation.invars[place])[_table_axis(equation) or 0]
    offsets = equation.params["dimension_numbers"].offset_dims
    kept = [i for i in range(cotangent.ndim) if i not in offsets]
    g = cotangent.transpose([*kept, *offsets])
    ids = indices.reshape(1, -1)
    last = jnp.asarray(size - 1, ids.dtype) if size - 1 <= jnp.iinfo(ids.dtype).max else None
    inside = ids >= 0 if last is None else (ids >= 0) & (ids <= last)
    if equation.params["mode"] == GatherScatterMode.CLIP:
        ids = jnp.maximum(ids if last is None else jnp.minimum(ids, last), 0).astype(jnp.int32)
    else:  # indices outside of the table select a fill value, which has no gradient
        ids = jnp.where(inside, jnp.where(inside, ids, 0).astype(jnp.int32), -1)
    return ids, g.reshape(1, ids.shape[1], -1)


MATMUL = Rule(_matmul_matrix, _matmul_factors, _matmul_operand_key)  # weight: either operand
CONVOLUTION = Rule(_conv_matrix, _conv_factors, expands=True)  # any rank, stride, padding, dilation
EMBEDDING = Rule(_gather_matrix, _gather_factors, is_one_hot=True)  # whole rows of a table
RULES = {"dot_general": MATMUL, "conv_general_dilated": CONVOLUTION, "gather": EMBEDDING}
