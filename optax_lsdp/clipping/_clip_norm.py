"""Check clip norms, assign each leaf to its group, and clip per-example gradients.

A clip norm is a number, an `AdaptiveClip`, a schedule, or a prefix tree with one number or one
`AdaptiveClip` per group of leaves. Clipping multiplies the part of an example's gradient in a group
by a clip factor, which depends on the norm of this part and on the group's clip norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

import optax_lsdp._checks as checks
from optax_lsdp._clipped import ClipGroup, CurrentClipNorm, is_current, is_marked
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
_LEAST_WEIGHT = 1e-6  # below it, noise with multiplier 1 drowns a count of a million examples


@dataclass(frozen=True)
class AdaptiveClip:
    """A clip norm that a run adapts to its gradients. Pass it as `clip_norm`.

    The clip norm C is part of the optimizer's state. Each step clips to C, divides the clipped sum
    by C, adds noise, and multiplies by the smaller of C and the next step's C. The divided sum has
    a constant sensitivity, so ε does not depend on C. C itself is computed from noisy numbers
    alone. `fit` passes C to the gradient function. In your own loop, call
    `f(params, batch, mask, clip_norm=current_clip_norm(state))`.

    With groups of clip norms, pass a prefix tree with one `AdaptiveClip` per group. All must have
    the same `method`, `slack` and `indicator_weight`.

    **Method "slack"** costs no privacy. Let t = ‖g‖/C for a gradient g. The slack of `clipped_grad`
    estimates the mean s = E[min(1, t²)] over examples, which is 1 if all gradients are clipped, and
    near 0 if all are far shorter than C. One step estimates s with the variance (z/b)²·(K/(K − 1))²
    from noise, plus 1/b from random batch sizes, for noise multiplier z, expected batch size b and
    K coordinates. The rule averages s over steps until the average's standard error e ≤ target/4.

    1. The rule searches for the scale of the gradients, which is the C with s = `target`. If s is
       above (1 + target)/2, C is multiplied by 3^rate. If s is below target/2, C is multiplied by
       (clip(min(s′, target/2), l, 1)/target)^(rate/2), where clip limits a number to [l, 1], and
       l = min(max(1/(2K), e), target/2). Here s′ = s + (1 − s)/K, because K coordinates round s
       down by (1 − s)/K at most. So C does not fall far below the scale. For fixed gradients and a
       rate of at most 1, the search converges from any C, as a fixed-point iteration for an
       M-estimate of scale. Updates are zero until the first average of s, and while the last
       average is below target/2, because they would be mostly noise.
    2. The search ends once target/2 ≤ s and s + 2e ≤ (1 + target)/2; here, e ≤ (1 − target)/8
       counts as 0. C is then multiplied by (clip(s, l, 1)/target)^(rate/2)/3. So C falls to about a
       third of the scale: noise harms more than clipping, and gradients shrink as a model learns.
    3. From then on, each average of s multiplies C by (clip(s, l, 1)/target)^(rate/100). So
       vanishing or exploding gradients hardly move C.

    **Method "quantile"** is the method of Andrew et al. It adds one coordinate to the sum of each
    group. To this coordinate, an example contributes w/2 if t ≤ 1, and −w/2 if t > 1, where w is
    `indicator_weight`. The divided sum and the coordinate have the joint sensitivity √(1 + w²/4).
    All noise grows by this factor, so ε stays the same. In the paper's notation, the count has
    noise σ_b = z·√(1 + w²/4)/w, and the sum has noise multiplier (z⁻² − (2σ_b)⁻²)^(−½). The rule is
    C ← C · exp(rate · (share of clipped gradients − target)).

    **Method "fixed"** never moves C, but estimates norms as method "slack" does.

    Attributes:
        initial: C in the first step.
        target: the share of gradients to clip, above 0 and below 1. With method "slack", a gradient
            that is shorter than C counts as the fraction (‖g‖/C)² of a clipped gradient.
        rate: how fast C moves, above 0; by default 1 for "slack" and 0.2 for "quantile".
        method: "slack", "quantile" or "fixed".
        least: the smallest C; by default a millionth of `initial`.
        most: the largest C; by default a million times `initial`.
        slack: K, the number of slack coordinates; at least 3 with method "slack".
        indicator_weight: w, the weight of the coordinate of method "quantile"; at least 1e-6.

    References:
        SlaClip, ICML 2026, for slack.
        Andrew et al. 2021, Differentially Private Learning with Adaptive Clipping.

    >>> AdaptiveClip(1.0).most
    1000000.0
    >>> AdaptiveClip(1.0, target=1.5)
    Traceback (most recent call last):
    ValueError: `target` must be above 0 and below 1, got 1.5.
    """

    initial: float
    _: KW_ONLY
    target: float = 0.7
    rate: float = None  # type: ignore[assignment]  # __post_init__ replaces None
    method: Literal["slack", "quantile", "fixed"] = "slack"
    least: float = None  # type: ignore[assignment]  # __post_init__ replaces None
    most: float = None  # type: ignore[assignment]  # __post_init__ replaces None
    slack: int = 64
    indicator_weight: float = 0.2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_array = isinstance(value, jax.Array) and value.shape == ()
            object.__setattr__(self, name, value.item() if is_array else checks.plain_number(value))
        checks.check_positive("initial", self.initial)
        checks.check_delta("target", self.target)
        checks.check_choice("method", self.method, ("slack", "quantile", "fixed"))
        # With two coordinates, s is 0 or 1 if all gradients are equally long.
        checks.check_whole("slack", self.slack, 3 if self.method == "slack" else 2)
        checks.check_at_most("slack", self.slack, MOST_SLACK)
        defaults = {
            "rate": 0.2 if self.method == "quantile" else 1.0,
            "least": max(_LEAST, 1e-6 * self.initial),
            "most": min(_MOST, 1e6 * self.initial),
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            checks.check_positive(name, getattr(self, name))
        checks.check_positive("indicator_weight", self.indicator_weight)
        if self.indicator_weight < _LEAST_WEIGHT:
            demand = f"at least {_LEAST_WEIGHT}, or noise would drown the count"
            raise checks.refusal("indicator_weight", demand, self.indicator_weight)
        if not _LEAST <= self.least <= self.initial <= self.most <= _MOST:
            raise ValueError(
                "`initial` must be between `least` and `most`, within 1e-30 to 1e30, got "
                f"initial={self.initial}, least={self.least} and most={self.most}."
            )

    @property
    def coordinates(self) -> int:
        """Return how many coordinates each example adds to the sum of its group."""
        return 1 if self.method == "quantile" else self.slack

    @property
    def sensitivity(self) -> float:
        """Return the joint sensitivity of a group's sum and coordinates, in units of C."""
        return math.hypot(1, self.indicator_weight / 2) if self.method == "quantile" else 1.0


