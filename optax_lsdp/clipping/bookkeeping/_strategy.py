"""Choose a strategy for each parameter leaf: the cheapest one on a kind of device.

A strategy says how the engine computes the norms and the clipped sum of one leaf. A cost is the
number of multiplications for one example, beyond those of ordinary training. Memory traffic is
converted to multiplications, at the rate of the device. To add a strategy, write its cost here, and
its bound and its sum in `strategies`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

import jax
import numpy as np
import optax

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._isolation import TracedLoss, ValueAndAux, trace_loss, warn_of_batch_norms
from optax_lsdp._jaxpr import shape_of
from optax_lsdp._trees import wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping._rules import CONVOLUTION, movements
from optax_lsdp.clipping.bookkeeping._uses import Path, Use, are_disjoint, find_uses, reshaped

_LONG_LOOP = 8  # in scans, factors may take up to this many times the memory of the leaf
_ENTRYWISE = {"add", "add_any", "sub", "mul", "div"}  # how losses use biases and scales
# Costs in multiplications of a TPU's matrix unit, from the cost model of its compiler:
_ADDING = 100  # to add an entry to a Gram matrix
_SQUARING = 300  # to square an entry without storing it
_MOVING = 600  # to change the layout of an entry
_MOST_OFFSETS = 64  # of a window; the program has one product per offset

Kind = Literal[
    "outer product",
    "Gram matrices",
    "Gram matrices of patches",
    "by offset",
    "by patches",
    "materialised",
    "materialised, no rule",
    "unused",
]


@dataclass(frozen=True)
class ParameterLeaf:
    """A leaf of the parameters, or several leaves that the loss concatenates, with all uses.

    The gradient is a sum with one term for each use. The terms are grouped into parts. All terms of
    a part cover the same entries. Different parts share no entry, so the squared norms of the parts
    add up.

    Attributes:
        indices: the index of the leaf, or the indices of the concatenated leaves.
        entries: how many entries these leaves have together.
        uses: the uses that the engine handles by rules.
        parts: `uses`, grouped into parts. None if automatic differentiation handles a use, or if
            the uses form no such parts. If None, the gradient of each example has to be formed.
        primitives: the primitives of all uses.
        is_differentiated: whether automatic differentiation handles some uses of the leaf.
        has_rule: whether every use has a rule, even if automatic differentiation handles a use
            because that is cheaper. Also True if every use is entrywise, such as adding a bias,
            because a rule would then save nothing. If False, the engine forms the gradients, and
            calls this strategy "materialised, no rule" instead of "materialised".
    """

    indices: tuple[int, ...]
    entries: int
    uses: tuple[Use, ...]
    parts: tuple[tuple[Use, ...], ...] | None
    primitives: tuple[str, ...]
    is_differentiated: bool
    has_rule: bool

    @property
    def held(self) -> int:
        """Return how many floats the factors of all uses hold for one example."""
        return sum(b * t * (p + q) for b, t, p, q in (use.size for use in self.uses))

    @property
    def is_cheaper_without_rule(self) -> bool:
        """Return whether automatic differentiation should handle the leaf. It should in two cases.

        1. All uses are in scans, and their factors take much more memory than the leaf. The rules
           need the operands and cotangents of all iterations. Automatic differentiation adds up the
           gradient during the backward pass instead. If the loop is rematerialised, only this
           gradient stays in memory.
        2. The gradient has to be formed, and no use is a convolution or in a scan. For convolutions
           and scans, one product over all patches or iterations is faster.
        """
        is_in_long_loop = self.held > _LONG_LOOP * self.entries
        has_product = any(use.loops or use.rule.expands for use in self.uses)
        in_loops = all(use.loops for use in self.uses)
        return (in_loops and is_in_long_loop) or (self.parts is None and not has_product)


class LossAnalysis(NamedTuple):
    """The traced loss of one example, the uses that rules handle, and all leaves."""

    program: TracedLoss
    uses: dict[Path, Use]
    leaves: list[ParameterLeaf]


def analyse_loss(
    loss_fn: ValueAndAux, params: optax.Params, example: PyTree, groups: Sequence[ClipGroup]
) -> LossAnalysis:
    """Trace the loss of one example, and find all uses of all leaves.

    This function treats leaves that the loss concatenates as one leaf, under these conditions: the
    concatenation has one use, which has a rule; the leaves have no other use; the leaves have the
    same precision; the same scans slice them; and they belong to one group of clip norms.
    """
    program = trace_loss(loss_fn, params, example)
    warn_of_batch_norms(program.closed)
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(params)]
    dtypes = [wide_dtype(leaf) for leaf in jax.tree.leaves(params)]
    found = find_uses(program.closed, len(sizes))
    by_rule, without_rule, leaves = dict[Path, Use](), found.without_rule, list[ParameterLeaf]()
    for indices, uses in _components(found.by_rule.values(), len(sizes)):
        alike = len({dtypes[index] for index in indices}) == 1
        joined = alike and _is_joined(indices, uses, groups) and not indices & without_rule.keys()
        units = [tuple(sorted(indices))] if joined else [(index,) for index in sorted(indices)]
        members = [_leaf(unit, sizes, uses, without_rule) for unit in units]
        if uses and all(leaf.is_cheaper_without_rule for leaf in members):
            names = [use.equation.primitive.name for use in uses]
            members = [_leaf((i,), sizes, [], without_rule, names) for i in sorted(indices)]
            uses = []
        is_mixed = any(leaf.is_differentiated for leaf in members)
        by_rule |= {use.path: use._replace(is_mixed=is_mixed) for use in uses}
        leaves += members
    in_order = {path: by_rule[path] for path in sorted(by_rule)}
    return LossAnalysis(program, in_order, sorted(leaves, key=lambda leaf: leaf.indices))


def analyse_batch(
    loss_fn: ValueAndAux, params: optax.Params, batch: PyTree, groups: Sequence[ClipGroup]
) -> LossAnalysis:
    """Analyse the loss for one example of a batch. The batch may be empty."""
    found: list[LossAnalysis] = []
    analyse = partial(analyse_loss, loss_fn, params, groups=groups)
    jax.eval_shape(jax.vmap(lambda example: found.append(analyse(example))), batch)
    return found[0]


def _components(uses: Iterable[Use], leaves: int) -> list[tuple[set[int], list[Use]]]:
    """Return sets of leaves with their uses, such that leaves of different sets share no use."""
    components: list[tuple[set[int], list[Use]]] = [({index}, []) for index in range(leaves)]
    for use in uses:
        touched = [c for c in components if c[0] & use.weight.leaves]
        indices = set[int]().union(*(c[0] for c in touched))
        components = [c for c in components if c not in touched]
        components.append((indices, [*(u for c in touched for u in c[1]), use]))
    return components


def _is_joined(indices: set[int], uses: Sequence[Use], groups: Sequence[ClipGroup]) -> bool:
    """Return whether the leaves `indices` are concatenated for one use.

    All leaves must also belong to one group of clip norms, and the same scans must slice them.
    """
    if len(uses) != 1 or len(indices) == 1:
        return False
    weight, is_one_group = uses[0].weight, len({groups[index].path for index in indices}) == 1
    # A scan adds blocks to a matrix that it slices, and rows to other matrices.
    are_alike = all(piece.sliced == weight.sliced for piece in weight.pieces)
    return is_one_group and are_alike and len(weight.pieces) == len(indices)


def _leaf(
    indices: tuple[int, ...],
    sizes: Sequence[int],
    uses: Sequence[Use],
    without_rule: dict[int, set[str]],
    dropped: Sequence[str] = (),
) -> ParameterLeaf:
    """Return a `ParameterLeaf`; `dropped` names primitives whose rules cost more than they save."""
    own = [use for use in uses if not use.weight.leaves.isdisjoint(indices)]
    names = without_rule.get(indices[0], set())
    is_entrywise = names <= _ENTRYWISE and not own and not dropped
    parts = (
        None if names or dropped else _disjoint_parts(own) if len(indices) == 1 else (tuple(own),)
    )
    by_name = [use.equation.primitive.name for use in own] + sorted({*names, *dropped})
    return ParameterLeaf(
        indices,
        sum(sizes[index] for index in indices),
        tuple(own),
        parts,
        tuple(dict.fromkeys(by_name)),
        bool(names or dropped),
        not names or is_entrywise,
    )


def _disjoint_parts(uses: Sequence[Use]) -> tuple[tuple[Use, ...], ...] | None:
    """Group the uses of a leaf into parts that share no entry. Return None if that is impossible.

    All uses of a part have matrices of the same entries in the same order, up to a transpose.
    """
    parts: list[tuple[np.ndarray, list[list[tuple[int, int]]], list[Use]]] = []
    for use in uses:
        whole, stack = use.weight.entries, tuple(loop.length for loop in use.weight.sliced)
        split = None if whole is None else reshaped(whole, (*stack, *use.matrix.split))
        if whole is None or split is None:
            return None
        axes = list(zip(split.shape, split.strides, strict=True))
        blocks, inputs, outputs = (
            [axes[len(stack) + i] for i in which] for which in use.matrix[1:]
        )
        # The order of blocks matters: blocks of two uses are paired by their index.
        frame = [_merged([*axes[: len(stack)], *blocks]), _merged(inputs), _merged(outputs)]
        for other, other_frame, members in parts:
            transposed = [frame[0], frame[2], frame[1]]
            is_same = whole.ctypes.data == other.ctypes.data  # the first entry
            if is_same and other_frame in (frame, transposed):
                members.append(use._replace(is_transposed=other_frame != frame))
                break
            if not are_disjoint(whole, other):
                return None
        else:
            parts.append((whole, frame, [use]))
    return tuple(tuple(members) for _, _, members in parts)


def _merged(axes: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge neighbouring axes that form one longer axis. An axis is a pair (size, stride)."""
    result: list[tuple[int, int]] = []
    for size, stride in axes:
        if result and result[-1][1] == size * stride:
            result[-1] = (result[-1][0] * size, stride)
        elif size > 1:
            result.append((size, stride))
    return result


