"""Measure memory and throughput of a run of 100,000 steps, and kill a second one at random.

Each run has its own process. The first is not interrupted. The second is killed at random moments
and started again in the same folder, and must end with the same bits.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks._results import RESULTS
from benchmarks.scaling import memory
from optax_lsdp import training

PARTS = 100  # of a run; time and memory are written down after each
PROBES = 10  # measurements of the machine's speed in each part, by a small gradient
KILLS = 10


def child(folder: Path, steps: int) -> None:
    """Train a small model in a folder, and write down time and memory."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(5000, 32)).astype(np.float32), rng.integers(0, 4, 5000)
    plan = lsdp.PrivacyPlan(
        dataset_size=5000, expected_batch_size=32, steps=steps, noise_multiplier=8.0, delta=1e-6
    )

    def loss(params: optax.Params, example: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = example
        logits = jnp.tanh(x @ params["first"]) @ params["second"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y)

    params = {"first": jnp.ones((32, 16)) / 32, "second": jnp.zeros((16, 4))}
    notes = (folder / "notes.jsonl").open("a")
    mean = jax.jit(jax.grad(lambda p, batch: jax.vmap(loss, (None, 0))(p, batch).mean()))
    probed = 0.0

    def note(report: training.StepReport) -> None:
        nonlocal probed
        if report.step % max(1, steps // PARTS // PROBES) == 0:
            began = time.monotonic()
            for _ in range(20):
                jax.block_until_ready(mean(params, jax.tree.map(lambda x: x[:64], data)))
            probed += time.monotonic() - began
        if report.step % (steps // PARTS) == 0:
            row = {"step": report.step, "time": time.monotonic(), "probed": probed}
            notes.write(json.dumps({**row, "bytes": memory("VmRSS")}) + "\n")
            notes.flush()

    done = training.fit(
        plan,
        loss,
        params,
        data,
        optimizer=optax.adam(1e-3),
        smoothing=lsdp.laplacian_smooth(0.5),
        folder=folder / "run",
        save_every=max(1, steps // PARTS),
        callbacks=[note],
        progress=False,
        key=jax.random.key(0),
    )
    leaves = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(done.params))
    result = {
        "stopped": done.stopped,
        "counted_steps": done.ledger.steps,
        "epsilon": plan.spent(done.ledger),
        "planned_epsilon": plan.epsilon,
        "parameters": hashlib.sha256(leaves).hexdigest(),
    }
    (folder / "result.json").write_text(json.dumps(result))


def start(folder: Path, steps: int) -> subprocess.Popen[bytes]:
    """Start a run in a new process, or resume it."""
    words = ["--child", str(folder), "--steps", str(steps)]
    return subprocess.Popen([sys.executable, "-m", "benchmarks.soak", *words])


def result(folder: Path) -> dict[str, Any]:
    """Return the result that a run has written."""
    return json.loads((folder / "result.json").read_text())


def uninterrupted(folder: Path, steps: int) -> dict[str, Any]:
    """Return the result of a run, and compare its last tenth with its second tenth.

    Throughput is measured relative to a small gradient, which the run computes now and then.
    """
    if start(folder, steps).wait():
        raise SystemExit("The uninterrupted run has failed.")
    rows = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    names = ("time", "probed", "bytes")
    times, probed, sizes = (np.array([row[name] for row in rows]) for name in names)
    tenth = PARTS // 10
    first, last = slice(tenth, 2 * tenth), slice(-tenth, None)
    reference = np.diff(probed, prepend=np.nan)
    seconds = np.diff(times, prepend=np.nan) - reference
    slowness = seconds / reference  # independent of how busy the machine is
    return {
        **result(folder),
        "seconds": float(times[-1] - times[0]),
        "throughput_ratio": float(np.median(slowness[first]) / np.median(slowness[last])),
        "memory_ratio": float(sizes[last].mean() / sizes[first].mean()),
        "megabytes": [round(float(size) / 1e6, 1) for size in sizes],
        "milliseconds_a_step": [round(1e3 * s / (steps / PARTS), 4) for s in seconds[1:].tolist()],
    }


def killed(folder: Path, steps: int, seconds: float) -> dict[str, Any]:
    """Return the result of a run that is killed at random moments."""
    shuffler, moments = random.Random(0), []
    for _ in tqdm(range(KILLS), desc="kills"):
        run = start(folder, steps)
        moments.append(
            round(shuffler.uniform(0, 2 * seconds / KILLS) + 5, 2)
        )  # five seconds to compile
        try:
            if run.wait(moments[-1]):
                raise SystemExit("The run has failed before it was killed.")
            break
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait()
    if not (folder / "result.json").exists() and start(folder, steps).wait():
        raise SystemExit("The killed run has failed after its last start.")
    return {**result(folder), "killed_after_seconds": moments}


def main() -> None:
    """Run both, write the record, and fail if it is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="steps of each run")
    parser.add_argument("--output", type=Path, default=RESULTS / "soak.json", help="a JSON file")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args.child, args.steps)
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place) / name for name in ("alone", "killed")]
        for folder in folders:
            folder.mkdir()
        alone = uninterrupted(folders[0], args.steps)
        _timing.write(args.output, {"steps": args.steps, "alone": alone, "is_whole": False})
        hurt = killed(folders[1], args.steps, alone["seconds"])
    record = {"steps": args.steps, "alone": alone, "killed": hurt, "is_whole": True}
    _timing.write(args.output, record)
    same = {name: hurt[name] == alone[name] for name in ("parameters", "counted_steps", "epsilon")}
    exact = alone["counted_steps"] == args.steps and alone["epsilon"] <= alone["planned_epsilon"]
    print(
        f"throughput at the end / at the start: {alone['throughput_ratio']:.3f}\n"
        f"memory at the end / at the start: {alone['memory_ratio']:.3f}\n"
        f"the ledger is exact: {exact}; the killed run is the same: {same}"
    )
    if not (exact and all(same.values())):
        raise SystemExit("The ledger is inexact, or the killed run differs.")
    if not (alone["throughput_ratio"] > 0.95 and alone["memory_ratio"] < 1.05):
        raise SystemExit("The run has become more than 5 % slower or larger.")


if __name__ == "__main__":
    main()
