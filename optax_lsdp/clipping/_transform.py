"""clip_per_example: per-example gradients or a marked sum go in, a plain clipped sum comes out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._clipped import is_marked, unmark
from optax_lsdp._mesh import axis_names, check_replicated_axes, varying_axes
from optax_lsdp._trees import (
    check_floating,
    check_mask,
    check_not_empty,
    check_not_per_example,
    zip_leaves,
)
from optax_lsdp.clipping._factors import (
    ClipNorm,
    clip_and_sum,
    clip_groups,
    frozen_clip_norm,
    is_schedule,
)


class ClipPerExampleState(NamedTuple):
    """How many steps were clipped, which is where a schedule of clip norms stands."""

    step: jax.Array


def clip_per_example(
    clip_norm: ClipNorm, *, replicated_axes: str | Sequence[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Clip each example's gradient to ‖g‖₂ ≤ C and sum: s = Σᵢ gᵢ · min(1, C/‖gᵢ‖).

    It takes stacked gradients (leaves with a leading axis of examples, from `jax.vmap` of
    `jax.grad`; `update` then needs `params`), or the marked sum of `clipped_grad`, which it checks
    and unwraps. The result is a *sum*, float32 at least, never divided by the number of
    examples; a gradient that is not finite contributes zero. It must be the first link of a chain.

    A padded batch has a mask, (n,), bool, False for padding. `clipped_grad` takes it; for stacked
    gradients it is an argument of `update`, of this link and of every chain that begins with it:
    `update(stacked, state, params, mask=mask)`. Without it, padding counts as examples.

    Args:
        clip_norm: C, static. A number; or a prefix of the parameters' tree, one number per
            group (`sensitivity` then gives √ΣC²); or a schedule, a function of the step.
            With `optax.inject_hyperparams`, pass `static_args=("clip_norm", "key")`.
        replicated_axes: for stacked gradients inside `shard_map` or `pmap`: the mesh axes over
            which parameters are replicated and examples are split. It is your word for it.

    Raises:
        ValueError: if updates are neither stacked nor marked, or were clipped otherwise; if a mask
            comes with a marked sum; or if parameters are split inside `shard_map`, where the norm
            of a stacked gradient is only that of a part.

    >>> import numpy as np
    >>> params = {"w": jnp.zeros(2)}
    >>> stacked = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}  # norms 5 and 1/2
    >>> tx = clip_per_example(1.0)
    >>> total, _ = tx.update(stacked, tx.init(params), params)
    >>> print(np.asarray(total["w"]).round(3))
    [0.6 1.3]
    """
    clip_norm = frozen_clip_norm(clip_norm)
    named_axes = axis_names(replicated_axes)

    def init(params: optax.Params) -> ClipPerExampleState:
        del params
        return ClipPerExampleState(step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: ClipPerExampleState,
        params: optax.Params | None = None,
        *,
        mask: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipPerExampleState]:
        now = clip_norm(state.step) if is_schedule(clip_norm) else clip_norm
        if any(map(is_marked, jax.tree.leaves(updates, is_leaf=is_marked))):
            total = unmark(updates, clip_groups(clip_norm, updates))
            check_not_per_example(extra_args, None)
            if mask is not None:
                raise ValueError(
                    "`mask` must be given to `clipped_grad`, got one beside its sum, which it can "
                    "no longer change; call `clipped_grad(loss_fn, ...)(params, batch, mask)`."
                )
            if params is not None:
                _check_shapes(total, params)
            if is_schedule(clip_norm):  # the marked sum is in units of the clip norm
                total = jax.tree.map(lambda x: x * jnp.asarray(now, x.dtype), total)
        else:
            height = _check_stacked(updates, params)
            check_mask(mask, height)
            check_not_per_example(extra_args, height)
            check_replicated_axes(named_axes, params, updates)
            _check_whole(params, updates, named_axes)
            _, total = clip_and_sum(updates, clip_groups(now, updates), mask=mask)
        return total, ClipPerExampleState(optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def _check_structure(updates: optax.Updates, params: optax.Params) -> None:
    """Raise unless both are trees of one structure."""
    got: Any = jax.tree.structure(updates)
    if got != jax.tree.structure(params):
        raise ValueError(
            "`updates` must have the structure of `params`, got "
            f"{got} for {jax.tree.structure(params)}."
        )


def _check_shapes(total: optax.Updates, params: optax.Params) -> None:
    """Raise unless every leaf of a sum has its parameter's shape."""
    _check_structure(total, params)
    for name, leaf, param in zip_leaves(total, params):
        if leaf.shape != jnp.shape(param):
            raise ValueError(
                f"`updates` must have the shapes of `params`, got {leaf.shape} for "
                f"{jnp.shape(param)} at {name!r}; `clipped_grad` sums over the examples."
            )


def _check_whole(params: Any, updates: Any, replicated: tuple[str, ...]) -> None:
    """Raise if gradients may be split over shards: a norm would be that of a part."""
    split = varying_axes((params, updates)) - set(replicated)
    if split:
        raise ValueError(
            "`replicated_axes` must name the mesh axes over which stacked gradients vary, got none "
            f"for {', '.join(sorted(split))}; where parameters are split, use `clipped_grad`, "
            "which takes the norm of all parts together."
        )


def _check_stacked(updates: optax.Updates, params: optax.Params | None) -> int:
    """Return how many gradients are stacked, or raise unless all leaves agree on that."""
    check_not_empty("updates", updates)
    check_floating("updates", updates)
    if params is None:
        raise ValueError(
            "`params` must be passed to `update` with stacked gradients, got None; without it "
            "stacked and summed gradients cannot be told apart."
        )
    _check_structure(updates, params)
    height = jnp.shape(jax.tree.leaves(updates)[0])[:1]
    for name, leaf, param in zip_leaves(updates, params):
        got, shape = jnp.shape(leaf), jnp.shape(param)
        if got == shape:
            raise ValueError(
                "`updates` must be per-example gradients or a marked sum, got a plain gradient "
                f"of shape {got} at {name!r}; make it with `clipped_grad`, do not wrap the "
                "optimizer in optax.MultiSteps or the like, which strips the mark, and give a plan "
                "or `fit` an ordinary optimizer."
            )
        if got != height + shape:
            raise ValueError(
                f"`updates` must stack one gradient per example, got shape {got} at {name!r}; "
                f"expected {(*(height or ('n',)), *shape)}."
            )
    return height[0]
