"""Find layers that cannot be trained privately: batch normalisation, and layers with state.

Batch normalisation mixes examples. JAX stores the call stack with each equation, and this module
looks for the names of layer classes and functions on the call stack. So it finds layers of Flax,
Haiku, Equinox, Keras and custom layers without importing a library. A layer with frozen statistics
(`use_running_average=True`) computes no sum, so it is not reported.
"""

import os
import re
import traceback
import warnings
from collections.abc import Sequence
from itertools import dropwhile, takewhile

import jax
import optax

from optax_lsdp._jaxpr import ClosedJaxpr, Equation, call_stack, contains, equations
from optax_lsdp._trees import path_name

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


def batch_norm_sentence(layers: Sequence[str], demand: str = "must") -> str:
    """Return the error message for batch normalisation in a loss of one example."""
    return (
        f"`loss_fn` {demand} normalise within one example, got batch normalisation in "
        f"{', '.join(layers)}: it would normalise each example by itself, and its running "
        "statistics would never change; replace it by GroupNorm or LayerNorm, or freeze its "
        "statistics (use_running_average=True)."
    )


def batch_norms(program: ClosedJaxpr) -> list[str]:
    """Return the batch normalisation layers in a program, except layers with frozen statistics."""
    reductions = (e for e in equations(program.jaxpr) if contains(e, _REDUCTIONS))
    layers = dict.fromkeys(map(_batch_norm_of, reductions))  # a dict keeps the order
    return [layer for layer in layers if layer is not None]


def warn_of_batch_norms(program: ClosedJaxpr) -> None:
    """Warn if the loss of one example contains batch normalisation, which breaks the model."""
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
