"""Check clip norms, group leaves under them, and clip per-example gradients to them.

A clip norm is a number, a prefix tree with one number per group of leaves, or a schedule. Clipping
multiplies the part of an example's gradient in a group by a clip factor, which depends on the norm
of that part and on the group's clip norm. Both engines and `clip_per_example` get their clip
factors here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_lsdp._checks as checks
from optax_lsdp._checks import is_number
from optax_lsdp._clipped import ClipGroup, is_marked
from optax_lsdp._mesh import axis_size
from optax_lsdp._trees import (
    compute_once,
    leaf_addresses,
    norm_rounding,
    row_norms,
    usable_scale,
    widen,
)
from optax_lsdp._types import ClipNorm, PyTree

ClipStyle = Literal["threshold", "automatic"]
CLIP_STYLES: tuple[ClipStyle, ...] = get_args(ClipStyle)
STABILITY = 0.01  # γ of automatic clipping; the value of Bu et al.
MOST_SLACK = 1024  # coordinates; more would only add noise to the counts
_LEAST, _MOST = 1e-30, 1e30  # the range of clip norms


@dataclass(frozen=True)
class CheckedClipNorm:
    """A checked copy of a clip norm.

    Without the copy, a caller could change a dict of clip norms between clipping and noise.
    """

    value: ClipNorm  # a number, a prefix tree of numbers, or a schedule
    is_schedule: bool
    addresses: tuple[str, ...]  # one text per group, unique within the prefix tree
    slack: int = 0  # K, the number of slack coordinates of each group

    def at(self, step: ArrayLike | None) -> ClipNorm:
        """Return the clip norm at a step. Without a schedule, the step is ignored."""
        return self.value(step) if self.is_schedule else self.value

    def in_tree(self, by_group: Mapping[str, PyTree]) -> PyTree:
        """Return values of the groups as a tree with the structure of the clip norm."""
        values = [by_group[address] for address in self.addresses]
        return jax.tree.unflatten(jax.tree.structure(self.value), values)

    def groups(self, tree: PyTree, now: ClipNorm = None) -> list[ClipGroup]:
        """Return the group of each leaf of `tree`, with the clip norms `now` or else `value`."""
        prefix = self.value if now is None else now
        groups: list[ClipGroup] = []
        addresses = iter(self.addresses)

        def extend(norm: ArrayLike, subtree: PyTree) -> None:
            group = ClipGroup(next(addresses), norm)
            groups.extend([group] * len(jax.tree.leaves(subtree, is_leaf=is_marked)))

        try:
            jax.tree.map(extend, prefix, tree)
        except ValueError as error:
            raise ValueError(
                "`clip_norm` must be a number or a prefix of the parameters' tree, got the "
                f"structure {jax.tree.structure(prefix)} for parameters of structure "
                f"{jax.tree.structure(tree)}."
            ) from error
        return groups


def checked_clip_norm(clip_norm: ClipNorm, slack: int | None = None) -> CheckedClipNorm:
    """Return a checked copy of a clip norm. Raise unless its numbers are in [1e-30, 1e30].

    `slack` is the number of slack coordinates, or None; see `clipped_grad`.
    """
    if slack is not None:
        checks.check_whole("slack", slack)
        checks.check_at_most("slack", slack, MOST_SLACK)
    # A schedule is a function of the step. A callable Equinox module is a tree.
    is_schedule = callable(clip_norm) and jax.tree_util.all_leaves([clip_norm])
    with jax.ensure_compile_time_eval():  # the first value is a number even inside jit
        first = [float(clip_norm(jnp.zeros([], jnp.int32)))] if is_schedule else None
    norms = first or jax.tree.leaves(clip_norm)
    if not norms:
        raise ValueError(f"`clip_norm` must be a number or a tree of numbers, got {clip_norm!r}.")
    for norm in norms:
        if isinstance(norm, jax.Array):
            raise TypeError(
                f"`clip_norm` must be a static number, got {norm!r}; with "
                'optax.inject_hyperparams, pass static_args=("clip_norm", "key").'
            )
        if not is_number(norm) or not _LEAST <= norm <= _MOST:
            raise ValueError(
                f"`clip_norm` must be a positive number, from 1e-30 to 1e30, got {norm!r}."
            )
    copy = jax.tree.map(lambda norm: norm, clip_norm)
    return CheckedClipNorm(copy, is_schedule, tuple(leaf_addresses(clip_norm)), slack or 0)


def sensitivity(clip_norm: ClipNorm) -> ClipNorm:
    """Return how far adding or removing one example can move the clipped sum: √ΣC² over the groups.

    The standard deviation of the noise is the noise multiplier times the sensitivity. Replacing one
    example can move the sum twice as far; the accountant takes this factor into account.

    Args:
        clip_norm: a number, a prefix tree with one number C per group, or a schedule. A schedule
            is returned unchanged.

    >>> sensitivity({"encoder": 3.0, "head": 4.0})
    5.0
    """
    checked = checked_clip_norm(clip_norm)
    return clip_norm if checked.is_schedule else math.hypot(*jax.tree.leaves(clip_norm))


def clip_factors(
    norms: jax.Array, clip_norm: ArrayLike, *, style: ClipStyle, rounding: float
) -> jax.Array:
    """Return clip factors cᵢ with cᵢ‖gᵢ‖ ≤ C, where ‖gᵢ‖ is the true norm of example i.

    Let Nᵢ = (1 + `rounding`) · `norms`[i]. The caller guarantees that ‖gᵢ‖ ≤ Nᵢ. For "threshold",
    cᵢ = min(1, C/Nᵢ). For "automatic", cᵢ = C/(Nᵢ + γ) with γ = 0.01. An example gets factor 0 if
    its norm is zero or not finite, or if its factor would be subnormal.

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


