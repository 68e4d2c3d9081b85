"""Add Gaussian noise to a clipped sum.

`add_gaussian_noise` is an Optax transform. It derives a key for each step and each leaf, and
`_normal` turns the random bits of this key into Gaussian numbers. To add another noise
distribution, or noise that is correlated between steps, write a separate transform in this file,
with a state that holds its key. Exact discrete noise is in `optax_lsdp.discrete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lsdp._checks import check_positive, frozen_number
from optax_lsdp._clipped import unmarked_leaves
from optax_lsdp._keys import (
    check_key,
    fold_in_text,
    fold_in_texts,
    fresh_key,
    is_threefry,
    random_words,
)
from optax_lsdp._mesh import (
    Shard,
    all_under_vmap,
    check_shard_specs,
    explicit_spec,
    manual_axes,
    read_shards,
    varying_axes,
    with_automatic_axes,
)
from optax_lsdp._trees import leaf_addresses, path_name, widen
from optax_lsdp._types import PyTree

__all__ = ["AddGaussianNoiseState", "add_gaussian_noise", "fresh_key"]


_LAST_STEP = 2**31 - 1  # the step counter stops here, so later steps would repeat the noise
_SMALL = 2**13  # leaves with at most this many entries share draws
# Coefficients of a polynomial for −Φ⁻¹(p) in log(−log p) − _CENTRE, highest power first.
# tests/test_keys.py fits them again.
_CENTRE = 1.7283144504315484
_COEFFICIENTS = (
    3.91766352e-07,
    5.788352e-06,
    6.87966104e-05,
    0.00086138042,
    0.00899689136,
    0.0697539843,
    0.398059941,
    1.87982752,
    2.6888962,
)


class AddGaussianNoiseState(NamedTuple):
    """The key of the noise, which is a secret, and the number of steps that used it."""

    key: jax.Array
    step: jax.Array

    def __repr__(self) -> str:  # users log states, and whoever has the key can subtract the noise
        return f"AddGaussianNoiseState(key=<secret>, step={self.step!r})"


def add_gaussian_noise(
    stddev: optax.ScalarOrSchedule,
    *,
    key: jax.Array,
    shard_specs: PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Add independent Gaussian noise to every entry: ŝ = s + N(0, stddev² I).

    Put this transform right after `clip_per_example`: nothing may change the sum between the two.
    Up to rounding, the noise of a leaf depends only on the key, the step and the leaf's path.
    A resumed run therefore draws the same noise as an uninterrupted run, on any mesh. The noise is
    drawn and added in float32 or float64. It reaches 9.1 standard deviations;
    `jax.random.normal` in float32 reaches only 5.4.

    Args:
        stddev: the noise multiplier times `sensitivity(clip_norm)`; a number or a schedule. If a
            scheduled or injected value is not positive, the result is NaN, so the sum is never
            released without noise.
        key: one typed key, such as `fresh_key()`, used for nothing else. The state stores the key,
            so the state is as secret as the data. Use each key for one `init` only: two runs
            with the same key draw the same noise, and the difference of their results
            reveals the examples in which the two runs differ. Under `jax.vmap`, map over keys.
            JAX's default generator, Threefry, is a cipher: its output cannot be guessed, and is the
            same on any mesh. The generator "rbg" is meant for devices with a hardware generator
            and is slower on CPUs. The cryptographic strength of "rbg" is unknown. Its bits depend
            on the device and the compiler, so a run that resumes with another device or
            compiler may draw different noise.
        shard_specs: how `shard_map` splits the updates over its mesh axes: None if it does not
            split them, one `PartitionSpec` for all leaves, or a tree like `updates` with one
            `PartitionSpec` per leaf. Shards draw different noise along the mesh axes that their
            leaf's spec names. Over all other mesh axes, sum the updates first. If JAX tracks which
            axes a leaf varies over (check_vma=True), the transform ignores axes along which the
            leaf is replicated. One spec then also serves scalars and biases, although they may have
            fewer dimensions than the spec has entries.

    Raises:
        TypeError: if `key` is not one typed key, or if `shard_specs` holds anything but
            PartitionSpecs.
        ValueError: if `stddev` is not positive or has half precision; if `updates` are not a plain
            clipped sum; or, inside `shard_map`, if several shards would draw the same noise
            although their values may differ.

    >>> tx = add_gaussian_noise(2.0, key=jax.random.key(0))
    >>> noise, _ = tx.update(jnp.zeros(100_000), tx.init(None))
    >>> print(round(float(noise.std()), 1))
    2.0
    """
    remedy = "for a chain without privacy, leave `add_gaussian_noise` out"
    check_positive("stddev", stddev, remedy, schedule=True)
    stddev = frozen_number(stddev)
    if not callable(stddev):
        _check_stddev(stddev)
    check_key("key", key)
    check_shard_specs(shard_specs)

    def init(params: optax.Params) -> AddGaussianNoiseState:
        del params
        # A copy: donating the optimizer's state must not delete the caller's key.
        return AddGaussianNoiseState(key=jnp.copy(key), step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: AddGaussianNoiseState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, AddGaussianNoiseState]:
        del extra_args
        paths, structure = unmarked_leaves("add_gaussian_noise", updates)
        wide = [widen(leaf) for _, leaf in paths]
        addresses = leaf_addresses(updates)
        if jax.tree.structure(params) == structure:
            _check_sum(paths, jax.tree.leaves(params))
        scale = stddev
        if callable(stddev):
            scale = stddev(state.step)
            _check_stddev(scale)
        next_state = AddGaussianNoiseState(state.key, optax.safe_increment(state.step))
        if not wide:
            return updates, next_state
        shards = read_shards(shard_specs, wide)
        step_key = jax.random.fold_in(fold_in_text(state.key, "noise"), state.step)
        keys = fold_in_texts(step_key, addresses)
        _check_shards(paths, shards, step_key)

        def add_noise(leaf: jax.Array, noise: jax.Array) -> jax.Array:
            stddev = jnp.asarray(scale, noise.dtype)
            is_good = (stddev >= jnp.finfo(stddev.dtype).tiny) & (state.step < _LAST_STEP)
            return leaf + jnp.where(is_good, stddev * noise, jnp.nan)

        noises = _draw(keys, wide, [_split_axes(shard) for shard in shards], state.step)
        noisy = [
            add_noise(leaf, noise).astype(narrow.dtype)
            for leaf, noise, (_, narrow) in zip(wide, noises, paths, strict=True)
        ]
        return jax.tree.unflatten(structure, noisy), next_state

    return optax.GradientTransformationExtraArgs(init, update)


