"""Look at every example of a batch: is its loss finite, is its gradient, and which leaves get one.

Gradients of eight examples at a time are formed and forgotten; what is kept of each is a few bools.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._trees import path_name, widen

MOST_AT_ONCE = 8  # examples whose gradients are in memory
_REMEDY = "look at labels out of range, scales, logarithms and divisions by zero"
_STEP = 1e-2  # how far a second point is from the first, in norms of a leaf, and at least


class Seen(NamedTuple):
    """Which losses and gradients are finite, and which leaves get a gradient.

    Attributes:
        losses: (n,) whether the loss is finite.
        gradients: (n, leaves) whether the gradient is.
        reached: (leaves,) whether any gradient is not zero.
    """

    losses: np.ndarray
    gradients: np.ndarray
    reached: np.ndarray


Look = Callable[[optax.Params, Any], tuple[jax.Array, jax.Array, jax.Array]]


def make_look(value_and_grads: Callable[..., tuple[jax.Array, Any]]) -> Look:
    """Return a compiled check of a chunk: finite losses, finite gradients, gradients of zero."""

    def look(params: optax.Params, chunk: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        values, grads = value_and_grads(params, chunk)
        rows = [leaf.reshape(len(values), -1) for leaf in jax.tree.leaves(grads)]
        finite = jnp.stack([jnp.isfinite(row).all(axis=1) for row in rows], axis=1)
        return jnp.isfinite(values), finite, jnp.stack([jnp.any(row != 0) for row in rows])

    return jax.jit(look)


def look_at_all(look: Look, params: optax.Params, batch: Any, size: int) -> Seen:
    """Look at all examples, in chunks of one size, of which the last may overlap the one before."""
    width = min(size, MOST_AT_ONCE)
    starts = sorted({*range(0, size - width + 1, width), size - width})
    chunks = [jax.tree.map(lambda x, s=s: x[s : s + width], batch) for s in starts]
    parts = [jax.device_get(look(params, chunk)) for chunk in chunks]
    losses, gradients, reached = (list(part) for part in zip(*parts, strict=True))
    if len(losses[0]) == width:  # one for each example
        again = len(starts) * width - size
        losses[-1], gradients[-1] = losses[-1][again:], gradients[-1][again:]
    return Seen(np.concatenate(losses), np.concatenate(gradients), np.any(reached, axis=0))


def another_point(params: optax.Params) -> optax.Params:
    """Return slightly perturbed parameters; those that start at zero, as LoRA's B, move too."""
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def moved(x: jax.Array, key: jax.Array) -> jax.Array:
        wide = widen(x)
        size = _STEP * jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(wide))), 1)
        return (wide + size * jax.random.normal(key, wide.shape, wide.dtype)).astype(x.dtype)

    points = [moved(jnp.asarray(x), key) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, points)


def not_finite(seen: Seen, params: optax.Params, what: str) -> Iterator[str]:
    """Say which losses and which gradients are not finite, and what becomes of such examples.

    A loss may be NaN while its gradient is finite, as with a label beyond the classes: then the
    example trains the model like any other. One whose gradient is not finite contributes nothing.
    """
    broken, sound = ~seen.losses, seen.gradients.all(axis=1)
    count, size = int(broken.sum()), len(broken)
    if count:
        trained = int((broken & sound).sum())
        if trained == count:
            fate = "the gradients there are finite, and train the model all the same"
        elif trained == 0:
            fate = "the gradients there are not finite either, and contribute nothing"
        else:
            fate = (
                f"{trained} of the gradients there are finite, and train the model all the same, "
                "and the others contribute nothing"
            )
        first = f", first at index {int(np.argmax(broken))}" if size > 1 else ""
        yield f"The loss is not finite for {count} of {size} {what}{first}; {fate}: {_REMEDY}."
    paths = [path_name(path) for path, _ in jax.tree.leaves_with_path(params)]
    for path, finite in zip(paths, seen.gradients.T, strict=True):
        alone = ~finite & ~broken
        if alone.any():
            of = f" of {path!r}" if path else ""
            yield (
                f"The gradient{of} is not finite for {int(alone.sum())} of {size} {what}, though "
                f"the loss is; they contribute nothing to private training: {_REMEDY}."
            )
