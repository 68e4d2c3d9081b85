"""Choose a strategy for each parameter leaf, by cost, and explain the choice to users.

A strategy says how the engine computes the norms and the clipped sum of one leaf. The choice weighs
multiplications against memory traffic, with constants that were measured on a CPU. To add a
strategy for a different platform, or for one primitive such as convolutions, extend `_choose`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_function
from optax_lsdp._isolation import TracedLoss, ValueAndAux, trace_loss
from optax_lsdp._jaxpr import shape_of
from optax_lsdp._layers import check_no_layer_state, warn_of_batch_norms
from optax_lsdp._loss import call_loss, raise_explained, takes_key
from optax_lsdp._trees import check_floating, check_not_empty, path_name, wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._uses import Path, Piece, Use, Uses, find_uses
from optax_lsdp.clipping.bookkeeping._views import Axis, View, are_disjoint, merged

Kind = Literal["outer product", "Gram matrices", "materialised", "materialised, no rule", "unused"]
_COST_PER_FLOAT = 100  # multiplications per float stored and read back, on a CPU
_COST_PER_FLOAT_OF_PATCHES = 20  # lower: without stored gradients, patches are made twice
_LONG_LOOP = 8  # in loops, a leaf may keep operands of up to this many times its own size
_ENTRYWISE = {"add", "add_any", "sub", "mul", "div"}  # these apply biases, scales and positions


class Term(NamedTuple):
    """One term of a leaf's gradient, which is the sum over all uses of the leaf.

    Attributes:
        path: where the use is.
        piece: the index of the leaf's piece among the pieces of the use.
        is_transposed: whether inputs and outputs are swapped, compared with the first term of the
            same part.
    """

    path: Path
    piece: int = 0
    is_transposed: bool = False


class Strategy(NamedTuple):
    """How the engine handles one leaf.

    Attributes:
        kind: the name of the strategy; `LeafClipping` says what each name means.
        parts: the terms of the gradient, grouped into parts. If the gradient is materialised, each
            part is one term. Otherwise, all terms of a part cover the same entries of the leaf, and
            different parts share no entry.
        is_differentiated: whether automatic differentiation handles some uses of the leaf.
        primitives: the primitives that use the leaf.
        multiplications: how many multiplications the norm of one example takes.
        floats: how many floats the norm of one example stores.
    """

    kind: Kind
    parts: tuple[tuple[Term, ...], ...]
    is_differentiated: bool
    primitives: tuple[str, ...]
    multiplications: int
    floats: int

    @property
    def is_materialised(self) -> bool:
        """Return whether every example's gradient of the leaf is formed."""
        return self.kind in ("materialised", "materialised, no rule")


class LossAnalysis(NamedTuple):
    """The uses of parameters in a loss, and a strategy for each leaf.

    Attributes:
        uses: the uses that have a rule.
        strategies: the strategy of each leaf.
        leaves: the leaves of the parameters.
    """

    uses: dict[Path, Use]
    strategies: list[Strategy]
    leaves: list[jax.Array]


def analyse_loss(
    loss_fn: ValueAndAux, params: optax.Params, example: PyTree
) -> tuple[TracedLoss, LossAnalysis]:
    """Trace the loss of one example, find all uses of parameters, and choose strategies."""
    leaves = jax.tree.leaves(params)
    program = trace_loss(loss_fn, params, example)
    warn_of_batch_norms(program.closed)
    shapes = [leaf.shape for leaf in leaves]
    uses = without_long_loops(find_uses(program.closed, len(leaves)), shapes)
    strategies = [_choose(index, shape, uses) for index, shape in enumerate(shapes)]
    return program, LossAnalysis(uses.by_rule, strategies, leaves)


class Size(NamedTuple):
    """The size of the factors of one piece, for one example and all iterations of scans."""

    blocks: int
    rows: int
    inputs: int
    outputs: int


def piece_size(use: Use, piece: Piece) -> Size:
    """Return the size of the factors of one piece of a use for one example."""
    blocks, inputs, outputs = piece.matrix.shape
    whole_blocks, _, whole_outputs = use.matrix.shape
    entries = math.prod(shape_of(use.equation.outvars[0]))
    rows = entries // max(whole_blocks * whole_outputs, 1)
    sliced = {depth for depth, _ in piece.weight.sliced}
    for loop in use.loops:
        if loop.depth in sliced:
            blocks *= loop.length
        else:
            rows *= loop.length
    return Size(blocks, rows, inputs, outputs)


