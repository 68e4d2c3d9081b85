"""Refuse losses that can mix examples, and find layers that cannot be trained privately.

The engines map the loss of one example over a batch with `jax.vmap`. Under `vmap`, ordinary
primitives cannot mix examples, but callbacks, custom `vmap` rules and collectives can. `trace_loss`
traces a loss, forward and backward, and refuses losses that contain any of the three.

Batch normalisation needs the statistics of a batch, so it cannot be trained on one example at a
time. `batch_norms` finds it by name: JAX stores the call stack with each equation, and the stack
names the classes and functions of layers. So `batch_norms` finds layers of Flax, Haiku, Equinox and
Keras, and layers that users write, but imports none of these libraries. It looks for equations that
sum, because a layer with frozen statistics (`use_running_average=True`) sums nothing.
"""

import os
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from itertools import dropwhile, takewhile
from numbers import Integral
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._jaxpr import (
    Atom,
    ClosedJaxpr,
    Equation,
    MappedAxes,
    call_stack,
    contains,
    dtype_of,
    equations,
    equations_with_mapped_axes,
)
from optax_lsdp._mesh import are_shards_tracked, manual_axes, varying_axes
from optax_lsdp._trees import path_name
from optax_lsdp._types import PyTree

ValueAndAux = Callable[[optax.Params, PyTree], tuple[jax.Array, PyTree]]
_Function = TypeVar("_Function", bound=Callable[..., PyTree])

_ONE_AT_A_TIME = ("sequential", "sequential_unrolled")  # values of a callback's `vmap_method`
_RAISING_MODULE = "equinox._errors"  # callbacks of this module raise an error or do nothing
_OPAQUE = ("debug_print", "ffi_call")  # like callbacks, these primitives hide their code from JAX
# Under vmap, a loop of these libraries runs until the loops of all examples have ended. The extra
# iterations do not change an example's result.
_LOOP_LIBRARIES = ("equinox", "diffrax", "lineax", "optimistix")
_HARMLESS_COLLECTIVES = ("axis_index", "pvary", "pcast")
# While a loss is traced, this variable collects the names passed to `vouch_for_callbacks`. The
# names cannot be an attribute of the loss, because other functions wrap the loss before the trace.
_VOUCHED: ContextVar[set[str] | None] = ContextVar("vouched", default=None)

_BATCH_NORM = re.compile(
    r"(?:^|\.)((?:Sync|CrossReplica|Ghost|Virtual|My)?Batch_?Norm(?:ali[sz]ation)?(?:\d?[dD])?)"
    r"\.(?:__call__|call|forward|<locals>\.apply_fun)$|(?:^|\.)(batch_norm(?:ali[sz]ation)?)$"
)
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "psum", "psum_invariant")
_TRACING_FILES = ("source_info_util.py", "partial_eval.py", "core.py")  # where JAX adds equations
_CALLING_FILES = ("pjit.py", "traceback_util.py", "api.py")  # where JAX calls jitted functions
# Errors that a layer raises if it cannot change its statistics, or if it finds no batch axis.
_STATE_ERRORS = ("ModifyScopeVariableError", "NameError", "TraceContextError")
_LIBRARY_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("jax", "flax", "haiku", "equinox"))
_UNTRAINED_CLASSES = {  # by the module that defines them
    "flax.nnx": ("BatchStat", "Cache", "Intermediate", "Perturbation", "RngState"),
    "equinox": ("StateIndex",),
}


class TracedLoss(NamedTuple):
    """The jaxpr of the loss of one example, and the structure of its result."""

    closed: ClosedJaxpr  # its inputs are the leaves of the parameters, then those of the example
    outputs: jax.tree_util.PyTreeDef  # the structure of (value, aux)


def trace_loss(loss_fn: ValueAndAux, params: optax.Params, example: PyTree) -> TracedLoss:
    """Trace a loss on one example. Raise if an operation could mix or reveal examples."""
    replicated = _replicated_axes(example)
    vouched: set[str] = set()
    token = _VOUCHED.set(vouched)
    try:
        closed, shapes = jax.make_jaxpr(loss_fn, return_shape=True)(params, example)
        backward = jax.make_jaxpr(jax.value_and_grad(loss_fn, has_aux=True))(params, example)
    finally:
        _VOUCHED.reset(token)
    for jaxpr in (closed.jaxpr, backward.jaxpr):  # only `backward` contains custom derivatives
        for equation, mapped in equations_with_mapped_axes(jaxpr, replicated):
            _check_no_collective(equation, mapped)
            _check_no_leak(equation, vouched, is_forward=jaxpr is closed.jaxpr)
    return TracedLoss(closed, jax.tree.structure(shapes))


