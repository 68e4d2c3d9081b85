"""The plan: every use of every parameter goes in, how each leaf's norm and sum are made comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from optax_lsdp.clipping.bookkeeping._rules import aval_shape
from optax_lsdp.clipping.bookkeeping._sites import Path, Piece, Site, Uses
from optax_lsdp.clipping.bookkeeping._views import View, are_disjoint, merged

Kind = Literal["outer product", "Gram", "materialised", "automatic", "unused"]
_FLOAT_COST = 100  # products in the time in which a float is written and read twice, on a CPU


class Use(NamedTuple):
    """A piece of a site as part of a leaf, and whether inputs and outputs change places there."""

    path: Path
    piece: int = 0
    swapped: bool = False


class LeafPlan(NamedTuple):
    """How one leaf is handled.

    Attributes:
        kind: "outer product" or "Gram" if only factors are needed; "materialised" if each
            example's gradient is formed from factors; "automatic" if also, or only, by
            differentiation of the leaf itself.
        parts: sites whose gradients overlap entirely, for each of the disjoint parts of the leaf.
        primitives: what the leaf is used by.
        products: multiplications for one example, beyond those of ordinary training.
        floats: entries stored for one example, beyond operands and cotangents.
    """

    kind: Kind
    parts: tuple[tuple[Use, ...], ...]
    primitives: tuple[str, ...]
    products: int
    floats: int

    @property
    def is_factored(self) -> bool:
        """Tell whether no gradient of a single example is formed."""
        return self.kind in ("outer product", "Gram")

    @property
    def is_automatic(self) -> bool:
        """Tell whether the leaf itself is differentiated."""
        return self.kind == "automatic"

    @property
    def is_formed(self) -> bool:
        """Tell whether each example's gradient is formed."""
        return self.kind in ("automatic", "materialised")


class Size(NamedTuple):
    """The numbers of blocks, rows, inputs and outputs of a site, with its scans counted in."""

    blocks: int
    rows: int
    inputs: int
    outputs: int


def piece_size(site: Site, piece: Piece) -> Size:
    """Return how large the factors of a piece of a site are for one example."""
    blocks, inputs, outputs = piece.matrix.shape
    whole_blocks, _, whole_outputs = site.matrix.shape
    entries = math.prod(aval_shape(site.equation.outvars[0]))
    rows = entries // max(whole_blocks * whole_outputs, 1)
    sliced = {depth for depth, _ in piece.weight.sliced}
    for loop in site.loops:
        if loop.depth in sliced:
            blocks *= loop.length
        else:
            rows *= loop.length
    return Size(blocks, rows, inputs, outputs)


def plan_leaves(uses: Uses, shapes: Sequence[tuple[int, ...]]) -> list[LeafPlan]:
    """Decide for each leaf."""
    return [_plan_leaf(index, shape, uses) for index, shape in enumerate(shapes)]


def _plan_leaf(index: int, shape: tuple[int, ...], uses: Uses) -> LeafPlan:
    pieces = {
        Use(path, number): (site, piece)
        for path, site in uses.sites.items()
        for number, piece in enumerate(site.pieces)
        if index in piece.weight.leaves
    }
    escapes = sorted(uses.escaped.get(index, ()))
    names = tuple(dict.fromkeys([site.name for site, _ in pieces.values()] + escapes))
    sizes = {use: piece_size(*piece) for use, piece in pieces.items()}
    floats = math.prod(shape)
    singles = tuple((use,) for use in pieces)
    if escapes:
        formed = sum(math.prod(size) for size in sizes.values())
        return LeafPlan("automatic", singles, names, formed, floats)
    if not pieces:
        return LeafPlan("unused", (), (), 0, 0)
    parts = _disjoint_parts(pieces)
    if parts is not None:
        heights = [sum(sizes[use._replace(swapped=False)].rows for use in part) for part in parts]
        gram = sum(
            _gram_products(sizes[part[0]], height)
            for part, height in zip(parts, heights, strict=True)
        )
        held = sum(b * t * (p + q) for b, t, p, q in sizes.values())
        # What is formed for the norm serves the sum as well, but it has to be stored and read.
        if gram <= _FLOAT_COST * floats and floats > held:
            kind: Kind = "outer product" if max(heights) == 1 else "Gram"
            return LeafPlan(kind, parts, names, gram, 0)
    return LeafPlan("materialised", singles, names, 0, floats)


def _gram_products(size: Size, rows: int) -> int:
    """Return what the norm takes without a gradient being formed."""
    return size.blocks * (size.inputs + size.outputs) * (rows * rows if rows > 1 else 1)


def _disjoint_parts(
    pieces: dict[Use, tuple[Site, Piece]],
) -> tuple[tuple[Use, ...], ...] | None:
    """Group the uses of a leaf into parts that share no entry, or None if that cannot be done.

    Within a part all gradients are matrices over the same entries, perhaps transposed.
    """
    parts: list[tuple[View, list[list[tuple[int, int]]], list[Use]]] = []
    for use, (_, piece) in pieces.items():
        weight = piece.weight
        views = None if weight.view is None else piece.matrix.view(weight.view)
        if weight.view is None or views is None:
            return None
        blocks, inputs, outputs = views
        stack = [axis for _, axis in weight.sliced]
        frame = [sorted(merged([*stack, *blocks.axes])), merged(inputs.axes), merged(outputs.axes)]
        entire = View((*stack, *weight.view.axes), weight.view.offset)
        for other, other_frame, members in parts:
            swapped = [frame[0], frame[2], frame[1]]
            if entire.offset == other.offset and other_frame in (frame, swapped):
                members.append(use._replace(swapped=other_frame != frame))
                break
            if not are_disjoint(entire, other):
                return None
        else:
            parts.append((entire, frame, [use]))
    return tuple(tuple(members) for _, _, members in parts)
