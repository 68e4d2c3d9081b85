"""Audit likely misuse of the library: each case is harmless, or it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.auditing._report import ClaimsReport, checked, unless_refused
from optax_lsdp.clipping import clip_per_example, clipped_grad
from optax_lsdp.noise import add_gaussian_noise
from optax_lsdp.sampling import FixedSizeSampler, PoissonSampler, Sampler, ShuffledSampler

_SIZE, _BATCH, _MULTIPLE, _STEPS = 500, 50, 64, 20


@jax.tree_util.register_pytree_with_keys_class
class _Numbered(dict[int, Any]):
    """A container whose keys are plain numbers: `x[1][11]` and `x[11][1]` are written alike."""

    def tree_flatten_with_keys(self) -> tuple[list[tuple[int, Any]], tuple[int, ...]]:
        """Return all items, and their keys."""
        return list(self.items()), tuple(self)

    @classmethod
    def tree_unflatten(cls, keys: tuple[int, ...], values: Any) -> _Numbered:
        """Return the container again."""
        return cls(zip(keys, values, strict=True))


def audit_misuse(key: jax.Array) -> ClaimsReport:
    """Forget a mask, write into clip norms, mix mapped batches, and name leaves alike."""
    samplers: dict[str, Sampler] = {
        "Poisson": PoissonSampler(_SIZE, _BATCH / _SIZE, key),
        "fixed-size": FixedSizeSampler(_SIZE, _BATCH, key, multiple_of=_MULTIPLE),
        "shuffled": ShuffledSampler(_SIZE, _BATCH, key, multiple_of=_MULTIPLE),
    }
    checks: dict[str, Callable[[], str]] = {
        **{
            f"padding of {name} batches repeats no example": partial(_repeats, sampler)
            for name, sampler in samplers.items()
        },
        "a mask beside stacked gradients is honoured": _ignores_the_mask,
        "a clip norm that is written into later changes nothing": _follows_its_dict,
        "leaves that are written alike have noise of their own": partial(_share_noise, key),
        **{
            f"collectives over an axis of vmap, engine {engine!r}, are refused": partial(
                _mixes_mapped_batches, engine
            )
            for engine in ("bookkeeping", "vmap")
        },
    }
    return checked(checks)


def _repeats(sampler: Sampler) -> str:
    for step in range(_STEPS):
        indices = np.asarray(sampler.batch(step).indices)
        times = np.bincount(indices, minlength=_SIZE)
        if times.max() > 1:
            return f"example {times.argmax()} comes {times.max()} times in step {step}"
    return ""


def _ignores_the_mask() -> str:
    link, params = clip_per_example(1.0), jnp.zeros(2)
    stacked = jnp.asarray([[3.0, 4.0], [0.0, 0.5], [6.0, 8.0]])
    mask = jnp.asarray([True, True, False])
    total, _ = link.update(stacked, link.init(params), params, mask=mask)
    off = float(np.abs(np.asarray(total) - [0.6, 1.3]).max())
    return "" if off < 1e-5 else f"the sum is {np.asarray(total)} instead of [0.6 1.3]"


def _follows_its_dict() -> str:
    def loss(params: Any, example: jax.Array) -> jax.Array:
        return jnp.vdot(params["w"], example)

    clip_norm = {"w": 1.0}
    gradient, link = clipped_grad(loss, clip_norm=clip_norm), clip_per_example(clip_norm)
    clip_norm["w"] = 1000.0
    params = {"w": jnp.zeros(2)}
    marked = gradient(params, jnp.asarray([[3.0, 4.0]]))
    total, _ = link.update(marked, link.init(params), params)
    length = float(np.linalg.norm(total["w"]))
    return "" if length < 1.00001 else f"an example adds {length:.6g} clip norms"


def _share_noise(key: jax.Array) -> str:
    zeros = _Numbered({1: _Numbered({11: jnp.zeros(9)}), 11: _Numbered({1: jnp.zeros(9)})})
    link = add_gaussian_noise(1.0, key=key)
    noise, _ = link.update(zeros, link.init(zeros))
    return "x[1][11] and x[11][1] share it" if np.array_equal(noise[1][11], noise[11][1]) else ""


def _mixes_mapped_batches(engine: Any) -> str:
    def loss(collective: Callable[..., jax.Array], w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.vdot(w, collective(x, "shards"))

    batches, w = jnp.ones((4, 3, 2)), jnp.ones(2)
    for collective in (jax.lax.pmean, jax.lax.psum, jax.lax.pmax):
        gradient = clipped_grad(partial(loss, collective), clip_norm=1.0, engine=engine)
        mapped = jax.vmap(gradient, (None, 0), axis_name="shards")
        call = partial(jax.eval_shape, mapped, w, batches)
        if wrong := unless_refused(call, f"{collective.__name__} is taken"):
            return wrong
    return ""
