"""Query the mesh inside `jit` and `shard_map`, sum over shards, and reduce conditions under `vmap`.

Inside `shard_map` or `pmap`, a mesh axis is *manual*: each shard runs the function by itself. A
value *varies* over a manual axis if shards along the axis may hold different values. JAX tracks
which values vary, except with check_vma=False and in `pmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from optax_lsdp._types import PyTree

_Function = TypeVar("_Function", bound=Callable[..., PyTree])
_SMALL, _JOINED = 2**12, 16  # leaves of so few entries are joined in `sum_trees`, so many at a time


def manual_axes() -> tuple[str, ...]:
    """Return the mesh axes of the surrounding shard_map or pmap, if there is one."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def are_shards_tracked() -> bool:
    """Return whether JAX tracks which values may differ between shards (`check_vma=True`)."""
    return all(varying_axes([jax.lax.axis_index(axis)]) for axis in manual_axes())


def varying_axes(tree: PyTree) -> set[str]:
    """Return the manual mesh axes over which any leaf varies. Accept results of `eval_shape`."""
    return {axis for leaf in jax.tree.leaves(tree) for axis in _varying(leaf)}


def _varying(leaf: PyTree) -> frozenset[str]:
    is_described = isinstance(leaf, jax.ShapeDtypeStruct | jax.core.AbstractValue)
    described = leaf if is_described else jax.typeof(leaf)
    if hasattr(described, "vma"):  # before jax 0.10
        return described.vma or frozenset()
    manual = getattr(described, "manual_axis_type", None)
    return manual.varying if manual else frozenset()


