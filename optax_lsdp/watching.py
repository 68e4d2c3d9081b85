"""Estimate from the releases of a private run alone how far the training loss has come down.

A release yₜ is the noisy mean of clipped gradients at the parameters wₜ. Its conditional mean is
ḡₜ, the clipped gradient averaged over the whole dataset, and its error is εₜ = ξₜ + ζₜ. The noise
ξₜ is Gaussian with covariance s²I. The sampling error ζₜ has a covariance Σₜ of trace at most v².
Poisson batches of expected size b, sampled at rate q, have v² = C²(1 − q)/b: Σₜ is (1 − q)/b times
the mean of cᵢcᵢᵀ over all clipped gradients cᵢ, and ‖cᵢ‖ ≤ C. Batches of b examples of n, without
replacement, have v² = C²(n − b)/((n − 1)b), from the *centred* second moment. Full batches: v = 0.

The step Δₜ = wₜ₊₁ − wₜ does the work ½⟨Δₜ, ḡₜ + ḡₜ₊₁⟩. Both terms are estimated as follows.

- *The end of the step*: Δₜ is known before εₜ₊₁ is drawn, so ⟨Δₜ, yₜ₊₁⟩ has the conditional mean
  ⟨Δₜ, ḡₜ₊₁⟩ and at most the conditional variance (s² + v²)‖Δₜ‖².
- *The start of the step*: Δₜ depends on εₜ. By Stein's identity E⟨Δₜ, ξₜ⟩ = s² E tr Jₜ for the
  Jacobian Jₜ = ∂Δₜ/∂yₜ, and Hutchinson's estimate of s² tr Jₜ is subtracted: the optimizer is
  also asked for its update at yₜ + hω with public signs ω and h = s/8. The difference p of both
  updates gives s²⟨ω, p⟩/h. This is exact if the optimizer is linear and treats every entry by
  itself, like SGD with momentum. A finite h serves optimizers with jumps too: if updates are signs,
  it counts the entries within h of the jump. After eight steps, only every eighth step is probed. A
  probe serves all steps until the next probe, which corrects for linear drift of tr J; other drift
  is a bias. Optimizers that apply updates only in some steps are probed in every step.

The *middle* estimate is the mean of the two estimates. Its error in step t is the sum of two terms:
½⟨Δₜ₋₁ + Δₜ, εₜ⟩ − ½s² tr Jₜ, and Hutchinson's error. Given everything before εₜ, both terms have
the mean 0: they are martingale differences, so variances add. With full batches, the first term has
the variance ¼s² E‖Δₜ₋₁ + Δₜ‖² + ¼s⁴ tr Jₜ² (Stein's identity again). The expectation of ‖p‖²/h² is
‖Jₜ‖²_F, which is at least tr Jₜ². Hutchinson's estimate of tr Jₜ has at most the variance 2‖Jₜ‖²_F.
This variance is estimated by half the squared change of the estimate since the last probe, which
includes drift, plus 1/m of the bound at probe m. Errors that share a probe add before squaring.

With an `AdaptiveClip`, s and v are multiplied by a factor that depends on the noisy slack of the
step. Given slack and past, ξₜ is still Gaussian, because the noise of the slack is independent. So
all results hold with s = sₜ, and ḡₜ is the mean that the factor of step t gives. If batches are
sampled, the factor and ζₜ depend on the same batch; the correlation of the two is neglected.

If batches are sampled, the start has one more term, E⟨Δₜ, ζₜ⟩ = tr JₜΣₜ. It is at most 0 for an
optimizer that descends and at least −λv², where λ is the largest entry of |p|/h. No product of
releases reveals this term: they only show its sum with the curvature ΔₜᵀHΔₜ, for the Hessian H. So
the middle estimate is a lower limit, and there are two upper limits: the middle estimate plus ½λv²
per step, and the sum of all ends, which is too high by half of any positive curvature. The curve
is the smaller upper limit, and half its distance to the lower limit is added to the standard error.

The bound (s² + v²)‖Δₜ‖² is far above the variance if sampling errors point in many directions. So
the variance from sampling is estimated: half the squared differences of consecutive ends, less the
known variance from noise. This errs upward. After t steps, a share 1/t of the bound is added.

References: Stein 1981, Estimation of the Mean of a Multivariate Normal Distribution; Hutchinson
1990, A Stochastic Estimator of the Trace of the Influence Matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp._mesh as mesh
from optax_lsdp._checks import check_non_negative, check_positive, check_whole, frozen_number
from optax_lsdp._clipped import has_noise, is_before_noise
from optax_lsdp._keys import hashed_signs
from optax_lsdp._trees import applied_change, check_shapes, compute_once, widen, with_row
from optax_lsdp._types import PyTree
from optax_lsdp.correlated_noise import has_correlated_noise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PROBE = 1 / 8  # h/s: larger h blur the jumps of an optimizer, smaller h make estimates noisier
_EVERY = 8  # steps from one probe to the next. The first 8 steps are all probed.


class WatchSums(NamedTuple):
    """Sums over all steps. For the terms, see the docstring of the module."""

    ends: jax.Array  # ⟨Δₜ, yₜ₊₁⟩
    ends_noise: jax.Array  # the variance of `ends` that comes from noise
    sampling: jax.Array  # a bound on the variance of `ends` that comes from sampling
    jumps: jax.Array  # half the squared differences of consecutive ends
    middle: jax.Array  # the middle estimate, plus the start of a step that has not ended
    middle_noise: jax.Array  # the variance of `middle` that comes from noise
    lowered: jax.Array  # a bound on how much sampling has lowered `middle`


class Probe(NamedTuple):
    """The last probe's estimates of the Jacobian J = ∂Δ/∂y. For p, h and λ, see the module."""

    trace: jax.Array  # tr J, with Hutchinson's error
    square: jax.Array  # ‖p‖²/h², whose mean is ‖J‖²_F
    steepest: jax.Array  # λ
    doubt: jax.Array  # the estimated variance of `trace`
    used: jax.Array  # the sum of ½s² over the steps that have used this probe
    steps: jax.Array  # how many steps with noise have used this probe


