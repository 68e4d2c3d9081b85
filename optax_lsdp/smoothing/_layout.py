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
    ring for each output unit.

    Attributes:
        axes: the axes along which entries are neighbours, each of them a ring.
        shape: the leaf's shape is first seen as this one, of the same size, in row-major order;
            None keeps it. A Dense kernel of 784 × 10 on 28 × 28 images is `(28, 28, 10)`.

    >>> Grid(axes=(0, 1), shape=(28, 28, 10))
    Grid(axes=(0, 1), shape=(28, 28, 10))
    """

    axes: tuple[int, ...]
    shape: tuple[int, ...] | None = None


Layout = (
    Literal["inputs", "stored"]
    | Callable[[str, tuple[int, ...]], Literal["inputs", "stored"] | Grid | None]
)


class Walk(NamedTuple):
    """How to lay a leaf out: transpose by `order`, reshape to `shape`, smooth over `axes`."""

    order: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def lay(self, leaf: jax.Array) -> jax.Array:
        """Bring a leaf into the walk's shape."""
        return leaf.transpose(self.order).reshape(self.shape)

    def restore(self, laid: jax.Array, like: jax.Array) -> jax.Array:
        """Undo `lay`: give the result the shape of the leaf `like`."""
        transposed = laid.reshape([like.shape[axis] for axis in self.order])
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return transposed.transpose(inverse)


def choose_walk(layout: Any, path: str, shape: tuple[int, ...]) -> Walk | None:
    """Return the walk over the leaf at `path`, or None to leave it as it is."""
    path = path.removesuffix("/value")  # where NNX keeps the array of a variable
    chosen = layout(path, shape) if callable(layout) else layout
    if chosen is None:
        return None
    if isinstance(chosen, Grid):
        return _grid_walk(chosen, path, shape)
    if chosen not in LAYOUTS:
        raise ValueError(
            f"`layout` must give 'inputs', 'stored', a Grid or None, got {chosen!r} for {path!r}."
        )
    order = _inputs_order(path, len(shape)) if chosen == "inputs" else tuple(range(len(shape)))
    return Walk(order, (math.prod(shape),), (0,))


def check_layout(layout: Any) -> None:
    """Raise unless `layout` is a known name or a function."""
    if not callable(layout):
        check_choice("layout", layout, LAYOUTS)


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
    return Walk(tuple(range(len(shape))), seen, axes)
