"""Results go in, the tables of README.md come out: `python -m benchmarks.report`.

Text between `<!-- NAME -->` and `<!-- /NAME -->` in README.md belongs to the table NAME.
"""

import json
import math
import re
import statistics
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


WAYS = ("optax_lsdp", "PLD, mesh 1e-4", "PLD, mesh 1e-3", "RDP")  # of accounting


def accounting() -> str:
    """Return ε by several accountants, and what they take."""
    record = load("accounting")
    rows = []
    for name, row in record["rows"].items():
        low, high = row["bounds"]
        answers = [row["epsilon"][way] for way in WAYS]
        shown = [f"{answer['value']:.5g}" for answer in answers]
        low_by = [f"{answer['value']:.5g}" for answer in answers if answer["value"] < low]
        rows.append(
            [
                name,
                f"{low:.5g} to {high:.5g}",
                *(f"**{text}**" if text in low_by else text for text in shown),
                *(f"{answers[i]['milliseconds']:.0f} ms" for i in (0, 1)),
            ]
        )
    head = ["setting", "certified", *WAYS, "time", "time, PLD 1e-4"]
    cold, faster = record["cold_start_seconds"], record["times_faster"]
    return (
        f"{markdown(head, rows)}\n\nBold is too low: less than the certified lower bound. Over the "
        f"first eight settings ε takes 1/{faster['epsilon']:.0f} of the time\nof dp-accounting's "
        f"PLD, calibration 1/{faster['calibration']:.0f} (geometric means, one interleaved run), "
        f"and a new process answers its\nfirst question after {cold['optax_lsdp']:.2f} s, against "
        f"{cold['dp-accounting']:.2f} s."
    )


def draw_accounting() -> None:
    """Draw by how much each accountant's ε exceeds the certified lower bound."""
    from matplotlib.figure import Figure

    rows = load("accounting")["rows"]
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    looks = {"optax_lsdp": ("o", "#c1121f"), "PLD, mesh 1e-4": ("s", "#2a6f97")}
    looks |= {"PLD, mesh 1e-3": ("D", "#8ecae6"), "RDP": ("^", "#9a8c98")}
    for offset, way in zip((-0.24, -0.08, 0.08, 0.24), WAYS, strict=True):
        marker, color = looks[way]
        excess = [row["epsilon"][way]["value"] / row["bounds"][0] - 1 for row in rows.values()]
        places = [place + offset for place in range(len(rows))]
        axes.plot(excess, places, marker, color=color, label=way, markersize=5)
    axes.axvspan(-0.02, 0, color="#c1121f", alpha=0.08, lw=0)
    axes.set_xscale("symlog", linthresh=1e-4, linscale=0.5)
    axes.set_xlim(-0.02, 12)
    ticks = {-1e-2: "−1 %", -1e-3: "−0.1 %", 0: "0", 1e-4: "0.01 %", 1e-3: "0.1 %"}
    ticks |= {1e-2: "1 %", 0.1: "10 %", 1: "100 %", 10: "1000 %"}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.4, -0.9)
    axes.text(-1.4e-3, -0.6, "too low", ha="center", fontsize=9, color="#c1121f")
    axes.set_xlabel("ε that is reported, above the certified lower bound")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=len(WAYS))
    figure.savefig(RESULTS / "accounting.png", dpi=150)


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


def clipping() -> str:
    """Return what clipping costs on the zoo, by every engine and library."""
    record = load("clipping")
    time, memory = ratios("bookkeeping", "milliseconds"), ratios("bookkeeping", "temp_megabytes")
    build = ratios("bookkeeping", "compile_seconds", "vmap")
    peers = {way: ratios(way, "milliseconds") for ways in PEERS.values() for way in ways}
    rows = []
    for name, row in record["models"].items():
        best = [min(peers[way].get(name, math.inf) for way in ways) for ways in PEERS.values()]
        rows.append(
            [
                name,
                str(row["batch"]),
                f"{row['ways']['non-private']['milliseconds']:.3g} ms",
                f"**{time[name]:.2f}**",
                *("fails" if math.isinf(ratio) else f"{ratio:.3g}" for ratio in best),
                f"{memory[name]:.2f}",
                f"{build[name]:.2f}",
            ]
        )
    head = ["model", "batch", "non-private", "bookkeeping", *PEERS, "memory", "compile / vmap"]
    where = record["circumstances"]
    return (
        f"{markdown(head, rows)}\n\nTimes as multiples of the non-private gradient's, medians of "
        f"interleaved rounds on {where['device']},\njax {where['versions']['jax']}; JAX Privacy in "
        "the better of two settings; memory is XLA's temporary buffers, as a multiple too.\n"
        f"Bookkeeping: geometric mean **{geometric_mean(time.values()):.2f}**, worst "
        f"{max(time.values()):.2f}."
    )


