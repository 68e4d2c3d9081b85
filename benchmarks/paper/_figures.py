"""Draw the figures of the paper's experiments from their records."""

from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks._results import RESULTS, load
from benchmarks.paper._record import EPSILONS
from benchmarks.paper._tables import PRINTED, gain, rows_of
from benchmarks.paper.denoising import lines, planes

COLUMNS = {"published": "as published (not private)", "private": "as private"}
COLORS = {0.0: "#1d3557", 1.0: "#e09f3e", 2.0: "#9a8c98", 3.0: "#c1121f"}


def save(figure: Figure, name: str) -> None:
    """Write a picture."""
    figure.savefig(RESULTS / "paper" / f"{name}.png", dpi=150)


def tidy(axes: Any) -> None:
    """Remove the upper and right axes."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def draw_degradation() -> None:
    """Draw Figure 1: DP-SGD's losses by epoch, for falling ε."""
    record = load("paper/degradation")["columns"]
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    for row, (column, title) in zip(
        figure.subplots(2, 2, sharex=True), COLUMNS.items(), strict=True
    ):
        for axes, part in zip(row, ("training", "validation"), strict=True):
            runs = record[column]["found"]
            for index, run in enumerate(runs):
                losses = run["losses"][part]
                label = "no noise" if run["epsilon"] is None else f"ε = {run['epsilon']:g}"
                color = colormaps["viridis"](0.92 * index / len(runs))
                axes.semilogy(range(1, len(losses) + 1), losses, color=color, label=label)
            axes.set_title(f"{title}: {part} loss", fontsize=10)
            tidy(axes)
    for axes in figure.axes[2:]:
        axes.set_xlabel("epoch (mean of 3 seeds)")
    for axes in figure.axes[::2]:
        axes.set_ylabel("cross entropy, nats")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))
    save(figure, "degradation")


def draw_losses() -> None:
    """Draw training and validation losses at ε = 0.2 and 0.1 for σ = 0, 1, 3."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    grid = figure.subplots(2, 4, sharex=True)
    for row, epsilon in zip(grid, (0.2, 0.1), strict=True):
        panels = [(c, part) for c in COLUMNS for part in ("training", "validation")]
        for axes, (column, part) in zip(row, panels, strict=True):
            for smoothing in (0.0, 1.0, 3.0):
                losses = rows_of(column)[epsilon, smoothing]["losses"][part]
                axes.semilogy(
                    range(1, len(losses) + 1),
                    losses,
                    color=COLORS[smoothing],
                    label=f"σ = {smoothing:g}",
                )
            axes.set_title(f"{COLUMNS[column]},\n{part} loss, ε = {epsilon:g}", fontsize=9)
            tidy(axes)
    for axes in grid[1]:
        axes.set_xlabel("epoch (mean of 5 seeds)")
    for axes in grid[:, 0]:
        axes.set_ylabel("cross entropy, nats")
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3)
    save(figure, "losses")


def draw_table1() -> None:
    """Draw accuracy against ε: the paper's numbers, both columns, and the best models."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    axes = figure.subplots()
    for smoothing, style in ((0.0, ":"), (3.0, "-")):
        printed = [PRINTED[smoothing][epsilon][0] for epsilon in EPSILONS]
        axes.plot(
            EPSILONS, printed, "x" + style, color="#9a8c98", label=f"paper, σ = {smoothing:g}"
        )
        for column, color in (("published", "#e09f3e"), ("private", "#2a6f97")):
            rows = rows_of(column)
            means = [np.mean(rows[epsilon, smoothing]["test_accuracies"]) for epsilon in EPSILONS]
            label = f"{COLUMNS[column]}, σ = {smoothing:g}"
            axes.plot(EPSILONS, means, "o" + style, color=color, label=label, markersize=4)
    final = load("paper/best")["final"]
    for kind, style in (("unsmoothed", ":"), ("best", "-")):
        runs = [final[f"{epsilon} {kind}"]["found"]["test_accuracies"] for epsilon in EPSILONS]
        label = f"full batches, {'σ = 0' if kind == 'unsmoothed' else 'best σ and layout'}"
        axes.plot(EPSILONS, np.mean(runs, axis=1), "s" + style, color="#c1121f", label=label)
    axes.set_xlabel("ε, δ = 1e-5 (claimed, where not private)")
    axes.set_ylabel("test accuracy, %, mean of 5 seeds")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    tidy(axes)
    save(figure, "table1")


def draw_step_sizes() -> None:
    """Draw test accuracy against the step size, at ε = 0.1 and 0.2."""
    record = load("paper/step_sizes")
    figure = Figure(figsize=(9, 6), layout="constrained")
    for row, (column, title) in zip(
        figure.subplots(2, 2, sharex=True), COLUMNS.items(), strict=True
    ):
        for axes, epsilon in zip(row, (0.1, 0.2), strict=True):
            for smoothing in (0.0, 1.0, 3.0):
                points = [
                    (float(size), np.mean(run["test_accuracies"]))
                    for size, task in record[column].items()
                    for run in task["found"]
                    if (run["epsilon"], run["smoothing"]) == (epsilon, smoothing)
                ]
                label = f"σ = {smoothing:g}"
                axes.plot(*zip(*points, strict=True), "o-", color=COLORS[smoothing], label=label)
            axes.set_title(f"{title}, ε = {epsilon:g}", fontsize=10)
            tidy(axes)
        row[0].set_ylabel("test accuracy, %, 3 seeds")
    for axes in figure.axes[2:]:
        axes.set_xlabel("a, of the step size a/t")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=3)
    save(figure, "step_sizes")


