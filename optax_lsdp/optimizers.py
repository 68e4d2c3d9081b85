"""Chain clipping, noise and smoothing in front of any Optax optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lsdp._checks as checks
from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.clipping import (
    AdaptiveClip,
    WithSlack,
    clip_per_example,
    current_clip_norm,
    estimate_norms,
    last_factor,
    sensitivity,
)
from optax_lsdp.correlated_noise import (
    add_correlated_noise,
    has_correlated_noise,
    is_noise_state,
)
from optax_lsdp.correlation import Correlation
from optax_lsdp.filters import Smoothing, denoised, read_stages, scale_by_debiased_adam
from optax_lsdp.noise import add_gaussian_noise, read_batch_size
from optax_lsdp.smoothing import auto_smooth
from optax_lsdp.watching import find_watch_state, watch


def privatize(
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: ClipNorm,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    smoothing: Smoothing = 0.0,
    correlation: Correlation | None = None,
    key: jax.Array,
    shard_specs: PyTree = None,
    replicated_axes: str | Sequence[str] = (),
    slack: int | None = None,
    watch_steps: int | None = None,
    sampling_rate: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make any Optax optimizer differentially private: it sees only a noisy, smoothed mean.

    `optimizer` receives u = (I − σL)⁻¹ (Σᵢ clip(gᵢ, C) + N(0, z²C² I)) / b. Here gᵢ is the gradient
    of example i, and L is the second difference of `laplacian_smooth`. Pass the result of
    `clipped_grad` to `update`. Or pass stacked per-example gradients with `params`, and with
    `mask=` if the batch is padded. In a chain, `privatize` must be the first transform. Momentum
    and weight decay belong in `optimizer`, after the noise.

    Do not wrap `privatize` in `optax.MultiSteps` or `optax.apply_if_finite`, which cannot carry the
    `Clipped` leaves of a sum. For large batches, use `microbatch_size` of `clipped_grad`, or add
    the sums of disjoint parts with `jax.tree.map(jnp.add, a, b)`. Do not use `privatize` k times in
    one `optax.partition`: the joint sensitivity would be √k·C. Write
    `privatize(optax.partition(...), ...)` instead.

    Args:
        optimizer: any Optax optimizer, such as `optax.adamw(1e-3)`.
        clip_norm: C; see `clip_per_example`. It must be the same as in `clipped_grad`.
        noise_multiplier: z > 0, a number or a schedule. The standard deviation of the noise on the
            clipped *sum* is z times the sum's `sensitivity`. The accountant must know every value
            of a schedule; `PrivacyPlan` accounts for the values of a `Piecewise`.
        expected_batch_size: b, by which the noisy sum is divided: a public number, the sampling
            rate times the size of the dataset. Never pass the actual number of examples in a batch.
        smoothing: σ ≥ 0, a number or a schedule. "auto" chooses σ and the layout of each leaf from
            past releases; see `auto_smooth`. To set the layout or the scope, pass a
            `laplacian_smooth(...)` transform instead, or a list of transforms such as
            `["auto", low_pass(...)]`. Smoothing does not change ε.
        correlation: how noise is correlated between steps; see `add_correlated_noise`. It rules out
            schedules of noise or clip norm, `AdaptiveClip`, `slack`, `watch_steps` and
            smoothing="auto".
        key: one typed key such as `fresh_key()`; see `add_gaussian_noise`.
        shard_specs: how `shard_map` splits the summed gradients; see `add_gaussian_noise`. They
            also apply to smoothing, but a transform in `smoothing` needs its own `shard_specs`.
        replicated_axes: for stacked gradients inside `shard_map`; see `clip_per_example`.
        slack: K, the number of slack coordinates, the same as in `clipped_grad`. The optimizer then
            estimates the distribution of gradient norms at no cost in ε; see `norm_estimates`.
        watch_steps: how many steps to record for `training_curve(state)`; see `watch`. Recording
            costs no privacy, but memory for a copy of the parameters. The default records nothing.
            `watch_steps` cannot be combined with several groups of `AdaptiveClip`.
        sampling_rate: q, or 1 for full batches. If you pass q, the recorded curve has a smaller
            standard error, and smoothing="auto" knows how much random batches add to the noise. If
            not, the curve and smoothing="auto" assume batches from a much larger dataset.

    With `optax.inject_hyperparams`, pass `static_args=("clip_norm", "expected_batch_size", "key")`,
    which keeps the key out of the hyperparameters that people log. Add `slack`, `watch_steps` and
    `sampling_rate` to `static_args` if you set them. If parameters are in half precision, also pass
    `hyperparam_dtype=jnp.float32`, which keeps the noise multiplier precise.

    >>> import numpy as np
    >>> params, stacked = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> private = dict(clip_norm=1.0, noise_multiplier=1e-6, expected_batch_size=2)
    >>> tx = privatize(optax.sgd(1.0), **private, key=jax.random.key(0))
    >>> updates, _ = tx.update(stacked, tx.init(params), params)
    >>> print(np.asarray(updates).round(3))  # −(0.6, 1.3) / 2
    [-0.3  -0.65]
    """
    remedy = "for training without privacy, use the optimizer without `privatize`"
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"`optimizer` must be an Optax optimizer, such as optax.sgd(0.1), got {optimizer!r}."
        )
    checks.check_positive("noise_multiplier", noise_multiplier, remedy, schedule=True)
    noise_multiplier = checks.frozen_number(noise_multiplier)
    expected_batch_size = read_batch_size(expected_batch_size)
    stddev = _product(noise_multiplier, sensitivity(clip_norm))
    adapts = any(isinstance(norm, AdaptiveClip) for norm in jax.tree.leaves(clip_norm))
    clip = clip_per_example(clip_norm, slack=slack, replicated_axes=replicated_axes)
    mean: Any = {"shard_specs": shard_specs, "expected_batch_size": expected_batch_size, "key": key}
    if correlation is None:
        release = [clip, add_gaussian_noise(stddev, **mean)]
    else:
        constant = {"noise_multiplier": noise_multiplier, "clip_norm": clip_norm}
        auto = smoothing if read_stages(smoothing, shard_specs)[0] else None
        _check_constant(constant, dict(slack=slack, watch_steps=watch_steps, smoothing=auto))
        release = [clip, add_correlated_noise(stddev, correlation, **mean)]
    if adapts or slack is not None:
        # All shards have the same slack, so they must draw the same noise for it.
        specs = None if shard_specs is None else WithSlack(shard_specs, jax.P(), adapts=adapts)
        noise = add_gaussian_noise(stddev, key=key, shard_specs=specs)
        options = {"stddev": stddev, "expected_batch_size": expected_batch_size}
        estimate = estimate_norms(clip_norm, slack=slack, **options)
        release = [clip, noise, estimate, optax.scale(1 / expected_batch_size)]
    if adapts:
        release = [_with_clip_norm(optax.chain(*release))]
    is_auto, stages = read_stages(smoothing, shard_specs)
    learner = optax.chain(optax.stateless(_cast_like), _with_clear_errors(optimizer))
    learner = denoised(stages, learner, smooths=is_auto, varies=adapts or correlation is not None)
    several_adapt = adapts and len(jax.tree.leaves(clip_norm)) > 1
    for name, value in (("watch_steps", watch_steps), ("smoothing", "auto" if is_auto else None)):
        if value is not None and several_adapt:
            demand = "left out with several AdaptiveClips, whose noise differs"
            raise checks.refusal(name, demand, value, "use one AdaptiveClip for all leaves")
    rate = 0.0 if sampling_rate is None else sampling_rate
    checks.check_fraction("sampling_rate", rate)
    spread = math.sqrt((1 - rate) / expected_batch_size)
    noises = {
        "stddev": _product(1 / expected_batch_size, stddev),
        "sampling_stddev": _product(spread, sensitivity(clip_norm)),
        "shard_specs": shard_specs,
    }
    if is_auto:
        learner = auto_smooth(learner, **noises)
    if watch_steps is not None:
        checks.check_whole("watch_steps", watch_steps)
        learner = watch(learner, steps=watch_steps, **noises)
    known = None if several_adapt or correlation is not None else noises["stddev"]
    return _with_known_noise(optax.chain(*release), learner, known, adapts=adapts)


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: ClipNorm,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    momentum: float | None = None,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-SGD: `privatize(optax.sgd(learning_rate, momentum), ...)`, without smoothing.

    For the arguments, see `privatize` and `optax.sgd`. Reference: Abadi et al. 2016, Deep Learning
    with Differential Privacy.

    >>> private = dict(clip_norm=1.0, noise_multiplier=1.0, key=jax.random.key(0))
    >>> tx = dp_sgd(0.1, expected_batch_size=256, **private)
    """
    return dp_lssgd(
        learning_rate,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        smoothing=0.0,
        momentum=momentum,
        key=key,
    )


def dp_lssgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: ClipNorm,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    smoothing: Smoothing = 1.0,
    momentum: float | None = None,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-LSSGD: `privatize(optax.sgd(learning_rate, momentum), smoothing=σ, ...)`.

    For the arguments, see `privatize` and `optax.sgd`; σ is 1 by default. Reference: Wang et al.
    2019, DP-LSSGD: A Stochastic Optimization Method to Lift the Utility in Privacy-Preserving ERM.

    >>> private = dict(clip_norm=1.0, noise_multiplier=1.0, key=jax.random.key(0))
    >>> tx = dp_lssgd(0.1, expected_batch_size=256, **private)
    """
    checks.check_non_negative("learning_rate", learning_rate, schedule=True)
    return privatize(
        optax.sgd(learning_rate, momentum),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        smoothing=smoothing,
        key=key,
    )


