"""The mark: leaves of a clipped sum that remember how they were clipped, and its check."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

from optax_lsdp._trees import path_name
from optax_lsdp.clipping._factors import ClipNorm, Group


@partial(
    jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["clip_norm", "group"]
)
@dataclass(frozen=True)
class Clipped:
    """One leaf of a clipped sum, with the clip norm that made it.

    A pytree node with one child: `jax.tree.leaves` gives the arrays, and
    `jax.tree.map(jnp.add, a, b)` adds two sums over disjoint examples if they were clipped alike.
    The mark catches accidents, not adversaries: it tells who made the sum, not what was
    done to it since.

    Attributes:
        value: the sum of clipped gradients, float32 at least; under a schedule of
            clip norms, in units of the clip norm, so that its sensitivity is 1 at every step.
        clip_norm: the clip norm of the leaf's group: a number, or the schedule itself.
        group: the group's path in the prefix tree of clip norms; "" where there is one group.

    >>> import jax.numpy as jnp
    >>> half = Clipped(jnp.ones(2), clip_norm=1.0)
    >>> jax.tree.map(jnp.add, half, half)
    Clipped(value=Array([2., 2.], dtype=float32), clip_norm=1.0, group='')
    """

    value: jax.Array
    clip_norm: ClipNorm
    group: str = ""


def is_marked(leaf: Any) -> bool:
    """Tell a marked leaf from an array."""
    return isinstance(leaf, Clipped)


def mark(sums: optax.Updates, groups: list[Group]) -> optax.Updates:
    """Wrap each leaf with the clip norm of its group."""
    leaves, structure = jax.tree.flatten(sums)
    marked = [
        Clipped(leaf, group.clip_norm, group.path)
        for leaf, group in zip(leaves, groups, strict=True)
    ]
    return jax.tree.unflatten(structure, marked)


def unmark(updates: optax.Updates, groups: list[Group]) -> optax.Updates:
    """Unwrap each leaf, or raise where a leaf is not marked or was clipped otherwise."""
    leaves, structure = jax.tree.flatten_with_path(updates, is_leaf=is_marked)
    for (path, leaf), group in zip(leaves, groups, strict=True):
        name = path_name(path)
        if not is_marked(leaf):
            raise ValueError(
                f"`updates` must be marked by `clipped_grad` in every leaf, got a plain array at "
                f"{name!r}; pass its result on as it came."
            )
        if Group(leaf.group, leaf.clip_norm) != group:
            raise ValueError(
                f"`clip_norm` must be the same in `clipped_grad` and in the optimizer, got "
                f"{_describe(leaf.group, leaf.clip_norm)} and {_describe(*group)} at {name!r}."
            )
    return jax.tree.unflatten(structure, [leaf.value for _, leaf in leaves])


def _describe(path: str, clip_norm: ClipNorm) -> str:
    return f"{clip_norm!r}" + (f" for the group {path!r}" if path else "")
