"""The accountant against dp-accounting: values and times over a grid of settings, and cold starts.

Results are written after every setting, and a run that was interrupted goes on where it stopped.
"""

import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import dp_accounting as dp
from dp_accounting import pld, rdp
from tqdm import tqdm

from benchmarks import _timing
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier

SETTINGS = {  # noise multiplier, sampling rate, steps, δ
    "MNIST, 60 epochs": (1.1, 256 / 60_000, 14_100, 1e-5),
    "CIFAR-10, 200 epochs": (3.0, 4096 / 50_000, 2_450, 1e-5),
    "ImageNet, 90 epochs": (1.0, 1024 / 1_281_167, 112_500, 1e-7),
    "little noise": (0.5, 0.01, 1_000, 1e-5),
    "DP-LSSGD's ε = 0.1, tight": (10.08, 128 / 60_000, 23_450, 1e-5),
    "a million steps": (1.0, 1e-3, 10**6, 1e-6),
    "DP-LSSGD's ε = 0.1, its noise": (99.36, 128 / 60_000, 23_450, 1e-5),
    "full batches": (20.0, 1.0, 1_000, 1e-5),
    "δ = 1e-12": (1.0, 0.01, 10_000, 1e-12),
    "a million steps, δ = 1e-13": (1.0, 1e-3, 10**6, 1e-13),
}
REFERENCE = 8  # the first settings are the reference list for comparing times
MESHES = {"PLD, mesh 1e-4": 1e-4, "PLD, mesh 1e-3": 1e-3}
COLD = {
    "optax_lsdp": "from optax_lsdp.accounting import SampledGaussian as S\n"
    "S(1.1, 256 / 60000, 14100).epsilon(1e-5)",
    "dp-accounting": "import dp_accounting as dp\nfrom dp_accounting import pld\n"
    "e = dp.PoissonSampledDpEvent(256 / 60000, dp.GaussianDpEvent(1.1))\n"
    "pld.PLDAccountant().compose(dp.SelfComposedDpEvent(e, 14100)).get_epsilon(1e-5)",
}
ABSENT = "import sys\nsys.modules.update(jax=None, jaxlib=None, optax=None, dp_accounting=None)\n"


def accountants(
    noise: float, rate: float, steps: int, delta: float
) -> dict[str, Callable[[], float]]:
    """Return a function for every accountant that computes ε."""
    run = SampledGaussian(noise, rate, steps)
    event = run.to_dp_event()
    ways: dict[str, Callable[[], float]] = {"optax_lsdp": lambda: run.epsilon(delta)}
    for name, mesh in MESHES.items():
        ways[name] = lambda mesh=mesh: (
            pld.PLDAccountant(value_discretization_interval=mesh).compose(event).get_epsilon(delta)
        )
    ways["RDP"] = lambda: rdp.RdpAccountant().compose(event).get_epsilon(delta)
    return ways


def calibrations(
    noise: float, rate: float, steps: int, delta: float, epsilon: float
) -> dict[str, Callable[[], float]]:
    """Return both functions that calibrate the noise for ε, to 1e-4."""

    def theirs() -> float:
        return dp.calibrate_dp_mechanism(
            pld.PLDAccountant,
            lambda z: dp.SelfComposedDpEvent(
                dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(z)), steps
            ),
            epsilon,
            delta,
            dp.LowerEndpointAndGuess(0, noise),
            tol=1e-4 * noise,
        )

    return {
        "optax_lsdp": lambda: calibrate_noise_multiplier(
            epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps
        ),
        "PLD, mesh 1e-4": theirs,
    }


def timed(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, float]]:
    """Return each function's value and median milliseconds, called in turn."""
    values: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, ask in ways.items():
            start = time.perf_counter()
            values[name] = float(ask())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {"value": values[name], "milliseconds": statistics.median(times[name])}
        for name in ways
    }


def cold_start(rounds: int) -> dict[str, float]:
    """Return the median seconds of a new process that imports and computes one ε."""
    seconds: dict[str, list[float]] = {name: [] for name in COLD}
    for _ in range(rounds):
        for name, script in COLD.items():
            text = ABSENT + script if name == "optax_lsdp" else script
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", text], check=True)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def speedups(rows: dict[str, Any], kind: str) -> float:
    """Return the geometric mean of dp-accounting's time over ours, on the reference list."""
    ratios = [
        row[kind]["PLD, mesh 1e-4"]["milliseconds"] / row[kind]["optax_lsdp"]["milliseconds"]
        for row in list(rows.values())[:REFERENCE]
        if kind in row
    ]
    return math.exp(statistics.fmean(map(math.log, ratios)))


def main() -> None:
    """Measure everything that has no record yet."""
    options = _timing.arguments(__doc__ or "", "accounting.json")
    settings = dict(list(SETTINGS.items())[:1] if options.smoke else SETTINGS)
    record: dict[str, Any] = {"rows": {}}
    if options.output.exists():
        before = json.loads(options.output.read_text(encoding="utf-8"))
        record = record if "times_faster" in before else before
    rounds = 1 if options.smoke else 5
    for name, setting in tqdm(settings.items(), unit="setting"):
        if name in record["rows"]:
            continue
        run, delta = SampledGaussian(*setting[:3]), setting[3]
        low, high = run.epsilon_bounds(delta)
        row: dict[str, Any] = {
            "setting": dict(
                zip(("noise_multiplier", "sampling_rate", "steps", "delta"), setting, strict=True)
            ),
            "bounds": [low, high],
            "epsilon": timed(accountants(*setting), rounds),
        }
        if setting[1] < 1:
            row["calibration"] = timed(calibrations(*setting, epsilon=high), min(rounds, 2))
        record["rows"][name] = row
        _timing.write(options.output, record)
    record["cold_start_seconds"] = cold_start(rounds)
    record["times_faster"] = {
        kind: speedups(record["rows"], kind) for kind in ("epsilon", "calibration")
    }
    _timing.write(options.output, record)


if __name__ == "__main__":
    main()
