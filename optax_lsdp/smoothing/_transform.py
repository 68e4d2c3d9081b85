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

from optax_lsdp._checks import check_choice, check_non_negative, check_whole, is_number
from optax_lsdp._clipped import check_unmarked
from optax_lsdp._trees import check_floating, path_name, wide_dtype, widen
from optax_lsdp.smoothing._choose import ARRAY_METHODS, METHODS, choose_method
from optax_lsdp.smoothing._decay import is_zero
from optax_lsdp.smoothing._layout import Layout, Walk, check_layout
from optax_lsdp.smoothing._leaves import Plan, smooth_leaves
from optax_lsdp.smoothing._operator import BOUNDARIES, Boundary, Operator
from optax_lsdp.smoothing._placed import Leaf, check_whole_grids, place, read_specs
from optax_lsdp.smoothing._sharded import may_be_split, smooth_shards

_MOST = 1e30  # the largest σ: its products with the spectrum stay within float32


class LaplacianSmoothState(NamedTuple):
    """How many steps were smoothed, which is where a schedule of σ stands."""

    step: jax.Array


def laplacian_smooth(
    smoothing: optax.ScalarOrSchedule,
    *,
    scope: Literal["leaf", "tree"] = "leaf",
    layout: Layout = "inputs",
    boundary: Boundary = "periodic",
    order: int | None = None,
    method: Literal["auto", "recursive", "halo", "banded", "matrix", "fft"] = "auto",
    shards: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Smooth the updates: u = (I − σL)⁻¹ v, with L the second difference on a ring.

    It keeps the mean, and shrinks what changes from one entry to the next: independent noise
    loses all but β ≈ (1 + 2σ)/(1 + 4σ)^1.5 of its variance. After the noise it costs no privacy,
    and it buys none either: ε is the same with and without, and the noise must stay what it was.

    Smoothing helps where neighbouring entries have similar gradients, and hurts where they have
    not; `layout` says which entries are neighbours. When to use it, as measured with step sizes
    tuned for each σ (`benchmarks/paper`): for softmax regression on images, along the inputs or,
    better, on the grid of the pixels, with σ from 3 to 10 and a step size two to four times as
    large, the more the noisier: three points of accuracy at ε = 0.02, one at 0.1, next to nothing
    at 1. Not in the stored order, whose neighbours there are classes: it never helped. For a
    table whose columns have no order it made no difference that would be worth a parameter.
    For CNNs, tune the learning rate first. With the paper's network, rates and strongest noise
    (MNIST, ε = 0.18, 60 epochs) smoothing steadies DP-SGD, which ends eight points higher; but a
    third of the rate without smoothing did better than any σ (15 epochs), and DP-Adam was better
    without it at every noise that was tried. With rates tuned for each (ε = 0.2 to 1) it made a
    difference of half a point at most to DP-SGD, either way.

    Args:
        smoothing: 0 ≤ σ ≤ 1e30; a number or a function of the step. Zero is the identity, to
            the bit. A scheduled or injected value beyond these raises, or gives NaN in `jit`.
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
        boundary: "periodic" joins the last entry to the first; "neumann" lets both ends
            reflect, as if each entry at an end were its own neighbour.
        order: n, which smooths with I + (−1)ⁿ σ Lⁿ instead: a higher order spares slow waves
            and shrinks fast ones more. None is 1, and no number for `optax.inject_hyperparams`,
            which else needs static_args=("layout", "order").
        method: how the system is solved; all methods give the same result. "recursive" takes
            linear time and any σ; "halo" does so on sharded arrays, whose devices exchange two
            numbers for each stretch that they hold; "banded" cuts the kernel off where floats
            cannot tell it from zero, and needs σ as a number; "matrix" is for small grids;
            "fft" does everything. "auto" takes the fastest.
        shards: inside `shard_map`, how the updates are split over its axes: a PartitionSpec
            or a tree of them, as in `in_specs`.

    >>> import numpy as np
    >>> tx = laplacian_smooth(1.0)
    >>> spike = jnp.array([4.0, 0.0, 0.0, 0.0])
    >>> smoothed, _ = tx.update(spike, tx.init(spike))
    >>> print(np.asarray(smoothed).round(3))  # its mean is still 1
    [1.867 0.8   0.533 0.8  ]
    """
    _check_smoothing(smoothing)
    check_choice("scope", scope, ("leaf", "tree"))
    check_choice("boundary", boundary, BOUNDARIES)
    check_whole("order", 1 if order is None else order)
    check_choice("method", method, METHODS)
    check_layout(layout)
    operator = Operator(boundary, order or 1)
    smooth_tree = _smooth_together if scope == "tree" else _smooth_each

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
        now = smoothing(state.step) if callable(smoothing) else smoothing
        _check_smoothing(now)
        state = LaplacianSmoothState(optax.safe_increment(state.step))
        if is_number(now) and now == 0:
            return updates, state
        paths, structure = jax.tree.flatten_with_path(updates)
        found = [
            place(layout, path_name(path), leaf, spec)
            for (path, leaf), spec in zip(paths, read_specs(shards, updates), strict=True)
        ]
        walked = [leaf for leaf in found if leaf is not None]
        smoothed = iter(smooth_tree(walked, now, operator, method) if walked else [])
        results = [
            leaf if laid is None else _unless_odd(now, leaf, next(smoothed))
            for (_, leaf), laid in zip(paths, found, strict=True)
        ]
        return jax.tree.unflatten(structure, results), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_smoothing(smoothing: Any) -> None:
    check_non_negative("smoothing", smoothing, schedule=True)
    if is_number(smoothing) and smoothing > _MOST:
        raise ValueError(f"`smoothing` must be at most {_MOST:g}, got {smoothing!r}.")


def _unless_odd(smoothing: Any, leaf: jax.Array, smoothed: jax.Array) -> jax.Array:
    """Return what was smoothed; the leaf itself if σ is zero, and NaN if it is nonsense."""
    now = jnp.asarray(smoothing, wide_dtype(leaf))
    chosen = jnp.where(is_zero(now, now.dtype), leaf, smoothed)
    if is_number(smoothing):
        return chosen
    return jnp.where((now >= 0) & (now <= _MOST), chosen, jnp.nan)


def _smooth_each(
    leaves: list[Leaf], smoothing: Any, operator: Operator, method: str
) -> list[jax.Array]:
    """Smooth every leaf by itself, those that go by runs together."""
    methods = [
        choose_method(method, walk, operator, smoothing, wide_dtype(x), may_be_split(x, spec))
        for x, walk, spec in leaves
    ]
    results = dict[int, jax.Array]()
    for name in ("recursive", "halo"):
        chosen = [index for index, other in enumerate(methods) if other == name]
        smoothed = _smooth_runs([leaves[i] for i in chosen], smoothing, operator, name, "leaf")
        results |= dict(zip(chosen, smoothed, strict=True))
    for index, (x, walk, _) in enumerate(leaves):
        if index not in results:
            check_whole_grids(methods[index], walk, leaves[index].spec)
            solve, dims = ARRAY_METHODS[methods[index]], len(walk.grid)

            def smooth(
                arrays: list[jax.Array],
                smoothing: Any,
                walk: Walk = walk,
                solve: Any = solve,
                dims: int = dims,
            ) -> Any:
                laid = solve(walk.lay(widen(arrays[0])), smoothing, operator, dims)
                return [walk.restore(laid, arrays[0]).astype(arrays[0].dtype)]

            (results[index],) = _keep_shardings(smooth, [x], smoothing)
    return [results[index] for index in range(len(leaves))]


def _smooth_together(
    leaves: list[Leaf], smoothing: Any, operator: Operator, method: str
) -> list[jax.Array]:
    """Smooth all leaves as if one followed the other."""
    if any(len(walk.shape) != walk.trailing or len(walk.grid) > 1 for _, walk, _ in leaves):
        raise ValueError("`layout` must not give a Grid with scope='tree', which is one ring.")
    dtype = wide_dtype(*(leaf.array for leaf in leaves))
    sizes = [walk.grid[0] for _, walk, _ in leaves]
    whole = Walk((sum(sizes),), (0,), 1, (sum(sizes),))
    split = any(may_be_split(leaf.array, leaf.spec) for leaf in leaves)
    name = choose_method(method, whole, operator, smoothing, dtype, split)
    if name in ("recursive", "halo"):
        return _smooth_runs(leaves, smoothing, operator, name, "tree")
    ends = list(accumulate(sizes))
    for leaf in leaves:
        check_whole_grids(name, leaf.walk, leaf.spec)

    def smooth(arrays: list[jax.Array], smoothing: Any) -> list[jax.Array]:
        laid = [leaf.walk.lay(x).astype(dtype) for leaf, x in zip(leaves, arrays, strict=True)]
        whole = ARRAY_METHODS[name](jnp.concatenate(laid), smoothing, operator, 1)
        parts = jnp.split(whole, ends[:-1])
        return [
            leaf.walk.restore(part, x).astype(x.dtype)
            for leaf, part, x in zip(leaves, parts, arrays, strict=True)
        ]

    return _keep_shardings(smooth, [leaf.array for leaf in leaves], smoothing)


def _smooth_runs(
    leaves: list[Leaf], smoothing: Any, operator: Operator, method: str, scope: str
) -> list[jax.Array]:
    """Smooth leaves by runs, where they lie if the method is "halo"."""
    if not leaves:
        return []
    arrays, walks, specs = zip(*leaves, strict=True)
    plan = Plan(walks, scope, operator.boundary)
    if method == "halo":
        return smooth_shards(arrays, smoothing, specs, plan)
    for walk, spec in zip(walks, specs, strict=True):
        check_whole_grids(method, walk, spec)
    run = partial(smooth_leaves, specs=specs, plan=plan)
    return _keep_shardings(run, list(arrays), smoothing)


def _keep_shardings(
    run: Callable[[list[jax.Array], Any], list[jax.Array]], leaves: list[jax.Array], smoothing: Any
) -> list[jax.Array]:
    """Return `run(leaves, σ)`, each result sharded like its leaf, on any kind of mesh."""
    traced = [] if is_number(smoothing) else [jnp.asarray(smoothing)]

    def call(leaves: list[jax.Array], traced: list[jax.Array]) -> list[jax.Array]:
        return run(leaves, traced[0] if traced else smoothing)

    shardings = [jax.typeof(leaf).sharding for leaf in leaves]
    if any(AxisType.Explicit in (sharding.mesh.axis_types or ()) for sharding in shardings):
        call = auto_axes(call, out_sharding=shardings)
    pairs = zip(call(leaves, traced), leaves, strict=True)
    return [shard_alike(smoothed, leaf)[0] for smoothed, leaf in pairs]