class Strategy(NamedTuple):
    """How the engine handles one leaf.

    Attributes:
        kind: the name of the strategy; `explain_clipping` says what each name means.
        multiplications: how many multiplications the norm of one example's gradient takes.
        floats: how many floats are stored to compute this norm.
        cost: all multiplications, plus memory traffic converted to multiplications.
    """

    kind: Kind
    multiplications: int
    floats: int
    cost: float


def choose(leaf: ParameterLeaf, platform: Platform) -> Strategy:
    """Return the cheapest strategy that the uses of a leaf allow."""
    if not leaf.primitives:
        return Strategy("unused", 0, 0, 0)
    candidates = [_materialised(leaf, platform)]
    if leaf.parts:
        use = leaf.uses[0]
        if platform.keeps or not is_plain_convolution(use) or len(leaf.uses) > 1:
            candidates += _by_factors(leaf, platform)
        elif use.matrix.shape[0] == 1:  # no feature groups
            few = math.prod(move.offsets for move in movements(use.equation)) <= _MOST_OFFSETS
            candidates += _convolutions(use, platform) if few else _by_factors(leaf, platform)
    return min(candidates, key=lambda strategy: strategy.cost)


def is_plain_convolution(use: Use) -> bool:
    """Return whether a use is a convolution outside of any scan."""
    return use.rule is CONVOLUTION and not use.loops


