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

from optax_lsdp._shards import axis_names, axis_size, vary, varying_axes
from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._layout import Walk
from optax_lsdp.smoothing._operator import Boundary
from optax_lsdp.smoothing._runs import (
    CLOSE,
    Decay,
    Ends,
    Filtered,
    add_inflow,
    chain,
    chain_unequal,
    decay,
    filter_rows,
    numbers,
    pass_through,
)

_SMALL = 2**13  # entries of a leaf that is worth being copied to be filtered with others


class Split(NamedTuple):
    """How the runs of a leaf lie on the devices.

    Attributes:
        rows: rows on this device.
        outer: stretches of a row on this device, along each axis that does not belong to them.
        names: the mesh axes over which each of these is split, and the stretches themselves.
        length: entries of a stretch.
    """

    rows: int
    outer: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    length: int

    @property
    def runs(self) -> int:
        """Return the number of stretches of a row, on all devices."""
        return math.prod(self.outer) * math.prod(map(axis_size, self.names))

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
    filtered: Filtered


def smooth_leaves(
    leaves: Sequence[jax.Array],
    smoothing: jax.Array | float,
    *,
    walks: Sequence[Walk],
    specs: Sequence[jax.P],
    scope: str,
    boundary: Boundary,
) -> list[jax.Array]:
    """Return the smoothed leaves; `specs` tell how each of them is split over manual mesh axes."""
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
        transposed = [walks[i].transpose(leaves[i]).astype(dtype) for i in members]
        if len(members) == 1:
            split = _split(walks[members[0]], transposed[0].shape, specs[members[0]])
            rows, sizes = transposed[0].reshape(-1, split.length), [split.length]
        else:
            split, sizes = None, [x.size for x in transposed]
            room = max(sizes)
            rows = jnp.stack([jnp.pad(x.reshape(-1), (0, room - x.size)) for x in transposed])
        bundles.append(Bundle(members, split, filter_rows(rows, sizes, kernels[dtype])))

    flows = _close_each(bundles, boundary)
    if scope == "tree":
        flows = _close_together(bundles, [walk.grid[0] for walk in walks], boundary)
    results = dict[int, jax.Array]()
    for bundle, flow in zip(bundles, flows, strict=True):
        rows = add_inflow(bundle.filtered, flow, apart=len(bundle.members) > 1)
        for place, index in enumerate(bundle.members):
            size = bundle.filtered.sizes[place]
            own = rows[:, :size] if bundle.split else rows[place : place + 1, :size]
            restored = walks[index].restore(own, leaves[index].shape)
            results[index] = restored.astype(leaves[index].dtype)
    return [results[index] for index in range(len(leaves))]


def _close_each(bundles: list[Bundle], boundary: Boundary) -> list[Ends]:
    """Return what flows into each run when every row is closed in itself."""
    flows = []
    for _, split, filtered in bundles:
        kernel = filtered.kernel
        if split is None or split.runs == 1:
            flows.append(CLOSE[boundary](filtered.ends, filtered.sizes, kernel))
            continue
        inflow, ends = _chain(split, filtered.ends, kernel)
        outside = CLOSE[boundary](ends, [split.runs * split.length], kernel)
        flows.append(_into_runs(split, outside, inflow, kernel))
    return flows


def _close_together(bundles: list[Bundle], sizes: list[int], boundary: Boundary) -> list[Ends]:
    """Return what flows into each run when all leaves follow one another."""
    kernel = bundles[-1].filtered.kernel
    lefts, rights = dict[int, jax.Array](), dict[int, jax.Array]()
    inner = []
    for members, split, filtered in bundles:
        inflow, ends = _chain(split, filtered.ends, kernel) if split else (None, filtered.ends)
        inner.append(inflow)
        for place, index in enumerate(members):
            lefts[index], rights[index] = ends.left[place], ends.right[place]
    order = range(len(sizes))
    ends = Ends(*(jnp.stack([side[i] for i in order]) for side in (lefts, rights)))
    inflow, whole = chain_unequal(ends, sizes, kernel)
    outside = CLOSE[boundary](whole, [sum(sizes)], kernel)
    places = numbers(list(accumulate(sizes, initial=0)), kernel.rate.dtype)
    flow = pass_through(Ends(*(side[0] for side in outside)), inflow, places, kernel)
    flows = []
    for (members, split, _), within in zip(bundles, inner, strict=True):
        mine = Ends(*(jnp.stack([side[index] for index in members]) for side in flow))
        flows.append(_into_runs(split, mine, within, kernel) if split and within else mine)
    return flows


def _chain(split: Split, ends: Ends, kernel: Decay) -> tuple[Ends, Ends]:
    """Link the runs of a leaf over all devices."""
    gathered = Ends(*map(split.gather, ends))
    return chain(gathered, split.length, kernel)


def _into_runs(split: Split, outside: Ends, inflow: Ends, kernel: Decay) -> Ends:
    """Return what flows into the runs on this device, from outside of the row and within."""
    places = split.length * jnp.arange(split.runs + 1, dtype=kernel.rate.dtype)
    return Ends(*map(split.own, pass_through(outside, inflow, places, kernel)))


def _split(walk: Walk, local: tuple[int, ...], spec: jax.P) -> Split:
    """Return how a leaf's rows lie on devices, given its transposed local shape."""
    entries = [*spec, *[None] * (len(walk.order) - len(spec))] if any(spec) else [None] * len(local)
    names = [axis_names(entries[axis]) for axis in walk.order]
    first = len(local) - walk.trailing
    cut = max((axis for axis in range(first, len(local)) if names[axis]), default=first)
    return Split(
        rows=math.prod(local[:first]),
        outer=local[first:cut],
        names=(*names[first:cut], names[cut] if cut < len(names) else ()),
        length=math.prod(local[cut:]),
    )
