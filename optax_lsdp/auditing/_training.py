"""Audit of `fit`: what one example changes in the parameters that a run releases."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp.auditing._report import ClaimsReport
from optax_lsdp.planning import PrivacyPlan

_SIZE, _WIDTH, _CLIP_NORM = 8, 4, 0.5
_MICROBATCH = 3  # the last one is padded
_LOUD = (30.0, 1e6, 0.01, 2.0, 1e3, 0.1, 1.0, 300.0)
_CHANGED = (0, 2, 7)  # loud and quiet, of the first and the last microbatch
_ROUNDING = 1e-4  # relative to the clip norm: parameters hold sums and noise in float32


def audit_training(key: jax.Array) -> ClaimsReport:
    """Take a step with and without some examples; with one key, the noise of both cancels."""
    keys = jax.random.split(key)
    rows = np.asarray(jax.random.normal(keys[0], (_SIZE, _WIDTH)))
    data = np.asarray(_LOUD, np.float32)[:, None] * rows
    everyone = _released(data, keys[1])
    claims = {}
    for place in _CHANGED:
        blank = np.where(np.arange(_SIZE)[:, None] == place, 0, data).astype(np.float32)
        made = _SIZE * (_released(blank, keys[1]) - everyone)
        one = data[place].astype(np.float64)
        wanted = one / max(float(np.linalg.norm(one)) / _CLIP_NORM, 1.0)
        off = float(np.linalg.norm(made - wanted)) / _CLIP_NORM
        length = float(np.linalg.norm(made)) / _CLIP_NORM
        wrong = f"{length:.6g} clip norms, off by {off:.3g}"
        claims[f"example {place} adds its clipped gradient"] = "" if off <= _ROUNDING else wrong
    return ClaimsReport(claims)


def _released(data: np.ndarray, key: jax.Array) -> np.ndarray:
    """Return the parameters after one step on all examples, whose gradients are the data."""
    from optax_lsdp.training import fit  # which needs Orbax

    plan = PrivacyPlan(
        dataset_size=_SIZE,
        expected_batch_size=_SIZE,
        steps=1,
        noise_multiplier=1.0,
        delta=1e-5,
        clip_norm=_CLIP_NORM,
        sampling="full",
    )

    def loss(params: Any, example: jax.Array) -> jax.Array:
        return jnp.vdot(params, example)

    done = fit(
        plan,
        loss,
        jnp.zeros(_WIDTH),
        data,
        optimizer=optax.sgd(1.0),
        microbatch_size=_MICROBATCH,
        progress=False,
        key=key,
    )
    return np.asarray(done.params, np.float64)
