"""Larger models, of the size that people train, as shapes without arrays.

Transformers have four layers: more layers take a compiler longer, and each costs the same. Every
model exists in float32 and in bfloat16, which is the dtype of the computation. Parameters are
float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jax.typing import DTypeLike

from benchmarks._models import Model

LAYERS, WIDTH, HEADS = 4, 768, 12
BERT_VOCABULARY, GPT_VOCABULARY, LSTM_VOCABULARY = 30_522, 50_257, 10_000


class LargerModel(NamedTuple):
    """A model whose arrays are `jax.ShapeDtypeStruct`s.

    Attributes:
        loss: (params, frozen, example) → scalar, for one example without batch axis.
        params: the parameters that are trained.
        frozen: the parameters that are not trained.
        batch: (inputs, labels), with a leading axis of examples.
    """

    loss: Callable[[Any, Any, Any], jax.Array]
    params: Any
    frozen: Any
    batch: Any

    def with_frozen(self, frozen: Any) -> Model:
        """Return the model with arrays as its frozen parameters."""
        return Model(lambda params, x: self.loss(params, frozen, x), self.params, self.batch)


class WideResNet(nn.Module):
    """WRN-16-4 with group normalisation, for images of 32 × 32 pixels."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        conv = partial(nn.Conv, kernel_size=(3, 3), use_bias=False, dtype=self.dtype)
        norm = partial(nn.GroupNorm, 16, dtype=self.dtype)
        x = conv(16)(x)
        for stage, width in enumerate((64, 128, 256)):
            for block in range(2):
                strides = 2 if stage and not block else 1
                y = nn.relu(norm()(x))
                if x.shape[-1] != width:
                    x = conv(width, kernel_size=(1, 1), strides=strides)(y)
                y = conv(width, strides=strides)(y)
                x = x + conv(width)(nn.relu(norm()(y)))
        return nn.Dense(10, dtype=self.dtype)(nn.relu(norm()(x)).mean(axis=(0, 1)))


class LoRADense(nn.Module):
    """A dense layer plus a product of two matrices of low rank."""

    features: int
    rank: int
    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the layer's output for each row."""
        down = nn.Dense(self.rank, use_bias=False, dtype=self.dtype, name="lora_a")
        up = nn.Dense(
            self.features,
            use_bias=False,
            kernel_init=nn.initializers.zeros,
            dtype=self.dtype,
            name="lora_b",
        )
        return nn.Dense(self.features, dtype=self.dtype)(x) + up(down(x)) / self.rank


class Attention(nn.Module):
    """Self-attention with one projection for queries, keys and values, as GPT-2 has it."""

    dtype: DTypeLike
    causal: bool = False
    lora_rank: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one vector per input vector."""
        if self.lora_rank:
            projected = LoRADense(3 * WIDTH, self.lora_rank, self.dtype)(x)
        else:
            projected = nn.Dense(3 * WIDTH, dtype=self.dtype)(x)
        heads = (y.reshape(len(x), HEADS, -1) for y in jnp.split(projected, 3, axis=-1))
        mask = nn.make_causal_mask(x[:, 0]) if self.causal else None
        y = nn.dot_product_attention(*heads, mask=mask, dtype=self.dtype)
        return nn.Dense(WIDTH, dtype=self.dtype)(y.reshape(len(x), WIDTH))


class Block(nn.Module):
    """One layer of a transformer that normalises before attention, as ViT and GPT-2 do."""

    dtype: DTypeLike
    causal: bool = False
    lora_rank: int = 0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one vector per input vector."""
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        x = x + Attention(self.dtype, self.causal, self.lora_rank)(norm()(x))
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(norm()(x)))
        return x + nn.Dense(WIDTH, dtype=self.dtype)(y)


def _positions(module: nn.Module, length: int, dtype: DTypeLike) -> jax.Array:
    """Return learned positions."""
    table = module.param("positions", nn.initializers.normal(0.02), (length, WIDTH))
    return table.astype(dtype)


class ViT(nn.Module):
    """A vision transformer with patches of 16 × 16 pixels and a class token."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        x = nn.Conv(WIDTH, (16, 16), strides=16, padding="VALID", dtype=self.dtype)(image)
        token = self.param("class", nn.initializers.zeros, (1, WIDTH))
        x = jnp.concatenate([token.astype(x.dtype), x.reshape(-1, WIDTH)])
        x = x + _positions(self, len(x), self.dtype)
        for _ in range(LAYERS):
            x = Block(self.dtype)(x)
        return nn.Dense(1_000, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)[0])


class BertLayer(nn.Module):
    """One layer of a transformer that normalises after attention, as BERT does."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return one vector per input vector."""
        norm = partial(nn.LayerNorm, dtype=self.dtype)
        attention = nn.MultiHeadDotProductAttention(HEADS, dtype=self.dtype)
        x = norm()(x + attention(x))
        y = nn.gelu(nn.Dense(4 * WIDTH, dtype=self.dtype)(x))
        return norm()(x + nn.Dense(WIDTH, dtype=self.dtype)(y))


