"""Private optimizers: chains of clipping, noise and smoothing in front of an optimizer."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_non_negative, check_positive, frozen_number, is_number
from optax_lsdp.clipping import clip_per_example, sensitivity
from optax_lsdp.noise import add_gaussian_noise, is_noise_state
from optax_lsdp.smoothing import laplacian_smooth

Smoothing: TypeAlias = optax.ScalarOrSchedule | optax.GradientTransformation


def privatize(
    optimizer: optax.GradientTransformation,
    *,
    clip_norm: Any,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    smoothing: Smoothing = 0.0,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Make any Optax optimizer differentially private: it sees only a noisy, smoothed mean.

    u = (I − σL)⁻¹ (Σᵢ clip(gᵢ, C) + N(0, z²C² I)) / b is what `optimizer` is fed with. Updates
    are the marked sum of `clipped_grad`, or stacked per-example gradients (then `update` needs
    `params`, and `mask=` if the batch is padded). It must be the first link of a chain; momentum,
    weight decay and the like belong into `optimizer`, behind the noise.

    Not with `optax.MultiSteps` or `optax.apply_if_finite`, which cannot carry a marked
    sum: for large batches use `microbatch_size` of `clipped_grad`, or add the marked sums of
    disjoint parts with `jax.tree.map(jnp.add, a, b)` and update once. Not several times under one
    `optax.partition`: each would clip by itself, and the joint sensitivity would be √k·C. Use one
    `privatize(optax.partition(...), ...)`, with a prefix tree of clip norms if need be.

    Args:
        optimizer: any Optax optimizer, such as `optax.adamw(1e-3)`.
        clip_norm: C, as in `clip_per_example`, and the same as in `clipped_grad`.
        noise_multiplier: z > 0, the noise on the clipped *sum* in units of its `sensitivity`; a
            number or a function of the step. This is what the accountant asks for; it must be
            told of each value of a function, as a `PrivacyPlan` does for its `Piecewise`.
        expected_batch_size: b, by which the noisy sum is divided: a public number (the sampling
            rate times the size of the dataset), never the number of examples that came.
        smoothing: σ ≥ 0, a number or a function of the step; or a `laplacian_smooth(...)`
            transform, for another layout or scope. It costs no privacy and buys none.
        key: one typed key such as `fresh_key()`; see `add_gaussian_noise`.

    With `optax.inject_hyperparams`, pass `static_args=("clip_norm", "expected_batch_size", "key")`,
    which keeps the key out of the hyper-parameters that people log, and for half-precision
    parameters `hyperparam_dtype=jnp.float32`, or the noise multiplier would be rounded.

    >>> import numpy as np
    >>> tx = privatize(
    ...     optax.sgd(1.0),
    ...     clip_norm=1.0,
    ...     noise_multiplier=1e-6,
    ...     expected_batch_size=2,
    ...     key=jax.random.key(0),
    ... )
    >>> params, stacked = jnp.zeros(2), jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> updates, _ = tx.update(stacked, tx.init(params), params)
    >>> print(np.asarray(updates).round(3))  # −(0.6, 1.3) / 2
    [-0.3  -0.65]
    """
    remedy = "for training without privacy, use the optimizer itself"
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise TypeError(
            f"`optimizer` must be an Optax optimizer, such as optax.sgd(0.1), got {optimizer!r}."
        )
    check_positive("noise_multiplier", noise_multiplier, remedy, schedule=True)
    noise_multiplier = frozen_number(noise_multiplier)
    if not is_number(expected_batch_size):
        raise TypeError(
            "`expected_batch_size` must be a plain number, which is public, got "
            f"{expected_batch_size!r}; never the number of examples that came, "
            "and static for optax.inject_hyperparams."
        )
    check_positive("expected_batch_size", expected_batch_size)
    return optax.chain(
        clip_per_example(clip_norm),
        add_gaussian_noise(_stddev(noise_multiplier, clip_norm), key=key),
        optax.scale(1 / expected_batch_size),
        _smoothing_link(smoothing),
        optax.stateless(_cast_like),
        _by_gradients_alone(optimizer),
    )


