"""Estimate the distribution of gradient norms from the room that clipping leaves, at no cost in ε.

Let r be an upper bound on the norm of an example's clipped gradient, and C the clip norm. If r < C,
the example leaves room below the sensitivity. K slack coordinates fill this room: the first
m = ⌊K(1 − r²/C²)⌋ of them are C/√K, and the others are 0. The clipped gradient and its slack
together have the squared norm r² + m·C²/K ≤ C². So one mechanism adds its noise to both, and its
noise and ε are those without slack. Coordinate j = 1, …, K of the sum, divided by C/√K, is the
number of examples with r ≤ C·√(1 − j/K).

Reference: SlaClip, ICML 2026, which fills the room below the clip norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lsdp._checks import check_positive, check_whole, frozen_number
from optax_lsdp._clipped import ClipGroup
from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.clipping._clip_norm import CheckedClipNorm, ExampleNorms, checked_clip_norm

_ROUNDED_DOWN = 1 - 2.0**-20  # of the value of a coordinate; see `count_slack`


class WithSlack(NamedTuple):
    """A clipped sum and its slack, to which one mechanism adds noise.

    Attributes:
        total: the clipped sum, with the structure of the parameters.
        slack: (K,) sums of slack coordinates for each group, with the structure of the clip norm.
    """

    total: optax.Updates
    slack: PyTree


def count_slack(
    norms: ExampleNorms, groups: Sequence[ClipGroup], size: int
) -> dict[str, jax.Array]:
    """Return how many examples set each slack coordinate, by the path of the group: (n,) → (K,).

    K is `size`. The counts are whole numbers in float32, so adding up those of disjoint examples is
    exact. An example sets the coordinates j ≤ K(1 − r²/C²) of a group; r is its bound in `norms`.
    It sets none if r is ∞, and all of them if r is 0 or below about 2⁻¹²·C.

    Proof that rounding keeps the norm below C. Let u = 2⁻²⁴. The bounds exceed the true norms by
    more than 4u, so the computed x = r²/C² is not below the true one, unless squares underflow,
    which changes C² by a factor of 1 + 10⁻³⁷. The computed K(1 − x) exceeds the exact one by a
    factor of at most 1 + 3u. So an example sets at most K(1 − x)(1 + 3u) coordinates. `slack_value`
    is below (1 − 16u)·(1 + 2u)·C/√K, so their squares sum to less than (1 − x)C².
    """

    def count(bounds: jax.Array, clip_norm: ArrayLike) -> jax.Array:
        ratios = bounds / jnp.asarray(clip_norm, bounds.dtype)
        room = size * (1 - ratios * ratios)
        places = jnp.arange(1, size + 1, dtype=bounds.dtype)
        return jnp.sum(room[:, None] >= places, axis=0, dtype=jnp.int32).astype(jnp.float32)

    pairs = dict(groups).items() if size else ()
    return {path: count(norms.bounds[path], clip_norm) for path, clip_norm in pairs}


def append_slack(
    total: optax.Updates, counts: dict[str, jax.Array], norm: CheckedClipNorm, now: ClipNorm
) -> optax.Updates:
    """Return a clipped sum with the slack of each group, or alone if there is no slack.

    `now` are the clip norms of this step, with the structure of the clip norm.
    """
    if not counts:
        return total
    values = dict(zip(norm.addresses, jax.tree.leaves(now), strict=True))
    slack = {path: slack_value(values[path], norm.slack) * count for path, count in counts.items()}
    return WithSlack(total, norm.in_tree(slack))


def slack_value(clip_norm: ArrayLike, size: int) -> jax.Array:
    """Return the value of a slack coordinate, C/√K rounded down: float32 without axes."""
    return jnp.asarray(clip_norm, jnp.float32) * jnp.float32(_ROUNDED_DOWN / math.sqrt(size))


def slack_radii(size: int) -> jax.Array:
    """Return √(1 − j/K) for j = 1, …, K: coordinate j counts the examples up to this many C."""
    return jnp.sqrt(1 - jnp.arange(1, size + 1, dtype=jnp.float32) / size)


class EstimateNormsState(NamedTuple):
    """What `estimate_norms` has seen. All of it has noise, so it may be released.

    The trees have the structure of the clip norm. Each estimate is the mean over all steps.

    Attributes:
        step: how many steps were taken.
        clip_norm: tree of the clip norms of the next step.
        radii: (K,) norms in units of the clip norm.
        shares: tree of (K,) estimates.
        variances: tree of the variance of each estimate.
    """

    step: jax.Array
    clip_norm: PyTree
    radii: jax.Array
    shares: PyTree
    variances: PyTree


class NormEstimates(NamedTuple):
    """A distribution of gradient norms, estimated from noisy sums. It may be released.

    If the clip norm is a prefix tree, all fields but `radii` and `steps` are trees of the same
    structure, with estimates of each group.

    Attributes:
        radii: (K,) norms in units of the clip norm, √(1 − j/K) for j = 1, …, K, from large to
            small. If the clip norm changes, each step counts in units of its own clip norm.
        shares: (K,) estimates of the share of examples whose clipped gradient is at most
            `radii` · C long, the mean over all steps. A share is a number of examples, divided by
            the expected batch size. The noise can carry an estimate below 0 or above 1. Norms are
            rounded up; see `explain_clipping`. Examples that are not finite count nowhere.
        standard_errors: the standard deviation of the noise in each of the `shares`. It does not
            include the random choice of the batches.
        clip_norm: C, of the next step.
        steps: how many steps the estimates cover.
    """

    radii: jax.Array
    shares: PyTree
    standard_errors: PyTree
    clip_norm: PyTree
    steps: jax.Array


def estimate_norms(
    clip_norm: ClipNorm,
    *,
    slack: int,
    stddev: optax.ScalarOrSchedule,
    expected_batch_size: float,
) -> optax.GradientTransformationExtraArgs:
    """Take the slack out of a noisy sum, and estimate the distribution of gradient norms from it.

    Put this transform right after `add_gaussian_noise`, in a chain that starts with
    `clip_per_example(clip_norm, slack=K)`. `privatize(..., slack=K)` makes this chain. Read the
    estimates with `norm_estimates(state)`. They are computed from noisy numbers alone, so they cost
    no privacy.

    The noise of an estimated count is stddev·√K/C. So with noise multiplier z and one clip norm,
    the standard error of a share after T steps is z·√K/(b·√T).

    Args:
        clip_norm: C, as in `clip_per_example`.
        slack: K, as in `clip_per_example`.
        stddev: the standard deviation of the noise, as in `add_gaussian_noise`.
        expected_batch_size: b, by which counts are divided.

    >>> params, stacked = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])  # norms 5 and 1/2
    >>> import optax_lsdp as lsdp
    >>> tx = optax.chain(
    ...     lsdp.clip_per_example(1.0, slack=4),
    ...     lsdp.add_gaussian_noise(1e-6, key=jax.random.key(0)),
    ...     estimate_norms(1.0, slack=4, stddev=1e-6, expected_batch_size=2),
    ... )
    >>> _, state = tx.update(stacked, tx.init(params), params)
    >>> print(norm_estimates(state).shares.round(3))  # norms up to √¾, √½, ½ and 0
    [0.5 0.5 0.5 0. ]
    """
    check_whole("slack", slack)  # here None is refused
    norm = checked_clip_norm(clip_norm, slack)
    check_positive("stddev", stddev, schedule=True)
    check_positive("expected_batch_size", expected_batch_size)
    stddev = frozen_number(stddev)

    def in_tree(value: float) -> PyTree:
        return norm.in_tree(dict.fromkeys(norm.addresses, jnp.float32(value)))

    def clip_norms(step: jax.Array) -> PyTree:
        return jax.tree.map(lambda now: jnp.asarray(now, jnp.float32), norm.at(step))

    def init(params: optax.Params) -> EstimateNormsState:
        del params
        step, zeros = jnp.zeros([], jnp.int32), jnp.zeros(slack, jnp.float32)
        shares = jax.tree.map(lambda _: zeros, in_tree(0))
        return EstimateNormsState(step, clip_norms(step), slack_radii(slack), shares, in_tree(0))

    def update(
        updates: WithSlack,
        state: EstimateNormsState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, EstimateNormsState]:
        del params, extra_args
        if not isinstance(updates, WithSlack):
            raise ValueError(
                "`updates` must have slack, got a sum without slack; pass `slack` to "
                "`clip_per_example` as well."
            )
        scale = stddev(state.step) if callable(stddev) else stddev
        step = optax.safe_increment(state.step)
        gain = 1 / step.astype(jnp.float32)  # of the running mean over all steps

        def add(mean: jax.Array, noisy: jax.Array, now: jax.Array) -> jax.Array:
            counted = noisy / slack_value(now, slack)
            return mean + gain * (counted / expected_batch_size - mean)

        def add_variance(mean: jax.Array, now: jax.Array) -> jax.Array:
            error = jnp.asarray(scale, jnp.float32) / slack_value(now, slack) / expected_batch_size
            return jnp.square(1 - gain) * mean + jnp.square(gain * error)

        now = clip_norms(state.step)
        shares = jax.tree.map(add, state.shares, updates.slack, now)
        variances = jax.tree.map(add_variance, state.variances, now)
        after = EstimateNormsState(step, clip_norms(step), state.radii, shares, variances)
        return updates.total, after

    return optax.GradientTransformationExtraArgs(init, update)


def norm_estimates(state: optax.OptState) -> NormEstimates:
    """Return the distribution of gradient norms that an optimizer with `slack` has estimated.

    Args:
        state: the state of an optimizer of `privatize(..., slack=K)`, or of a chain with
            `estimate_norms`.

    >>> from optax_lsdp import privatize
    >>> private = dict(clip_norm=1.0, noise_multiplier=1e-6, expected_batch_size=2, slack=4)
    >>> tx = privatize(optax.sgd(1.0), **private, key=jax.random.key(0))
    >>> params, stacked = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])  # norms 5 and 1/2
    >>> _, state = tx.update(stacked, tx.init(params), params)
    >>> found = norm_estimates(state)
    >>> print(found.radii.round(3), found.shares.round(3))
    [0.866 0.707 0.5   0.   ] [0.5 0.5 0.5 0. ]
    """
    leaves = jax.tree.leaves(state, is_leaf=_is_estimate)
    found = next((leaf for leaf in leaves if _is_estimate(leaf)), None)
    if found is None:
        raise ValueError(
            "`state` must be the state of an optimizer with slack, got a state without estimates; "
            "pass `slack` to `privatize` and `clipped_grad`."
        )
    errors = jax.tree.map(jnp.sqrt, found.variances)
    return NormEstimates(found.radii, found.shares, errors, found.clip_norm, found.step)


def _is_estimate(node: object) -> bool:
    return isinstance(node, EstimateNormsState)
