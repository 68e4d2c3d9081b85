"""Describe weights, which depend only on parameters and constants, and views of parameters.

A weight is any value that the loss computes from parameters and constants without an example. If a
weight consists of entries of one parameter, as a transpose or a slice does, its *view* describes
these entries by sizes and strides. Views show whether two uses of a parameter touch the same
entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._jaxpr import Equation, evaluate
from optax_lsdp._types import PyTree

Axis = tuple[int, int]  # size, stride

# Primitives that keep all entries in their places.
_KEEP_ENTRIES = "convert_element_type", "copy", "copy_p", "optimization_barrier", "pvary", "pcast"


class View(NamedTuple):
    """Entries of a flat parameter: index (i, j, …) is entry offset + i·stride₀ + j·stride₁ + …."""

    axes: tuple[Axis, ...]
    offset: int = 0


def whole(shape: Sequence[int]) -> View:
    """Return the view of a whole parameter in row-major order."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return View(tuple(zip(shape, strides, strict=True)))


def transposed(view: View, order: Sequence[int]) -> View:
    """Return the view with its axes in the order `order`."""
    return View(tuple(view.axes[axis] for axis in order), view.offset)


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """Return the view reshaped to `shape`, or None if strides cannot describe the result."""
    axes: list[Axis] = []
    left = merged(view.axes)
    if 0 in shape:
        return None
    for size in reversed([size for size in shape if size != 1]):
        if not left or left[-1][0] % size:
            return None
        length, stride = left.pop()
        axes.append((size, stride))
        if length > size:
            left.append((length // size, stride * size))
    if left:
        return None
    found = iter(reversed(axes))
    return View(tuple((1, 0) if size == 1 else next(found) for size in shape), view.offset)


def merged(axes: Sequence[Axis]) -> list[Axis]:
    """Drop axes of size 1, and merge neighbouring axes that form one longer axis."""
    result: list[Axis] = []
    for size, stride in axes:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return result


def view_after(equation: Equation, view: View) -> View | None:
    """Return the view of an equation's output, where `view` is the view of its input.

    Return None if the output is not known to be a view. Outputs that repeat entries are no views,
    because mapping a gradient back through the repetition would change the gradient's norm.
    """
    name, params, (axes, offset) = equation.primitive.name, equation.params, view
    if name in _KEEP_ENTRIES:
        return view
    if name == "transpose":
        return transposed(view, params["permutation"])
    if name == "reshape" and params.get("dimensions") is None:
        return reshaped(view, params["new_sizes"])
    if name == "squeeze":
        gone = {axis % len(axes) for axis in params["dimensions"]}
        return View(tuple(axis for i, axis in enumerate(axes) if i not in gone), offset)
    if name == "broadcast_in_dim":
        shape, places = params["shape"], params["broadcast_dimensions"]
        if math.prod(shape) != math.prod(size for size, _ in axes):
            return None
        kept = dict(zip(places, axes, strict=True))
        return View(tuple(kept.get(i, (1, 0)) for i in range(len(shape))), offset)
    if name == "slice":
        steps = params["strides"] or (1,) * len(axes)
        starts, limits = params["start_indices"], params["limit_indices"]
        parts = zip(axes, starts, limits, steps, strict=True)
        sliced = tuple((-(-(e - s) // k), stride * k) for (_, stride), s, e, k in parts)
        return View(sliced, offset + int(np.dot(starts, [stride for _, stride in axes])))
    return None


def are_disjoint(a: View, b: View) -> bool:
    """Return whether two views certainly share no entry. False means that they may share one."""
    first, second = (_extent(view) for view in (a, b))
    if first[1] < second[0] or second[1] < first[0]:
        return True
    pairs = [sorted(((t, n) for n, t in view.axes if n > 1), reverse=True) for view in (a, b)]
    strides = [[stride for stride, _ in pair] for pair in pairs]
    if strides[0] != strides[1]:
        return False
    steps = [(t, 1 - m, n - 1) for (t, n), (_, m) in zip(*pairs, strict=True)]
    return not _can_reach(b.offset - a.offset, steps)


def _extent(view: View) -> tuple[int, int]:
    """Return the first and the last entry of a view."""
    return view.offset, view.offset + sum((size - 1) * stride for size, stride in view.axes)


def _can_reach(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether distance = Σ kⱼ·strideⱼ may hold, for steps (stride, least k, most k)."""
    if not steps:
        return distance == 0
    (stride, least, most), rest = steps[0], steps[1:]
    lowest, highest = sum(t * low for t, low, _ in rest), sum(t * high for t, _, high in rest)
    first, last = -(-(distance - highest) // stride), (distance - lowest) // stride
    tries = range(max(first, least), min(last, most) + 1)
    return len(tries) > 4 or any(_can_reach(distance - k * stride, rest) for k in tries)


Builder = Callable[[Sequence[jax.Array], dict[int, list[jax.Array]]], PyTree]


class Loop(NamedTuple):
    """A scan: how many other scans surround it, and how many iterations it has."""

    depth: int
    length: int


class Weight(NamedTuple):
    """A value that is computed only from parameters and constants.

    Attributes:
        leaves: the indices of the leaves that the value depends on; empty for a constant.
        build: (leaves, cache of values) → the value. Each scan that slices the weight adds a
            leading axis, the outermost scan first.
        view: the entries of the leaf that the value consists of, or None if it is not a view.
        show: leaf → the value, in the dtype of the leaf; meaningless if `view` is None.
        sliced: for each scan that slices the weight, the depth of the scan and the axis of the leaf
            that the scan slices.
        pieces: if the value is a concatenation of views along `axis`, their weights; else empty.
        axis: see `pieces`.
    """

    leaves: frozenset[int]
    build: Builder
    view: View | None = None
    show: Callable[[jax.Array], jax.Array] = lambda leaf: leaf
    sliced: tuple[tuple[int, Axis], ...] = ()
    pieces: tuple[Weight, ...] = ()
    axis: int = 0

    def value(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """Return the value for these leaves of the parameters."""
        return self.build(leaves, {})


def constant(value: jax.Array) -> Weight:
    """Return a weight that depends on no parameter."""
    return Weight(frozenset(), lambda leaves, cache: value)


def parameter(index: int, shape: Sequence[int]) -> Weight:
    """Return the weight that is a whole leaf of the parameters."""
    return Weight(frozenset([index]), lambda leaves, cache: leaves[index], whole(shape))


def derived(equation: Equation, inputs: Sequence[Weight]) -> list[Weight]:
    """Return the outputs of an equation whose inputs are all weights."""
    name = equation.primitive.name
    loops = sorted({depth: axis for weight in inputs for depth, axis in weight.sliced}.items())

    run = partial(_evaluate, equation)
    for depth, _ in reversed(loops):
        sliced = [depth in dict(weight.sliced) for weight in inputs]
        run = jax.vmap(run, in_axes=tuple(0 if flag else None for flag in sliced))

    def build(leaves: Sequence[jax.Array], cache: dict[int, list[jax.Array]]) -> list[jax.Array]:
        if id(build) not in cache:
            cache[id(build)] = run(*(weight.build(leaves, cache) for weight in inputs))
        return cache[id(build)]

    leaves = frozenset[int]().union(*(weight.leaves for weight in inputs))
    if name == "stop_gradient":
        leaves = frozenset()
    view = None
    if len(inputs) == 1 and inputs[0].view is not None:
        view = view_after(equation, inputs[0].view)

    def show(leaf: jax.Array) -> jax.Array:
        before = inputs[0].show(leaf)
        return before if name == "convert_element_type" else run(before)[0]

    pieces, axis = tuple[Weight, ...](), 0
    if name == "concatenate" and all(weight.view for weight in inputs):
        pieces, axis = tuple(inputs), equation.params["dimension"]
    elif name in _KEEP_ENTRIES and len(inputs) == 1:  # such as the cast of concatenated weights
        pieces, axis = inputs[0].pieces, inputs[0].axis

    def output(place: int, shaped: jax.ShapeDtypeStruct) -> Weight:
        has_gradient = jnp.issubdtype(shaped.dtype, jnp.inexact)  # integers have none
        return Weight(
            leaves if has_gradient else frozenset(),
            lambda leaves, cache: build(leaves, cache)[place],
            view,
            show,
            tuple(loops),
            pieces,
            axis,
        )

    avals = [cast("jax.ShapeDtypeStruct", atom.aval) for atom in equation.outvars]
    return [output(place, aval) for place, aval in enumerate(avals)]


def _evaluate(equation: Equation, *values: jax.Array) -> list[jax.Array]:
    return evaluate(equation, values)


def slice_of(weight: Weight, loop: Loop) -> Weight:
    """Return the slice of a weight that one iteration of a scan sees."""
    view, axis = None, (loop.length, 0)
    if weight.view is not None:
        axis, *inner = weight.view.axes
        view = View(tuple(inner), weight.view.offset)
    return weight._replace(view=view, sliced=(*weight.sliced, (loop.depth, axis)), pieces=())