def vouch_for_callbacks(loss_fn: _Function, *names: str) -> _Function:
    """Mark callbacks of a loss as safe: you assert that they neither mix nor reveal examples.

    A callback that sees a whole batch could make one example's loss depend on another example. A
    callback with a side effect can reveal examples. `clipped_grad` and `fit` therefore refuse
    callbacks, except those that JAX calls for one example at a time (`vmap_method="sequential"`)
    and those that Equinox uses to raise errors. The library cannot check what you assert.

    Args:
        loss_fn: the loss that `clipped_grad` or `fit` refuses.
        names: the names of the callback functions, or of primitives such as "debug_print".

    >>> def loss_fn(w, x):
    ...     jax.debug.print("w = {}", w)
    ...     return w * x
    >>> loss = vouch_for_callbacks(loss_fn, "debug_print")
    """

    @wraps(loss_fn)
    def vouched(*arguments: PyTree, **options: PyTree) -> PyTree:
        collected = _VOUCHED.get()
        if collected is not None:
            collected.update(names)
        return loss_fn(*arguments, **options)

    return vouched  # type: ignore[return-value]  # has the signature of `loss_fn`


def is_example_split(loss_fn: ValueAndAux, params: optax.Params, example: PyTree) -> bool:
    """Return whether shards that hold the same example compute different parts of its loss.

    This happens if parameters are split over the shards, or if the loss reads the index of its
    shard. Each shard then has only a part, or a summand, of the example's gradient.
    """
    replicated = _replicated_axes(example)
    if not replicated:
        return False
    closed = jax.make_jaxpr(loss_fn)(params, example)
    atoms: list[Atom] = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    for equation, mapped in equations_with_mapped_axes(closed.jaxpr, frozenset()):
        atoms += [] if mapped else equation.outvars
    return bool(varying_axes([atom.aval for atom in atoms]) & replicated)


def _replicated_axes(example: PyTree) -> frozenset[str]:
    """Return the manual mesh axes over which all shards are known to hold the same example."""
    return frozenset(manual_axes()) - varying_axes(example) if are_shards_tracked() else frozenset()


def _check_no_leak(equation: Equation, vouched: set[str], *, is_forward: bool) -> None:
    """Raise if an equation may read other examples under vmap, or may reveal an example.

    On CPUs, XLA computes a batched convolution from pixels of other examples if the padding of an
    image axis is negative at the low end and positive at the high end. The gradient of a
    convolution has such padding if the convolution pads the low end by more than its window. In the
    loss itself, this function refuses all negative padding at the low end, because the gradient of
    a convolution with such padding may have the dangerous padding above.
    """
    name = equation.primitive.name
    for low, high in equation.params["padding"] if name == "conv_general_dilated" else ():
        if low < 0 and (is_forward or high > 0):
            where = "" if is_forward else " in its gradient"
            raise ValueError(
                "`loss_fn` must not crop the image of a convolution by negative padding, because "
                "XLA may then read pixels of other examples, got the padding "
                f"{(low, high)}{where}; crop or pad the image with jax.lax.pad before the "
                "convolution."
            )
    function = getattr(equation.params.get("callback"), "callback_func", None)
    function = getattr(function, "func", function)  # inside functools.partial
    called = getattr(function, "__name__", equation.params.get("target_name", name))
    sees_one_example = equation.params.get("vmap_method") in _ONE_AT_A_TIME
    only_raises = getattr(function, "__module__", None) == _RAISING_MODULE
    if {called, name} & vouched or sees_one_example or only_raises:
        return
    remedy = "remove it"
    if name == "custom_vmap_call":
        what = "custom_vmap, whose rule may mix examples"
    elif name.startswith("unvmap_") and not _is_loop_control(equation):
        what = f"Equinox's {name}, which computes one value from all examples of a batch"
    elif name in _OPAQUE or "callback" in name:
        of_what = "" if called == name else f" of {called!r}"
        what = f"{name}{of_what}, which may mix or reveal examples"
        if name in ("pure_callback", "ffi_call"):
            remedy = "pass vmap_method='sequential' to it"
        elif name == "debug_print":
            remedy = "remove jax.debug.print"
    else:
        return
    raise ValueError(
        f"`loss_fn` must neither mix nor reveal examples, got {what}; {remedy} or, if you "
        f"know that {called} does neither, wrap the loss in vouch_for_callbacks(loss_fn, "
        f"{called!r})."
    )


def _is_loop_control(equation: Equation) -> bool:
    """Return whether Equinox's `unvmap_*` is called to end a loop or to raise an error."""
    dtypes = [dtype_of(atom) for atom in equation.invars]
    callers = [frame.file_name.split(os.sep) for frame in call_stack(equation)]
    callers = [file for file in callers if "jax" not in file and file[-1] != "_unvmap.py"]
    is_known = bool(callers) and any(library in callers[0] for library in _LOOP_LIBRARIES)
    return is_known and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)


