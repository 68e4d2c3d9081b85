"""The mark on a clipped sum: the clip norm of each contribution, and whether there was a mask.

`clipped_grad` wraps each leaf of its sum in `Clipped`. The optimizer unwraps the leaves. It refuses
a sum whose clip norms or groups differ from its own, because the noise depends on them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeGuard

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._trees import check_floating, path_name
from optax_lsdp._types import ClipNorm, PyTree


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value", "slack"],
    meta_fields=["clip_norm", "group", "leaves_in_group", "masked", "coordinates"],
)
@dataclass(frozen=True)
class Clipped:
    """One leaf of a clipped sum, with the clip norm that bounds each example's contribution.

    `Clipped` is a pytree node: `jax.tree.leaves` returns the arrays, and
    `jax.tree.map(jnp.add, a, b)` adds two sums over disjoint examples if both have the same mark.
    The mark catches mistakes, but it is no proof: a sum keeps its mark when its values are changed.
    Do not use `optax.apply_if_finite`, which cannot carry the mark. It is not needed, because an
    example whose gradient is not finite contributes zero.

    Attributes:
        value: the sum of clipped gradients, in float32 or float64. If the clip norm is a schedule
            or an `AdaptiveClip`, the sum is divided by the clip norm of its step, so that its
            sensitivity is 1 at every step.
        clip_norm: the clip norm of the leaf's group: a number, a schedule or an `AdaptiveClip`.
        group: the group's path in the prefix tree of clip norms; "" if there is one group.
        leaves_in_group: how many leaves were clipped together, including this leaf. The optimizer
            checks this number, because k leaves that are clipped separately, each to C, have the
            joint sensitivity √k·C.
        masked: whether the batch had a mask. Without a mask, padding counts as examples. So plans
            with padded batches refuse sums without a mask.
        slack: an array of shape (K,) on the first leaf of each group, if the sum has slack: how
            many examples fill each coordinate; see `norm_estimates`. None on other leaves.
        coordinates: K, or 0 if the leaf has no slack. JAX refuses to add sums with different K,
            because K is part of the tree's structure.

    >>> import jax.numpy as jnp
    >>> half = Clipped(jnp.ones(2), clip_norm=1.0)
    >>> jax.tree.map(jnp.add, half, half).value
    Array([2., 2.], dtype=float32)
    """

    value: jax.Array
    clip_norm: ClipNorm
    group: str = ""
    leaves_in_group: int = 1
    masked: bool = False
    slack: jax.Array | None = None
    coordinates: int = 0

    def __radd__(self, *other: object) -> NoReturn:
        """Refuse arithmetic: a clipped sum has no noise yet, so it is not an update."""
        raise TypeError(
            "`updates` must have noise before they are applied, got a clipped sum without noise; "
            "pass the whole sum through `privatize`, and do not differentiate frozen parameters."
        )

    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __radd__


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["total", "slack"],
    meta_fields=["adapts", "is_noisy"],
)
@dataclass(frozen=True)
class WithSlack:
    """A clipped sum and its slack, to which one mechanism adds noise.

    Attributes:
        total: the clipped sum, with the structure of the parameters.
        slack: for each group, the sums of its K slack coordinates: arrays of shape (K,) in a tree
            with the structure of the clip norm.
        adapts: whether the clip norm is an `AdaptiveClip`. If so, `total` and `slack` are in units
            of the clip norm.
        is_noisy: whether `add_gaussian_noise` has added noise to the sum and the slack.
    """

    total: optax.Updates
    slack: PyTree
    adapts: bool = False
    is_noisy: bool = False

    def __radd__(self, *other: object) -> NoReturn:
        """Refuse arithmetic: the slack must be removed first, so this is not an update."""
        raise TypeError(
            "`updates` must have no slack when they are applied, got a sum with slack; put "
            "`estimate_norms` right after `add_gaussian_noise`."
        )

    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __radd__


@partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=[])
@dataclass(frozen=True)
class CurrentClipNorm:
    """The present value of an `AdaptiveClip`: a scalar that is computed from noisy sums alone.

    Gradient functions accept no plain number in its place. If a clip norm were computed from
    gradients without noise, one example could change what all other examples contribute.

    >>> f"{CurrentClipNorm(jnp.array(0.25)):.1f}"
    '0.2'
    """

    value: jax.Array

    def __float__(self) -> float:
        return float(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, *args: Any, **options: Any) -> Any:
        return self.value.__array__(*args, **options)


class ClipGroup(NamedTuple):
    """A group of leaves that are clipped together."""

    path: str  # in the prefix tree of clip norms
    clip_norm: ClipNorm


def is_current(node: object) -> TypeGuard[CurrentClipNorm]:
    """Return whether a node is a `CurrentClipNorm`."""
    return isinstance(node, CurrentClipNorm)


def is_marked(leaf: object) -> TypeGuard[Clipped]:
    """Return whether a leaf is a `Clipped`."""
    return isinstance(leaf, Clipped)


def divide_by_clip_norm(total: optax.Updates, groups: Sequence[ClipGroup]) -> optax.Updates:
    """Divide each leaf of a clipped sum by the clip norm of the leaf's group."""
    leaves, structure = jax.tree.flatten(total)
    pairs = zip(leaves, groups, strict=True)
    divided = [x / jnp.asarray(group.clip_norm, x.dtype) for x, group in pairs]
    return jax.tree.unflatten(structure, divided)