def draw_denoising() -> None:
    """Draw the paper's illustration: a noisy sine and a noisy product of sines, smoothed."""
    record = load("paper/denoising")["errors"]["planes"]["found"]
    figure = Figure(figsize=(13, 3.2), layout="constrained")
    first, *rest = figure.subplots(1, 6)
    for (name, line), look in zip(lines().items(), (":", "-", "-"), strict=True):
        color = {"signal": "black", "noisy": "#9a8c98"}.get(name, "#c1121f")
        first.plot(line, look, color=color, lw=0.9, label=name)
    first.legend(frameon=False, fontsize=9)
    first.set_xlabel("entry (one draw of the noise)")
    first.set_ylabel("value")
    for axes, (title, picture) in zip(rest, planes().items(), strict=True):
        axes.imshow(picture, vmin=-1.2, vmax=1.2, cmap="RdBu")
        error = record[title]
        axes.set_title(f"{title}\nerror {error:.3f}" if error else title, fontsize=10)
        axes.axis("off")
    figure.get_layout_engine().set(h_pad=0.1)
    tidy(first)
    save(figure, "denoising")


def draw_when() -> None:
    """Draw the gain of smoothing with its intervals, by ε."""
    keys = [key.split(" ", 2) for key in load("paper/when")["final"]]
    looks = {"inputs": ("o", "#c1121f"), "stored": ("s", "#2a6f97"), "grid": ("^", "#e09f3e")}
    looks |= {"inputs, whole tree": ("x", "#9a8c98")}
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("MNIST", "Adult"), strict=True):
        for shift, (variant, (marker, color)) in enumerate(looks.items()):
            epsilons = [float(e) for n, e, v in keys if (n, v) == (name, variant)]
            if not epsilons:
                continue
            means, halves = zip(*(gain(name, e, variant) for e in epsilons), strict=True)
            axes.errorbar(
                np.array(epsilons) * 1.04**shift,
                means,
                halves,
                fmt=marker + "-",
                color=color,
                label=variant,
                capsize=2,
                markersize=4,
            )
        axes.axhline(0, color="black", lw=0.8)
        axes.set_xscale("log")
        axes.set_xticks(sorted({float(e) for _, e, _ in keys}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.set_xlabel(f"ε ({name}, full batches, 60 steps)")
        tidy(axes)
    figure.axes[0].set_ylabel("points gained over σ = 0, 95 % of 20 seeds")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    save(figure, "when")


def draw_errors() -> None:
    """Draw lost signal against remaining noise, and both along a run."""
    rows = load("paper/errors")["runs"]["0.1"]["found"]
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    *trades, along = figure.subplots(1, 3)
    looks = {"inputs": ("o", "#c1121f"), "stored": ("s", "#2a6f97"), "grid": ("^", "#e09f3e")}
    for axes, row in zip(trades, (rows[0], rows[len(rows) // 2]), strict=True):
        for layout, (marker, color) in looks.items():
            points = [
                (part["variance"] / row["noise"], part["bias"] / row["signal"])
                for part in row[layout].values()
            ]
            axes.plot(*zip(*points, strict=True), marker + "-", color=color, label=layout)
        smoothings = ", ".join(f"{float(name):g}" for name in reversed(row["inputs"]))
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.set_xlabel(
            f"share of the noise that is left, σ = {smoothings}\n"
            f"(step {row['step'] + 1}, signal / noise = {row['signal'] / row['noise']:.2g})",
            fontsize=9,
        )
        tidy(axes)
    trades[0].set_ylabel("share of the signal that is lost")
    steps = [row["step"] + 1 for row in rows]
    parts = {
        "noise, σ = 0": ("black", "-", [row["noise"] for row in rows]),
        "noise, σ = 3, grid": ("black", "--", [row["grid"]["3.0"]["variance"] for row in rows]),
        "true gradient": ("#c1121f", "-", [row["true"] for row in rows]),
        "bias of clipping": ("#c1121f", ":", [row["clipping"] for row in rows]),
        "bias of smoothing, σ = 3, grid": (
            "#c1121f",
            "--",
            [row["grid"]["3.0"]["bias"] for row in rows],
        ),
    }
    for name, (color, style, values) in parts.items():
        along.semilogy(steps, values, style, color=color, label=name)
    along.set_ylim(bottom=1e-5)
    along.set_xlabel("step (ε = 0.1)")
    along.set_ylabel("squared norm")
    tidy(along)
    for axes, place in ((trades[0], "left"), (along, "right")):
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles, labels, frameon=False, loc=f"outside lower {place}", ncols=3)
    save(figure, "errors")


FIGURES = {  # name: (records, function that draws them, alternative text)
    "table1": (("table1", "best"), draw_table1, "Accuracy against ε"),
    "losses": (("table1",), draw_losses, "Losses at ε = 0.2 and 0.1"),
    "degradation": (("degradation",), draw_degradation, "Losses of DP-SGD by ε"),
    "step_sizes": (("step_sizes",), draw_step_sizes, "Accuracy against the step size"),
    "when": (("when",), draw_when, "Gain of smoothing"),
    "errors": (("errors",), draw_errors, "Squared error of the smoothed gradient"),
    "denoising": (("denoising",), draw_denoising, "A noisy sine, and a noisy product of sines"),
}
