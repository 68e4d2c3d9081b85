"""The zoo: small models of every kind, each a loss for one example, its parameters and a batch.

`_styles` has those in the styles of other libraries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks._models import VOCABULARY, Model, classifier, images, language_model, normal, tokens
from benchmarks._styles import STYLES


class Dense(nn.Module):
    """Dense layers of the given widths, with an activation between them."""

    widths: tuple[int, ...]
    activation: Callable[[jax.Array], jax.Array] = nn.relu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one example."""
        x = x.reshape(-1)
        for width in self.widths[:-1]:
            x = self.activation(nn.Dense(width)(x))
        return nn.Dense(self.widths[-1])(x)


def max_pool_by_slices(x: jax.Array, size: int, stride: int) -> jax.Array:
    """Return the maximum over windows, in a form whose gradient is fast on XLA's CPU backend."""
    height, width = ((side - size) // stride + 1 for side in x.shape[:2])
    windows = [
        x[i : i + stride * height : stride, j : j + stride * width : stride][:height, :width]
        for i in range(size)
        for j in range(size)
    ]
    return jax.tree.reduce(jnp.maximum, windows)


def max_pool(x: jax.Array, size: int, stride: int) -> jax.Array:
    """Return the maximum over windows, by `reduce_window`."""
    return nn.max_pool(x, (size, size), strides=(stride, stride))


def conv_by_blocks(
    x: jax.Array, kernel: jax.Array, strides: Any, padding: str, **options: Any
) -> jax.Array:
    """Return a stride-2 convolution as a stride-1 one, which is fast on CPUs with few channels.

    The four pixels of each block of 2 × 2 are its channels.
    """
    pads = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    n, h, w, c = x.shape
    x = x.reshape(n, h // 2, 2, w // 2, 2, c).transpose(0, 1, 3, 2, 4, 5)
    a, b, _, o = kernel.shape
    kernel = kernel.reshape(a // 2, 2, b // 2, 2, c, o).transpose(0, 2, 1, 3, 4, 5)
    blocks = x.reshape(n, h // 2, w // 2, 4 * c), kernel.reshape(a // 2, b // 2, 4 * c, o)
    return jax.lax.conv_general_dilated(*blocks, (1, 1), "VALID", **options)


class MnistCNN(nn.Module):
    """The paper's network for MNIST."""

    pool: Callable[[jax.Array, int, int], jax.Array] = max_pool
    first: Callable[..., jax.Array] = jax.lax.conv_general_dilated
    activation: Callable[[jax.Array], jax.Array] = nn.relu

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        first = nn.Conv(16, (8, 8), strides=2, padding="SAME", conv_general_dilated=self.first)
        x = self.activation(first(x))
        x = self.pool(x, 2, 1)
        x = self.activation(nn.Conv(32, (4, 4), strides=2, padding="VALID")(x))
        x = self.pool(x, 2, 1)
        return Dense((32, 10), self.activation)(x)


def half_by_max_pool(x: jax.Array) -> jax.Array:
    """Return the maximum over 3 × 3 windows with stride 2, by `reduce_window`."""
    return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


def half_by_slices(x: jax.Array) -> jax.Array:
    """Return the same for non-negative input with even sides, in a form that is fast on CPUs."""
    return max_pool_by_slices(jnp.pad(x, ((0, 1), (0, 1), (0, 0))), 3, 2)


class CifarCNN(nn.Module):
    """The network of TensorFlow's CIFAR-10 tutorial, on crops of 24 × 24 pixels."""

    half: Callable[[jax.Array], jax.Array] = half_by_max_pool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        for _ in range(2):
            x = nn.relu(nn.Conv(64, (5, 5))(x))
            x = self.half(x)
        return Dense((384, 192, 10))(x)


class ResNet(nn.Module):
    """A residual network with group normalisation."""

    widths: tuple[int, ...] = (32, 64, 128)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        conv = partial(nn.Conv, kernel_size=(3, 3), use_bias=False)
        x = conv(self.widths[0])(x)
        for i, width in enumerate(self.widths):
            stride = 1 if i == 0 else 2
            y = nn.relu(nn.GroupNorm(8)(x))
            skip = x if stride == 1 else nn.Conv(width, (1, 1), strides=stride)(y)
            y = conv(width, strides=stride)(y)
            y = conv(width)(nn.relu(nn.GroupNorm(8)(y)))
            x = skip + y
        return nn.Dense(10)(nn.relu(nn.GroupNorm(8)(x)).mean(axis=(0, 1)))


class SeparableCNN(nn.Module):
    """Depthwise convolutions, each followed by a pointwise one."""

    widths: tuple[int, ...] = (64, 128, 128, 256)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        for i, width in enumerate(self.widths):
            features, stride = x.shape[-1], 1 + i % 2
            x = nn.Conv(features, (3, 3), strides=stride, feature_group_count=features)(x)
            x = nn.relu(nn.GroupNorm(8)(x))
            x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (1, 1))(x)))
        return nn.Dense(10)(x.mean(axis=(0, 1)))


class Block(nn.Module):
    """One layer of a transformer."""

    width: int = 256
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one vector per input vector."""
        mask = nn.make_causal_mask(x[:, 0]) if self.causal else None
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(4)(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(y)


class Encoder(nn.Module):
    """A transformer that classifies a text."""

    layers: int = 4

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of one text."""
        x = nn.Embed(VOCABULARY, 256)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (len(tokens), 256))
        for _ in range(self.layers):
            x = Block()(x)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(axis=0))


class Decoder(nn.Module):
    """A transformer that predicts the next token, with tied embeddings."""

    layers: int = 4
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of every next token."""
        table = nn.Embed(VOCABULARY, 256)
        x = table(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (len(tokens), 256))
        if self.scanned:
            stack = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = stack(Block(causal=True), x, None)
        else:
            for _ in range(self.layers):
                x = Block(causal=True)(x)
        return table.attend(nn.LayerNorm()(x))


class LSTM(nn.Module):
    """A recurrent network that classifies a sequence by its last state."""

    hidden: int = 256

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one sequence."""
        states = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)
        return nn.Dense(10)(states[-1])


WIDTHS = [256, 1024, 2048]


def mlp(widths: tuple[int, ...], size: int) -> Model:
    """Return a classifier of MNIST-shaped images with dense layers of these widths."""
    return classifier(Dense(widths), images(size, 28, 1))


ZOO: dict[str, Callable[[int | None], Model]] = {
    "softmax regression": lambda n: mlp((10,), n or 128),
    "MLP": lambda n: mlp((1024, 1024, 10), n or 256),
    "MNIST CNN": lambda n: classifier(MnistCNN(), images(n or 256, 28, 1)),
    "MNIST CNN, slices": lambda n: classifier(
        MnistCNN(pool=max_pool_by_slices), images(n or 256, 28, 1)
    ),
    "CIFAR-10 CNN": lambda n: classifier(CifarCNN(), images(n or 64, 24, 3)),
    "ResNet": lambda n: classifier(ResNet(), images(n or 32, 32, 3)),
    "separable CNN": lambda n: classifier(SeparableCNN(), images(n or 32, 32, 3)),
    "encoder": lambda n: classifier(Encoder(), tokens(n or 32, 64)),
    "decoder": lambda n: language_model(Decoder(), tokens(n or 16, 129)),
    "decoder, scanned": lambda n: language_model(Decoder(scanned=True), tokens(n or 16, 129)),
    "LSTM": lambda n: classifier(LSTM(), normal(n or 32, 64, 256)),
    **STYLES,
}
