"""Choose a method for each leaf, and run it.

`_METHODS` is the table of methods. To add a method, write a function of type `SmoothLeaves` or
`SmoothArray` in `methods/`, add a line to the table, and say in `_obstacle` which leaves the method
cannot smooth. The limits below, and the order in which "auto" tries methods, come from
`benchmarks/smoothing.py`. Its results say how much slower each choice is than the fastest method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, auto_axes

from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._layout import Arrangement, Leaf, Scope
from optax_lsdp.smoothing._operator import Operator
from optax_lsdp.smoothing.methods import (
    band_reach,
    smooth_banded,
    smooth_fft,
    smooth_halo,
    smooth_matrix,
    smooth_recursive,
)

SmoothLeaves: TypeAlias = Callable[[Sequence[Leaf], Operator, Scope], list[jax.Array]]
SmoothArray: TypeAlias = Callable[[jax.Array, Operator, int], jax.Array]  # over the last axes
_LARGEST_FAST_MATRIX = 256  # entries per axis up to which matrix products beat the FFT
_LARGEST_MATRIX = 300  # entries per axis up to which matrix products are precise enough


def smooth_leaves(
    leaves: Sequence[Leaf], operator: Operator, scope: Scope, method: str
) -> list[jax.Array]:
    """Return the smoothed leaves. If `scope` is "tree", all leaves form one ring."""
    members: dict[str, list[int]] = {}
    if scope == "tree":
        members[_method_of_tree(leaves, operator, method)] = list(range(len(leaves)))
    else:
        for index, leaf in enumerate(leaves):
            name = _choose_method(method, leaf, operator)
            members.setdefault(name, []).append(index)
    results = dict[int, jax.Array]()
    for name, indices in members.items():
        chosen = [leaves[index] for index in indices]
        if name != "halo":
            _check_whole(name, chosen)
        results |= dict(zip(indices, _METHODS[name](chosen, operator, scope), strict=True))
    return [results[index] for index in range(len(leaves))]


def _method_of_tree(leaves: Sequence[Leaf], operator: Operator, method: str) -> str:
    """Return the method for all leaves in one ring."""
    arrangements = [leaf.arrangement for leaf in leaves]
    if any(len(one.shape) != one.trailing or len(one.grid) > 1 for one in arrangements):
        raise ValueError(
            "`layout` must not give a Grid with scope='tree', which joins all leaves to one ring, "
            "got one; use scope='leaf'."
        )
    size = sum(one.grid[0] for one in arrangements)
    widest = max((leaf.array for leaf in leaves), key=lambda x: wide_dtype(x).itemsize)
    is_split = any(leaf.is_split for leaf in leaves)
    ring = Leaf(widest, Arrangement((size,), (0,), 1, (size,)), jax.P(), is_split)
    return _choose_method(method, ring, operator)


def _choose_method(method: str, leaf: Leaf, operator: Operator) -> str:
    """Return the method for one leaf, or raise if the requested one does not fit."""
    if method == "auto":
        order = ["halo"] if leaf.is_split else []
        order += ["recursive"]
        order += ["matrix"] if max(leaf.arrangement.grid) <= _LARGEST_FAST_MATRIX else []
        order += ["banded", "fft"]
        return next(name for name in order if not _obstacle(name, leaf, operator))
    obstacle = _obstacle(method, leaf, operator)
    if obstacle:
        raise ValueError(f"`method` must fit the task, got {method!r}, which {obstacle}.")
    return method


def _obstacle(method: str, leaf: Leaf, operator: Operator) -> str | None:
    """Return why a method cannot smooth a leaf, or None if it can."""
    arrangement, grid = leaf.arrangement, leaf.arrangement.grid
    if method in ("recursive", "halo", "banded") and len(grid) > 1:
        return f"smooths along one axis, not along a grid of {grid}; use method='auto'"
    if method == "halo" and arrangement.reshapes:
        return f"does not support a Grid with the shape {arrangement.shape}; use method='auto'"
    if method in ("recursive", "halo") and operator.order > 1:
        return f"supports order 1 only, not {operator.order}; use method='auto'"
    if method == "matrix" and max(grid) > _LARGEST_MATRIX:
        return (
            f"takes at most {_LARGEST_MATRIX} entries per axis, not {max(grid)}; use method='auto'"
        )
    if method == "banded":
        if not isinstance(operator.smoothing, float):
            return "needs σ as a number, not a schedule or an injected value; use method='auto'"
        least = 2 * band_reach(operator, wide_dtype(leaf.array)) + 1
        if least > grid[0]:
            return f"needs {least} entries for this σ, not {grid[0]}; use method='auto'"
    return None


def _check_whole(method: str, leaves: Sequence[Leaf]) -> None:
    """Raise if `shard_map` splits a row of neighbours. Only "halo" can smooth such rows."""
    for _, arrangement, spec, _ in leaves:
        split = {axis for axis, entry in enumerate(spec) if entry is not None}
        neighbours = set(arrangement.order[len(arrangement.order) - arrangement.trailing :])
        if split and (arrangement.reshapes or split & neighbours):
            raise ValueError(
                f"`shard_specs` must not split the axes along which {method!r} smooths, got "
                f"{spec} for an array of {arrangement.shape}; gather it first, or use "
                "method='halo' (order 1, one axis)."
            )


def _run_recursive(leaves: Sequence[Leaf], operator: Operator, scope: Scope) -> list[jax.Array]:
    def run(arrays: list[jax.Array], operator: Operator) -> list[jax.Array]:
        pairs = zip(leaves, arrays, strict=True)
        own = [leaf._replace(array=array) for leaf, array in pairs]
        return smooth_recursive(own, operator, scope)

    return _keep_shardings(run, leaves, operator)


def _run_on_arrays(
    solve: SmoothArray, leaves: Sequence[Leaf], operator: Operator, scope: Scope
) -> list[jax.Array]:
    """Apply a method for one array to each leaf, or to the concatenation of all leaves."""
    groups = [leaves] if scope == "tree" else [[leaf] for leaf in leaves]
    return [
        smoothed
        for group in groups
        for smoothed in _keep_shardings(partial(_solve_joined, solve, group), group, operator)
    ]


def _solve_joined(
    solve: SmoothArray, leaves: Sequence[Leaf], arrays: list[jax.Array], operator: Operator
) -> list[jax.Array]:
    """Apply a method for one array to one leaf, or to several vectors as if they were one."""
    dtype = wide_dtype(*arrays)
    arrangements = [leaf.arrangement for leaf in leaves]
    pairs = list(zip(arrangements, arrays, strict=True))
    arranged = [arrangement.arrange(array.astype(dtype)) for arrangement, array in pairs]
    joined = arranged[0] if len(arranged) == 1 else jnp.concatenate(arranged)
    solved = solve(joined, operator, len(arrangements[0].grid))
    ends = list(accumulate(one.grid[0] for one in arrangements))
    parts = [solved] if len(arranged) == 1 else jnp.split(solved, ends[:-1])
    return [
        arrangement.restore(part, array).astype(array.dtype)
        for part, (arrangement, array) in zip(parts, pairs, strict=True)
    ]


def _keep_shardings(
    run: Callable[[list[jax.Array], Operator], list[jax.Array]],
    leaves: Sequence[Leaf],
    operator: Operator,
) -> list[jax.Array]:
    """Return `run(arrays, operator)`, each result sharded like its array, on any kind of mesh."""
    arrays, smoothing = [leaf.array for leaf in leaves], operator.smoothing
    traced = [] if isinstance(smoothing, float) else [jnp.asarray(smoothing)]

    def call(arrays: list[jax.Array], traced: list[jax.Array]) -> list[jax.Array]:
        return run(arrays, operator._replace(smoothing=traced[0]) if traced else operator)

    shardings = [jax.typeof(array).sharding for array in arrays]
    if any(AxisType.Explicit in (sharding.mesh.axis_types or ()) for sharding in shardings):
        call = auto_axes(call, out_sharding=shardings)
    pairs = zip(call(arrays, traced), arrays, strict=True)
    return [shard_alike(smoothed, array)[0] for smoothed, array in pairs]


_METHODS: dict[str, SmoothLeaves] = {
    "recursive": _run_recursive,
    "halo": smooth_halo,
    "banded": partial(_run_on_arrays, smooth_banded),
    "matrix": partial(_run_on_arrays, smooth_matrix),
    "fft": partial(_run_on_arrays, smooth_fft),
}
METHODS = ("auto", *_METHODS)
