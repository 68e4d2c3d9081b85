"""Audit noise and clipping of arrays that are split over eight devices.

If there are fewer devices, `reports_from_child` runs audits on eight simulated CPU devices.
"""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import IO, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._types import PyTree
from optax_lsdp.auditing import _clipping as clipping
from optax_lsdp.auditing._hard_models import ODD_SCALES, PLAIN_SCALES
from optax_lsdp.auditing._report import AuditReport, ClaimsReport, StatisticsReport, expect_refusal
from optax_lsdp.auditing._statistics import audit_noise
from optax_lsdp.clipping import Clipped, clipped_grad
from optax_lsdp.noise import add_gaussian_noise

DEVICES = 8
_SCALE = 1.0
_SPLIT, _WHOLE, _COLUMNS = jax.P("shards"), jax.P(), jax.P(None, "shards")
_CHILD = (
    "from optax_lsdp.auditing._devices import serve_parent; "
    "from optax_lsdp.auditing._library import run_audit; serve_parent(run_audit)"
)


def _shard_map(
    function: Callable[..., PyTree], in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """Return a compiled function that runs on each device, with its shards of the arguments."""
    automatic, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("shards",), automatic, devices=devices)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def audit_sharded_noise(key: jax.Array) -> StatisticsReport:
    """Test the noise of leaves that `shard_map` splits over devices."""
    leaves = {
        "kernel": ((8 * DEVICES, 6), _SPLIT),
        "small": ((DEVICES, 2), _SPLIT),
        "columns": ((5, 2 * DEVICES), _COLUMNS),
        "bias": ((12,), _WHOLE),
    }
    zeros = {name: jnp.zeros(shape) for name, (shape, _) in leaves.items()}
    specs = {name: spec for name, (_, spec) in leaves.items()}
    noise = add_gaussian_noise(_SCALE, key=key, shard_specs=specs)

    def update(zeros: optax.Updates, step: jax.Array) -> optax.Updates:
        return noise.update(zeros, noise.init(zeros)._replace(step=step))[0]

    shards = _shard_map(update, (specs, _WHOLE), specs)
    return audit_noise(lambda step: shards(zeros, jnp.int32(step)), scale=_SCALE, steps=24)


def audit_sharded_clipping(key: jax.Array) -> ClaimsReport:
    """Compare the clipped sum of a batch that is split over devices with the oracle."""
    scales = [*PLAIN_SCALES, *ODD_SCALES]
    loss, params, cases = clipping.hard_cases(key, clipping.ONE_GROUP, scales)
    groups, clip_norms = clipping.one_group_per_model(clipping.ONE_GROUP)
    of_shard = clipped_grad(loss, clip_norm=clip_norms)

    def gradient(params: optax.Params, batch: PyTree, mask: jax.Array) -> optax.Updates:
        return jax.lax.psum(of_shard(params, batch, mask), "shards")

    whole = _shard_map(gradient, (_WHOLE, _SPLIT, _SPLIT), _WHOLE)
    release = clipping.clipped_sum(whole, params, clip_norms)
    return clipping.compare_with_oracle(release, cases, groups)


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

    gradient = clipped_grad(part, clip_norm=clipping.CLIP_NORM)

    def unmarked(params: optax.Params, batch: jax.Array, mask: jax.Array) -> optax.Updates:
        marked = gradient(params, batch, mask)
        return jax.tree.map(lambda x: x.value, marked, is_leaf=lambda x: isinstance(x, Clipped))

    specs = {"columns": _COLUMNS, "rows": _SPLIT}
    release = partial(_shard_map(unmarked, (specs, _WHOLE, _WHOLE), specs), params)
    cases = [clipping.oracle_case(whole, params, batch)]
    return clipping.compare_with_oracle(release, cases, clipping.ALL_LEAVES)


def audit_collectives(key: jax.Array) -> ClaimsReport:
    """Check that the library refuses losses that use other shards, and noise that shards share."""
    batch, params = jax.random.normal(key, (DEVICES, 3)), jnp.ones(3)
    noise = add_gaussian_noise(_SCALE, key=key)

    def shared_noise(params: optax.Params, updates: optax.Updates) -> optax.Updates:
        return noise.update(updates, noise.init(params))[0]

    functions: dict[str, Callable[..., optax.Updates]] = {}
    for (name, collective), engine in product(_COLLECTIVES.items(), clipping.ENGINES):
        loss = partial(clipping.loss_across_shards, collective)
        gradient = clipped_grad(loss, clip_norm=1.0, engine=engine)
        functions[f"{name} in a loss is refused, engine {engine!r}"] = gradient
    functions["the same noise on all shards is refused"] = shared_noise

    def check(function: Callable[..., optax.Updates]) -> str:
        shards = _shard_map(function, (_WHOLE, _SPLIT), _SPLIT)
        return expect_refusal(lambda: jax.eval_shape(shards, params, batch), "it is accepted")

    return ClaimsReport({claim: check(function) for claim, function in functions.items()})


_COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum": lambda x: jax.lax.psum(x, "shards"),
    "pmean": lambda x: jax.lax.pmean(x, "shards"),
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, "shards"), axis=0),
    "ppermute": lambda x: jax.lax.ppermute(x, "shards", [(0, 1), (1, 0)]),
}


@contextmanager
def reports_from_child(names: Sequence[str], key: jax.Array) -> Iterator[Iterator[AuditReport]]:
    """Start a process that runs the audits one after another, and yield their reports in order.

    The process has `DEVICES` simulated CPU devices. It ends with the context.
    """
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, json.dumps([words, list(names)])],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": path},
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
