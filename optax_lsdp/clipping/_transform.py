"""Provide `clip_per_example`, the first transform of every private `optax.chain`.

The transform either clips and sums stacked per-example gradients, or checks and unwraps the marked
sum that `clipped_grad` returns. It refuses all other updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._clipped import divide_by_clip_norm, is_marked, unmark
from optax_lsdp._mesh import axis_names, axis_size, manual_axes, varying_axes
from optax_lsdp._trees import (
    check_floating,
    check_mask,
    check_not_empty,
    check_not_per_example,
    check_shapes,
    check_structure,
    zip_leaves,
)
from optax_lsdp._types import ClipNorm
from optax_lsdp.clipping._clip_norm import (
    checked_clip_norm,
    clip_and_sum,
)
from optax_lsdp.clipping._slack import append_slack, count_slack


class ClipPerExampleState(NamedTuple):
    """The state of `clip_per_example`: how many steps were taken, for schedules of clip norms."""

    step: jax.Array


def clip_per_example(
    clip_norm: ClipNorm, *, slack: int | None = None, replicated_axes: str | Sequence[str] = ()
) -> optax.GradientTransformationExtraArgs:
    """Clip each example's gradient gᵢ to ‖gᵢ‖₂ ≤ C, and add up: s = Σᵢ gᵢ · min(1, C/‖gᵢ‖₂).

    `update` accepts stacked gradients or the result of `clipped_grad`. Stacked gradients have a
    leading axis of examples in every leaf, as `jax.vmap` of `jax.grad` returns them; with them,
    `update` needs `params`. The result of `clipped_grad` is already clipped, and each of its leaves
    is marked as a `Clipped`; `update` checks and removes this mark. `update` returns a *sum* in
    float32 or wider, and never divides it by the number of examples. Gradients that are not finite
    contribute zero. Put this transform first in a chain.

    A padded batch needs a mask: a bool array of shape (n,), False for padding. Without a mask,
    padding counts as examples. Pass the mask to `clipped_grad`. With stacked gradients, pass it to
    `update` of this transform or of its chain: `update(stacked, state, params, mask=mask)`.

    Args:
        clip_norm: C: a number; a schedule, that is, a function of the step; an `AdaptiveClip`; or a
            prefix of the parameters' tree, with one number or one `AdaptiveClip` per group. A
            traced number raises an error, so pass `static_args=("clip_norm", "slack")` to
            `optax.inject_hyperparams`. With an `AdaptiveClip`, `update` returns the sum in units of
            the clip norm, and with stacked gradients it needs the argument
            `clip_norm=current_clip_norm(state)`.
        slack: K, the number of slack coordinates, from which `estimate_norms` estimates the
            distribution of norms at no cost in ε; see `clipped_grad`, which needs the same number.
            `update` then returns a `WithSlack`, which holds the sum and its slack. Sum and slack
            together have the same sensitivity as the sum alone.
        replicated_axes: for stacked gradients inside `shard_map` or `pmap`, the mesh axes over
            which all parameters are replicated. The library cannot check that they are.

    Raises:
        ValueError: if the updates are neither stacked nor marked; if they were clipped with a
            different clip norm; if a mask comes with a marked sum; or if shards of a `shard_map`
            may hold parts of stacked gradients: each shard would then clip by the norm of its own
            part only.

    >>> import numpy as np
    >>> params = {"w": jnp.zeros(2)}
    >>> stacked = {"w": jnp.array([[3.0, 4.0], [0.0, 0.5]])}  # norms 5 and 1/2
    >>> tx = clip_per_example(1.0)
    >>> total, _ = jax.jit(tx.update)(stacked, tx.init(params), params)
    >>> print(np.asarray(total["w"]).round(3))
    [0.6 1.3]
    """
    norm = checked_clip_norm(clip_norm, slack)
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
        clip_norm: ClipNorm = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, ClipPerExampleState]:
        if any(map(is_marked, jax.tree.leaves(updates, is_leaf=is_marked))):
            total, counts = unmark(updates, norm.groups(updates), norm.slack)
            now = norm.at(state.step) if norm.is_schedule else norm.value
            if extra_args:
                check_not_per_example(extra_args, None)
            if mask is not None:
                raise ValueError(
                    "`mask` must be passed to `clipped_grad`, got a mask together with a clipped "
                    "sum, which a mask can no longer change; call "
                    "`clipped_grad(loss_fn, ...)(params, batch, mask)`."
                )
            if params is not None:
                check_shapes(total, params, "pass the result of `clipped_grad` unchanged")
            if norm.is_schedule:  # the marked sum is in units of the clip norm
                total = jax.tree.map(lambda x: x * jnp.asarray(now, x.dtype), total)
        else:
            size = _check_stacked(updates, params)
            check_mask(mask, size)
            check_not_per_example(extra_args, size)
            _check_replicated(params, updates, named_axes)
            now = norm.at(state.step, clip_norm)
            groups = norm.groups(updates, now)
            norms, total = clip_and_sum(updates, groups, mask=mask)
            counts = count_slack(norms, groups, norm) if norm.slack else {}
            if norm.adaptive:
                total = divide_by_clip_norm(total, groups)
        if counts:
            total = append_slack(total, counts, norm, now)
        return total, ClipPerExampleState(optax.safe_increment(state.step))

    return optax.GradientTransformationExtraArgs(init, update)


def _check_replicated(
    params: optax.Params | None, updates: optax.Updates, replicated: tuple[str, ...]
) -> None:
    """Raise if shards may hold parts of a gradient, so that each norm would cover one part only."""
    axes = {axis for axis in manual_axes() if axis_size((axis,)) > 1}
    unnamed = (axes | varying_axes((params, updates))) - set(replicated)
    if unnamed:
        raise ValueError(
            "`replicated_axes` must name the mesh axes over which stacked gradients may vary, got "
            f"axes without {', '.join(sorted(unnamed))}; name an axis if all parameters are "
            "replicated over it; if the axis splits the parameters, use `clipped_grad`, which "
            "computes the norm of all parts together."
        )


def _check_stacked(updates: optax.Updates, params: optax.Params | None) -> int:
    """Return the number of stacked gradients. Raise unless it is the same in all leaves."""
    check_not_empty("updates", updates)
    check_floating("updates", updates)
    if params is None:
        raise ValueError(
            "`params` must be passed to `update` with stacked gradients, got None; call "
            "`update(stacked, state, params)`, so that it can compare the shapes."
        )
    check_structure(updates, params)
    size = jnp.shape(jax.tree.leaves(updates)[0])[:1]
    for name, leaf, param in zip_leaves(updates, params):
        got, shape = jnp.shape(leaf), jnp.shape(param)
        if got == shape:
            raise ValueError(
                "`updates` must be per-example gradients or a marked sum, got a plain gradient "
                f"of shape {got} at {name!r}; pass the result of `clipped_grad` directly, without "
                "a wrapper such as optax.MultiSteps, or, if you passed a private optimizer to a "
                "plan or `fit`, pass an ordinary optimizer there."
            )
        if got != size + shape:
            raise ValueError(
                f"`updates` must stack one gradient per example, got shape {got} at {name!r} "
                f"instead of {(*(size or ('n',)), *shape)}."
            )
    return size[0]
