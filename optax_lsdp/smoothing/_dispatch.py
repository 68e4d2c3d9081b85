"""Choose a method for each leaf, and run it.

`_METHODS` is the table of methods. To add a method, write a function of type `SmoothLeaves` or
`SmoothArray` in `methods/`, add a line to the table, and say in `_obstacle` which leaves the method
cannot smooth. The limits below, and the order in which "auto" tries methods, come from
`benchmarks/smoothing.py`. Its results say how much slower the chosen method is than the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, auto_axes

from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._layout import Arrangement, Leaf, Scope
from optax_lsdp.smoothing.methods import (
    Blocking,
    band_reach,
    choose_blocking,
    smooth_banded,
    smooth_fft,
    smooth_halo,
    smooth_in_blocks,
    smooth_matrix,
    smooth_recursive,
)
from optax_lsdp.smoothing.methods.spectral import Operator

SmoothLeaves: TypeAlias = Callable[[Sequence[Leaf], Operator, Scope], list[jax.Array]]
# The third argument is the number of last axes along which the function smooths.
SmoothArray: TypeAlias = Callable[[jax.Array, Operator, int], jax.Array]
_BY_PLATFORM = "recursive, or in blocks on a TPU"  # a method that only "auto" can choose
_LARGEST_FAST_MATRIX = 256  # entries per axis up to which matrix products beat the FFT
_LARGEST_MATRIX = 300  # entries per axis up to which matrix products are precise enough


def smooth_leaves(
    leaves: Sequence[Leaf], operator: Operator, scope: Scope, method: str
) -> list[jax.Array]:
    """Return the smoothed leaves. If `scope` is "tree", all leaves form one ring."""
    members: dict[str, list[int]] = {}
    if scope == "tree":
        ring = _join_leaves(leaves)
        members[_choose_method(method, ring, operator)] = list(range(len(leaves)))
    else:
        for index, leaf in enumerate(leaves):
            chosen_name = _choose_method(method, leaf, operator)
            if method == "auto" and chosen_name == "recursive" and choose_blocking(leaf, operator):
                chosen_name = _BY_PLATFORM
            members.setdefault(chosen_name, []).append(index)
    results = dict[int, jax.Array]()
    for name, indices in members.items():
        chosen = [leaves[index] for index in indices]
        if name != "halo":
            _check_whole(name, chosen)
        results |= dict(zip(indices, _METHODS[name](chosen, operator, scope), strict=True))
    return [results[index] for index in range(len(leaves))]


def check_leaf(leaf: Leaf, operator: Operator, method: str) -> None:
    """Raise if `method` cannot smooth the leaf with scope="leaf"."""
    name = _choose_method(method, leaf, operator)
    if name != "halo":
        _check_whole(name, [leaf])


def _join_leaves(leaves: Sequence[Leaf]) -> Leaf:
    """Describe all leaves as one leaf, to choose a method for their ring."""
    arrangements = [leaf.arrangement for leaf in leaves]
    if any(len(one.shape) != one.trailing or len(one.grid) > 1 for one in arrangements):
        raise ValueError(
            "`layout` must not give a Grid with scope='tree', which joins all leaves to one ring, "
            "got a Grid; use scope='leaf'."
        )
    size = sum(one.grid[0] for one in arrangements)
    widest = max((leaf.array for leaf in leaves), key=lambda x: wide_dtype(x).itemsize)
    is_split = any(leaf.is_split for leaf in leaves)
    return Leaf(widest, Arrangement((size,), (0,), 1, (size,)), jax.P(), is_split)


def _choose_method(method: str, leaf: Leaf, operator: Operator) -> str:
    """Return the method for one leaf. Raise if `method` cannot smooth the leaf."""
    if method != "auto":
        obstacle = _obstacle(method, leaf, operator)
        if obstacle:
            raise ValueError(
                f"`method` must fit the leaf, got {method!r}, which {obstacle}; use method='auto'."
            )
        return method
    grid, is_on_tpu = leaf.arrangement.grid, jax.default_backend() == "tpu"
    order = ["halo"] if leaf.is_split else []
    order += ["recursive"]
    order += ["matrix"] if is_on_tpu or max(grid) <= _LARGEST_FAST_MATRIX else []
    order += ["banded"] if is_on_tpu else ["banded", "fft"]
    for name in order:
        if not _obstacle(name, leaf, operator):
            return name
    raise ValueError(
        f"`method` must be 'fft' to smooth along a grid of {grid} with order {operator.order} on a "
        "TPU, got 'auto', which never chooses 'fft' on TPUs because it is slow there; pass "
        f"method='fft', or a layout with at most {_LARGEST_MATRIX} entries per axis."
    )


def _obstacle(method: str, leaf: Leaf, operator: Operator) -> str | None:
    """Return why a method cannot smooth a leaf, or None if it can."""
    arrangement, grid = leaf.arrangement, leaf.arrangement.grid
    if method in ("recursive", "halo", "banded") and len(grid) > 1:
        return f"smooths along one axis, not along a grid of {grid}"
    if method == "halo" and arrangement.reshapes:
        return f"does not support a Grid with the shape {arrangement.shape}"
    if method in ("recursive", "halo") and operator.order > 1:
        return f"supports order 1 only, not {operator.order}"
    if method == "matrix" and max(grid) > _LARGEST_MATRIX:
        return f"takes at most {_LARGEST_MATRIX} entries per axis, not {max(grid)}"
    if method == "banded":
        if not isinstance(operator.smoothing, float):
            return "needs σ as a number, not as a schedule or a traced value"
        least = 2 * band_reach(operator, wide_dtype(leaf.array)) + 1
        if least > grid[0]:
            return f"needs {least} entries for this σ, not {grid[0]}"
    return None


def _check_whole(method: str, leaves: Sequence[Leaf]) -> None:
    """Raise if `shard_map` splits a row of neighbours, which only "halo" can smooth."""
    for _, arrangement, spec, _ in leaves:
        split = {axis for axis, entry in enumerate(spec) if entry is not None}
        neighbours = set(arrangement.order[len(arrangement.order) - arrangement.trailing :])
        if split and (arrangement.reshapes or split & neighbours):
            raise ValueError(
                f"`shard_specs` must not split the axes along which {method!r} smooths, got "
                f"{spec} for an array of {arrangement.shape}; gather it first, or use "
                "method='halo' (order 1, one axis)."
            )


def _solve_arrays(
    solve: SmoothArray, leaves: Sequence[Leaf], operator: Operator, scope: Scope
) -> list[jax.Array]:
    """Apply `solve` to each leaf or, if `scope` is "tree", to all leaves joined."""
    results = []
    for group in [leaves] if scope == "tree" else [[leaf] for leaf in leaves]:
        dtype = wide_dtype(*(leaf.array for leaf in group))
        arranged = [leaf.arrangement.arrange(leaf.array.astype(dtype)) for leaf in group]
        solved = solve(jnp.concatenate(arranged), operator, len(group[0].arrangement.grid))
        parts = jnp.split(solved, list(accumulate(map(len, arranged)))[:-1])
        pairs = zip(group, parts, strict=True)
        results += [leaf.arrangement.restore(part, leaf.array) for leaf, part in pairs]
    return results


def _smooth_by_platform(
    leaves: Sequence[Leaf], operator: Operator, scope: Scope
) -> list[jax.Array]:
    """Smooth each leaf in blocks on TPUs, and recursively on other platforms."""
    del scope
    return [
        _blocks_or_recursive(leaf.arrangement, blocking, operator)(leaf.array)
        for leaf in leaves
        if (blocking := choose_blocking(leaf, operator))
    ]


@lru_cache(maxsize=256)
def _blocks_or_recursive(
    arrangement: Arrangement, blocking: Blocking, operator: Operator
) -> Callable[[jax.Array], jax.Array]:
    """Return a function that smooths an array by the method for the platform on which it runs."""

    def blocks(array: jax.Array) -> jax.Array:
        return smooth_in_blocks(array.astype(jnp.float32), blocking).astype(array.dtype)

    def recursive(array: jax.Array) -> jax.Array:
        return smooth_recursive([Leaf(array, arrangement, jax.P(), False)], operator, "leaf")[0]

    # Outside `jit`, a conditional would be compiled again for every call.
    return jax.jit(lambda x: jax.lax.platform_dependent(x, tpu=blocks, default=recursive))


def _keep_shardings(
    smooth: SmoothLeaves, leaves: Sequence[Leaf], operator: Operator, scope: Scope
) -> list[jax.Array]:
    """Smooth leaves on any kind of mesh, and shard each result like its leaf."""
    arrays = [leaf.array for leaf in leaves]
    traced = [] if isinstance(operator.smoothing, float) else [jnp.asarray(operator.smoothing)]

    def call(arrays: list[jax.Array], traced: list[jax.Array]) -> list[jax.Array]:
        own = [leaf._replace(array=array) for leaf, array in zip(leaves, arrays, strict=True)]
        return smooth(own, operator._replace(smoothing=traced[0]) if traced else operator, scope)

    shardings = [jax.typeof(array).sharding for array in arrays]
    if any(AxisType.Explicit in (sharding.mesh.axis_types or ()) for sharding in shardings):
        call = auto_axes(call, out_sharding=shardings)
    pairs = zip(call(arrays, traced), arrays, strict=True)
    return [shard_alike(smoothed, array)[0] for smoothed, array in pairs]


_METHODS: dict[str, SmoothLeaves] = {
    "recursive": partial(_keep_shardings, smooth_recursive),
    _BY_PLATFORM: partial(_keep_shardings, _smooth_by_platform),
    "halo": smooth_halo,
    "banded": partial(_keep_shardings, partial(_solve_arrays, smooth_banded)),
    "matrix": partial(_keep_shardings, partial(_solve_arrays, smooth_matrix)),
    "fft": partial(_keep_shardings, partial(_solve_arrays, smooth_fft)),
}
METHODS = ("auto", *(name for name in _METHODS if name != _BY_PLATFORM))
