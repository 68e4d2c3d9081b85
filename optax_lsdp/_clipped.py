"""The mark of a clipped sum: which clip norm made it, and whether its batch had a mask."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import optax

from optax_lsdp._trees import check_floating, path_name
from optax_lsdp._types import ClipNorm


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value"],
    meta_fields=["clip_norm", "group", "together", "masked"],
)
@dataclass(frozen=True)
class Clipped:
    """One leaf of a clipped sum, with the clip norm that made it.

    A pytree node with one child: `jax.tree.leaves` gives the arrays, and
    `jax.tree.map(jnp.add, a, b)` adds two sums over disjoint examples if they were clipped alike.
    The mark catches accidents, not adversaries: it tells who made the sum, not what was
    done to it since. `optax.apply_if_finite` cannot carry it, and is not needed, as examples
    whose gradient is not finite contribute nothing.

    Attributes:
        value: the sum of clipped gradients, float32 at least; under a schedule of
            clip norms, in units of the clip norm, so that its sensitivity is 1 at every step.
        clip_norm: the clip norm of the leaf's group: a number, or the schedule itself.
        group: the group's path in the prefix tree of clip norms; "" where there is one group.
        together: how many leaves of the group were clipped together. Sums that were clipped
            apart, each to C, are no sum of sensitivity C when they are merged into one tree.
        masked: whether the batch had a mask. One that is padded, and has none, counts an example
            as often as there is padding: a plan with such batches takes no sum without.

    >>> import jax.numpy as jnp
    >>> half = Clipped(jnp.ones(2), clip_norm=1.0)
    >>> jax.tree.map(jnp.add, half, half)
    Clipped(value=Array([2., 2.], dtype=float32), clip_norm=1.0, group='', together=1, masked=False)
    """

    value: jax.Array
    clip_norm: Any
    group: str = ""
    together: int = 1
    masked: bool = False

    def __radd__(self, *other: Any) -> NoReturn:
        """Refuse to be reckoned with, as if it were an update: there is no noise in it."""
        raise TypeError(
            "`updates` must be private before they are applied, got a clipped sum without noise; "
            "pass all of it through `privatize`, and to train some parameters only, differentiate "
            "with respect to those."
        )

    __add__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __radd__


def is_marked(leaf: Any) -> bool:
    """Tell a marked leaf from an array."""
    return isinstance(leaf, Clipped)


def check_unmarked(link: str, updates: Any) -> None:
    """Raise if a marked leaf has come to a link that may only follow `clip_per_example`."""
    for path, leaf in jax.tree.leaves_with_path(updates, is_leaf=is_marked):
        if is_marked(leaf):
            raise ValueError(
                f"`updates` must have passed `clip_per_example` before `{link}`, got a marked sum "
                f"at {path_name(path)!r}; `privatize` has the links in their order."
            )


class Group(NamedTuple):
    """One leaf's place in the prefix tree of clip norms: the group's address and clip norm."""

    path: str
    clip_norm: ClipNorm


def mark(sums: optax.Updates, groups: list[Group], masked: bool) -> optax.Updates:
    """Wrap each leaf with the clip norm of its group, and with whether there was a mask."""
    leaves, structure = jax.tree.flatten(sums)
    counts = Counter(group.path for group in groups)
    marked = [
        Clipped(leaf, group.clip_norm, group.path, counts[group.path], masked)
        for leaf, group in zip(leaves, groups, strict=True)
    ]
    return jax.tree.unflatten(structure, marked)


def unmark(updates: optax.Updates, groups: list[Group]) -> optax.Updates:
    """Unwrap each leaf, or raise where a leaf is not marked or was clipped otherwise."""
    leaves, structure = jax.tree.flatten_with_path(updates, is_leaf=is_marked)
    counts = Counter(group.path for group in groups)
    for (path, leaf), group in zip(leaves, groups, strict=True):
        name = path_name(path)
        if not is_marked(leaf):
            raise ValueError(
                f"`updates` must be marked by `clipped_grad` in every leaf, got a plain array at "
                f"{name!r}; pass its result on as it came."
            )
        if Group(leaf.group, leaf.clip_norm) != group:
            raise ValueError(
                f"`clip_norm` must be the same on both sides, got "
                f"{_describe(leaf.group, leaf.clip_norm)} in `clipped_grad` and "
                f"{_describe(*group)} in the optimizer at {name!r}; pass the same object to both."
            )
        if leaf.together < counts[group.path]:
            raise ValueError(
                f"`updates` must come from one call of `clipped_grad`, got {counts[group.path]} "
                f"leaves of which {leaf.together} were clipped together, at {name!r}; clip them "
                "together, or give each of them its group in a tree of clip norms."
            )
    return jax.tree.unflatten(structure, [leaf.value for _, leaf in leaves])


def _describe(path: str, clip_norm: ClipNorm) -> str:
    return f"{clip_norm!r}" + (f" for the group {path}" if path else "")


def unmarked_leaves(
    link: str, updates: optax.Updates
) -> tuple[list[tuple[jax.tree_util.KeyPath, jax.Array]], jax.tree_util.PyTreeDef]:
    """Return the leaves of `updates` with their paths, and the structure of the tree.

    Raise if a leaf is a marked sum, which `clip_per_example` must unwrap before `link`, or if it is
    no real floating-point array.
    """
    check_unmarked(link, updates)
    check_floating("updates", updates)
    return jax.tree.flatten_with_path(updates)