def without_long_loops(uses: Uses, shapes: Sequence[tuple[int, ...]]) -> Uses:
    """Return the uses, but treat small leaves in long loops as if they had no rule.

    A use with a rule keeps the operands and cotangents of all iterations. Automatic differentiation
    adds up the leaf's gradient during the backward pass instead. If the loop is rematerialised,
    only this gradient stays in memory.
    """
    held = dict.fromkeys(range(len(shapes)), 0.0)
    leaves_at: dict[Path, frozenset[int]] = {}
    for path, use in uses.by_rule.items():
        leaves_at[path] = frozenset[int]().union(*(piece.weight.leaves for piece in use.pieces))
        for piece in use.pieces:
            blocks, rows, inputs, outputs = piece_size(use, piece)
            kept = blocks * rows * (inputs + outputs) if use.loops else -math.inf
            for leaf in piece.weight.leaves:
                held[leaf] += kept
    small = {i for i, shape in enumerate(shapes) if held[i] > _LONG_LOOP * math.prod(shape)}
    while mixed := {i for found in leaves_at.values() if not found <= small for i in found & small}:
        small -= mixed  # a use that keeps its rule keeps the operands for all its leaves
    without_rule = {leaf: set(names) for leaf, names in uses.without_rule.items()}
    by_rule = dict(uses.by_rule)
    for path, found in leaves_at.items():
        if found <= small:
            name = by_rule.pop(path).name
            for leaf in found:
                without_rule.setdefault(leaf, set()).add(name)
    return Uses(by_rule, without_rule, frozenset(small - set(uses.without_rule)))


def _choose(index: int, shape: tuple[int, ...], uses: Uses) -> Strategy:
    """Return the strategy of one leaf: the cheapest one that its uses allow."""
    pieces = {
        Term(path, number): (use, piece)
        for path, use in uses.by_rule.items()
        for number, piece in enumerate(use.pieces)
        if index in piece.weight.leaves
    }
    without_rule = uses.without_rule.get(index, set())
    names = tuple(dict.fromkeys([use.name for use, _ in pieces.values()] + sorted(without_rule)))
    sizes = {term: piece_size(*piece) for term, piece in pieces.items()}
    floats = math.prod(shape)
    if not names:
        return Strategy("unused", (), False, names, 0, 0)
    parts = None if without_rule else _disjoint_parts(pieces)
    if parts is not None:
        keys = [[term._replace(is_transposed=False) for term in part] for part in parts]
        heights = [sum(sizes[term].rows for term in part) for part in keys]
        dense = [[(sizes[term], pieces[term][0].rule.is_one_hot) for term in part] for part in keys]
        multiplications = sum(map(_gram_multiplications, dense))
        held = sum(b * t * (p + q) for b, t, p, q in sizes.values())
        # The sum needs materialised gradients as well, but they have to be stored and read back.
        expands = any(use.rule.expands for use, _ in pieces.values())
        cost = _COST_PER_FLOAT_OF_PATCHES if expands else _COST_PER_FLOAT
        if multiplications <= cost * floats and floats > held:
            if max(heights) == 1:
                return Strategy("outer product", parts, False, names, multiplications, 0)
            blocks = [sizes[part[0]].blocks for part in keys]
            stored = sum(2 * b * t * t for b, t in zip(blocks, heights, strict=True))
            return Strategy("Gram matrices", parts, False, names, multiplications, stored)
    is_entrywise = without_rule <= _ENTRYWISE and not pieces
    has_rule = not without_rule or is_entrywise or index in uses.by_choice
    kind: Kind = "materialised" if has_rule else "materialised, no rule"
    singles = tuple((term,) for term in pieces)
    multiplications = sum(
        b * t * q * (1 if pieces[term][0].rule.is_one_hot else p)
        for term, (b, t, p, q) in sizes.items()
    )
    return Strategy(kind, singles, bool(without_rule), names, multiplications or floats, floats)


def _gram_multiplications(terms: Sequence[tuple[Size, bool]]) -> int:
    """Return how many multiplications a norm takes if the gradient is not materialised.

    Args:
        terms: for each term, its size and whether its rows a_t are one-hot. Inner products of
            one-hot rows take no multiplications.
    """
    total = 0
    for (size, one_hot), (other, other_one_hot) in combinations_with_replacement(terms, 2):
        pairs = size.rows * other.rows if size.rows > 1 or len(terms) > 1 else 1
        dense = size.inputs + size.outputs
        entries = min(size.outputs, other.outputs) if one_hot or other_one_hot else dense
        total += size.blocks * pairs * entries
    return total


def _disjoint_parts(
    pieces: Mapping[Term, tuple[Use, Piece]],
) -> tuple[tuple[Term, ...], ...] | None:
    """Group the terms of a leaf into parts that share no entry. Return None if that fails.

    Within a part, all terms are matrices over the same entries, perhaps transposed.
    """
    parts: list[tuple[View, list[list[Axis]], list[Term]]] = []
    for term, (_, piece) in pieces.items():
        weight = piece.weight
        views = None if weight.view is None else piece.matrix.views(weight.view)
        if weight.view is None or views is None:
            return None
        blocks, inputs, outputs = views
        stack = [axis for _, axis in weight.sliced]
        # The order of blocks matters: a block of one term is paired with the block of equal index.
        frame = [merged([*stack, *blocks.axes]), merged(inputs.axes), merged(outputs.axes)]
        entire = View((*stack, *weight.view.axes), weight.view.offset)
        for other, other_frame, members in parts:
            transposed = [frame[0], frame[2], frame[1]]
            if entire.offset == other.offset and other_frame in (frame, transposed):
                members.append(term._replace(is_transposed=other_frame != frame))
                break
            if not are_disjoint(entire, other):
                return None
        else:
            parts.append((entire, frame, [term]))
    return tuple(tuple(members) for _, _, members in parts)


