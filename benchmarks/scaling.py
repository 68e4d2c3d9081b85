"""How runs grow: batches, parameters, devices and datasets, each against time and memory.

Every result is written as soon as it is there; a run that was interrupted goes on.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks.mnist import first_params, loss
from optax_lsdp.training._data import Examples
from optax_lsdp.training._run import Run

MICROBATCH = 256


def plan_of(size: int, batch: int, steps: int = 100) -> lsdp.PrivacyPlan:
    """Return a plan whose privacy does not matter here."""
    return lsdp.PrivacyPlan(
        dataset_size=size, expected_batch_size=batch, steps=steps, noise_multiplier=1.0, delta=1e-9
    )


def images(size: int) -> Any:
    """Return random images and labels."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(size, 28, 28, 1)).astype(np.float32), np.zeros(size, np.int32)


def start(plan: lsdp.PrivacyPlan, params: Any, loss_fn: Any, data: Any, mesh: Any = None) -> Run:
    """Return a run that is ready to take steps."""
    run = Run(plan, Examples(data), optax.sgd(0.1), None, None, MICROBATCH, mesh)
    run.start(loss_fn, params, jax.random.key(0), None)
    return run


def measured(run: Run, rounds: int) -> dict[str, Any]:
    """Time whole steps, reading included, and tell the memory of the compiled program."""

    def step() -> Any:
        batch = run.batches.read(run.step)
        run.step += 1
        return run._take(batch.chunks)

    milliseconds = _timing.medians({"step": step}, rounds)["step"]
    memory = run.take_step.memory_analysis()
    run.close()
    return {
        "milliseconds": milliseconds,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }


def batches(batch: int, rounds: int) -> dict[str, Any]:
    """Measure a logical batch of the MNIST CNN at a fixed microbatch."""
    return measured(start(plan_of(100_000, batch), first_params(0), loss, images(100_000)), rounds)


def parameters(count: int, rounds: int) -> dict[str, Any]:
    """Measure a linear model of so many parameters on small batches."""
    width = count // 100
    data = np.ones((1000, width), np.float32)

    def linear(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ kernel).sum() / width

    return measured(start(plan_of(1000, 16), jnp.zeros((width, 100)), linear, data), rounds)


def devices(count: int, rounds: int) -> dict[str, Any]:
    """Measure a batch that is spread over so many devices of this host, in another process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    script = (
        "import json, jax; from benchmarks import scaling; "
        f"mesh = jax.make_mesh(({count},), ('data',), "
        "axis_types=(jax.sharding.AxisType.Auto,)); jax.set_mesh(mesh); "
        "run = scaling.start(scaling.plan_of(10_000, 1024), scaling.first_params(0), scaling.loss, "
        f"scaling.images(10_000), mesh); print(json.dumps(scaling.measured(run, {rounds})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XLA_FLAGS": flags},
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def datasets(size: int, rounds: int) -> dict[str, Any]:
    """Measure how long the sampler takes to choose 256 examples out of so many."""
    sampler = plan_of(size, 256).sampler(jax.random.key(0))
    sampler.batch(0)
    begin = time.perf_counter()
    for step in range(rounds):
        sampler.batch(step)
    return {"milliseconds": 1e3 * (time.perf_counter() - begin) / rounds}


def overhead(rounds: int) -> dict[str, Any]:
    """Compare steps of `fit`, which reads while it computes, with the bare compiled step."""
    plan, data = plan_of(60_000, 256, steps=rounds), images(60_000)
    run = Run(plan, Examples(data), optax.sgd(0.1), None, None, None, None)
    run.start(loss, first_params(0), jax.random.key(0), None)
    chunks = run.batches.read(0).chunks
    times: dict[str, list[float]] = {"bare": [], "fit": []}

    def bare() -> None:
        for _ in range(rounds):
            jax.block_until_ready(run._take(chunks))

    def whole() -> None:
        run.step, run.ledger = 0, lsdp.accounting.Ledger()
        run.loop(10**9, (), False, threading.Event())
        jax.block_until_ready(run.state.params)

    for _ in range(5):
        for name, part in (("bare", bare), ("fit", whole)):
            begin = time.perf_counter()
            part()
            times[name].append(1e3 * (time.perf_counter() - begin) / rounds)
    run.close()
    return {name: float(np.median(values)) for name, values in times.items()}


def main() -> None:
    """Measure what is not in the record yet."""
    args = _timing.arguments(__doc__, "scaling.json")
    smoke, rounds = args.smoke, 2 if args.smoke else 5
    work: dict[str, dict[str, Callable[[], Any]]] = {
        "batches": {
            str(b): partial(batches, b, rounds)
            for b in ((256,) if smoke else (256, 1024, 4096, 16_384, 65_536))
        },
        "parameters": {
            str(p): partial(parameters, p, rounds)
            for p in ((10**4,) if smoke else (10**4, 10**5, 10**6, 10**7, 10**8))
        },
        "devices": {str(d): partial(devices, d, rounds) for d in ((2,) if smoke else (1, 2, 4, 8))},
        "datasets": {
            str(n): partial(datasets, n, 20)
            for n in ((10**4,) if smoke else (10**4, 10**5, 10**6, 10**7, 10**8))
        },
        "overhead": {"MNIST CNN": partial(overhead, 5 if smoke else 40)},
    }
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