def dp_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: ClipNorm,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    debias: bool = False,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-Adam: `privatize(optax.adam(learning_rate), ...)`, without smoothing.

    For the arguments, see `privatize` and `dp_lsadam`.

    >>> private = dict(clip_norm=1.0, noise_multiplier=1.0, key=jax.random.key(0))
    >>> tx = dp_adam(0.1, expected_batch_size=256, **private)
    """
    return dp_lsadam(
        learning_rate,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        smoothing=0.0,
        debias=debias,
        key=key,
    )


def dp_lsadam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: ClipNorm,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    smoothing: Smoothing = 1.0,
    debias: bool = False,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-LSAdam: `privatize(optax.adam(learning_rate), smoothing=σ, ...)`.

    For the arguments, see `privatize`; σ is 1 by default. With `debias`, the variance of the noise
    after smoothing is subtracted from Adam's second moments; see `scale_by_debiased_adam`. This
    makes steps longer, so try smaller learning rates too.

    >>> private = dict(clip_norm=1.0, noise_multiplier=1.0, key=jax.random.key(0))
    >>> tx = dp_lsadam(0.1, expected_batch_size=256, **private)
    """
    checks.check_non_negative("learning_rate", learning_rate, schedule=True)
    checks.check_bool("debias", debias)
    scale = scale_by_debiased_adam() if debias else optax.scale_by_adam()
    return privatize(
        optax.chain(scale, optax.scale_by_learning_rate(learning_rate)),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        smoothing=smoothing,
        key=key,
    )


