"""Provide `laplacian_smooth`: check its arguments, arrange leaves, and smooth them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_choice, check_non_negative, check_whole, is_number
from optax_lsdp._clipped import unmarked_leaves
from optax_lsdp._mesh import check_shard_specs, read_shards
from optax_lsdp._trees import wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.smoothing._auto import LAYOUTS, auto_smooth
from optax_lsdp.smoothing._dispatch import METHODS, smooth_leaves
from optax_lsdp.smoothing._layout import Layout, Leaf, Scope, arrange_leaf, check_layout
from optax_lsdp.smoothing._spectrum import BOUNDARIES, Boundary
from optax_lsdp.smoothing.methods.spectral import LARGEST_SMOOTHING, Operator, noise_left

VarianceAfter = Callable[[jax.Array, PyTree, PyTree, optax.Updates], jax.Array]


class Denoiser(optax.GradientTransformationExtraArgs):
    """A linear transform that can compute the variance of the noise that it leaves.

    Attributes:
        variance_after: a function (variance, before, after, updates) → variance. `variance` has
            shape (leaves,) and holds, for each leaf of `updates`, the variance of the noise in an
            entry. `before` and `after` are the transform's states before and after the update. The
            result has the shape (leaves,) and holds the variance after the transform. The function
            assumes noise that is independent between entries and steps.
    """

    variance_after: VarianceAfter

    def __new__(
        cls,
        init: optax.TransformInitFn,
        update: optax.TransformUpdateExtraArgsFn,
        variance_after: VarianceAfter,
    ) -> Self:
        """Return the transform of `init` and `update`."""
        self = super().__new__(cls, init, update)
        self.variance_after = variance_after
        return self

    def __getnewargs__(self) -> tuple[object, ...]:  # so that copies keep `variance_after`
        return (*self, self.variance_after)


class LaplacianSmoothState(NamedTuple):
    """The state of `laplacian_smooth`: the number of steps so far, for schedules of σ."""

    step: jax.Array


def laplacian_smooth(
    smoothing: optax.ScalarOrSchedule | Literal["auto"],
    *,
    scope: Scope = "leaf",
    layout: Layout | None = None,
    boundary: Boundary = "periodic",
    order: int | None = None,
    method: Literal["auto", "recursive", "halo", "banded", "matrix", "fft"] = "auto",
    shard_specs: PyTree = None,
    stddev: optax.ScalarOrSchedule | None = None,
    sampling_stddev: optax.ScalarOrSchedule = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Smooth updates v to u = (I − σL)⁻¹ v, where L is the second difference on a ring.

    Smoothing keeps the mean and shrinks differences between neighbouring entries. It multiplies the
    variance of independent noise by β ≈ (1 + 2σ)/(1 + 4σ)^1.5. Smoothing comes after the noise, so
    it changes neither ε nor the noise that ε requires. It helps if neighbouring entries have
    similar gradients, and hurts otherwise; see the manual's page on smoothing.

    Args:
        smoothing: σ from 0 to 1e30; a number or a schedule. Zero returns the updates unchanged.
            "auto" chooses σ and the layout of each leaf from past updates; see `auto_smooth`.
        scope: "leaf" smooths every array by itself. "tree" smooths all arrays as one ring, in the
            order of `jax.tree.leaves`.
        layout: which entries are neighbours. "stored" follows the row-major order of every array.
            "inputs", the default, puts the inputs of each output unit next to each other, with
            spatial axes innermost. It takes the last axis as outputs, the axis before it as inputs,
            and all earlier axes as spatial. It reads a Dense kernel (in, out) as (out, in), a Conv
            kernel (H, W, in, out) as (out, in, H, W), and an embedding along its vocabulary. Arrays
            named `weight` or `weight_…`, as in Equinox, are stored as (out, in, …), so "inputs"
            reads them as stored. "images" smooths the windows of Conv kernels, and Dense kernels
            with as many inputs as a square image of at least 4 × 4 pixels with one or three
            channels. It leaves all other leaves unchanged. With smoothing="auto", the default is
            to choose between "inputs" and "images" for each leaf. A function
            `(path, shape) → "inputs" | "stored" | "images" | Grid(...) | None` chooses for each
            leaf; `path` is, for example, "params/Dense_0/kernel". None leaves the leaf unchanged.
        boundary: "periodic" joins the last entry to the first. "neumann" reflects both ends: each
            end is its own neighbour.
        order: n, to smooth with (I + (−1)ⁿ σ Lⁿ)⁻¹. Higher orders keep more of slow waves and
            less of fast waves. None means 1. If you pass a number and use
            `optax.inject_hyperparams`, set static_args=("layout", "order").
        method: how to solve the system. Up to rounding, all methods give the same result.
            "recursive" takes linear time for any σ. "halo" is "recursive" for sharded arrays:
            devices exchange two numbers for each contiguous segment that they hold. On TPUs with
            automatic mesh axes, XLA splits "recursive" itself, and may exchange more numbers.
            "banded" cuts the kernel off where it is too small to change a float, and needs σ as a
            number. "matrix" is for small grids. "fft" covers every case. "auto" chooses the fastest
            method that can smooth the leaf. On TPUs it never chooses "fft": for 10⁶ entries on TPU
            v5e, the compiler estimates 114 million cycles for an FFT, and 19 thousand for a copy;
            for 10⁷ entries, the FFT does not fit into memory. On one TPU chip, and inside
            `shard_map` where no device splits the leaf, "auto" smooths large leaves in blocks if σ
            is a number up to about 50. Smoothing in blocks rounds each factor of a product to a
            sum of two bfloat16 numbers, so an entry has an error of at most 2⁻¹⁵ times the largest
            entry. Smoothing is post-processing, so this rounding does not change ε. For float32
            precision on a TPU, pass "recursive".
        shard_specs: how `shard_map` splits the updates; see `add_gaussian_noise`. Here a spec must
            not have more entries than a leaf has dimensions. If one spec does not fit all leaves,
            pass a tree of specs.
        stddev: for smoothing="auto" only; see `auto_smooth`.
        sampling_stddev: for smoothing="auto" only; see `auto_smooth`.

    Raises:
        TypeError: if a leaf of `shard_specs` is not a PartitionSpec, or a leaf of `updates` is not
            a real floating-point array.
        ValueError: if an argument has a value that is not listed above; if `method` cannot smooth a
            leaf; if `updates` still carry the mark of `clipped_grad`; if a scheduled σ is out of
            range (under `jit`, the result is NaN instead); or, inside `shard_map`, if a leaf
            varies over a mesh axis that its spec does not name.

    >>> import numpy as np
    >>> tx = laplacian_smooth(1.0)
    >>> spike = jnp.array([4.0, 0.0, 0.0, 0.0])
    >>> smoothed, _ = tx.update(spike, tx.init(spike))
    >>> print(np.asarray(smoothed).round(3))  # the mean is still 1
    [1.867 0.8   0.533 0.8  ]
    """
    if isinstance(smoothing, str):
        check_choice("smoothing", smoothing, ("auto",))
        check_choice("scope", scope, ("leaf",))
        if stddev is None:
            raise ValueError(
                "`stddev` must be set with smoothing='auto', got None; pass the standard deviation "
                "of the noise in the updates, or use privatize(smoothing='auto'), which knows it."
            )
        return auto_smooth(
            optax.identity(),
            stddev=stddev,
            sampling_stddev=sampling_stddev,
            layouts=LAYOUTS if layout is None else (layout,),
            boundary=boundary,
            order=order,
            method=method,
            shard_specs=shard_specs,
        )
    layout = "inputs" if layout is None else layout
    fixed = smoothing if callable(smoothing) else _checked(smoothing)
    check_choice("scope", scope, ("leaf", "tree"))
    check_choice("boundary", boundary, BOUNDARIES)
    check_whole("order", 1 if order is None else order)
    check_choice("method", method, METHODS)
    check_layout(layout)
    check_shard_specs(shard_specs)

    def arrange(leaves: list[tuple[str, jax.Array]]) -> dict[int, Leaf]:
        shards = read_shards(shard_specs, [array for _, array in leaves])
        if shard_specs is None and any(shard.varying is None for shard in shards):
            raise ValueError(
                "`shard_specs` must be set where JAX does not track which axes an array varies "
                "over (check_vma=False, pmap), got None; if nothing is split, pass PartitionSpec()."
            )
        return {
            index: leaf
            for index, ((name, array), shard) in enumerate(zip(leaves, shards, strict=True))
            if (leaf := arrange_leaf(layout, name, array, shard)) is not None
        }

    def init(params: optax.Params) -> LaplacianSmoothState:
        del params
        return LaplacianSmoothState(step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: LaplacianSmoothState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, LaplacianSmoothState]:
        del params, extra_args
        leaves, structure = unmarked_leaves("laplacian_smooth", updates)
        now = _checked(fixed(state.step)) if callable(fixed) else fixed
        state = LaplacianSmoothState(optax.safe_increment(state.step))
        if isinstance(now, float) and now == 0:
            return updates, state
        results = [leaf for _, leaf in leaves]
        arranged = arrange(leaves)
        if arranged:
            operator = Operator(now, boundary, order or 1)
            smoothed = smooth_leaves([*arranged.values()], operator, scope, method)
            for index, array in zip(arranged, smoothed, strict=True):
                results[index] = _unless_zero_or_invalid(now, results[index], array)
        return jax.tree.unflatten(structure, results), state

    def variance_after(
        variance: jax.Array,
        before: LaplacianSmoothState,
        after: LaplacianSmoothState,
        updates: optax.Updates,
    ) -> jax.Array:
        del after
        now = _checked(fixed(before.step)) if callable(fixed) else fixed
        operator = Operator(now, boundary, order or 1)
        leaves = arrange(unmarked_leaves("laplacian_smooth", updates)[0])
        grids = {index: leaf.arrangement.grid for index, leaf in leaves.items()}
        if scope == "tree":
            grids = dict.fromkeys(grids, (sum(grid[0] for grid in grids.values()),))
        for index, grid in grids.items():
            variance = variance.at[index].multiply(noise_left(operator, grid))
        return variance

    return Denoiser(init, update, variance_after)


def _checked(smoothing: object) -> jax.Array | float:
    """Return σ as a float if it is a number, otherwise as an array. Raise if it is out of range."""
    check_non_negative("smoothing", smoothing, schedule=True)
    if not is_number(smoothing):
        return jnp.asarray(smoothing)
    if smoothing > LARGEST_SMOOTHING:
        raise ValueError(f"`smoothing` must be at most {LARGEST_SMOOTHING:g}, got {smoothing!r}.")
    return float(smoothing)


def _unless_zero_or_invalid(
    smoothing: jax.Array | float, leaf: jax.Array, smoothed: jax.Array
) -> jax.Array:
    """Return `leaf` if σ is zero, NaN if a traced σ is out of range, and `smoothed` otherwise."""
    now = jnp.asarray(smoothing, wide_dtype(leaf))
    is_zero = jnp.abs(now) < jnp.finfo(now.dtype).tiny  # or too small to distinguish from zero
    chosen = jnp.where(is_zero, leaf, smoothed)
    if isinstance(smoothing, float):
        return chosen
    return jnp.where((now >= 0) & (now <= LARGEST_SMOOTHING), chosen, jnp.nan)
