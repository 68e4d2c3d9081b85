"""Hard models: small models that use their parameters in ways that are hard to clip correctly.

`hard_loss` adds up the losses of several models, so that one compilation serves all.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._types import PyTree

Example = dict[str, jax.Array]
Model = Callable[[optax.Params, PyTree], jax.Array]
Padding = tuple[tuple[int, int], tuple[int, int]]
_WIDTH, _VOCABULARY, _LAYERS = 16, 24, 3
_CANCELLING = 100.0  # the size of the rows that nearly cancel
# The loss of each example is multiplied by a scale. ODD_SCALES make gradients zero, huge or not
# finite. With scale NaN, the inputs are NaN too. With scale 10²⁰, the squared gradient overflows in
# float32, so the example may contribute nothing. An audit must also notice an example that changes
# what other examples contribute. Odd examples could hide this, so other batches use PLAIN_SCALES.
ODD_SCALES = (0.0, np.nan, np.inf, 1e-3, 0.03, -2.0, 1.0, 30.0, 1e3, 1e6, 1e20, 5.0)
PLAIN_SCALES = (1e-3, 0.01, 0.03, -0.1, 0.3, 1.0, -2.0, 5.0, 30.0, 100.0, 1e3, 1e4)


def _dense(params: optax.Params, example: Example) -> jax.Array:
    """Multiply one row by a matrix and add a bias. The gradient is an outer product."""
    return jnp.sum(jnp.sin(example["rows"][0] @ params["kernel"] + params["bias"]))


def _tied(params: optax.Params, example: Example) -> jax.Array:
    """Use one matrix three times, once transposed."""
    hidden = jnp.tanh(example["rows"] @ params["kernel"])
    return jnp.sum(jnp.sin(jnp.tanh(hidden @ params["kernel"]) @ params["kernel"].T))


def _scanned(params: optax.Params, example: Example) -> jax.Array:
    """Scan over a stack of matrices and biases, with one matrix that all iterations share."""

    def layer(x: jax.Array, slices: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        kernel, bias = slices
        return jnp.tanh(x @ kernel + bias + jnp.sin(x @ params["shared"])), None

    last, _ = jax.lax.scan(layer, example["rows"], (params["stack"], params["biases"]))
    return jnp.sum(last * example["rows"])


def _carried(params: optax.Params, example: Example) -> jax.Array:
    """Use a parameter as the carry of a scan, except in the first step, whose carry is zero."""

    def step(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        return params["kernel"], jnp.sum(jnp.sin(row @ carry))

    last, outputs = jax.lax.scan(step, jnp.zeros_like(params["kernel"]), example["rows"])
    return jnp.sum(outputs) + jnp.sum(last * params["scale"])


def _sliced(params: optax.Params, example: Example) -> jax.Array:
    """Use disjoint columns of one matrix, and overlapping columns of another."""
    x, disjoint, overlapping = example["rows"], params["disjoint"], params["overlapping"]
    left, right = x @ disjoint[:, :_WIDTH], jnp.tanh(x) @ disjoint[:, _WIDTH:]
    first, second = x @ overlapping[:, : _WIDTH + 4], jnp.tanh(x) @ overlapping[:, 4:]
    return jnp.sum(jnp.sin(left) * right) + jnp.sum(jnp.sin(first) * jnp.cos(second))


def _concatenated(params: optax.Params, example: Example) -> jax.Array:
    """Multiply by three concatenated matrices: the queries, keys and values of attention."""
    matrices = jnp.concatenate([params["query"], params["key"], params["value"]], axis=1)
    query, key, value = jnp.split(example["rows"] @ matrices, 3, axis=1)
    return jnp.sum(jax.nn.softmax(query @ key.T, axis=-1) @ value * example["rows"])


_convolve = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _convolved(params: optax.Params, example: Example) -> jax.Array:
    """Convolve each channel separately, then all channels with strides and uneven padding."""
    image = example["image"][None]
    each = _convolve(image, params["each"], (1, 1), "SAME", feature_group_count=image.shape[-1])
    return jnp.sum(jnp.sin(_convolve(jnp.tanh(each), params["wide"], (2, 2), ((1, 0), (0, 1)))))


def _window(
    image: str,
    strides: tuple[int, int],
    padding: Padding,
    params: optax.Params,
    example: Example,
) -> jax.Array:
    """Apply one convolution. On accelerators, its shape decides the clipping strategy."""
    kernel = params["kernel"]
    pixels = example[image][None, ..., : kernel.shape[2]]
    return jnp.sum(jnp.sin(_convolve(pixels, kernel, strides, padding)))


def _gathered(params: optax.Params, example: Example) -> jax.Array:
    """Look up tokens in a table, some of them several times."""
    rows = params["table"][example["tokens"]]
    return jnp.sum(jnp.sin(rows * example["positions"])) + jnp.sum(rows[0] * rows[1])


def _small(params: optax.Params, example: Example) -> jax.Array:
    """Use six small leaves elementwise, and leave a seventh unused."""
    x = example["rows"][0]
    for name in ("a", "b", "c"):
        x = jnp.sin(x * params[f"scale_{name}"] + params[f"shift_{name}"])
    return jnp.sum(x)


def _cancelling(params: optax.Params, example: Example) -> jax.Array:
    """Sum over rows that nearly cancel, so that a norm from a Gram matrix loses digits."""
    return jnp.sum(example["long"] @ params["kernel"] @ example["toward"])


def _constant(rows: int, params: optax.Params, example: Example) -> jax.Array:
    """Multiply equal rows of equal entries by a matrix, so all entries round in one direction."""
    return jnp.sum(jnp.broadcast_to(example["level"], (rows, _WIDTH)) @ params["kernel"])


def _half(params: optax.Params, example: Example) -> jax.Array:
    """Compute in the precision of the parameters, which is bfloat16."""
    kernel, bias = params["kernel"], params["bias"]
    hidden = jnp.sin(example["rows"].astype(kernel.dtype) @ kernel + bias)
    return jnp.sum(hidden).astype(example["scale"].dtype)


_SQUARE, _ROW, _WIDE = (_WIDTH, _WIDTH), (_WIDTH,), (_WIDTH, 2 * _WIDTH)
_STACKED = {"stack": (_LAYERS, *_SQUARE), "biases": (_LAYERS, *_ROW), "shared": _SQUARE}
_SEVEN = {f"{kind}_{name}": _ROW for kind in ("scale", "shift") for name in "abc"}
_SEVEN["unused"] = (3,)
# For each model, the loss of one example and the shapes of the parameters.
ALL_MODELS: dict[str, tuple[Model, Mapping[str, tuple[int, ...]]]] = {
    "dense": (_dense, {"kernel": _SQUARE, "bias": _ROW}),
    "tied": (_tied, {"kernel": _SQUARE}),
    "scanned": (_scanned, _STACKED),
    "carried": (_carried, {"kernel": _SQUARE, "scale": _ROW}),
    "sliced": (_sliced, {"disjoint": _WIDE, "overlapping": (_WIDTH, _WIDTH + 8)}),
    "concatenated": (_concatenated, dict.fromkeys(("query", "key", "value"), _SQUARE)),
    "convolved": (_convolved, {"each": (3, 2, 1, 8), "wide": (3, 3, 8, 12)}),
    "many positions": (
        partial(_window, "picture", (1, 1), ((1, 0), (0, 0))),
        {"kernel": (2, 2, 16, 16)},
    ),
    "few channels": (
        partial(_window, "picture", (1, 1), ((1, 0), (0, 2))),
        {"kernel": (4, 4, 1, 64)},
    ),
    "few positions": (
        partial(_window, "image", (2, 2), ((1, 0), (0, 1))),
        {"kernel": (3, 3, 8, 12)},
    ),
    "few positions of many channels": (
        partial(_window, "deep", (1, 1), ((1, 0), (0, 0))),
        {"kernel": (2, 2, 40, 12)},
    ),
    "gathered": (_gathered, {"table": (_VOCABULARY, _WIDTH)}),
    "small": (_small, _SEVEN),
    "cancelling": (_cancelling, {"kernel": _SQUARE}),
    "constant row": (partial(_constant, 1), {"kernel": _SQUARE}),
    "constant rows": (partial(_constant, 2), {"kernel": _SQUARE}),
    "half": (_half, {"kernel": _WIDE, "bias": (2 * _WIDTH,)}),
}


@cache  # returns the same function for equal names, so that JAX compiles it once
def hard_loss(names: tuple[str, ...]) -> Model:
    """Return a loss: the sum of the losses of the named models, times the example's scale."""

    def loss(params: optax.Params, example: Example) -> jax.Array:
        total = sum(ALL_MODELS[name][0](params[name], example) for name in names)
        return example["scale"] * total

    return loss


