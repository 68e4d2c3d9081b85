"""Smooth leaves as linked segments: the methods "recursive", on one device, and "halo", on many.

A segment is a sequence of neighbouring entries that one device holds. A device holds one or more
segments of a leaf. `recursive.py` filters each segment by itself. To do so, it needs only two
numbers from outside the segment, which are called carries. So devices exchange two numbers per
segment, and gather no leaf.
Small leaves are packed and filtered together. With scope="tree", leaves are linked like segments
instead of being concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from optax_lsdp._mesh import axis_names, axis_size, manual_axes, vary, varying_axes
from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._layout import Arrangement, Leaf, Scope
from optax_lsdp.smoothing._spectrum import Boundary
from optax_lsdp.smoothing.methods.recursive import (
    CARRY_AT,
    Ends,
    Kernel,
    Rows,
    add_outer_carry,
    as_array,
    filter_rows,
    link_equal,
    link_unequal,
    prepare_rows,
)
from optax_lsdp.smoothing.methods.spectral import Operator

_SMALL = 2**16  # leaves with at most this many entries are worth copying into a pack
_COLUMN = 8  # leaves with fewer columns, or with columns of fewer entries, are transposed first


class Task(NamedTuple):
    """The arguments of smoothing that are hashable: all except the arrays and σ."""

    arrangements: tuple[Arrangement, ...]
    scope: Scope
    boundary: Boundary


class Segments(NamedTuple):
    """How a leaf is cut into segments."""

    rows: int  # the number of rows of neighbours on this device
    outer: tuple[int, ...]  # segments per row on this device, along each axis outside a segment
    # The mesh axes that split each axis of `outer` and, last, the first axis within a segment.
    names: tuple[tuple[str, ...], ...]
    length: int  # entries per segment
    total: int  # segments per row, on all devices
    columns: tuple[int, ...] | None  # the shape of this device's segments, if each is a column
    order: tuple[int, ...]  # the order of the axes of `columns` that sorts segments by neighbours

    def gather(self, values: jax.Array) -> jax.Array:
        """Collect one number per segment from all devices, with neighbours side by side.

        `values` has shape (segments on this device,), in the order of storage. The result has shape
        (rows, segments of a row on all devices). This method uses `psum`, because JAX then knows
        that the result is equal on all devices.
        """
        if self.columns is not None:
            values = values.reshape(self.columns).transpose(self.order)
        shape, starts, names = self._offsets()
        if not names:
            return values.reshape(self.rows, -1)
        values = values.reshape(self.rows, *self.outer, 1)
        everywhere = vary(jnp.zeros(shape, values.dtype), varying_axes(values))
        own = jax.lax.dynamic_update_slice(everywhere, values, starts)
        return jax.lax.psum(own, names).reshape(self.rows, -1)

    def keep_own(self, values: jax.Array) -> jax.Array:
        """Undo `gather`: keep the numbers of this device's segments, in the order of storage."""
        shape, starts, _ = self._offsets()
        own = jax.lax.dynamic_slice(values.reshape(shape), starts, (self.rows, *self.outer, 1))
        if self.columns is not None:
            ordered = own.reshape([self.columns[axis] for axis in self.order])
            own = ordered.transpose(np.argsort(self.order))
        return own.reshape(-1)

    def _offsets(self) -> tuple[tuple[int, ...], list[jax.Array | int], tuple[str, ...]]:
        """Return where this device's segments are among the segments of all devices.

        The result is a tuple (shape, start, names). An array with one number for each segment of
        all devices has the shape `shape`. The segments of this device start at the index `start` in
        this array. `names` are the mesh axes that split the leaf.
        """
        pairs = list(zip((*self.outer, 1), self.names, strict=True))
        shape = (self.rows, *(size * axis_size(names) for size, names in pairs))
        starts = [size * jax.lax.axis_index(names) if names else 0 for size, names in pairs]
        return shape, [0, *starts], tuple(name for names in self.names for name in names)


class Pack(NamedTuple):
    """Leaves that are filtered together: several small whole leaves, or one leaf of any kind."""

    members: list[int]
    segments: Segments | None  # of one leaf; None for several leaves
    rows: Rows


