"""Estimate the distribution of gradient norms from the gap below the clip norm, at no cost in ε.

Let r be an upper bound on the norm of an example's clipped gradient, and C the clip norm. If r < C,
there is a gap below the clip norm. K slack coordinates fill this gap, as in SlaClip (ICML 2026).
The first m = ⌊K(1 − r²/C²)⌋ coordinates are C/√K, and the others are 0. The clipped gradient and
its slack together have a squared norm of at most r² + m·C²/K ≤ C². So one mechanism adds noise to
both, with the same noise and the same ε as without slack. Coordinate j = 1, …, K of the sum,
divided by C/√K, is the number of examples with r ≤ C·√(1 − j/K).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lsdp._checks import check_positive, frozen_number, refusal
from optax_lsdp._clipped import ClipGroup, CurrentClipNorm, WithSlack
from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.clipping._clip_norm import (
    AdaptiveClip,
    CheckedClipNorm,
    ExampleNorms,
    checked_clip_norm,
)

_ROUNDED_DOWN = 1 - 2.0**-20  # factor on the value of a coordinate; see `count_slack`
_UNCLIPPED = 1 - 2.0**-16  # the bound r of a clipped gradient is above this times C
_RECENT = 10  # `NormEstimates.clipped` is a mean over about this many steps
_FAST_RISE, _SHARE, _SLOW = 3.0, 1 / 3, 0.02  # factors in the rule of `AdaptiveClip`


def count_slack(
    norms: ExampleNorms, groups: Sequence[ClipGroup], norm: CheckedClipNorm
) -> dict[str, jax.Array]:
    """Return how many examples set each slack coordinate: arrays of shape (K,), by group path.

    The counts are multiples of ½ in float32, so adding up counts of disjoint batches is exact. An
    example sets the coordinates j ≤ K(1 − r²/C²) of a group; r is its bound in `norms`. It sets no
    coordinate if r is ∞, and all coordinates if r is 0 or below about 2⁻¹²·C. With method
    "quantile", K is 1: a clipped example adds −½, and any other example with a finite bound adds ½.

    Proof that gradient and slack together are at most C long: let u = 2⁻²⁴, let h be the clipped
    gradient, and let x = ‖h‖²/C².

    1. The bound r is more than (1 + 4u)‖h‖. So the computed r²/C² is at least x, or less than 10⁻³⁷
       below x if squares underflow.
    2. Rounding raises K(1 − r²/C²) by at most the factor 1 + 3u. So an example sets at most
       K(1 − x)(1 + 3u) coordinates.
    3. Each coordinate is below (1 − 16u)·(1 + 2u)·C/√K; see `slack_value`. So the sum of the
       squares of all coordinates is less than (1 − x)C².
    """

    def count(bounds: jax.Array, clip_norm: ArrayLike) -> jax.Array:
        ratios = bounds / jnp.asarray(clip_norm, bounds.dtype)
        if _is_quantile(norm):
            halves = jnp.where(ratios < _UNCLIPPED, 0.5, -0.5)
            return jnp.sum(jnp.where(jnp.isfinite(bounds), halves, 0.0), dtype=jnp.float32)[None]
        room = norm.slack * (1 - ratios * ratios)
        places = jnp.arange(1, norm.slack + 1, dtype=bounds.dtype)
        return jnp.sum(room[:, None] >= places, axis=0, dtype=jnp.int32).astype(jnp.float32)

    return {path: count(norms.bounds[path], clip_norm) for path, clip_norm in dict(groups).items()}


def append_slack(
    total: optax.Updates, counts: dict[str, jax.Array], norm: CheckedClipNorm, now: ClipNorm
) -> optax.Updates:
    """Return a `WithSlack`: a clipped sum with the slack of each group.

    `now` holds the clip norms of this step. If they are adaptive, slack is divided by them.
    """
    norms = [1.0] * len(counts) if norm.adaptive else jax.tree.leaves(now)
    values = dict(zip(norm.addresses, norms, strict=True))
    slack = {path: slack_value(values[path], norm) * count for path, count in counts.items()}
    return WithSlack(total, norm.in_tree(slack), adapts=norm.adaptive is not None)


def slack_value(clip_norm: ArrayLike, norm: CheckedClipNorm) -> jax.Array:
    """Return what a count of 1 adds, rounded down: C/√K, or C·`indicator_weight` for "quantile"."""
    factor = 1 / math.sqrt(norm.slack)
    if norm.adaptive is not None and _is_quantile(norm):
        factor = norm.adaptive.indicator_weight
    return jnp.asarray(clip_norm, jnp.float32) * jnp.float32(_ROUNDED_DOWN * factor)


def _is_quantile(norm: CheckedClipNorm) -> bool:
    return norm.adaptive is not None and norm.adaptive.method == "quantile"


class ClipRule(NamedTuple):
    """The state of the rule of an `AdaptiveClip`, for one group of parameters."""

    excess: jax.Array  # the sum of s over the last `waited` steps; see `AdaptiveClip`
    waited: jax.Array  # how many steps were taken since the rule last set the clip norm
    settled: jax.Array  # whether the search for the clip norm is over
    useful: jax.Array  # whether updates are passed on; otherwise they are zero
    factor: jax.Array  # the number that multiplied the last noisy sum


class EstimateNormsState(NamedTuple):
    """The state of `estimate_norms`. All of it comes from noisy sums, so it may be released.

    Attributes:
        step: how many steps were taken.
        clip_norm: the clip norm of the next step, a number or one number per group.
        estimates: a row of K + 3 numbers for each group: K mean shares over all steps, the mean
            share of clipped examples in the last steps, the variance of the noise in each mean
            share, and the variance of the noise in the mean share of clipped examples.
        rules: the state of each group's rule; empty without an `AdaptiveClip`.
    """

    step: jax.Array
    clip_norm: PyTree
    estimates: jax.Array
    rules: tuple[ClipRule, ...]


class NormEstimates(NamedTuple):
    """A distribution of gradient norms, estimated from noisy sums. It may be released.

    If the clip norm is a prefix tree, all fields but `radii` and `steps` are trees of the same
    structure, with estimates of each group.

    Attributes:
        radii: K norms in units of the clip norm: √(1 − j/K), j = 1, …, K, or 1 for "quantile".
            If the clip norm changes, each step measures norms in units of its own clip norm.
        shares: for each of the K `radii`, an estimate of the share of examples whose clipped
            gradient is at most radius · C long: the mean over all steps. A share is a number of
            examples, divided by the expected batch size. Noise can move a share below 0 or above 1.
            Norms are rounded up; see `explain_clipping`. Only finite gradients count.
        standard_errors: the standard deviation of the noise in each of the `shares`, without the
            effect of the random choice of batches.
        clipped: an estimate of the share of examples whose gradient is longer than `radii[0]` · C:
            the mean over the first ten steps, then an exponential mean over about ten steps. If a
            batch is smaller than expected, the missing examples count as clipped.
        clipped_error: the standard deviation of the noise in `clipped`.
        clip_norm: the C of the next step.
        steps: how many steps the estimates cover.
    """

    radii: jax.Array
    shares: PyTree
    standard_errors: PyTree
    clipped: PyTree
    clipped_error: PyTree
    clip_norm: PyTree
    steps: jax.Array


def estimate_norms(
    clip_norm: ClipNorm,
    *,
    slack: int | None = None,
    stddev: optax.ScalarOrSchedule,
    expected_batch_size: float,
) -> optax.GradientTransformationExtraArgs:
    """Remove the slack from a noisy sum, and estimate the distribution of gradient norms from it.

    Put this transform right after `add_gaussian_noise`, in a chain that starts with
    `clip_per_example(clip_norm, slack=K)`. `privatize(..., slack=K)` makes this chain. Read the
    estimates with `norm_estimates(state)`. They cost no privacy, because they come from noisy sums.

    The noise of an estimated count has standard deviation stddev·√K/C. So with noise multiplier z,
    expected batch size b and one clip norm, a share has the standard error z·√K/(b·√T) after T
    steps. With an `AdaptiveClip`, this transform also moves C, and scales the sum by it.

    Args:
        clip_norm: C, as in `clip_per_example`.
        slack: K, as in `clip_per_example`; None for an `AdaptiveClip`, which has its own K.
        stddev: the standard deviation of the noise, as in `add_gaussian_noise`.
        expected_batch_size: b, by which counts are divided.

    >>> params, stacked = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.4]])  # norms 5 and 0.4
    >>> import numpy as np
    >>> import optax_lsdp as lsdp
    >>> tx = optax.chain(
    ...     lsdp.clip_per_example(1.0, slack=4),
    ...     lsdp.add_gaussian_noise(1e-6, key=jax.random.key(0)),
    ...     lsdp.estimate_norms(1.0, slack=4, stddev=1e-6, expected_batch_size=2),
    ... )
    >>> _, state = tx.update(stacked, tx.init(params), params)
    >>> print(np.asarray(lsdp.norm_estimates(state).shares).round(3))  # up to √¾, √½, ½ and 0
    [0.5 0.5 0.5 0. ]
    """
    norm = checked_clip_norm(clip_norm, slack)
    if not norm.slack:
        remedy = "pass the K of `clip_per_example`"
        raise refusal("slack", "a whole number, 1 or more", None, remedy)
    check_positive("stddev", stddev, schedule=True)
    check_positive("expected_batch_size", expected_batch_size)
    stddev, expected_batch_size = frozen_number(stddev), float(expected_batch_size)

    def fixed_norms(step: jax.Array) -> PyTree:
        """Return the clip norms at `step` or, if they are adaptive, their initial values."""
        norms = jax.tree.map(lambda x: x.initial, norm.value) if norm.adaptive else norm.at(step)
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), norms)

    def init(params: optax.Params) -> EstimateNormsState:
        del params
        step, zero = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.float32)
        # Each array of a state costs time in each call of a compiled step: keep few arrays.
        estimates = jnp.zeros((len(norm.addresses), norm.slack + 3), jnp.float32)
        rule = ClipRule(zero, step, step > 0, step > 0, zero)
        rules = (rule,) * len(estimates) if norm.adaptive else ()
        # Fields share arrays, but a caller can donate each array only once: return copies.
        return jax.tree.map(jnp.copy, EstimateNormsState(step, fixed_norms(step), estimates, rules))

    def update(
        updates: WithSlack,
        state: EstimateNormsState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, EstimateNormsState]:
        del params, extra_args
        _check_slack(updates, norm)
        scale = jnp.asarray(stddev(state.step) if callable(stddev) else stddev, jnp.float32)
        step = optax.safe_increment(state.step)
        rows, moved = [], []
        noisy, now = jax.tree.leaves(updates.slack), jax.tree.leaves(state.clip_norm)
        settings = jax.tree.leaves(norm.value)
        for index, (one, clip) in enumerate(zip(noisy, now, strict=True)):
            unit = slack_value(1.0 if norm.adaptive else clip, norm) * expected_batch_size
            shares = one / unit + (0.5 if _is_quantile(norm) else 0.0)
            rows.append(_averaged(state.estimates[index], shares, scale / unit, step))
            if norm.adaptive:
                one_step = (clip, shares, scale / unit, expected_batch_size)
                moved.append(_moved(settings[index], state.rules[index], *one_step))
        estimates = jnp.stack(rows) if rows else state.estimates
        if not moved:
            return updates.total, EstimateNormsState(step, fixed_norms(step), estimates, ())
        structure, (norms, rules) = jax.tree.structure(state.clip_norm), zip(*moved, strict=True)
        after = jax.tree.unflatten(structure, norms)
        state = EstimateNormsState(step, after, estimates, rules)
        leaves, shape = jax.tree.flatten(updates.total)
        factors = jax.tree.unflatten(structure, [rule.factor for rule in rules])
        pairs = zip(leaves, norm.groups(updates.total, factors), strict=True)
        scaled = [leaf * group.clip_norm.astype(leaf.dtype) for leaf, group in pairs]
        return jax.tree.unflatten(shape, scaled), state

    return optax.GradientTransformationExtraArgs(init, update)


def _check_slack(updates: WithSlack, norm: CheckedClipNorm) -> None:
    """Raise unless `updates` are a noisy sum whose slack matches `norm`."""
    if not (isinstance(updates, WithSlack) and updates.is_noisy):
        got = "slack without noise" if isinstance(updates, WithSlack) else "a sum without slack"
        raise ValueError(
            f"`updates` must come from `clip_per_example` with slack and then `add_gaussian_noise`,"
            f" got {got}; put `estimate_norms` right after `add_gaussian_noise`."
        )
    sizes = {len(slack) for slack in jax.tree.leaves(updates.slack)}
    if sizes != {norm.slack} or updates.adapts != (norm.adaptive is not None):
        raise ValueError(
            f"`clip_norm` and `slack` must be the same in `clip_per_example` and `estimate_norms`, "
            f"got {max(sizes)} and {norm.slack} slack coordinates; pass the same values to both."
        )


def _averaged(row: jax.Array, shares: jax.Array, error: jax.Array, step: jax.Array) -> jax.Array:
    """Return a row of `EstimateNormsState.estimates`, updated by the `shares` of one more step.

    `error` is the standard deviation of each share. XLA compiles this code to one kernel, because
    it is one expression without slices.
    """
    size, place = len(shares), jnp.arange(len(row))
    is_recent, is_variance = (place == size) | (place == size + 2), place > size
    gain = 1 / step.astype(jnp.float32)
    gains = jnp.where(is_recent, jnp.maximum(gain, 1 / _RECENT), gain)
    new = jnp.where(place < size, jnp.pad(shares, (0, 3)), 1 - shares[0])
    variance = jnp.square(1 - gains) * row + jnp.square(gains * error)
    return jnp.where(is_variance, variance, row + gains * (new - row))


def _moved(
    setting: AdaptiveClip,
    rule: ClipRule,
    clip_norm: jax.Array,
    shares: jax.Array,
    error: jax.Array,
    expected_batch_size: float,
) -> tuple[jax.Array, ClipRule]:
    """Return the next clip norm, and the next state of the rule of an `AdaptiveClip`."""
    if setting.method == "fixed" or setting.least == setting.most:
        return clip_norm, rule._replace(factor=clip_norm)
    if setting.method == "quantile":
        new = clip_norm * jnp.exp(setting.rate * (1 - shares[0] - setting.target))
        new = jnp.clip(new, setting.least, setting.most)
        return new, rule._replace(factor=jnp.minimum(clip_norm, new))
    # Divide by K − 1: ⌊K(1 − t²)⌋/(K − 1) has the mean of 1 − t² if t² is uniform in [0, 1].
    size, target = setting.slack, setting.target
    excess = rule.excess + 1 - jnp.sum(shares) / (size - 1)
    count = (rule.waited + 1).astype(jnp.float32)
    found, noise = excess / count, error * math.sqrt(size) / (size - 1)  # the noise in one s
    doubt = jnp.sqrt((jnp.square(noise) + 1 / expected_batch_size) / count)
    is_known = doubt <= target / 4
    is_high = found > (1 + target) / 2
    is_low = (found < target / 2) & (clip_norm > setting.least)
    margin = jnp.where(doubt <= (1 - target) / 8, 0.0, 2 * doubt)
    is_right = ~is_low & (found + margin <= (1 + target) / 2)
    is_due = is_known & (rule.settled | is_high | is_low | is_right)
    floor = jnp.minimum(jnp.maximum(0.5 / size, doubt), target / 2)
    ratio = jnp.clip(found, floor, 1.0) / target
    # Counts round s down by up to (1 − s)/K. If C fell too far, it could rise and fall for ever.
    fall = jnp.clip(found + (1 - found) / size, floor, target / 2) / target
    search = jnp.where(is_high, _FAST_RISE, jnp.sqrt(jnp.where(is_low, fall, ratio)))
    search = jnp.where(is_right, _SHARE, 1.0) * search**setting.rate
    factor = jnp.where(rule.settled, ratio ** (_SLOW / 2 * setting.rate), search)
    new = jnp.clip(jnp.where(is_due, clip_norm * factor, clip_norm), setting.least, setting.most)
    useful = rule.settled | jnp.where(is_known, ~is_low, rule.useful)
    return new, ClipRule(
        excess=jnp.where(is_due, 0.0, excess),
        waited=jnp.where(is_due, 0, rule.waited + 1),
        settled=rule.settled | (is_due & is_right),
        useful=useful,
        # If the clip norm falls, the sum is mostly noise, so the smaller clip norm scales it.
        factor=jnp.where(useful, jnp.minimum(clip_norm, new), 0.0),
    )


def norm_estimates(state: optax.OptState) -> NormEstimates:
    """Return the distribution of gradient norms that an optimizer with `slack` has estimated.

    For each of the `radii`, `shares` has the share of examples whose gradients are at most as long.
    `state` is that of a `privatize` with `slack` or an `AdaptiveClip`, or of `estimate_norms`.

    >>> import numpy as np
    >>> import optax_lsdp as lsdp
    >>> private = dict(clip_norm=1.0, noise_multiplier=1e-6, expected_batch_size=2, slack=4)
    >>> tx = lsdp.privatize(optax.sgd(1.0), **private, key=jax.random.key(0))
    >>> params, stacked = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.4]])  # norms 5 and 0.4
    >>> _, state = tx.update(stacked, tx.init(params), params)
    >>> found = lsdp.norm_estimates(state)
    >>> print(np.asarray([found.radii, found.shares]).round(3))
    [[0.866 0.707 0.5   0.   ]
     [0.5   0.5   0.5   0.   ]]
    """
    found = _find_state(state)
    structure, size = jax.tree.structure(found.clip_norm), found.estimates.shape[-1] - 3
    squares = 1 - jnp.arange(1, size + 1, dtype=jnp.float32) / size
    is_quantile = size == 1 and found.rules  # its one coordinate counts norms up to C
    rows = found.estimates
    shares, clipped, variance, clipped_variance = (
        jax.tree.unflatten(structure, list(column))
        for column in (rows[:, :size], rows[:, size], rows[:, size + 1], rows[:, size + 2])
    )
    return NormEstimates(
        radii=jnp.ones(1) if is_quantile else jnp.sqrt(squares),
        shares=shares,
        standard_errors=jax.tree.map(jnp.sqrt, variance),
        clipped=clipped,
        clipped_error=jax.tree.map(jnp.sqrt, clipped_variance),
        clip_norm=found.clip_norm,
        steps=found.step,
    )


def current_clip_norm(state: optax.OptState) -> PyTree:
    """Return the clip norm of the next step, from the state of an optimizer with `AdaptiveClip`.

    With groups of clip norms, return a tree of the same structure. The clip norm is computed from
    noisy numbers, so it may be released. `float` and `jnp.asarray` turn a clip norm into a number.

    >>> import optax_lsdp as lsdp
    >>> private = dict(clip_norm=lsdp.AdaptiveClip(2.0), noise_multiplier=1, expected_batch_size=4)
    >>> tx = lsdp.privatize(optax.sgd(1.0), **private, key=jax.random.key(0))
    >>> float(lsdp.current_clip_norm(tx.init(jnp.zeros(3))))
    2.0
    """
    return jax.tree.map(CurrentClipNorm, _find_state(state).clip_norm)


def last_factor(state: optax.OptState) -> jax.Array:
    """Return the number by which an optimizer with one `AdaptiveClip` scaled its last noisy sum."""
    return _find_state(state).rules[0].factor


def has_estimates(state: optax.OptState) -> bool:
    """Return whether an optimizer's state has estimates of norms."""
    return any(map(_is_estimate, jax.tree.leaves(state, is_leaf=_is_estimate)))


def _find_state(state: optax.OptState) -> EstimateNormsState:
    found = next(filter(_is_estimate, jax.tree.leaves(state, is_leaf=_is_estimate)), None)
    if found is None:
        raise ValueError(
            "`state` must be the state of an optimizer with slack, got one without estimates; pass "
            "`slack` or an `AdaptiveClip` to `privatize`; with Flax NNX pass `optimizer.opt_state`."
        )
    # Flax NNX wraps the arrays of a state.
    return jax.tree.map(jnp.asarray, found, is_leaf=lambda x: hasattr(x, "__jax_array__"))


def _is_estimate(node: object) -> bool:
    return isinstance(node, EstimateNormsState)