def _materialised(leaf: ParameterLeaf, platform: Platform) -> Strategy:
    """Return the strategy that stores all gradients and reads them back.

    Its cost is mostly memory traffic. Forming the gradients takes no extra multiplications, because
    the clipped sum then needs no product.
    """
    multiplications, idle = 0, 0
    for use in leaf.uses:
        blocks, rows, inputs, outputs = use.size
        if use.rule.is_one_hot:
            multiplications += blocks * rows * outputs
        else:
            multiplications += blocks * rows * inputs * outputs
            # A product with few rows leaves most of the matrix unit idle.
            idle += blocks * (_padded(rows, platform) - rows) * inputs * outputs
    stored = 8 * leaf.entries * platform.per_byte
    if platform.keeps and any(use.rule.expands for use in leaf.uses):
        stored /= 5  # storing pays here: other strategies make patches twice, for norms and sums
    if not platform.keeps and leaf.uses and is_plain_convolution(leaf.uses[0]):
        # XLA forms the gradients of kernels by a convolution with many feature groups.
        stored += platform.grouped * multiplications
    kind: Kind = "materialised" if leaf.has_rule else "materialised, no rule"
    return Strategy(kind, multiplications or leaf.entries, leaf.entries, stored + idle)


def _by_factors(leaf: ParameterLeaf, platform: Platform) -> list[Strategy]:
    """Return a list with the strategy that computes norms from the factors of the gradient.

    The list is empty if gradients are cheap to store and no larger than their factors.
    """
    parts = leaf.parts or ()
    if platform.keeps and leaf.entries <= leaf.held:
        return []
    heights = [sum(use.size.rows for use in part) for part in parts]
    multiplications = 0
    for part in parts:
        for use, other in combinations_with_replacement(part, 2):
            (blocks, rows, inputs, outputs), size = use.size, other.size
            # Inner products of one-hot rows take no multiplications.
            is_one_hot = use.rule.is_one_hot or other.rule.is_one_hot
            entries = min(outputs, size.outputs) if is_one_hot else inputs + outputs
            multiplications += blocks * rows * size.rows * entries
    if max(heights) == 1:
        return [Strategy("outer product", multiplications, 0, multiplications)]
    stored = sum(2 * part[0].size.blocks * t * t for part, t in zip(parts, heights, strict=True))
    if platform.keeps:
        return [Strategy("Gram matrices", multiplications, stored, multiplications)]
    reading = 2 * leaf.held * platform.per_byte
    return [Strategy("Gram matrices", multiplications, 0, multiplications + reading + 4 * stored)]


