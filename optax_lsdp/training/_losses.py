"""Losses: the loss of one example goes in, one in half precision or over its views comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_lsdp._checks import check_whole

Loss = Callable[..., jax.Array]


def mixed_precision(loss_fn: Loss, dtype: Any = jnp.bfloat16) -> Loss:
    """Return the loss computed with parameters and examples in half precision.

    Parameters stay what they are, float32: so do norms, sums, noise and updates.

    >>> loss = mixed_precision(lambda w, x: jnp.vdot(w, x))
    >>> jax.grad(loss)(jnp.ones(2), jnp.ones(2)).dtype
    dtype('float32')
    """

    def cast(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def loss(params: Any, example: Any, *key: jax.Array) -> jax.Array:
        return loss_fn(cast(params), cast(example), *key).astype(jnp.float32)

    return _like(loss, takes_key(loss_fn))


def average_views(loss_fn: Loss, augment: Callable[[jax.Array, Any], Any], views: int) -> Loss:
    """Return the mean loss over random views of one example: augmentation multiplicity.

    All views of an example are averaged before its gradient is clipped, so that they count as one.

    Args:
        loss_fn: `loss_fn(params, example)`, or with a key for each view as a third argument.
        augment: `augment(key, example)`, a view of it.
        views: how many there are.

    >>> def loss_fn(params, x):
    ...     return (params - x) ** 2
    >>> loss = average_views(loss_fn, lambda key, x: x + jax.random.normal(key), 10_000)
    >>> print(round(float(loss(0.0, 0.0, jax.random.key(0))), 1))  # the variance of the views
    1.0
    """
    check_whole("views", views)
    keyed = takes_key(loss_fn)

    def loss(params: Any, example: Any, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, views)
        seen = jax.vmap(augment, (0, None))(keys, example)
        if keyed:
            others = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            return jax.vmap(loss_fn, (None, 0, 0))(params, seen, others).mean()
        return jax.vmap(loss_fn, (None, 0))(params, seen).mean()

    return loss


def takes_key(loss_fn: Loss) -> bool:
    """Tell a loss with a third argument, the key of its example, from one without."""
    parameters = inspect.signature(loss_fn).parameters.values()
    needed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len([p for p in needed if p.default is p.empty]) >= 3


def _like(loss: Loss, keyed: bool) -> Loss:
    if keyed:
        return lambda params, example, key: loss(params, example, key)
    return lambda params, example: loss(params, example)
