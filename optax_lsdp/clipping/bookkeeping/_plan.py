"""The plan: every use of every parameter goes in, how each leaf's norm and sum are made comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from optax_lsdp.clipping.bookkeeping._rules import aval_shape
from optax_lsdp.clipping.bookkeeping._sites import Path, Site, Uses
from optax_lsdp.clipping.bookkeeping._views import View, are_disjoint, merged

Kind = Literal["outer product", "Gram", "materialised", "automatic", "unused"]
_FLOAT_COST = 12  # products that take as long as to write and read a float; measured on a CPU


class Use(NamedTuple):
    """A site as part of a leaf: where it is, and whether inputs and outputs change places."""

    path: Path
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


def site_size(site: Site) -> Size:
    """Return how large the factors of a site are for one example."""
    blocks, inputs, outputs = site.matrix.shape
    sliced = {depth for depth, _ in site.weight.sliced}
    entries = math.prod(aval_shape(site.equation.outvars[0]))
    rows = entries // max(blocks * outputs, 1)
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
    sites = {path: site for path, site in uses.sites.items() if index in site.weight.leaves}
    escapes = sorted(uses.escaped.get(index, ()))
    names = tuple(dict.fromkeys([s.equation.primitive.name for s in sites.values()] + escapes))
    sizes = [site_size(site) for site in sites.values()]
    formed = sum(b * t * p * q for b, t, p, q in sizes)
    floats = math.prod(shape)
    singles = tuple((Use(path),) for path in sites)
    if escapes:
        return LeafPlan("automatic", singles, names, formed, floats)
    if not sites:
        return LeafPlan("unused", (), (), 0, 0)
    parts = _disjoint_parts(sites)
    if parts is not None:
        rows = [sum(site_size(sites[use.path]).rows for use in part) for part in parts]
        gram = sum(
            _gram_products(site_size(sites[part[0].path]), count)
            for part, count in zip(parts, rows, strict=True)
        )
        # What is formed for the norm serves the sum as well, but it has to be stored and read.
        held = sum(b * t * (p + q) for b, t, p, q in sizes)
        if gram <= 2 * _FLOAT_COST * floats and floats > held:
            kind: Kind = "outer product" if max(rows) == 1 else "Gram"
            return LeafPlan(kind, parts, names, gram, 0)
    return LeafPlan("materialised", singles, names, 0, floats)


def _gram_products(size: Size, rows: int) -> int:
    """Return what the norm takes without a gradient being formed."""
    return size.blocks * (size.inputs + size.outputs) * (rows * rows if rows > 1 else 1)


def _disjoint_parts(sites: dict[Path, Site]) -> tuple[tuple[Use, ...], ...] | None:
    """Group the sites of a leaf into parts that share no entry, or None if that cannot be done.

    Within a part all gradients are matrices over the same entries, perhaps transposed.
    """
    parts: list[tuple[View, list[list[tuple[int, int]]], list[Use]]] = []
    for path, site in sites.items():
        weight = site.weight
        views = None if weight.view is None else site.matrix.view(weight.view)
        if weight.view is None or views is None:
            return None
        blocks, inputs, outputs = views
        stack = [axis for _, axis in weight.sliced]
        frame = [sorted(merged([*stack, *blocks.axes])), merged(inputs.axes), merged(outputs.axes)]
        entire = View((*stack, *weight.view.axes), weight.view.offset)
        for other, other_frame, members in parts:
            swapped = [frame[0], frame[2], frame[1]]
            if entire.offset == other.offset and other_frame in (frame, swapped):
                members.append(Use(path, other_frame != frame))
                break
            if not are_disjoint(entire, other):
                return None
        else:
            parts.append((entire, frame, [Use(path)]))
    return tuple(tuple(members) for _, _, members in parts)
