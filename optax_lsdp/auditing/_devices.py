"""Audits on eight devices: noise and clipping of arrays that are spread over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from optax_lsdp.auditing._clipping import hard_cases, hard_groups
from optax_lsdp.auditing._hard_models import ODD, PLAIN
from optax_lsdp.auditing._noise import audit_noise
from optax_lsdp.auditing._oracle import AgreementReport, Group, audit_agreement, single_gradients
from optax_lsdp.auditing._report import ClaimsReport, StatisticsReport, unless_refused
from optax_lsdp.clipping import Clipped, clip_per_example, clipped_grad
from optax_lsdp.noise import add_gaussian_noise

DEVICES = 8
_MODELS = ("dense", "scanned", "small", "tied")
_SCALE, _CLIP_NORM, _STEPS = 1.0, 0.5, 24


def _mesh() -> jax.sharding.Mesh:
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((DEVICES,), ("shards",), automatic, devices=jax.devices()[:DEVICES])


def audit_sharded_noise(key: jax.Array) -> StatisticsReport:
    """Compare the noise of leaves that `shard_map` splits over devices with the claimed one."""
    split, whole = jax.P("shards"), jax.P()
    leaves = {
        "kernel": ((8 * DEVICES, 6), split),
        "small": ((DEVICES, 2), split),
        "columns": ((5, 2 * DEVICES), jax.P(None, "shards")),
        "bias": ((12,), whole),
    }
    zeros = {name: jnp.zeros(shape) for name, (shape, _) in leaves.items()}
    specs = {name: spec for name, (_, spec) in leaves.items()}
    link = add_gaussian_noise(_SCALE, key=key, shard_specs=specs)

    def update(zeros: Any, step: jax.Array) -> Any:
        return link.update(zeros, link.init(zeros)._replace(step=step))[0]

    spread = jax.jit(jax.shard_map(update, mesh=_mesh(), in_specs=(specs, whole), out_specs=specs))
    release = partial(_at_step, spread, zeros)
    return audit_noise(release, scale=_SCALE, steps=_STEPS)


def _at_step(spread: Callable[..., Any], zeros: Any, step: int) -> Any:
    return spread(zeros, jnp.asarray(step, jnp.int32))


def audit_sharded_clipping(key: jax.Array) -> AgreementReport:
    """Compare the clipped sum of a batch that is split over devices with the oracle."""
    loss, params, cases = hard_cases(key, _MODELS, [*PLAIN, *ODD])
    groups = hard_groups(_MODELS)
    clip_norms = {name: group.clip_norm for name, group in groups.items()}
    gradient = clipped_grad(loss, clip_norm=clip_norms)
    link = clip_per_example(clip_norms)

    def clip(params: Any, batch: Any, mask: jax.Array) -> Any:
        return jax.lax.psum(gradient(params, batch, mask), "shards")

    split = jax.P("shards")
    spread = jax.shard_map(clip, mesh=_mesh(), in_specs=(jax.P(), split, split), out_specs=jax.P())

    @jax.jit
    def clip_all(params: Any, batch: Any, mask: jax.Array) -> Any:
        return link.update(spread(params, batch, mask), link.init(params), params)[0]

    release = partial(clip_all, params)
    return audit_agreement(release, cases, groups)


def audit_split_parameters(key: jax.Array) -> AgreementReport:
    """Compare the clipped sum of parameters that are split over devices with the oracle."""
    keys = jax.random.split(key, 3)
    params = {
        "columns": jax.random.normal(keys[0], (6, 2 * DEVICES)),
        "rows": jax.random.normal(keys[1], (2 * DEVICES, 3)),
    }
    batch = jnp.geomspace(1e-3, 1e3, 12)[:, None] * jax.random.normal(keys[2], (12, 6))

    def whole(params: Any, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ params["columns"]) @ params["rows"]
        return jnp.sum(jnp.sin(hidden))

    def part(params: Any, x: jax.Array) -> jax.Array:
        hidden = jax.lax.psum(jnp.tanh(x @ params["columns"]) @ params["rows"], "shards")
        return jnp.sum(jnp.sin(hidden))

    gradient = clipped_grad(part, clip_norm=_CLIP_NORM)
    specs = {"columns": jax.P(None, "shards"), "rows": jax.P("shards")}
    spread = jax.shard_map(
        lambda *args: jax.tree.map(lambda x: x.value, gradient(*args), is_leaf=_is_marked),
        mesh=_mesh(),
        in_specs=(specs, jax.P(), jax.P()),
        out_specs=specs,
    )
    release = partial(jax.jit(spread), params)
    groups = {"all leaves": Group(_CLIP_NORM, lambda tree: tree, 1e-4)}
    return audit_agreement(release, single_gradients(whole, params, batch), groups)


def _is_marked(leaf: Any) -> bool:
    return isinstance(leaf, Clipped)


def audit_collectives(key: jax.Array) -> ClaimsReport:
    """Let examples of other shards into a loss, and shards share their noise: both are refused."""
    batch, params = jax.random.normal(key, (DEVICES, 3)), jnp.ones(3)
    claims = {}
    for name, collective in _COLLECTIVES.items():
        for engine in ("bookkeeping", "vmap"):
            loss = partial(_across, collective)
            gradient = clipped_grad(loss, clip_norm=1.0, engine=engine)
            claim = f"{name} in a loss, engine {engine!r}, is refused"
            claims[claim] = _on_shards(gradient, params, batch)
    link = add_gaussian_noise(_SCALE, key=key)

    def shared(params: Any, updates: jax.Array) -> Any:
        return link.update(updates, link.init(params))[0]

    claims["noise that all shards share is refused"] = _on_shards(shared, params, batch)
    return ClaimsReport(claims)


_COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum": lambda x: jax.lax.psum(x, "shards"),
    "pmean": lambda x: jax.lax.pmean(x, "shards"),
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, "shards"), axis=0),
    "ppermute": lambda x: jax.lax.ppermute(x, "shards", [(0, 1), (1, 0)]),
}


def _across(collective: Callable[[jax.Array], jax.Array], w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.vdot(w, collective(x))


def _on_shards(function: Callable[..., Any], params: Any, batch: Any) -> str:
    """Return nothing if a function of parameters and shards of a batch is refused."""
    specs = (jax.P(), jax.P("shards"))
    spread = jax.shard_map(function, mesh=_mesh(), in_specs=specs, out_specs=jax.P("shards"))
    return unless_refused(lambda: jax.eval_shape(spread, params, batch), "it is taken")
