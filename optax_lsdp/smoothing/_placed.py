"""Placed leaves: updates and what `shards` says of them go in, leaves with walks come out."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import optax

from optax_lsdp._mesh import (
    are_shards_tracked,
    axis_names,
    axis_size,
    manual_axes,
    varying_axes,
)
from optax_lsdp.smoothing._layout import Layout, Walk, choose_walk


class Leaf(NamedTuple):
    """A leaf or a shard, the walk over the whole of it, and how shard_map splits it."""

    array: jax.Array
    walk: Walk
    spec: jax.P


def place(layout: Layout, path: str, leaf: jax.Array, spec: jax.P) -> Leaf | None:
    """Choose the walk over a leaf, or None to leave it alone; raise if it is an unknown shard."""
    if not leaf.size:
        return None
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"`shards` must name at most as many axes as an array has, got {spec} for {leaf.shape} "
            f"at {path!r}; pass a tree of PartitionSpecs."
        )
    named = {name for entry in spec for name in axis_names(entry)}
    unknown = varying_axes(leaf) - named
    if unknown:
        raise ValueError(
            "`updates` must be whole inside shard_map, got a shard over "
            f"{', '.join(sorted(unknown))} at {path!r}; sum it with jax.lax.psum, or say with "
            "`shards` along which axes it is split."
        )
    counts = [axis_size(axis_names(entry)) for entry in spec] + [1] * (leaf.ndim - len(spec))
    shape = tuple(n * count for n, count in zip(leaf.shape, counts, strict=True))
    walk = choose_walk(layout, path, shape)
    return None if walk is None else Leaf(leaf, walk, spec)


def read_specs(shards: Any, updates: optax.Updates) -> list[jax.P]:
    """Return a PartitionSpec for each leaf."""
    if shards is None and manual_axes() and not are_shards_tracked():
        raise ValueError(
            "`shards` must be given where JAX does not track what varies (check_vma=False, pmap), "
            "got None; PartitionSpec() says that updates are whole."
        )
    count = len(jax.tree.leaves(updates))
    if shards is None:
        return [jax.P()] * count
    specs = jax.tree.leaves(shards, is_leaf=lambda x: isinstance(x, jax.P))
    if isinstance(shards, jax.P):
        specs = [shards] * count
    if len(specs) != count:
        raise ValueError(
            "`shards` must be a PartitionSpec, or a tree of them like `updates`, "
            f"got {len(specs)} of them for {count} arrays."
        )
    if not manual_axes():
        raise ValueError("`shards` must be given inside shard_map alone, got them outside of it.")
    return specs


def check_whole_grids(method: str, walk: Walk, spec: jax.P) -> None:
    """Raise if a shard is not made of whole grids, which all methods but "halo" need."""
    split = {axis for axis, entry in enumerate(spec) if entry is not None}
    if split and (walk.reshapes or split & set(walk.order[len(walk.order) - walk.trailing :])):
        raise ValueError(
            f"`shards` must leave whole what {method!r} smooths along, got {spec} for an array of "
            f"{walk.shape}; gather it first, or use method='halo' (order 1, one axis)."
        )
