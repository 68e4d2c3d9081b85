"""Guards of a plan: the gradient requires a mask, and the optimizer takes only planned steps."""

from collections.abc import Callable
from functools import partial

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
from optax_lsdp.watching import find_watch_state

ValueAndGrad = Callable[..., tuple[PerExample, optax.Updates]]
Mask = jax.Array | np.ndarray
_Updated = tuple[optax.Updates, optax.OptState]


def require_mask(value_and_grad: ValueAndGrad, sampling: Sampling, room: int) -> ValueAndGrad:
    """Return `value_and_grad`, but refuse batches that the plan's sampler cannot draw.

    `room` is the largest number of examples in a batch. Poisson batches and batches longer than
    `room` are padded, so they need a mask. The mask may have at most `room` examples.
    """

    def guarded(
        params: optax.Params, batch: PyTree, mask: Mask | None = None, **options: object
    ) -> tuple[PerExample, optax.Updates]:
        if mask is None:
            size = max((len(x) for x in jax.tree.leaves(batch) if jnp.shape(x)), default=0)
            if SCHEMES[sampling].random_size or size > room:
                raise ValueError(
                    f"`mask` must be given with {sampling!r} batches that are padded, got none; "
                    "pass the mask of `sampler.batch(step)`: padding must not count as examples."
                )
            mask = jnp.ones(size, bool)
        private, total = value_and_grad(params, batch, mask, **options)
        return private, total if len(mask) <= room else _within_room(total, mask, room)

    return guarded


def _within_room(total: optax.Updates, mask: Mask, room: int) -> optax.Updates:
    """Return `total`. If the mask has more than `room` examples, raise, or in `jit` return NaN."""
    count = jnp.sum(mask)
    if not isinstance(count, jax.core.Tracer) and count > room:
        raise ValueError(
            f"`mask` must have at most {room} examples, the plan's room for a batch, got {count}; "
            "take batches and masks from `plan.sampler(key)`."
        )
    return jax.tree.map(lambda x: jnp.where(count <= room, x, jnp.nan), total)


def limit_steps(
    optimizer: optax.GradientTransformationExtraArgs, steps: int, sampling: Sampling
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that takes at most `steps` steps, and refuses sums without a mask.

    It also refuses a part made by `watch` if `sampling` makes batches that depend on each other.
    """

    def init(params: optax.Params) -> optax.OptState:
        state = optimizer.init(params)
        if SCHEMES[sampling].once_per_epoch and find_watch_state(state) is not None:
            raise ValueError(
                f"`optimizer` must not be watched with sampling={sampling!r}, got a part made by "
                "`watch`: the batches of an epoch depend on each other; leave `watch` out."
            )
        return state

    def update(
        updates: optax.Updates, state: optax.OptState, params: PyTree = None, **options: object
    ) -> _Updated:
        _check_masked(updates)
        taken = steps_taken(state)
        is_planned = taken < steps
        is_traced = isinstance(is_planned, jax.core.Tracer)
        if not (is_traced or is_planned):
            raise ValueError(
                f"`state` must have taken fewer than {steps} steps, the number of planned steps, "
                f"got {taken} steps; make a plan for more steps and start again."
            )
        take_step = partial(optimizer.update, updates, state, params, **options)
        return _if_planned(is_planned, take_step, state) if is_traced else take_step()

    return optax.GradientTransformationExtraArgs(init, update)


def _if_planned(
    is_planned: jax.Array, take_step: Callable[[], _Updated], state: optax.OptState
) -> _Updated:
    """Return `take_step()` for a planned step, otherwise zero updates and `state`.

    The state must not change, because some optimizers keep an average of the parameters in it.
    """
    if jax.sharding.get_abstract_mesh().explicit_axes:  # `cond` would need explicit shardings
        moves, after = take_step()
        skipped = jax.tree.map(jnp.zeros_like, moves), state
        return jax.tree.map(partial(jnp.where, is_planned), (moves, after), skipped)
    like_moves, like_state = jax.eval_shape(take_step)
    zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), like_moves)

    def skip_step() -> _Updated:
        return jax.tree.map(_cast, zeros, like_moves), jax.tree.map(_cast, state, like_state)

    # `cond`, not `where`: with `where`, XLA would draw the noise again for each array.
    return jax.lax.cond(is_planned, take_step, skip_step)


def _cast(array: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the array with the dtype and varying axes of `like`."""
    kept = array if is_key(array) else jnp.asarray(array, like.dtype)
    return vary(kept, varying_axes(like))


def _check_masked(updates: optax.Updates) -> None:
    for leaf in jax.tree.leaves(updates, is_leaf=is_marked):
        if not (is_marked(leaf) and leaf.masked):
            got = "a sum without a mask" if is_marked(leaf) else "arrays"
            raise ValueError(
                f"`updates` must be clipped sums that were computed with a mask, got {got}; "
                "compute them with the plan's `clipped_grad(loss)(params, batch, mask)`, and give "
                "`PrivacyPlan.optimizer` or `fit` an ordinary optimizer, not a private one."
            )