def _check_no_collective(equation: Equation, mapped: MappedAxes) -> None:
    """Raise if an equation is a collective over an axis along which examples differ.

    The axes in `mapped` are allowed: either the loss itself maps over the axis, or all shards along
    the axis hold the same example.
    """
    name = equation.primitive.name
    outside = _axis_names(equation) - mapped
    if outside and name not in _HARMLESS_COLLECTIVES:
        raise ValueError(
            f"`loss_fn` must not look across the shards of a batch, got {name} over the axis "
            f"{sorted(map(str, outside))[0]!r}; remove it from the loss, and add up the clipped "
            "sums instead."
        )


def _axis_names(equation: Equation) -> MappedAxes:
    """Return the names of the mesh or vmap axes that a collective runs over."""
    named = equation.params.get("axis_name", equation.params.get("axes"))
    each = named if isinstance(named, tuple | list | set | frozenset) else (named,)
    return frozenset(a for a in each if a is not None and not isinstance(a, Integral))


def batch_norm_sentence(layers: Sequence[str], demand: str = "must") -> str:
    """Return the error message for batch normalisation in a loss of one example."""
    return (
        f"`loss_fn` {demand} not use batch normalisation, which needs the statistics of a batch, "
        f"got {', '.join(layers)}; replace it by GroupNorm or LayerNorm, or freeze its statistics "
        "(use_running_average=True)."
    )


def batch_norms(program: ClosedJaxpr) -> list[str]:
    """Return the batch normalisation layers in a program, except layers with frozen statistics."""
    reductions = (e for e in equations(program.jaxpr) if contains(e, _REDUCTIONS))
    layers = dict.fromkeys(map(_batch_norm_of, reductions))  # a dict keeps the order
    return [layer for layer in layers if layer is not None]


def warn_of_batch_norms(program: ClosedJaxpr) -> None:
    """Warn if the loss of one example contains batch normalisation, which needs a whole batch."""
    layers = batch_norms(program)
    if layers:  # no error: privacy holds, because the layer sees no other example
        warnings.warn(batch_norm_sentence(layers, "should"), stacklevel=2)


def batch_norm_in_traceback(error: BaseException) -> str | None:
    """Return the batch normalisation layer that raised `error`, or None if no such layer did."""
    if type(error).__name__ not in _STATE_ERRORS:
        return None
    stack = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [(f.f_code.co_qualname, f.f_code.co_filename, f.f_lineno) for f in stack[::-1]]
    return _batch_norm_among(calls, "")


def _batch_norm_of(equation: Equation) -> str | None:
    """Return the batch normalisation layer that contains an equation, or None."""
    calls = [(f.function_name, f.file_name, f.line_num) for f in call_stack(equation)]
    calls = list(dropwhile(lambda call: os.path.basename(call[1]) in _TRACING_FILES, calls))
    calls = list(dropwhile(lambda call: os.path.basename(call[1]) in _CALLING_FILES, calls))
    # JAX traces a jitted function only once, so the calls around it may belong to another layer.
    own = takewhile(lambda call: os.path.basename(call[1]) != "pjit.py", calls)
    return _batch_norm_among(list(own), str(equation.source_info.name_stack))


def _batch_norm_among(calls: Sequence[tuple[str, str, int]], scopes: str) -> str | None:
    """Return the name and place of the innermost batch normalisation layer, or None.

    `calls` are (function, file, line), the innermost call first. `scopes` are JAX's named scopes.
    """
    for index, (function, _, _) in enumerate(calls):
        match = _BATCH_NORM.search(function)
        if match:
            name = match[1] or match[2]
            if scopes:
                return f"{name} ({scopes})"
            for _, file, line in calls[index + 1 :]:
                if not any(folder in file for folder in _LIBRARY_FOLDERS):
                    return f"{name} ({os.path.basename(file)}:{line})"
            return name
    return None


def check_no_layer_state(params: optax.Params) -> None:
    """Raise if `params` contains a layer's state, such as statistics of batch normalisation."""
    for path, leaf in jax.tree.leaves_with_path(params, is_leaf=_is_layer_state):
        got = f"{type(leaf).__name__} at {path_name(path)!r}"
        if "batch_stats" in path_name(path).split("/"):
            got, remedy = "'batch_stats'", "pass variables['params']"
        elif not _is_layer_state(leaf):
            continue
        elif "equinox" in type(leaf).__module__:
            remedy = "split it off by `model, state = eqx.nn.make_with_state(...)(...)`"
        else:
            remedy = "split it off by `graph, params, rest = nnx.split(model, nnx.Param, ...)`"
        raise ValueError(
            f"`params` must hold only trained parameters, got {got}, to which noise would be "
            f"added; {remedy}, and let the loss close over the rest."
        )


def _is_layer_state(node: object) -> bool:
    """Return whether a node is a variable of Flax NNX or Equinox whose arrays are not trained."""
    is_untrained = any(
        kind.__name__ in names and kind.__module__.startswith(module)
        for kind in type(node).__mro__
        for module, names in _UNTRAINED_CLASSES.items()
    )
    return is_untrained and bool(jax.tree.leaves(node))
