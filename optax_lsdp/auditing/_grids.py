"""Audits of `discrete`: sums in whole cells, and exact noise on them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.auditing._noise import audit_noise
from optax_lsdp.auditing._report import ClaimsReport, StatisticsReport
from optax_lsdp.discrete import add_discrete_gaussian_noise, quantized_grad

_CLIP_NORM, _RESOLUTION, _NOISE = 0.5, 2**10, 2.0
_FACTORS = (1e-3, 0.02, 1.0, -30.0, 1e6, 1e20, np.nan, np.inf, 0.0)
_STEPS = 16


def audit_grid(key: jax.Array) -> ClaimsReport:
    """Check each example's contribution on the grid against its clipped gradient."""
    shapes = {"a": (6,), "b": (4,), "c": (3,), "d": (2,)}
    keys = jax.random.split(key, len(shapes))
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    factors = jnp.asarray(_FACTORS, jnp.float32)
    batch = {
        name: factors[:, None] * jax.random.normal(one, shape)
        for one, (name, shape) in zip(keys, shapes.items(), strict=True)
    }

    def loss(params: Any, example: Any) -> jax.Array:  # whose gradient is the example
        return jnp.sum(jnp.stack([jnp.vdot(params[name], example[name]) for name in shapes]))

    gradient = jax.jit(quantized_grad(loss, clip_norm=_CLIP_NORM, resolution=_RESOLUTION))
    places = np.arange(len(_FACTORS))
    wrong = dict.fromkeys(("within its sensitivity", "the clipped gradient", "a sum of cells"), "")
    total = np.zeros(sum(len(x[0]) for x in batch.values()), np.int64)
    for i in places:
        marked = gradient(params, batch, jnp.asarray(places == i))
        cells = np.concatenate([np.asarray(marked[name].value, np.int64) for name in shapes])
        exact = np.concatenate([np.asarray(batch[name][i], np.float64) for name in shapes])
        length, most = float(np.linalg.norm(cells)), marked["a"].sensitivity
        wanted = np.zeros_like(exact)
        if np.isfinite(exact).all():
            wanted = exact / max(np.linalg.norm(exact), _CLIP_NORM) * _RESOLUTION
        if length > most:
            wrong["within its sensitivity"] = f"{length:.6g} of {most} cells by example {i}"
        if np.abs(cells - wanted).max() > 1:  # half a cell, and float32
            wrong["the clipped gradient"] = f"{cells} instead of {wanted} cells by example {i}"
        total += cells
    every = gradient(params, batch, jnp.asarray(places >= 0))
    if np.any(np.concatenate([np.asarray(every[name].value) for name in shapes]) != total):
        wrong["a sum of cells"] = "a batch does not add up to its examples"
    return ClaimsReport(wrong)


def audit_grid_noise(key: jax.Array) -> StatisticsReport:
    """Compare discrete noise, in cells, with a Gaussian of the claimed scale."""
    params = {"a": jnp.zeros(240), "b": jnp.zeros(40), "c": jnp.zeros(40), "d": jnp.zeros((3, 5))}

    def loss(params: Any, example: jax.Array) -> jax.Array:
        return sum(jnp.sum(x) for x in jax.tree.leaves(params)) * example

    gradient = quantized_grad(loss, clip_norm=_CLIP_NORM, resolution=_RESOLUTION)
    nobody = jax.jit(gradient)(params, jnp.ones(1), jnp.zeros(1, bool))
    link = add_discrete_gaussian_noise(_NOISE, key=key)
    update = jax.jit(link.update)
    noises, state = [], link.init(params)
    cell = nobody["a"].quantum
    for _ in range(_STEPS):
        noise, state = update(nobody, state)
        # Whole numbers, which may repeat themselves.
        noises.append({n: np.rint(np.asarray(x) / cell).astype(int) for n, x in noise.items()})
    scale = _NOISE * nobody["a"].sensitivity
    return audit_noise(noises.__getitem__, scale=scale, steps=_STEPS)