def hard_params(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """Return random parameters of all models, by the name of the model."""
    rng, params = generator(key), {}
    for name, (_, shapes) in ALL_MODELS.items():
        dtype = jnp.bfloat16 if name == "half" else jnp.float32
        drawn = {leaf: rng.normal(size=shape) / np.sqrt(_WIDTH) for leaf, shape in shapes.items()}
        params[name] = {leaf: jnp.asarray(np.float32(x), dtype) for leaf, x in drawn.items()}
    return params


def hard_batch(key: jax.Array, scales: Sequence[float]) -> Example:
    """Return one random example for each of `scales`, which multiply the losses."""
    rng, size = generator(key), len(scales)
    long = _CANCELLING * rng.normal(size=(size, 2, _WIDTH))
    long = np.concatenate([long, rng.normal(size=long.shape) / _WIDTH - long], axis=1)
    drawn = {
        "scale": np.array(scales),
        "rows": rng.normal(size=(size, 2, _WIDTH)),
        "image": rng.normal(size=(size, 4, 4, 8)),
        "picture": rng.normal(size=(size, 16, 16, 16)),
        "deep": rng.normal(size=(size, 3, 3, 40)),
        "positions": rng.normal(size=(size, 6, _WIDTH)),
        "long": long,
        "toward": rng.normal(size=(size, _WIDTH)),
        "level": rng.uniform(1, 2, size=size),
    }
    for name in drawn.keys() - {"scale"}:
        drawn[name][np.isnan(scales)] = np.nan
    batch = {name: jnp.asarray(x.astype(np.float32)) for name, x in drawn.items()}
    tokens = rng.integers(_VOCABULARY, size=(size, 6))
    tokens[:, 2:4] = tokens[:, :1]  # one token occurs three times
    return {**batch, "tokens": jnp.asarray(tokens.astype(np.int32))}


def generator(key: jax.Array) -> np.random.Generator:
    """Return a NumPy generator with a key as its seed."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