class ExampleNorms(NamedTuple):
    """Norms of each example's gradient, by the path of the group; each array is (n,).

    Attributes:
        norms: the norms before clipping, as computed.
        bounds: upper bounds on the norms after clipping, including all rounding: `bound_norms`.
    """

    norms: dict[str, jax.Array]
    bounds: dict[str, jax.Array]


def bound_norms(norms: jax.Array, factors: jax.Array, rounding: float) -> jax.Array:
    """Return upper bounds on the norms of clipped gradients, which `clip_factors` made.

    `norms` and `rounding` are those of `clip_factors`, so ‖gᵢ‖ ≤ (1 + `rounding`) · `norms`[i] and
    ‖cᵢgᵢ‖ ≤ cᵢ · (1 + `rounding`) · `norms`[i]. Eight more units in the last place cover the
    roundings of this product and of the weighted gradient. The bound is ∞ for an example that
    contributes nothing although its gradient is not zero.
    """
    eps = float(jnp.finfo(norms.dtype).eps)
    upper = norms * jnp.asarray(1 + rounding + 8 * eps, norms.dtype)
    return jnp.where((factors > 0) | (norms == 0), factors * upper, jnp.inf)


def clip_and_sum(
    rows: optax.Updates,
    groups: list[ClipGroup],
    *,
    style: ClipStyle = "threshold",
    mask: jax.Array | None = None,
    split: Sequence[frozenset[str]] | None = None,
) -> tuple[ExampleNorms, optax.Updates]:
    """Return the norms of each group, and Σᵢ cᵢgᵢ for per-example gradients gᵢ.

    The leaves of `rows` have shape (n, …). `groups` has the group of each leaf and, inside
    `shard_map`, `split` has the mesh axes that split it. An example contributes exactly zero if it
    is masked, or if its norm in any group is not finite. The sum is float32 or wider.
    """
    leaves, structure = jax.tree.flatten(rows)
    # One barrier around all leaves would make replicated leaves vary if other leaves are split.
    leaves = list(map(compute_once, leaves)) if any(split or ()) else compute_once(leaves)
    split = split or [frozenset()] * len(leaves)
    norms, bounds, factors = {}, {}, {}
    for path, clip_norm in dict(groups).items():
        members = dict[frozenset[str], list[jax.Array]]()
        for leaf, group, axes in zip(leaves, groups, split, strict=True):
            if group.path == path:
                members.setdefault(axes, []).append(leaf)
        norms[path], rounding = _joint_norms(members)
        factors[path] = clip_factors(norms[path], clip_norm, style=style, rounding=rounding)
        bounds[path] = bound_norms(norms[path], factors[path], rounding)
    alive = jnp.stack([jnp.isfinite(norm) for norm in norms.values()]).all(axis=0)
    if mask is not None:
        alive &= mask
    sums = [
        _weighted_sum(leaf, jnp.where(alive, factors[group.path], 0))
        for leaf, group in zip(leaves, groups, strict=True)
    ]
    bounds = {path: jnp.where(alive, bound, jnp.inf) for path, bound in bounds.items()}
    return ExampleNorms(norms, bounds), jax.tree.unflatten(structure, sums)


def _joint_norms(members: Mapping[frozenset[str], Sequence[jax.Array]]) -> tuple[jax.Array, float]:
    """Return each example's ‖g‖₂ over all leaves and shards, and the bound of `norm_rounding`.

    `members` has leaves of shape (n, …), by the mesh axes that split them. The norms are (n,).
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
    """Return Σᵢ cᵢgᵢ. Where cᵢ is 0, add zeros, because 0 · NaN is NaN."""
    rows = widen(rows)
    weights = factors.astype(rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
    return jnp.sum(jnp.where(weights > 0, weights * rows, jnp.zeros_like(rows)), axis=0)
