"""Run one backward pass that records the operand and the cotangent of every use.

`_uses` defines what a use is. A *tap* is an array of zeros that is added to the output of a use.
The gradient with respect to the tap is the cotangent of the output. One backward pass with respect
to all taps therefore gives all cotangents. It forms no gradient of a parameter whose uses all have
rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._isolation import ValueAndAux
from optax_lsdp._jaxpr import ClosedJaxpr, Equation, body, evaluate, is_literal
from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._leaves import LossAnalysis, analyse_loss
from optax_lsdp.clipping.bookkeeping._uses import (
    REMATERIALISED,
    Path,
    Use,
    carried_unchanged,
    is_inlined,
    makes_weights,
    scan_parts,
)

Taps = Mapping[Path, jax.Array]  # zeros for the output of each use
Operands = dict[Path, jax.Array]  # data operands by `Use.operand`; the other operand is the weight


class Recorded(NamedTuple):
    """What one backward pass recorded. All arrays have a leading axis of examples.

    Attributes:
        operands: the data operands, by `Use.operand`; the other operand is the weight.
        cotangents: the cotangent of the output of each use.
        gradients: for each leaf that has uses without a rule, the gradient from these uses.
    """

    operands: Operands
    cotangents: dict[Path, jax.Array]
    gradients: dict[int, jax.Array]


def run_backward(
    loss_fn: ValueAndAux, params: optax.Params, batch: PyTree
) -> tuple[tuple[jax.Array, PyTree], Recorded, LossAnalysis]:
    """Return each example's (value, aux), the recorded arrays, and the analysis of the loss."""
    found: list[LossAnalysis] = []
    axes = varying_axes(batch)
    values = jax.tree.leaves(params)

    def backward(example: PyTree) -> tuple[tuple[jax.Array, PyTree], Recorded]:
        program, analysis = analyse_loss(loss_fn, params, example)
        found.append(analysis)
        taps = {path: _tap(use) for path, use in analysis.uses.items()}
        differentiated = {
            leaf.index: values[leaf.index] for leaf in analysis.leaves if leaf.is_differentiated
        }

        def tapped(
            taps: Taps, differentiated: Mapping[int, jax.Array]
        ) -> tuple[jax.Array, tuple[PyTree, Operands]]:
            inputs = [Value(differentiated.get(i, x), x) for i, x in enumerate(values)]
            inputs += map(Value, jax.tree.leaves(example))
            results, operands = _run(program.closed, inputs, analysis.uses, taps, ())
            value, aux = jax.tree.unflatten(program.outputs, [result.active for result in results])
            return value, (aux, operands)

        run = jax.value_and_grad(tapped, argnums=(0, 1), has_aux=True)
        (value, (aux, operands)), (cotangents, grads) = run(vary(taps, axes), differentiated)
        return (value, aux), Recorded(operands, cotangents, grads)

    outputs, recorded = jax.vmap(backward)(batch)
    return outputs, recorded, found[-1]


def _tap(use: Use) -> jax.Array:
    """Return zeros for the output of a use, with one leading axis for each scan around it."""
    output = cast("jax.ShapeDtypeStruct", use.equation.outvars[0].aval)
    return jnp.zeros((*(loop.length for loop in use.loops), *output.shape), output.dtype)


class Value(NamedTuple):
    """Two copies of a value: one to differentiate, and one that is constant.

    Uses with a rule take the constant copy of a weight, so that JAX forms no gradient of the
    weight.

    Attributes:
        active: the copy to differentiate.
        weight: the constant copy if the value is a weight, else None.
    """

    active: jax.Array
    weight: jax.Array | None = None


Uses = Mapping[Path, Use]
Results = tuple[list[Value], Operands]
Branch = Callable[[list[Value], Taps], tuple[list[jax.Array], Operands]]


