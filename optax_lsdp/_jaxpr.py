"""Walk, evaluate and describe jaxprs.

Only this module imports `jax.extend`, so only this module has to follow changes in JAX's internals.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import takewhile
from typing import TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax.extend import core

from optax_lsdp._types import PyTree

Atom: TypeAlias = core.Var | core.Literal
ClosedJaxpr: TypeAlias = core.ClosedJaxpr
Equation: TypeAlias = core.JaxprEqn
MappedAxes: TypeAlias = frozenset[Hashable]

_CUSTOM = ("custom_vjp_call", "custom_vjp_call_jaxpr", "linear_call", "custom_transpose_call")
_CONTROL_FLOW = ("scan", "while", "cond")


def equations(jaxpr: core.Jaxpr) -> Iterator[Equation]:
    """Yield all equations, including those inside calls, loops and branches."""
    return (equation for equation, _ in equations_with_mapped_axes(jaxpr, frozenset()))


def equations_with_mapped_axes(
    jaxpr: core.Jaxpr, mapped: MappedAxes
) -> Iterator[tuple[Equation, MappedAxes]]:
    """Yield all equations, each with the mapped axes of all shard_maps and pmaps around it.

    `mapped` are the axes that are mapped around the whole program.
    """
    for equation in jaxpr.eqns:
        yield equation, mapped
        axes = equation.params.get("newly_manual_axes", equation.params.get("manual_axes", ()))
        if equation.primitive.name == "xla_pmap":
            axes = (equation.params["axis_name"],)
        if not equation.params.get("check_vma", True):
            axes = ()  # vmap may place other examples along axes that JAX does not track
        for inner in _inner_jaxprs(equation):
            yield from equations_with_mapped_axes(inner, mapped | frozenset(axes))


def _inner_jaxprs(equation: Equation) -> Iterator[core.Jaxpr]:
    """Yield the jaxprs inside an equation: called functions, bodies of loops, and branches."""
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, core.ClosedJaxpr):
                yield inner.jaxpr
            elif isinstance(inner, core.Jaxpr):
                yield inner


def contains(equation: Equation, names: Collection[str]) -> bool:
    """Return whether an equation is, or contains, a primitive with one of these names."""
    inner = (e for called in _inner_jaxprs(equation) for e in called.eqns)
    return equation.primitive.name in names or any(contains(e, names) for e in inner)


def has_custom_backward(equation: Equation) -> bool:
    """Return whether an equation is, or contains, a function with a custom backward pass."""
    return contains(equation, _CUSTOM)


def constants(program: ClosedJaxpr) -> Iterator[PyTree]:
    """Yield all constants of a program: arrays that it closes over, and literals in equations."""
    yield from program.consts
    for equation in equations(program.jaxpr):
        yield from (atom.val for atom in equation.invars if is_literal(atom))


def uses_inputs(program: ClosedJaxpr, count: int) -> bool:
    """Return whether a program uses any of its first `count` inputs."""
    jaxpr = program.jaxpr
    atoms = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    used = {id(atom) for atom in atoms}
    return any(id(variable) in used for variable in jaxpr.invars[:count])


def is_literal(atom: Atom) -> TypeGuard[core.Literal]:
    """Return whether an operand is a constant in the equation instead of a variable."""
    return isinstance(atom, core.Literal)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Return the shape of an operand."""
    return atom.aval.shape  # type: ignore[attr-defined]  # operands of a loss are arrays


def dtype_of(atom: Atom) -> jnp.dtype:
    """Return the dtype of an operand."""
    return atom.aval.dtype  # type: ignore[attr-defined]  # operands of a loss are arrays


def evaluate(equation: Equation, values: Sequence[jax.typing.ArrayLike]) -> list[jax.Array]:
    """Return the outputs of one equation for the values of its operands."""
    primitive = equation.primitive
    with equation.ctx.manager, jax.named_scope(primitive.name):
        # Before jax 0.10, `get_bind_params` returns a tuple.
        bound: PyTree = primitive.get_bind_params(equation.params)
        functions, params = bound if isinstance(bound, tuple) else ((), bound)
        outputs = primitive.bind(*functions, *values, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


def is_call(equation: Equation) -> bool:
    """Return whether an equation only calls one jaxpr, whose inputs are the operands."""
    inner = _called(equation)
    jaxpr = inner.jaxpr if isinstance(inner, core.ClosedJaxpr) else inner
    if not isinstance(jaxpr, core.Jaxpr) or equation.primitive.name in _CONTROL_FLOW:
        return False
    return len(jaxpr.invars) == len(equation.invars)


def body(equation: Equation) -> ClosedJaxpr:
    """Return the jaxpr that an equation calls."""
    inner = _called(equation)
    return inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())


def _called(equation: Equation) -> PyTree:
    return equation.params.get("jaxpr", equation.params.get("call_jaxpr"))


def call_stack(equation: Equation) -> Sequence[PyTree]:
    """Return the frames of the call stack that traced an equation, the innermost first."""
    return getattr(equation.source_info.traceback, "frames", ())


def describe_location(equation: Equation) -> str:
    """Return the named scopes of an equation or, if it has none, the function that traced it.

    If the function is unknown as well, return the name of the primitive.
    """
    scopes = str(equation.source_info.name_stack)
    if scopes:
        return scopes
    # Frames beyond the first frame of this library belong to code that called the library.
    package = os.path.join(os.path.dirname(__file__), "")
    frames = takewhile(lambda f: not f.file_name.startswith(package), call_stack(equation))
    own = [frame for frame in frames if f"{os.sep}jax{os.sep}" not in frame.file_name]
    layers = [frame for frame in own if frame.function_name.endswith("__call__")]
    for frame in (layers or own)[:1]:
        place = f"{os.path.basename(frame.file_name)}:{frame.line_num}"
        return f"{frame.function_name.removesuffix('.__call__')} ({place})"
    return equation.primitive.name
