"""Guards around a plan's gradient and optimizer: a mask for every batch, and no step too many."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._clipped import is_marked
from optax_lsdp._keys import is_key
from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._schemes import SCHEMES, Sampling
from optax_lsdp._types import PyTree
from optax_lsdp.clipping import PerExample
from optax_lsdp.optimizers import steps_taken

ValueAndGrad = Callable[..., tuple[PerExample, optax.Updates]]
Mask = jax.Array | np.ndarray


def require_mask(value_and_grad: ValueAndGrad, sampling: Sampling, room: int) -> ValueAndGrad:
    """Return the function, but refuse batches that may be padded and have no mask.

    Poisson batches are padded, and so are arrays longer than `room`. The function also refuses
    batches with more than `room` examples, which no sampler of the plan draws.
    """

    def guarded(
        params: optax.Params, batch: PyTree, mask: Mask | None = None, **options: object
    ) -> tuple[PerExample, optax.Updates]:
        if mask is None:
            size = max((len(x) for x in jax.tree.leaves(batch) if jnp.shape(x)), default=0)
            if SCHEMES[sampling].random_size or size > room:
                raise ValueError(
                    f"`mask` must be given with {sampling!r} batches, which are padded, got none; "
                    "pass the mask of `sampler.batch(step)`, or padding counts as examples."
                )
            mask = jnp.ones(size, bool)  # so small a batch has no padding
        private, total = value_and_grad(params, batch, mask, **options)
        return private, total if len(mask) <= room else _within_room(total, mask, room)

    return guarded


def _within_room(total: optax.Updates, mask: Mask, room: int) -> optax.Updates:
    """Raise if the mask counts more than `room` examples; inside `jit`, return NaN instead."""
    count = jnp.sum(mask)
    if not isinstance(count, jax.core.Tracer) and count > room:
        raise ValueError(
            f"`mask` must count {room} examples at most, the plan's room for a batch, got {count}; "
            "take batches and masks from `plan.sampler(key)`."
        )
    return jax.tree.map(lambda x: jnp.where(count <= room, x, jnp.nan), total)


def limit_steps(
    optimizer: optax.GradientTransformationExtraArgs, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer, but accept only sums with a mask, and at most `steps` updates."""

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **options: object,
    ) -> tuple[optax.Updates, optax.OptState]:
        _check_masked(updates)
        taken = steps_taken(state)
        is_planned = taken < steps
        is_traced = isinstance(is_planned, jax.core.Tracer)
        if not (is_traced or is_planned):
            raise ValueError(
                f"`state` must be of less than {steps} steps, the number that was planned, got one "
                f"of {taken}; make a plan for more steps and start again."
            )

        def take_step() -> tuple[optax.Updates, optax.OptState]:
            return optimizer.update(updates, state, params, **options)

        return _if_planned(is_planned, take_step, state) if is_traced else take_step()

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _if_planned(
    is_planned: jax.Array,
    take_step: Callable[[], tuple[optax.Updates, optax.OptState]],
    state: optax.OptState,
) -> tuple[optax.Updates, optax.OptState]:
    """Return the result of a planned step; otherwise zero updates and the same state.

    Code inside `jit` cannot raise. The state must not change either, because some optimizers keep
    an average of the parameters in it.
    """
    if jax.sharding.get_abstract_mesh().explicit_axes:  # branches would have to state shardings
        moves, after = take_step()
        still = jax.tree.map(lambda x: jnp.where(is_planned, x, jnp.zeros_like(x)), moves)
        kept = jax.tree.map(lambda new, old: jnp.where(is_planned, new, old), after, state)
        return still, kept
    like_moves, like_state = jax.eval_shape(take_step)

    def skip_step() -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(_zeros_like, like_moves), jax.tree.map(_cast, state, like_state)

    # A branch, not a selection per entry: XLA would draw the noise again for each selected array.
    return jax.lax.cond(is_planned, take_step, skip_step)


def _zeros_like(like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return zeros with the shape, dtype and varying axes of `like`."""
    return vary(jnp.zeros(like.shape, like.dtype), varying_axes(like))


def _cast(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the array with the dtype and varying axes of `like`."""
    kept = array if is_key(array) else jnp.asarray(array, like.dtype)
    return vary(kept, varying_axes(like))


def _check_masked(updates: optax.Updates) -> None:
    """Raise unless every leaf is a clipped sum that was computed with a mask."""
    for leaf in jax.tree.leaves(updates, is_leaf=is_marked):
        if not (is_marked(leaf) and leaf.masked):
            got = "a sum without one" if is_marked(leaf) else "arrays"
            raise ValueError(
                "`updates` must be sums over batches with their mask, because samplers pad "
                f"batches, got {got}; compute them with the plan's `clipped_grad(loss)(params, "
                "batch, mask)`, and give a plan or `fit` an ordinary optimizer, not a private one."
            )