def mark(
    sums: optax.Updates, groups: list[ClipGroup], masked: bool, slack: dict[str, jax.Array]
) -> optax.Updates:
    """Wrap each leaf of a clipped sum in `Clipped`; `groups` has one entry per leaf.

    The first leaf of a group carries the group's `slack`, if there is one.
    """
    leaves, structure = jax.tree.flatten(sums)
    counts, left = Counter(group.path for group in groups), dict(slack)

    def wrap(leaf: jax.Array, group: ClipGroup) -> Clipped:
        slack = left.pop(group.path, None)
        size = 0 if slack is None else len(slack)
        together = counts[group.path]
        return Clipped(leaf, group.clip_norm, group.path, together, masked, slack, size)

    return jax.tree.unflatten(structure, list(map(wrap, leaves, groups)))


def unmark(
    updates: optax.Updates, groups: list[ClipGroup], coordinates: int
) -> tuple[optax.Updates, dict[str, jax.Array]]:
    """Unwrap each leaf. Return the sum and the slack of each group.

    If the number of slack `coordinates` is 0, there is no slack. Raise if a leaf has no mark, or if
    its mark does not match `groups` and `coordinates`.
    """
    leaves, structure = jax.tree.flatten_with_path(updates, is_leaf=is_marked)
    counts = Counter(group.path for group in groups)
    slack: dict[str, jax.Array] = {}
    for (path, leaf), group in zip(leaves, groups, strict=True):
        if not is_marked(leaf):
            raise ValueError(
                f"`updates` must be marked by `clipped_grad` in every leaf, got a plain array at "
                f"{path_name(path)!r}; pass the result of `clipped_grad` unchanged."
            )
        if ClipGroup(leaf.group, leaf.clip_norm) != group:
            raise ValueError(
                f"`clip_norm` must be the same in `clipped_grad` and in the optimizer, got "
                f"{_describe(leaf.group, leaf.clip_norm)} in `clipped_grad` and "
                f"{_describe(*group)} in the optimizer at {path_name(path)!r}; pass the same "
                "object to both."
            )
        if leaf.leaves_in_group < counts[group.path]:
            raise ValueError(
                f"`updates` must come from one call of `clipped_grad`, got {counts[group.path]} "
                f"leaves, of which only {leaf.leaves_in_group} were clipped together with "
                f"{path_name(path)!r}; clip all leaves in one call, or give the leaves of each "
                "call their own group in `clip_norm`."
            )
        found = 0 if leaf.slack is None else len(leaf.slack)
        wanted = 0 if group.path in slack else coordinates
        if found != wanted:
            raise ValueError(
                "`slack` must be the same in `clipped_grad` and in the optimizer, got "
                f"{found} coordinates in the sum and {wanted} in the optimizer at "
                f"{path_name(path)!r}; pass the same number to both, and pass all leaves of the "
                "sum to the optimizer."
            )
        if leaf.slack is not None:
            slack[group.path] = leaf.slack
    return jax.tree.unflatten(structure, [leaf.value for _, leaf in leaves]), slack


def _describe(path: str, clip_norm: ClipNorm) -> str:
    return f"{clip_norm!r}" + (f" for the group {path}" if path else "")


def unmarked_leaves(
    link: str, updates: optax.Updates, *, accepts_slack: bool = False
) -> tuple[list[tuple[str, jax.Array]], jax.tree_util.PyTreeDef]:
    """Return the named leaves and the structure of `updates`. Raise if a leaf is a `Clipped`.

    `link` is the name of the transform that receives the updates. Unless it `accepts_slack`, also
    raise if `updates` are a `WithSlack`.
    """
    if isinstance(updates, WithSlack) and not accepts_slack:
        raise ValueError(
            f"`updates` must have no slack before `{link}`, got a sum with slack; put "
            "`estimate_norms` right after `add_gaussian_noise`."
        )
    for path, leaf in jax.tree.leaves_with_path(updates, is_leaf=is_marked):
        if is_marked(leaf):
            raise ValueError(
                f"`updates` must have passed `clip_per_example` before `{link}`, got a marked sum "
                f"at {path_name(path)!r}; use `privatize`, which chains the transforms in the "
                "right order."
            )
    check_floating("updates", updates)
    leaves, structure = jax.tree.flatten_with_path(updates)
    return [(path_name(path), leaf) for path, leaf in leaves], structure


def has_noise(state: optax.OptState) -> bool:
    """Return whether a part of an optimizer's state belongs to a transform that adds noise."""
    return any(map(_adds_noise, jax.tree.leaves(state, is_leaf=_adds_noise)))


def is_before_noise(state: optax.OptState, is_one: Callable[[object], bool]) -> bool:
    """Return whether a transform precedes the noise in a chain.

    `is_one(node)` is True for the transform's node of the state.
    """
    parts = jax.tree.leaves(state, is_leaf=lambda x: is_one(x) or _adds_noise(x))
    first = next((place for place, part in enumerate(parts) if is_one(part)), len(parts))
    return has_noise(parts[first + 1 :])


def _adds_noise(node: object) -> bool:
    return hasattr(type(node), "adds_noise")