def smooth_recursive(leaves: Sequence[Leaf], operator: Operator, scope: Scope) -> list[jax.Array]:
    """Return the smoothed leaves: whole arrays or, inside `shard_map`, shards."""
    arrays, arrangements, specs, _ = zip(*leaves, strict=True)
    task = Task(arrangements, scope, operator.boundary)
    return _smooth_segments(arrays, operator.smoothing, specs, task)


def smooth_halo(leaves: Sequence[Leaf], operator: Operator, scope: Scope) -> list[jax.Array]:
    """Return the smoothed leaves, sharded like the leaves.

    Devices gather a leaf only if its sharding is unknown, or if its shards differ in shape. On
    automatic mesh axes of TPUs, XLA splits "recursive" by itself.
    """
    if manual_axes():
        return smooth_recursive(leaves, operator, scope)
    arrays, arrangements, _, _ = zip(*leaves, strict=True)
    task = Task(arrangements, scope, operator.boundary)
    smoothing = jnp.asarray(operator.smoothing, wide_dtype(*arrays))
    stated = [jax.typeof(array).sharding for array in arrays]
    explicit = [sharding for sharding in stated if sharding.mesh.explicit_axes]
    if explicit:
        specs = tuple(sharding.spec for sharding in stated)
        return _on_explicit_mesh(task, explicit[0].mesh, specs)(list(arrays), smoothing)
    fixed = operator.smoothing if isinstance(operator.smoothing, float) else None
    return _on_automatic_mesh(task, fixed)(*arrays, smoothing)


def _smooth_segments(
    arrays: Sequence[jax.Array], smoothing: jax.Array | float, specs: Sequence[jax.P], task: Task
) -> list[jax.Array]:
    """Return the smoothed arrays; `specs` say how manual mesh axes split each array."""
    arrangements, scope, boundary = task
    wide = [wide_dtype(*arrays) if scope == "tree" else wide_dtype(array) for array in arrays]
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, (arrangement, spec) in enumerate(zip(arrangements, specs, strict=True)):
        size = arrangement.grid[0]
        alone = any(spec) or math.prod(arrangement.shape) > size or size > _SMALL
        room = 1 << (size - 1).bit_length()
        groups.setdefault((index,) if alone else (wide[index], room), []).append(index)

    packs = []
    for members in groups.values():
        chosen = [(arrays[i].astype(wide[i]), arrangements[i]) for i in members]
        if len(members) == 1:
            packs.append(Pack(members, *_cut_rows(*chosen[0], specs[members[0]], smoothing)))
        else:
            packs.append(Pack(members, None, _stack_rows(chosen, smoothing)))
    if scope == "tree":
        sizes = [arrangement.grid[0] for arrangement in arrangements]
        carries = _carries_in_one_row(packs, sizes, boundary)
    else:
        carries = _carries_of_each_row(packs, boundary)

    results = dict[int, jax.Array]()
    for (members, segments, rows), carry in zip(packs, carries, strict=True):
        filtered = filter_rows(rows, carry)
        for place, index in enumerate(members):
            size, array = rows.sizes[place], arrays[index]
            if rows.upright:
                results[index] = filtered[:size].reshape(array.shape).astype(array.dtype)
            else:
                own = filtered if segments else filtered[place : place + 1]
                results[index] = arrangements[index].restore(own[:, :size], array)
    return [results[index] for index in range(len(arrays))]


def _stack_rows(
    leaves: Sequence[tuple[jax.Array, Arrangement]], smoothing: jax.Array | float
) -> Rows:
    """Return whole leaves as rows of one array, each padded to the size of the largest."""
    vectors = [arrangement.transpose(array).reshape(-1) for array, arrangement in leaves]
    sizes = [x.size for x in vectors]
    values = jnp.stack([jnp.pad(x, (0, max(sizes) - x.size)) for x in vectors])
    return prepare_rows(values, sizes, smoothing, upright=False, copied=False)


def _cut_rows(
    array: jax.Array, arrangement: Arrangement, spec: jax.P, smoothing: jax.Array | float
) -> tuple[Segments, Rows]:
    """Cut a leaf or shard into segments, and prepare them as rows to filter."""
    segments = _cut(arrangement, array, spec)
    upright = segments.columns is not None
    shape = (segments.length, -1) if upright else (-1, segments.length)
    values = (array if upright else arrangement.transpose(array)).reshape(shape)
    copied = not upright and arrangement.order != tuple(sorted(arrangement.order))
    sizes = [segments.length]
    return segments, prepare_rows(values, sizes, smoothing, upright=upright, copied=copied)


