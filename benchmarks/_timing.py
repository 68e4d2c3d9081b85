"""Time compiled functions in interleaved rounds, and write records."""

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from benchmarks._results import RESULTS


def medians(functions: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Return each function's median milliseconds; every round calls all functions in turn.

    Every round has another order, so that none always follows the same neighbour.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():  # compile and warm up
        jax.block_until_ready(function())
    order, shuffler = list(functions.items()), random.Random(0)
    for _ in range(rounds):
        shuffler.shuffle(order)
        for name, function in order:
            start = time.perf_counter()
            jax.block_until_ready(function())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def circumstances() -> dict[str, Any]:
    """Return the device, date, versions and command of a measurement."""
    packages = ("jax", "jaxlib", "optax", "flax", "optax-lsdp")
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "date": date.today().isoformat(),
        "command": " ".join(["python -m", _module(), *_without_folders(sys.argv[1:])]),
    }


def _module() -> str:
    """Return the name of the running script."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else "benchmarks." + Path(sys.argv[0]).stem


def _without_folders(words: list[str]) -> list[str]:
    """Return a command line without local paths."""
    return ["PATH" if "/" in word else word for word in words]


def arguments(description: str, default: str) -> argparse.Namespace:
    """Parse the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--output", type=Path, default=RESULTS / default, help="a JSON file")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    return parser.parse_args()


def measure_missing(path: Path, work: Mapping[str, Mapping[str, Callable[[], Any]]]) -> None:
    """Run every task that has no record yet, and write each result at once."""
    record = load_record(path)
    is_whole = record.pop("is_whole", bool(record))  # older records lack the entry, and are whole
    for part, runs in work.items():
        known = record.setdefault(part, {})
        for name, run in tqdm(runs.items(), desc=f"{path.stem}, {part}"):
            if name not in known:
                known[name], is_whole = run(), False
                write(path, {**record, "is_whole": False})
    if not is_whole:
        write(path, {**record, "is_whole": True})


def load_record(path: Path) -> dict[str, Any]:
    """Return the record so far."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(path: Path, record: dict[str, Any]) -> None:
    """Write a record together with device, date and versions."""
    record = {**record, "circumstances": circumstances()}
    text = json.dumps(record, indent=1, ensure_ascii=False)
    draft = path.with_suffix(".draft")
    draft.write_text(text + "\n", encoding="utf-8")
    draft.replace(path)  # atomic: after a kill, the file is either old or new
