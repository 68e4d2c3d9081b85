"""Guards: batches with their masks and planned steps go in, or one sentence comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._clipped import is_marked
from optax_lsdp._keys import is_key
from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp.optimizers import steps_taken


def with_mask(
    value_and_grad: Callable[..., Any], sampling: str, room: int
) -> Callable[..., tuple[Any, Any]]:
    """Refuse batches that hold padding, for all that is known, and come without a mask."""

    def checked(params: Any, batch: Any, mask: Any = None, **options: Any) -> tuple[Any, Any]:
        if mask is None:
            size = max((len(x) for x in jax.tree.leaves(batch) if jnp.shape(x)), default=0)
            if sampling == "poisson" or size > room:
                raise ValueError(
                    f"`mask` must be given with {sampling!r} batches, which are padded, got none; "
                    "pass that of `sampler.batch(step)`, or padding counts as examples."
                )
            mask = jnp.ones(size, bool)  # there is no padding in so few
        private, total = value_and_grad(params, batch, mask, **options)
        return private, total if len(mask) <= room else _within_room(total, mask, room)

    return checked


def _within_room(total: Any, mask: Any, room: int) -> Any:
    """Refuse batches of more examples than the plan's sampler has room for: they are not its own.

    Inside of jit nothing can be raised, and the sum becomes NaN.
    """
    count = jnp.sum(mask)
    if not isinstance(count, jax.core.Tracer) and count > room:
        raise ValueError(
            f"`mask` must count {room} examples at most, for which the plan has room, got {count}; "
            "take batches and masks from `plan.sampler(key)`."
        )
    return jax.tree.map(lambda x: jnp.where(count <= room, x, jnp.nan), total)


def guarded(
    optimizer: optax.GradientTransformationExtraArgs, steps: int
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that takes sums over batches with a mask, and that many steps."""

    def update(updates: Any, state: Any, params: Any = None, **options: Any) -> Any:
        _check_masks(updates)
        taken = steps_taken(state)
        is_planned = taken < steps
        is_traced = isinstance(is_planned, jax.core.Tracer)
        if not (is_traced or is_planned):
            raise ValueError(
                f"`state` must be of less than {steps} steps, which is all that was planned, got "
                f"one of {taken}; plan for more steps, and begin anew."
            )

        def take() -> Any:
            return optimizer.update(updates, state, params, **options)

        return _if_planned(is_planned, take, state) if is_traced else take()

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _if_planned(is_planned: jax.Array, take: Callable[[], Any], state: Any) -> Any:
    """Return what a step makes of the state, or no moves and the state as it was.

    Nothing can be raised inside of jit. Steps beyond the plan move neither the parameters nor the
    state, from which some optimizers read an average of the parameters.
    """
    if jax.sharding.get_abstract_mesh().explicit_axes:  # branches would have to state shardings
        moves, after = take()
        still = jax.tree.map(lambda x: jnp.where(is_planned, x, jnp.zeros_like(x)), moves)
        kept = jax.tree.map(lambda new, old: jnp.where(is_planned, new, old), after, state)
        return still, kept
    like_moves, like_state = jax.eval_shape(take)

    def keep() -> Any:
        return jax.tree.map(_zeros_like, like_moves), jax.tree.map(_like, state, like_state)

    # One of two branches: selecting each entry would draw the noise once for each array.
    return jax.lax.cond(is_planned, take, keep)


def _zeros_like(like: Any) -> jax.Array:
    return vary(jnp.zeros(like.shape, like.dtype), varying_axes(like))


def _like(old: jax.Array, like: Any) -> jax.Array:
    kept = old if is_key(old) else jnp.asarray(old, like.dtype)
    return vary(kept, varying_axes(like))


def _check_masks(updates: Any) -> None:
    for leaf in jax.tree.leaves(updates, is_leaf=is_marked):
        if not (is_marked(leaf) and leaf.masked):
            what = "a sum without one" if is_marked(leaf) else "arrays"
            raise ValueError(
                "`updates` must be sums over batches with their mask, since a sampler may pad "
                f"them, got {what}; use the plan's `clipped_grad(loss)(params, batch, "
                "mask)`, and give a plan or `fit` an ordinary optimizer."
            )
