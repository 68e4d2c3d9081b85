"""Random models for the fuzz tests.

A model is a list of layers. Each layer maps rows h: (t, d) to rows. Some layers use primitives that
the bookkeeping engine has rules for, and some use others. Layers may share their weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, WIDTH, VOCABULARY = 3, 4, 5
Layer = Callable[[Any, jax.Array], jax.Array]


def convolved(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return a convolution along the rows, of kernel size 2."""
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(
        h[None], w.reshape(2, 2, WIDTH).repeat(2, axis=1), (1,), "SAME", dimension_numbers=numbers
    )[0]


def attended(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return attention whose queries and keys come from the same weight."""
    queries = h @ w
    return jax.nn.softmax(queries @ queries.T) @ h


def looped(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return a recurrence that closes over its weight."""
    return lax.scan(lambda c, x: (jnp.tanh(c @ w + x), c), jnp.zeros(WIDTH), h)[1]


def sliced_by_a_loop(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return a loop over the rows of a weight."""
    return lax.scan(lambda c, row: (jnp.tanh(c * row), None), h, w)[0]


def chosen(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return one of two products; the data decide which."""
    return lax.cond(h[0, 0] > 0, lambda h: h @ w, lambda h: h @ w.T, h)


def handed_on(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return a loop whose carry is the weight from the second iteration on."""
    return lax.scan(lambda c, row: (w, jnp.tanh(c * row)), jnp.zeros(WIDTH), h)[1]


def never_looped(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return a product after a loop without iterations."""
    return lax.scan(lambda c, _: (c @ w, None), h, None, length=0)[0] @ w


@jax.custom_vjp
def bent(w: jax.Array) -> jax.Array:
    """Return w, with a backward pass that is not linear."""
    return w


bent.defvjp(lambda w: (w, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def bent_twice(w: jax.Array, h: jax.Array) -> jax.Array:
    """Return two products with a weight whose gradient is not the sum of their gradients."""
    same = bent(w)
    return jnp.tanh(h @ same) @ same


LAYERS: dict[str, tuple[tuple[int, ...], Layer]] = {  # the shape of the weight, and its use
    "dense": ((WIDTH, WIDTH), lambda w, h: h @ w),
    "transposed": ((WIDTH, WIDTH), lambda w, h: h @ w.T),
    "bias": ((WIDTH,), lambda w, h: h + w),
    "scale": ((WIDTH,), lambda w, h: h * w),
    "scalar": ((), lambda w, h: h * w),
    "column": ((ROWS, 1), lambda w, h: h + w),
    "convolution": ((2, 2, WIDTH), convolved),
    "embedding": ((VOCABULARY, WIDTH), lambda w, h: h + w[jnp.int32(jnp.abs(h[:, 0]) * 2) % 5]),
    "normalisation": ((WIDTH,), lambda w, h: w * (h - h.mean()) / jnp.sqrt(h.var() + 0.1)),
    "attention": ((WIDTH, WIDTH), attended),
    "einsum": ((2, WIDTH, 2), lambda w, h: jnp.einsum("td,kde->tke", h, w).reshape(-1, 4)),
    "halves": ((WIDTH, WIDTH), lambda w, h: jnp.concatenate([h @ w[:, :2], h @ w[:, 2:]], 1)),
    "loop": ((WIDTH, WIDTH), looped),
    "loop over a weight": ((2, WIDTH), sliced_by_a_loop),
    "branch": ((WIDTH, WIDTH), chosen),
    "remat": ((WIDTH, WIDTH), lambda w, h: jax.checkpoint(lambda h: jnp.tanh(h @ w))(h)),
    "jit": ((WIDTH, WIDTH), lambda w, h: jax.jit(lambda h, w: h @ w)(h, w)),
    "half precision": (
        (WIDTH, WIDTH),
        lambda w, h: (h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
    ),
    "used twice": ((WIDTH, WIDTH), lambda w, h: jnp.tanh(h @ w) @ w.T),
    "squared": ((WIDTH, WIDTH), lambda w, h: h @ w**2),
    "summed up": ((WIDTH,), lambda w, h: h + jnp.cumsum(w)),
    "sorted": ((WIDTH,), lambda w, h: h * jnp.sort(w)),
    "largest": ((WIDTH, WIDTH), lambda w, h: h + jnp.max(w, axis=0)),
    "outer product": ((WIDTH,), lambda w, h: h @ jnp.outer(w, w)),
    "sliced by data": (
        (VOCABULARY, WIDTH),
        lambda w, h: h + lax.dynamic_slice_in_dim(w, jnp.int32(h[0, 0] > 0), 1),
    ),
    "handed on by a loop": ((WIDTH,), handed_on),
    "empty loop": ((WIDTH, WIDTH), never_looped),
    "custom derivative": ((WIDTH, WIDTH), bent_twice),
    "unused": ((3,), lambda w, h: h),
}
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda h: h,
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "softmax": jax.nn.softmax,
    "reversed": lambda h: h[::-1],
    "rolled": lambda h: jnp.roll(h, 1, axis=1),
}


class Step(NamedTuple):
    """A layer, its activation, and whether it shares the weight of the last layer of its kind."""

    layer: str
    activation: str
    shares: bool


steps = st.builds(
    Step,
    layer=st.sampled_from(list(LAYERS)),
    activation=st.sampled_from(list(ACTIVATIONS)),
    shares=st.booleans(),
)
programs = st.lists(steps, min_size=1, max_size=4)


def build(program: list[Step], seed: int) -> tuple[Callable[..., jax.Array], list[jax.Array]]:
    """Return a loss and its parameters."""
    rng = np.random.default_rng(seed)
    places: list[int] = []
    last: dict[str, int] = {}
    params: list[jax.Array] = []
    for step in program:
        if not (step.shares and step.layer in last):
            last[step.layer] = len(params)
            shape = LAYERS[step.layer][0]
            params.append(jnp.asarray(rng.normal(size=shape), jnp.float32))
        places.append(last[step.layer])

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        h = x
        for step, place in zip(program, places, strict=True):
            h = ACTIVATIONS[step.activation](LAYERS[step.layer][1](params[place], h))
        return jnp.sum(h * h) + jnp.sum(h)

    return loss, params
