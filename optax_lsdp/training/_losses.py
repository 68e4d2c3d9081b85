"""Losses: the loss of one example goes in, one in half precision or over its views comes out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optax_lsdp._checks import check_whole
from optax_lsdp._loss import LossFn, call_loss, takes_key


def mixed_precision(loss_fn: LossFn, dtype: Any = jnp.bfloat16) -> LossFn:
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
        return call_loss(loss_fn, cast(params), cast(example), *key).astype(jnp.float32)

    return _like(loss, takes_key(loss_fn))


def keep_batch_axis(loss_fn: LossFn) -> LossFn:
    """Return the loss of an example that comes with a leading axis of length 1, for `fit`.

    >>> loss = keep_batch_axis(lambda w, x: jnp.sum(x @ w))
    >>> print(loss(jnp.ones(3), jnp.ones(3)))
    3.0
    """

    def loss(params: Any, example: Any, *key: jax.Array) -> jax.Array:
        return call_loss(loss_fn, params, jax.tree.map(lambda x: x[None], example), *key)

    return _like(loss, takes_key(loss_fn))


def average_views(loss_fn: LossFn, augment: Callable[[jax.Array, Any], Any], views: int) -> LossFn:
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
            return jax.vmap(partial(call_loss, loss_fn), (None, 0, 0))(params, seen, others).mean()
        return jax.vmap(loss_fn, (None, 0))(params, seen).mean()

    return loss


def _like(loss: LossFn, keyed: bool) -> LossFn:
    if keyed:
        return lambda params, example, key: loss(params, example, key)
    return lambda params, example: loss(params, example)
