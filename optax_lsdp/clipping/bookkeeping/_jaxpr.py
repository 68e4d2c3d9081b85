"""The only door to jax.extend: a loss goes in, a program of equations to be walked comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.extend import core

Equation = core.JaxprEqn
Jaxpr = core.Jaxpr
ClosedJaxpr = core.ClosedJaxpr
Var = core.Var


class Program(NamedTuple):
    """The loss of one example as equations, and how its outputs are put together again.

    The first inputs of `closed` are the leaves of the parameters, the others those of the example.
    """

    closed: ClosedJaxpr
    outputs: Any  # the structure of (value, aux)


def trace(
    loss_fn: Callable[[optax.Params, Any], tuple[jax.Array, Any]],
    params: optax.Params,
    example: Any,
) -> Program:
    """Write `loss_fn` for one example down as equations."""
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, example)
    return Program(closed, jax.tree.structure(shapes))


def is_literal(atom: Any) -> bool:
    """Tell a constant that is written into an equation from a variable."""
    return isinstance(atom, core.Literal)


def evaluate(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Return the outputs of one equation."""
    primitive = equation.primitive
    with equation.ctx.manager, jax.named_scope(primitive.name):
        outputs = primitive.bind(*values, **primitive.get_bind_params(equation.params))
    return list(outputs) if primitive.multiple_results else [outputs]


def call(closed: ClosedJaxpr, values: Sequence[Any]) -> list[Any]:
    """Return the outputs of a whole program."""
    return core.jaxpr_as_fun(closed)(*values)


def equations(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Walk all equations, those inside of calls, loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from equations(inner)
