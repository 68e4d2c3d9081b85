"""Code under `shard_map` and `vmap`: what varies between shards, and a reduction under `vmap`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.custom_batching import custom_vmap

from optax_lsdp._types import PyTree


def manual_axes() -> tuple[str, ...]:
    """Return the mesh axes over which the surrounding shard_map or pmap maps, if any."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def is_spread() -> bool:
    """Tell whether a mesh is set over whose devices XLA may spread arrays."""
    mesh = jax.sharding.get_abstract_mesh()
    return any(mesh.shape[axis] > 1 for axis in set(mesh.axis_names) - set(mesh.manual_axes))


def are_shards_tracked() -> bool:
    """Tell whether JAX knows what varies: not under check_vma=False, and not in pmap."""
    return all(varying_axes([jax.lax.axis_index(axis)]) for axis in manual_axes())


def check_axes(named: tuple[str, ...], params: Any, by_example: Any) -> None:
    """Raise if it is not known whether a manual axis splits the parameters or the batch.

    Args:
        named: the axes over which the caller says that all parameters are replicated.
        params: the parameters.
        by_example: the batch and its mask.
    """
    unknown = {axis for axis in manual_axes() if axis_size((axis,)) > 1} - set(named)
    if are_shards_tracked():
        unknown -= varying_axes(params) ^ varying_axes(by_example)  # exactly one of them is split
    if unknown:
        raise ValueError(
            "`replicated_axes` must name the mesh axes inside shard_map over which all parameters "
            f"are replicated, got none for {', '.join(sorted(unknown))}, over which parameters and "
            "batch both vary, or neither, or JAX does not tell (check_vma=False, pmap); name it, "
            "or fold a shard's index into keys inside the loss."
        )


def varying_axes(tree: Any) -> set[str]:
    """Return the manual axes over which any leaf varies, as far as JAX tracks them.

    Leaves are arrays, or shapes with dtypes as `jax.eval_shape` returns them.
    """
    return {axis for leaf in jax.tree.leaves(tree) for axis in _varying(leaf)}


def vary(tree: Any, axes: Iterable[str]) -> Any:
    """Let every leaf vary over `axes`, though its shards are still equal.

    What varies is differentiated shard by shard. The gradient of what does not is the sum over
    all shards, which is no gradient of one example any more.
    """

    def vary_leaf(leaf: jax.Array) -> jax.Array:
        missing = tuple(sorted(set(axes) - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(vary_leaf, tree)


def axis_names(entry: Any) -> tuple[str, ...]:
    """Return the mesh axes that an entry of a PartitionSpec names."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def axis_size(names: tuple[str, ...]) -> int:
    """Return how many shards there are along manual mesh axes."""
    return jax.lax.psum(1, names) if names else 1


def with_automatic_axes(function: Callable[..., Any], out_shardings: Any) -> Callable[..., Any]:
    """Let XLA decide on shardings inside of `function`, if the mesh has axes that state them."""
    explicit = tuple(jax.sharding.get_abstract_mesh().explicit_axes)
    if not explicit:
        return function
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=out_shardings)


def stated_sharding(array: Any, axes: int | None = None) -> jax.P:
    """Return how the first `axes` axes of an array, or all, are stated to be sharded."""
    return jax.P(*tuple(jax.typeof(array).sharding.spec)[:axes])


def _varying(leaf: Any) -> frozenset[str]:
    is_described = isinstance(leaf, jax.ShapeDtypeStruct | jax.core.AbstractValue)
    kind: Any = leaf if is_described else jax.typeof(leaf)
    if hasattr(kind, "vma"):  # before jax 0.10
        return kind.vma or frozenset()
    manual = getattr(kind, "manual_axis_type", None)
    return manual.varying if manual else frozenset()


@custom_vmap
def all_under_vmap(condition: jax.Array) -> jax.Array:
    """Return the condition, a scalar; under `jax.vmap`, whether it holds of all that are mapped.

    So a `lax.cond` stays one branch under vmap, which would else take both.
    """
    return condition


@all_under_vmap.def_vmap
def _mapped(size: int, mapped: list[bool], condition: jax.Array) -> tuple[Any, bool]:
    del size
    return all_under_vmap(condition.all(axis=0) if mapped[0] else condition), False


class Shard(NamedTuple):
    """How the surrounding `shard_map` splits one leaf.

    Attributes:
        spec: the leaf's PartitionSpec. It names nothing outside `shard_map`.
        named: the mesh axes that `spec` names, in the order of the mesh.
        varying: the mesh axes over which the leaf's shards differ; None where JAX does not track
            them (check_vma=False, pmap).
        is_split: whether several devices may hold parts of the leaf, under `jit` too.
    """

    spec: jax.P
    named: tuple[str, ...]
    varying: frozenset[str] | None
    is_split: bool


def check_shard_specs(specs: PyTree) -> None:
    """Raise unless `specs` is None, a PartitionSpec or a tree of PartitionSpecs."""
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        if not _is_spec(spec):
            raise TypeError(
                "`shard_specs` must be None, a PartitionSpec or a tree of PartitionSpecs, got "
                f"{spec!r}; write jax.P('data') for leaves that the axis 'data' splits."
            )


def read_shards(specs: PyTree, leaves: Sequence[jax.Array]) -> list[Shard]:
    """Return how `shard_map` splits each leaf, where `specs` is the argument `shard_specs`."""
    if specs is None or _is_spec(specs):
        chosen = [jax.P() if specs is None else specs] * len(leaves)
    else:
        chosen = jax.tree.leaves(specs, is_leaf=_is_spec)
    if len(chosen) != len(leaves):
        raise ValueError(
            "`shard_specs` must be a PartitionSpec, or a tree of them like `updates`, "
            f"got {len(chosen)} of them for {len(leaves)} arrays."
        )
    axes = manual_axes()
    if not axes and specs is not None:
        raise ValueError(
            f"`shard_specs` must be None outside shard_map, got {specs}; arrays that are sharded "
            "under jit need no specs."
        )
    if not axes:
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


def _may_be_split(leaf: jax.Array) -> bool:
    """Tell whether a leaf outside `shard_map` is, or may be, spread over several devices."""
    stated = jax.typeof(leaf).sharding
    if stated.mesh.explicit_axes:
        return any(stated.spec)
    if jax.sharding.get_abstract_mesh().explicit_axes:
        return False  # before jax 0.10, an array on one device does not state the mesh
    return jax.device_count() > 1


def _is_spec(node: object) -> bool:
    return isinstance(node, jax.P)
