"""Decide which entries of a leaf are neighbours, and arrange leaves as rows of neighbours."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import numpy as np

from optax_lsdp._checks import check_choice
from optax_lsdp._mesh import Shard, axis_names, axis_size
from optax_lsdp._trees import path_name

LAYOUTS = ("inputs", "stored", "images")
Scope = Literal["leaf", "tree"]
_SMALLEST_SIDE = 4  # pixels per side of the smallest image that "images" looks for
_ENOUGH = 2**16  # entries of a leaf that suffice to choose its smoothing
_UNITS = 128  # `enough_units` keeps a multiple of 128 output units, which large meshes can split


@dataclass(frozen=True)
class Grid:
    """A grid of neighbours: smoothing applies (I − σ Σₐ Lₐ)⁻¹, where the sum runs over `axes`.

    Lₐ is the second difference along axis a. Entries that differ along any other axis are not
    neighbours. So `Grid((0,))` turns a Dense kernel of shape (in, out) into one ring per output
    unit. `Grid((0, 1))` smooths each H × W window of a Conv kernel of shape (H, W, in, out) by
    itself.

    Attributes:
        axes: the axes along which entries are neighbours.
        shape: the shape to which the leaf is reshaped first, in row-major order. None keeps the
            leaf's shape. For a Dense kernel of shape (784, 10) on images of 28 × 28 pixels, use
            (28, 28, 10).

    >>> Grid(axes=(0, 1), shape=(28, 28, 10))
    Grid(axes=(0, 1), shape=(28, 28, 10))
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_tuple("Grid.axes", self.axes, -math.inf)
        if self.shape is not None:
            _check_tuple("Grid.shape", self.shape, 1)


Named = Literal["inputs", "stored", "images"]
Layout = Named | Callable[[str, tuple[int, ...]], Named | Grid | None]


class Arrangement(NamedTuple):
    """How to arrange a leaf as rows of neighbours, or as grids of neighbours."""

    shape: tuple[int, ...]  # first reshape the leaf to this shape
    order: tuple[int, ...]  # then transpose its axes into this order
    trailing: int  # how many of the last axes then hold neighbours; the axes before them index rows
    grid: tuple[int, ...]  # the sizes of the trailing axes, or their product if they form one row
    reshapes: bool = False  # whether `shape` differs from the leaf's shape

    def shape_of(self, array: jax.Array) -> tuple[int, ...]:
        """Return `shape` if `array` is the whole leaf, and the array's shape if it is a shard."""
        return self.shape if array.size == math.prod(self.shape) else array.shape

    def transpose(self, array: jax.Array) -> jax.Array:
        """Return a leaf, or a shard of it, with the axes that hold neighbours last."""
        return array.reshape(self.shape_of(array)).transpose(self.order)

    def arrange(self, array: jax.Array) -> jax.Array:
        """Return a leaf, or a shard that contains whole grids, in the shape (…, *grid)."""
        transposed = self.transpose(array)
        return transposed.reshape(*transposed.shape[: transposed.ndim - self.trailing], *self.grid)

    def restore(self, arranged: jax.Array, array: jax.Array) -> jax.Array:
        """Undo `arrange` or `transpose`. The result has the shape and dtype of `array`."""
        transposed_shape = [self.shape_of(array)[axis] for axis in self.order]
        restored = arranged.reshape(transposed_shape).transpose(np.argsort(self.order))
        return restored.reshape(array.shape).astype(array.dtype)


class Leaf(NamedTuple):
    """A leaf to smooth, or this device's shard of it."""

    array: jax.Array
    arrangement: Arrangement  # of the whole leaf
    spec: jax.P  # how `shard_map` splits the leaf
    is_split: bool  # whether several devices may hold parts of the leaf, in `shard_map` or `jit`


def arrange_leaf(layout: Layout, path: str, array: jax.Array, shard: Shard) -> Leaf | None:
    """Return the leaf at `path` and its arrangement. Return None if the layout excludes it."""
    if not array.size:
        return None
    spec = shard.spec
    if len(spec) > array.ndim:
        raise ValueError(
            "`shard_specs` must have at most as many entries as an array has dimensions, got "
            f"{spec} for the shape {array.shape} at {path!r}; pass a tree of PartitionSpecs."
        )
    unnamed = (shard.varying or frozenset()) - set(shard.named)
    if unnamed:
        raise ValueError(
            "`shard_specs` must name all mesh axes over which `updates` vary inside shard_map, got "
            f"updates that also vary over {', '.join(sorted(unnamed))} at {path!r}; name these "
            "axes if each device holds a part of the leaf, or add partial sums with jax.lax.psum."
        )
    shape = list(array.shape)
    for axis, entry in enumerate(spec):
        shape[axis] *= axis_size(axis_names(entry))
    arrangement = _choose(layout, path, tuple(shape))
    return None if arrangement is None else Leaf(array, arrangement, spec, shard.is_split)


def check_layout(layout: object) -> None:
    """Raise unless `layout` is a known name or a function."""
    if isinstance(layout, Grid):
        raise ValueError(
            f"`layout` must be a function of a leaf's path and shape, got {layout!r}; let the "
            "function return this Grid for the leaves that it fits, and None for other leaves."
        )
    if not callable(layout):
        check_choice("layout", layout, LAYOUTS)


