"""Time and memory of runs as batches, parameters, devices and datasets grow.

Every result is written as soon as it is there; a run that was interrupted goes on.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks.mnist import first_params, loss
from optax_lsdp import training

MICROBATCH = 256


def plan_of(size: int, batch: int, steps: int = 100) -> lsdp.PrivacyPlan:
    """Return a plan; its privacy does not matter here."""
    return lsdp.PrivacyPlan(
        dataset_size=size, expected_batch_size=batch, steps=steps, noise_multiplier=1.0, delta=1e-9
    )


def images(size: int) -> Any:
    """Return random images and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, 28, 28, 1)).astype(np.float32), np.zeros(size, np.int32)


def memory(field: str) -> int:
    """Return this process's memory in bytes: current (VmRSS) or peak (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def measured(plan: lsdp.PrivacyPlan, params: Any, loss_fn: Any, data: Any) -> dict[str, Any]:
    """Measure the time and peak memory of whole `fit` steps, including reading."""
    before, times = memory("VmRSS"), []
    mesh = None
    if jax.device_count() > 1:
        kinds = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=kinds)

    def look(report: training.StepReport) -> None:
        jax.block_until_ready(report.private_loss)
        times.append(time.perf_counter())
        if report.step == 1:  # everything is compiled now
            Path("/proc/self/clear_refs").write_text("5")  # reset VmHWM

    training.fit(
        plan,
        loss_fn,
        params,
        data,
        optimizer=optax.sgd(0.1),
        microbatch_size=MICROBATCH,
        mesh=mesh,
        callbacks=[look],
        progress=False,
    )
    return {
        "milliseconds": 1e3 * float(np.median(np.diff(times))),
        "peak_bytes": memory("VmHWM") - before,
    }


def batches(batch: int, rounds: int) -> dict[str, Any]:
    """Measure one batch size of the MNIST CNN at a fixed microbatch size."""
    return measured(plan_of(100_000, batch, rounds), first_params(0), loss, images(100_000))


def parameters(count: int, rounds: int) -> dict[str, Any]:
    """Measure a linear model with a given number of parameters on small batches."""
    width = count // 100
    data = np.ones((1000, width), np.float32)

    def linear(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ kernel).sum() / width

    return measured(plan_of(1000, 16, rounds), jnp.zeros((width, 100)), linear, data)


def devices(count: int, rounds: int) -> dict[str, Any]:
    """Measure a batch that is split over all devices of this host."""
    assert count == jax.device_count()
    return measured(plan_of(10_000, 1024, rounds), first_params(0), loss, images(10_000))


def apart(function: str, size: int, rounds: int) -> dict[str, Any]:
    """Measure in a new process."""
    count = size if function == "devices" else 1
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    script = (
        "import json; from benchmarks import scaling; "
        f"print(json.dumps(scaling.{function}({size}, {rounds})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def datasets(size: int, rounds: int) -> dict[str, Any]:
    """Measure how long sampling 256 examples from a dataset of a given size takes."""
    sampler = plan_of(size, 256).sampler(jax.random.key(0))
    sampler.batch(0)
    begin = time.perf_counter()
    for step in range(rounds):
        sampler.batch(step)
    return {"milliseconds": 1e3 * (time.perf_counter() - begin) / rounds}


def overhead(rounds: int) -> dict[str, Any]:
    """Compare steps of `fit`, with sampling and reading, with the compiled step alone."""
    plan, data = plan_of(60_000, 256, steps=rounds), images(60_000)
    gradient = plan.value_and_clipped_grad(loss)
    optimizer = plan.optimizer(optax.sgd(0.1), jax.random.key(0))
    chosen = plan.sampler(jax.random.key(0)).batch(0)
    batch = jax.tree.map(lambda x: jnp.asarray(x[chosen.indices]), data)
    mask = jnp.asarray(chosen.mask)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any) -> Any:
        params, inner = state
        private, total = gradient(params, batch, mask)
        updates, inner = optimizer.update(total, inner, params)
        return (optax.apply_updates(params, updates), inner), private.values.sum()

    def bare() -> float:
        params = first_params(0)
        state, _ = step((params, optimizer.init(params)))
        jax.block_until_ready(state)
        begin = time.perf_counter()
        for _ in range(rounds - 1):
            state, last = step(state)
        jax.block_until_ready((state, last))
        return time.perf_counter() - begin

    def whole() -> float:
        begins: list[float] = []

        def look(report: training.StepReport) -> None:
            if report.step == 1:
                jax.block_until_ready(report.private_loss)
                begins.append(time.perf_counter())

        done = training.fit(
            plan,
            loss,
            first_params(0),
            data,
            optimizer=optax.sgd(0.1),
            callbacks=[look],
            progress=False,
        )
        jax.block_until_ready(done.params)
        return time.perf_counter() - begins[0]

    times: dict[str, list[float]] = {"bare": [], "fit": []}
    for _ in range(5):
        for name, part in (("bare", bare), ("fit", whole)):
            times[name].append(1e3 * part() / (rounds - 1))
    return {name: float(np.median(values)) for name, values in times.items()}


def main() -> None:
    """Measure everything that has no record yet."""
    args = _timing.arguments(__doc__, "scaling.json")
    smoke, rounds = args.smoke, 3 if args.smoke else 6
    work: dict[str, dict[str, Callable[[], Any]]] = {
        "batches": {
            str(b): partial(apart, "batches", b, rounds)
            for b in ((256,) if smoke else (256, 1024, 4096, 16_384, 65_536))
        },
        "parameters": {
            str(p): partial(apart, "parameters", p, rounds)
            for p in ((10**4,) if smoke else (10**4, 10**5, 10**6, 10**7, 10**8))
        },
        "devices": {
            str(d): partial(apart, "devices", d, rounds) for d in ((2,) if smoke else (1, 2, 4, 8))
        },
        "datasets": {
            str(n): partial(datasets, n, 20)
            for n in ((10**4,) if smoke else (10**4, 10**5, 10**6, 10**7, 10**8))
        },
        "overhead": {"MNIST CNN": partial(overhead, 5 if smoke else 40)},
    }
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