@dataclass(frozen=True)
class CheckedClipNorm:
    """A checked clip norm, copied because a caller could change a dict of clip norms later."""

    value: ClipNorm  # a number or `AdaptiveClip`, a prefix tree of them, or a schedule
    is_schedule: bool
    addresses: tuple[str, ...]  # one name per group, unique within the prefix tree
    slack: int = 0  # K, the number of coordinates that are added to the sum of each group
    adaptive: AdaptiveClip | None = None  # of the first group; None if C does not adapt

    @property
    def is_relative(self) -> bool:
        """Return whether sums are divided by the clip norm, so that their sensitivity is fixed."""
        return self.is_schedule or self.adaptive is not None

    def at(self, step: ArrayLike | None, clip_norm: ClipNorm = None) -> ClipNorm:
        """Return the clip norm at `step`. If it is adaptive, return the values in `clip_norm`."""
        if self.adaptive is not None:
            return self._checked_now(clip_norm)
        return self.value(step) if self.is_schedule else self.value

    def _checked_now(self, clip_norm: ClipNorm) -> ClipNorm:
        """Return the values in `clip_norm`. Raise unless `current_clip_norm` returned it."""
        leaves, structure = jax.tree.flatten(clip_norm, is_leaf=is_current)
        wanted: object = jax.tree.structure(self.value)
        if wanted != structure or not all(map(_is_usable, leaves)):
            raise ValueError(
                f"`clip_norm` must be passed with an AdaptiveClip, got {clip_norm!r}; pass "
                "clip_norm=current_clip_norm(state), which the optimizer's state holds."
            )
        return jax.tree.unflatten(structure, [leaf.value for leaf in leaves])

    def in_tree(self, by_group: Mapping[str, PyTree]) -> PyTree:
        """Return the values of `by_group` as a tree with the structure of the clip norm."""
        values = [by_group[address] for address in self.addresses]
        return jax.tree.unflatten(jax.tree.structure(self.value), values)

    def groups(self, tree: PyTree, now: ClipNorm = None) -> list[ClipGroup]:
        """Return each leaf's group, with clip norms from `now` or, without `now`, from `value`."""
        prefix, groups = self.value if now is None else now, list[ClipGroup]()
        addresses = iter(self.addresses)

        def extend(norm: ArrayLike, subtree: PyTree) -> None:
            group = ClipGroup(next(addresses), norm)
            leaves = jax.tree.leaves(subtree, is_leaf=is_marked)
            if not leaves and len(self.addresses) > 1:
                raise TypeError(
                    f"`clip_norm` must be None at the empty subtree {group.path}, got {norm}."
                )
            groups.extend([group] * len(leaves))

        try:
            jax.tree.map(extend, prefix, tree)
        except ValueError as error:
            raise ValueError(
                "`clip_norm` must be a number or a prefix of the parameters' tree, got the "
                f"structure {jax.tree.structure(prefix)} for a tree {jax.tree.structure(tree)}."
            ) from error
        return groups