_COLUMNS = ("parameter", "shape", "used by", "strategy", "multiplications", "bytes")


@dataclass(frozen=True)
class LeafClipping:
    """How the gradient norm of one parameter is computed, and what that costs for one example.

    Attributes:
        path: the path of the parameter in the tree.
        shape: the shape of the parameter.
        primitives: the primitives that use the parameter.
        strategy: "outer product" or "Gram matrices" if no example's gradient is formed;
            "materialised" if every example's gradient is formed, because that is cheaper;
            "materialised, no rule" if every example's gradient is formed, because some use of the
            parameter has no rule; "unused" if the loss does not depend on the parameter.
        multiplications: how many multiplications the norm takes. If the gradient is materialised,
            they cost nothing extra, because the sum needs them as well.
        bytes: the memory that the norm takes in addition to ordinary training.
    """

    path: str
    shape: tuple[int, ...]
    primitives: tuple[str, ...]
    strategy: Kind
    multiplications: int
    bytes: int


@dataclass(frozen=True)
class ClippingExplanation:
    """A table of costs for one example, with one row per parameter. Print it to see the table."""

    rows: tuple[LeafClipping, ...]

    def _cells(self) -> list[tuple[str, ...]]:
        cells = [
            (
                row.path or "(all)",
                "×".join(map(str, row.shape)) or "scalar",
                ", ".join(row.primitives) or "nothing",
                row.strategy,
                f"{row.multiplications:,}",
                f"{row.bytes:,}",
            )
            for row in self.rows
        ]
        sums = sum(row.multiplications for row in self.rows), sum(row.bytes for row in self.rows)
        return [*cells, ("total", "", "", "", *(f"{number:,}" for number in sums))]

    def __str__(self) -> str:
        table = [_COLUMNS, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        def line(cells: tuple[str, ...]) -> str:
            words = [cell.ljust(width) for cell, width in zip(cells[:4], widths[:4], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(cells[4:], widths[4:], strict=True)]
            return "  ".join([*words, *numbers]).rstrip()

        ruler = "  ".join("─" * width for width in widths)
        first, *middle, last = map(line, table)
        return "\n".join([first, ruler, *middle, ruler, last])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            sides = ["left"] * 4 + ["right"] * 2
            columns = (
                f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(columns)}</tr>"

        body = "".join(line("td", cells) for cells in self._cells())
        return f"<table><thead>{line('th', _COLUMNS)}</thead><tbody>{body}</tbody></table>"


def explain_clipping(
    loss_fn: Callable[..., PyTree], params: optax.Params, example: PyTree
) -> ClippingExplanation:
    """Return the strategy of each parameter and its cost, without running the loss.

    Let g be the cotangent of the product x @ w. If x is a single row, the gradient of w is x ⊗ g,
    whose norm is ‖x‖‖g‖. If x has T rows, the norm takes two Gram matrices of size T × T or the
    gradient itself, whichever is cheaper. Look for large numbers in the last columns, and for
    "materialised, no rule" on large parameters. For such a parameter, a primitive in the column
    "used by" has no rule, so automatic differentiation forms every example's gradient.

    Args:
        loss_fn: as in `clipped_grad`. It may take a key as a third argument, as in `fit`, and it
            may return (value, aux).
        params: the parameters, or their shapes and dtypes (`jax.eval_shape`).
        example: one example *without* batch axis, or its shapes and dtypes.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
    >>> params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
    >>> explain_clipping(loss, params, jnp.zeros(30))
    parameter  shape  used by      strategy       multiplications  bytes
    ─────────  ─────  ───────────  ─────────────  ───────────────  ─────
    b          20     add          materialised                20     80
    w          30×20  dot_general  outer product               50      0
    ─────────  ─────  ───────────  ─────────────  ───────────────  ─────
    total                                                      70     80
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_not_empty("params", params)
    check_no_layer_state(params)
    check_floating("params", params)
    keyed = takes_key(loss_fn)

    def value_and_aux(params: optax.Params, example: PyTree) -> tuple[jax.Array, PyTree]:
        try:
            output = call_loss(loss_fn, params, *(example if keyed else (example,)))
        except Exception as error:
            raise_explained(error, loss_fn, params, example[0] if keyed else example)
        value, aux = output if isinstance(output, tuple) else (output, None)
        if jnp.shape(value):
            raise ValueError(
                "`example` must be one example without batch axis, so that the loss is a scalar, "
                f"got a loss of shape {jnp.shape(value)}; pass one row of the batch."
            )
        return value, aux

    inputs = (example, jax.random.key(0)) if keyed else example
    _, analysis = analyse_loss(value_and_aux, params, inputs)
    leaves = jax.tree.leaves_with_path(params)
    rows = []
    for (path, leaf), strategy in zip(leaves, analysis.strategies, strict=True):
        kind, _, _, primitives, multiplications, floats = strategy
        size = floats * wide_dtype(leaf).itemsize
        row = LeafClipping(path_name(path), leaf.shape, primitives, kind, multiplications, size)
        rows.append(row)
    return ClippingExplanation(tuple(rows))
