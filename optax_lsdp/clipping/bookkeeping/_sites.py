"""Sites: the equations of a loss go in, every use of every parameter comes out.

A leaf is traced through everything that depends on parameters alone. Where such a weight meets an
example, by a primitive that has a rule, is a site. Wherever else it meets one, the leaf `escapes`,
and is left to automatic differentiation: nothing can be overlooked, only be slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from optax_lsdp._jaxpr import (
    ClosedJaxpr,
    Equation,
    body,
    has_custom_backward,
    is_literal,
    shape_of,
)
from optax_lsdp.clipping.bookkeeping._conv import convolution
from optax_lsdp.clipping.bookkeeping._gather import gather
from optax_lsdp.clipping.bookkeeping._matmul import matmul
from optax_lsdp.clipping.bookkeeping._rules import Matrix, Rule
from optax_lsdp.clipping.bookkeeping._views import whole
from optax_lsdp.clipping.bookkeeping._weights import (
    Loop,
    Weight,
    constant,
    derived,
    parameter,
    slice_of,
)

REMATERIALISED = ("checkpoint", "remat", "remat2")
RULES = {"dot_general": matmul, "conv_general_dilated": convolution, "gather": gather}

Path = tuple[int, ...]  # the equation's number, after those of the calls that it is in


class Piece(NamedTuple):
    """One of the weights that were concatenated to the operand of a site, or the only one.

    Attributes:
        weight: the weight.
        matrix: how it is laid out.
        start: where it begins along `axis` of the operand; None if it is all of the operand.
        axis: along which the weights were concatenated.
    """

    weight: Weight
    matrix: Matrix
    start: int | None = None
    axis: int = 0


class Site(NamedTuple):
    """One use of a weight by a primitive that has a rule."""

    equation: Equation
    place: int
    rule: Rule
    matrix: Matrix
    loops: tuple[Loop, ...]
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        """Return the name of the primitive."""
        return self.equation.primitive.name


class Uses(NamedTuple):
    """All uses of all parameters."""

    sites: dict[Path, Site]
    escaped: dict[int, set[str]]  # leaf → the primitives through which it escapes
    left: frozenset[int] = frozenset()  # leaves that escape because it is cheaper, see `_plan`


def find_uses(closed: ClosedJaxpr, leaves: int) -> Uses:
    """Walk a loss whose first `leaves` inputs are the parameters."""
    uses = Uses({}, {})
    known: list[Weight | None] = [None] * len(closed.jaxpr.invars)
    for index, variable in enumerate(closed.jaxpr.invars[:leaves]):
        known[index] = parameter(index, whole(shape_of(variable)))
    results = _walk(closed, known, (), (), uses)
    for result in results:
        _escape(result, "output", uses)
    return uses


def _escape(weight: Weight | None, name: str, uses: Uses) -> None:
    for leaf in weight.leaves if weight else ():
        uses.escaped.setdefault(leaf, set()).add(name)


def _walk(
    closed: ClosedJaxpr,
    inputs: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Find the uses in a program, some of whose inputs are weights; return which outputs are."""
    jaxpr = closed.jaxpr
    known: dict[Any, Weight] = {
        variable: constant(value)
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    known |= {v: w for v, w in zip(jaxpr.invars, inputs, strict=True) if w is not None}

    def read(atom: Any) -> Weight | None:
        return constant(atom.val) if is_literal(atom) else known.get(atom)

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
    """Find the uses in one equation; return which of its outputs are weights."""
    name = equation.primitive.name
    if is_transparent(equation, weights):
        return _walk(body(equation), weights, path, loops, uses)
    if is_derived(equation, weights):
        return [*derived(equation, [weight for weight in weights if weight is not None])]
    if not any(weight and weight.leaves for weight in weights):
        return _data(equation)
    if name in REMATERIALISED:
        results = _walk(body(equation), weights, path, loops, uses)
        return _as_data(results, name, uses)
    if name == "scan":
        return _walk_scan(equation, weights, path, loops, uses)
    if name == "cond":
        _escape(weights[0], name, uses)
        for number, branch in enumerate(equation.params["branches"]):
            results = _walk(branch, weights[1:], (*path, number), loops, uses)
            _as_data(results, name, uses)
        return _data(equation)
    site = _site(equation, weights, loops)
    if site is not None:
        uses.sites[path] = site
    else:
        for weight in weights:
            _escape(weight, name, uses)
    return _data(equation)


def is_transparent(equation: Equation, known: Sequence[Any]) -> bool:
    """Tell whether to look inside of a call: if it may hand out what does not depend on data."""
    inlined = equation.primitive.name in ("jit", "pjit", "closed_call", "core_call")
    return inlined and (not known or any(item is not None for item in known))


def is_derived(equation: Equation, known: Sequence[Any]) -> bool:
    """Tell whether an equation makes weights of weights, and JAX derived its backward pass.

    A `custom_vjp` need not be linear in its cotangent. Then the gradient of a weight that is used
    twice is not the sum of the gradients of its uses, and automatic differentiation has to add
    the cotangents first.
    """
    by_hand = has_custom_backward(equation)
    return all(item is not None for item in known) and not equation.effects and not by_hand


def _data(equation: Equation) -> list[Weight | None]:
    return [None] * len(equation.outvars)


def _as_data(results: Sequence[Weight | None], name: str, uses: Uses) -> list[Weight | None]:
    """Let every weight among the results escape: what leaves here is taken for data."""
    for result in results:
        _escape(result, name, uses)
    return [None] * len(results)


def _site(
    equation: Equation, weights: Sequence[Weight | None], loops: tuple[Loop, ...]
) -> Site | None:
    """Return the site if exactly one operand is a weight and a rule fits."""
    places = [place for place, weight in enumerate(weights) if weight and weight.leaves]
    rule = RULES.get(equation.primitive.name)
    if rule is None or len(places) != 1:
        return None
    place = places[0]
    matrix, weight = rule.matrix(equation, place), weights[place]
    if matrix is None or weight is None or not _is_real(equation, place, rule):
        return None
    return Site(equation, place, rule, matrix, loops, _pieces(weight, matrix, rule))


def _is_real(equation: Equation, place: int, rule: Rule) -> bool:
    """Tell whether all that enters the factors holds real numbers, at least one each."""
    kept = equation.invars[rule.kept(equation, place)]
    atoms: list[Any] = [
        equation.invars[place],
        equation.outvars[0],
        *([] if rule.units else [kept]),
    ]
    real = all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in atoms)
    return real and all(math.prod(shape_of(atom)) for atom in (*atoms, kept))