def _is_usable(now: CurrentClipNorm) -> bool:
    is_scalar = is_current(now) and not jnp.shape(now.value)
    most = _MOST * (1 + 2.0**-23)  # states hold clip norms in float32, which rounds 1e30 up
    return is_scalar and (isinstance(now.value, jax.core.Tracer) or _LEAST <= float(now) <= most)


def checked_clip_norm(clip_norm: ClipNorm, slack: int | None = None) -> CheckedClipNorm:
    """Return a checked copy of a clip norm. Raise unless its numbers are in [1e-30, 1e30].

    `slack` is the number of slack coordinates, or None; see `clipped_grad`.
    """
    if slack is not None:
        checks.check_whole("slack", slack)
        checks.check_at_most("slack", slack, MOST_SLACK)
    # A callable Equinox module is a tree, not a schedule.
    is_schedule = callable(clip_norm) and jax.tree_util.all_leaves([clip_norm])
    with jax.ensure_compile_time_eval():  # the first value is a number even inside jit
        first: PyTree = clip_norm(jnp.zeros([], jnp.int32)) if is_schedule else None
        first = first.item() if hasattr(first, "item") and not jnp.shape(first) else first
    norms = [first] if is_schedule else jax.tree.leaves(clip_norm)
    adaptive = next((norm for norm in norms if isinstance(norm, AdaptiveClip)), None)
    if adaptive is not None and not is_schedule:
        _check_adaptive(norms, slack)
        slack, norms = adaptive.coordinates, [norm.initial for norm in jax.tree.leaves(clip_norm)]
    if not norms:
        raise ValueError(f"`clip_norm` must be a number or a tree of numbers, got {clip_norm!r}.")
    for norm in norms:
        if isinstance(norm, jax.Array):
            remedy = "with optax.inject_hyperparams, add 'clip_norm' to its static_args"
            raise TypeError(f"`clip_norm` must be a static number, got {norm!r}; {remedy}.")
        if not checks.is_number(norm) or not _LEAST <= norm <= _MOST:
            remedy = "let the function of the step return a number" if is_schedule else ""
            raise checks.refusal("clip_norm", "a positive number, from 1e-30 to 1e30", norm, remedy)
    copy = jax.tree.map(lambda norm: norm, clip_norm)
    addresses = tuple(leaf_addresses(clip_norm))
    return CheckedClipNorm(copy, is_schedule, addresses, slack or 0, adaptive)


