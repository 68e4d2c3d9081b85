"""Rules: an equation that uses a parameter as a matrix goes in, the gradient's factors come out.

The gradient of such a use is Σ_t a_t ⊗ g_t for each of several blocks: a: (blocks, rows, inputs),
made of the other operand, and g: (blocks, rows, outputs), made of the cotangent of the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import jax

from optax_lsdp._jaxpr import Equation
from optax_lsdp.clipping.bookkeeping._views import View, reshaped, transposed


class Matrix(NamedTuple):
    """How a parameter is laid out as (blocks, inputs, outputs): split, transpose, merge."""

    split: tuple[int, ...]
    order: tuple[int, ...]
    counts: tuple[int, int, int]  # how many axes of `order` each of the three has

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Return the axes of `split` that become blocks, inputs and outputs."""
        blocks, inputs, _ = self.counts
        cuts = (0, blocks, blocks + inputs, len(self.order))
        return [self.order[start:stop] for start, stop in pairwise(cuts)]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (blocks, inputs, outputs)."""
        return tuple(math.prod(self.split[axis] for axis in group) for group in self.groups)

    def view(self, weight: View) -> list[View] | None:
        """Return which entries blocks, inputs and outputs walk through, or None if unknown."""
        parts = reshaped(weight, self.split)
        if parts is None:
            return None
        return [transposed(parts, group) for group in self.groups]


class Rule(NamedTuple):
    """What is known of a primitive.

    Attributes:
        matrix: (equation, place of the parameter) → its `Matrix`, or None if the rule does not fit.
        kept: (equation, place) → the place of the operand that the factors are made of.
        rows: (equation, place, operand, cotangent) → a and g. Where the rows of a are unit
            vectors, a is (blocks, rows) of integers: which entry is one, or −1 for none.
        units: whether the rows of a are unit vectors.
        expands: whether a is larger than the operand, as the patches of an image are.
    """

    matrix: Callable[[Equation, int], Matrix | None]
    kept: Callable[[Equation, int], int]
    rows: Callable[[Equation, int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
    units: bool = False
    expands: bool = False


def other_place(equation: Equation, place: int) -> int:
    """Return the place of the other one of two operands."""
    del equation
    return 1 - place
