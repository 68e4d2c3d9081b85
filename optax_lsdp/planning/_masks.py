"""Masks: padded batches go in with theirs, or one sentence comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._marked import is_marked


def with_mask(grad: Callable[..., Any], sampling: str, room: int) -> Callable[..., Any]:
    """Refuse batches that hold padding, for all that is known, and come without a mask."""

    def checked(params: Any, batch: Any, mask: Any = None, **options: Any) -> Any:
        if mask is None:
            size = max((len(x) for x in jax.tree.leaves(batch) if jnp.shape(x)), default=0)
            if sampling == "poisson" or size > room:
                raise ValueError(
                    f"`mask` must be given with {sampling!r} batches, which are padded, got none; "
                    "pass that of `sampler.batch(step)`, or padding counts as examples."
                )
            mask = jnp.ones(size, bool)  # there is no padding in so few
        return grad(params, batch, mask, **options)

    return checked


def masked_only(
    optimizer: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that takes nothing but sums over batches with a mask."""

    def update(updates: Any, state: Any, params: Any = None, **options: Any) -> Any:
        for leaf in jax.tree.leaves(updates, is_leaf=is_marked):
            if not (is_marked(leaf) and leaf.masked):
                what = "a sum without one" if is_marked(leaf) else "arrays"
                raise ValueError(
                    "`updates` must be sums over batches with their mask, since a sampler may pad "
                    f"them, got {what}; use the plan's `clipped_grad(loss)(params, batch, "
                    "mask)`, and give a plan or `fit` an ordinary optimizer."
                )
        return optimizer.update(updates, state, params, **options)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)
