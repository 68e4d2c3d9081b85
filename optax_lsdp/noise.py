"""Gaussian noise: a clipped sum goes in, a noisy sum comes out."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._checks import check_positive, frozen_number
from optax_lsdp._clipped import check_unmarked
from optax_lsdp._keys import (
    check_key,
    fold_in_text,
    fold_in_texts,
    fresh_key,
    is_threefry,
    random_words,
)
from optax_lsdp._mesh import (
    all_under_vmap,
    are_shards_tracked,
    axis_names,
    explicit_spec,
    manual_axes,
    varying_axes,
    with_automatic_axes,
)
from optax_lsdp._trees import check_floating, leaf_addresses, path_name, wide_dtype, zip_leaves

__all__ = ["AddGaussianNoiseState", "add_gaussian_noise", "fresh_key"]


_LAST_STEP = 2**31 - 1  # at which the step stops counting, and noise would repeat
_SMALL = 2**13  # entries of a leaf that draws together with others
# Of −Φ⁻¹(p) in log(−log p) − _CENTRE, highest power first; tests/test_noise.py fits them again.
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
    """The run's key, which is a secret, and how many steps have been noised with it."""

    key: jax.Array
    step: jax.Array

    def __repr__(self) -> str:  # whoever has the key can subtract the noise, and states are logged
        return f"AddGaussianNoiseState(key=<secret>, step={self.step!r})"


