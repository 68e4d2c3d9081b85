"""Add Gaussian noise to a clipped sum.

`draw_noise` derives one key per step and leaf, from which `_keys.standard_normal` draws Gaussian
numbers. To add another distribution, write another transform in this file, with a state that holds
its key. Noise that is correlated between steps is in `correlated_noise`. Exact discrete noise is in
`discrete`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from optax_lsdp._checks import check_positive, frozen_number, is_number, refusal
from optax_lsdp._clipped import WithSlack, unmarked_leaves
from optax_lsdp._keys import (
    check_key,
    fold_in_text,
    fold_in_texts,
    fresh_key,
    is_threefry,
    standard_normal,
)
from optax_lsdp._mesh import (
    Shard,
    all_under_vmap,
    check_shard_specs,
    explicit_spec,
    manual_axes,
    read_shards,
    spread_specs,
    varying_axes,
    with_automatic_axes,
)
from optax_lsdp._trees import check_shapes, leaf_addresses, widen
from optax_lsdp._types import PyTree

__all__ = ["AddGaussianNoiseState", "add_gaussian_noise", "fresh_key"]


_LAST_STEP = 2**31 - 1  # the step counter stops here: later steps would repeat the noise
_SMALL = 2**13  # leaves with at most this many entries share draws


class AddGaussianNoiseState(NamedTuple):
    """The state of `add_gaussian_noise`: the secret key, and the number of steps that used it."""

    key: jax.Array
    step: jax.Array

    @property
    def adds_noise(self) -> bool:
        """Mark the noise in the state of a chain, so that `watch` can refuse to precede it."""
        return True

    def __repr__(self) -> str:  # users log states, and whoever has the key can subtract the noise
        return f"AddGaussianNoiseState(key=<secret>, step={self.step!r})"


def add_gaussian_noise(
    stddev: optax.ScalarOrSchedule,
    *,
    key: jax.Array,
    shard_specs: PyTree = None,
    expected_batch_size: float | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Add independent Gaussian noise to every entry: ŝ = s + N(0, stddev² I).

    Put this transform right after `clip_per_example`: nothing may change the sum between the two.
    Up to rounding, the noise of a leaf depends only on the key, the step and the leaf's path. So a
    resumed run draws the same noise as an uninterrupted run, on any mesh. The noise is drawn and
    added in float32 or float64. Its tails reach 9.1 standard deviations; those of
    `jax.random.normal` reach 5.4 in float32.

    Args:
        stddev: the noise multiplier times `sensitivity(clip_norm)`; a number or a schedule. If a
            value of a schedule or of `optax.inject_hyperparams` is not positive, the result is NaN,
            so the sum is never released without noise.
        key: one typed key, such as `fresh_key()`, used for nothing else. The state stores the key,
            so the state is as secret as the data. Use each key for one `init` only: two runs with
            the same key draw the same noise, and the difference of their results reveals the
            examples in which the runs differ. Under `jax.vmap`, map over keys. Prefer JAX's default
            generator, Threefry: it is a cipher, and its output is the same on any mesh. The
            cryptographic strength of "rbg" is unknown, and its bits depend on the device and the
            compiler. "rbg" is fast only on devices with a hardware generator.
        shard_specs: how `shard_map` splits the updates over its mesh axes: None if it does not
            split them, one `PartitionSpec` for all leaves, or a tree like `updates` with one
            `PartitionSpec` per leaf. Shards of a leaf draw different noise along the mesh axes that
            its spec names. Over all other mesh axes, sum the updates first. If JAX tracks which
            axes a leaf varies over (check_vma=True), axes over which the leaf does not vary are
            ignored, so one spec also serves scalars and biases.
        expected_batch_size: b, a public number by which the noisy sum is divided, or None. It has
            the same bits as with `optax.scale(1 / b)` behind the noise, and CPUs compute it faster.
            A sum with slack cannot be divided here; use `optax.scale` behind `estimate_norms`.

    Raises:
        TypeError: if `key` is not one typed key, or `shard_specs` does not consist of
            PartitionSpecs.
        ValueError: if `stddev` is not positive or has half precision; if `updates` are still marked
            as `Clipped`; or if shards whose values may differ would draw the same noise.

    >>> tx = add_gaussian_noise(2.0, key=jax.random.key(0))
    >>> noise, _ = tx.update(jnp.zeros(100_000), tx.init(None))
    >>> print(round(float(noise.std()), 1))
    2.0
    """
    remedy = "for a chain without privacy, leave `add_gaussian_noise` out"
    check_positive("stddev", stddev, remedy, schedule=True)
    stddev = frozen_number(stddev)
    if not callable(stddev):
        check_stddev(stddev)
    check_key("key", key)
    check_shard_specs(shard_specs)
    size = 1.0 if expected_batch_size is None else read_batch_size(expected_batch_size)

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
        if not isinstance(state, AddGaussianNoiseState):
            demand = "the state of `add_gaussian_noise`"
            raise TypeError(f"`state` must be {demand}, got {type(state).__name__}.")
        if isinstance(updates, WithSlack) and expected_batch_size is not None:
            demand = "left out for a sum with slack, whose counts it would divide too"
            raise refusal("expected_batch_size", demand, size, "divide after `estimate_norms`")
        total = read_sum("add_gaussian_noise", updates, params, state, shard_specs)
        total = total._replace(divisor=size)
        scale = stddev(state.step) if callable(stddev) else stddev
        draw = partial(draw_noise, state, total)
        noisy = add_drawn(total, draw, state, scale, state.step < _LAST_STEP)
        if isinstance(noisy, WithSlack):
            noisy = replace(noisy, is_noisy=True)
        return noisy, AddGaussianNoiseState(state.key, optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


class SumLeaves(NamedTuple):
    """The leaves of a clipped sum to which a transform adds noise."""

    structure: jax.tree_util.PyTreeDef
    narrow: list[jax.Array]  # the leaves
    wide: list[jax.Array]  # the leaves in float32 or float64
    addresses: list[str]  # the path of each leaf
    axes: list[tuple[str, ...]]  # the mesh axes along which a leaf's shards draw different noise
    divisor: float = 1.0  # by which the noisy sum is divided


def read_sum(
    name: str,
    updates: optax.Updates,
    params: optax.Params | None,
    state: AddGaussianNoiseState,
    shard_specs: PyTree,
) -> SumLeaves:
    """Return the leaves of a clipped sum. Raise if noise cannot be added to it.

    `name` is the name of the transform.
    """
    named, structure = unmarked_leaves(name, updates, accepts_slack=True)
    narrow = [jnp.asarray(leaf) for _, leaf in named]  # NumPy's float64 becomes JAX's precision
    wide = [widen(leaf) for leaf in narrow]
    addresses = leaf_addresses(updates)
    if jax.tree.structure(params) == structure:
        check_shapes(updates, params, f"put `clip_per_example` before `{name}`")
    shards = read_shards(spread_specs(shard_specs, updates), wide) if wide else []
    axes = [shard.split_axes for shard in shards]
    _check_shards(named, shards, state)
    return SumLeaves(structure, narrow, wide, addresses, axes)


def add_scaled(
    total: SumLeaves, noises: Sequence[jax.Array], scale: ArrayLike, is_good: jax.Array
) -> optax.Updates:
    """Return (total + scale·noise)/divisor.

    Return NaN if `is_good` is False or the scale is not positive.
    """
    check_stddev(scale)

    def add_one(leaf: jax.Array, noise: jax.Array) -> jax.Array:
        stddev = jnp.asarray(scale, noise.dtype)
        is_positive = stddev >= jnp.finfo(stddev.dtype).tiny
        return leaf + jnp.where(is_positive & is_good, stddev * noise, jnp.nan)

    noisy = [
        add_one(leaf, noise).astype(narrow.dtype) * (1 / total.divisor)
        for leaf, noise, narrow in zip(total.wide, noises, total.narrow, strict=True)
    ]
    return jax.tree.unflatten(total.structure, noisy)


def add_drawn(
    total: SumLeaves,
    draw: Callable[[], list[jax.Array]],
    state: AddGaussianNoiseState,
    scale: ArrayLike,
    is_good: jax.Array,
) -> optax.Updates:
    """Return `add_scaled` of the noise that `draw` returns. XLA for CPUs draws it only once.

    Otherwise XLA would draw it again in every kernel that reads a noisy leaf, and smoothing has
    three of them. For the same reason, the division by the batch size is here. XLA merges nothing
    across the border of a `lax.cond`. The condition always holds, because steps are never negative.
    Outside `jit`, nothing is merged.
    """

    def add() -> optax.Updates:
        return add_scaled(total, draw(), scale, is_good)

    def add_nan() -> optax.Updates:
        words = jnp.sum(jax.random.key_data(state.key))  # varies over mesh axes if the key does
        nan = [leaf * (jnp.nan * words.astype(leaf.dtype)) for leaf in total.wide]
        return add_scaled(total, nan, scale, is_good)

    if not (total.wide and isinstance(state.step, jax.core.Tracer)):
        return add()
    add = jax.jit(add)  # so that the branches do not trace it again
    always = all_under_vmap(state.step >= 0)
    return jax.lax.platform_dependent(cpu=lambda: jax.lax.cond(always, add, add_nan), default=add)


def draw_noise(state: AddGaussianNoiseState, total: SumLeaves) -> list[jax.Array]:
    """Return standard Gaussian noise for each leaf, in float32 or float64.

    The key of a leaf is the state's key with three values folded in: the step, the leaf's address,
    and the index of this shard along the mesh axes that split the leaf. Small leaves of similar
    size share one draw, which compiles to fewer kernels.
    """
    if not total.wide:
        return []
    leaves, axes = total.wide, total.axes
    step_key = jax.random.fold_in(fold_in_text(state.key, "noise"), state.step)
    keys = fold_in_texts(step_key, total.addresses)
    draws_together = is_threefry(keys)
    groups: dict[tuple[object, ...], list[int]] = {}
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
        room = max(leaves[index].size for index in members)
        is_long_and_odd = first.ndim == 1 and room % 2 == 1 and room > _SMALL and draws_together
        if len(members) == 1 and not is_long_and_odd:
            draw = partial(standard_normal, shape=first.shape, dtype=first.dtype)
            noises[members[0]] = with_automatic_axes(draw, explicit_spec(first))(chosen[0])
            continue
        # XLA's CPU backend does not vectorize loops over an odd number of entries.
        rows = standard_normal(chosen, (room + is_long_and_odd,), first.dtype)
        for row, index in enumerate(members):
            cut = jax.lax.slice(rows, (row, 0), (row + 1, leaves[index].size))
            noises[index] = cut.reshape(leaves[index].shape)
    return [noises[index] for index in range(len(leaves))]


def read_batch_size(expected_batch_size: float) -> float:
    """Return the expected batch size. Raise unless it is a plain positive number."""
    if not is_number(expected_batch_size):
        raise TypeError(
            f"`expected_batch_size` must be a plain number, got {expected_batch_size!r}; pass a "
            "public constant, never the number of examples in a batch, and with "
            "optax.inject_hyperparams add 'expected_batch_size' to its static_args."
        )
    check_positive("expected_batch_size", expected_batch_size)
    return float(expected_batch_size)


def check_stddev(stddev: ArrayLike) -> None:
    """Raise unless `stddev` is one number in float32 or float64."""
    if jnp.shape(stddev):
        raise ValueError(f"`stddev` must give one number, got the shape {jnp.shape(stddev)}.")
    dtype = getattr(stddev, "dtype", jnp.dtype("float32"))
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"`stddev` must be float32 or float64, got {dtype}; with optax.inject_hyperparams, "
            "pass hyperparam_dtype=jnp.float32."
        )


def _check_shards(
    leaves: Sequence[tuple[str, jax.Array]], shards: Sequence[Shard], state: AddGaussianNoiseState
) -> None:
    """Raise if shards of a leaf may differ and would get the same noise."""
    for (name, _), shard in zip(leaves, shards, strict=True):
        tracked = shard.varying is not None
        may_vary = set(manual_axes()) if shard.varying is None else shard.varying
        repeated = may_vary - set(shard.named) - (varying_axes(state) if may_vary else set())
        if repeated:
            reason = "varies" if tracked else "may vary (check_vma=False and pmap do not track it)"
            remedy = "sum it with jax.lax.psum" if tracked else "use shard_map with check_vma=True"
            raise ValueError(
                f"`updates` must be equal on all shards inside shard_map, got {name!r}, which "
                f"{reason} over {', '.join(sorted(repeated))}: unequal shards would get equal "
                f"noise; {remedy}, call `update` outside shard_map, or if a summed gradient is "
                "split, name its mesh axes in `shard_specs`."
            )