def _run(
    closed: ClosedJaxpr, inputs: Sequence[Value], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Evaluate a jaxpr with taps. Return its outputs, and the data operand of each use."""
    jaxpr = closed.jaxpr
    operands: Operands = {}
    values: dict[object, Value] = {
        v: Value(c, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> Value:
        return Value(atom.val, atom.val) if is_literal(atom) else values[atom]

    for number, equation in enumerate(jaxpr.eqns):
        arguments = [read(atom) for atom in equation.invars]
        outputs, more = _run_equation(equation, arguments, uses, taps, (*path, number))
        values |= zip(equation.outvars, outputs, strict=True)
        operands |= more
    return [read(atom) for atom in jaxpr.outvars], operands


def _run_equation(
    equation: Equation, arguments: list[Value], uses: Uses, taps: Taps, path: Path
) -> Results:
    if path in uses:
        return _run_use(uses[path], arguments, taps[path])
    name = equation.primitive.name
    weights = [argument.weight for argument in arguments]
    if is_inlined(equation, weights):
        return _run(body(equation), arguments, uses, taps, path)
    if any(use[: len(path)] == path for use in uses):
        if name in REMATERIALISED:
            return _run_checkpoint(equation, arguments, uses, taps, path)
        run = _run_scan if name == "scan" else _run_cond
        return run(equation, arguments, uses, taps, path)
    outputs = evaluate(equation, [argument.active for argument in arguments])
    if makes_weights(equation, weights):
        is_constant = all(argument.active is argument.weight for argument in arguments)
        constants = outputs if is_constant else evaluate(equation, cast("list[jax.Array]", weights))
        return list(map(Value, outputs, constants)), {}
    results = list(map(Value, outputs))
    return _keep_weights(equation, arguments, results) if name == "scan" else results, {}


def _run_use(use: Use, arguments: list[Value], tap: jax.Array) -> Results:
    operands = [argument.active for argument in arguments]
    data = operands[1 - use.place]
    operands[use.place] = cast("jax.Array", arguments[use.place].weight)
    (output,) = evaluate(use.equation, operands)
    return [Value(output + tap)], {use.operand: data}  # uses of one operand record it once


def _taps_inside(path: Path, taps: Taps) -> Taps:
    """Return the taps of the uses inside the equation at `path`."""
    return {use: tap for use, tap in taps.items() if use[: len(path)] == path}


def _run_checkpoint(
    equation: Equation, arguments: list[Value], uses: Uses, taps: Taps, path: Path
) -> Results:
    def run(arguments: list[Value], taps: Taps) -> tuple[list[jax.Array], Operands]:
        outputs, operands = _run(body(equation), arguments, uses, taps, path)
        return [output.active for output in outputs], operands

    policy, prevent_cse = equation.params["policy"], equation.params["prevent_cse"]
    checkpointed = jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)
    outputs, operands = checkpointed(arguments, _taps_inside(path, taps))
    return list(map(Value, outputs)), operands


def _run_scan(
    equation: Equation, arguments: list[Value], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Run a scan that also slices the taps of its body, and stacks the operands of the uses."""
    consts, carry, slices = scan_parts(equation, arguments)
    unchanged = carried_unchanged(equation)
    same = [item.active is item.weight for item in slices]  # equal copies are sliced only once
    apart = [None if alike else item.weight for item, alike in zip(slices, same, strict=True)]

    def step(carried: list[jax.Array], sliced: PyTree) -> tuple[list[jax.Array], PyTree]:
        actives, weights, inner = sliced
        carries = [
            Value(active, item.weight if fixed else None)
            for active, item, fixed in zip(carried, carry, unchanged, strict=True)
        ]
        parts = [
            Value(active, active if alike else weight)
            for active, weight, alike in zip(actives, weights, same, strict=True)
        ]
        outputs, operands = _run(body(equation), [*consts, *carries, *parts], uses, inner, path)
        results = [output.active for output in outputs]
        return results[: len(carry)], (results[len(carry) :], operands)

    params = equation.params
    last, (stacked, operands) = jax.lax.scan(
        step,
        [item.active for item in carry],
        ([item.active for item in slices], apart, _taps_inside(path, taps)),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return _keep_weights(equation, arguments, list(map(Value, [*last, *stacked]))), operands


def _keep_weights(
    equation: Equation, arguments: Sequence[Value], results: list[Value]
) -> list[Value]:
    """Return the results of a scan, with a weight for each carry that the scan does not change."""
    _, carry, _ = scan_parts(equation, arguments)
    for place, unchanged in enumerate(carried_unchanged(equation)):
        if unchanged:
            results[place] = carry[place]
    return results


def _run_cond(
    equation: Equation, arguments: list[Value], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Run a cond. Uses in branches that are not taken record zeros, so their gradients are zero."""
    index, *rest = arguments

    def branch(number: int, closed: ClosedJaxpr) -> Branch:
        def run(arguments: list[Value], taps: Taps) -> tuple[list[jax.Array], Operands]:
            outputs, operands = _run(closed, arguments, uses, taps, (*path, number))
            return [output.active for output in outputs], operands

        return run

    branches = [branch(*item) for item in enumerate(equation.params["branches"])]
    inner = _taps_inside(path, taps)
    shapes: dict[Path, jax.ShapeDtypeStruct] = {}
    for run in branches:
        shapes |= jax.eval_shape(run, rest, inner)[1]

    def with_zeros(run: Branch) -> Branch:
        def padded(arguments: list[Value], taps: Taps) -> tuple[list[jax.Array], Operands]:
            outputs, found = run(arguments, taps)
            zeros = {p: jnp.zeros(s.shape, s.dtype) for p, s in shapes.items() if p not in found}
            return outputs, zeros | found

        return padded

    outputs, operands = jax.lax.switch(index.active, list(map(with_zeros, branches)), rest, inner)
    return list(map(Value, outputs)), operands