def is_noise_state(node: object) -> bool:
    """Return whether a node of an optimizer's state is the state of `add_gaussian_noise`."""
    return isinstance(node, AddGaussianNoiseState)


def _draw(
    keys: jax.Array,
    leaves: Sequence[jax.Array],
    axes: Sequence[tuple[str, ...]],
    step: jax.Array,
) -> list[jax.Array]:
    """Return standard Gaussian noise for each leaf; leaves are float32 or float64.

    Small leaves of similar size share one draw, because this compiles to fewer kernels. For each
    leaf, `axes` holds the mesh axes whose index is folded into the leaf's key.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    draws_together = is_threefry(keys)
    for index, leaf in enumerate(leaves):
        room = 1 << max(leaf.size - 1, 0).bit_length()
        is_small = draws_together and leaf.size <= _SMALL
        group = (room, leaf.dtype) if is_small else (index,)
        groups.setdefault((axes[index], group), []).append(index)
    noises = dict[int, jax.Array]()
    for members in groups.values():
        first = leaves[members[0]]
        chosen = keys[np.asarray(members)]
        for axis in axes[members[0]]:
            chosen = jax.vmap(jax.random.fold_in, (0, None))(chosen, jax.lax.axis_index(axis))
        if len(members) == 1:
            if first.ndim == 1 and first.size % 2 and first.size > _SMALL and draws_together:
                # XLA's CPU backend does not vectorize loops over an odd number of entries.
                noises[members[0]] = _normal_once(chosen, first.size + 1, first.dtype, step)[0, :-1]
                continue
            draw = partial(_normal, shape=first.shape, dtype=first.dtype)
            noises[members[0]] = with_automatic_axes(draw, explicit_spec(first))(chosen[0])
            continue
        room = max(leaves[index].size for index in members)
        rows = _normal_once(chosen, room, first.dtype, step)
        for row, index in enumerate(members):
            cut = jax.lax.slice(rows, (row, 0), (row + 1, leaves[index].size))
            noises[index] = cut.reshape(leaves[index].shape)
    return [noises[index] for index in range(len(leaves))]


def _normal_once(keys: jax.Array, room: int, dtype: jnp.dtype, step: jax.Array) -> jax.Array:
    """Return a row of standard Gaussian noise for each key; if the step is negative, return NaN.

    Steps are never negative, but the condition makes XLA draw the rows once. Without it, XLA would
    draw the rows again in every kernel that slices a leaf's noise from them.
    """
    draw = partial(_normal, shape=(room,), dtype=dtype)
    return jax.lax.cond(all_under_vmap(step >= 0), draw, lambda keys: jnp.nan * draw(keys), keys)


def _normal(keys: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Return ±Φ⁻¹(p) for p = (k + ½)·2⁻⁶⁴, with a random sign and a random 63-bit integer k."""
    high, low = random_words(keys, shape)
    unit, half = jnp.asarray(2.0**-32, dtype), jnp.asarray(0.5, dtype)
    p = ((high >> 1).astype(dtype) + (low.astype(dtype) + half) * unit) * unit
    tail = _quantile(p)
    return jnp.where((high & 1) == 1, tail, -tail)


