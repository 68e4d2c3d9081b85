"""Draw the figures of README.md from the records."""

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from benchmarks._results import ACCOUNTANTS, RESULTS, load, smoothed_vectors, times


def draw_accounting() -> None:
    """Draw by how much each accountant's ε exceeds the certified lower bound."""
    rows = load("accounting")["rows"]
    figure = Figure(figsize=(8.4, 4.8), layout="constrained")
    axes = figure.subplots()
    looks = {"optax_lsdp": ("o", "#c1121f"), "PLD, mesh 1e-4": ("s", "#2a6f97")}
    looks |= {"PLD, mesh 1e-3": ("D", "#8ecae6"), "RDP": ("^", "#9a8c98")}
    for offset, way in zip((-0.24, -0.08, 0.08, 0.24), ACCOUNTANTS, strict=True):
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
    figure.legend(frameon=False, loc="outside lower center", ncols=len(ACCOUNTANTS))
    figure.savefig(RESULTS / "accounting.png", dpi=150)


def plot_costs(axes: Axes, looks: dict[str, tuple[str, str, str]]) -> None:
    """Plot each model's time relative to an ordinary gradient, one marker per engine."""
    models = list(times("bookkeeping"))
    for label, (way, marker, color) in looks.items():
        costs = [times(way).get(model, math.nan) for model in models]
        axes.plot(costs, range(len(models)), marker, color=color, label=label, markersize=6)
    axes.axvline(1, color="black", lw=0.8)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100], minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(models)), models)
    axes.invert_yaxis()


def draw_clipping() -> None:
    """Draw the cost of clipping with every library, and how it grows."""
    record = load("clipping")
    figure = Figure(figsize=(12.5, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=[1.7, 1, 1])
    looks = {"bookkeeping": ("o", "#c1121f"), "vmap": ("s", "#2a6f97")}
    looks |= {"JAX Privacy": ("D", "#8ecae6"), "Optax": ("^", "#9a8c98")}
    plot_costs(left, {way: (way, *look) for way, look in looks.items()})
    left.set_xlabel("time / time of the non-private gradient")
    left.grid(axis="x", alpha=0.3)
    for axes, grows, fixed in ((middle, "batch", ("width", 1024)), (right, "width", ("batch", 64))):
        rows = sorted(
            (row for row in record["growth"] if row[fixed[0]] == fixed[1]),
            key=lambda row: row[grows],
        )
        for way, (marker, color) in list(looks.items())[:2]:
            found = [row for row in rows if "milliseconds" in row["ways"].get(way, {})]
            pairs = [
                [row["ways"][w]["milliseconds"] for w in (way, "non-private")] for row in found
            ]
            costs = [private / plain for private, plain in pairs]
            axes.plot([row[grows] for row in found], costs, marker + "-", color=color)
        axes.axhline(1, color="black", lw=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
    middle.set_ylabel("time / time of the non-private gradient")
    middle.set_xlabel("batch size (MLP of width 1024)")
    right.set_xlabel("width of the MLP (batches of 64)")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside lower center", ncols=4)
    figure.savefig(RESULTS / "clipping.png", dpi=150)


def draw_smoothing() -> None:
    """Draw the time of every smoothing method, and of noise, against the size of a vector."""
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    looks = {"recursive": ("o", "#c1121f"), "banded": ("s", "#e09f3e"), "fft": ("^", "#2a6f97")}
    looks |= {"noise": ("x", "#9a8c98")}
    for axes, kind in zip(panels, ("round", "prime"), strict=True):
        rows = [row for row in sorted(smoothed_vectors()) if row.smoothing == 1]
        rows = [row for row in rows if row.kind == kind]
        for way, (marker, color) in looks.items():
            points = [(row.size, row.times[way]) for row in rows if way in row.times]
            axes.loglog(*zip(*points, strict=True), marker + "-", color=color, label=way)
        axes.set_xlabel(f"entries, {'powers of ten' if kind == 'round' else 'primes'}")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("milliseconds, σ = 1")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(looks))
    figure.savefig(RESULTS / "smoothing.png", dpi=150)


def draw_scaling() -> None:
    """Draw the time of a step against batch size, parameters and devices, and of sampling."""
    record = load("scaling")
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    labels = {
        "batches": "logical batch (MNIST CNN)",
        "parameters": "parameters (linear model)",
        "devices": "simulated devices (batch 1,024)",
        "datasets": "examples to choose 256 from",
    }
    for axes, (part, label) in zip(figure.subplots(1, 4, sharey=True), labels.items(), strict=True):
        points = [(int(size), row["milliseconds"]) for size, row in record[part].items()]
        axes.loglog(*zip(*points, strict=True), "o-", color="#c1121f")
        axes.set_xlabel(label)
        if part == "devices":
            axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("milliseconds")
    figure.savefig(RESULTS / "scaling.png", dpi=150)


FIGURES = (draw_accounting, draw_clipping, draw_smoothing, draw_scaling)