def add_gaussian_noise(
    stddev: optax.ScalarOrSchedule,
    *,
    key: jax.Array,
    axis_name: str | tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """Add independent Gaussian noise to every entry: ŝ = s + N(0, stddev² I).

    Put it right after `clip_per_example`: nothing may touch the sum between the two. The noise
    of a leaf is a function of the key, the step and the leaf's path alone, up to rounding, so that
    a resumed run draws what it would have drawn, on any mesh. It is drawn and added in float32 at
    least, with tails to 9.1 standard deviations (`jax.random.normal` in float32 ends at 5.4).

    Args:
        stddev: the noise multiplier times `sensitivity(clip_norm)`; a number, or a function
            of the step. A scheduled or injected value that is not positive turns the result into
            NaN rather than release a sum without noise.
        key: one typed key, such as `fresh_key()`, used for nothing else. It is kept in the
            state, which is therefore as secret as the data. One key is good for one `init`: two
            runs with the same key draw the same noise, and the difference of their results
            betrays the examples in which they differ. Under `jax.vmap`, map over keys.
            JAX's default generator, Threefry, is a cipher, fit for noise that must not be guessed,
            and its bits are the same on any mesh. "rbg" is meant for devices that have a
            generator of their own, and slower on CPUs; its bits depend on the device and the
            compiler, so that a run cannot be resumed elsewhere to the bit, and nobody vouches for
            its strength.
        axis_name: inside `shard_map`, the mesh axes over which leaves are split, so that each
            shard draws its own noise. A leaf must be summed over all other axes first.

    Raises:
        ValueError: inside `shard_map`, if the shards would all draw the same noise.

    >>> tx = add_gaussian_noise(2.0, key=jax.random.key(0))
    >>> noise, _ = tx.update(jnp.zeros(100_000), tx.init(None))
    >>> print(round(float(noise.std()), 1))
    2.0
    """
    remedy = "leave the link out for a chain without privacy"
    check_positive("stddev", stddev, remedy, schedule=True)
    stddev = frozen_number(stddev)
    _check_precision(stddev)
    check_key("key", key)
    if not isinstance(axis_name, str | tuple | list):
        raise TypeError(f"`axis_name` must be a mesh axis or a tuple of them, got {axis_name!r}.")
    axes = axis_names(axis_name)

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
        del extra_args
        check_unmarked("add_gaussian_noise", updates)
        check_floating("updates", updates)
        _check_sum(updates, params)
        scale = stddev(state.step) if callable(stddev) else stddev
        _check_precision(scale)
        if jnp.shape(scale):
            raise ValueError(f"`stddev` must give one number, got an array of {jnp.shape(scale)}.")
        step_key = jax.random.fold_in(fold_in_text(state.key, "noise"), state.step)
        paths, structure = jax.tree.flatten_with_path(updates)
        leaves = [leaf for _, leaf in paths]
        for path, leaf in paths:
            _check_shards(path, leaf, step_key, axes)
        if not leaves:
            return updates, AddGaussianNoiseState(state.key, optax.safe_increment(state.step))
        keys = fold_in_texts(step_key, leaf_addresses(updates))

        def add_noise(leaf: jax.Array, noise: jax.Array) -> jax.Array:
            wide = jnp.asarray(scale, noise.dtype)
            is_good = (wide >= jnp.finfo(wide.dtype).tiny) & (state.step < _LAST_STEP)
            scaled = jnp.where(is_good, wide * noise, jnp.nan)
            return (leaf.astype(noise.dtype) + scaled).astype(leaf.dtype)

        noises = _draw(keys, leaves, axes, state.step)
        noisy = jax.tree.unflatten(structure, map(add_noise, leaves, noises))
        return noisy, AddGaussianNoiseState(state.key, optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def is_noise_state(x: Any) -> bool:
    """Tell the noise's part of an optimizer's state from all others."""
    return isinstance(x, AddGaussianNoiseState)


def _draw(
    keys: jax.Array, leaves: list[jax.Array], axes: tuple[str, ...], step: jax.Array
) -> list[jax.Array]:
    """Return unit noise for each leaf; small leaves draw theirs together."""
    groups: dict[Any, list[int]] = {}
    tracked = are_shards_tracked()
    for index, leaf in enumerate(leaves):
        room = 1 << max(leaf.size - 1, 0).bit_length()
        folded = tuple(axis for axis in axes if not tracked or axis in varying_axes(leaf))
        alone = leaf.size > _SMALL or not is_threefry(keys)
        own = (index,) if alone else (room, wide_dtype(leaf))
        groups.setdefault((folded, own), []).append(index)
    noises = dict[int, jax.Array]()
    for (folded, _), members in groups.items():
        chosen = keys[np.asarray(members)]
        for axis in folded:
            chosen = jax.vmap(jax.random.fold_in, (0, None))(chosen, jax.lax.axis_index(axis))
        if len(members) == 1:
            leaf = leaves[members[0]]
            if leaf.ndim == 1 and leaf.size % 2 and leaf.size > _SMALL and is_threefry(keys):
                # XLA's CPU backend vectorizes no loop over an odd number of entries.
                rows = _normal_once(chosen, leaf.size + 1, wide_dtype(leaf), step)
                noises[members[0]] = rows[0, :-1]
                continue
            draw = partial(_normal, shape=leaf.shape, dtype=wide_dtype(leaf))
            sharding = explicit_spec(leaf)
            noises[members[0]] = with_automatic_axes(draw, sharding)(chosen[0])
            continue
        room = max(leaves[index].size for index in members)
        rows = _normal_once(chosen, room, wide_dtype(leaves[members[0]]), step)
        for row, index in enumerate(members):
            cut = jax.lax.slice(rows, (row, 0), (row + 1, leaves[index].size))
            noises[index] = cut.reshape(leaves[index].shape)
    return [noises[index] for index in range(len(leaves))]


def _normal_once(keys: jax.Array, room: int, dtype: Any, step: jax.Array) -> jax.Array:
    """Return a row of unit noise for each key, or NaN if the step is corrupt.

    What is drawn under a condition is drawn once, where XLA would otherwise draw it in each of the
    kernels that cut a leaf's noise out of it.
    """
    draw = partial(_normal, shape=(room,), dtype=dtype)
    return jax.lax.cond(all_under_vmap(step >= 0), draw, lambda keys: jnp.nan * draw(keys), keys)


def _normal(keys: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Return ±Φ⁻¹(p) for p = (k + ½)·2⁻⁶⁴ with a random sign and a random k of 63 bits."""
    high, low = random_words(keys, shape)
    unit, half = jnp.asarray(2.0**-32, dtype), jnp.asarray(0.5, dtype)
    p = ((high >> 1).astype(dtype) + (low.astype(dtype) + half) * unit) * unit
    tail = _quantile(p)
    return jnp.where((high & 1) == 1, tail, -tail)


def _quantile(p: jax.Array) -> jax.Array:
    """Return Φ⁻¹(p) for p in [2⁻⁶⁵, ½], as precise as its dtype.

    −Φ⁻¹ is so smooth a function of log(−log p) that a polynomial of degree 8 is within 2e-8 of it.
    """
    if p.dtype == jnp.float64:
        return jax.scipy.special.ndtri(p)
    x = jnp.log(-jnp.log(p)) - _CENTRE
    total = jnp.zeros_like(x)
    for coefficient in _COEFFICIENTS:
        total = total * x + coefficient
    return -total


def _check_sum(updates: Any, params: Any) -> None:
    """Raise if gradients are still stacked, one for each example, as far as `params` tells."""
    structure: Any = jax.tree.structure(updates)
    if structure != jax.tree.structure(params):
        return
    for name, leaf, param in zip_leaves(updates, params):
        if leaf.shape != jnp.shape(param):
            raise ValueError(
                f"`updates` must be a sum of clipped gradients, got shape {leaf.shape} for a "
                f"parameter of {jnp.shape(param)} at {name!r}; put `clip_per_example` before "
                "`add_gaussian_noise`."
            )


def _check_precision(stddev: Any) -> None:
    """Raise if the noise that the accountant counts on was rounded to half precision."""
    dtype = getattr(stddev, "dtype", jnp.dtype("float32"))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"`stddev` must be float32 at least, got {dtype}; with optax.inject_hyperparams, "
            "pass hyperparam_dtype=jnp.float32."
        )


def _check_shards(
    path: tuple[Any, ...], leaf: jax.Array, key: jax.Array, axes: tuple[str, ...]
) -> None:
    """Raise if `leaf` may differ between the shards of a mesh axis and its noise does not."""
    if not manual_axes():
        return
    tracked = are_shards_tracked()
    repeated = varying_axes(leaf) - varying_axes(key) - set(axes)
    if not tracked:
        repeated = set(manual_axes()) - set(axes)
    if repeated:
        reason = "varies" if tracked else "may vary, which check_vma=False and pmap do not tell"
        remedy = "sum it with jax.lax.psum" if tracked else "use shard_map with check_vma=True"
        raise ValueError(
            "`updates` must be the same on all shards inside shard_map, got "
            f"{path_name(path)!r}, which {reason}, over {', '.join(sorted(repeated))}: every shard "
            f"would draw the same noise; {remedy}, call `update` outside, or name "
            "as `axis_name` the axes over which a summed gradient is split."
        )
