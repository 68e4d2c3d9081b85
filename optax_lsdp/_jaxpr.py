"""The only door to jax.extend: a loss goes in, a program of equations to be walked comes out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, TypeGuard

import jax
import optax
from jax.extend import core

from optax_lsdp._shards import are_shards_tracked, manual_axes, varying_axes

Equation = core.JaxprEqn
ClosedJaxpr = core.ClosedJaxpr

Loss = Callable[[optax.Params, Any], tuple[jax.Array, Any]]

_OUTWARD = ("debug_print", "custom_vmap_call")  # and all callbacks
_LOOPS = ("scan", "while", "cond")
_HARMLESS = ("axis_index", "pvary", "pcast", "pbroadcast")


class Program(NamedTuple):
    """The loss of one example as equations, and how its outputs are put together again.

    The first inputs of `closed` are the leaves of the parameters, the others those of the example.
    """

    closed: ClosedJaxpr
    outputs: Any  # the structure of (value, aux)


def trace(loss_fn: Loss, params: optax.Params, example: Any) -> Program:
    """Write `loss_fn` for one example down as equations, and check that examples stay apart."""
    closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, example)
    axes = varying_axes(example) if are_shards_tracked() else set(manual_axes())
    backward = jax.make_jaxpr(jax.value_and_grad(loss_fn, has_aux=True))(params, example)
    for equation in (*_equations(closed.jaxpr), *_equations(backward.jaxpr)):
        _check_apart(equation, axes)  # custom derivatives are only seen in the backward pass
    return Program(closed, jax.tree.structure(shapes))


def _check_apart(equation: Equation, axes: set[str]) -> None:
    """Raise if an equation can see other examples, or hand this one out."""
    name = equation.primitive.name
    if name in _OUTWARD or "callback" in name:
        raise ValueError(
            f"`loss_fn` must keep each example to itself, got the primitive {name}, which may mix "
            "examples or hand them out; remove jax.debug.print, callbacks and custom_vmap from it."
        )
    named = equation.params.get("axis_name", equation.params.get("axes", ()))
    shared = axes & set([named] if isinstance(named, str) else named)
    if shared and name not in _HARMLESS:
        raise ValueError(
            f"`loss_fn` must not look across the shards of a batch, got {name} over the mesh axis "
            f"{sorted(shared)[0]!r}; add up the clipped sums instead."
        )


def _equations(jaxpr: core.Jaxpr) -> Iterator[Equation]:
    """Walk all equations, those inside of calls, loops and branches included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, core.ClosedJaxpr):
                    yield from _equations(inner.jaxpr)
                elif isinstance(inner, core.Jaxpr):
                    yield from _equations(inner)


def equations(jaxpr: core.Jaxpr) -> Iterator[Equation]:
    """Walk all equations of a program, those inside of calls, loops and branches included."""
    return _equations(jaxpr)


def constants(program: core.ClosedJaxpr) -> Iterator[Any]:
    """Return all arrays that a program closes over: JAX keeps them beside it or inside of it."""
    yield from program.consts
    for equation in _equations(program.jaxpr):
        yield from (atom.val for atom in equation.invars if is_literal(atom))


def uses_inputs(program: core.ClosedJaxpr, count: int) -> bool:
    """Tell whether a program uses any of its first inputs."""
    jaxpr = program.jaxpr
    atoms = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    used = {id(atom) for atom in atoms}
    return any(id(variable) in used for variable in jaxpr.invars[:count])


def is_literal(atom: Any) -> TypeGuard[core.Literal]:
    """Tell a constant that is written into an equation from a variable."""
    return isinstance(atom, core.Literal)


def shape_of(atom: Any) -> tuple[int, ...]:
    """Return the shape of a variable."""
    return atom.aval.shape


def evaluate(equation: Equation, values: Sequence[Any]) -> list[Any]:
    """Return the outputs of one equation."""
    primitive = equation.primitive
    with equation.ctx.manager, jax.named_scope(primitive.name):
        bound: Any = primitive.get_bind_params(equation.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)  # before jax 0.10
        outputs = primitive.bind(*functions, *values, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


def body(equation: Equation) -> ClosedJaxpr:
    """Return the program that an equation calls."""
    inner: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def calls(equation: Equation) -> bool:
    """Tell whether an equation is a call, whose operands are those of its body."""
    inner: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    jaxpr = getattr(inner, "jaxpr", inner)
    is_program = isinstance(jaxpr, core.Jaxpr) and equation.primitive.name not in _LOOPS
    return is_program and len(jaxpr.invars) == len(equation.invars)


def whereabouts(equation: Equation) -> str:
    """Say which layer an equation is in: the scopes of its module, or the line that wrote it."""
    scopes = str(equation.source_info.name_stack)
    if scopes:
        return scopes
    frames = getattr(equation.source_info.traceback, "frames", ())
    here = os.path.join(os.path.dirname(__file__), "")  # what called us is outside of the loss
    frames = takewhile(lambda frame: not frame.file_name.startswith(here), frames)
    own = [frame for frame in frames if f"{os.sep}jax{os.sep}" not in frame.file_name]
    layers = [frame for frame in own if frame.function_name.endswith("__call__")]
    for frame in (layers or own)[:1]:
        place = f"{os.path.basename(frame.file_name)}:{frame.line_num}"
        return f"{frame.function_name.removesuffix('.__call__')} ({place})"
    return equation.primitive.name
