"""Audit noise and clipping of arrays that are split over eight devices.

If there are fewer devices, `reports_from_child` runs audits in a child process that simulates
eight CPU devices.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._types import PyTree
from optax_lsdp.auditing._clipping import (
    ONE_GROUP,
    Engine,
    all_leaves,
    clipped_sum,
    compare_with_oracle,
    hard_cases,
    one_group_per_model,
    oracle_case,
)
from optax_lsdp.auditing._hard_models import ODD_SCALES, PLAIN_SCALES
from optax_lsdp.auditing._report import (
    AuditReport,
    ClaimsReport,
    StatisticsReport,
    expect_refusal,
)
from optax_lsdp.auditing._statistics import audit_noise
from optax_lsdp.clipping import Clipped, clipped_grad
from optax_lsdp.noise import add_gaussian_noise

DEVICES = 8
_SCALE, _CLIP_NORM, _STEPS = 1.0, 0.5, 24
_SPLIT, _WHOLE = jax.P("shards"), jax.P()
_ENGINES: tuple[Engine, ...] = ("bookkeeping", "vmap")
_CHILD = (
    "from optax_lsdp.auditing._devices import serve_parent; "
    "from optax_lsdp.auditing._library import run_audit; serve_parent(run_audit)"
)


def _mesh() -> jax.sharding.Mesh:
    automatic = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((DEVICES,), ("shards",), automatic, devices=jax.devices()[:DEVICES])


def audit_sharded_noise(key: jax.Array) -> StatisticsReport:
    """Test the noise of leaves that `shard_map` splits over devices."""
    leaves = {
        "kernel": ((8 * DEVICES, 6), _SPLIT),
        "small": ((DEVICES, 2), _SPLIT),
        "columns": ((5, 2 * DEVICES), jax.P(None, "shards")),
        "bias": ((12,), _WHOLE),
    }
    zeros = {name: jnp.zeros(shape) for name, (shape, _) in leaves.items()}
    specs = {name: spec for name, (_, spec) in leaves.items()}
    noise = add_gaussian_noise(_SCALE, key=key, shard_specs=specs)

    def update(zeros: optax.Updates, step: jax.Array) -> optax.Updates:
        return noise.update(zeros, noise.init(zeros)._replace(step=step))[0]

    shards = jax.shard_map(update, mesh=_mesh(), in_specs=(specs, _WHOLE), out_specs=specs)
    release = jax.jit(lambda step: shards(zeros, step))
    return audit_noise(
        lambda step: release(jnp.asarray(step, jnp.int32)), scale=_SCALE, steps=_STEPS
    )


def audit_sharded_clipping(key: jax.Array) -> ClaimsReport:
    """Compare the clipped sum of a batch that is split over devices with the oracle."""
    loss, params, cases = hard_cases(key, ONE_GROUP, [*PLAIN_SCALES, *ODD_SCALES])
    groups = one_group_per_model(ONE_GROUP)
    clip_norms = {name: group.clip_norm for name, group in groups.items()}
    of_shard = clipped_grad(loss, clip_norm=clip_norms)

    def gradient(params: optax.Params, batch: PyTree, mask: jax.Array) -> optax.Updates:
        return jax.lax.psum(of_shard(params, batch, mask), "shards")

    in_specs = (_WHOLE, _SPLIT, _SPLIT)
    whole = jax.shard_map(gradient, mesh=_mesh(), in_specs=in_specs, out_specs=_WHOLE)
    return compare_with_oracle(clipped_sum(whole, params, clip_norms), cases, groups)


def audit_split_parameters(key: jax.Array) -> ClaimsReport:
    """Compare the clipped sum of parameters that are split over devices with the oracle."""
    keys = jax.random.split(key, 3)
    params = {
        "columns": jax.random.normal(keys[0], (6, 2 * DEVICES)),
        "rows": jax.random.normal(keys[1], (2 * DEVICES, 3)),
    }
    batch = jnp.geomspace(1e-3, 1e3, 12)[:, None] * jax.random.normal(keys[2], (12, 6))

    def whole(params: optax.Params, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.tanh(x @ params["columns"]) @ params["rows"]))

    def part(params: optax.Params, x: jax.Array) -> jax.Array:
        hidden = jax.lax.psum(jnp.tanh(x @ params["columns"]) @ params["rows"], "shards")
        return jnp.sum(jnp.sin(hidden))

    gradient = clipped_grad(part, clip_norm=_CLIP_NORM)

    def unmarked(params: optax.Params, batch: jax.Array, mask: jax.Array) -> optax.Updates:
        marked = gradient(params, batch, mask)
        return jax.tree.map(lambda x: x.value, marked, is_leaf=lambda x: isinstance(x, Clipped))

    specs = {"columns": jax.P(None, "shards"), "rows": _SPLIT}
    in_specs = (specs, _WHOLE, _WHOLE)
    shards = jax.shard_map(unmarked, mesh=_mesh(), in_specs=in_specs, out_specs=specs)
    release = partial(jax.jit(shards), params)
    cases = [oracle_case(whole, params, batch)]
    return compare_with_oracle(release, cases, all_leaves(_CLIP_NORM))


def audit_collectives(key: jax.Array) -> ClaimsReport:
    """Check that the library refuses losses that use other shards, and noise that shards share."""
    batch, params = jax.random.normal(key, (DEVICES, 3)), jnp.ones(3)
    claims = {}
    for name, collective in _COLLECTIVES.items():
        for engine in _ENGINES:
            loss = partial(_loss_across_shards, collective)
            gradient = clipped_grad(loss, clip_norm=1.0, engine=engine)
            claim = f"{name} in a loss is refused, engine {engine!r}"
            claims[claim] = _expect_refusal_of_shards(gradient, params, batch)
    noise = add_gaussian_noise(_SCALE, key=key)

    def shared_noise(params: optax.Params, updates: optax.Updates) -> optax.Updates:
        return noise.update(updates, noise.init(params))[0]

    claims["the same noise on all shards is refused"] = _expect_refusal_of_shards(
        shared_noise, params, batch
    )
    return ClaimsReport(claims)


_COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum": lambda x: jax.lax.psum(x, "shards"),
    "pmean": lambda x: jax.lax.pmean(x, "shards"),
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, "shards"), axis=0),
    "ppermute": lambda x: jax.lax.ppermute(x, "shards", [(0, 1), (1, 0)]),
}


def _loss_across_shards(
    collective: Callable[[jax.Array], jax.Array], w: jax.Array, x: jax.Array
) -> jax.Array:
    return jnp.vdot(w, collective(x))


def _expect_refusal_of_shards(
    function: Callable[..., optax.Updates], params: optax.Params, batch: jax.Array
) -> str:
    """Return "" if the library refuses a function of the parameters and a shard of the batch."""
    in_specs = (_WHOLE, _SPLIT)
    shards = jax.shard_map(function, mesh=_mesh(), in_specs=in_specs, out_specs=_SPLIT)
    return expect_refusal(lambda: jax.eval_shape(shards, params, batch), "it is accepted")


@contextmanager
def reports_from_child(names: Sequence[str], key: jax.Array) -> Iterator[Iterator[AuditReport]]:
    """Start a process that runs the audits one after another, and yield their reports in order.

    The process has `DEVICES` simulated CPU devices. It ends with the context.
    """
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    changes = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps([words, list(names)])],
        env=os.environ | changes,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield _reports(process, cast("IO[bytes]", process.stdout))  # not None: it is a pipe
        finally:
            process.kill()


def _reports(process: subprocess.Popen[bytes], pipe: IO[bytes]) -> Iterator[AuditReport]:
    """Yield the reports that the process writes. After the process has ended, yield rejections."""
    while True:
        try:
            yield pickle.load(pipe)  # the writer is `serve_parent`
        except (EOFError, pickle.UnpicklingError):
            ended = f"the child process ended with code {process.wait()}"
            yield ClaimsReport({"the audit can run": ended})


def serve_parent(run_audit: Callable[[str, jax.Array], AuditReport]) -> None:
    """Run the audits that the parent process named, and write their reports to stdout."""
    words, names = json.loads(sys.argv[1])
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # other prints go to stderr
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")
    for name in names:
        pickle.dump(run_audit(name, key), reports)
        reports.flush()
