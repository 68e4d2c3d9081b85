"""What a model of the zoo is, and how modules and random inputs become one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

VOCABULARY = 8_000


class Model(NamedTuple):
    """A model as users write it.

    Attributes:
        loss: (params, example) → scalar, for one example without batch axis.
        params: its parameters.
        batch: (inputs, labels), with a leading axis of examples.
    """

    loss: Callable[[Any, Any], jax.Array]
    params: Any
    batch: Any


def classifier(module: nn.Module, inputs: Any) -> Model:
    """Return a module that classifies, with cross entropy as its loss and ten labels."""

    def loss(params: Any, example: Any) -> jax.Array:
        x, label = example
        return optax.softmax_cross_entropy_with_integer_labels(module.apply(params, x), label)

    size = len(jax.tree.leaves(inputs)[0])
    first = jax.tree.map(lambda x: x[0], inputs)
    labels = jnp.arange(size, dtype=jnp.int32) % 10
    return Model(loss, module.init(jax.random.key(0), first), (inputs, labels))


def language_model(module: nn.Module, tokens: jax.Array) -> Model:
    """Return a module that predicts the next token, with the mean cross entropy as its loss."""

    def loss(params: Any, example: Any) -> jax.Array:
        x, following = example
        logits = module.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    inputs, following = tokens[:, :-1], tokens[:, 1:]
    return Model(loss, module.init(jax.random.key(0), inputs[0]), (inputs, following))


def normal(*shape: int) -> jax.Array:
    """Return normal numbers."""
    return jax.random.normal(jax.random.key(1), shape)


def images(size: int, side: int, channels: int) -> jax.Array:
    """Return images of normal numbers."""
    return normal(size, side, side, channels)


def tokens(size: int, length: int, vocabulary: int = VOCABULARY) -> jax.Array:
    """Return random texts."""
    return jax.random.randint(jax.random.key(1), (size, length), 0, vocabulary)
