"""Train many runs of softmax regression in one program.

Runs differ in seed, noise, clip norm, step size and σ. Every step multiplies the features once by
the weights of all runs. The gradient of an example is the outer product of its features and its
residuals, so its norm is a product of two norms, and no example is differentiated. A test holds the
clipped sums to `clipped_grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Examples = tuple[Any, Any]  # features (n, d) and labels (n,)
Choose = Callable[[int, jax.Array], Any]  # (seed, step) → indices and mask


class Runs(NamedTuple):
    """The settings in which runs of one seed differ: arrays of equal length.

    Attributes:
        noise_multiplier: z.
        clip_norm: C.
        step_size: the first learning rate, for gradients divided by C.
        smoothing: σ.
    """

    noise_multiplier: Any
    clip_norm: Any
    step_size: Any
    smoothing: Any


class Recipe(NamedTuple):
    """What all runs of a program have in common. It is hashable.

    Attributes:
        steps: how many noisy sums are used.
        batch: by what they are divided.
        optimizer: (a run, its key, the recipe) → a chain for the clipped sum divided by C.
        choose: returns a batch, or None for full batches.
        average: the decay of an average of the parameters, or None. The average is what is judged.
        points: how often, evenly spread, the models are looked at.
    """

    steps: int
    batch: int
    optimizer: Callable[[Runs, jax.Array, Recipe], optax.GradientTransformation]
    choose: Choose | None = None
    average: float | None = None
    points: int = 1


def clipped_sum(
    params: Any, features: jax.Array, labels: jax.Array, mask: Any, clip_norm: jax.Array
) -> Any:
    """Return each run's sum of clipped gradients, divided by its C.

    Args:
        params: {"kernel": (r, d, k), "bias": (r, k)}.
        features: (n, d).
        labels: (n,).
        mask: (n,), or None if all are examples.
        clip_norm: C of each run, (r,).
    """
    classes = params["bias"].shape[-1]
    logits = jnp.einsum("nd,rdk->nrk", features, params["kernel"]) + params["bias"]
    residuals = jax.nn.softmax(logits) - jax.nn.one_hot(labels, classes)[:, None]
    lengths = jnp.sqrt(1 + jnp.sum(features**2, axis=1))  # the bias sees a 1
    norms = lengths[:, None] * jnp.linalg.norm(residuals, axis=-1)
    factors = 1 / jnp.maximum(norms, clip_norm)
    if mask is not None:
        factors = jnp.where(mask[:, None], factors, 0)
    weighted = factors[..., None] * residuals
    return {"kernel": jnp.einsum("nd,nrk->rdk", features, weighted), "bias": weighted.sum(0)}


def train(
    recipe: Recipe,
    data: Examples,
    looked_at: Examples,
    runs: Runs,
    seeds: Sequence[int],
    classes: int = 10,
) -> np.ndarray:
    """Return the accuracies in percent of all runs: (seeds, runs, points)."""
    runs = Runs(*(jnp.asarray(x, jnp.float32) for x in runs))
    data, looked_at = jax.tree.map(jnp.asarray, (data, looked_at))
    return 100 * np.asarray(_train(recipe, data, looked_at, runs, tuple(seeds), classes))


@partial(jax.jit, static_argnames=("recipe", "seeds", "classes"))
def _train(
    recipe: Recipe,
    data: Examples,
    looked_at: Examples,
    runs: Runs,
    seeds: tuple[int, ...],
    classes: int,
) -> jax.Array:
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))  # public, unlike the key of a real run
    shape = (len(keys), len(runs.step_size))
    first = {"kernel": jnp.zeros((data[0].shape[1], classes)), "bias": jnp.zeros(classes)}
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)), first)

    def on_all(function: Callable[..., Any]) -> Callable[..., Any]:
        """Map over settings and seeds: (run, key, …) → function."""
        return jax.vmap(jax.vmap(function, (0, None, 0)), (None, 0, 0))

    def begin(run: Runs, key: jax.Array, params: Any) -> Any:
        return recipe.optimizer(run, key, recipe).init(params)

    def advance(run: Runs, key: jax.Array, carry: Any) -> Any:
        total, state, params = carry
        chain = optax.with_extra_args_support(recipe.optimizer(run, key, recipe))
        known = run.noise_multiplier / recipe.batch  # for optimizers that correct for noise
        updates, state = chain.update(total, state, params, noise_stddev=known)
        return optax.apply_updates(params, updates), state

    def gradient(params: Any, step: jax.Array) -> Any:
        if recipe.choose is None:
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), params)
            norms = jnp.tile(runs.clip_norm, len(keys))
            total = clipped_sum(flat, *data, None, norms)
            return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), total)

        batches = [recipe.choose(seed, step) for seed in seeds]
        indices, masks = (jnp.stack(parts) for parts in zip(*batches, strict=True))

        def one(params: Any, chosen: jax.Array, mask: jax.Array) -> Any:
            return clipped_sum(params, data[0][chosen], data[1][chosen], mask, runs.clip_norm)

        return jax.vmap(one)(params, indices, masks)

    def step(carry: Any, step: jax.Array) -> tuple[Any, None]:
        params, state, mean = carry
        params, state = on_all(advance)(runs, keys, (gradient(params, step), state, params))
        if recipe.average is None:
            return (params, state, params), None
        weight = jnp.maximum(1 - recipe.average, 1 / (step + 1))
        mean = jax.tree.map(lambda a, p: a + weight * (p - a), mean, params)
        return (params, state, mean), None

    def look(params: Any) -> jax.Array:
        logits = jnp.einsum("nd,srdk->srnk", looked_at[0], params["kernel"])
        found = (logits + params["bias"][:, :, None]).argmax(-1)
        return (found == looked_at[1]).mean(-1)

    carry = (params, on_all(begin)(runs, keys, params), params)
    each = recipe.steps // recipe.points
    seen = []
    for point in range(recipe.points):
        carry, _ = jax.lax.scan(step, carry, each * point + jnp.arange(each))
        seen.append(look(carry[2]))
    return jnp.stack(seen, axis=-1)
