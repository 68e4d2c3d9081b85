"""Shards: leaves on any kind of mesh go in, leaves on the same mesh come out, never gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from optax_lsdp._mesh import axis_names, manual_axes
from optax_lsdp._trees import wide_dtype
from optax_lsdp.smoothing._leaves import Plan, smooth_leaves


def may_be_split(leaf: jax.Array, spec: jax.P) -> bool:
    """Tell whether a leaf is, or may be, spread over several devices."""
    if manual_axes():
        return any(spec)
    mesh = jax.typeof(leaf).sharding.mesh
    if mesh.explicit_axes:
        return any(jax.typeof(leaf).sharding.spec)
    if jax.sharding.get_abstract_mesh().explicit_axes:  # before jax 0.10: on one device, as it
        return False  # does not state this mesh
    return jax.device_count() > 1


def smooth_shards(
    leaves: Sequence[jax.Array], smoothing: jax.Array | float, specs: Sequence[jax.P], plan: Plan
) -> list[jax.Array]:
    """Smooth leaves where they lie; `specs` are those of a surrounding shard_map."""
    if manual_axes():
        return smooth_leaves(leaves, smoothing, specs, plan)
    smoothing = jnp.asarray(smoothing, wide_dtype(*leaves))
    stated = [jax.typeof(leaf).sharding for leaf in leaves]
    explicit = [sharding for sharding in stated if sharding.mesh.explicit_axes]
    if explicit:
        parts = tuple(sharding.spec for sharding in stated)
        return _mapped(plan, explicit[0].mesh, parts)(list(leaves), smoothing)
    return _partitioned(plan)(*leaves, smoothing)


@lru_cache(maxsize=256)
def _mapped(plan: Plan, mesh: Any, parts: tuple[jax.P, ...]) -> Callable[..., list[jax.Array]]:
    """Return a function of leaves that are split as stated, and σ."""

    def run(leaves: list[jax.Array], smoothing: jax.Array) -> list[jax.Array]:
        return smooth_leaves(leaves, smoothing, parts, plan)

    mapped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(list(parts), jax.P()),
        out_specs=list(parts),
        axis_names=set(mesh.explicit_axes),
        check_vma=False,
    )
    return jax.jit(mapped)  # outside of jit every operation would be compiled by itself


@lru_cache(maxsize=256)
def _partitioned(plan: Plan) -> Callable[..., list[jax.Array]]:
    """Return a function of leaves and σ that is told by the compiler how they are split.

    Mapped or differentiated, it is an ordinary function.
    """
    count = len(plan.walks)

    def whole(*operands: jax.Array) -> list[jax.Array]:
        *leaves, smoothing = operands
        return smooth_leaves(leaves, smoothing, [jax.P()] * count, plan)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        shardings = [operand.sharding for operand in operands]
        named = all(isinstance(sharding, NamedSharding) for sharding in shardings)
        if not named:  # a mesh that has no names: gather
            shardings = [NamedSharding(mesh, jax.P())] * len(operands)
        for place, operand in enumerate(operands):
            if not _divides(operand.shape, shardings[place]):  # shards would be padded: gather
                shardings[place] = NamedSharding(mesh, jax.P())
        specs = [sharding.spec for sharding in shardings[:-1]]

        def lower(*operands: jax.Array) -> list[jax.Array]:
            *leaves, smoothing = operands
            return smooth_leaves(leaves, smoothing, specs, plan)

        return mesh, lower, shardings[:-1], tuple(shardings)

    def rule(mesh: Any, operands: Any, results: Any) -> str:
        del mesh, results
        ranks = [len(operand.shape) for operand in operands[:-1]]
        dims = [" ".join(f"d{k}x{i}" for i in range(rank)) for k, rank in enumerate(ranks)]
        return f"{', '.join([*dims, ''])} -> {', '.join(dims)}"

    split = custom_partitioning(whole)
    split.def_partition(partition, sharding_rule=rule)
    mapped = jax.custom_batching.custom_vmap(lambda *operands: split(*operands))

    @mapped.def_vmap
    def _(size: int, batched: Sequence[bool], *operands: jax.Array) -> Any:
        del size
        axes = [0 if is_batched else None for is_batched in batched]
        return jax.vmap(whole, axes)(*operands), [True] * count

    smooth = jax.custom_jvp(lambda *operands: mapped(*operands))

    @smooth.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(whole, primals, tangents)

    return jax.jit(smooth)


def _divides(shape: tuple[int, ...], sharding: NamedSharding) -> bool:
    """Tell whether all shards have the same shape."""
    counts = [math.prod(sharding.mesh.shape[n] for n in axis_names(e)) for e in sharding.spec]
    return not any(size % count for size, count in zip(shape, counts, strict=False))
