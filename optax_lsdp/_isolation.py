"""Check that a loss keeps its example to itself.

Engines map the loss of one example over a batch with `jax.vmap`. Ordinary primitives cannot mix
examples then. This module looks for the equations that can, forward and backward, and for batch
normalisation, which is meant to mix them.

A batch normalisation layer is recognised by the class or function that wrote an equation. JAX keeps
that name with the equation, so Flax, Haiku, Equinox, Keras and custom classes are treated alike,
and none of them is imported. A layer with frozen statistics (`use_running_average=True`) sums
nothing, so it is not reported.
"""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from itertools import dropwhile, takewhile
from numbers import Integral
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._jaxpr import (
    ClosedJaxpr,
    Equation,
    equations,
    equations_with_mapped_axes,
    source_files,
)
from optax_lsdp._mesh import are_shards_tracked, manual_axes, varying_axes
from optax_lsdp._trees import path_name

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


class TracedLoss(NamedTuple):
    """The loss of one example as equations, and how its outputs are put together again.

    The first inputs of `closed` are the leaves of the parameters, the others those of the example.
    """

    closed: ClosedJaxpr
    outputs: Any  # the structure of (value, aux)


def trace_loss(loss_fn: ValueAndAux, params: optax.Params, example: Any) -> TracedLoss:
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
        for equation, bound in equations_with_mapped_axes(jaxpr, whole):
            _check_no_collective(equation, bound)
            _check_kept_inside(equation, vouched)
    return TracedLoss(closed, jax.tree.structure(shapes))


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


def is_example_split(loss_fn: ValueAndAux, params: optax.Params, example: Any) -> bool:
    """Tell whether shards that have the same example compute different parts of its loss.

    That is so if parameters are split over them, or if the loss asks for the shard's index. The
    gradient of one example is then the sum over shards, or is spread over them.
    """
    whole = _axes_of_whole_examples(example)
    if not whole:
        return False
    closed = jax.make_jaxpr(loss_fn)(params, example)
    atoms: list[Any] = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    for equation, bound in equations_with_mapped_axes(closed.jaxpr, frozenset()):
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


_LAYER = re.compile(
    r"(?:^|\.)((?:Sync|CrossReplica|Ghost|Virtual|My)?Batch_?Norm(?:ali[sz]ation)?(?:\d?[dD])?)"
    r"\.(?:__call__|call|forward|<locals>\.apply_fun)$|(?:^|\.)(batch_norm(?:ali[sz]ation)?)$"
)
_SUMS = ("reduce_sum", "reduce_max", "reduce_min", "psum", "psum_invariant")
_BINDING = ("source_info_util.py", "partial_eval.py", "core.py")  # where an equation is written
_CALLING = ("pjit.py", "traceback_util.py", "api.py")  # where JAX calls what was jitted
_STATE_ERRORS = (  # of a layer that may not change its statistics, or finds no axis of a batch
    "ModifyScopeVariableError",
    "NameError",
    "TraceContextError",
)
_UNTRAINED = ("BatchStat", "Cache", "Intermediate", "Perturbation", "RngState")  # of flax.nnx
_LIBRARIES = tuple(f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "haiku", "equinox"))


def batch_norm_sentence(layers: Sequence[str], demand: str = "must") -> str:
    """Return what is wrong with a loss of one example that has such layers."""
    return (
        f"`loss_fn` {demand} normalise within one example, got batch normalisation in "
        f"{', '.join(layers)}: it would normalise each example by itself, and its running "
        "statistics never move; replace it by GroupNorm or LayerNorm, or freeze its statistics "
        "(use_running_average=True)."
    )


def batch_norms(program: ClosedJaxpr) -> list[str]:
    """Return the layers of a program that normalise by statistics of what they are given."""
    found: dict[str, None] = {}
    for equation in equations(program.jaxpr):
        layer = _layer(equation) if _adds_up(equation) else None
        if layer is not None:
            found[layer] = None
    return list(found)


