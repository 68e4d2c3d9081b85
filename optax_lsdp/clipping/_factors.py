"""Clip factors: norms and a clip norm go in, a factor per example comes out, and the sum."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import is_number
from optax_lsdp._trees import norm_rounding, one_value, row_norms, widen

ClipNorm = Any  # a number, a prefix tree of numbers, or an optax.Schedule
ClipStyle = Literal["threshold", "automatic"]
STYLES = ("threshold", "automatic")
STABILITY = 0.01  # γ of automatic clipping, as Bu et al. chose it


class Group(NamedTuple):
    """One leaf's place in the prefix tree of clip norms: the group's path and clip norm."""

    path: str
    clip_norm: Any


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


def clip_groups(clip_norm: ClipNorm, tree: Any) -> list[Group]:
    """Return the group of each leaf of `tree`, in the order of its leaves."""
    groups: list[Group] = []

    def extend(path: tuple[Any, ...], norm: Any, subtree: Any) -> None:
        group = Group(jax.tree_util.keystr(path), norm)
        groups.extend([group] * len(jax.tree.leaves(subtree)))

    try:
        jax.tree.map_with_path(extend, clip_norm, tree)
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
    groups: list[Group],
    *,
    style: ClipStyle = "threshold",
    mask: jax.Array | None = None,
) -> tuple[dict[str, jax.Array], optax.Updates]:
    """Return every group's norms and Σᵢ cᵢgᵢ, float32 at least, from leaves gᵢ: (n, …).

    An example that is masked, or not finite in any group, contributes exactly zero.
    """
    leaves, structure = jax.tree.flatten(one_value(rows))
    norms, factors = {}, {}
    for path, clip_norm in dict(groups).items():
        members = [leaf for leaf, group in zip(leaves, groups, strict=True) if group.path == path]
        norms[path] = row_norms(members)
        rounding = norm_rounding(members)
        factors[path] = clip_factors(norms[path], clip_norm, style=style, rounding=rounding)
    alive = jnp.stack([jnp.isfinite(norm) for norm in norms.values()]).all(axis=0)
    if mask is not None:
        alive &= mask
    sums = [
        _weighted_sum(leaf, jnp.where(alive, factors[group.path], 0))
        for leaf, group in zip(leaves, groups, strict=True)
    ]
    return norms, jax.tree.unflatten(structure, sums)


def _weighted_sum(rows: jax.Array, factors: jax.Array) -> jax.Array:
    """Return Σᵢ cᵢgᵢ, where a factor of 0 selects zero, since 0 · NaN is NaN."""
    rows = widen(rows)
    weights = factors.astype(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * rows, jnp.zeros_like(rows)), axis=0)