def vary(tree: PyTree, axes: Iterable[str]) -> PyTree:
    """Mark every leaf as varying over `axes`. The values do not change.

    JAX then computes one gradient per shard. Otherwise it would add up the gradients of all shards,
    and the sum is not the gradient of one example.
    """

    def vary_leaf(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(set(axes) - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary_leaf, tree)


def axis_names(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the mesh axes that one entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axis_size(names: tuple[str, ...]) -> int:
    """Return the number of shards along manual mesh axes."""
    return jax.lax.psum(1, names) if names else 1


def check_replicated_axes(named: tuple[str, ...], params: PyTree, batch_and_mask: PyTree) -> None:
    """Raise if it is unknown whether a manual axis splits the parameters or the batch.

    `named` are axes over which the caller says that all parameters are replicated.
    """
    unknown = {axis for axis in manual_axes() if axis_size((axis,)) > 1} - set(named)
    if are_shards_tracked():
        # If only the parameters vary over an axis, or only the batch, the axis splits nothing else.
        unknown -= varying_axes(params) ^ varying_axes(batch_and_mask)
    if unknown:
        raise ValueError(
            "`replicated_axes` must name the mesh axes of shard_map over which all parameters are "
            f"replicated, if JAX cannot tell, got none for {', '.join(sorted(unknown))}; name this "
            "axis if it splits no parameters; otherwise use check_vma=True, pass the same batch to "
            "all its shards, and make keys that differ between these shards inside the loss."
        )


def is_multi_device_mesh() -> bool:
    """Return whether XLA may split arrays over several devices along axes that are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in set(mesh.axis_names) - set(mesh.manual_axes))


def with_automatic_axes(function: _Function, out_shardings: PyTree) -> _Function:
    """Let XLA choose the shardings inside `function` if the mesh has explicit axes."""
    explicit = tuple(jax.sharding.get_abstract_mesh().explicit_axes)
    if not explicit:
        return function
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=out_shardings)


def explicit_spec(array: jax.typing.ArrayLike, axes: int | None = None) -> jax.P:
    """Return the explicit sharding of an array's first `axes` axes, by default of all."""
    return jax.P(*tuple(jax.typeof(array).sharding.spec)[:axes])


@custom_vmap
def all_under_vmap(condition: jax.Array) -> jax.Array:
    """Return a scalar condition or, under `jax.vmap`, whether it holds for all mapped values.

    So a `lax.cond` on the result runs only one branch under `vmap`.
    """
    return condition


@all_under_vmap.def_vmap
def _reduce_mapped(size: int, mapped: list[bool], condition: jax.Array) -> tuple[jax.Array, bool]:
    del size
    return all_under_vmap(condition.all(axis=0) if mapped[0] else condition), False


class Shard(NamedTuple):
    """How the surrounding `shard_map` splits one leaf."""

    spec: jax.P  # empty outside `shard_map`
    named: tuple[str, ...]  # the mesh axes that `spec` names, in the order of the mesh
    varying: frozenset[str] | None  # the manual axes over which the leaf varies; None if untracked
    is_split: bool  # whether several devices may hold parts of the leaf, in `shard_map` or `jit`

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Return the mesh axes along which the shards of the leaf hold different entries."""
        return tuple(x for x in self.named if self.varying is None or x in self.varying)


def check_shard_specs(specs: PyTree) -> None:
    """Raise unless `specs` is None, a PartitionSpec or a tree of PartitionSpecs."""
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        if not _is_spec(spec):
            raise TypeError(
                "`shard_specs` must be None, a PartitionSpec or a tree of PartitionSpecs, got "
                f"{spec!r}; write jax.P('data') for leaves that the axis 'data' splits."
            )


def spread_specs(specs: PyTree, updates: PyTree) -> PyTree:
    """Return a spec for each leaf of `updates` if `specs` is a prefix tree of `updates`."""
    if specs is None or _is_spec(specs):
        return specs
    try:
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: spec, part), specs, updates, is_leaf=_is_spec
        )
    except ValueError:  # not a prefix tree; `read_shards` compares the numbers of leaves
        return specs


def read_shards(specs: PyTree, leaves: Sequence[jax.Array]) -> list[Shard]:
    """Return how `shard_map` splits each leaf; `specs` is the user's argument `shard_specs`."""
    if specs is None or _is_spec(specs):
        chosen = [jax.P() if specs is None else specs] * len(leaves)
    else:
        chosen = jax.tree.leaves(specs, is_leaf=_is_spec)
    if len(chosen) != len(leaves):
        raise ValueError(
            "`shard_specs` must be a PartitionSpec, or a tree with one for each leaf of `updates`, "
            f"got {len(chosen)} for {len(leaves)} leaves."
        )
    axes = manual_axes()
    if not axes:
        if specs is not None:
            raise ValueError(
                f"`shard_specs` must be None outside shard_map, got {specs}; leave it out: arrays "
                "that `jit` shards need no specs."
            )
        return [Shard(jax.P(), (), frozenset(), _may_be_split(leaf)) for leaf in leaves]
    tracked = are_shards_tracked()
    return [
        Shard(
            spec,
            tuple(axis for axis in axes if any(axis in axis_names(entry) for entry in spec)),
            _varying(leaf) if tracked else None,
            any(spec),
        )
        for spec, leaf in zip(chosen, leaves, strict=True)
    ]


def sum_leaves(
    shards: Sequence[Shard], terms: Callable[..., tuple[jax.Array, ...]], *trees: PyTree
) -> list[jax.Array]:
    """Return, for each leaf, the sums of its `terms` over all entries and shards.

    `terms` computes one or more arrays from the same leaf of all `trees`.
    """
    sums = []
    for shard, *leaves in zip(shards, *map(jax.tree.leaves, trees), strict=True):
        here = stack_scalars([jnp.sum(term).astype(float) for term in terms(*leaves)])
        sums.append(jax.lax.psum(here, shard.split_axes) if shard.split_axes else here)
    return sums


def sum_trees(
    shards: Sequence[Shard], terms: Callable[..., tuple[jax.Array, ...]], *trees: PyTree
) -> jax.Array:
    """Return the sums of `terms` over all entries of all leaves: `sum_leaves`, added up.

    Small leaves that no mesh splits are joined, because XLA for CPUs runs some fifteen kernels for
    each leaf, however small. A few are joined at a time, because the kernel that joins them
    searches for the leaf of every entry.
    """
    parts: list[tuple[Shard, tuple[jax.Array, ...]]] = []
    small: dict[object, list[tuple[jax.Array, ...]]] = {}
    for shard, *leaves in zip(shards, *map(jax.tree.leaves, trees), strict=True):
        if leaves[0].size > _SMALL or any(map(_may_be_split, leaves)) or manual_axes():
            parts.append((shard, tuple(leaves)))
        else:
            group = small.setdefault(tuple(leaf.dtype for leaf in leaves), [])
            group.append(tuple(leaf.reshape(-1) for leaf in leaves))
    whole = Shard(jax.P(), (), frozenset(), is_split=False)
    for group in small.values():
        for first in range(0, len(group), _JOINED):
            flat = map(jnp.concatenate, zip(*group[first : first + _JOINED], strict=True))
            parts.append((whole, tuple(flat)))
    sums = [sum_leaves([shard], terms, *([x] for x in leaves))[0] for shard, leaves in parts]
    return sum(sums, jnp.zeros([]))


def stack_scalars(values: Sequence[jax.Array]) -> jax.Array:
    """Return `jnp.stack(values)` for scalars, which XLA for CPUs compiles to one kernel.

    It compiles `jnp.stack` to one kernel for each scalar, which costs small models time.
    """
    place, stacked = jnp.arange(len(values)), jnp.zeros(len(values))
    for index, value in enumerate(values):
        stacked = jnp.where(place == index, value, stacked)
    return stacked


def largest_entry(shards: Sequence[Shard], tree: PyTree) -> jax.Array:
    """Return the largest magnitude of an entry of any leaf on any shard."""
    largest = jnp.zeros([])
    for shard, leaf in zip(shards, jax.tree.leaves(tree), strict=True):
        here = jnp.max(jnp.abs(leaf), initial=0).astype(float)
        here = jax.lax.pmax(here, shard.split_axes) if shard.split_axes else here
        largest = jnp.maximum(largest, here)
    return largest


def _may_be_split(leaf: jax.Array) -> bool:
    """Return whether a leaf outside `shard_map` is possibly split over several devices."""
    stated = jax.typeof(leaf).sharding
    if stated.mesh.explicit_axes:
        return any(stated.spec)
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return False  # before jax 0.10, the type of an array on one device has no mesh
    return jax.device_count() > 1


def _is_spec(node: object) -> bool:
    return isinstance(node, jax.P)
