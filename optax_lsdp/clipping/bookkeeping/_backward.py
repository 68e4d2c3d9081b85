"""Run one backward pass that records the operand and the cotangent of every use.

`_uses` defines what a use is. A *tap* is an array of zeros that is added to the output of a use.
The gradient with respect to the tap is the cotangent of the output. One backward pass with respect
to all taps therefore gives all cotangents. It forms no gradient of a parameter whose uses all have
rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._jaxpr import Atom, ClosedJaxpr, Equation, body, evaluate, is_literal
from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._strategy import LossAnalysis
from optax_lsdp.clipping.bookkeeping._uses import (
    CALLS,
    REMATERIALISED,
    Path,
    Use,
    carried_unchanged,
    scan_parts,
)

Uses = Mapping[Path, Use]
Taps = Mapping[Path, jax.Array]  # zeros for the output of each use
Operands = dict[Path, jax.Array]  # the data operand of each use, by `Use.operand`


class Recorded(NamedTuple):
    """What one backward pass recorded. All arrays have a leading axis of examples.

    Attributes:
        operands: the data operands, by `Use.operand`. The other operand of a use is its weight.
        cotangents: the cotangent of the output of each use.
        gradients: for each leaf with uses that have no rule, the gradient from those uses.
    """

    operands: Operands
    cotangents: dict[Path, jax.Array]
    gradients: dict[int, jax.Array]


def run_backward(
    analysis: LossAnalysis, params: optax.Params, batch: PyTree
) -> tuple[tuple[jax.Array, PyTree], Recorded]:
    """Return each example's (value, aux), and the recorded arrays."""
    values = jax.tree.leaves(params)
    taps = vary({path: _tap(use) for path, use in analysis.uses.items()}, varying_axes(batch))
    differentiated = {
        i: values[i] for leaf in analysis.leaves if leaf.is_differentiated for i in leaf.indices
    }
    run = jax.value_and_grad(partial(_run_loss, analysis, values), argnums=(0, 1), has_aux=True)
    results = jax.vmap(run, in_axes=(None, None, 0))(taps, differentiated, batch)
    (value, (aux, operands)), (cotangents, gradients) = results
    return (value, aux), Recorded(operands, cotangents, gradients)


def _tap(use: Use) -> jax.Array:
    """Return zeros for the output of a use, with one leading axis for each scan around it."""
    output = cast("jax.ShapeDtypeStruct", use.equation.outvars[0].aval)
    return jnp.zeros((*(loop.length for loop in use.loops), *output.shape), output.dtype)


def _run_loss(
    analysis: LossAnalysis,
    values: Sequence[jax.Array],
    taps: Taps,
    differentiated: Mapping[int, jax.Array],
    example: PyTree,
) -> tuple[jax.Array, tuple[PyTree, Operands]]:
    """Return the loss of one example, and its aux with the operands of all uses."""
    inputs = [differentiated.get(i, x) for i, x in enumerate(values)] + jax.tree.leaves(example)
    results, operands = _run(analysis.program.closed, inputs, analysis.uses, taps, ())
    value, aux = jax.tree.unflatten(analysis.program.outputs, results)
    return value, (aux, operands)


Results = tuple[list[jax.Array], Operands]


def _run(
    closed: ClosedJaxpr, inputs: Sequence[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Evaluate a jaxpr with taps. Return its outputs, and the data operand of each use."""
    jaxpr, operands = closed.jaxpr, Operands()
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        place, arguments = (*path, number), [_read(atom, values) for atom in equation.invars]
        run = _RUN.get(equation.primitive.name)
        inside = {p: tap for p, tap in taps.items() if run and p[: len(place)] == place}
        if place in uses:
            outputs, more = _run_use(uses[place], arguments, taps[place])
        elif run and inside:
            outputs, more = run(equation, arguments, uses, inside, place)
        else:
            outputs, more = evaluate(equation, arguments), {}
        values |= zip(equation.outvars, outputs, strict=True)
        operands |= more
    return [_read(atom, values) for atom in jaxpr.outvars], operands


def _read(atom: Atom, values: Mapping[Atom, jax.Array]) -> jax.Array:
    return atom.val if is_literal(atom) else values[atom]


def _run_use(use: Use, arguments: list[jax.Array], tap: jax.Array) -> Results:
    """Run a use with its weight as a constant, so that JAX forms no gradient of the weight."""
    data = arguments[1 - use.place]
    if use.is_mixed:  # other weights are constants already, and scans do not store them again
        arguments[use.place] = jax.lax.stop_gradient(arguments[use.place])
    (output,) = evaluate(use.equation, arguments)
    return [output + tap], {use.operand: data}  # uses that share an operand record it once


def _run_call(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Run a call as if it were inlined."""
    return _run(body(equation), arguments, uses, taps, path)


def _run_checkpoint(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    def run(arguments: list[jax.Array], taps: Taps) -> Results:
        return _run(body(equation), arguments, uses, taps, path)

    policy, prevent_cse = equation.params["policy"], equation.params["prevent_cse"]
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(arguments, taps)


def _run_scan(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Run a scan that also slices the taps of its body, and stacks the operands of the uses."""
    consts, carry, slices = scan_parts(equation, arguments)
    unchanged = carried_unchanged(equation)

    def step(carried: Sequence[jax.Array], sliced: PyTree) -> tuple[Sequence[jax.Array], PyTree]:
        # JAX would store a weight in a carry once per iteration, and a constant only once.
        fixed = [a if same else b for a, b, same in zip(carry, carried, unchanged, strict=True)]
        outputs, operands = _run(
            body(equation), [*consts, *fixed, *sliced[0]], uses, sliced[1], path
        )
        return outputs[: len(carry)], (outputs[len(carry) :], operands)

    params = equation.params
    last, (stacked, operands) = jax.lax.scan(
        step,
        carry,
        (slices, taps),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *stacked], operands


def _run_cond(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Run a cond. Uses in branches that are not taken record zeros, so their gradients are zero."""
    index, *rest = arguments

    def run(number: int, shapes: Operands, arguments: list[jax.Array], taps: Taps) -> Results:
        branch = equation.params["branches"][number]
        outputs, operands = _run(branch, arguments, uses, taps, (*path, number))
        zeros = {p: jnp.zeros(s.shape, s.dtype) for p, s in shapes.items() if p not in operands}
        return outputs, zeros | operands

    shapes = Operands()
    for number in range(len(equation.params["branches"])):
        shapes |= jax.eval_shape(partial(run, number, {}), rest, taps)[1]
    branches = [partial(run, number, shapes) for number in range(len(equation.params["branches"]))]
    return jax.lax.switch(index, branches, rest, taps)


_RUN = {"scan": _run_scan, "cond": _run_cond}
_RUN |= dict.fromkeys(CALLS, _run_call) | dict.fromkeys(REMATERIALISED, _run_checkpoint)