def _carries_of_each_row(packs: list[Pack], boundary: Boundary) -> list[Ends]:
    """Return the carries of each pack's segments for scope="leaf", in which rows are separate."""
    found = []
    for _, segments, rows in packs:
        kernel = rows.kernel
        if segments is None or segments.total == 1:
            found.append(CARRY_AT[boundary](rows.ends, rows.sizes, kernel))
            continue
        carries, ends = _link(segments, rows.ends, kernel)
        outer = CARRY_AT[boundary](ends, [segments.total * segments.length], kernel)
        found.append(_carries_here(segments, outer, carries, kernel))
    return found


def _carries_in_one_row(packs: list[Pack], sizes: list[int], boundary: Boundary) -> list[Ends]:
    """Return the carries of each pack's segments for scope="tree", which joins all leaves."""
    kernel = packs[-1].rows.kernel
    lefts, rights = dict[int, jax.Array](), dict[int, jax.Array]()
    within_leaves = []
    for members, segments, rows in packs:
        within, ends = _link(segments, rows.ends, kernel) if segments else (None, rows.ends)
        within_leaves.append(within)
        for place, index in enumerate(members):
            lefts[index], rights[index] = ends.left[place], ends.right[place]
    order = range(len(sizes))
    ends = Ends(*(jnp.stack([side[i] for i in order]) for side in (lefts, rights)))
    between, whole = link_unequal(ends, sizes, kernel)
    outer = CARRY_AT[boundary](whole, [sum(sizes)], kernel)
    places = as_array(list(accumulate(sizes, initial=0)), jnp.int32)
    carries = add_outer_carry(Ends(*(side[0] for side in outer)), between, places, kernel)
    found = []
    for (members, segments, _), within in zip(packs, within_leaves, strict=True):
        own = Ends(*(jnp.stack([side[index] for index in members]) for side in carries))
        found.append(_carries_here(segments, own, within, kernel) if segments and within else own)
    return found


def _link(segments: Segments, ends: Ends, kernel: Kernel) -> tuple[Ends, Ends]:
    """Call `link_equal` on all devices' segments of a leaf."""
    return link_equal(Ends(*map(segments.gather, ends)), segments.length, kernel)


def _carries_here(segments: Segments, outer: Ends, carries: Ends, kernel: Kernel) -> Ends:
    """Return the carries of this device's segments.

    `outer` has the carries of each row from outside the row. `carries` has the carries of each
    segment, on any device, from the other segments of its row.
    """
    places = segments.length * jnp.arange(segments.total + 1, dtype=jnp.int32)
    return Ends(*map(segments.keep_own, add_outer_carry(outer, carries, places, kernel)))


def _cut(arrangement: Arrangement, array: jax.Array, spec: jax.P) -> Segments:
    """Return how the rows of a leaf, or of a shard, are cut into segments."""
    shape = arrangement.shape_of(array)
    local = tuple(shape[axis] for axis in arrangement.order)
    names: list[tuple[str, ...]] = [()] * len(local)
    if any(spec):
        entries = [*spec, *[None] * (len(local) - len(spec))]
        names = [axis_names(entries[axis]) for axis in arrangement.order]
    first, end = len(local) - arrangement.trailing, len(local)
    split_axes = [axis for axis in range(first, end) if names[axis]]
    cut = max(split_axes, default=first)
    # If the axes that vary fastest among neighbours are stored first, each segment is a column.
    tops = (c for c in range(first, end) if arrangement.order[c:] == tuple(range(end - c)))
    top = next(tops, end)
    height = math.prod(local[top:])
    is_tall = 0 < top < end and _COLUMN <= height <= array.size // _COLUMN
    is_column = is_tall and (top == cut or not split_axes)
    cut = top if is_column else cut
    tall = end - top  # the number of axes that make up a column
    outer = local[first:cut]
    split = (*names[first:cut], names[cut] if cut < end else ())
    return Segments(
        rows=math.prod(local[:first]),
        outer=outer,
        names=split,
        length=math.prod(local[cut:]),
        total=math.prod(outer) * math.prod(axis_size(names) for names in split if names),
        columns=shape[tall:] if is_column else None,
        order=tuple(axis - tall for axis in arrangement.order[:top]) if is_column else (),
    )