def steps_taken(state: optax.OptState) -> jax.Array:
    """Return how many steps an optimizer of `privatize` has taken, according to its state."""
    leaves = jax.tree.leaves(state, is_leaf=is_noise_state)
    return next(leaf for leaf in leaves if is_noise_state(leaf)).step


def _check_constant(constant: dict[str, Any], absent: dict[str, Any]) -> None:
    """Raise if a setting cannot be combined with correlated noise.

    Settings in `constant` must not vary from step to step. Settings in `absent` assume independent
    noise, so they must be None.
    """
    for name, value in (constant | absent).items():
        varies = any(callable(x) or isinstance(x, AdaptiveClip) for x in jax.tree.leaves(value))
        if varies or (name in absent and value is not None):
            how = "constant" if name in constant or callable(value) else "left out"
            raise checks.refusal(name, f"{how} with a `correlation`", value)


def _product(
    factor: optax.ScalarOrSchedule, other: optax.ScalarOrSchedule
) -> optax.ScalarOrSchedule:
    """Return the product of two numbers or schedules."""

    def product(step: jax.Array) -> jax.Array | float:
        value = factor(step) if callable(factor) else factor
        return value * (other(step) if callable(other) else other)

    return product if callable(factor) or callable(other) else factor * other


def _with_clip_norm(
    release: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Pass the adaptive clip norm from the state to `clip_per_example`, for stacked gradients."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: PyTree = None, **extra_args: object
    ) -> tuple[optax.Updates, optax.OptState]:
        if "clip_norm" in extra_args:
            raise ValueError(
                "`clip_norm` must be passed to the gradient function, not to `update`, got "
                f"{extra_args['clip_norm']!r}; the optimizer takes it from its state."
            )
        now = current_clip_norm(state)
        return release.update(updates, state, params, clip_norm=now, **extra_args)

    return optax.GradientTransformationExtraArgs(release.init, update)


