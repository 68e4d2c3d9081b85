"""laplacian_smooth: the operator of one array, lifted to trees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.experimental.shard_alike import shard_alike
from jax.sharding import AxisType, auto_axes

from optax_lsdp._checks import check_choice, check_non_negative
from optax_lsdp._marked import check_unmarked
from optax_lsdp._shards import varying_axes
from optax_lsdp._trees import check_floating, path_name, wide_dtype, widen
from optax_lsdp.smoothing._fft import smooth_fft
from optax_lsdp.smoothing._layout import Layout, Walk, check_layout, choose_walk

_METHODS = {"fft": smooth_fft}
_DEFAULT_METHOD = "fft"


class LaplacianSmoothState(NamedTuple):
    """How many steps were smoothed, which is where a schedule of σ stands."""

    step: jax.Array


def laplacian_smooth(
    smoothing: optax.ScalarOrSchedule,
    *,
    scope: Literal["leaf", "tree"] = "leaf",
    layout: Layout = "inputs",
    method: Literal["auto", "fft"] = "auto",
) -> optax.GradientTransformationExtraArgs:
    """Smooth the updates: u = (I − σL)⁻¹ v, with L the second difference on a ring.

    It keeps the mean, and shrinks what changes from one entry to the next: independent noise
    loses all but β ≈ (1 + 2σ)/(1 + 4σ)^1.5 of its variance. After the noise it costs no privacy,
    and it buys none either: ε is the same with and without, and the noise must stay what it was.

    Smoothing helps where neighbouring entries have similar gradients, and hurts where they have
    not; `layout` says which entries are neighbours.

    Args:
        smoothing: σ ≥ 0; a number or a function of the step. Zero is the identity, to the bit.
        scope: "leaf" smooths every array by itself; "tree" all of them in one ring, in
            the order of `jax.tree.leaves`.
        layout: "inputs" walks the inputs of each output unit, space innermost: a Dense kernel
            (in, out) is walked as (out, in), a Conv kernel (H, W, in, out) as (out, in, H, W).
            One rule for all ranks: the last axis is outputs, the one before it is inputs, what
            stands in front is space. An embedding is then walked along its vocabulary, feature
            by feature, and a query kernel (in, heads, features) along `in`. Arrays named
            `weight` or `weight_…` (Equinox) are stored as (out, in, …) and walked as they are.
            "stored" is the row-major order of any array. A function `(path, shape) → "inputs" |
            "stored" | Grid(...) | None` chooses leaf by leaf, with a `path` such as
            "params/Dense_0/kernel"; None leaves the leaf alone.
        method: how the system is solved; all methods give the same result.

    >>> import numpy as np
    >>> tx = laplacian_smooth(1.0)
    >>> spike = jnp.array([4.0, 0.0, 0.0, 0.0])
    >>> smoothed, _ = tx.update(spike, tx.init(spike))
    >>> print(np.asarray(smoothed).round(3))  # its mean is still 1
    [1.867 0.8   0.533 0.8  ]
    """
    check_non_negative("smoothing", smoothing, schedule=True)
    check_choice("scope", scope, ("leaf", "tree"))
    check_choice("method", method, ("auto", *_METHODS))
    check_layout(layout)
    solve = _METHODS[_DEFAULT_METHOD if method == "auto" else method]
    smooth_tree = _smooth_as_one_ring if scope == "tree" else _smooth_each

    def init(params: optax.Params) -> LaplacianSmoothState:
        del params
        return LaplacianSmoothState(step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: LaplacianSmoothState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LaplacianSmoothState]:
        del params, extra_args
        check_unmarked("laplacian_smooth", updates)
        check_floating("updates", updates)
        _check_whole(updates)
        now = smoothing(state.step) if callable(smoothing) else smoothing

        def smooth(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
            return jnp.where(jnp.asarray(now) == 0, x, solve(x, now, axes))

        paths, structure = jax.tree.flatten_with_path(updates)
        leaves = [leaf for _, leaf in paths]
        walks = [
            choose_walk(layout, path_name(path), leaf.shape) if leaf.size else None
            for path, leaf in paths
        ]
        smoothed = _keep_shardings(partial(smooth_tree, smooth, walks), leaves)
        state = LaplacianSmoothState(optax.safe_increment(state.step))
        return jax.tree.unflatten(structure, smoothed), state

    return optax.GradientTransformationExtraArgs(init, update)


_Smooth = Callable[[jax.Array, tuple[int, ...]], jax.Array]


def _smooth_each(
    smooth: _Smooth, walks: list[Walk | None], leaves: list[jax.Array]
) -> list[jax.Array]:
    """Smooth every leaf by itself."""

    def smooth_leaf(leaf: jax.Array, walk: Walk | None) -> jax.Array:
        if walk is None:
            return leaf
        smoothed = smooth(walk.lay(widen(leaf)), walk.axes)
        return walk.restore(smoothed, like=leaf).astype(leaf.dtype)

    return list(map(smooth_leaf, leaves, walks))


def _smooth_as_one_ring(
    smooth: _Smooth, walks: list[Walk | None], leaves: list[jax.Array]
) -> list[jax.Array]:
    """Smooth the concatenation of all leaves that have a walk."""
    walked = [(leaf, walk) for leaf, walk in zip(leaves, walks, strict=True) if walk is not None]
    if any(len(walk.shape) > 1 for _, walk in walked):
        raise ValueError("`layout` must not give a Grid with scope='tree', which is one ring.")
    if not walked:
        return leaves
    wide = wide_dtype(*leaves)
    vector = jnp.concatenate([walk.lay(leaf).astype(wide) for leaf, walk in walked])
    ends = list(accumulate(leaf.size for leaf, _ in walked))
    parts = iter(jnp.split(smooth(vector, (0,)), ends[:-1]))

    def restore_leaf(leaf: jax.Array, walk: Walk | None) -> jax.Array:
        return leaf if walk is None else walk.restore(next(parts), like=leaf).astype(leaf.dtype)

    return list(map(restore_leaf, leaves, walks))


def _check_whole(updates: optax.Updates) -> None:
    """Raise inside shard_map if a leaf is a shard: its ring would be cut into one for each."""
    for path, leaf in jax.tree.leaves_with_path(updates):
        if varying_axes(leaf):
            raise ValueError(
                "`updates` must be whole inside shard_map, got a shard over "
                f"{', '.join(sorted(varying_axes(leaf)))} at {path_name(path)!r}; smooth outside."
            )


def _keep_shardings(
    run: Callable[[list[jax.Array]], list[jax.Array]], leaves: list[jax.Array]
) -> list[jax.Array]:
    """Return `run(leaves)`, each result sharded like its leaf, on any kind of mesh."""
    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    if any(AxisType.Explicit in (sharding.mesh.axis_types or ()) for sharding in shardings):
        run = auto_axes(run, out_sharding=shardings)
    pairs = zip(run(leaves), leaves, strict=True)
    return [shard_alike(smoothed, leaf)[0] for smoothed, leaf in pairs]
