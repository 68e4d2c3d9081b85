"""Find every use of every parameter in the jaxpr of a loss.

A *weight* is a value that depends only on parameters and constants. A *use* is an equation that
combines a weight with data of an example. The walk follows each parameter through all weights that
depend on it. If the primitive of a use has a rule, the walk records a `Use`. Otherwise, the walk
records that the leaves of the weight are used without a rule, and the engine differentiates those
leaves for each example. The walk therefore misses no use. At worst, a leaf is slower than it could
be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax.numpy as jnp

from optax_lsdp._jaxpr import (
    ClosedJaxpr,
    Equation,
    body,
    dtype_of,
    has_custom_backward,
    is_literal,
    shape_of,
)
from optax_lsdp.clipping.bookkeeping._rules import MATMUL, RULES, Matrix, Rule
from optax_lsdp.clipping.bookkeeping._weights import Loop, Weight, derived, parameter

CALLS = ("jit", "pjit", "closed_call", "core_call")
REMATERIALISED = ("checkpoint", "remat", "remat2")

Path = tuple[int, ...]  # the indices of the calls around an equation, then the equation's own index
Item = TypeVar("Item")


class Piece(NamedTuple):
    """A weight that is an operand of a use, or one of several weights that form the operand.

    Attributes:
        weight: the weight.
        matrix: the weight as a matrix.
        start: where the weight begins along `axis` of the operand; None if the weight is the whole
            operand.
        axis: the axis along which the weights were concatenated.
    """

    weight: Weight
    matrix: Matrix
    start: int | None = None
    axis: int = 0

    @property
    def length(self) -> int:
        """Return how long the weight is along `axis`."""
        return self.matrix.split[self.axis]


class Use(NamedTuple):
    """An equation that combines a weight with data, and whose primitive has a rule.

    Attributes:
        equation: the equation.
        place: 0 if the weight is the first operand, 1 if it is the second.
        rule: the rule of the primitive.
        matrix: the operand that holds the weight, as a matrix.
        loops: the scans around the equation, the outermost first.
        pieces: the weights that the operand at `place` consists of.
        operand: the path of the first use with the same data operand.
        is_mixed: whether automatic differentiation handles other uses of the same leaves.
    """

    equation: Equation
    place: int
    rule: Rule
    matrix: Matrix
    loops: tuple[Loop, ...]
    pieces: tuple[Piece, ...]
    operand: Path
    is_mixed: bool = False

    @property
    def leaves(self) -> frozenset[int]:
        """Return the indices of all leaves that the weights depend on."""
        return frozenset[int]().union(*(piece.weight.leaves for piece in self.pieces))


class Uses(NamedTuple):
    """All uses of all parameters.

    Attributes:
        by_rule: the uses that have a rule.
        without_rule: for each leaf with uses that have no rule, the primitives of these uses.
        by_choice: leaves that are treated as if they had no rule, because that is cheaper.
    """

    by_rule: dict[Path, Use]
    without_rule: dict[int, set[str]]
    by_choice: frozenset[int] = frozenset()

    def add_without_rule(self, weights: Sequence[Weight | None], primitive: str) -> None:
        """Record that a primitive without a rule uses `weights`."""
        for weight in weights:
            for leaf in weight.leaves if weight else ():
                self.without_rule.setdefault(leaf, set()).add(primitive)


def find_uses(closed: ClosedJaxpr, leaves: int) -> Uses:
    """Return all uses in a loss whose first `leaves` inputs are the parameters."""
    uses = Uses({}, {})
    inputs: list[Weight | None] = [None] * len(closed.jaxpr.invars)
    for index, variable in enumerate(closed.jaxpr.invars[:leaves]):
        inputs[index] = parameter(index, shape_of(variable))
    uses.add_without_rule(_walk(closed, inputs, (), (), uses), "output")
    return uses


def _walk(
    closed: ClosedJaxpr,
    inputs: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Record the uses in a jaxpr. Return its outputs, with None for outputs that depend on data."""
    jaxpr = closed.jaxpr
    known: dict[object, Weight] = {
        variable: Weight(frozenset(), value)
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    known |= {v: w for v, w in zip(jaxpr.invars, inputs, strict=True) if w is not None}

    def read(atom: Any) -> Weight | None:
        return Weight(frozenset(), atom.val) if is_literal(atom) else known.get(atom)

    for number, equation in enumerate(jaxpr.eqns):
        weights = [read(atom) for atom in equation.invars]
        results = _walk_equation(equation, weights, (*path, number), loops, uses)
        known |= {v: w for v, w in zip(equation.outvars, results, strict=True) if w is not None}
    return [read(atom) for atom in jaxpr.outvars]


def _walk_equation(
    equation: Equation,
    weights: list[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Record the uses in one equation. Return its outputs, with None for those that need data.

    If all operands are weights, so are the outputs, except with a `custom_vjp`. A custom backward
    pass need not be linear in its cotangent. So automatic differentiation has to add up the
    cotangents from all uses of the output before it runs the custom backward pass.
    """
    name = equation.primitive.name
    data: list[Weight | None] = [None] * len(equation.outvars)
    found = [weight for weight in weights if weight is not None]
    if name in CALLS and (found or not weights):  # the call may return weights
        return _walk(body(equation), weights, path, loops, uses)
    is_pure = not equation.effects and not has_custom_backward(equation)
    if is_pure and len(found) == len(weights):
        return [*derived(equation, found)]
    if not any(weight.leaves for weight in found):
        return data
    if name == "scan":
        return _walk_scan(equation, weights, path, loops, uses)
    if name in REMATERIALISED:
        uses.add_without_rule(_walk(body(equation), weights, path, loops, uses), name)
    elif name == "cond":
        uses.add_without_rule(weights[:1], name)
        for number, branch in enumerate(equation.params["branches"]):
            results = _walk(branch, weights[1:], (*path, number), loops, uses)
            uses.add_without_rule(results, name)
    else:
        use = _use(equation, weights, path, loops, uses)
        if use is None:
            uses.add_without_rule(weights, name)
        else:
            uses.by_rule[path] = use
    return data


def _use(
    equation: Equation,
    weights: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> Use | None:
    """Return the use in an equation, or None if no rule applies.

    A rule applies only if exactly one operand depends on parameters, no array is empty, and all
    arrays are real floating-point arrays. The indices of a one-hot rule may be integers.
    """
    places = [place for place, weight in enumerate(weights) if weight and weight.leaves]
    rule = RULES.get(equation.primitive.name)
    if rule is None or len(places) != 1:
        return None
    place = places[0]
    data, matrix = equation.invars[1 - place], rule.matrix(equation, place)
    arrays = [equation.invars[place], equation.outvars[0], data]
    floats = arrays[:2] if rule.is_one_hot else arrays
    are_real = all(jnp.issubdtype(dtype_of(array), jnp.floating) for array in floats)
    if matrix is None or not are_real or not all(math.prod(shape_of(x)) for x in arrays):
        return None
    same = (
        use.operand
        for other, use in uses.by_rule.items()
        if use.equation.invars[1 - use.place] is data and other[:-1] == path[:-1]
    )
    pieces = _pieces(cast("Weight", weights[place]), matrix, rule)
    return Use(equation, place, rule, matrix, loops, pieces, next(same, path))


def _pieces(weight: Weight, matrix: Matrix, rule: Rule) -> tuple[Piece, ...]:
    """Return the pieces of a concatenated weight, or the whole weight if the rule cannot cut it."""
    if not weight.pieces or rule is not MATMUL:
        return (Piece(weight, matrix),)
    pieces, start = [], 0
    for part in weight.pieces:
        shape = part.entries.shape[len(part.sliced) :]  # type: ignore[union-attr]  # all are views
        if part.leaves:
            pieces.append(Piece(part, matrix._replace(split=shape), start, weight.axis))
        start += shape[weight.axis]
    return tuple(pieces)


def scan_parts(
    equation: Equation, items: Sequence[Item]
) -> tuple[Sequence[Item], Sequence[Item], Sequence[Item]]:
    """Split the operands of a scan into constants, carry and slices."""
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
    return items[:consts], items[consts : consts + carry], items[consts + carry :]


def carried_unchanged(equation: Equation) -> list[bool]:
    """Return for each carry of a scan whether every iteration returns the carry unchanged."""
    jaxpr = equation.params["jaxpr"].jaxpr
    _, carry, _ = scan_parts(equation, jaxpr.invars)
    return [a is b for a, b in zip(carry, jaxpr.outvars[: len(carry)], strict=True)]


def _walk_scan(
    equation: Equation,
    weights: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Record the uses of weights that a scan closes over, slices, or carries unchanged.

    A carry that changes is data, even if an iteration puts a weight into it. Weights in its initial
    value, or in the values that iterations return, count as used without a rule.
    """
    loop = Loop(len(loops), equation.params["length"])
    consts, carry, slices = scan_parts(equation, weights)
    unchanged = carried_unchanged(equation)
    inside = [w if same else None for w, same in zip(carry, unchanged, strict=True)]
    changed = [w for w, same in zip(carry, unchanged, strict=True) if not same]
    if loop.length:  # a scan of length 0 never runs its body
        sliced = [w and w._replace(sliced=(*w.sliced, loop), pieces=()) for w in slices]
        results = _walk(body(equation), [*consts, *inside, *sliced], path, (*loops, loop), uses)
        changed += [w for w, same in zip(results, unchanged, strict=False) if not same]
        changed += results[len(inside) :]
    uses.add_without_rule(changed, "scan")
    return inside + [None] * (len(equation.outvars) - len(inside))
