"""Layouts: a leaf's path and shape go in, the order or grid of its neighbours comes out."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax

from optax_lsdp._checks import check_choice

LAYOUTS = ("inputs", "stored")


@dataclass(frozen=True)
class Grid:
    """Neighbours along several axes at once: smooth with I − σ Σₐ Lₐ over `axes`.

    The remaining axes are independent: a `Grid` over the first axis of a Dense kernel is one
    ring for each output unit. `Grid((0, 1))` is the window of a two-dimensional convolution.

    Attributes:
        axes: the axes along which entries are neighbours.
        shape: the leaf's shape is first seen as this one, of the same size, in row-major order;
            None keeps it. A Dense kernel of 784 × 10 on 28 × 28 images is `(28, 28, 10)`.

    >>> Grid(axes=(0, 1), shape=(28, 28, 10))
    Grid(axes=(0, 1), shape=(28, 28, 10))
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_tuple("Grid.axes", self.axes, -math.inf)
        if self.shape is not None:
            _check_tuple("Grid.shape", self.shape, 1)


Layout = (
    Literal["inputs", "stored"]
    | Callable[[str, tuple[int, ...]], Literal["inputs", "stored"] | Grid | None]
)


class Walk(NamedTuple):
    """How to lay a leaf out as rows of neighbours.

    Attributes:
        shape: the leaf is seen as this shape first.
        order: then its axes are put in this order.
        trailing: so many of its last axes hold neighbours; the others count rows.
        grid: the sizes along which entries are neighbours: of these axes, or their product.
        reshapes: whether this shape is not the leaf's own.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    trailing: int
    grid: tuple[int, ...]
    reshapes: bool = False

    def seen_shape(self, leaf: jax.Array) -> tuple[int, ...]:
        """Return the shape as which a leaf, or a shard of it, is seen."""
        return self.shape if leaf.size == math.prod(self.shape) else leaf.shape

    def transpose(self, leaf: jax.Array) -> jax.Array:
        """Return the leaf, or a shard of it, with its neighbours last, axes as they are."""
        return leaf.reshape(self.seen_shape(leaf)).transpose(self.order)

    def lay(self, leaf: jax.Array) -> jax.Array:
        """Return the leaf, or a shard of whole grids, as (…, *grid)."""
        laid = self.transpose(leaf)
        return laid.reshape(*laid.shape[: laid.ndim - self.trailing], *self.grid)

    def restore(self, laid: jax.Array, leaf: jax.Array) -> jax.Array:
        """Undo `lay` or `transpose`, for such a leaf or shard."""
        seen = self.seen_shape(leaf)
        transposed = laid.reshape([seen[axis] for axis in self.order])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return transposed.transpose(inverse).reshape(leaf.shape)


def choose_walk(layout: Any, path: str, shape: tuple[int, ...]) -> Walk | None:
    """Return the walk over the leaf at `path`, or None to leave it as it is."""
    path = path.removesuffix("/value")  # where NNX keeps the array of a variable
    chosen = layout(path, shape) if callable(layout) else layout
    if chosen is None:
        return None
    if isinstance(chosen, Grid):
        return _grid_walk(chosen, path, shape)
    if not isinstance(chosen, str) or chosen not in LAYOUTS:
        raise ValueError(
            f"`layout` must give 'inputs', 'stored', a Grid or None, got {chosen!r} for {path!r}."
        )
    order = _inputs_order(path, len(shape)) if chosen == "inputs" else tuple(range(len(shape)))
    return Walk(shape, order, len(shape), (math.prod(shape),))


def check_layout(layout: Any) -> None:
    """Raise unless `layout` is a known name or a function."""
    if isinstance(layout, Grid):
        raise ValueError(
            f"`layout` must be a function that returns a Grid where one fits, got {layout!r} for "
            "all leaves; write lambda path, shape: …"
        )
    if not callable(layout):
        check_choice("layout", layout, LAYOUTS)


def _check_tuple(name: str, value: object, least: float) -> None:
    if not (isinstance(value, tuple | list) and all(type(n) is int and n >= least for n in value)):
        kind = "whole numbers" if least < 0 else "positive whole numbers"
        raise ValueError(f"`{name}` must be a tuple of {kind}, got {value!r}.")


def _inputs_order(path: str, rank: int) -> tuple[int, ...]:
    """Return the order of axes in which the inputs of each output unit follow one another.

    Flax, Haiku and plain JAX store … × in × out, with space in front: out comes first, then in,
    then space. Equinox and PyTorch name arrays `weight` or `weight_…` and store out × in already.
    """
    name = path.rpartition("/")[2]
    if rank < 2 or name == "weight" or name.startswith("weight_"):
        return tuple(range(rank))
    return (rank - 1, rank - 2, *range(rank - 2))


def _grid_walk(grid: Grid, path: str, shape: tuple[int, ...]) -> Walk:
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
    return Walk(seen, (*others, *axes), len(axes), sizes, reshapes=seen != shape)