@lru_cache(maxsize=256)
def _on_explicit_mesh(
    task: Task, mesh: jax.sharding.AbstractMesh, specs: tuple[jax.P, ...]
) -> Callable[[list[jax.Array], jax.Array], list[jax.Array]]:
    """Return a function that smooths `(arrays, σ)`, for arrays that are sharded as `specs` say."""
    mapped = jax.shard_map(
        lambda arrays, smoothing: _smooth_segments(arrays, smoothing, specs, task),
        mesh=mesh,
        in_specs=(list(specs), jax.P()),
        out_specs=list(specs),
        axis_names=set(mesh.explicit_axes),
        check_vma=False,
    )
    return jax.jit(mapped)  # outside jit, every operation would be compiled by itself


@lru_cache(maxsize=256)
def _on_automatic_mesh(task: Task, fixed: float | None) -> Callable[..., list[jax.Array]]:
    """Return a function that smooths `(*arrays, σ)` in the shardings that the compiler chooses.

    Under `vmap` and differentiation, the function does not split the arrays. `fixed` is σ if σ is a
    number, and otherwise None.
    """
    count = len(task.arrangements)

    def split_as(specs: Sequence[jax.P]) -> Callable[..., list[jax.Array]]:
        return lambda *operands: _smooth_segments(operands[:-1], operands[-1], specs, task)

    whole = split_as([jax.P()] * count)

    def partition(
        mesh: jax.sharding.Mesh, operands: Sequence[jax.ShapeDtypeStruct], results: object
    ) -> tuple[object, ...]:
        del results
        gathered = NamedSharding(mesh, jax.P())
        shardings = [operand.sharding for operand in operands]
        if not all(isinstance(sharding, NamedSharding) for sharding in shardings):
            shardings = [gathered] * len(operands)  # the axes of some operands are unknown
        for place, operand in enumerate(operands):
            if not _divides(operand.shape, shardings[place]):
                shardings[place] = gathered  # otherwise XLA would pad the shards
        specs = [sharding.spec for sharding in shardings[:-1]]
        return mesh, split_as(specs), shardings[:-1], tuple(shardings)

    def rule(mesh: object, operands: Sequence[jax.ShapeDtypeStruct], results: object) -> str:
        del mesh, results
        ranks = [len(operand.shape) for operand in operands[:-1]]
        dims = [" ".join(f"d{k}x{i}" for i in range(rank)) for k, rank in enumerate(ranks)]
        return f"{', '.join([*dims, ''])} -> {', '.join(dims)}"

    partitioned = custom_partitioning(whole)
    partitioned.def_partition(partition, sharding_rule=rule)
    mapped = jax.custom_batching.custom_vmap(lambda *operands: partitioned(*operands))

    @mapped.def_vmap
    def _(
        size: int, batched: Sequence[bool], *operands: jax.Array
    ) -> tuple[list[jax.Array], list[bool]]:
        del size
        axes = [0 if is_batched else None for is_batched in batched]
        return jax.vmap(whole, axes)(*operands), [True] * count

    smooth = jax.custom_jvp(lambda *operands: mapped(*operands))

    @smooth.defjvp
    def _(
        primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        return jax.jvp(whole, primals, tangents)

    def split_by_xla(*operands: jax.Array) -> list[jax.Array]:
        return whole(*operands[:-1], operands[-1] if fixed is None else fixed)

    # XLA:TPU does not compile custom partitioning: https://github.com/jax-ml/jax/issues/38196.
    return jax.jit(
        lambda *operands: jax.lax.platform_dependent(*operands, tpu=split_by_xla, default=smooth)
    )


def _divides(shape: tuple[int, ...], sharding: NamedSharding) -> bool:
    """Return whether all shards have the same shape."""
    counts = [math.prod(sharding.mesh.shape[n] for n in axis_names(e)) for e in sharding.spec]
    return not any(size % count for size, count in zip(shape, counts, strict=False))
