"""Find every use of every parameter in the jaxpr of a loss.

A *weight* is a value that depends only on parameters and constants. A *use* is an equation that
combines a weight with data of an example, or looks up rows of a weight at constant indices. The
walk follows each parameter through all weights that depend on it. If the primitive of a use has a
rule, the walk records a `Use`. Otherwise it records that the leaves of the weight have a use
without a rule, and automatic differentiation handles this use. So the engine accounts for every
use, and a missing rule costs only time.

If a weight consists of entries of one parameter, as a transpose or a slice does, a NumPy view says
which entries they are. The viewed array has one byte per entry of the parameter, and is never read
or written. NumPy can tell whether two views share memory, and thus whether two uses share entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._jaxpr import (
    Atom,
    ClosedJaxpr,
    Equation,
    body,
    dtype_of,
    evaluate,
    has_custom_backward,
    is_literal,
    shape_of,
)
from optax_lsdp.clipping.bookkeeping._rules import RULES, Matrix, Rule

CALLS = ("jit", "pjit", "closed_call", "core_call")
REMATERIALISED = ("checkpoint", "remat", "remat2")
# Primitives that keep all entries in their places:
_KEEP_ENTRIES = {
    *("convert_element_type", "copy", "copy_p", "optimization_barrier", "pvary", "pcast"),
    "sharding_constraint",
}
# Primitives that keep all entries in row-major order:
_KEEP_ORDER = _KEEP_ENTRIES | {"reshape", "squeeze", "broadcast_in_dim"}
_WORK = 10_000  # limits how long NumPy searches for an entry that two views share

Path = tuple[int, ...]  # the indices of the calls around an equation, then the equation's own index
Item = TypeVar("Item")


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
        sliced: the scans that slice the weight, the outermost first. Each scan adds a leading axis
            to `entries`, and to the value.
        entries: a view that says which entries of a leaf the value consists of; None if unknown.
    """

    leaves: frozenset[int]
    constant: jax.Array | None = None
    equation: Equation | None = None
    inputs: tuple[Weight, ...] = ()
    place: int = 0
    sliced: tuple[Loop, ...] = ()
    entries: np.ndarray | None = None

    @property
    def pieces(self) -> tuple[Weight, ...]:
        """Return the weights that this weight concatenates, or () if one has no `entries`."""
        name = self.equation.primitive.name if self.equation else ""
        if name in _KEEP_ENTRIES:  # for example, a cast of concatenated weights
            return self.inputs[0].pieces
        are_views = name == "concatenate" and all(w.entries is not None for w in self.inputs)
        return self.inputs if are_views else ()

    def value(
        self, leaves: Mapping[int, jax.Array], known: dict[object, list[jax.Array]], casts: bool
    ) -> jax.Array:
        """Evaluate the weight for parameters `leaves`. `known` caches the outputs of equations.

        Without `casts`, conversions of dtype are skipped.
        """
        if self.constant is not None:
            return self.constant
        if self.equation is None:
            return leaves[min(self.leaves)]
        key = id(self.equation), *map(id, self.inputs)
        if key not in known:
            operands = [weight.value(leaves, known, casts) for weight in self.inputs]
            run = partial(_evaluate, self.equation)
            for loop in reversed(_loops(self.inputs)):  # all iterations at once
                axes = tuple(0 if loop in weight.sliced else None for weight in self.inputs)
                run = jax.vmap(run, in_axes=axes)
            is_skipped = not casts and self.equation.primitive.name == "convert_element_type"
            known[key] = operands if is_skipped else run(*operands)
        return known[key][self.place]


def _evaluate(equation: Equation, *values: jax.Array) -> list[jax.Array]:
    return evaluate(equation, values)


def _loops(inputs: Sequence[Weight]) -> tuple[Loop, ...]:
    """Return the scans that slice any of the weights `inputs`, the outermost first."""
    return tuple(sorted({loop for weight in inputs for loop in weight.sliced}))


def parameter(index: int, shape: Sequence[int]) -> Weight:
    """Return the weight that is a whole leaf of the parameters."""
    entries = np.empty(shape, np.bool_)  # not written, so it takes no memory
    return Weight(frozenset([index]), entries=entries)


def derived(equation: Equation, inputs: Sequence[Weight]) -> list[Weight]:
    """Return the outputs of an equation as weights. All its inputs are weights."""
    loops, entries = _loops(inputs), None
    if len(inputs) == 1 and inputs[0].entries is not None:
        entries = _entries_after(equation, inputs[0].entries, len(loops))
    weights = []
    for place, variable in enumerate(equation.outvars):
        is_real = jnp.issubdtype(dtype_of(variable), jnp.inexact)  # integers have no gradient
        has_gradient = is_real and equation.primitive.name != "stop_gradient"
        leaves = frozenset(i for weight in inputs for i in weight.leaves if has_gradient)
        weights.append(Weight(leaves, None, equation, tuple(inputs), place, loops, entries))
    return weights