def _with_known_noise(
    release: optax.GradientTransformationExtraArgs,
    learner: optax.GradientTransformationExtraArgs,
    stddev: optax.ScalarOrSchedule | None,
    *,
    adapts: bool,
) -> optax.GradientTransformationExtraArgs:
    """Chain `release` and `learner`. If `stddev` of the noise is not None, pass it to `learner`."""

    def init(params: optax.Params) -> tuple[optax.OptState, optax.OptState]:
        state = release.init(params), learner.init(params)
        if has_correlated_noise(state) and find_watch_state(state) is not None:
            raise ValueError(
                "`optimizer` must not be watched with a `correlation`, got a part made by `watch`, "
                "whose curve assumes independent noise; leave `watch` out."
            )
        return state

    def update(
        updates: optax.Updates, state: PyTree, params: PyTree = None, **extra_args: object
    ) -> tuple[optax.Updates, tuple[optax.OptState, optax.OptState]]:
        updates, released = release.update(updates, state[0], params, **extra_args)
        if stddev is not None:
            now = stddev(steps_taken(state[0])) if callable(stddev) else stddev
            scale = last_factor(released) if adapts else 1.0
            extra_args |= {"release_scale": scale, "noise_stddev": now * scale}
        updates, after = learner.update(updates, state[1], params, **extra_args)
        return updates, (released, after)

    return optax.GradientTransformationExtraArgs(init, update)


def _with_clear_errors(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make an optimizer raise a clear error if it needs more than gradients, as L-BFGS does."""
    inner = optax.with_extra_args_support(optimizer)

    def update(
        updates: optax.Updates, state: optax.OptState, params: PyTree = None, **extra_args: object
    ) -> tuple[optax.Updates, optax.OptState]:
        extra_args.pop("release_scale", None)  # for `watch` and `auto_smooth` only
        try:
            return inner.update(updates, state, params, **extra_args)
        except TypeError as error:
            _, is_missing, names = str(error).partition("required keyword-only argument")
            if not is_missing:
                raise
            raise TypeError(
                "`optimizer` must need gradients only, got one that also needs "
                f"{names.lstrip('s: ')}, which would be released without noise; use an optimizer "
                "such as optax.sgd or optax.adam."
            ) from error

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _cast_like(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Cast updates to the dtypes of `params`. Return them unchanged if `params` is None."""
    if params is None:
        return updates
    return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)
