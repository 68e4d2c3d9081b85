"""Choose a strategy for each parameter leaf: the cheapest one on a kind of device.

A strategy says how the engine computes the norms and the clipped sum of one leaf. Costs are counted
in multiplications for one example, in addition to ordinary training. Memory traffic is converted to
multiplications, at the rate of the device. To add a strategy, write its cost here, and its bound
and its sum in `strategies`.
"""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

from optax_lsdp._jaxpr import shape_of
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf, Term
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping._rules import CONVOLUTION, movements

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


class Strategy(NamedTuple):
    """How the engine handles one leaf.

    Attributes:
        kind: the name of the strategy; `explain_clipping` says what each name means.
        multiplications: how many multiplications the norm of one example takes.
        floats: how many floats the norm of one example stores.
        cost: multiplications and memory traffic together, as multiplications of the device.
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
        convolved = is_plain_convolution(leaf.terms[0]) and len(leaf.terms) == 1
        if platform.keeps or not convolved:
            candidates += _by_factors(leaf, platform)
        elif leaf.terms[0].use.matrix.shape[0] == 1:  # no feature groups
            few = _offsets(leaf.terms[0]) <= _MOST_OFFSETS
            candidates += (
                _convolutions(leaf.terms[0], platform) if few else _by_factors(leaf, platform)
            )
    return min(candidates, key=lambda strategy: strategy.cost)


def is_plain_convolution(term: Term) -> bool:
    """Return whether a term is the whole kernel of a convolution outside of any scan."""
    is_whole = not term.use.loops and term.piece.start is None
    return term.use.rule is CONVOLUTION and is_whole


def _materialised(leaf: ParameterLeaf, platform: Platform) -> Strategy:
    """Return the cost of storing all gradients and reading them back.

    Forming the gradients takes no extra multiplications, because the sum then needs no product.
    """
    floats, multiplications, idle = math.prod(leaf.shape), 0, 0
    for term in leaf.terms:
        blocks, rows, inputs, outputs = term.size
        if term.use.rule.is_one_hot:
            multiplications += blocks * rows * outputs
        else:
            multiplications += blocks * rows * inputs * outputs
            # A product with few rows leaves most of the matrix unit idle.
            idle += blocks * (_padded(rows, platform) - rows) * inputs * outputs
    stored = 8 * floats * platform.per_byte
    if platform.keeps and any(term.use.rule.expands for term in leaf.terms):
        stored /= 5  # other strategies make patches twice
    if not platform.keeps and leaf.terms and is_plain_convolution(leaf.terms[0]):
        # XLA forms the gradients of kernels by a convolution with many feature groups.
        stored += platform.grouped * multiplications
    kind: Kind = "materialised" if leaf.has_rule else "materialised, no rule"
    return Strategy(kind, multiplications or floats, floats, stored + idle)


def _by_factors(leaf: ParameterLeaf, platform: Platform) -> list[Strategy]:
    """Return the costs of strategies that work with the factors of the gradient."""
    parts = leaf.parts or ()
    if platform.keeps and math.prod(leaf.shape) <= leaf.held:
        return []
    heights = [sum(term.size.rows for term in part) for part in parts]
    multiplications = 0
    for part in parts:
        for term, other in combinations_with_replacement(part, 2):
            (blocks, rows, inputs, outputs), size = term.size, other.size
            # Inner products of one-hot rows take no multiplications.
            is_one_hot = term.use.rule.is_one_hot or other.use.rule.is_one_hot
            entries = min(outputs, size.outputs) if is_one_hot else inputs + outputs
            multiplications += blocks * rows * size.rows * entries
    if max(heights) == 1:
        return [Strategy("outer product", multiplications, 0, multiplications)]
    stored = sum(2 * part[0].size.blocks * t * t for part, t in zip(parts, heights, strict=True))
    if platform.keeps:
        return [Strategy("Gram matrices", multiplications, stored, multiplications)]
    reading = 2 * leaf.held * platform.per_byte
    return [Strategy("Gram matrices", multiplications, 0, multiplications + reading + 4 * stored)]


def _convolutions(term: Term, platform: Platform) -> list[Strategy]:
    """Return the costs of strategies for the kernel of a convolution on an accelerator."""
    _, rows, inputs, outputs = term.size
    offsets, formed = _offsets(term), rows * inputs * outputs
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
    abreast = max(platform.lanes // max(channels, outputs), 1)  # examples share a product
    tile = _padded(abreast * channels, platform) * _padded(abreast * outputs, platform) / abreast
    pixels = math.prod(shape_of(term.use.equation.invars[0]))
    moves = movements(term.use.equation)
    features = inputs // math.prod(move.window for move in moves)
    moved = pixels + rows * outputs
    if channels == features and any(move.stride > 1 for move in moves):
        moved += 2 * pixels  # strides that cannot be folded
    gram = 2 * rows * _padded(rows, platform) * (inputs + outputs + _ADDING * offsets)
    by_offset = offsets * tile * (rows + _SQUARING) + _MOVING * moved
    making = rows * _padded(inputs, platform) * (_MOVING / 2 + 4 * features)
    by_patches = making + inputs * _padded(outputs, platform) * (rows + _SQUARING)
    return [
        Strategy("Gram matrices of patches", products, 0, gram),
        Strategy("by offset", formed, 0, by_offset),
        Strategy("by patches", formed, rows * inputs, by_patches),
    ]


def _offsets(term: Term) -> int:
    """Return the product of `Movement.offsets` over the axes of the window."""
    return math.prod(move.offsets for move in movements(term.use.equation))


def _padded(size: int, platform: Platform) -> int:
    """Return a size, rounded up to a multiple of the matrix unit's rows and columns."""
    return -(-size // platform.lanes) * platform.lanes
