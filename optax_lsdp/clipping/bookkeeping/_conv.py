"""The rule for convolutions of any rank, stride, padding, dilation and number of feature groups."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from optax_lsdp._jaxpr import Equation, shape_of
from optax_lsdp.clipping.bookkeeping._rules import Matrix, Rule, other_place


def _matrix(equation: Equation, place: int) -> Matrix | None:
    """Lay a kernel out as (groups, window × inputs, outputs)."""
    params = equation.params
    if place != 1 or params["batch_group_count"] != 1:
        return None
    shape, groups = shape_of(equation.invars[1]), params["feature_group_count"]
    outputs, inputs, *window = params["dimension_numbers"].rhs_spec

    def after_split(axis: int) -> int:
        return axis + (axis > outputs)

    split = (*shape[:outputs], groups, shape[outputs] // groups, *shape[outputs + 1 :])
    order = (outputs, *map(after_split, (*window, inputs)), outputs + 1)
    return Matrix(split, order, (1, len(window) + 1, 1))


def _rows(
    equation: Equation, place: int, image: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a: (groups, positions, window × inputs), the patches, and g, likewise with outputs."""
    del place
    groups = equation.params["feature_group_count"]
    numbers = equation.params["dimension_numbers"]
    batch, features, *space = numbers.out_spec
    g = cotangent.transpose([batch, *space, features])
    g = g.reshape(math.prod(g.shape[:-1]), groups, -1)
    a = patches(equation, image)  # (batch, *positions, *window, features)
    a = a.reshape(len(g), -1, groups, a.shape[-1] // groups)
    a = a.transpose(2, 0, 1, 3).reshape(groups, len(g), -1)
    return a, g.transpose(1, 0, 2)


def patches(equation: Equation, image: jax.Array) -> jax.Array:
    """Return what the window sees at each position: (batch, *positions, *window, features).

    One axis after the other: Σ window slices instead of Π window.
    """
    params = equation.params
    batch, features, *space = params["dimension_numbers"].lhs_spec
    image = image.transpose([batch, *space, features])
    edges = zip(params["padding"], params["lhs_dilation"], strict=True)
    padding = [(0, 0, 0), *((low, high, d - 1) for (low, high), d in edges), (0, 0, 0)]
    image = jax.lax.pad(image, jnp.zeros([], image.dtype), padding)
    kernel = shape_of(equation.invars[1])
    out = shape_of(equation.outvars[0])
    rank = len(space)
    for i in range(rank):
        size = kernel[params["dimension_numbers"].rhs_spec[2 + i]]
        positions = out[params["dimension_numbers"].out_spec[2 + i]]
        stride, dilation = params["window_strides"][i], params["rhs_dilation"][i]
        reach = stride * (positions - 1) + 1
        axis = 1 + i
        slices = [
            jax.lax.slice_in_dim(image, k * dilation, k * dilation + reach, stride, axis)
            for k in range(size)
        ]
        image = jnp.stack(slices, axis=1 + rank + i)
    return image


convolution = Rule(_matrix, other_place, _rows, expands=True)
