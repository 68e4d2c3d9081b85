"""Find the terms of each leaf's gradient: one term for every use of the leaf.

The terms are grouped into parts. All terms of a part cover the same entries of the leaf. Different
parts share no entry, so their squared norms add up. If two terms overlap but do not cover the same
entries, the leaf's gradient has to be formed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np
import optax

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._isolation import TracedLoss, ValueAndAux, trace_loss, warn_of_batch_norms
from optax_lsdp._jaxpr import shape_of
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._uses import Path, Piece, Use, Uses, find_uses
from optax_lsdp.clipping.bookkeeping._weights import are_disjoint, merged, reshaped

_LONG_LOOP = 8  # in loops, a leaf may keep operands of up to this many times its own size
_ENTRYWISE = {"add", "add_any", "sub", "mul", "div"}  # they apply biases, scales and positions


class Size(NamedTuple):
    """The axes of the factors a and g of one term, for one example and all iterations of scans."""

    blocks: int
    rows: int
    inputs: int
    outputs: int


class Term(NamedTuple):
    """One term of a leaf's gradient: the part that comes from one use of the leaf.

    Attributes:
        path: the path of the use.
        use: the use.
        piece: the piece of the use that depends on the leaf.
        is_transposed: whether inputs and outputs are swapped, compared with the first term of the
            same part.
    """

    path: Path
    use: Use
    piece: Piece
    is_transposed: bool = False

    @property
    def size(self) -> Size:
        """Return the lengths of the axes of the factors, for one example."""
        blocks, inputs, outputs = self.piece.matrix.shape
        whole_blocks, _, whole_outputs = self.use.matrix.shape
        entries = math.prod(shape_of(self.use.equation.outvars[0]))
        rows = entries // (whole_blocks * whole_outputs)
        for loop in self.use.loops:
            if loop in self.piece.weight.sliced:
                blocks *= loop.length
            else:
                rows *= loop.length
        return Size(blocks, rows, inputs, outputs)


@dataclass(frozen=True)
class ParameterLeaf:
    """A leaf of the parameters, and the terms of its gradient.

    Attributes:
        index: the index of the leaf.
        shape: its shape.
        terms: the terms that have a rule.
        parts: the same terms, grouped into parts. All terms of a part cover the same entries of the
            leaf, and different parts share no entry. None if the gradient has to be formed.
        primitives: the primitives that use the leaf.
        is_differentiated: whether automatic differentiation handles some uses of the leaf.
        has_rule: whether all uses have a rule, are entrywise, or are cheaper without a rule.
        pieces: the indices and terms of leaves that `join_concatenated` joined, otherwise empty.
    """

    index: int
    shape: tuple[int, ...]
    terms: tuple[Term, ...]
    parts: tuple[tuple[Term, ...], ...] | None
    primitives: tuple[str, ...]
    is_differentiated: bool
    has_rule: bool
    pieces: tuple[tuple[int, Term], ...] = ()

    @property
    def held(self) -> int:
        """Return how many floats the factors of all terms have for one example."""
        return sum(b * t * (p + q) for b, t, p, q in (term.size for term in self.terms))


class LossAnalysis(NamedTuple):
    """The uses in a loss that have a rule, and the leaves of the parameters with their terms."""

    uses: dict[Path, Use]
    leaves: list[ParameterLeaf]


def join_concatenated(analysis: LossAnalysis, groups: Sequence[ClipGroup]) -> list[ParameterLeaf]:
    """Join leaves that the loss concatenates, so that one product serves all of them.

    Leaves are joined if one use is the only use of each of them, the same scans slice them, and one
    clip norm bounds them all. The joined leaf has the index of its first member, and one term: the
    whole operand of the use.
    """
    joined, gone = dict[int, ParameterLeaf](), set[int]()
    for path, use in analysis.uses.items():
        found = [analysis.leaves[index] for index in sorted(use.leaves)]
        if len(found) != len(use.pieces) or len(found) == 1:
            continue
        are_single = all(len(leaf.terms) == 1 and leaf.parts for leaf in found)
        is_one_group = len({groups[leaf.index].path for leaf in found}) == 1
        entries = sum(math.prod(piece.matrix.split) for piece in use.pieces)
        is_whole = entries == math.prod(use.matrix.split)  # constants have no gradient
        # A matrix that a scan slices has one block per iteration; other matrices share their rows.
        are_alike = len({piece.weight.sliced for piece in use.pieces}) == 1
        if are_single and is_one_group and is_whole and are_alike:
            weight = use.pieces[0].weight._replace(leaves=use.leaves, entries=None)
            term = Term(path, use, Piece(weight, use.matrix))
            pieces = tuple((leaf.index, leaf.terms[0]) for leaf in found)
            joined[found[0].index] = replace(
                found[0], shape=use.matrix.split, terms=(term,), parts=((term,),), pieces=pieces
            )
            gone |= {leaf.index for leaf in found[1:]}
    return [joined.get(leaf.index, leaf) for leaf in analysis.leaves if leaf.index not in gone]


def analyse_loss(
    loss_fn: ValueAndAux, params: optax.Params, example: PyTree
) -> tuple[TracedLoss, LossAnalysis]:
    """Trace the loss of one example. Find all uses of parameters, and the terms of each leaf."""
    program = trace_loss(loss_fn, params, example)
    warn_of_batch_norms(program.closed)
    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    uses = find_uses(program.closed, len(shapes))
    for is_dear in (_is_in_long_loop, _is_formed_anyway):
        leaves = [_leaf(index, shape, uses) for index, shape in enumerate(shapes)]
        uses = _without(uses, {leaf.index for leaf in leaves if is_dear(leaf)})
    leaves = [_leaf(index, shape, uses) for index, shape in enumerate(shapes)]
    by_rule = {
        path: use._replace(is_mixed=not use.leaves.isdisjoint(uses.without_rule))
        for path, use in uses.by_rule.items()
    }
    return program, LossAnalysis(by_rule, leaves)


def _leaf(index: int, shape: tuple[int, ...], uses: Uses) -> ParameterLeaf:
    terms = [
        Term(path, use, piece)
        for path, use in uses.by_rule.items()
        for piece in use.pieces
        if index in piece.weight.leaves
    ]
    without_rule = uses.without_rule.get(index, set())
    names = tuple(
        dict.fromkeys([term.use.equation.primitive.name for term in terms] + sorted(without_rule))
    )
    parts = None if without_rule else _disjoint_parts(terms)
    is_entrywise = without_rule <= _ENTRYWISE and not terms
    has_rule = not without_rule or is_entrywise or index in uses.by_choice
    return ParameterLeaf(index, shape, tuple(terms), parts, names, bool(without_rule), has_rule)


def _is_in_long_loop(leaf: ParameterLeaf) -> bool:
    """Return whether a small leaf in long loops takes less memory without a rule.

    A use with a rule keeps the operands and cotangents of all iterations. Automatic differentiation
    adds up the leaf's gradient during the backward pass instead. If the loop is rematerialised,
    only this gradient stays in memory.
    """
    are_in_loops = all(term.use.loops for term in leaf.terms)
    return are_in_loops and leaf.held > _LONG_LOOP * math.prod(leaf.shape)


def _is_formed_anyway(leaf: ParameterLeaf) -> bool:
    """Return whether a leaf's gradient must be formed, best by automatic differentiation.

    For convolutions and in scans, one product of all patches or iterations is better.
    """
    has_product = any(term.use.loops or term.use.rule.expands for term in leaf.terms)
    return leaf.parts is None and not has_product


def _without(uses: Uses, chosen: set[int]) -> Uses:
    """Return the uses, but treat the chosen leaves as if they had no rule.

    A chosen leaf keeps its rules if it shares a use with a leaf that keeps its rules.
    """
    leaves_at = {path: use.leaves for path, use in uses.by_rule.items()}
    while mixed := {
        leaf for found in leaves_at.values() if not found <= chosen for leaf in found & chosen
    }:
        chosen = chosen - mixed
    without_rule = {leaf: set(names) for leaf, names in uses.without_rule.items()}
    by_rule = dict(uses.by_rule)
    for path, found in leaves_at.items():
        if found <= chosen:
            name = by_rule.pop(path).equation.primitive.name
            for leaf in found:
                without_rule.setdefault(leaf, set()).add(name)
    return Uses(by_rule, without_rule, uses.by_choice | (chosen - set(uses.without_rule)))


def _disjoint_parts(terms: Sequence[Term]) -> tuple[tuple[Term, ...], ...] | None:
    """Group the terms of a leaf into parts that share no entry. Return None if that fails.

    Within a part, all terms are matrices over the same entries, perhaps transposed.
    """
    parts: list[tuple[np.ndarray, list[list[tuple[int, int]]], list[Term]]] = []
    for term in terms:
        weight, matrix = term.piece.weight, term.piece.matrix
        stack = tuple(loop.length for loop in weight.sliced)
        whole = weight.entries
        split = None if whole is None else reshaped(whole, (*stack, *matrix.split))
        if whole is None or split is None:
            return None
        sizes = list(zip(split.shape, split.strides, strict=True))
        blocks, inputs, outputs = ([sizes[len(stack) + i] for i in axes] for axes in matrix[1:])
        # The order of blocks matters: a block of one term is paired with the block of equal index.
        frame = [merged([*sizes[: len(stack)], *blocks]), merged(inputs), merged(outputs)]
        for other, other_frame, members in parts:
            transposed = [frame[0], frame[2], frame[1]]
            is_same = whole.ctypes.data == other.ctypes.data  # the first entry
            if is_same and other_frame in (frame, transposed):
                members.append(term._replace(is_transposed=other_frame != frame))
                break
            if not are_disjoint(whole, other):
                return None
        else:
            parts.append((whole, frame, [term]))
    return tuple(tuple(members) for _, _, members in parts)
