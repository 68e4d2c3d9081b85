"""Smoothing of leaves by runs: a tree's leaves, or their shards, go in, smoothed ones come out.

A leaf is one run, or one for each row of a grid. A shard is as many runs as the leaf has
stretches on its device, and they are linked by two numbers each, which devices exchange. Small
leaves are filtered together. With scope="tree" the leaves themselves are linked, and never joined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp._mesh import axis_names, axis_size, vary, varying_axes
from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._decay import Decay, decay
from optax_lsdp.smoothing._layout import Walk
from optax_lsdp.smoothing._operator import Boundary
from optax_lsdp.smoothing._runs import (
    CLOSE,
    Ends,
    Run,
    chain,
    chain_unequal,
    filter_rows,
    numbers,
    pass_through,
    read_rows,
)

_SMALL = 2**16  # entries of a leaf that is worth being copied to be filtered with others
_COLUMN = 8  # entries of a column, and columns, that are worth being filtered as they are stored


class Plan(NamedTuple):
    """What is smoothed: a walk along each leaf, all of them apart or one after the other."""

    walks: tuple[Walk, ...]
    scope: str
    boundary: Boundary


class Split(NamedTuple):
    """How the runs of a leaf lie on the devices.

    Attributes:
        rows: rows on this device.
        outer: stretches of a row on this device, along each axis that does not belong to them.
        names: the mesh axes over which each of these is split, and the stretches themselves.
        length: entries of a stretch.
        columns: if stretches are stored as columns, the shape of these.
        order: the order in which the walk takes the axes of that shape.
    """

    rows: int
    outer: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    length: int
    columns: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()

    @property
    def runs(self) -> int:
        """Return the number of stretches of a row, on all devices."""
        return math.prod(self.outer) * math.prod(map(axis_size, self.names))

    def walked(self, values: jax.Array) -> jax.Array:
        """Put numbers, one for each stretch, from the order of storage into that of the walk."""
        if self.columns is None:
            return values
        return values.reshape(self.columns).transpose(self.order).reshape(-1)

    def stored(self, values: jax.Array) -> jax.Array:
        """Undo `walked`."""
        if self.columns is None:
            return values
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        walked = values.reshape([self.columns[axis] for axis in self.order])
        return walked.transpose(inverse).reshape(-1)

    def gather(self, values: jax.Array) -> jax.Array:
        """Collect a number from each stretch: (rows · stretches,) → (rows, all stretches).

        As a sum, which JAX knows to be the same on all devices.
        """
        shape, starts, names = self._place()
        if not names:
            return values.reshape(self.rows, -1)
        values = values.reshape(self.rows, *self.outer, 1)
        everywhere = vary(jnp.zeros(shape, values.dtype), varying_axes(values))
        own = jax.lax.dynamic_update_slice(everywhere, values, starts)
        return jax.lax.psum(own, names).reshape(self.rows, -1)

    def own(self, values: jax.Array) -> jax.Array:
        """Undo `gather`: keep the numbers of this device."""
        shape, starts, _ = self._place()
        values = values.reshape(shape)
        return jax.lax.dynamic_slice(values, starts, (self.rows, *self.outer, 1)).reshape(-1)

    def _place(self) -> tuple[tuple[int, ...], list[Any], tuple[str, ...]]:
        """Return the shape of all stretches, where those of this device begin, and the axes."""
        local = (*self.outer, 1)
        pairs = list(zip(local, self.names, strict=True))
        shape = (self.rows, *(size * axis_size(names) for size, names in pairs))
        starts = [size * jax.lax.axis_index(names) if names else 0 for size, names in pairs]
        return shape, [0, *starts], tuple(name for names in self.names for name in names)


class Bundle(NamedTuple):
    """Leaves that are filtered together: one of any kind, or several small whole ones."""

    members: list[int]
    split: Split | None
    run: Run


def smooth_leaves(
    leaves: Sequence[jax.Array], smoothing: jax.Array | float, specs: Sequence[jax.P], plan: Plan
) -> list[jax.Array]:
    """Return the smoothed leaves; `specs` tell how each of them is split over manual mesh axes."""
    walks, scope, boundary = plan
    wide = [wide_dtype(*leaves) if scope == "tree" else wide_dtype(leaf) for leaf in leaves]
    kernels = {dtype: decay(smoothing, dtype) for dtype in wide}
    groups: dict[Any, list[int]] = {}
    for index, (walk, spec) in enumerate(zip(walks, specs, strict=True)):
        size = walk.grid[0]
        alone = any(spec) or math.prod(walk.shape) > size or size > _SMALL
        room = 1 << (size - 1).bit_length()
        groups.setdefault((index,) if alone else (wide[index], room), []).append(index)

    bundles = []
    for members in groups.values():
        dtype = wide[members[0]]
        split = None
        if len(members) == 1:
            leaf, walk = leaves[members[0]].astype(dtype), walks[members[0]]
            split = _split(walk, leaf, specs[members[0]])
            upright, sizes = split.columns is not None, [split.length]
            shape = (split.length, -1) if upright else (-1, split.length)
            rows = (leaf if upright else walk.transpose(leaf)).reshape(shape)
            copied = not upright and walk.order != tuple(sorted(walk.order))
        else:
            vectors = [walks[i].transpose(leaves[i]).astype(dtype).reshape(-1) for i in members]
            upright, sizes = False, [x.size for x in vectors]
            rows = jnp.stack([jnp.pad(x, (0, max(sizes) - x.size)) for x in vectors])
            copied = False
        run = read_rows(rows, sizes, kernels[dtype], upright=upright, copied=copied)
        bundles.append(Bundle(members, split, run))

    if scope == "tree":
        flows = _close_together(bundles, [walk.grid[0] for walk in walks], boundary)
    else:
        flows = _close_each(bundles, boundary)
    results = dict[int, jax.Array]()
    for bundle, flow in zip(bundles, flows, strict=True):
        rows = filter_rows(bundle.run, flow)
        for place, index in enumerate(bundle.members):
            size, leaf = bundle.run.sizes[place], leaves[index]
            if bundle.run.upright:
                results[index] = rows[:size].reshape(leaf.shape).astype(leaf.dtype)
                continue
            own = rows[:, :size] if bundle.split else rows[place : place + 1, :size]
            results[index] = walks[index].restore(own, leaf).astype(leaf.dtype)
    return [results[index] for index in range(len(leaves))]


def _close_each(bundles: list[Bundle], boundary: Boundary) -> list[Ends]:
    """Return what flows into each run when every row is closed in itself."""
    flows = []
    for _, split, run in bundles:
        kernel = run.kernel
        if split is None or split.runs == 1:
            flows.append(CLOSE[boundary](run.ends, run.sizes, kernel))
            continue
        inflow, ends = _chain(split, run.ends, kernel)
        outside = CLOSE[boundary](ends, [split.runs * split.length], kernel)
        flows.append(_into_runs(split, outside, inflow, kernel))
    return flows


def _close_together(bundles: list[Bundle], sizes: list[int], boundary: Boundary) -> list[Ends]:
    """Return what flows into each run when all leaves follow one another."""
    kernel = bundles[-1].run.kernel
    lefts, rights = dict[int, jax.Array](), dict[int, jax.Array]()
    inner = []
    for members, split, run in bundles:
        inflow, ends = _chain(split, run.ends, kernel) if split else (None, run.ends)
        inner.append(inflow)
        for place, index in enumerate(members):
            lefts[index], rights[index] = ends.left[place], ends.right[place]
    order = range(len(sizes))
    ends = Ends(*(jnp.stack([side[i] for i in order]) for side in (lefts, rights)))
    inflow, whole = chain_unequal(ends, sizes, kernel)
    outside = CLOSE[boundary](whole, [sum(sizes)], kernel)
    places = numbers(list(accumulate(sizes, initial=0)), jnp.int32)
    flow = pass_through(Ends(*(side[0] for side in outside)), inflow, places, kernel)
    flows = []
    for (members, split, _), within in zip(bundles, inner, strict=True):
        mine = Ends(*(jnp.stack([side[index] for index in members]) for side in flow))
        flows.append(_into_runs(split, mine, within, kernel) if split and within else mine)
    return flows


def _chain(split: Split, ends: Ends, kernel: Decay) -> tuple[Ends, Ends]:
    """Link the runs of a leaf over all devices."""
    gathered = Ends(*(split.gather(split.walked(side)) for side in ends))
    return chain(gathered, split.length, kernel)


def _into_runs(split: Split, outside: Ends, inflow: Ends, kernel: Decay) -> Ends:
    """Return what flows into the runs on this device, from outside of the row and within."""
    places = split.length * jnp.arange(split.runs + 1, dtype=jnp.int32)
    flow = pass_through(outside, inflow, places, kernel)
    return Ends(*(split.stored(split.own(side)) for side in flow))


def _split(walk: Walk, leaf: jax.Array, spec: jax.P) -> Split:
    """Return how a leaf's rows lie on devices and in memory."""
    shape = walk.seen_shape(leaf)
    local = tuple(shape[axis] for axis in walk.order)
    entries = [*spec, *[None] * (len(local) - len(spec))] if any(spec) else [None] * len(local)
    names = [axis_names(entries[axis]) for axis in walk.order]
    first, end = len(local) - walk.trailing, len(local)
    split_axes = [axis for axis in range(first, end) if names[axis]]
    cut = max(split_axes, default=first)
    # The axes that are walked last are stored first: each stretch is a column.
    upright = next((c for c in range(first, end) if walk.order[c:] == tuple(range(end - c))), end)
    length = math.prod(local[upright:])
    is_column = 0 < upright < end and _COLUMN <= length <= leaf.size // _COLUMN
    if is_column and upright == (cut if split_axes else upright):
        tall = end - upright  # so many axes make a column
        order = tuple(axis - tall for axis in walk.order[:upright])
        rest = (*names[first:upright], names[upright])
        rows, outer = math.prod(local[:first]), local[first:upright]
        return Split(rows, outer, rest, length, shape[tall:], order)
    rest = (*names[first:cut], names[cut] if cut < end else ())
    return Split(math.prod(local[:first]), local[first:cut], rest, math.prod(local[cut:]))