def _pieces(weight: Weight, matrix: Matrix, rule: Rule) -> tuple[Piece, ...]:
    """Take a concatenated weight apart, where the rule's factors can be cut accordingly."""
    if not weight.pieces or rule is not matmul:
        return (Piece(weight, matrix),)
    pieces, start = [], 0
    for part in weight.pieces:
        shape = tuple(size for size, _ in part.view.axes)  # type: ignore[union-attr]  # all are views
        cut = Matrix(shape, matrix.order, matrix.counts)
        if part.leaves:
            pieces.append(Piece(part, cut, start, weight.axis))
        start += shape[weight.axis]
    return tuple(pieces)


def scan_parts(equation: Equation, items: Sequence[Any]) -> tuple[Any, Any, Any]:
    """Split what enters a scan into constants, carry and slices."""
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
    return items[:consts], items[consts : consts + carry], items[consts + carry :]


def carried_unchanged(equation: Equation) -> list[bool]:
    """Tell for each carry of a scan whether every iteration hands it on as it came."""
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
    """Find the uses of weights in a scan: closed over, sliced, or carried along unchanged.

    A carry that changes is data, even where an iteration puts a weight into it: both the weight
    that it begins with and those that iterations hand on escape.
    """
    loop = Loop(len(loops), equation.params["length"])
    consts, carry, slices = scan_parts(equation, weights)
    unchanged = carried_unchanged(equation)
    inside = [w if same else None for w, same in zip(carry, unchanged, strict=True)]
    changed = [w for w, same in zip(carry, unchanged, strict=True) if not same]
    if loop.length:  # else the body is never run
        sliced = [None if weight is None else slice_of(weight, loop) for weight in slices]
        results = _walk(body(equation), [*consts, *inside, *sliced], path, (*loops, loop), uses)
        changed += [w for w, same in zip(results, unchanged, strict=False) if not same]
        changed += results[len(inside) :]
    _as_data(changed, "scan", uses)
    return [*inside, *_data(equation)[len(inside) :]]