def _check_adaptive(norms: Sequence[object], slack: int | None) -> None:
    """Raise unless each group has an AdaptiveClip with the same method, slack and weight."""
    kinds = {
        (x.method, x.slack, x.indicator_weight) if isinstance(x, AdaptiveClip) else None
        for x in norms
    }
    if len(kinds) > 1:
        raise ValueError(
            "`clip_norm` must have an AdaptiveClip with the same `method`, `slack` and "
            f"`indicator_weight` in all groups, got {norms!r}; for a group with a fixed clip norm, "
            "set `least` and `most` to `initial`."
        )
    if slack is not None:
        raise checks.refusal("slack", "set in the AdaptiveClip only", slack, "leave it out here")


def sensitivity(clip_norm: ClipNorm) -> ClipNorm:
    """Return how far adding or removing one example can move the clipped sum: √ΣC² over the groups.

    The standard deviation of the noise is the noise multiplier times the sensitivity. Replacing one
    example can move the sum twice as far; the accountant takes this factor into account.

    Args:
        clip_norm: a number, a prefix tree with one number C per group, or a schedule. A schedule
            is returned unchanged. With an `AdaptiveClip`, the result is in units of the clip norm.

    >>> sensitivity({"encoder": 3.0, "head": 4.0})
    5.0
    """
    checked = checked_clip_norm(clip_norm)
    if checked.is_schedule:
        return clip_norm
    leaves = jax.tree.leaves(clip_norm)
    return math.hypot(*(x.sensitivity if isinstance(x, AdaptiveClip) else x for x in leaves))


def clip_factors(
    norms: jax.Array, clip_norm: ArrayLike, *, style: ClipStyle, rounding: float
) -> jax.Array:
    """Return clip factors cᵢ with cᵢ‖gᵢ‖ ≤ C, where ‖gᵢ‖ is the exact norm of gradient i.

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
    """Norms of each example's gradient: arrays of shape (n,), indexed by the group's path.

    Attributes:
        norms: the norms before clipping, as computed.
        bounds: upper bounds on the norms after clipping, including all rounding; see `bound_norms`.
    """

    norms: dict[str, jax.Array]
    bounds: dict[str, jax.Array]


def bound_norms(norms: jax.Array, factors: jax.Array, rounding: float) -> jax.Array:
    """Return upper bounds on the norms of gradients after clipping by `factors`.

    With `norms` and `rounding` as in `clip_factors`, ‖cᵢgᵢ‖ ≤ cᵢ · (1 + `rounding`) · `norms`[i].
    Eight more units in the last place cover the roundings of this product and of the weighted
    gradient. The bound is ∞ where the factor is 0, except for a gradient of zeros.
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

    The leaves of `rows` have shape (n, …). `groups` has the group of each leaf. `split` has, for
    each leaf, the axes of a `shard_map` that split the leaf. An example contributes exactly zero if
    it is masked, or if its norm in any group is not finite. The sum is float32 or wider.
    """
    leaves, structure = jax.tree.flatten(rows)
    # One barrier around all leaves would make each leaf vary over axes that split another leaf.
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
    """Return each example's ‖g‖₂ over all leaves and shards, and a bound on its relative error.

    `members` maps each set of mesh axes to the leaves that these axes split, of shape (n, …).
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
