"""Filter noisy updates in time, and keep noise out of Adam's second moments.

`low_pass` is a recursive filter of the sequence of updates. `scale_by_debiased_adam` subtracts the
variance of the noise from Adam's second moments. `denoised` computes this variance, leaf by leaf,
after a sequence of `Denoiser`s, such as smoothing and filters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

import optax_lsdp._checks as checks
from optax_lsdp._clipped import unmarked_leaves
from optax_lsdp._trees import check_shapes, describe_arrays, wide_dtype, widen
from optax_lsdp._types import PyTree
from optax_lsdp.smoothing import (
    Denoiser,
    TimeFilter,
    check_followed,
    find_auto_state,
    laplacian_smooth,
    read_filter,
)

Stage: TypeAlias = optax.ScalarOrSchedule | Literal["auto"] | optax.GradientTransformation
Smoothing: TypeAlias = Stage | Sequence[Stage]


class LowPassState(NamedTuple):
    """The state of a `low_pass` filter of order N, for updates with `leaves` leaves.

    Attributes:
        delays: the N delays of the recursion, each a tree like the updates; see `TimeFilter`.
        response: the delays that the constant signal 1 would have produced, with shape (N,).
        covariance: the covariance of the noise in the N delays of an entry: (leaves, N, N).
        noise_variance: the variance of the noise in each entry of the last output: (leaves,). The
            noise of the input is taken to have variance 1, unless `privatize` passes its variance.
    """

    delays: tuple[optax.Updates, ...]
    response: jax.Array
    covariance: jax.Array
    noise_variance: jax.Array


class ScaleByDebiasedAdamState(NamedTuple):
    """The state of `scale_by_debiased_adam`: Adam's moments, and how much noise is in them.

    Attributes:
        step: the number of steps taken so far.
        mu: the moving average of the updates.
        nu: the moving average of the squared updates.
        noise: the moving average of the noise's variance, weighted like `nu`: (leaves,).
    """

    step: jax.Array
    mu: optax.Updates
    nu: optax.Updates
    noise: jax.Array


def low_pass(numerator: Sequence[float], denominator: Sequence[float] = (1.0,)) -> Denoiser:
    """Filter the sequence of updates: y_t = Σₖ bₖ x_(t−k) − Σₖ aₖ y_(t−k), corrected at the start.

    The gradient changes slowly from step to step, and the noise does not. So a filter that keeps
    slow changes removes noise, at no cost in ε. Like every filter, it also delays the gradient,
    which can make large step sizes unstable.

    The output is divided by the filter's response to the constant signal 1. So constant updates
    pass unchanged from the first step on, and multiplying `numerator` by a number changes nothing.
    `smoothing.low_pass_gain` is the share of the noise's variance that the filter leaves.

    The filter treats every entry by itself, so it runs on any mesh. Its state holds N copies of the
    parameters in float32 or float64, where N is the order of the filter. Put it in front of the
    optimizer: `privatize(optax.chain(low_pass(...), optax.sgd(0.1)), ...)`. Together with
    `scale_by_debiased_adam`, put it into `smoothing=[..., low_pass(...)]` of `privatize` instead.

    Args:
        numerator: b₀, b₁, …, as `scipy.signal` returns them; b₀ must not be 0.
        denominator: a₀, a₁, …; all poles of the filter must be inside the unit circle. The default
            gives a weighted mean of the last updates. Both arguments are divided by a₀.
            `low_pass([0.1], [1, -0.9])` is `optax.ema(0.9)`. `low_pass(*scipy.signal.butter(1,
            0.1))` is a Butterworth filter that keeps frequencies below 0.05 per step.

    Raises:
        TypeError: if an argument is not a sequence of numbers.
        ValueError: if the filter is unstable in float32, or its response to a constant signal does
            not stay positive.

    Reference: Zhang et al. 2024, DOPPLER: Differentially Private Optimizers with Low-pass Filter.

    >>> tx = low_pass([0.5], [1, -0.5])
    >>> state = tx.init(jnp.zeros([]))
    >>> for update in (3.0, 0.0):  # first 3, then (¼·3 + ½·0) / (¼ + ½)
    ...     filtered, state = tx.update(jnp.array(update), state)
    ...     print(filtered)
    3.0
    1.0
    """
    recursion = read_filter(numerator, denominator)
    order, direct = len(recursion.entry), recursion.direct

    def init(params: optax.Params) -> LowPassState:
        leaves = len(jax.tree.leaves(params))
        return LowPassState(
            delays=tuple(_zeros_like(params) for _ in range(order)),
            response=jnp.zeros(order),
            covariance=jnp.zeros((leaves, order, order)),
            noise_variance=jnp.zeros(leaves),
        )

    def update(
        updates: optax.Updates,
        state: LowPassState,
        params: optax.Params | None = None,
        *,
        entering_variance: jax.Array | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, LowPassState]:
        del params, extra_args
        unmarked_leaves("low_pass", updates)
        if order:
            check_shapes(updates, state.delays[0], "call `init` with the parameters")
        matrix, entry = (jnp.asarray(x, state.response.dtype) for x in recursion[:2])
        response = direct + (state.response[0] if order else jnp.zeros([]))
        variance = jnp.ones_like(state.noise_variance)
        if entering_variance is not None:
            variance = entering_variance.astype(variance.dtype)
        noise = direct**2 * variance + (state.covariance[:, 0, 0] if order else 0)
        spread = jnp.einsum(
            "ij,ljk,mk->lim", matrix, state.covariance, matrix, precision=jax.lax.Precision.HIGHEST
        )
        after = LowPassState(
            delays=_next_delays(state.delays, updates, recursion),
            response=jnp.sum(matrix * state.response, axis=1) + entry,
            covariance=spread + variance[:, None, None] * jnp.outer(entry, entry),
            noise_variance=noise / response**2,
        )

        def output(x: jax.Array, *delays: jax.Array) -> jax.Array:
            total = sum(delays[:1], direct * widen(x))
            return (total / response.astype(total.dtype)).astype(x.dtype)

        return jax.tree.map(output, updates, *state.delays), after

    def variance_after(variance: PyTree, before: PyTree, after: PyTree, _: PyTree) -> jax.Array:
        check_followed(numerator, denominator)
        return after.noise_variance

    return Denoiser(init, update, variance_after)


def scale_by_debiased_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    floor: float = 1.0,
    noise_stddev: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale updates as Adam would without noise: u = m̂ / √max(v̂ − n̂, floor·e).

    Adam divides m̂, the average of updates, by √v̂, where v̂ is the average of squared updates. Noise
    adds its variance to v̂ and often dominates v̂. Then all entries are divided by the same number,
    and Adam is SGD with momentum. This transform subtracts n̂, the average of the noise's variance,
    which is public. Let e = n̂·√(2g), with g = (1 − b2)(1 + b2ᵗ) / ((1 + b2)(1 − b2ᵗ)) in step t. If
    updates are only noise, independent between steps, e is the standard error of v̂. So `floor`
    prevents a long step where v̂ − n̂ is small only by chance.

    Inside `privatize`, noise multiplier, clip norm, batch size, smoothing and `low_pass` filters
    determine the variance for each leaf and step. Schedules and one `AdaptiveClip` are allowed.
    `dp_adam(..., debias=True)` is the whole chain. In a chain of your own, pass `noise_stddev`.
    Without noise, the result is that of `optax.scale_by_adam`.

    Args:
        b1: the decay of the average m of updates.
        b2: the decay of the averages v and n.
        eps: added to the root, as in Adam.
        floor: the least value of the corrected second moment, in units of e. The DP-AdamBC paper
            has a constant instead, which must be tuned to the scale of the noise.
        noise_stddev: the standard deviation of the noise in the updates that this transform gets,
            after smoothing and filters: one number, or a tree with one number per leaf, or a
            schedule of either. The default, None, is for `privatize`. Smoothing multiplies the
            variance by `smoothing.grid_beta`, and `low_pass` by `smoothing.low_pass_gain`. If the
            noise is correlated between steps, pass a schedule of its standard deviation.

    Raises:
        ValueError: if a number is out of range; or, in `update`, if the noise is not known. The
            `init` of `privatize` refuses an `optimizer` with both this transform and `low_pass`.

    Reference: Tang et al. 2024, DP-AdamBC: Your DP-Adam Is Actually DP-SGD (Unless You Apply Bias
    Correction).

    >>> tx = scale_by_debiased_adam(noise_stddev=3.0)
    >>> updates, _ = tx.update(jnp.array([5.0]), tx.init(jnp.zeros(1)))
    >>> print(updates.round(3))  # 5 / √max(25 − 9, 9·√2)
    [1.25]
    """
    for name, decay in (("b1", b1), ("b2", b2)):
        checks.check_non_negative(name, decay)
        if checks.is_number(decay) and decay >= 1:
            raise checks.refusal(name, "below 1", decay)
    checks.check_non_negative("eps", eps)
    checks.check_positive("floor", floor)
    if not callable(noise_stddev):
        noise_stddev = jax.tree.map(checks.frozen_number, noise_stddev)  # a copy
        for stddev in jax.tree.leaves(noise_stddev):
            checks.check_non_negative("noise_stddev", stddev)

    def init(params: optax.Params) -> ScaleByDebiasedAdamState:
        zeros, step = jnp.zeros(len(jax.tree.leaves(params))), jnp.zeros([], jnp.int32)
        return ScaleByDebiasedAdamState(step, _zeros_like(params), _zeros_like(params), zeros)

    def update(
        updates: optax.Updates,
        state: ScaleByDebiasedAdamState,
        params: optax.Params | None = None,
        *,
        noise_variance: jax.Array | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, ScaleByDebiasedAdamState]:
        del params, extra_args
        unmarked_leaves("scale_by_debiased_adam", updates)
        check_shapes(updates, state.mu, "call `init` with the parameters")
        if noise_stddev is not None:
            now = noise_stddev(state.step) if callable(noise_stddev) else noise_stddev
            noise_variance = _per_leaf(now, updates) ** 2
        variance = _known(noise_variance, state)
        noise = optax.tree.update_moment(variance, state.noise, b2, 1)
        wide, step = jax.tree.map(widen, updates), optax.safe_increment(state.step)
        mu = optax.tree.update_moment(wide, state.mu, b1, 1)
        nu = optax.tree.update_moment(wide, state.nu, b2, 2)
        # The logarithm of a Python number has float64 precision. 1e-300 replaces a decay of 0.
        logs = (math.log(max(b, 1e-300)) if checks.is_number(b) else jnp.log(b) for b in (b1, b2))
        seen1, seen2 = (-jnp.expm1(step.astype(float) * log) for log in logs)  # 1 − bᵗ, for b ≈ 1
        error = jnp.sqrt(2 * (1 - b2) * (2 - seen2) / ((1 + b2) * seen2))
        least = floor * error * noise / seen2

        def scaled(u: jax.Array, m: jax.Array, v: jax.Array, *numbers: jax.Array) -> jax.Array:
            n, lowest, seen_m, seen_v = (number.astype(v.dtype) for number in numbers)
            second = jnp.maximum((v - n) / seen_v, lowest)
            return (m / seen_m / (jnp.sqrt(second) + eps)).astype(u.dtype)

        leaves, structure = jax.tree.flatten(updates)
        each = zip(leaves, jax.tree.leaves(mu), jax.tree.leaves(nu), noise, least, strict=True)
        scales = [scaled(*one, seen1, seen2) for one in each]
        after = ScaleByDebiasedAdamState(step, mu, nu, noise)
        return jax.tree.unflatten(structure, scales), after

    return optax.GradientTransformationExtraArgs(init, update)