def _entries_after(equation: Equation, entries: np.ndarray, scans: int) -> np.ndarray | None:
    """Return the view of an equation's output, where `entries` is the view of its input.

    The first `scans` axes belong to scans. Return None if the output is not known to be a view. An
    output that repeats entries counts as no view, because mapping a gradient back through the
    repetition would change the gradient's norm.
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
    return result if np.may_share_memory(result, entries) else None  # NumPy may have copied


def are_disjoint(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two views certainly share no entry. False means that they may share one."""
    try:
        return not np.shares_memory(a, b, _WORK)  # type: ignore[arg-type]  # any number will do
    except np.exceptions.TooHardError:
        return False


class Size(NamedTuple):
    """The axis lengths of a use's factors a and g, for one example and all scan iterations."""

    blocks: int
    rows: int
    inputs: int
    outputs: int


class Use(NamedTuple):
    """An equation that combines a weight with data, and whose primitive has a rule.

    Attributes:
        path: the place of the equation; see `Path`.
        equation: the equation.
        place: 0 if the weight is the first operand, 1 if it is the second.
        rule: the rule of the primitive.
        matrix: how to convert the weight to a matrix.
        loops: the scans around the equation, the outermost first.
        weight: the weight.
        operand: identifies the data operand: the path of the first use that has it.
        is_mixed: whether automatic differentiation handles other uses of the same leaves.
        is_transposed: whether this use multiplies by the transpose of the matrix by which the first
            use of the same entries multiplies.
    """

    path: Path
    equation: Equation
    place: int
    rule: Rule
    matrix: Matrix
    loops: tuple[Loop, ...]
    weight: Weight
    operand: Path
    is_mixed: bool = False
    is_transposed: bool = False

    @property
    def size(self) -> Size:
        """Return the lengths of the axes of the factors, for one example."""
        blocks, inputs, outputs = self.matrix.shape
        rows = math.prod(shape_of(self.equation.outvars[0])) // (blocks * outputs)
        for loop in self.loops:
            if loop in self.weight.sliced:
                blocks *= loop.length
            else:
                rows *= loop.length
        return Size(blocks, rows, inputs, outputs)


class Uses(NamedTuple):
    """All uses of all parameters.

    Attributes:
        by_rule: the uses that have a rule.
        without_rule: for each leaf with uses that have no rule, the primitives of these uses.
    """

    by_rule: dict[Path, Use]
    without_rule: dict[int, set[str]]

    def add_without_rule(self, weights: Sequence[Weight | None], primitive: str) -> None:
        """Record that a primitive without a rule uses `weights`."""
        for weight in weights:
            for leaf in weight.leaves if weight else ():
                self.without_rule.setdefault(leaf, set()).add(primitive)


def find_uses(closed: ClosedJaxpr, leaves: int) -> Uses:
    """Return all uses in a loss whose first `leaves` inputs are the parameters."""
    uses = Uses({}, {})
    inputs: list[Weight | None] = [None] * len(closed.jaxpr.invars)
    for index, variable in enumerate(closed.jaxpr.invars[:leaves]):
        inputs[index] = parameter(index, shape_of(variable))
    uses.add_without_rule(_walk(closed, inputs, (), (), uses), "output")
    return uses


