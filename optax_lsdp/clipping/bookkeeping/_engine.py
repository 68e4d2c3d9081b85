"""The bookkeeping engine: find uses → one backward pass → bounds on norms → factors → sums.

The program has no branch that depends on an example, so the time of a step depends on no example.
The clip factors come from upper bounds on the norms. Rows that cancel almost entirely are clipped
harder than they need to be; this is sound, and rare.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._isolation import ValueAndAux
from optax_lsdp._trees import wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import ClipStyle, ExampleNorms, bound_norms, clip_factors
from optax_lsdp.clipping.bookkeeping._backward import Recorded, run_backward
from optax_lsdp.clipping.bookkeeping._leaves import (
    LossAnalysis,
    ParameterLeaf,
    join_concatenated,
)
from optax_lsdp.clipping.bookkeeping._platforms import CPU, EMULATED, PLATFORMS, Platform
from optax_lsdp.clipping.bookkeeping._rounded import round_recorded
from optax_lsdp.clipping.bookkeeping._strategy import choose
from optax_lsdp.clipping.bookkeeping.strategies import NormBound, joint_bound, leaf_gradients


def clip_by_bookkeeping(
    loss_fn: ValueAndAux,
    params: optax.Params,
    batch: PyTree,
    mask: jax.Array | None,
    *,
    groups: list[ClipGroup],
    style: ClipStyle,
) -> tuple[tuple[jax.Array, PyTree], ExampleNorms, optax.Updates]:
    """Return each example's (value, aux), the norms of each group, and the clipped sum.

    The backward pass is the same on all platforms. How norms and sums are computed depends on the
    platform for which XLA compiles the program.
    """
    outputs, recorded, analysis = run_backward(loss_fn, params, batch)
    counted = jnp.ones(outputs[0].shape, bool) if mask is None else mask
    clip = partial(clip_recorded, analysis, jax.tree.leaves(params), groups, style)
    platforms = EMULATED.get() or PLATFORMS
    branches = {name: partial(clip, platform) for name, platform in platforms.items()}
    default = branches.pop(CPU.name)
    norms, sums = jax.lax.platform_dependent(recorded, counted, **branches, default=default)
    return outputs, norms, jax.tree.unflatten(jax.tree.structure(params), sums)


def clip_recorded(
    analysis: LossAnalysis,
    leaves: Sequence[jax.Array],
    groups: Sequence[ClipGroup],
    style: ClipStyle,
    platform: Platform,
    recorded: Recorded,
    counted: jax.Array,
) -> tuple[ExampleNorms, list[jax.Array]]:
    """Return the norms of each group, and the clipped sum of each leaf.

    Examples that are not `counted`, (n,), contribute zero, as do examples that are not finite.
    """
    rounded = round_recorded(recorded, leaves, analysis.uses, groups, platform)
    dtype = wide_dtype(*leaves, *jax.tree.leaves(recorded))
    zero, rounding = jnp.zeros(counted.shape, dtype), 3 * platform.unit(dtype)
    units = [
        (leaf, choose(leaf, platform).kind) for leaf in _units(analysis.leaves, groups, platform)
    ]
    norms, bounds_after, weighted, alive = {}, {}, [], counted
    for path, clip_norm in dict(groups).items():
        members = [(leaf, kind) for leaf, kind in units if groups[leaf.index].path == path]
        gradients = leaf_gradients(members, rounded)
        bounds = [gradient.bound() for gradient in gradients]
        bound = group_bound(bounds, zero, rounded.scales[members[0][0].index], platform)
        norms[path], upper = bound.norm, bound.upper + bound.rounding
        factors = clip_factors(upper, clip_norm, style=style, rounding=rounding)
        bounds_after[path] = bound_norms(upper, factors, rounding)
        weighted.append((gradients, factors))
        alive &= jnp.isfinite(upper)
    sums: dict[int, jax.Array] = {}
    for gradients, factors in weighted:
        for gradient in gradients:
            sums |= gradient.weighted_sums(jnp.where(alive, factors, zero))
    scaled = zip(rounded.scales, (sums[index] for index in range(len(leaves))), strict=True)
    bounds_after = {path: jnp.where(alive, x, jnp.inf) for path, x in bounds_after.items()}
    both = ExampleNorms(norms, bounds_after)
    return both, [total / jnp.asarray(scale, total.dtype) for scale, total in scaled]


def _units(
    leaves: Sequence[ParameterLeaf], groups: Sequence[ClipGroup], platform: Platform
) -> Iterator[ParameterLeaf]:
    """Yield the leaves, joined where one product serves several and forms no gradient."""
    for leaf in join_concatenated(leaves, groups):
        if leaf.pieces and choose(leaf, platform).kind == "materialised":
            yield from (leaves[index] for index, _ in leaf.pieces)
        else:
            yield leaf


def group_bound(
    bounds: Sequence[NormBound | None], zero: jax.Array, scale: ArrayLike, platform: Platform
) -> NormBound:
    """Return the joint bound of the leaves of one group, in units of the gradient."""
    used = [bound for bound in bounds if bound is not None]
    if not used:
        return NormBound(zero, zero, zero)
    joint = joint_bound(
        [NormBound(*(x.astype(zero.dtype) for x in bound)) for bound in used], platform
    )
    return NormBound(*(x / jnp.asarray(scale, x.dtype) for x in joint))
