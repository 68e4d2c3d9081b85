"""Marking a sum after it was clipped, and checking the mark before it is unwrapped."""

from __future__ import annotations

from collections import Counter

import jax
import optax

from optax_lsdp._marked import Clipped, is_marked
from optax_lsdp._trees import path_name
from optax_lsdp.clipping._factors import ClipNorm, Group


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