def _convolutions(use: Use, platform: Platform) -> list[Strategy]:
    """Return the possible strategies for the kernel of a convolution on an accelerator."""
    _, rows, inputs, outputs = use.size
    moves = movements(use.equation)
    offsets, formed = math.prod(move.offsets for move in moves), rows * inputs * outputs
    channels = inputs // offsets
    products = rows * rows * (inputs + outputs)
    if not platform.fuses:  # copies dominate: slices are stored, and results are read back
        sliced = platform.per_byte * offsets * rows * (6 * channels + 2 * outputs)
        added = platform.per_byte * 8 * offsets * rows * rows
        squared = platform.per_byte * 8 * inputs * outputs
        return [
            Strategy("Gram matrices of patches", products, rows * rows, products + sliced + added),
            Strategy("by offset", formed, rows * channels, formed + sliced + squared),
        ]
    abreast = max(platform.lanes // max(channels, outputs), 1)  # how many examples share a product
    tile = _padded(abreast * channels, platform) * _padded(abreast * outputs, platform) / abreast
    pixels = math.prod(shape_of(use.equation.invars[0]))
    features = inputs // math.prod(move.window for move in moves)
    moved = pixels + rows * outputs
    if channels == features and any(move.stride > 1 for move in moves):
        moved += 2 * pixels  # strides that cannot be moved into the channels
    gram = 2 * rows * _padded(rows, platform) * (inputs + outputs + _ADDING * offsets)
    by_offset = offsets * tile * (rows + _SQUARING) + _MOVING * moved
    making = rows * _padded(inputs, platform) * (_MOVING / 2 + 4 * features)
    by_patches = making + inputs * _padded(outputs, platform) * (rows + _SQUARING)
    return [
        Strategy("Gram matrices of patches", products, 0, gram),
        Strategy("by offset", formed, 0, by_offset),
        Strategy("by patches", formed, rows * inputs, by_patches),
    ]


def _padded(size: int, platform: Platform) -> int:
    """Return `size`, rounded up to a multiple of `platform.lanes`."""
    return -(-size // platform.lanes) * platform.lanes