def dp_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: Any,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    momentum: float | None = None,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-SGD: `privatize(optax.sgd(learning_rate, momentum), ...)`, without smoothing.

    The arguments are those of `privatize` and of `optax.sgd`.

    References:
        Abadi et al. 2016, Deep Learning with Differential Privacy.

    >>> tx = dp_sgd(
    ...     0.1, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=256, key=jax.random.key(0)
    ... )
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
    clip_norm: Any,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    smoothing: Smoothing = 1.0,
    momentum: float | None = None,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-LSSGD: `privatize(optax.sgd(learning_rate, momentum), smoothing=σ, ...)`.

    The arguments are those of `privatize` and of `optax.sgd`; here σ is 1 by default.

    References:
        Wang et al. 2019, DP-LSSGD: A Stochastic Optimization Method to Lift the Utility in
        Privacy-Preserving ERM.

    >>> tx = dp_lssgd(
    ...     0.1, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=256, key=jax.random.key(0)
    ... )
    """
    check_non_negative("learning_rate", learning_rate, schedule=True)
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
    clip_norm: Any,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-Adam: `privatize(optax.adam(learning_rate), ...)`, without smoothing.

    The arguments are those of `privatize`.

    >>> tx = dp_adam(
    ...     0.1, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=256, key=jax.random.key(0)
    ... )
    """
    return dp_lsadam(
        learning_rate,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        smoothing=0.0,
        key=key,
    )


def dp_lsadam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    clip_norm: Any,
    noise_multiplier: optax.ScalarOrSchedule,
    expected_batch_size: float,
    smoothing: Smoothing = 1.0,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return DP-LSAdam: `privatize(optax.adam(learning_rate), smoothing=σ, ...)`.

    The arguments are those of `privatize`; here σ is 1 by default.

    >>> tx = dp_lsadam(
    ...     0.1, clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=256, key=jax.random.key(0)
    ... )
    """
    check_non_negative("learning_rate", learning_rate, schedule=True)
    return privatize(
        optax.adam(learning_rate),
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        smoothing=smoothing,
        key=key,
    )


def steps_taken(state: optax.OptState) -> jax.Array:
    """Return how often the noise of `privatize`, the first in a state, was added."""
    leaves = jax.tree.leaves(state, is_leaf=is_noise_state)
    return next(leaf for leaf in leaves if is_noise_state(leaf)).step


def _stddev(noise_multiplier: optax.ScalarOrSchedule, clip_norm: Any) -> optax.ScalarOrSchedule:
    """Return z times the sensitivity, as a schedule if either of them is one."""
    total = sensitivity(clip_norm)
    if not (callable(noise_multiplier) or callable(total)):
        return noise_multiplier * total

    def stddev(step: Any) -> Any:
        multiplier = noise_multiplier(step) if callable(noise_multiplier) else noise_multiplier
        return multiplier * (total(step) if callable(total) else total)

    return stddev


def _smoothing_link(smoothing: Smoothing) -> optax.GradientTransformation:
    """Return the smoothing transform, or nothing where σ is the number 0."""
    if isinstance(smoothing, optax.GradientTransformation):
        return smoothing
    check_non_negative("smoothing", smoothing, schedule=True)
    return (
        optax.identity() if is_number(smoothing) and smoothing == 0 else laplacian_smooth(smoothing)
    )


def _by_gradients_alone(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Wrap an optimizer so that it raises a clear error if it needs the loss, as L-BFGS does."""
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        try:
            return inner.update(updates, state, params, **extra_args)
        except TypeError as error:
            _, is_missing, names = str(error).partition("required keyword-only argument")
            if not is_missing:
                error.add_note("This is an error of `optimizer`: look at its own arguments.")
                raise
            raise TypeError(
                "`optimizer` must need gradients alone, got one that asks for "
                f"{names.lstrip('s:').strip()} as well, which would be released without noise; "
                "take one such as optax.sgd or optax.adam, without a line search."
            ) from error

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _cast_like(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
    """Give the updates the dtypes of `params`, if known: sums are wider than half precision."""
    if params is None:
        return updates
    return jax.tree.map(lambda u, p: u.astype(jnp.result_type(p)), updates, params)
