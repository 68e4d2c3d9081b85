"""The rule for matrix products: dot_general, with the parameter on either side."""

from __future__ import annotations

import math

import jax

from optax_lsdp._jaxpr import Equation, shape_of
from optax_lsdp.clipping.bookkeeping._rules import Matrix, Rule, other_place


def _axes(equation: Equation, place: int) -> tuple[list[int], list[int], list[int]]:
    """Return the batch, contracting and free axes of an operand."""
    contracting, batch = equation.params["dimension_numbers"]
    used = (*batch[place], *contracting[place])
    free = [i for i in range(len(shape_of(equation.invars[place]))) if i not in used]
    return list(batch[place]), list(contracting[place]), free


def _matrix(equation: Equation, place: int) -> Matrix:
    batch, contracting, free = _axes(equation, place)
    shape = shape_of(equation.invars[place])
    order = (*batch, *contracting, *free)
    return Matrix(shape, order, (len(batch), len(contracting), len(free)))


def _rows(
    equation: Equation, place: int, operand: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return a: (blocks, rows, inputs) and g: (blocks, rows, outputs)."""
    batch, contracting, free = _axes(equation, 1 - place)
    blocks = math.prod(operand.shape[axis] for axis in batch)
    rows = math.prod(operand.shape[axis] for axis in free)
    a = operand.transpose([*batch, *free, *contracting]).reshape(blocks, rows, -1)
    if place == 0:  # the output has the parameter's free axes before those of the operand
        last, outputs = len(batch) + len(_axes(equation, place)[2]), cotangent.ndim
        order = [*range(len(batch)), *range(last, outputs), *range(len(batch), last)]
        cotangent = cotangent.transpose(order)
    return a, cotangent.reshape(blocks, rows, -1)


matmul = Rule(_matrix, other_place, _rows)
