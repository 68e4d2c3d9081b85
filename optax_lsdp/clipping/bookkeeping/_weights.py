"""Describe weights: values that the loss computes from parameters and constants, not from data.

If a weight consists of entries of one parameter, as a transpose or a slice does, a NumPy view says
which ones. The viewed array has one byte per entry of the parameter, and is never read or written.
NumPy knows whether two views share memory, and so whether two uses share entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._jaxpr import Equation, dtype_of, evaluate, shape_of

Key = tuple[int, ...]  # the ids of an equation and of its operands

# Primitives that keep all entries in their places.
_KEEP_ENTRIES = {
    *("convert_element_type", "copy", "copy_p", "optimization_barrier", "pvary", "pcast"),
    "sharding_constraint",
}
_KEEP_ORDER = _KEEP_ENTRIES | {"reshape", "squeeze", "broadcast_in_dim"}  # in row-major order
_WORK = 10_000  # how far NumPy searches for an entry that two views share


class Loop(NamedTuple):
    """A scan: how many other scans surround it, and how many iterations it has."""

    depth: int
    length: int


class Weight(NamedTuple):
    """A value that is computed only from parameters and constants.

    Attributes:
        leaves: the indices of the leaves that the value depends on; empty for a constant.
        constant: the value of a constant.
        equation: the equation that has the weight as an output; None for constants and leaves.
        inputs: the operands of the equation.
        place: which output of the equation the weight is.
        sliced: the scans that slice the weight, the outermost first. Each of them adds a leading
            axis to `entries`, and to the value.
        entries: a view of the entries of the leaf that the value consists of, or None.
        pieces: if the value is a concatenation of views, the weight of each view; otherwise empty.
        axis: the axis along which `pieces` are concatenated.
    """

    leaves: frozenset[int]
    constant: jax.Array | None = None
    equation: Equation | None = None
    inputs: tuple[Weight, ...] = ()
    place: int = 0
    sliced: tuple[Loop, ...] = ()
    entries: np.ndarray | None = None
    pieces: tuple[Weight, ...] = ()
    axis: int = 0

    def value(self, leaves: Sequence[jax.Array], known: dict[Key, list[jax.Array]]) -> jax.Array:
        """Return the value if `leaves` are the parameters. `known` caches outputs of equations."""
        if self.constant is not None:
            return self.constant
        if self.equation is None:
            (index,) = self.leaves
            return leaves[index]
        key = id(self.equation), *map(id, self.inputs)
        if key not in known:
            operands = [weight.value(leaves, known) for weight in self.inputs]
            known[key] = self._run(self.equation, *operands)
        return known[key][self.place]

    def show(self, leaf: jax.Array) -> jax.Array:
        """Apply the view to `leaf`, and keep the dtype of the leaf."""
        if self.equation is None:
            return leaf
        before = self.inputs[0].show(leaf)
        is_cast = self.equation.primitive.name == "convert_element_type"
        return before if is_cast else self._run(self.equation, before)[0]

    def _run(self, equation: Equation, *operands: jax.Array) -> list[jax.Array]:
        """Return the outputs of the equation for all iterations of scans that slice operands."""
        run = partial(_evaluate, equation)
        for loop in reversed(_loops(self.inputs)):
            axes = tuple(0 if loop in weight.sliced else None for weight in self.inputs)
            run = jax.vmap(run, in_axes=axes)
        return run(*operands)


def _evaluate(equation: Equation, *values: jax.Array) -> list[jax.Array]:
    return evaluate(equation, values)


def _loops(inputs: Sequence[Weight]) -> tuple[Loop, ...]:
    """Return the scans that slice any of the weights, the outermost first."""
    return tuple(sorted({loop for weight in inputs for loop in weight.sliced}))


def parameter(index: int, shape: Sequence[int]) -> Weight:
    """Return the weight that is a whole leaf of the parameters."""
    entries = np.empty(shape, np.bool_)  # not written, so it takes no memory
    return Weight(frozenset([index]), entries=entries)


def derived(equation: Equation, inputs: Sequence[Weight]) -> list[Weight]:
    """Return the outputs of an equation whose inputs are all weights."""
    name, loops = equation.primitive.name, _loops(inputs)
    entries, pieces, axis = None, tuple[Weight, ...](), 0
    if len(inputs) == 1 and inputs[0].entries is not None:
        entries = _entries_after(equation, inputs[0].entries, len(loops))
    if name == "concatenate" and all(weight.entries is not None for weight in inputs):
        pieces, axis = tuple(inputs), equation.params["dimension"]
    elif name in _KEEP_ENTRIES and len(inputs) == 1:  # such as the cast of concatenated weights
        pieces, axis = inputs[0].pieces, inputs[0].axis
    weights = []
    for place, variable in enumerate(equation.outvars):
        is_real = jnp.issubdtype(dtype_of(variable), jnp.inexact)  # integers have no gradient
        has_gradient = is_real and name != "stop_gradient"
        leaves = frozenset(i for weight in inputs for i in weight.leaves if has_gradient)
        weights.append(
            Weight(leaves, None, equation, tuple(inputs), place, loops, entries, pieces, axis)
        )
    return weights


def _entries_after(equation: Equation, entries: np.ndarray, scans: int) -> np.ndarray | None:
    """Return the view of an equation's output, where `entries` is the view of its input.

    The first `scans` axes belong to scans. Return None if the output is not known to be a view.
    Outputs that repeat entries are no views, because mapping a gradient back through the repetition
    would change the gradient's norm.
    """
    name, params = equation.primitive.name, equation.params
    if name in _KEEP_ORDER and (name != "reshape" or params["dimensions"] is None):
        return reshaped(entries, (*entries.shape[:scans], *shape_of(equation.outvars[0])))
    if name == "transpose":
        moved = [scans + axis for axis in params["permutation"]]
        return entries.transpose([*range(scans), *moved])
    if name == "slice":
        steps = params["strides"] or (1,) * len(params["start_indices"])
        cuts = map(slice, params["start_indices"], params["limit_indices"], steps)
        return entries[(*[slice(None)] * scans, *cuts)]
    return None


def reshaped(entries: np.ndarray, shape: Sequence[int]) -> np.ndarray | None:
    """Return the view reshaped to `shape`, or None if the result is not a view."""
    if math.prod(shape) != entries.size:
        return None
    result = entries.reshape(shape)
    return result if np.may_share_memory(result, entries) else None  # NumPy copies if it must


def merged(axes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge neighbouring axes that form one longer axis. An axis is a pair (size, stride)."""
    result: list[tuple[int, int]] = []
    for size, stride in axes:
        if size == 1:
            continue
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        else:
            result.append((size, stride))
    return result


def are_disjoint(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two views certainly share no entry. False means that they may share one."""
    try:
        return not np.shares_memory(a, b, _WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        return False