_PROBED = len(Probe._fields)


class WatchState(NamedTuple):
    """The optimizer's state, its last step and sums over steps, computed from releases alone."""

    optimizer: optax.OptState
    step: jax.Array  # how many releases were seen
    noisy: jax.Array  # how many of them had noise; an `AdaptiveClip` can make a release zero
    move: optax.Updates  # Δ, the last step
    numbers: jax.Array  # ‖Δ‖², the last ⟨Δₜ, yₜ₊₁⟩, a `Probe` and `WatchSums`, in this order: (15,)
    ratio: jax.Array  # for each leaf, of size d, the mean of (‖y‖² − s²d)/(s²d)
    last: jax.Array  # the last point of the curve and its standard error: (2,)
    curve: jax.Array  # row t: the work of the first t steps and its standard error: (steps, 2)


class TrainingCurve(NamedTuple):
    """How far the clipped loss has come down, estimated from releases alone; see `watch`.

    Attributes:
        steps: 0, 1, 2, …: how many steps were taken.
        work: the estimated change of the clipped loss in these steps.
        stderr: the standard error of `work`.
        signal_to_noise: for each leaf of size d, the mean of (‖y‖² − s²d)/(s²d), or 0 if d = 0,
            over releases y with noise of standard deviation s. After the first eight, it counts
            every eighth release: pure noise gives 0 ± 4/√(d·steps) in long runs. Sampling counts as
            signal. Releases that an `AdaptiveClip` makes zero do not count.
    """

    steps: np.ndarray
    work: np.ndarray
    stderr: np.ndarray
    signal_to_noise: PyTree

    def __repr__(self) -> str:
        last = map(describe_work, self.work[-1:], self.stderr[-1:])
        return f"TrainingCurve({', '.join([f'{len(self.steps)} points', *last])})"

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the curve with a band of two standard errors, by default in a new figure."""
        if ax is None:
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError("`plot` needs matplotlib; install matplotlib.") from error
            ax = pyplot.subplots()[1]
        ax.plot(self.steps, self.work)
        ax.fill_between(self.steps, *(self.work + x * self.stderr for x in (-2, 2)), alpha=0.3)
        ax.set(xlabel="steps", ylabel="change of the clipped loss")
        return ax


def watch(
    optimizer: optax.GradientTransformation,
    *,
    steps: int,
    stddev: optax.ScalarOrSchedule,
    sampling_stddev: optax.ScalarOrSchedule = 0.0,
    shard_specs: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Return the same optimizer, which also estimates how far the training loss has come down.

    `privatize` and `PrivacyPlan.optimizer` use this transform if you ask them to. Use it yourself
    in a chain of your own, around everything that follows the noisy mean. The updates do not
    change. The estimate uses nothing but the noisy means, so it costs no privacy, and
    `training_curve(state)` may be released. It needs memory for one copy of the parameters.

    **What is estimated.** Let ḡ be the mean of all clipped gradients over the dataset. A step from
    w to w + Δ does the work ½⟨Δ, ḡ(w) + ḡ(w + Δ)⟩, which is each example's change of loss, weighted
    by its clip factor and averaged, up to third order in Δ. The curve is the sum over the steps. If
    nothing is clipped, it is the change of the training loss. Otherwise it is called the change of
    the *clipped loss*. In general, clipped gradients are not the gradient of any function, so the
    change depends on the path, and the clipped loss has no value at a point.

    **Errors.** With full batches, and SGD with momentum or smoothing, the estimate has no bias. For
    other optimizers, such as Adam, its bias is small but not zero. Step sizes must change slowly:
    the curve is wrong if they alternate or return to old values every few steps. With batches that
    are sampled, the curve errs upward: it counts the curvature along a step twice, or it assumes
    that all clipped gradients are as long as the clip norm, whichever gives the lower curve. The
    standard error covers this, the noise and the sampling, if the curvatures along all steps have a
    positive sum. With small batches and large step sizes, the standard error is large. The estimate
    would be wrong with noise that is correlated between steps, with a standard deviation that
    depends on the release itself, with batches that depend on earlier batches, like those of
    `ShuffledSampler`, and with Poisson batches that are often truncated.

    Args:
        optimizer: everything that follows the noisy mean: smoothing, if any, and the optimizer.
        steps: how many steps to record.
        stddev: s, the standard deviation of the noise on the *mean*; a number or a schedule. If you
            pass `release_scale` to `update`, it multiplies s and v in this step.
        sampling_stddev: v = C·√((1 − q)/b) for Poisson batches of expected size b, sampled at rate
            q and clipped to `sensitivity` C; a number or a schedule. It is 0 for full batches.
        shard_specs: see `add_gaussian_noise`.

    >>> tx = watch(optax.sgd(0.5), steps=3, stddev=1e-6)
    >>> params = jnp.array(4.0)
    >>> state = tx.init(params)
    >>> for _ in range(3):  # the loss is w²/2, and w goes from 4 to 2 to 1 to 0.5
    ...     updates, state = tx.update(params, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> print(training_curve(state).work.round(3))  # 0, (2² − 4²)/2, (1² − 4²)/2
    [ 0.  -6.  -7.5]
    """
    check_whole("steps", steps)
    check_positive("stddev", stddev, schedule=True)
    check_non_negative("sampling_stddev", sampling_stddev, schedule=True)
    mesh.check_shard_specs(shard_specs)
    stddev, sampling_stddev = frozen_number(stddev), frozen_number(sampling_stddev)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> WatchState:
        step = jnp.zeros([], jnp.int32)
        # Each array of a state costs time in each step, so there are few.
        numbers = jnp.zeros(2 + _PROBED + len(WatchSums._fields))
        move, ratio = jax.tree.map(jnp.zeros_like, params), jnp.zeros(len(jax.tree.leaves(params)))
        curve = jnp.zeros((steps, 2))
        state = WatchState(None, step, step, move, numbers, ratio, curve[0], curve)
        first = inner.init(params)
        if has_noise(first):
            raise ValueError(
                "`optimizer` must be what follows the noise, got one that adds noise; write "
                "optax.chain(clip, noise, scale, watch(optimizer))."
            )
        return jax.tree.map(jnp.copy, state)._replace(optimizer=first)  # copies can be donated

    def update(
        updates: optax.Updates, state: WatchState, params: PyTree = None, **extra_args: object
    ) -> tuple[optax.Updates, WatchState]:
        releases = jax.tree.map(compute_once, updates)
        settings = [x(state.step) if callable(x) else x for x in (stddev, sampling_stddev)]
        s, v = jnp.asarray(settings, float) * jnp.asarray(extra_args.get("release_scale", 1), float)
        check_shapes(updates, state.move, "put `watch` after `add_gaussian_noise`")
        shards = mesh.read_shards(shard_specs, jax.tree.leaves(releases))
        length, last_end, *others = state.numbers
        before, sums = Probe(*others[:_PROBED]), WatchSums(*others[_PROBED:])

        moves, after = inner.update(releases, state.optimizer, params, **extra_args)
        move = applied_change(params, moves)
        is_noisy, is_always_due = s**2 > 0, _collects_updates(state.optimizer)
        is_due = (state.noisy < _EVERY) | (state.noisy % _EVERY == 0) | is_always_due

        def probe(ys: PyTree, _: PyTree, move: PyTree) -> tuple[jax.Array, jax.Array]:
            stddev = jnp.where(is_noisy, s, 1)
            signs, h = _public_signs(ys, state.step, shards), _PROBE * stddev
            there = jax.tree.map(lambda y, w: y + (h * w).astype(y.dtype), ys, signs)
            other, _ = inner.update(there, state.optimizer, params, **extra_args)
            turn = jax.tree.map(jnp.subtract, applied_change(params, other), move)
            slopes = mesh.sum_trees(shards, lambda w, p: (w * p, p * p), signs, turn)
            trace, square = (jnp.zeros(2) + slopes) / jnp.stack([h, h**2])
            count = (jnp.minimum(state.noisy, _EVERY - 1) + 1 + state.noisy // _EVERY).astype(float)
            doubt = jnp.minimum((trace - before.trace) ** 2 / 2 + 2 * square / count, 2 * square)
            steepest = mesh.largest_entry(shards, turn) / h
            probed = mesh.stack_scalars([trace, square, steepest, doubt, *2 * [jnp.zeros_like(s)]])
            each = _signal_to_noise(ys, stddev, shards)
            stands_for = jnp.where((state.noisy < _EVERY) | is_always_due, 1, _EVERY)
            share = jnp.where(is_noisy, stands_for / (state.noisy + stands_for), 0)
            return probed, state.ratio + share.astype(float) * (each - state.ratio)

        def with_products(rest: Callable[..., tuple[jax.Array, ...]]) -> Callable[..., PyTree]:
            # Here, because XLA for CPUs computes the operands of a `lax.cond` only once.
            return lambda *trees: (mesh.sum_trees(shards, _products, *trees), *rest(*trees))

        last = state.numbers[2 : 2 + _PROBED], state.ratio
        branches = with_products(probe), with_products(lambda *_: last)
        products, probed, ratio = jax.lax.cond(is_due, *branches, releases, state.move, move)
        end, ahead, both, ahead_length = jnp.zeros(4) + products
        found = Probe(*probed)
        used = found.used + s**2 / 2
        share = jnp.where(is_due & is_noisy, (1 - 1 / jnp.maximum(before.steps, 1)) / 2, 0)
        drift = share * before.used * (found.trace - before.trace)
        ended = sums._replace(
            ends=sums.ends + end,
            ends_noise=sums.ends_noise + s**2 * length,
            sampling=sums.sampling + v**2 * length,
            jumps=sums.jumps + jnp.where(state.step > 1, (end - last_end) ** 2 / 2, 0),
            middle=sums.middle + end / 2,
            middle_noise=sums.middle_noise + s**2 * length / 4,
        )
        point = _combine(ended, state.step)
        started = ended._replace(
            middle=ended.middle + (ahead - s**2 * found.trace) / 2 - drift,
            middle_noise=sums.middle_noise
            + s**2 * (both + s**2 * found.square) / 4
            + (used**2 - found.used**2) * found.doubt,
            lowered=sums.lowered + v**2 * found.steepest / 2,
        )
        used_once = found._replace(used=used, steps=found.steps + jnp.where(is_noisy, 1, 0))
        return moves, WatchState(
            optimizer=after,
            step=optax.safe_increment(state.step),
            noisy=jnp.where(is_noisy, optax.safe_increment(state.noisy), state.noisy),
            move=optax.tree.cast_like(move, state.move),
            numbers=mesh.stack_scalars([ahead_length, end, *used_once, *started]),
            ratio=ratio,
            last=point,
            curve=with_row(state.curve, state.step, point),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _collects_updates(state: optax.OptState) -> bool:
    """Return whether an optimizer with this state applies updates only in some steps."""

    def collects(node: object) -> bool:
        return type(node).__name__ in ("MultiStepsState", "ApplyEvery")

    return any(map(collects, jax.tree.leaves(state, is_leaf=collects)))


def training_curve(state: PyTree) -> TrainingCurve:
    """Return the curve that a watched optimizer has recorded in its state; see `watch`.

    `state` is the state of `watch`, or a tree that contains it, such as the state of `privatize`, a
    `TrainState` or the `opt_state` of an `nnx.Optimizer`. The work of a step is known after the
    next release. So after t releases, the curve has the t points from 0 to t − 1 steps.

    >>> training_curve(watch(optax.sgd(0.1), steps=9, stddev=1.0).init(jnp.zeros(3)))
    TrainingCurve(0 points)
    """
    watched = find_watch_state(state)
    if watched is None:
        raise ValueError(
            "`state` must be the state of a watched optimizer, got one without a curve; watch with "
            "watch=True or `watch_steps`; with Flax NNX pass `optimizer.opt_state`."
        )
    if has_correlated_noise(state):
        raise ValueError("`state` must have independent noise, got correlated noise; see `watch`.")
    if is_before_noise(state, _is_watch_state):
        raise ValueError(
            "`state` must come from a chain with `watch` after the noise, got one with `watch` "
            "before the noise, whose curve is secret; put `watch` after `add_gaussian_noise`."
        )
    found = jax.device_get(watched._replace(optimizer=None, move=None))
    leaves, structure = jax.tree.flatten(watched.move)
    each = [float(x) if leaf.size else 0.0 for x, leaf in zip(found.ratio, leaves, strict=True)]
    work, stderr = found.curve[: found.step].T
    return TrainingCurve(np.arange(len(work)), work, stderr, jax.tree.unflatten(structure, each))


def find_watch_state(state: PyTree) -> WatchState | None:
    """Return the first state of `watch` in a tree, or None if there is none."""
    return next(filter(_is_watch_state, jax.tree.leaves(state, is_leaf=_is_watch_state)), None)


def describe_work(work: float, stderr: float) -> str:
    """Return a text with the work, the change of the clipped loss, and its standard error.

    >>> describe_work(-0.2134, 0.0312)
    'clipped loss −0.213 ± 0.031'
    """
    digits = max(1 - math.floor(math.log10(stderr)), 0) if 0 < stderr < math.inf else 2
    return f"clipped loss {work:.{digits}f} ± {stderr:.{digits}f}".replace("-", "−")


def _combine(sums: WatchSums, count: jax.Array) -> jax.Array:
    """Return the estimated work of the first `count` steps, and its standard error: (2,).

    Without sampling, the work is the middle estimate. With sampling, it is the smaller upper limit.
    """
    gap = jnp.clip(sums.ends - sums.middle, 0, sums.lowered)
    most = jnp.maximum(sums.ends_noise, sums.middle_noise)
    noise = jnp.where(sums.lowered > 0, most, sums.middle_noise)
    count = jnp.maximum(count, 1).astype(float)
    found = sums.jumps * count / jnp.maximum(count - 1, 1) - noise
    sampling = jnp.minimum(sums.sampling, jnp.maximum(found, 0) + sums.sampling / count)
    # The gap is not random, so it is not added in squares: two standard errors cover it whole.
    return mesh.stack_scalars([sums.middle + gap, jnp.sqrt(noise + sampling) + gap / 2])


def _public_signs(tree: PyTree, step: jax.Array, shards: Sequence[mesh.Shard]) -> PyTree:
    """Return a tree of ±1 that depends on the step, the leaf and the shard alone."""
    leaves, structure = jax.tree.flatten(tree)
    signs = []
    for index, (leaf, shard) in enumerate(zip(leaves, shards, strict=True)):
        seed = 31 * step + index
        for axis in shard.split_axes:
            seed = 31 * seed + jax.lax.axis_index(axis)
        draw = mesh.with_automatic_axes(partial(hashed_signs, leaf.shape), mesh.explicit_spec(leaf))
        signs.append(draw(seed))
    return jax.tree.unflatten(structure, signs)


def _signal_to_noise(
    releases: optax.Updates, stddev: jax.Array, shards: Sequence[mesh.Shard]
) -> jax.Array:
    """Return (‖y‖² − s²d)/(s²d) for each leaf y of size d and noise of standard deviation s."""
    energies = mesh.sum_leaves(shards, lambda y: (jnp.square(widen(y)),), releases)
    leaves = zip(jax.tree.leaves(releases), shards, strict=True)
    sizes = [float(y.size * mesh.axis_size(x.split_axes)) for y, x in leaves]
    return jnp.concatenate([jnp.zeros(0), *energies]) / (stddev**2 * jnp.array(sizes)) - 1


def _products(*leaves: jax.Array) -> tuple[jax.Array, ...]:
    y, before, now = map(widen, leaves)
    return before * y, now * y, jnp.square(before + now), now * now


def _is_watch_state(node: object) -> bool:
    return isinstance(node, WatchState)