def _choose(layout: Layout, path: str, shape: tuple[int, ...]) -> Arrangement | None:
    """Return a leaf's arrangement, or None to leave the leaf unchanged."""
    path = path.removesuffix("/value")  # NNX stores a variable's array under this name
    chosen = layout(path, shape) if callable(layout) else layout
    if isinstance(chosen, str) and chosen == "images":
        chosen = _image_grid(path, shape)
    if chosen is None:
        return None
    if isinstance(chosen, Grid):
        return _arrange_grid(chosen, path, shape)
    if not isinstance(chosen, str) or chosen not in LAYOUTS:
        raise ValueError(
            "`layout` must give 'inputs', 'stored', 'images', a Grid or None, got "
            f"{chosen!r} for {path!r}."
        )
    order = _inputs_order(path, len(shape)) if chosen == "inputs" else tuple(range(len(shape)))
    return Arrangement(shape, order, len(shape), (math.prod(shape),))


def _check_tuple(name: str, value: object, least: float) -> None:
    if not (isinstance(value, tuple | list) and all(type(n) is int and n >= least for n in value)):
        kind = "whole numbers" if least < 0 else "positive whole numbers"
        raise ValueError(f"`{name}` must be a tuple of {kind}, got {value!r}.")


def _inputs_order(path: str, rank: int) -> tuple[int, ...]:
    """Return the order of the axes in which a leaf is (out, in, space), so inputs are neighbours.

    Flax, Haiku and plain JAX store (space, in, out). Equinox and PyTorch store (out, in, space), in
    arrays named `weight` or `weight_…`.
    """
    if rank < 2 or _has_outputs_first(path):
        return tuple(range(rank))
    return (rank - 1, rank - 2, *range(rank - 2))


def _unit_axis(path: str, rank: int) -> int | None:
    """Return the axis of the output units, or None for a vector, which has no such axis."""
    return None if rank < 2 else 0 if _has_outputs_first(path) else rank - 1


def enough_units(path: tuple[object, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a leaf's shape with only the output units that are needed to choose its smoothing.

    The number of units is halved as long as the remaining units have more than `_ENOUGH` entries
    and half their number is a multiple of `_UNITS`.
    """
    axis = _unit_axis(path_name(path), len(shape))
    if axis is None:
        return shape
    size, units = math.prod(shape), shape[axis]
    kept = units
    while kept * size > _ENOUGH * units and kept % (2 * _UNITS) == 0:
        kept //= 2
    return (*shape[:axis], kept, *shape[axis + 1 :])


def first_units(path: tuple[object, ...], array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the first output units of a leaf, as many as `shape` has."""
    axis = _unit_axis(path_name(path), array.ndim)
    if axis is None or len(shape) != array.ndim or shape[axis] >= array.shape[axis]:
        return array
    return jax.lax.slice_in_dim(array, 0, shape[axis], axis=axis)


def centre_units(path: str, array: jax.Array, spec: jax.P) -> jax.Array:
    """Subtract each output unit's mean over its inputs. `spec` says how the leaf is split."""
    unit = _unit_axis(path, array.ndim)
    axes = tuple(axis for axis in range(array.ndim) if axis != unit)
    names = tuple(x for axis in axes for x in axis_names(spec[axis] if axis < len(spec) else None))
    mean = array.mean(axis=axes, keepdims=True)
    return array - (jax.lax.pmean(mean, names) if names else mean)


def _has_outputs_first(path: str) -> bool:
    name = path.removesuffix("/value").rpartition("/")[2]
    return name == "weight" or name.startswith("weight_")


def _image_grid(path: str, shape: tuple[int, ...]) -> Grid | None:
    """Return the grid of pixels that a leaf seems to have, or None if it seems to have none.

    The spatial axes of a convolution's kernel are a grid. The inputs of a matrix may be the pixels
    of a square image of one or three channels. Channels are last in Flax, and first in Equinox.
    """
    is_first = _has_outputs_first(path)
    if len(shape) > 2:
        space = range(2, len(shape)) if is_first else range(len(shape) - 2)
        axes = tuple(axis for axis in space if shape[axis] > 1)
        return Grid(axes) if axes else None
    if len(shape) < 2:
        return None
    inputs, outputs = reversed(shape) if is_first else shape
    for channels in (1, 3):
        side = math.isqrt(inputs // channels)
        if channels * side**2 == inputs and side >= _SMALLEST_SIDE:
            if is_first:
                return Grid((2, 3), (outputs, channels, side, side))
            return Grid((0, 1), (side, side, channels, outputs))
    return None


def _arrange_grid(grid: Grid, path: str, shape: tuple[int, ...]) -> Arrangement:
    seen = shape if grid.shape is None else tuple(grid.shape)
    if math.prod(seen) != math.prod(shape):
        raise ValueError(
            f"`Grid.shape` must have the leaf's size, got {seen} for {shape} at {path!r}."
        )
    axes = tuple(axis % len(seen) if -len(seen) <= axis < len(seen) else -1 for axis in grid.axes)
    if not axes or -1 in axes or len(set(axes)) != len(axes):
        raise ValueError(
            f"`Grid.axes` must be different axes of the shape {seen}, got {grid.axes} at {path!r}."
        )
    others = tuple(axis for axis in range(len(seen)) if axis not in axes)
    sizes = tuple(seen[axis] for axis in axes)
    return Arrangement(seen, (*others, *axes), len(axes), sizes, reshapes=seen != shape)