def read_stages(
    smoothing: Smoothing, shard_specs: PyTree
) -> tuple[bool, list[optax.GradientTransformation]]:
    """Return whether the first stage is "auto", and the transforms of all other stages."""
    is_list = isinstance(smoothing, list | tuple) and not hasattr(smoothing, "update")
    stages = [*smoothing] if is_list else [smoothing]
    is_auto = bool(stages) and isinstance(stages[0], str) and stages[0] == "auto"
    transforms = []
    for stage in stages[is_auto:]:
        if isinstance(stage, str):
            demand = "a number, a schedule, a transform or a list of them, with 'auto' only first"
            raise checks.refusal("smoothing", demand, stage)
        if isinstance(stage, optax.GradientTransformation):
            transforms.append(stage)
            continue
        checks.check_non_negative("smoothing", stage, schedule=True)
        if not (checks.is_number(stage) and stage == 0):
            transforms.append(laplacian_smooth(stage, shard_specs=shard_specs))
    return is_auto, transforms


def denoised(
    stages: Sequence[optax.GradientTransformation],
    optimizer: optax.GradientTransformation,
    *,
    smooths: bool = False,
    varies: bool = False,
) -> optax.GradientTransformationExtraArgs:
    """Chain denoisers and an optimizer, and tell the optimizer how much noise is left.

    `update` accepts `noise_stddev`, the standard deviation of independent noise in `updates`. If
    all stages are `Denoiser`s, a debiased optimizer gets the variance after the last stage as
    `noise_variance`, with shape (leaves,). `smooths` says that `auto_smooth` precedes the stages.
    `varies` says that the noise varies or is correlated, so `auto_smooth` is refused as a stage.
    """
    transforms = [optax.with_extra_args_support(stage) for stage in (*stages, optimizer)]
    *before, last = transforms

    def init(params: optax.Params) -> tuple[optax.OptState, ...]:
        states = tuple(transform.init(params) for transform in transforms)
        if varies and find_auto_state(states) is not None:
            raise ValueError(
                "`smoothing` must be 'auto' with an AdaptiveClip, and a fixed σ with a "
                "`correlation`, got `auto_smooth`, whose `stddev` cannot follow the noise."
            )
        is_debiased = ScaleByDebiasedAdamState in _kinds(states[-1])
        in_time = [isinstance(state, LowPassState) for state in states[:-1]]
        if is_debiased and max(sum(in_time), len(in_time) - sum(in_time) + smooths) > 1:
            demand = "at most one smoothing and one filter if the optimizer is debiased"
            raise checks.refusal("smoothing", demand, f"{len(in_time) + smooths} stages")
        if {LowPassState, ScaleByDebiasedAdamState} <= _kinds(states[-1]):
            raise ValueError(
                "`smoothing` must hold the `low_pass` filter if the optimizer is debiased, got an "
                "optimizer with a filter; pass smoothing=[laplacian_smooth(...), low_pass(...)]."
            )
        return states

    def update(
        updates: optax.Updates,
        state: tuple[optax.OptState, ...],
        params: optax.Params | None = None,
        *,
        noise_stddev: jax.Array | float | None = None,
        release_scale: object = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, tuple[optax.OptState, ...]]:
        del release_scale  # `noise_stddev` is already multiplied by it
        is_known = noise_stddev is not None and ScaleByDebiasedAdamState in _kinds(state[-1])
        variance = _per_leaf(noise_stddev, updates) ** 2 if is_known else None
        states = []
        for stage, own in zip(before, state, strict=False):  # the last state is the optimizer's
            known = {} if variance is None else {"entering_variance": variance}
            outputs, after = stage.update(updates, own, params, **known, **extra_args)
            states.append(after)
            if variance is not None:
                follow = stage.variance_after if isinstance(stage, Denoiser) else None
                variance = follow(variance, own, after, updates) if follow else None
            updates = outputs
        known = {} if variance is None else {"noise_variance": variance}
        updates, after = last.update(updates, state[-1], params, **known, **extra_args)
        return updates, (*states, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _next_delays(
    delays: tuple[optax.Updates, ...], updates: optax.Updates, recursion: TimeFilter
) -> tuple[optax.Updates, ...]:
    """Return the next delays, A d + B x. Outside column 0, A only has ones above its diagonal."""

    def row(index: int) -> optax.Updates:
        first, own = float(recursion.matrix[index, 0]), float(recursion.entry[index])

        def one(x: jax.Array, front: jax.Array, *rest: jax.Array) -> jax.Array:
            return sum(rest, first * front + own * widen(x)).astype(front.dtype)

        return jax.tree.map(one, updates, delays[0], *delays[index + 1 : index + 2])

    return tuple(row(index) for index in range(len(delays)))


def _zeros_like(params: optax.Params) -> optax.Updates:
    """Return zeros in float32 or wider, sharded like the parameters."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(jnp.asarray(x))), params)


def _per_leaf(value: PyTree, updates: optax.Updates) -> jax.Array:
    """Return one number per leaf. `value` is one number for all leaves, or a tree of numbers."""
    given, leaves = jax.tree.leaves(value), jax.tree.leaves(updates)
    wanted: object = jax.tree.structure(updates)
    fits = wanted == jax.tree.structure(value)
    if jax.tree_util.all_leaves([value]):
        given, fits = given * len(leaves), True
    if not fits or any(map(jnp.shape, given)):
        demand = "`noise_stddev` must be one number, or a tree of numbers like the updates"
        raise ValueError(f"{demand}, got {describe_arrays(value)}.")
    return jnp.stack([jnp.asarray(one, float) for one in given]) if given else jnp.zeros(0)


def _known(noise_variance: jax.Array | None, state: ScaleByDebiasedAdamState) -> jax.Array:
    """Return the variance of the noise in each leaf. Raise if it is not known."""
    if noise_variance is None:
        raise ValueError(
            "`noise_stddev` must be set where the noise is not known, got None; pass it, or put "
            "`scale_by_debiased_adam` into `privatize` with at most one AdaptiveClip, without "
            "`correlation`, and with no other `smoothing` than 'auto', σ, `laplacian_smooth` and "
            "`low_pass`."
        )
    if noise_variance.shape != state.noise.shape:
        raise ValueError(
            "`scale_by_debiased_adam` must see all leaves inside `privatize`, got "
            f"{len(state.noise)} of {len(noise_variance)}; with optax.masked or optax.partition, "
            "pass `noise_stddev`."
        )
    return noise_variance.astype(state.noise.dtype)


def _kinds(state: optax.OptState) -> set[type]:
    """Return which of this module's state types occur in an optimizer's state."""
    own = (LowPassState, ScaleByDebiasedAdamState)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, own))
    return {type(node) for node in nodes}
