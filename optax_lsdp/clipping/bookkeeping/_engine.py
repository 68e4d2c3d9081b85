"""The bookkeeping engine: uses → one backward pass → norm bounds → clip factors → clipped sums.

No branch of the engine depends on the examples, so the time that the engine takes does not depend
on them either. The clip factors come from upper bounds on the norms. An example's gradient is a sum
of outer products. If these products cancel almost entirely, the upper bound is far above the norm,
and the engine clips the gradient more than necessary. This is rare, and as private as any clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._isolation import ValueAndAux
from optax_lsdp._mesh import is_multi_device_mesh
from optax_lsdp._trees import wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import ClipStyle, ExampleNorms, bound_norms, clip_factors
from optax_lsdp.clipping.bookkeeping._backward import (
    Recorded,
    Rounded,
    round_recorded,
    run_backward,
)
from optax_lsdp.clipping.bookkeeping._platforms import CPU, EMULATED, PLATFORMS, Platform
from optax_lsdp.clipping.bookkeeping._strategy import (
    Kind,
    LossAnalysis,
    ParameterLeaf,
    analyse_batch,
    choose,
)
from optax_lsdp.clipping.bookkeeping.strategies.bounds import NormBound, joint_bound
from optax_lsdp.clipping.bookkeeping.strategies.convolution import Convolved
from optax_lsdp.clipping.bookkeeping.strategies.leaves import ByFactors, Formed, form_gradients

_SMALL = 2**15  # join leaves whose gradients, over all examples, have at most this many entries
_UNFORMED: dict[Kind, type[ByFactors] | type[Convolved]] = {
    "outer product": ByFactors,
    "Gram matrices": ByFactors,
    "Gram matrices of patches": Convolved,
    "by offset": Convolved,
    "by patches": Convolved,
}


class LeafGradient(Protocol):
    """All examples' gradients of one or several leaves, multiplied by `Rounded.scales`."""

    def bounds(self) -> list[NormBound]:
        """Return one bound for each part of the leaves. Different parts share no entry."""

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ of each leaf: cᵢ is `factors[i]`, and Gᵢ the gradient of example i."""


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
    analysis = analyse_batch(loss_fn, params, batch, groups)
    outputs, recorded = run_backward(analysis, params, batch)
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

    `counted` has one bool per example. An example contributes zero if its bool is False, or if its
    gradient is not finite.
    """
    rounded = round_recorded(recorded, leaves, analysis.uses, groups, style, platform)
    dtype = wide_dtype(*leaves, *jax.tree.leaves(recorded))
    rounding, alive = 3 * max(platform.unit(wide_dtype(leaf)) for leaf in leaves), counted
    gradients, norms, after, factors = {}, {}, {}, {}
    for path, clip_norm in dict(groups).items():
        members = [leaf for leaf in analysis.leaves if groups[leaf.indices[0]].path == path]
        gradients[path] = leaf_gradients(members, rounded)
        found = [bound for gradient in gradients[path] for bound in gradient.bounds()]
        scale = rounded.scales[members[0].indices[0]]
        zeros = NormBound(*[jnp.zeros(counted.shape, dtype)] * 3)
        bound = joint_bound(found, platform) if found else zeros
        norm, upper, coarse = (x.astype(dtype) / jnp.asarray(scale, dtype) for x in bound)
        norms[path], upper = norm, upper + coarse
        factors[path] = clip_factors(upper, clip_norm, style=style, rounding=rounding)
        after[path] = bound_norms(upper, factors[path], rounding)
        alive &= jnp.isfinite(upper)
    sums = {i: jnp.zeros(leaf.shape, wide_dtype(leaf)) for i, leaf in enumerate(leaves)}
    for path in gradients:
        kept = jnp.where(alive, factors[path], jnp.zeros_like(factors[path]))
        for gradient in gradients[path]:
            sums |= gradient.weighted_sums(kept)
    scaled = zip(rounded.scales, sums.values(), strict=True)
    after = {path: jnp.where(alive, bound, jnp.inf) for path, bound in after.items()}
    clipped = [total / jnp.asarray(scale, total.dtype) for scale, total in scaled]
    return ExampleNorms(norms, after), clipped


def leaf_gradients(leaves: Sequence[ParameterLeaf], rounded: Rounded) -> list[LeafGradient]:
    """Return the gradients of leaves, using the cheapest strategy on the platform for each leaf.

    Leaves that the loss does not use are left out. On accelerators, it takes longer to start a
    small kernel than to run it. So small stored gradients, such as the gradients of biases, are
    joined in one `Formed`.
    """
    gradients, platform = list[LeafGradient](), rounded.platform
    small: dict[object, dict[int, jax.Array]] = {}
    is_apart = platform is CPU or is_multi_device_mesh()  # on a mesh, joining could gather shards
    for leaf in leaves:
        kind = choose(leaf, platform).kind
        if kind in _UNFORMED:
            gradients.append(_UNFORMED[kind](leaf, kind, rounded))
        elif kind != "unused":
            for index, rows in form_gradients(leaf, rounded).items():
                if is_apart or rows.size > _SMALL:
                    gradients.append(Formed({index: rows}, platform))
                else:
                    small.setdefault(rows.dtype, {})[index] = rows
    return gradients + [Formed(rows, platform) for rows in small.values()]
