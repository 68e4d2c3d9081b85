"""The only door to jax.extend: programs of equations, and how to walk and evaluate them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, TypeGuard

import jax
from jax.extend import core

Equation = core.JaxprEqn
ClosedJaxpr = core.ClosedJaxpr

_BY_HAND = ("custom_vjp_call", "custom_vjp_call_jaxpr", "linear_call", "custom_transpose_call")
_LOOPS = ("scan", "while", "cond")


def equations_with_mapped_axes(
    jaxpr: core.Jaxpr, bound: frozenset[Any]
) -> Iterator[tuple[Equation, frozenset[Any]]]:
    """Walk all equations, with the axes that a shard_map or pmap around each of them maps over."""
    for equation in jaxpr.eqns:
        yield equation, bound
        axes: Any = equation.params.get("newly_manual_axes", equation.params.get("manual_axes", ()))
        if equation.primitive.name == "xla_pmap":
            axes = (equation.params["axis_name"],)
        if not equation.params.get("check_vma", True):
            axes = ()  # vmap may put other examples on axes that JAX does not track
        for inner in _programs(equation):
            yield from equations_with_mapped_axes(inner, bound | frozenset(axes))


def equations(jaxpr: core.Jaxpr) -> Iterator[Equation]:
    """Walk all equations, those inside of calls, loops and branches included."""
    return (equation for equation, _ in equations_with_mapped_axes(jaxpr, frozenset()))


def _programs(equation: Equation) -> Iterator[core.Jaxpr]:
    """Return the programs that an equation calls, loops over or chooses from."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, core.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, core.Jaxpr):
                yield inner


def has_custom_backward(equation: Equation) -> bool:
    """Tell whether a user wrote the backward pass of an equation, or of one inside of it."""
    if equation.primitive.name in _BY_HAND:
        return True
    return any(
        has_custom_backward(inner) for called in _programs(equation) for inner in called.eqns
    )


def constants(program: core.ClosedJaxpr) -> Iterator[Any]:
    """Return all arrays that a program closes over: JAX keeps them beside it or inside of it."""
    yield from program.consts
    for equation in equations(program.jaxpr):
        yield from (atom.val for atom in equation.invars if is_literal(atom))


def uses_inputs(program: core.ClosedJaxpr, count: int) -> bool:
    """Tell whether a program uses any of its first `count` inputs."""
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


def is_call(equation: Equation) -> bool:
    """Tell whether an equation is a call, whose operands are those of its body."""
    inner: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    jaxpr = getattr(inner, "jaxpr", inner)
    is_program = isinstance(jaxpr, core.Jaxpr) and equation.primitive.name not in _LOOPS
    return is_program and len(jaxpr.invars) == len(equation.invars)


def source_files(equation: Equation) -> list[str]:
    """Return the files of the calls that wrote an equation, the innermost first."""
    frames = getattr(equation.source_info.traceback, "frames", ())
    return [frame.file_name for frame in frames]


def describe_location(equation: Equation) -> str:
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
