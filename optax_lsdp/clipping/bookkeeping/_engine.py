"""The bookkeeping engine: find uses → one backward pass → bounds on norms → factors → sums.

No branch of the program depends on the examples, so the time of a step does not depend on them. The
clip factors come from upper bounds on the norms. If the rows of an example's gradient cancel almost
entirely, the example is clipped harder than necessary. This is sound, and rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._isolation import ValueAndAux
from optax_lsdp._mesh import is_multi_device_mesh
from optax_lsdp._trees import wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import ClipStyle, ExampleNorms, bound_norms, clip_factors
from optax_lsdp.clipping.bookkeeping._backward import Recorded, run_backward
from optax_lsdp.clipping.bookkeeping._leaves import LossAnalysis, ParameterLeaf, join_concatenated
from optax_lsdp.clipping.bookkeeping._platforms import CPU, EMULATED, PLATFORMS, Platform
from optax_lsdp.clipping.bookkeeping._strategy import Kind, choose
from optax_lsdp.clipping.bookkeeping.strategies.bounds import (
    NormBound,
    gram_bound,
    joint_bound,
    kept_bound,
    outer_bound,
)
from optax_lsdp.clipping.bookkeeping.strategies.convolution import (
    convolution_bound,
    convolution_sums,
)
from optax_lsdp.clipping.bookkeeping.strategies.kept import form_gradients, joined_rows, kept_sums
from optax_lsdp.clipping.bookkeeping.strategies.terms import (
    Rounded,
    part_factors,
    round_recorded,
    weighted_leaves,
)

_SMALL = 2**15  # gradients with up to this many entries, over all examples, are handled together

_BY_FACTORS = {"outer product": outer_bound, "Gram matrices": gram_bound}
_CONVOLVED = ("by offset", "by patches", "Gram matrices of patches")


class LeafGradient(NamedTuple):
    """All examples' gradients of one or several leaves, multiplied by the scale of the leaves.

    Attributes:
        bound: the bound on each example's norm.
        weighted_sums: a function of n clip factors cᵢ that returns Σᵢ cᵢGᵢ of each leaf, by index.
    """

    bound: NormBound
    weighted_sums: Callable[[jax.Array], dict[int, jax.Array]]


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

    `counted` has one bool per example. Examples contribute zero if it is False, or if their
    gradient is not finite.
    """
    rounded = round_recorded(recorded, leaves, analysis.uses, groups, platform)
    dtype = wide_dtype(*leaves, *jax.tree.leaves(recorded))
    zero, rounding = jnp.zeros(counted.shape, dtype), 3 * platform.unit(dtype)
    units = _units(analysis, groups, platform)
    norms, bounds_after, weighted, alive = {}, {}, [], counted
    for path, clip_norm in dict(groups).items():
        members = [(leaf, kind) for leaf, kind in units if groups[leaf.index].path == path]
        gradients = leaf_gradients(members, rounded)
        bounds = [gradient.bound for gradient in gradients]
        bound = group_bound(bounds, zero, rounded.scales[members[0][0].index], platform)
        norms[path], upper = bound.norm, bound.upper + bound.rounding
        factors = clip_factors(upper, clip_norm, style=style, rounding=rounding)
        bounds_after[path] = bound_norms(upper, factors, rounding)
        weighted.append((gradients, factors))
        alive &= jnp.isfinite(upper)
    unused = [leaf.index for leaf, kind in units if kind == "unused"]
    sums = {i: jnp.zeros(leaves[i].shape, wide_dtype(leaves[i])) for i in unused}
    for gradients, factors in weighted:
        for gradient in gradients:
            sums |= gradient.weighted_sums(jnp.where(alive, factors, zero))
    scaled = zip(rounded.scales, (sums[index] for index in range(len(leaves))), strict=True)
    bounds_after = {path: jnp.where(alive, x, jnp.inf) for path, x in bounds_after.items()}
    both = ExampleNorms(norms, bounds_after)
    return both, [total / jnp.asarray(scale, total.dtype) for scale, total in scaled]


def _units(
    analysis: LossAnalysis, groups: Sequence[ClipGroup], platform: Platform
) -> list[tuple[ParameterLeaf, Kind]]:
    """Return leaves and their strategies. Joined leaves are separated again if materialised."""
    units = []
    for leaf in join_concatenated(analysis, groups):
        kind = choose(leaf, platform).kind
        parts = [analysis.leaves[index] for index, _ in leaf.pieces if kind == "materialised"]
        units += [(part, choose(part, platform).kind) for part in parts] or [(leaf, kind)]
    return units


def leaf_gradients(
    leaves: Sequence[tuple[ParameterLeaf, Kind]], rounded: Rounded
) -> list[LeafGradient]:
    """Return the gradients of the leaves of one group, each by its strategy.

    Leaves that the loss does not use are left out. On accelerators, starting many small kernels
    takes longer than their work. So small gradients that are stored, such as those of biases, are
    handled together.
    """
    gradients, platform = [], rounded.platform
    small: dict[object, dict[int, jax.Array]] = {}
    is_apart = platform is CPU or is_multi_device_mesh()  # on a mesh, joining could gather shards
    for leaf, kind in leaves:
        if kind in _BY_FACTORS:
            parts = [_BY_FACTORS[kind](part, platform) for part in part_factors(leaf, rounded)]
            sums = partial(weighted_leaves, leaf, rounded)
            gradients.append(LeafGradient(joint_bound(parts, platform), sums))
        elif kind in _CONVOLVED:
            (term,) = leaf.terms
            bound = convolution_bound(term, *rounded.of(term, leaf.index), platform, kind)
            gradients.append(LeafGradient(bound, partial(convolution_sums, leaf, rounded)))
        elif kind != "unused":
            rows = form_gradients(leaf, rounded)
            if is_apart or rows.size > _SMALL:
                gradients.append(_kept({leaf.index: rows}, platform))
            else:
                small.setdefault(rows.dtype, {})[leaf.index] = rows
    return gradients + [_kept(rows, platform) for rows in small.values()]


def _kept(rows: dict[int, jax.Array], platform: Platform) -> LeafGradient:
    """Return gradients that are stored for every example."""
    bound = kept_bound(joined_rows(rows), platform)
    return LeafGradient(bound, partial(kept_sums, rows, platform))


def group_bound(
    bounds: Sequence[NormBound], zero: jax.Array, scale: ArrayLike, platform: Platform
) -> NormBound:
    """Return the joint bound of the leaves of one group, with the scale removed."""
    if not bounds:
        return NormBound(zero, zero, zero)
    wide = [NormBound(*(x.astype(zero.dtype) for x in bound)) for bound in bounds]
    return NormBound(*(x / jnp.asarray(scale, x.dtype) for x in joint_bound(wide, platform)))
