"""The record: results files and the ratios that tables and figures show."""

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """Read one results file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


ACCOUNTANTS = ("optax_lsdp", "PLD, mesh 1e-4", "PLD, mesh 1e-3", "RDP")
PEERS = {
    "vmap": ("vmap",),
    "JAX Privacy": ("JAX Privacy", "JAX Privacy, microbatches"),
    "Optax": ("Optax",),
}


def ratios(way: str, field: str, base: str = "non-private") -> dict[str, float]:
    """Return how much each model of the zoo takes by a way, compared with another."""
    models = load("clipping")["models"]
    return {
        name: row["ways"][way][field] / row["ways"][base][field]
        for name, row in models.items()
        if field in row["ways"][way]
    }


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))
