"""Batch normalisation: find it in a loss, and its running statistics among parameters.

A layer is known by the class or function that wrote an equation, which JAX keeps with it: so Flax,
Haiku, Equinox, Keras and classes of one's own are seen alike, and none of them is imported. Frozen
statistics (`use_running_average=True`) make a fixed map of one example, in which nothing is summed:
such a layer is not named.
"""

from __future__ import annotations

import os
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from itertools import dropwhile, takewhile
from typing import Any

import jax

from optax_lsdp._jaxpr import ClosedJaxpr, Equation, equations
from optax_lsdp._trees import path_name

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


def check_trained(params: Any) -> None:
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
