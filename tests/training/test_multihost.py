"""A run is the same on one device and on eight, in one process and in two."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

from optax_lsdp._keys import fold_in_text
from optax_lsdp.training._data import describe_microbatch, open_data
from optax_lsdp.training._multihost import Placement
from optax_lsdp.training._step import CompiledStep, State, make_step
from tests.smoothing.test_sharded import moved
from tests.training.problem import (
    SEED,
    TWENTY,
    assert_close,
    bits,
    crash,
    fit,
    make_params,
    make_plan,
    reference,
)
from tests.training.test_users import trained

pytestmark = pytest.mark.filterwarnings("ignore:The run in this folder was made with different")

ROOT = Path(__file__).parents[2]
KINDS = [AxisType.Auto, AxisType.Explicit]


def make_mesh(kind, devices=8):
    return jax.make_mesh((devices,), ("data",), axis_types=(kind,))


def sharded(mesh, params):
    """Split every leaf along its first axis if the mesh divides it."""

    def place(leaf):
        split = leaf.ndim and leaf.shape[0] % mesh.size == 0
        return jax.device_put(leaf, NamedSharding(mesh, jax.P("data") if split else jax.P()))

    return jax.tree.map(place, params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_eight_devices_train_what_one_trains(kind, layout):
    mesh = make_mesh(kind)
    params = sharded(mesh, make_params()) if layout == "sharded" else make_params()
    done, alone = fit(TWENTY, mesh=mesh, params=params), reference(TWENTY)
    assert_close(done.params, alone.params, atol=1e-5)  # sums in another order
    assert done.ledger == alone.ledger
    if layout == "sharded":
        assert done.params["kernel"].sharding.spec[0] == "data"


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_the_same_to_the_bit_on_any_mesh(kind):
    """Gradients are zero, so that parameters are noise alone."""
    plan = make_plan(steps=3)

    def zero(params, example):
        return 0 * params["kernel"].sum() * example["x"].sum()

    options = {"loss_fn": zero, "optimizer": optax.sgd(1.0)}
    alone = fit(plan, **options)
    mesh = make_mesh(kind)
    for params in (make_params(), sharded(mesh, make_params())):
        assert bits(fit(plan, mesh=mesh, params=params, **options).params) == bits(alone.params)


def test_microbatches_are_spread_over_devices():
    done = fit(TWENTY, mesh=make_mesh(AxisType.Auto), microbatch_size=16)
    assert_close(done.params, reference(TWENTY).params, atol=1e-5)
    with pytest.raises(ValueError, match=r"`microbatch_size` must be a multiple of .* devices, 8"):
        fit(mesh=make_mesh(AxisType.Auto), microbatch_size=12)


def test_a_run_restarts_on_another_mesh_with_new_noise(tmp_path):
    crash(tmp_path, step=9, plan=TWENTY, mesh=make_mesh(AxisType.Auto))
    done = fit(TWENTY, folder=tmp_path, mesh=make_mesh(AxisType.Auto, devices=4))
    assert done.stopped == "budget" and done.ledger.steps == TWENTY.steps


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_processes_train_what_one_trains(tmp_path):
    port = free_port()
    crash(tmp_path / "single", step=9, plan=TWENTY)  # the last checkpoint has seven steps
    (tmp_path / "before.json").write_text(json.dumps({"steps": 7, "counted": 9}))
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "compiled")
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    runs = [
        subprocess.Popen(
            [sys.executable, "tests/training/processes.py", str(port), str(rank), str(tmp_path)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for run in runs:
        _, errors = run.communicate(timeout=240)
        assert run.returncode == 0, errors[-3000:]
    alone = fit(TWENTY, mesh=make_mesh(AxisType.Auto))
    with np.load(tmp_path / "model.npz") as found:
        assert_close(dict(found), dict(alone.params), atol=1e-5)
    reads = [set(json.loads((tmp_path / f"read-{rank}.json").read_text())) for rank in (0, 1)]
    run_key = fold_in_text(jax.random.key(SEED), "first")
    sampler = TWENTY.sampler(run_key, multiple_of=-(-TWENTY.room // 8) * 8)
    halves = [set(), set()]
    for step in range(TWENTY.steps):
        batch = sampler.batch(step)
        for rank, part in enumerate(np.split(np.arange(sampler.size), 2)):
            halves[rank] |= set(batch.indices[part][batch.mask[part]].tolist())
    assert reads == halves  # each process reads only its own examples
    # Both processes share a fresh key, so they have drawn the same noise.
    with np.load(tmp_path / "fresh-key-0.npz") as one, np.load(tmp_path / "fresh-key-1.npz") as two:
        assert all(one[name].tobytes() == two[name].tobytes() for name in one)
    with np.load(tmp_path / "users.npz") as found:
        assert_close(dict(found), dict(trained().params), atol=1e-5)
    errors = [(tmp_path / f"error-{rank}.txt").read_text() for rank in (0, 1)]
    assert any("must return example 12" in error for error in errors)
    # One process with another number of devices reads the checkpoint of both.
    again = fit(TWENTY, folder=tmp_path / "run", mesh=make_mesh(AxisType.Auto, devices=2))
    with np.load(tmp_path / "model.npz") as found:
        for name, leaf in again.params.items():
            np.testing.assert_array_equal(found[name], jnp.asarray(leaf))


def convolution(kernel, image):
    """Return a loss whose patches do not fit into a cache."""
    dims = ("NHWC", "HWIO", "NHWC")
    images = image[None]
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=dims
    ).sum()


def test_data_parallel_steps_reduce_gradients_and_move_nothing_else():
    plan = make_plan(steps=3)
    mesh = make_mesh(AxisType.Auto)
    data = np.ones((400, 32, 32, 8), np.float32)
    placement, key = Placement(mesh), jax.random.key(0)
    with jax.set_mesh(mesh):
        optimizer, params = plan.optimizer(optax.sgd(0.1), key), jnp.ones((5, 5, 8, 16))
        state = State(params, optimizer.init(params), (), key)
        state = jax.tree.map(placement.keep_or_replicate, state)
        step = CompiledStep(
            make_step(plan, convolution, optimizer, None),
            state,
            describe_microbatch(open_data(data), 80, state.key, placement),
            count=1,
            compile=lambda function, *arguments: function.lower(*arguments).compile(),
            replicated=placement.replicated,
        )
    text = step.compiled.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert sum(moved(text)) <= 5 * 5 * 8 * 16 + 16