def whole_steps() -> str:
    """Return the time of whole steps, beside PyTorch and Opacus."""
    steps = load("clipping")["steps"]
    ways = ["JAX", "optax_lsdp", "PyTorch", "Opacus", "Opacus, ghost"]
    rows = [[name, *(f"{row[way]:,.0f} ms" for way in ways)] for name, row in steps.items()]
    head = ["whole step", "JAX, not private", "optax_lsdp", "PyTorch, not private", *ways[3:]]
    return markdown(head, rows)


def microbatches() -> str:
    """Return time and memory by microbatches."""
    record = load("clipping")["microbatches"]
    base = record["ways"]["non-private"]
    rows = [
        [
            way,
            f"{row['milliseconds'] / base['milliseconds']:.2f}",
            f"{row['temp_megabytes'] / base['temp_megabytes']:.2f}",
        ]
        for way, row in record["ways"].items()
    ]
    return markdown([f"{record['model']}, batch of 32", "time", "memory"], rows)


def draw_clipping() -> None:
    """Draw the cost of clipping by every library, and its growth."""
    from matplotlib.figure import Figure

    record = load("clipping")
    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.7, 1])
    names = list(record["models"])
    looks = {"bookkeeping": ("o", "#c1121f"), "vmap": ("s", "#2a6f97")}
    looks |= {"JAX Privacy": ("D", "#8ecae6"), "Optax": ("^", "#9a8c98")}
    for way, (marker, color) in looks.items():
        found = [ratios(w, "milliseconds") for w in PEERS.get(way, (way,))]
        costs = [min(part.get(name, math.nan) for part in found) for name in names]
        left.plot(costs, range(len(names)), marker, color=color, label=way, markersize=6)
    left.axvline(1, color="black", lw=0.8)
    left.set_xscale("log")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlabel("time / time of the non-private gradient")
    left.grid(axis="x", alpha=0.3)
    for way, (marker, color) in list(looks.items())[:2]:
        rows = [row for row in record["growth"] if row["width"] == 1024 and way in row["ways"]]
        rows = [row for row in rows if "milliseconds" in row["ways"][way]]
        rows.sort(key=lambda row: row["batch"])
        sizes = [row["batch"] for row in rows]
        costs = [
            row["ways"][way]["milliseconds"] / row["ways"]["non-private"]["milliseconds"]
            for row in rows
        ]
        right.plot(sizes, costs, marker + "-", color=color)
    right.axhline(1, color="black", lw=0.8)
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xlabel("batch size (MLP 784-1024-1024-10)")
    right.grid(alpha=0.3)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(RESULTS / "clipping.png", dpi=150)


TABLES: dict[str, Callable[[], str]] = {
    "claim": claim,
    "demo": demo,
    "steps": steps,
    "accounting": accounting,
    "clipping": clipping,
    "whole steps": whole_steps,
    "microbatches": microbatches,
}


def fill(text: str) -> str:
    """Return the text with every table filled in."""
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text, count = pattern.subn(lambda match, t=table: f"{match[1]}{t()}\n{match[2]}", text)
        if count != 1:
            raise ValueError(f"README.md must hold the table {name!r} once, got {count} times.")
    return text


def main() -> None:
    """Fill README.md, and draw its figures."""
    draw_accounting()
    draw_clipping()
    path = ROOT / "README.md"
    path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