def _quantile(p: jax.Array) -> jax.Array:
    """Return Φ⁻¹(p) for p in [2⁻⁶⁵, ½], to the precision of its dtype.

    In float32, a polynomial of degree 8 in log(−log p) approximates −Φ⁻¹ with an error below 2e-8.
    """
    if p.dtype == jnp.float64:
        return jax.scipy.special.ndtri(p)
    x = jnp.log(-jnp.log(p)) - _CENTRE
    total = jnp.zeros_like(x)
    for coefficient in _COEFFICIENTS:
        total = total * x + coefficient
    return -total


def _check_sum(
    paths: Sequence[tuple[jax.tree_util.KeyPath, jax.Array]], params: Sequence[jax.Array]
) -> None:
    """Raise if a leaf's shape shows that per-example gradients are still stacked."""
    for (path, leaf), param in zip(paths, params, strict=True):
        if leaf.shape != jnp.shape(param):
            raise ValueError(
                f"`updates` must be a sum of clipped gradients, got shape {leaf.shape} for a "
                f"parameter of shape {jnp.shape(param)} at {path_name(path)!r}; put "
                "`clip_per_example` before `add_gaussian_noise`."
            )


def _check_stddev(stddev: ArrayLike) -> None:
    """Raise unless `stddev` is a single number, and not in half precision."""
    if jnp.shape(stddev):
        raise ValueError(f"`stddev` must give one number, got the shape {jnp.shape(stddev)}.")
    dtype = getattr(stddev, "dtype", jnp.dtype("float32"))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"`stddev` must be float32 or float64, got {dtype}; with optax.inject_hyperparams, "
            "pass hyperparam_dtype=jnp.float32."
        )


def _split_axes(shard: Shard) -> tuple[str, ...]:
    """Return the mesh axes along which the shards of a leaf draw different noise."""
    return tuple(axis for axis in shard.named if shard.varying is None or axis in shard.varying)


def _check_shards(
    paths: Sequence[tuple[jax.tree_util.KeyPath, jax.Array]],
    shards: Sequence[Shard],
    key: jax.Array,
) -> None:
    """Raise if a leaf may differ along a mesh axis along which its noise does not differ."""
    for (path, _), shard in zip(paths, shards, strict=True):
        tracked = shard.varying is not None
        may_vary = set(manual_axes()) if shard.varying is None else shard.varying
        repeated = may_vary - set(shard.named) - (varying_axes(key) if may_vary else set())
        if repeated:
            reason = "varies" if tracked else "may vary (check_vma=False and pmap do not track it)"
            remedy = "sum it with jax.lax.psum" if tracked else "use shard_map with check_vma=True"
            raise ValueError(
                f"`updates` must be equal on all shards inside shard_map, got "
                f"{path_name(path)!r}, which {reason} over {', '.join(sorted(repeated))}: every "
                f"shard would draw the same noise; {remedy}, call `update` outside shard_map, or, "
                "if these axes split a summed gradient, pass `shard_specs` that name them."
            )
