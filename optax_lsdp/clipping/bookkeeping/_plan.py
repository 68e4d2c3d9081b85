"""The plan: every use of every parameter goes in, how each leaf is handled comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple

from optax_lsdp._jaxpr import shape_of
from optax_lsdp.clipping.bookkeeping._sites import Path, Piece, Site, Uses
from optax_lsdp.clipping.bookkeeping._views import View, are_disjoint, merged

Kind = Literal["outer product", "Gram", "materialised", "fallback", "unused"]
_FLOAT_COST = 100  # products in the time in which a float is written and read twice, on a CPU
_FLOAT_COST_OF_PATCHES = 20  # less, because without gradients patches are made twice
_LONG_LOOP = 8  # times its own size is what a leaf may keep in operands before it is left alone
_BY_ENTRY = {"add", "add_any", "sub", "mul", "div"}  # biases, scales, positions


class Use(NamedTuple):
    """A piece of a site as part of a leaf, and whether inputs and outputs change places there."""

    path: Path
    piece: int = 0
    swapped: bool = False


class LeafPlan(NamedTuple):
    """How one leaf is handled.

    Attributes:
        kind: "outer product" or "Gram" if factors are enough; "materialised" if each example's
            gradient is formed, of factors, or of entries that are used one by one; "fallback" if
            it is formed because no rule is known for some use; "unused".
        parts: uses whose gradients overlap entirely, for each of the disjoint parts of the leaf.
        is_differentiated: whether the leaf itself is differentiated, for uses without a rule.
        primitives: what the leaf is used by.
        products: multiplications for the norm of one example.
        floats: numbers stored for the norm of one example.
    """

    kind: Kind
    parts: tuple[tuple[Use, ...], ...]
    is_differentiated: bool
    primitives: tuple[str, ...]
    products: int
    floats: int

    @property
    def is_formed(self) -> bool:
        """Tell whether each example's gradient is formed."""
        return self.kind in ("materialised", "fallback")


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
    entries = math.prod(shape_of(site.equation.outvars[0]))
    rows = entries // max(whole_blocks * whole_outputs, 1)
    sliced = {depth for depth, _ in piece.weight.sliced}
    for loop in site.loops:
        if loop.depth in sliced:
            blocks *= loop.length
        else:
            rows *= loop.length
    return Size(blocks, rows, inputs, outputs)


def leave_long_loops(uses: Uses, shapes: Sequence[tuple[int, ...]]) -> Uses:
    """Return the uses without those of small leaves in long loops, which escape instead.

    A site keeps operands and cotangents of all iterations. Automatic differentiation adds up the
    leaf's gradient on its way back, and keeps no more than that where the loop is rematerialised.
    """
    held = dict.fromkeys(range(len(shapes)), 0.0)
    leaves_at: dict[Path, frozenset[int]] = {}
    for path, site in uses.sites.items():
        leaves_at[path] = frozenset[int]().union(*(piece.weight.leaves for piece in site.pieces))
        for piece in site.pieces:
            blocks, rows, inputs, outputs = piece_size(site, piece)
            kept = blocks * rows * (inputs + outputs) if site.loops else -math.inf
            for leaf in piece.weight.leaves:
                held[leaf] += kept
    small = {i for i, shape in enumerate(shapes) if held[i] > _LONG_LOOP * math.prod(shape)}
    while mixed := {i for found in leaves_at.values() if not found <= small for i in found & small}:
        small -= mixed  # a site that stays keeps the operands of all its leaves
    escaped = {leaf: set(names) for leaf, names in uses.escaped.items()}
    sites = dict(uses.sites)
    for path, found in leaves_at.items():
        if found <= small:
            name = sites.pop(path).name
            for leaf in found:
                escaped.setdefault(leaf, set()).add(name)
    return Uses(sites, escaped, frozenset(small - set(uses.escaped)))


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
    escapes = uses.escaped.get(index, set())
    names = tuple(dict.fromkeys([site.name for site, _ in pieces.values()] + sorted(escapes)))
    sizes = {use: piece_size(*piece) for use, piece in pieces.items()}
    floats = math.prod(shape)
    formed = sum(
        b * t * q * (1 if pieces[use][0].rule.units else p) for use, (b, t, p, q) in sizes.items()
    )
    if not names:
        return LeafPlan("unused", (), False, names, 0, 0)
    parts = None if escapes else _disjoint_parts(pieces)
    if parts is not None:
        bare = [[use._replace(swapped=False) for use in part] for part in parts]
        heights = [sum(sizes[use].rows for use in part) for part in bare]
        dense = [[(sizes[use], pieces[use][0].rule.units) for use in part] for part in bare]
        products = sum(map(_gram_products, dense))
        held = sum(b * t * (p + q) for b, t, p, q in sizes.values())
        # What is formed for the norm serves the sum as well, but it has to be stored and read.
        expands = any(site.rule.expands for site, _ in pieces.values())
        cost = _FLOAT_COST_OF_PATCHES if expands else _FLOAT_COST
        if products <= cost * floats and floats > held:
            if max(heights) == 1:
                return LeafPlan("outer product", parts, False, names, products, 0)
            blocks = [sizes[part[0]].blocks for part in bare]
            stored = sum(2 * b * t * t for b, t in zip(blocks, heights, strict=True))
            return LeafPlan("Gram", parts, False, names, products, stored)
    has_rule = not escapes or (escapes <= _BY_ENTRY and not pieces) or index in uses.left
    kind: Kind = "materialised" if has_rule else "fallback"
    singles = tuple((use,) for use in pieces)
    return LeafPlan(kind, singles, bool(escapes), names, formed or floats, floats)


def _gram_products(uses: Sequence[tuple[Size, bool]]) -> int:
    """Return what the norm takes without a gradient being formed; unit rows take no products."""
    products = 0
    for (size, units), (other, other_units) in combinations_with_replacement(uses, 2):
        pairs = size.rows * other.rows if size.rows > 1 or len(uses) > 1 else 1
        dense = size.inputs + size.outputs
        entries = min(size.outputs, other.outputs) if units or other_units else dense
        products += size.blocks * pairs * entries
    return products


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
        # The order of blocks counts: they are paired by their place.
        frame = [merged([*stack, *blocks.axes]), merged(inputs.axes), merged(outputs.axes)]
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
