"""Clip factors: norms and a clip norm go in, a factor per example comes out, and the sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import is_number
from optax_lsdp._clipped import ClipGroup
from optax_lsdp._mesh import axis_size
from optax_lsdp._trees import (
    compute_once,
    leaf_addresses,
    norm_rounding,
    row_norms,
    usable_scale,
    widen,
)
from optax_lsdp._types import ClipNorm

ClipStyle = Literal["threshold", "automatic"]
STYLES = ("threshold", "automatic")
STABILITY = 0.01  # γ of automatic clipping, as Bu et al. chose it


def is_schedule(clip_norm: ClipNorm) -> bool:
    """Tell a function of the step from a number or a tree; an Equinox module is a tree."""
    return callable(clip_norm) and jax.tree_util.all_leaves([clip_norm])


def check_clip_norm(clip_norm: ClipNorm) -> None:
    """Raise unless every clip norm is a number, well inside the range of float32."""
    with jax.ensure_compile_time_eval():  # a schedule's first value is known while tracing too
        first = [float(clip_norm(jnp.zeros([], jnp.int32)))] if is_schedule(clip_norm) else None
    norms = first or jax.tree.leaves(clip_norm)
    if not norms:
        raise ValueError(f"`clip_norm` must be a number or a tree of numbers, got {clip_norm!r}.")
    for norm in norms:
        if isinstance(norm, jax.Array):
            raise TypeError(
                f"`clip_norm` must be a static number, got {norm!r}; with "
                'optax.inject_hyperparams, pass static_args=("clip_norm", "key").'
            )
        if not is_number(norm) or not 1e-30 <= norm <= 1e30:
            raise ValueError(
                f"`clip_norm` must be a positive number, from 1e-30 to 1e30, got {norm!r}."
            )


def frozen_clip_norm(clip_norm: ClipNorm) -> ClipNorm:
    """Check a clip norm, and return a copy that later changes of its dicts and lists do not reach.

    What is clipped and what is noised must not come to differ.
    """
    check_clip_norm(clip_norm)
    return jax.tree.map(lambda norm: norm, clip_norm)


def sensitivity(clip_norm: ClipNorm) -> Any:
    """Return how far one example can move the clipped sum: √ΣC² over the groups.

    This is what the noise multiplier multiplies. It holds for adding or removing an
    example; replacing one moves the sum by up to twice as much, which the accountant knows.

    Args:
        clip_norm: a number, a prefix tree with one number per group, or a schedule, which
            is returned as it is.

    >>> sensitivity({"encoder": 3.0, "head": 4.0})
    5.0
    """
    check_clip_norm(clip_norm)
    return clip_norm if is_schedule(clip_norm) else math.hypot(*jax.tree.leaves(clip_norm))


def clip_groups(clip_norm: ClipNorm, tree: Any) -> list[ClipGroup]:
    """Return the group of each leaf of `tree`, in the order of its leaves."""
    groups: list[ClipGroup] = []
    addresses = iter(leaf_addresses(clip_norm))

    def extend(norm: Any, subtree: Any) -> None:
        group = ClipGroup(next(addresses), norm)
        groups.extend([group] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map(extend, clip_norm, tree)
    except ValueError as error:
        raise ValueError(
            "`clip_norm` must be a number or a prefix of the parameters' tree, got "
            f"{jax.tree.structure(clip_norm)} for {jax.tree.structure(tree)}."
        ) from error
    return groups


def clip_factors(
    norms: jax.Array, clip_norm: jax.Array | float, *, style: ClipStyle, rounding: float
) -> jax.Array:
    """Return cᵢ such that cᵢ‖gᵢ‖ ≤ C, for norms up to `rounding` relative below ‖gᵢ‖.

    threshold: cᵢ = min(1, C/‖gᵢ‖); automatic: cᵢ = C/(‖gᵢ‖ + γ). Examples of zero or non-finite
    norm get factor 0, and so do those whose factor would be too small for float32 to hold.

    References:
        Abadi et al. 2016, Deep Learning with Differential Privacy.
        Bu et al. 2023, Automatic Clipping (AUTO-S).
    """
    limit = jnp.asarray(clip_norm, norms.dtype)
    upper = norms * jnp.asarray(1 + rounding, norms.dtype)
    if style == "automatic":
        factors = limit / (upper + jnp.asarray(STABILITY, norms.dtype))
    else:
        factors = limit / jnp.maximum(upper, limit)
    usable = (norms > 0) & jnp.isfinite(upper) & (factors >= jnp.finfo(norms.dtype).tiny)
    return jnp.where(usable, factors, jnp.zeros_like(factors))


def clip_and_sum(
    rows: optax.Updates,
    groups: list[ClipGroup],
    *,
    style: ClipStyle = "threshold",
    mask: jax.Array | None = None,
    split: Sequence[frozenset[str]] | None = None,
) -> tuple[dict[str, jax.Array], optax.Updates]:
    """Return every group's norms and Σᵢ cᵢgᵢ, float32 at least, from leaves gᵢ: (n, …).

    An example that is masked, or not finite in any group, contributes exactly zero. Inside
    shard_map, `split` has the mesh axes over which each leaf's gradient is split.
    """
    leaves, structure = jax.tree.flatten(rows)
    # A barrier around leaves that are split and others would make all of them vary.
    leaves = list(map(compute_once, leaves)) if any(split or ()) else compute_once(leaves)
    split = split or [frozenset()] * len(leaves)
    norms, factors = {}, {}
    for path, clip_norm in dict(groups).items():
        members = dict[frozenset[str], list[jax.Array]]()
        for leaf, group, axes in zip(leaves, groups, split, strict=True):
            if group.path == path:
                members.setdefault(axes, []).append(leaf)
        norms[path], rounding = _joint_norms(members)
        factors[path] = clip_factors(norms[path], clip_norm, style=style, rounding=rounding)
    alive = jnp.stack([jnp.isfinite(norm) for norm in norms.values()]).all(axis=0)
    if mask is not None:
        alive &= mask
    sums = [
        _weighted_sum(leaf, jnp.where(alive, factors[group.path], 0))
        for leaf, group in zip(leaves, groups, strict=True)
    ]
    return norms, jax.tree.unflatten(structure, sums)


def _joint_norms(
    members: Mapping[frozenset[str], Sequence[jax.Array]],
) -> tuple[jax.Array, float]:
    """Return each example's ‖g‖₂ over all leaves and shards, (n,), and its `norm_rounding`.

    Args:
        members: leaves of shape (n, …), by the mesh axes over which they are split.
    """
    parts, rounding = [], 0.0
    for axes, leaves in members.items():
        norms, rounded = row_norms(leaves), norm_rounding(leaves)
        if axes:
            names, eps = tuple(sorted(axes)), float(jnp.finfo(norms.dtype).eps)
            scale = usable_scale(jax.lax.pmax(norms, names))
            norms = scale * jnp.sqrt(jax.lax.psum(jnp.square(norms / scale), names))
            rounded += (axis_size(names) + 4) * eps
        parts.append(norms)
        rounding = max(rounding, rounded)
    if len(parts) == 1:
        return parts[0], rounding
    together = [part[:, None] for part in parts]
    return row_norms(together), rounding + norm_rounding(together)


def _weighted_sum(rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Return Σᵢ cᵢgᵢ, where a factor of 0 selects zero, since 0 · NaN is NaN."""
    rows = widen(rows)
    weights = factors.astype(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * rows, jnp.zeros_like(rows)), axis=0)