class Bert(nn.Module):
    """An encoder that classifies a text by its first token."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of one text."""
        x = nn.Embed(BERT_VOCABULARY, WIDTH, dtype=self.dtype)(tokens)
        x = nn.LayerNorm(dtype=self.dtype)(x + _positions(self, len(tokens), self.dtype))
        for _ in range(LAYERS):
            x = BertLayer(self.dtype)(x)
        pooled = nn.tanh(nn.Dense(WIDTH, dtype=self.dtype)(x[0]))
        return nn.Dense(2, dtype=self.dtype)(pooled)


class GPT2(nn.Module):
    """A decoder with tied embeddings."""

    dtype: DTypeLike
    lora_rank: int = 0
    layers: int = LAYERS

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of every next token."""
        table = nn.Embed(GPT_VOCABULARY, WIDTH, dtype=self.dtype)
        x = table(tokens) + _positions(self, len(tokens), self.dtype)
        for _ in range(self.layers):
            x = Block(self.dtype, causal=True, lora_rank=self.lora_rank)(x)
        return table.attend(nn.LayerNorm(dtype=self.dtype)(x))


class LSTMLanguageModel(nn.Module):
    """Two LSTM layers that predict the next token."""

    dtype: DTypeLike
    hidden: int = 1_024

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Return the logits of every next token."""
        x = nn.Embed(LSTM_VOCABULARY, self.hidden, dtype=self.dtype)(tokens)
        for _ in range(2):
            x = nn.RNN(nn.OptimizedLSTMCell(self.hidden, dtype=self.dtype))(x)
        return nn.Dense(LSTM_VOCABULARY, dtype=self.dtype)(x)


def _of_module(
    module: nn.Module,
    inputs: jax.ShapeDtypeStruct,
    labels: jax.ShapeDtypeStruct,
    is_trained: Callable[[tuple[str, ...]], bool] = lambda path: True,
) -> LargerModel:
    """Return a module with cross entropy as its loss; the rest of its parameters is frozen."""

    def loss(params: Any, frozen: Any, example: Any) -> jax.Array:
        x, label = example
        leaves = traverse_util.flatten_dict(frozen) | traverse_util.flatten_dict(params)
        logits = module.apply(traverse_util.unflatten_dict(leaves), x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

    example = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
    shapes = jax.eval_shape(module.init, jax.random.key(0), example)
    leaves = traverse_util.flatten_dict(shapes)
    params, frozen = (
        traverse_util.unflatten_dict({p: x for p, x in leaves.items() if is_trained(p) == kept})
        for kept in (True, False)
    )
    return LargerModel(loss, params, frozen, (inputs, labels))


def _is_lora(path: tuple[str, ...]) -> bool:
    return any(part.startswith("lora") for part in path)


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _images(size: int, side: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, side, side, 3), jnp.float32)


def _wide_resnet(dtype: DTypeLike, size: int | None) -> LargerModel:
    n = size or 64
    return _of_module(WideResNet(dtype), _images(n, 32), _integers(n))


def _vit(dtype: DTypeLike, size: int | None) -> LargerModel:
    n = size or 32
    return _of_module(ViT(dtype), _images(n, 224), _integers(n))


def _bert(dtype: DTypeLike, size: int | None) -> LargerModel:
    n = size or 64
    return _of_module(Bert(dtype), _integers(n, 128), _integers(n))


def _gpt2(dtype: DTypeLike, size: int | None) -> LargerModel:
    n = size or 8
    return _of_module(GPT2(dtype), _integers(n, 512), _integers(n, 512))


def _lora(dtype: DTypeLike, size: int | None) -> LargerModel:
    n = size or 8
    module = GPT2(dtype, lora_rank=8)
    return _of_module(module, _integers(n, 512), _integers(n, 512), _is_lora)


def _lstm(dtype: DTypeLike, size: int | None) -> LargerModel:
    n = size or 64
    return _of_module(LSTMLanguageModel(dtype), _integers(n, 64), _integers(n, 64))


def gpt2_small(layers: int = 12) -> Model:
    """Return GPT-2 small with all its layers, 124 million parameters, for 4 texts of 64 tokens."""
    text = _integers(4, 64)
    return _of_module(GPT2(jnp.float32, layers=layers), text, text).with_frozen({})


_FAMILIES: dict[str, Callable[[DTypeLike, int | None], LargerModel]] = {
    "WRN-16-4": _wide_resnet,
    "ViT": _vit,
    "BERT": _bert,
    "GPT-2": _gpt2,
    "GPT-2, LoRA": _lora,
    "LSTM language model": _lstm,
}

# Names such as "GPT-2, bfloat16" → a function of the batch size; None stands for the usual one.
LARGER: dict[str, Callable[[int | None], LargerModel]] = {
    f"{name}, {dtype}": partial(make, dtype)
    for name, make in _FAMILIES.items()
    for dtype in ("bfloat16", "float32")
}
