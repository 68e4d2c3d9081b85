"""add_discrete_gaussian_noise: a sum in whole cells goes in, a noisy sum comes out."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._checks import check_positive, is_number
from optax_lsdp._keys import check_key, fold_in_text, fold_in_texts, is_threefry
from optax_lsdp._trees import (
    check_not_empty,
    check_not_per_example,
    leaf_addresses,
    path_name,
)
from optax_lsdp.discrete._grid import OnGrid, check_outside_shard_map
from optax_lsdp.discrete._sampler import LARGEST_SCALE, Stream, discrete_gaussian

LAST_STEP = 2**31 - 1


class AddDiscreteNoiseState(NamedTuple):
    """The run's key, which is a secret, and how many steps have been noised with it."""

    key: jax.Array
    step: jax.Array

    def __repr__(self) -> str:  # whoever has the key can subtract the noise, and states are logged
        return f"AddDiscreteNoiseState(key=<secret>, step={self.step!r})"


def add_discrete_gaussian_noise(
    noise_multiplier: float, *, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Add exact noise to the sum of `grid_grad`, and return it in float32.

    Every entry gets a whole number x of cells, P[x] ∝ exp(−x²/2s²), with s at least z times the
    sensitivity in cells. All that is secret is done in whole numbers, exactly, so that the
    guarantee of `accounting.DiscreteGaussian` is one about what the machine releases. It holds for
    full batches: every example in every step. Draws are made by NumPy on the host, under
    `jit` too, and are slower than those of `add_gaussian_noise` by far.

    Args:
        noise_multiplier: z, the noise in units of the sensitivity.
        key: one typed key of JAX's default generator, such as `fresh_key()`, used for nothing else;
            see `add_gaussian_noise`. Under `jax.vmap`, map over keys.

    >>> from optax_lsdp.discrete import grid_grad
    >>> gradient = grid_grad(jnp.vdot, clip_norm=1.0, resolution=100)
    >>> tx = optax.chain(
    ...     add_discrete_gaussian_noise(2.0, key=jax.random.key(0)),
    ...     optax.scale(1 / 50),  # the number of examples
    ...     optax.sgd(0.1),
    ... )
    >>> params, batch = jnp.zeros(2), jnp.ones((50, 2))
    >>> updates, _ = tx.update(gradient(params, batch), tx.init(params), params)
    """
    if not is_number(noise_multiplier):
        raise TypeError(f"`noise_multiplier` must be a number, got {noise_multiplier!r}.")
    check_positive("noise_multiplier", noise_multiplier)
    check_key("key", key)
    if not is_threefry(key):
        raise ValueError(f"`key` must be a Threefry key, got {jax.random.key_impl(key)}.")

    def init(params: optax.Params) -> AddDiscreteNoiseState:
        del params
        # A copy: donating the optimizer's state must not delete the caller's key.
        return AddDiscreteNoiseState(key=jnp.copy(key), step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: AddDiscreteNoiseState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AddDiscreteNoiseState]:
        del params
        check_not_per_example(extra_args, None)  # a mask would be lost
        check_outside_shard_map("add_discrete_gaussian_noise")
        paths, structure = jax.tree.flatten_with_path(updates, is_leaf=is_on_grid)
        check_not_empty("updates", updates)
        _check_on_grid(paths)
        leaves = [leaf for _, leaf in paths]
        scale = math.ceil(float(noise_multiplier) * leaves[0].sensitivity)
        if scale > LARGEST_SCALE:
            raise ValueError(
                f"`noise_multiplier` must leave the noise at {LARGEST_SCALE} cells at most, got "
                f"{noise_multiplier} times {leaves[0].sensitivity}; take a coarser `resolution`."
            )
        step_key = jax.random.fold_in(fold_in_text(state.key, "discrete noise"), state.step)
        keys = fold_in_texts(step_key, leaf_addresses(updates, is_on_grid))
        in_cells = [_add(x.value, key, scale) for x, key in zip(leaves, keys, strict=True)]
        fresh = state.step < LAST_STEP  # at which it stops counting, and noise would repeat
        noisy = [
            jnp.where(fresh, x.astype(jnp.float32) * jnp.float32(leaf.cell), jnp.nan)
            for x, leaf in zip(in_cells, leaves, strict=True)
        ]
        step = optax.safe_increment(state.step)
        return jax.tree.unflatten(structure, noisy), AddDiscreteNoiseState(state.key, step)

    return optax.GradientTransformationExtraArgs(init, update)


def is_on_grid(leaf: Any) -> bool:
    """Tell a sum in whole cells from an array."""
    return isinstance(leaf, OnGrid)


def _check_on_grid(paths: list[tuple[tuple[Any, ...], Any]]) -> None:
    """Raise unless all leaves come from one call of `grid_grad`."""
    for path, leaf in paths:
        if not is_on_grid(leaf):
            raise ValueError(
                f"`updates` must be the sum of `grid_grad`, got {type(leaf).__name__} at "
                f"{path_name(path)!r}; only whole cells can be noised exactly."
            )
        if leaf.value.dtype != jnp.int32:
            raise ValueError(
                f"`updates` must be in whole cells, got {leaf.value.dtype} at {path_name(path)!r}; "
                "put this link first."
            )
        told = (leaf.cell, leaf.sensitivity)
        first = (paths[0][1].cell, paths[0][1].sensitivity)
        if told != first or leaf.together != len(paths):
            raise ValueError(
                f"`updates` must come from one call of `grid_grad`, got {len(paths)} leaves of "
                f"which {leaf.together} were clipped together, at {path_name(path)!r}."
            )


def _add(value: jax.Array, key: jax.Array, scale: int) -> jax.Array:
    """Return a leaf's cells with noise, int32."""
    like = jax.ShapeDtypeStruct(value.shape, jnp.int32)
    draw = partial(_add_on_host, scale=scale)
    return jax.pure_callback(draw, like, value, jax.random.key_data(key), vmap_method="sequential")


def _add_on_host(value: Any, key: Any, *, scale: int) -> np.ndarray:
    cells = np.asarray(value)
    noise = discrete_gaussian(Stream(np.asarray(key)), scale, cells.size)
    return (cells.astype(np.int64) + noise.reshape(cells.shape)).astype(np.int32)  # modulo 2³²