def _walk(
    closed: ClosedJaxpr,
    inputs: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Record the uses in a jaxpr. Return each output as a weight, or None if it depends on data."""
    jaxpr = closed.jaxpr
    constants = [Weight(frozenset(), value) for value in closed.consts]
    known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        weights = [_read(atom, known) for atom in equation.invars]
        results = _walk_equation(equation, weights, (*path, number), loops, uses)
        known |= zip(equation.outvars, results, strict=True)
    return [_read(atom, known) for atom in jaxpr.outvars]


def _read(atom: Atom, known: Mapping[Atom, Weight | None]) -> Weight | None:
    return Weight(frozenset(), atom.val) if is_literal(atom) else known[atom]


def _walk_equation(
    equation: Equation,
    weights: list[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Record the uses in an equation. Return each output as a weight; None if it depends on data.

    If all inputs are weights, so are the outputs, with three exceptions: an equation with
    effects, a `custom_vjp`, and a lookup of rows at constant indices, such as positions in a text.
    The backward pass of a `custom_vjp` need not be linear in its cotangent. So automatic
    differentiation has to add up the cotangents from all uses of the output before it runs this
    backward pass. A lookup counts as a use, so that the engine needs the gradients of the selected
    rows only, and not the gradient of the whole table.
    """
    name = equation.primitive.name
    data: list[Weight | None] = [None] * len(equation.outvars)
    found = [weight for weight in weights if weight is not None]
    if name in CALLS and (found or not weights):  # the call may return weights
        return _walk(body(equation), weights, path, loops, uses)
    is_pure = not equation.effects and not has_custom_backward(equation)
    if is_pure and len(found) == len(weights):
        is_lookup = name == "gather" and _add_use(equation, weights, path, loops, uses)
        return data if is_lookup else [*derived(equation, found)]
    if not any(weight.leaves for weight in found):
        return data
    if name == "scan":
        return _walk_scan(equation, weights, path, loops, uses)
    if name in REMATERIALISED:
        uses.add_without_rule(_walk(body(equation), weights, path, loops, uses), name)
    elif name == "cond":
        uses.add_without_rule(weights[:1], name)
        for number, branch in enumerate(equation.params["branches"]):
            results = _walk(branch, weights[1:], (*path, number), loops, uses)
            uses.add_without_rule(results, name)
    elif not _add_use(equation, weights, path, loops, uses):
        uses.add_without_rule(weights, name)
    return data


def _add_use(
    equation: Equation,
    weights: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> bool:
    """Record an equation as a use if a rule applies. Return True if a rule applies, else False.

    A rule applies if the primitive has a rule that supports the equation, exactly one operand
    depends on parameters, no array is empty, and all arrays are real floating-point arrays. The
    indices of a one-hot rule may be integers.
    """
    places = [place for place, weight in enumerate(weights) if weight and weight.leaves]
    rule = RULES.get(equation.primitive.name)
    if rule is None or len(places) != 1:
        return False
    place = places[0]
    data, matrix = equation.invars[1 - place], rule.matrix(equation, place)
    arrays = [equation.invars[place], equation.outvars[0], data]
    floats = arrays[:2] if rule.is_one_hot else arrays
    are_real = all(jnp.issubdtype(dtype_of(array), jnp.floating) for array in floats)
    if matrix is None or not are_real or not all(math.prod(shape_of(x)) for x in arrays):
        return False
    same = (
        use.operand
        for use in uses.by_rule.values()
        if use.equation.invars[1 - use.place] is data and use.path[:-1] == path[:-1]
    )
    weight, operand = cast("Weight", weights[place]), next(same, path)
    uses.by_rule[path] = Use(path, equation, place, rule, matrix, loops, weight, operand)
    return True


def scan_parts(
    equation: Equation, items: Sequence[Item]
) -> tuple[Sequence[Item], Sequence[Item], Sequence[Item]]:
    """Split `items`, one per operand of a scan, into those of constants, carries and slices."""
    consts, carry = equation.params["num_consts"], equation.params["num_carry"]
    return items[:consts], items[consts : consts + carry], items[consts + carry :]


def carried_unchanged(equation: Equation) -> list[bool]:
    """Return for each carry of a scan whether every iteration returns the carry unchanged."""
    jaxpr = equation.params["jaxpr"].jaxpr
    _, carry, _ = scan_parts(equation, jaxpr.invars)
    return [a is b for a, b in zip(carry, jaxpr.outvars[: len(carry)], strict=True)]


def _walk_scan(
    equation: Equation,
    weights: Sequence[Weight | None],
    path: Path,
    loops: tuple[Loop, ...],
    uses: Uses,
) -> list[Weight | None]:
    """Record the uses of weights that a scan closes over, slices, or carries unchanged.

    A carry that changes counts as data, even if an iteration puts a weight into it. If a weight
    becomes such a carry, or if iterations return it as a slice, this is a use without a rule.
    """
    loop = Loop(len(loops), equation.params["length"])
    consts, carry, slices = scan_parts(equation, weights)
    unchanged = carried_unchanged(equation)
    inside = [w if same else None for w, same in zip(carry, unchanged, strict=True)]
    changed = [w for w, same in zip(carry, unchanged, strict=True) if not same]
    if loop.length:  # a scan of length 0 never runs its body
        sliced = [w and w._replace(sliced=(*w.sliced, loop)) for w in slices]
        results = _walk(body(equation), [*consts, *inside, *sliced], path, (*loops, loop), uses)
        changed += [w for w, same in zip(results, unchanged, strict=False) if not same]
        changed += results[len(inside) :]
    uses.add_without_rule(changed, "scan")
    return inside + [None] * (len(equation.outvars) - len(inside))
