"""One loss whose parameters are used in every way that is hard to clip.

Each group of parameters is a small model, and the loss is the sum of theirs. With one clip norm for
each group, one compiled function therefore clips all models, each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Model = Callable[[Any, Any], jax.Array]
_WIDTH, _VOCABULARY, _LAYERS = 16, 24, 3
ODD = (0.0, np.nan, np.inf, 1e-3, 0.03, -2.0, 1.0, 30.0, 1e3, 1e6, 1e20, 5.0)
PLAIN = (1e-3, 0.01, 0.03, -0.1, 0.3, 1.0, -2.0, 5.0, 30.0, 100.0, 1e3, 1e4)
_CANCELS = 3e3  # how much longer than their sum the rows are that cancel


def _dense(params: Any, example: Any) -> jax.Array:
    """Use a matrix once and a bias, for one row: an outer product."""
    return jnp.sum(jnp.sin(example["rows"][0] @ params["kernel"] + params["bias"]))


def _tied(params: Any, example: Any) -> jax.Array:
    """Use one matrix three times, once transposed."""
    hidden = jnp.tanh(example["rows"] @ params["kernel"])
    return jnp.sum(jnp.sin(jnp.tanh(hidden @ params["kernel"]) @ params["kernel"].T))


def _scanned(params: Any, example: Any) -> jax.Array:
    """Scan over a stack of matrices, with a matrix and a bias that all iterations share."""

    def layer(x: jax.Array, slices: Any) -> tuple[jax.Array, None]:
        kernel, bias = slices
        return jnp.tanh(x @ kernel + bias + jnp.sin(x @ params["shared"])), None

    last, _ = jax.lax.scan(layer, example["rows"], (params["stack"], params["biases"]))
    return jnp.sum(last * example["rows"])


def _carried(params: Any, example: Any) -> jax.Array:
    """Let a scan hand a parameter on as its carry, which begins as something else."""

    def step(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return params["kernel"], jnp.sum(jnp.sin(row @ carry))

    last, outputs = jax.lax.scan(step, jnp.zeros_like(params["kernel"]), example["rows"])
    return jnp.sum(outputs) + jnp.sum(last * params["scale"])


def _sliced(params: Any, example: Any) -> jax.Array:
    """Use disjoint columns of one matrix, and overlapping columns of another."""
    x, apart, lapped = example["rows"], params["apart"], params["lapped"]
    left, right = x @ apart[:, :_WIDTH], jnp.tanh(x) @ apart[:, _WIDTH:]
    first, second = x @ lapped[:, : _WIDTH + 4], jnp.tanh(x) @ lapped[:, 4:]
    return jnp.sum(jnp.sin(left) * right) + jnp.sum(jnp.sin(first) * jnp.cos(second))


def _joined(params: Any, example: Any) -> jax.Array:
    """Multiply by several matrices at once, as attention does with queries, keys and values."""
    whole = jnp.concatenate([params["query"], params["key"], params["value"]], axis=1)
    query, key, value = jnp.split(example["rows"] @ whole, 3, axis=1)
    return jnp.sum(jax.nn.softmax(query @ key.T, axis=-1) @ value * example["rows"])


def _convolved(params: Any, example: Any) -> jax.Array:
    """Convolve with strides and padding, by all channels and channel by channel."""
    image = example["image"][None]
    layout = ("NHWC", "HWIO", "NHWC")
    each = jax.lax.conv_general_dilated(
        image,
        params["each"],
        (1, 1),
        "SAME",
        dimension_numbers=layout,
        feature_group_count=image.shape[-1],
    )
    wide = jax.lax.conv_general_dilated(
        jnp.tanh(each), params["wide"], (2, 2), ((1, 0), (0, 1)), dimension_numbers=layout
    )
    return jnp.sum(jnp.sin(wide))


def _gathered(params: Any, example: Any) -> jax.Array:
    """Look up tokens, some of them several times, in a table that is used once more."""
    rows = params["table"][example["tokens"]]
    return jnp.sum(jnp.sin(rows * example["places"])) + jnp.sum(rows[0] * rows[1])


def _small(params: Any, example: Any) -> jax.Array:
    """Use six small leaves by their entries, and a seventh not at all."""
    x = example["rows"][0]
    for name in ("a", "b", "c"):
        x = jnp.sin(x * params[f"scale_{name}"] + params[f"shift_{name}"])
    return jnp.sum(x)


def _cancelling(params: Any, example: Any) -> jax.Array:
    """Add up rows that are far longer than their sum: Gram matrices round most of it away."""
    return jnp.sum(example["long"] @ params["kernel"] @ example["toward"])


def _half(params: Any, example: Any) -> jax.Array:
    """Compute in half precision, if the parameters are."""
    kernel, bias = params["kernel"], params["bias"]
    hidden = jnp.sin(example["rows"].astype(kernel.dtype) @ kernel + bias)
    return jnp.sum(hidden).astype(example["scale"].dtype)


MODELS: dict[str, Model] = {
    "dense": _dense,
    "tied": _tied,
    "scanned": _scanned,
    "carried": _carried,
    "sliced": _sliced,
    "joined": _joined,
    "convolved": _convolved,
    "gathered": _gathered,
    "small": _small,
    "cancelling": _cancelling,
    "half": _half,
}


@cache  # one function for the same models, which is compiled once
def hard_loss(names: tuple[str, ...]) -> Model:
    """Return the sum of these models' losses, times the example's scale."""

    def loss(params: Any, example: Any) -> jax.Array:
        total = sum(MODELS[name](params[name], example) for name in names)
        return example["scale"] * total

    return loss


def hard_params(key: jax.Array) -> Any:
    """Return the parameters of all models, by the name of the model."""
    width = _WIDTH
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "dense": {"kernel": (width, width), "bias": (width,)},
        "tied": {"kernel": (width, width)},
        "scanned": {
            "stack": (_LAYERS, width, width),
            "biases": (_LAYERS, width),
            "shared": (width, width),
        },
        "carried": {"kernel": (width, width), "scale": (width,)},
        "sliced": {"apart": (width, 2 * width), "lapped": (width, width + 8)},
        "joined": {name: (width, width) for name in ("query", "key", "value")},
        "convolved": {"each": (3, 2, 1, 8), "wide": (3, 3, 8, 12)},
        "gathered": {"table": (_VOCABULARY, width)},
        "small": {
            **{f"{kind}_{name}": (width,) for kind in ("scale", "shift") for name in "abc"},
            "unused": (3,),
        },
        "cancelling": {"kernel": (width, width)},
        "half": {"kernel": (width, 2 * width), "bias": (2 * width,)},
    }
    rng = _generator(key)

    def draw(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(width), jnp.float32)

    params: Any = {
        model: {name: draw(shape) for name, shape in leaves.items()}
        for model, leaves in shapes.items()
    }
    params["half"] = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params["half"])
    return params


def hard_batch(key: jax.Array, scales: Sequence[float]) -> Any:
    """Return examples whose losses have these scales, one each.

    `PLAIN` examples take the quick way through an engine. One `ODD` example, with a gradient that
    is zero, not finite or huge, takes all others of its batch along on the careful way.
    """
    rng, size = _generator(key), len(scales)
    long = _CANCELS * rng.normal(size=(size, 2, _WIDTH))
    long = np.concatenate([long, rng.normal(size=long.shape) / _WIDTH - long], axis=1)
    drawn = {
        "scale": np.array(scales),
        "rows": rng.normal(size=(size, 2, _WIDTH)),
        "image": rng.normal(size=(size, 4, 4, 8)),
        "places": rng.normal(size=(size, 6, _WIDTH)),
        "long": long,
        "toward": rng.normal(size=(size, _WIDTH)),
    }
    batch = {name: jnp.asarray(x, jnp.float32) for name, x in drawn.items()}
    tokens = rng.integers(_VOCABULARY, size=(size, 6))
    tokens[:, 2:4] = tokens[:, :1]  # a token that comes three times
    return {**batch, "tokens": jnp.asarray(tokens, jnp.int32)}


def _generator(key: jax.Array) -> np.random.Generator:
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