def warn_of_batch_norms(program: ClosedJaxpr) -> None:
    """Warn that a loss of one example has batch normalisation, which breaks the model.

    Privacy holds all the same, since no other example is seen, so that this is no error.
    """
    layers = batch_norms(program)
    if layers:
        warnings.warn(batch_norm_sentence(layers, "should"), stacklevel=2)


def batch_norm_in_traceback(error: BaseException) -> str | None:
    """Return the layer of batch normalisation that could not count or look at a batch, if any."""
    if type(error).__name__ not in _STATE_ERRORS:
        return None
    stack = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [(f.f_code.co_qualname, f.f_code.co_filename, f.f_lineno) for f in stack[::-1]]
    return _named(calls, "")


def _layer(equation: Equation) -> str | None:
    """Return the layer that wrote an equation, if it is batch normalisation."""
    frames = getattr(equation.source_info.traceback, "frames", ())
    calls = [(frame.function_name, frame.file_name, frame.line_num) for frame in frames]
    calls = list(dropwhile(lambda call: os.path.basename(call[1]) in _BINDING, calls))
    calls = list(dropwhile(lambda call: os.path.basename(call[1]) in _CALLING, calls))
    # JAX traces a jitted function once: beyond its call is whoever called it first.
    own = takewhile(lambda call: os.path.basename(call[1]) != "pjit.py", calls)
    return _named(list(own), str(equation.source_info.name_stack))


def _named(calls: Sequence[tuple[str, str, int]], scopes: str) -> str | None:
    """Return the name of the layer and where it is, from the calls that led to it."""
    for index, (function, _, _) in enumerate(calls):
        match = _LAYER.search(function)
        if match:
            name = match[1] or match[2]
            if scopes:
                return f"{name} ({scopes})"
            for _, file, line in calls[index + 1 :]:
                if not any(library in file for library in _LIBRARIES):
                    return f"{name} ({os.path.basename(file)}:{line})"
            return name
    return None


def _adds_up(equation: Equation) -> bool:
    """Tell whether an equation, or what it calls, adds entries up."""
    if equation.primitive.name in _SUMS:
        return True
    inner = (getattr(value, "jaxpr", value) for value in equation.params.values())
    bodies = (jaxpr for jaxpr in inner if hasattr(jaxpr, "eqns"))
    return any(e.primitive.name in _SUMS for jaxpr in bodies for e in equations(jaxpr))


def check_no_layer_state(params: Any) -> None:
    """Raise if parameters hold what a layer counts, such as the statistics of batch norms.

    Everything in `params` is trained: it would get noise, and no gradient.
    """
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=_is_state):
        name = path_name(path)
        if _is_state(leaf):
            remedy = (
                "`model, state = eqx.nn.make_with_state(...)(...)` splits it off"
                if "equinox" in type(leaf).__module__
                else "`graph, params, rest = nnx.split(model, nnx.Param, ...)` splits it off"
            )
            _refuse(f"{type(leaf).__name__} at {name!r}", remedy)
        if "batch_stats" in name.split("/"):
            _refuse("'batch_stats' among it", "pass variables['params']")


def _refuse(what: str, remedy: str) -> None:
    raise ValueError(
        f"`params` must be what is trained, got {what}, which would get noise; {remedy}, and let "
        "the loss close over the rest."
    )


def _is_state(node: Any) -> bool:
    """Tell a variable of Flax NNX or Equinox that holds arrays which are not trained."""
    counts = any(name in _UNTRAINED for name in _kinds(node, "flax.nnx"))
    counts = counts or "StateIndex" in _kinds(node, "equinox")
    return counts and bool(jax.tree.leaves(node))


def _kinds(node: Any, library: str) -> Iterator[str]:
    return (kind.__name__ for kind in type(node).__mro__ if kind.__module__.startswith(library))
