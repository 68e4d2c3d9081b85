"""Check that a loss keeps its example to itself.

Engines map the loss of one example over a batch with `jax.vmap`. Ordinary primitives then cannot
let examples meet. The equations that could are looked for here, forward and backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from numbers import Integral
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._jaxpr import ClosedJaxpr, Equation, scoped, source_files
from optax_lsdp._shards import are_shards_tracked, manual_axes, varying_axes

ValueAndAux = Callable[[optax.Params, Any], tuple[jax.Array, Any]]

_ONE_AT_A_TIME = ("sequential", "sequential_unrolled")  # ways in which vmap maps a callback
_ONLY_RAISES = "equinox._errors"  # the module of callbacks that raise an error, or do nothing
_OPAQUE = ("debug_print", "ffi_call")  # and all callbacks: code that JAX cannot see through
# Libraries whose loops end when those of all examples have ended, without an effect on results.
_LOOPING = ("equinox", "diffrax", "lineax", "optimistix")
_HARMLESS = ("axis_index", "pvary", "pcast")
# Collects the names that a loss vouches for while it is traced. Losses are wrapped in other
# functions on their way to an engine, so an attribute of the loss would be lost.
_VOUCHED: ContextVar[set[str] | None] = ContextVar("vouched", default=None)


class Program(NamedTuple):
    """The loss of one example as equations, and how its outputs are put together again.

    The first inputs of `closed` are the leaves of the parameters, the others those of the example.
    """

    closed: ClosedJaxpr
    outputs: Any  # the structure of (value, aux)


def trace(loss_fn: ValueAndAux, params: optax.Params, example: Any) -> Program:
    """Trace `loss_fn` on one example; raise if an operation could mix examples under vmap."""
    whole = _axes_of_whole_examples(example)
    vouched: set[str] = set()
    token = _VOUCHED.set(vouched)
    try:
        closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, example)
        backward = jax.make_jaxpr(jax.value_and_grad(loss_fn, has_aux=True))(params, example)
    finally:
        _VOUCHED.reset(token)
    for jaxpr in (closed.jaxpr, backward.jaxpr):  # which alone has the custom derivatives
        for equation, bound in scoped(jaxpr, whole):
            _check_no_collective(equation, bound)
            _check_kept_inside(equation, vouched)
    return Program(closed, jax.tree.structure(shapes))


def vouch_for_callbacks(loss_fn: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Mark callbacks of a loss as safe: the caller asserts that they mix no examples.

    A callback that sees a whole batch could make one example's loss depend on another, and a
    callback with a side effect hands examples out. `clipped_grad` and `fit` therefore refuse all
    but those that JAX calls for one example at a time (`vmap_method="sequential"`), and those by
    which Equinox raises errors. The library does not check the assertion.

    Args:
        loss_fn: as in `clipped_grad` or `fit`.
        names: of functions that are called back, or of primitives, such as "debug_print".

    >>> def loss_fn(w, x):
    ...     jax.debug.print("w = {}", w)
    ...     return w * x
    >>> loss = vouch_for_callbacks(loss_fn, "debug_print")
    """

    @wraps(loss_fn)
    def vouched(*arguments: Any, **options: Any) -> Any:
        told = _VOUCHED.get()
        if told is not None:
            told.update(names)
        return loss_fn(*arguments, **options)

    return vouched


def _axes_of_whole_examples(example: Any) -> frozenset[str]:
    """Return the manual mesh axes on whose shards the same example is known to be."""
    return frozenset(manual_axes()) - varying_axes(example) if are_shards_tracked() else frozenset()


def is_split(loss_fn: ValueAndAux, params: optax.Params, example: Any) -> bool:
    """Tell whether shards that have the same example compute different parts of its loss.

    That is so if parameters are split over them, or if the loss asks for the shard's index. The
    gradient of one example is then the sum over shards, or is spread over them.
    """
    whole = _axes_of_whole_examples(example)
    if not whole:
        return False
    closed = jax.make_jaxpr(loss_fn)(params, example)
    atoms: list[Any] = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    for equation, bound in scoped(closed.jaxpr, frozenset()):
        atoms += [] if bound else equation.outvars
    return bool(varying_axes([atom.aval for atom in atoms]) & whole)


def _check_kept_inside(equation: Equation, vouched: set[str]) -> None:
    """Raise if an equation may see other examples under vmap, or hand this one out."""
    name = equation.primitive.name
    if name == "custom_vmap_call" and name not in vouched:
        raise ValueError(
            "`loss_fn` must keep each example to itself, got custom_vmap, whose rule may mix them; "
            'remove it, or vouch for it with vouch_for_callbacks(loss_fn, "'
            f'{name}").'
        )
    if name.startswith("unvmap_") and not _is_of_a_loop(equation) and name not in vouched:
        raise ValueError(
            f"`loss_fn` must keep each example to itself, got Equinox's {name}, which gives one "
            "value for all examples of a batch; remove it, or vouch for it with "
            f"vouch_for_callbacks(loss_fn, {name!r})."
        )
    if name not in _OPAQUE and "callback" not in name:
        return
    function = getattr(equation.params.get("callback"), "callback_func", None)
    function = getattr(function, "func", function)  # of functools.partial
    called = getattr(function, "__name__", equation.params.get("target_name", name))
    is_safe = (
        equation.params.get("vmap_method") in _ONE_AT_A_TIME
        or getattr(function, "__module__", None) == _ONLY_RAISES
        or {called, name} & vouched
    )
    if not is_safe:
        what = name if called == name else f"{name} of {called!r}"
        remedy = (
            "let JAX map it with vmap_method='sequential'"
            if name in ("pure_callback", "ffi_call")
            else f"remove {'jax.debug.print' if name == 'debug_print' else 'it'}"
        )
        raise ValueError(
            f"`loss_fn` must keep each example to itself, got {what}, which may mix examples or "
            f"hand them out; {remedy}, or vouch for it with vouch_for_callbacks(loss_fn, "
            f"{called!r})."
        )


def _is_of_a_loop(equation: Equation) -> bool:
    """Tell whether a library called `unvmap_*` for a loop or an error, and not the loss itself."""
    dtypes = [atom.aval.dtype for atom in cast("list[Any]", equation.invars)]
    callers = [file.split(os.sep) for file in source_files(equation)]
    callers = [file for file in callers if "jax" not in file and file[-1] != "_unvmap.py"]
    is_known = bool(callers) and any(library in callers[0] for library in _LOOPING)
    return is_known and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def _check_no_collective(equation: Equation, bound: frozenset[Any]) -> None:
    """Raise if an equation is a collective over an axis along which there are other examples.

    There are none along `bound` axes: those that the loss itself maps over, and those of
    shards that all have the same example.
    """
    name = equation.primitive.name
    outside = _axis_names(equation) - bound
    if outside and name not in _HARMLESS:
        raise ValueError(
            f"`loss_fn` must not look across the shards of a batch, got {name} over the axis "
            f"{sorted(map(str, outside))[0]!r}; add up the clipped sums instead."
        )


def _axis_names(equation: Equation) -> set[Any]:
    """Return the named axes, of a mesh or of vmap, that a collective is over."""
    named: Any = equation.params.get("axis_name", equation.params.get("axes"))
    each = named if isinstance(named, tuple | list | set | frozenset) else (named,)
    return {axis for axis in each if axis is not None and not isinstance(axis, Integral)}
