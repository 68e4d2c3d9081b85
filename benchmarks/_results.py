"""Read the records, and compute the ratios that tables and figures show."""

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """Return one record."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


ACCOUNTANTS = ("optax_lsdp", "PLD, mesh 1e-4", "PLD, mesh 1e-3", "RDP")
PEERS = {
    "vmap": ("vmap",),
    "JAX Privacy": ("JAX Privacy", "JAX Privacy, microbatches"),
    "Optax": ("Optax",),
}


def ratios(way: str, field: str, base: str = "non-private") -> dict[str, float]:
    """Return the ratio of two engines for each model of the zoo."""
    models = load("clipping")["models"]
    return {
        name: row["ways"][way][field] / row["ways"][base][field]
        for name, row in models.items()
        if field in row["ways"][way]
    }


def times(way: str) -> dict[str, float]:
    """Return the cost of a peer's private gradient, relative to an ordinary one."""
    found = [ratios(name, "milliseconds") for name in PEERS.get(way, (way,))]
    names = {name: None for part in found for name in part}
    return {name: min(part.get(name, math.inf) for part in found) for name in names}


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


class SmoothedVector(NamedTuple):
    """Milliseconds of each method for one size and σ, and memory in copies of the vector.

    `times` holds the noise as well.
    """

    size: int
    smoothing: float
    kind: str
    times: dict[str, float]
    copies: dict[str, float]

    @property
    def smoothers(self) -> dict[str, float]:
        """Return the times of the methods, without noise."""
        return {name: time for name, time in self.times.items() if name != "noise"}


def smoothed_vectors() -> list[SmoothedVector]:
    """Return all rows of the smoothing benchmark."""
    rows = []
    for label, ways in load("smoothing")["methods"].items():
        size, smoothing, kind = label.split(" ", 2)
        done = {name: way for name, way in ways.items() if "milliseconds" in way}
        times = {name: way["milliseconds"] for name, way in done.items()}
        copies = {name: way["temp_bytes"] / (4 * int(size)) for name, way in done.items()}
        rows.append(SmoothedVector(int(size), float(smoothing), kind, times, copies))
    return rows
