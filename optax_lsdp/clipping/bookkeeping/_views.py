"""Views: which entries of a parameter an array shows, as sizes and strides, if it shows any."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

Axis = tuple[int, int]  # size, stride


class View(NamedTuple):
    """Entry (i, j, …) is entry offset + i·stride₀ + j·stride₁ + … of the flattened parameter."""

    axes: tuple[Axis, ...]
    offset: int = 0


def whole(shape: Sequence[int]) -> View:
    """Return the view of all of a parameter, as it is stored."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return View(tuple(zip(shape, strides, strict=True)))


def transposed(view: View, order: Sequence[int]) -> View:
    """Return the view with its axes in another order."""
    return View(tuple(view.axes[axis] for axis in order), view.offset)


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """Return the view in another shape, or None if no strides describe it."""
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
    """Return the axes without those of size 1, and with neighbours that are one axis as one."""
    result: list[Axis] = []
    for size, stride in axes:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return result


def viewed(name: str, params: dict[str, Any], view: View) -> View | None:
    """Return the view of a view that the primitive `name` takes, or None if it takes none.

    Only primitives that show every entry once at most: to transpose them changes no norm.
    """
    axes, offset = view
    if name in ("convert_element_type", "copy", "copy_p", "optimization_barrier", "pvary", "pcast"):
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
        shown = dict(zip(places, axes, strict=True))
        return View(tuple(shown.get(i, (1, 0)) for i in range(len(shape))), offset)
    if name == "slice":
        steps = params["strides"] or (1,) * len(axes)
        starts, limits = params["start_indices"], params["limit_indices"]
        parts = zip(axes, starts, limits, steps, strict=True)
        shown_axes = tuple((-(-(e - s) // k), stride * k) for (_, stride), s, e, k in parts)
        return View(shown_axes, offset + int(np.dot(starts, [stride for _, stride in axes])))
    return None


def are_disjoint(a: View, b: View) -> bool:
    """Tell whether two views are known to share no entry."""
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
    """Return the first and the last entry that a view shows."""
    return view.offset, view.offset + sum((size - 1) * stride for size, stride in view.axes)


def _can_reach(distance: int, steps: Sequence[tuple[int, int, int]]) -> bool:
    """Tell whether distance = Σ kⱼ·strideⱼ may hold, for steps (stride, least k, most k)."""
    if not steps:
        return distance == 0
    (stride, least, most), rest = steps[0], steps[1:]
    lowest, highest = sum(t * low for t, low, _ in rest), sum(t * high for t, _, high in rest)
    first, last = -(-(distance - highest) // stride), (distance - lowest) // stride
    tries = range(max(first, least), min(last, most) + 1)
    return len(tries) > 4 or any(_can_reach(distance - k * stride, rest) for k in tries)
