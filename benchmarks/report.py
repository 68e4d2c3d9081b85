"""Results go in, the tables of README.md come out: `python -m benchmarks.report`.

Text between `<!-- NAME -->` and `<!-- /NAME -->` in README.md belongs to the table NAME.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """Read one results file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def claim() -> str:
    """Return the first sentence's number."""
    demo = load("demo")
    best = max(demo["results"], key=lambda row: row["validation"])
    return (
        f"{best['model'].capitalize()} on {demo['images']:,} handwritten digits reaches "
        f"{best['mean']:.1f} % test accuracy under (ε = {demo['epsilon']:g}, "
        f"δ = {demo['delta']:g})-differential privacy\n(scikit-learn's digits, "
        f"{demo['steps']} steps of {best['optimizer']} with σ = {best['smoothing']:g}, chosen on "
        f"validation images; mean of {demo['seeds']} seeds)."
    )


def demo() -> str:
    """Return the demo's accuracies."""
    record = load("demo")
    rows = [
        [
            row["model"],
            row["optimizer"],
            f"{row['smoothing']:g}",
            f"{row['step_size']:g}",
            f"{row['mean']:.1f} ± {row['deviation']:.1f} %",
        ]
        for row in record["results"]
    ]
    return markdown(["model", "optimizer", "σ", "step size", "test accuracy"], rows)


def steps() -> str:
    """Return the cost of a private step."""
    record = load("steps")
    where = record["circumstances"]
    rows = [
        [
            row["model"],
            str(row["batch"]),
            *(f"{row['milliseconds'][way]:.2f} ms" for way in ("SGD", "DP-SGD", "DP-LSSGD")),
            f"{row['milliseconds']['DP-SGD'] / row['milliseconds']['SGD']:.1f}",
            f"{row['milliseconds']['DP-LSSGD'] / row['milliseconds']['DP-SGD']:.2f}",
        ]
        for row in record["rows"]
    ]
    head = ["model", "batch", "SGD", "DP-SGD", "DP-LSSGD", "DP-SGD / SGD", "DP-LSSGD / DP-SGD"]
    versions = where["versions"]
    return (
        f"{markdown(head, rows)}\n\nMedians of {record['rounds']} interleaved rounds on "
        f"{where['device']}, jax {versions['jax']}, optax {versions['optax']}, {where['date']}."
    )


TABLES: dict[str, Callable[[], str]] = {"claim": claim, "demo": demo, "steps": steps}


def fill(text: str) -> str:
    """Return the text with every table filled in."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, t=table: f"{match[1]}{t()}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"README.md must hold the table {name!r} once, got {count} times.")
    return text


def main() -> None:
    """Fill README.md."""
    path = ROOT / "README.md"
    path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
