"""Gaussian noise: a clipped sum goes in, a noisy sum comes out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_positive
from optax_lsdp._keys import check_key, fold_in_text, fresh_key
from optax_lsdp._marked import check_unmarked
from optax_lsdp._shards import are_shards_tracked, manual_axes, varying_axes
from optax_lsdp._trees import check_floating, path_name, widen

__all__ = ["AddGaussianNoiseState", "add_gaussian_noise", "fresh_key"]


class AddGaussianNoiseState(NamedTuple):
    """The run's key, which is a secret, and how many steps have been noised with it."""

    key: jax.Array
    step: jax.Array


def add_gaussian_noise(
    stddev: optax.ScalarOrSchedule, *, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Add independent Gaussian noise to every entry: ŝ = s + N(0, stddev² I).

    Put it right after `clip_per_example`: nothing may touch the sum between the two. The noise
    of a leaf is a function of the key, the step and the leaf's path alone, so that a resumed run
    draws what it would have drawn, on any mesh. It is drawn and added in float32 at least,
    with tails to 9.1 standard deviations (`jax.random.normal` in float32 ends at 5.4).

    Args:
        stddev: the noise multiplier times `sensitivity(clip_norm)`; a number, or a function
            of the step. A scheduled or injected value that is not positive turns the result into
            NaN rather than release a sum without noise.
        key: one typed key, such as `fresh_key()`, used for nothing else. It is kept in the
            state, which is therefore as secret as the data. One key is good for one `init`: two
            runs with the same key draw the same noise, and the difference of their results
            betrays the examples in which they differ. Under `jax.vmap`, map over keys.

    Raises:
        ValueError: inside `shard_map`, if the shards would all draw the same noise.

    >>> tx = add_gaussian_noise(2.0, key=jax.random.key(0))
    >>> noise, _ = tx.update(jnp.zeros(100_000), tx.init(None))
    >>> print(round(float(noise.std()), 1))
    2.0
    """
    remedy = "leave the link out for a chain without privacy"
    check_positive("stddev", stddev, remedy, schedule=True)
    _check_precision(stddev)
    check_key("key", key)

    def init(params: optax.Params) -> AddGaussianNoiseState:
        del params
        # A copy: donating the optimizer's state must not delete the caller's key.
        return AddGaussianNoiseState(key=jnp.copy(key), step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: AddGaussianNoiseState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AddGaussianNoiseState]:
        del params, extra_args
        check_unmarked("add_gaussian_noise", updates)
        check_floating("updates", updates)
        scale = stddev(state.step) if callable(stddev) else stddev
        _check_precision(scale)
        step_key = jax.random.fold_in(fold_in_text(state.key, "noise"), state.step)

        def add_noise(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
            _check_shards(path, leaf, step_key)
            wide = widen(leaf)
            leaf_key = fold_in_text(step_key, jax.tree_util.keystr(path))
            noise = jnp.asarray(scale, wide.dtype) * _normal(leaf_key, wide.shape, wide.dtype)
            noise = jnp.where(jnp.asarray(scale) > 0, noise, jnp.nan)
            return (wide + noise).astype(leaf.dtype)

        noisy = jax.tree.map_with_path(add_noise, updates)
        return noisy, AddGaussianNoiseState(state.key, optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return ±Φ⁻¹(p) for p = (k + ½)·2⁻⁶⁴ with a random sign and a random k of 63 bits."""
    high_key, low_key = jax.random.split(key)
    high = jax.random.bits(high_key, shape, jnp.uint32)
    low = jax.random.bits(low_key, shape, jnp.uint32)
    unit, half = jnp.asarray(2.0**-32, dtype), jnp.asarray(0.5, dtype)
    p = ((high >> 1).astype(dtype) + (low.astype(dtype) + half) * unit) * unit
    tail = jax.scipy.special.ndtri(p)
    return jnp.where((high & 1) == 1, tail, -tail)


def _check_precision(stddev: Any) -> None:
    """Raise if the noise that the accountant counts on was rounded to half precision."""
    dtype = getattr(stddev, "dtype", jnp.dtype("float32"))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"`stddev` must be float32 at least, got {dtype}; with optax.inject_hyperparams, "
            "pass hyperparam_dtype=jnp.float32."
        )


def _check_shards(path: tuple[Any, ...], leaf: jax.Array, key: jax.Array) -> None:
    """Raise if `leaf` may differ between the shards of a manual mesh axis and `key` does not."""
    if not manual_axes():
        return
    tracked = are_shards_tracked()
    repeated = varying_axes(leaf) - varying_axes(key) if tracked else set(manual_axes())
    if repeated:
        reason = "varies" if tracked else "may vary, which check_vma=False and pmap do not tell"
        raise ValueError(
            "`updates` must be the same on all shards inside shard_map, got "
            f"{path_name(path)!r}, which {reason}, over {', '.join(sorted(repeated))}: every shard "
            "would draw the same noise; sum it with jax.lax.psum, or call `update` outside."
        )
