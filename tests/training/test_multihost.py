"""The same run on one device and on eight, in one process and in two."""

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

import optax_lsdp as lsdp
from optax_lsdp.training import _run
from optax_lsdp.training._data import Examples
from tests.smoothing.test_sharded import moved
from tests.training.problem import PLAN, bits, fit, make_params, make_plan
from tests.training.test_faults import fall

pytestmark = pytest.mark.filterwarnings("ignore:This folder's run was made with other")

ROOT = Path(__file__).parents[2]
KINDS = [AxisType.Auto, AxisType.Explicit]


def make_mesh(kind, devices=8):
    return jax.make_mesh((devices,), ("data",), axis_types=(kind,))


def sharded(mesh, params):
    """Split every leaf along its first axis where that can be: fully sharded."""

    def place(leaf):
        split = leaf.ndim and leaf.shape[0] % mesh.size == 0
        return jax.device_put(leaf, NamedSharding(mesh, jax.P("data") if split else jax.P()))

    return jax.tree.map(place, params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_eight_devices_train_what_one_trains(kind, layout):
    mesh = make_mesh(kind)
    params = sharded(mesh, make_params()) if layout == "sharded" else make_params()
    done, alone = fit(mesh=mesh, params=params), fit()
    for got, want in zip(*map(jax.tree.leaves, (done.params, alone.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)  # sums in another order
    assert done.ledger == alone.ledger
    if layout == "sharded":
        assert done.params["kernel"].sharding.spec[0] == "data"


@pytest.mark.parametrize("kind", KINDS)
def test_noise_is_the_same_to_the_bit_on_any_mesh(kind):
    """Gradients are zero: all that happens is noise."""
    plan = make_plan(steps=3)

    def nothing(params, example):
        return 0 * params["kernel"].sum() * example["x"].sum()

    options = {"loss_fn": nothing, "optimizer": optax.sgd(1.0)}
    alone = fit(plan, **options)
    mesh = make_mesh(kind)
    for params in (make_params(), sharded(mesh, make_params())):
        assert bits(fit(plan, mesh=mesh, params=params, **options).params) == bits(alone.params)


def test_microbatches_are_spread_over_devices():
    done, alone = fit(mesh=make_mesh(AxisType.Auto), microbatch_size=16), fit()
    for got, want in zip(*map(jax.tree.leaves, (done.params, alone.params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    with pytest.raises(ValueError, match="`microbatch_size` must be a multiple of the 8 devices"):
        fit(mesh=make_mesh(AxisType.Auto), microbatch_size=12)


def test_a_run_goes_on_on_another_mesh_with_other_noise(tmp_path):
    from tests.training.test_faults import fall

    fall(tmp_path, step=20, mesh=make_mesh(AxisType.Auto))
    done = fit(folder=tmp_path, mesh=make_mesh(AxisType.Auto, devices=4))
    assert done.stopped == "budget" and done.ledger.steps == PLAN.steps


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_two_processes_train_what_one_trains(tmp_path):
    port = free_port()
    fall(tmp_path / "single", step=9)  # of which seven are saved
    (tmp_path / "before.json").write_text(json.dumps({"steps": 7, "counted": 9}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
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
    alone = fit(mesh=make_mesh(AxisType.Auto))
    with np.load(tmp_path / "model.npz") as found:
        for name, leaf in alone.params.items():
            np.testing.assert_allclose(found[name], leaf, atol=1e-5)
    reads = [set(json.loads((tmp_path / f"read-{rank}.json").read_text())) for rank in (0, 1)]
    run_key = lsdp.training._run.fold_in_text(jax.random.key(5), "first")
    sampler = PLAN.sampler(run_key, multiple_of=-(-PLAN.room // 8) * 8)
    halves = [set(), set()]
    for step in range(PLAN.steps):
        batch = sampler.batch(step)
        for rank, part in enumerate(np.split(np.arange(sampler.size), 2)):
            halves[rank] |= set(batch.indices[part][batch.mask[part]].tolist())
    assert reads == halves  # each process reads its own examples, and no others
    # A fresh key is agreed upon: both have drawn the same noise.
    with np.load(tmp_path / "secret-0.npz") as one, np.load(tmp_path / "secret-1.npz") as other:
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)
    errors = [(tmp_path / f"error-{rank}.txt").read_text() for rank in (0, 1)]
    assert any("example 123" in error for error in errors)
    # The checkpoint of both is read by one process with another number of devices.
    again = fit(folder=tmp_path / "run", mesh=make_mesh(AxisType.Auto, devices=2))
    with np.load(tmp_path / "model.npz") as found:
        for name, leaf in again.params.items():
            np.testing.assert_array_equal(found[name], jnp.asarray(leaf))


def convolution(kernel, image):
    """Return a loss whose patches are larger than a cache."""
    dims = ("NHWC", "HWIO", "NHWC")
    images = image[None]
    return jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=dims
    ).sum()


def test_data_parallel_steps_reduce_gradients_and_move_nothing_else():
    plan = make_plan(steps=3)
    mesh = make_mesh(AxisType.Auto)
    data = np.ones((400, 32, 32, 8), np.float32)
    run = _run.Run(plan, Examples(data), optax.sgd(0.1), None, None, None, mesh)
    with jax.set_mesh(mesh):
        run.start(convolution, jnp.ones((5, 5, 8, 16)), jax.random.key(0), None)
    run.close()
    text = run.take_step.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    assert sum(moved(text)) <= 5 * 5 * 8 * 16 + 16
