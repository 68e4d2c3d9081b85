"""Draw the figures of the paper's networks from their records."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks._results import load
from benchmarks.paper._cnn_tables import DECAYS, OPTIMIZERS, budget_accuracies, curves, runs_of
from benchmarks.paper._figures import save, tidy

COLORS = {"sgd": "#1d3557", "lssgd": "#c1121f", "adam": "#9a8c98", "lsadam": "#e09f3e"}
SHADES = ("#1d3557", "#2a6f97", "#9a8c98", "#e09f3e", "#c1121f")


def draw_curves(axes: Any, runs: dict[str, list[Any]]) -> None:
    """Draw validation accuracy by epoch (mean and range over seeds), with ε as a dashed line."""
    for name, found in runs.items():
        seen = np.array([run["validation_accuracies"] for run in found])
        epochs = np.arange(1, seen.shape[1] + 1)
        axes.plot(epochs, seen.mean(axis=0), color=COLORS[name], label=OPTIMIZERS[name], lw=1.4)
        if len(seen) > 1:
            low, high = seen.min(axis=0), seen.max(axis=0)
            axes.fill_between(epochs, low, high, color=COLORS[name], alpha=0.15, lw=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    spent = axes.twinx()
    spent.plot(epochs, found[0]["epsilons"], "k--", lw=0.8)
    spent.set_ylim(bottom=0)
    spent.spines["top"].set_visible(False)
    spent.set_ylabel("ε (dashed)", fontsize=8)
    tidy(axes)


def draw_cnn() -> None:
    """Draw the four optimizers at four levels of noise, and their sixty epochs."""
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    panels = figure.subplots(2, 3)
    for axes, z in zip([*panels[0, :2], *panels[1, :2]], (2, 5, 8, 10), strict=True):
        runs = curves(z)
        draw_curves(axes, runs)
        seeds = len(runs["sgd"])
        title = f"noise multiplier {z}, σ = {runs['lssgd'][0]['smoothing']:g}"
        axes.set_title(f"{title}, {seeds} seed{'s' if seeds > 1 else ''}", fontsize=10)
    rows = load("paper/cnn")["long"]
    long = {name: [rows[name]["found"]] for name in OPTIMIZERS}
    grid = panels[0, 2].get_gridspec()
    panels[0, 2].remove(), panels[1, 2].remove()
    wide = figure.add_subplot(grid[:, 2])
    draw_curves(wide, long)
    run = long["sgd"][0]
    wide.axvline(DECAYS * len(run["epsilons"]) / run["steps"], color="black", lw=0.6, ls=":")
    wide.set_title(
        "noise multiplier 10, 60 epochs, 1 seed\n(dotted: a tenth of the rate)", fontsize=10
    )
    for axes in (*panels[1, :2], wide):
        axes.set_xlabel("epoch")
    for axes in panels[:, 0]:
        axes.set_ylabel("validation accuracy, %")
    handles, labels = wide.get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=4)
    save(figure, "cnn")


def draw_cnn_effects() -> None:
    """Draw accuracy against σ and against the learning rate."""
    effects = load("paper/cnn_effects")
    by_smoothing = {name: row["found"] for name, row in effects["smoothing"].items()}
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for shade, name in zip(SHADES, by_smoothing, strict=True):
        seen = by_smoothing[name]["validation_accuracies"]
        left.plot(range(1, len(seen) + 1), seen, color=shade, label=f"σ = {name}")
    by_rate = {"0.15": (by_smoothing["0"], by_smoothing["1"])}
    rates = effects["learning rate"]
    for key in rates:
        rate = key.split(" ")[1]
        by_rate[rate] = tuple(rates[f"{kind} {rate}"]["found"] for kind in ("sgd", "lssgd"))
    for shade, rate in zip(SHADES, sorted(by_rate, key=float), strict=False):
        for run, style in zip(by_rate[rate], ("--", "-"), strict=True):
            seen = run["validation_accuracies"]
            label = f"rate {rate}" if style == "-" else None
            right.plot(range(1, len(seen) + 1), seen, style, color=shade, label=label)
    left.set_ylabel("validation accuracy, %")
    left.set_title("DP-LSSGD, by σ", fontsize=10)
    right.set_title("by learning rate: σ = 1, and σ = 0 dashed", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("epoch (noise multiplier 10, one seed)")
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncol": 5}
        axes.legend(frameon=False, fontsize=8, **below)
        tidy(axes)
    save(figure, "cnn_effects")


def draw_cnn_budgets() -> None:
    """Draw test accuracy against ε, each optimizer at its publicly chosen setting."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, label in OPTIMIZERS.items():
        by_epsilon = budget_accuracies(name)
        seen = np.array(list(by_epsilon.values()))
        look = {"color": COLORS[name], "markersize": 4, "capsize": 3}
        spread = seen.std(axis=1, ddof=1)
        axes.errorbar(list(by_epsilon), seen.mean(axis=1), spread, fmt="o-", label=label, **look)
    seeds = seen.shape[1]
    plain = load("paper/cnn_budgets")["without privacy"]["sgd"]["found"]["test_accuracies"][-1]
    axes.axhline(
        plain, color="black", lw=0.8, ls=":", label="DP-SGD's settings without privacy, one seed"
    )
    axes.set_xlabel("ε, δ = 1e-5")
    axes.set_ylabel(f"test accuracy, %, {seeds} seeds, ± 1 s.d.")
    axes.legend(frameon=False, fontsize=8)
    tidy(axes)
    save(figure, "cnn_budgets")


def draw_cifar() -> None:
    """Draw the four optimizers on CIFAR-10."""
    runs = {name: runs_of("cifar", "runs", f"{name} ") for name in OPTIMIZERS}
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    draw_curves(axes, runs)
    axes.set_xlabel(f"epoch (2 seeds, σ = {runs['lssgd'][0]['smoothing']:g})")
    axes.set_ylabel("validation accuracy, %")
    axes.legend(frameon=False, fontsize=8)
    save(figure, "cifar")


CNN_FIGURES = {  # same columns as FIGURES in _figures.py
    "cnn": (("cnn",), draw_cnn, "Validation accuracy of four private optimizers"),
    "cnn_effects": (("cnn_effects",), draw_cnn_effects, "Accuracy by σ and learning rate"),
    "cnn_budgets": (("cnn_budgets",), draw_cnn_budgets, "Test accuracy against ε"),
    "cifar": (("cifar",), draw_cifar, "Validation accuracy on CIFAR-10"),
}
