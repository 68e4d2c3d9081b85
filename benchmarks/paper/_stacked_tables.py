"""Generate the tables and the figure of records, correlated noise and the tournament."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import t as student

from benchmarks._results import RESULTS, load, markdown
from benchmarks.paper._figures import save, tidy
from benchmarks.paper._tables import spread
from benchmarks.paper.cnn_tournament import CIFAR10_NAME, METHODS, ON_CIFAR10
from benchmarks.paper.cnn_tournament import NOISES as ON_MNIST
from benchmarks.paper.correlated import SMOOTHED

Rows = dict[str, list[dict[str, Any]]]  # the rows of each method
NOISES = ("4 bands", "16 bands", "inverse of 8 bands", "independent, full batches")


def parts(record: str, start: str, least: int | None = None) -> dict[str, Rows]:
    """Return the parts of a record whose names begin with `start`, by problem.

    They have results of at least `least` methods, or of all if that is None.
    """
    found = load(f"paper/{record}").items()
    named = {key.removeprefix(f"{start}, "): part for key, part in found if key.startswith(start)}
    most = max(map(len, named.values()), default=0)
    return {
        name: {method: row["found"] for method, row in part.items()}
        for name, part in named.items()
        if len(part) >= (most if least is None else least)
    }


def exists(record: str) -> bool:
    """Return whether any problem of a record is complete."""
    path = RESULTS / "paper" / f"{record}.json"
    return path.exists() and bool(parts(record, "final"))


def difference(one: Any, other: Any) -> tuple[float, float]:
    """Return the mean paired difference of accuracies, and half its 95 % interval."""
    values = np.array(one["test_accuracies"]) - np.array(other["test_accuracies"])
    half = student.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def shown(one: Any, other: Any) -> str:
    """Return a paired difference, bold if its interval excludes 0."""
    mean, half = difference(one, other)
    text = f"{mean:+.2f} ± {half:.2f}"
    return f"**{text}**" if abs(mean) > half else text


def records() -> str:
    """Return the best accuracies under a true guarantee."""
    rows = []
    for name, found in load("paper/records").items():
        start, _, problem = name.partition("final, ")
        if not problem:
            continue
        for epsilon, row in found.items():
            best = row["found"]
            how = f"{best['steps']} steps of {best['step_size']:g}, C = {best['clip_norm']:g}"
            how += f", momentum {best['momentum']:g}" if best["momentum"] else ""
            how += f", σ = {best['smoothing']:g}" if best["smoothing"] else ""
            accuracies = spread(best["test_accuracies"])
            which = "first search" if start else ""
            rows.append([problem, epsilon, accuracies, how, f"{best['parameters']:,}", which])
    return markdown(["problem", "", "test accuracy", "setting", "parameters", ""], sorted(rows))


def by_kind(rows: list[dict[str, Any]]) -> dict[tuple[float, float], dict[str, Any]]:
    """Return rows by ε and σ."""
    return {(row["epsilon"], row["smoothing"]): row for row in rows}


def correlated() -> str:
    """Return what each kind of noise gains over independent noise."""
    rows = []
    for name, found in parts("correlated", "final", least=2).items():
        kinds = {title: by_kind(part) for title, part in found.items()}
        for kind, plain in kinds["independent"].items():
            cells = [shown(kinds[t][kind], plain) if t in kinds else "–" for t in NOISES]
            accuracy = spread(plain["test_accuracies"])
            problem = name.removesuffix(SMOOTHED)
            rows.append([problem, f"{kind[1]:g}", f"{kind[0]:g}", accuracy, *cells])
    return markdown(["problem", "σ", "ε", "independent", *NOISES], rows)


def at_all_step_sizes() -> str:
    """Return accuracies at every step size, for two kinds of noise."""
    found = load("paper/correlated").get("all step sizes, CIFAR-10, scattering", {})
    if len(found) < 2:
        return "*Not run yet.*"
    rows = [
        [f"ε = {epsilon:g}", title, *(spread(row["test_accuracies"]) for row in here)]
        for epsilon in (4.0, 8.0)
        for title, here in (
            (title, [row for row in part["found"] if row["epsilon"] == epsilon])
            for title, part in found.items()
        )
    ]
    sizes = dict.fromkeys(r["step_size"] for r in found["independent"]["found"])
    return markdown(["", "noise", *(f"step size {size:g}" for size in sizes)], rows)


def spreads() -> str:
    """Return the noise in the parameters, relative to independent noise."""
    found = parts("correlated", "final")["MNIST, pixels"]
    kinds = {title: by_kind(part) for title, part in found.items()}
    rows = []
    for title in NOISES:
        ratios = [
            f"{row['spread'] / plain['spread']:.2f}"
            for row, plain in (
                (kinds[title][kind], plain)
                for kind, plain in kinds["independent"].items()
                if kind[1] == 0
            )
        ]
        rows.append([title, *ratios])
    head = [f"ε = {kind[0]:g}" for kind in kinds["independent"] if kind[1] == 0]
    return markdown(["noise in the parameters / independent", *head], rows)


def tournament() -> str:
    """Return what each method gains over none, each with its own step size."""
    rows = []
    for name, found in parts("tournament", "final").items():
        for method, part in found.items():
            pairs = list(zip(part, found["none"], strict=True))
            if method == "none":
                cells = [f"{np.mean(row['test_accuracies']):.2f} %" for row in part]
            else:
                cells = [shown(row, plain) for row, plain in pairs]
            rows.append([name, method, *cells])
    epsilons = [row["epsilon"] for row in found["none"]]
    return markdown(["problem", "method", *(f"ε = {e:g}" for e in epsilons)], rows)


def all_rates() -> str:
    """Return accuracies at the same step size: none / auto / best fixed σ."""
    rows, worse, cells_of_auto = [], 0, 0
    for name, found in parts("tournament", "all rates").items():
        rates = sorted({row["step_size"] for row in found["none"]})
        for epsilon in dict.fromkeys(row["epsilon"] for row in found["none"]):
            cells = []
            for rate in rates:
                here = [
                    [r for r in part if (r["epsilon"], r["step_size"]) == (epsilon, rate)]
                    for part in (found["none"], found["auto"], found["Laplacian"])
                ]
                means = [max(np.mean(row["test_accuracies"]) for row in part) for part in here]
                mean, half = difference(here[1][0], here[0][0])
                worse, cells_of_auto = worse + (mean < -half), cells_of_auto + 1
                text = " / ".join(f"{value:.1f}" for value in means)
                cells.append(f"{text} ({mean:+.2f} ± {half:.2f})")
            rows.append([name, f"{epsilon:g}", *cells])
    head = ["problem", "ε", *(f"step size {rate:g}" for rate in rates)]
    return (
        f"{markdown(head, rows)}\n\nTest accuracies without smoothing / with `auto` / with the best"
        " of three fixed σ, chosen on the test examples. In brackets,\n`auto` minus none, with its "
        f"95 % interval. `auto` is worse beyond its interval in {worse} of {cells_of_auto} cells."
    )


def automatic() -> str:
    """Return `auto` minus the best fixed σ, each with its own step size."""
    rows = [
        [name, *(shown(a, b) for a, b in zip(found["auto"], found["Laplacian"], strict=True))]
        for name, found in parts("tournament", "final").items()
    ]
    epsilons = [row["epsilon"] for row in found_first()["none"]]
    return markdown(["`auto` minus fixed σ", *(f"ε = {e:g}" for e in epsilons)], rows)


def on_network(methods: Iterable[str], start: str = "final, ") -> dict[str, dict[float, Any]]:
    """Return the rows of all methods that were trained on a network, by method and ε.

    `start` begins the names of the network's parts of the record.
    """
    record = load("paper/cnn_tournament")
    found = {
        name: {row["found"]["epsilon"]: row["found"] for row in part.values()}
        for name in methods
        if (part := record.get(f"{start}{name}"))
    }
    most = max(map(len, found.values()), default=0)
    return {name: part for name, part in found.items() if len(part) == most}


def cnn_tournament() -> str:
    """Return what each method gains over none on the paper's network."""
    found = on_network(METHODS)
    none, rows = found.pop("none"), []
    rows.append(["none", *(f"{np.mean(row['test_accuracies']):.2f} %" for row in none.values())])
    rows += [[name, *(shown(part[e], none[e]) for e in none)] for name, part in found.items()]
    return markdown(["method", *(f"ε = {epsilon:g}" for epsilon in none)], rows)


def correlated_on_network(methods: Iterable[str], start: str = "final, ") -> str:
    """Return what each kind of noise gains over independent noise on a network."""
    found = on_network(methods, start)
    plain = found.pop("independent")
    rows = [
        [
            f"{e:g}",
            spread(row["test_accuracies"]),
            *(shown(part[e], row) for part in found.values()),
        ]
        for e, row in sorted(plain.items())
    ]
    return markdown(["ε", "independent", *found], rows)


def found_first() -> Rows:
    """Return the rows of the first complete problem of the tournament."""
    return next(iter(parts("tournament", "final").values()))


def draw_tournament() -> None:
    """Draw the gain of every method, one panel for each problem, one row for each method."""
    found = parts("tournament", "final")
    figure = Figure(figsize=(2 + 4.2 * len(found), 5.4), layout="constrained")
    colors = ("#1d3557", "#2a6f97", "#e09f3e", "#c1121f")
    grid = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (name, methods) in zip(grid, found.items(), strict=True):
        others = [method for method in methods if method != "none"]
        for index, color in enumerate(colors):
            pairs = [difference(methods[m][index], methods["none"][index]) for m in others]
            means, halves = zip(*pairs, strict=True)
            places = np.arange(len(others)) + 0.18 * (index - 1.5)
            label = f"ε = {methods['none'][index]['epsilon']:g}"
            axes.errorbar(means, places, xerr=halves, fmt="o", ms=4, color=color, label=label)
        axes.axvline(0, color="black", lw=0.8)
        axes.set_yticks(range(len(others)), others)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("gain over none, points")
        tidy(axes)
    grid[0].invert_yaxis()
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, loc="outside lower center", ncols=len(labels))
    save(figure, "tournament")


STACKED_TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "records": ("records", records),
    "tournament": ("tournament", tournament),
    "all rates": ("tournament", all_rates),
    "automatic": ("tournament", automatic),
    "cnn_tournament": ("cnn_tournament", cnn_tournament),
}
CORRELATED: dict[str, Callable[[], str]] = {  # the tables in the other README
    "correlated": correlated,
    "correlated spreads": spreads,
    "correlated on a network": partial(correlated_on_network, ON_MNIST),
    "correlated on CIFAR-10": partial(
        correlated_on_network, ON_CIFAR10, f"final, {CIFAR10_NAME}, "
    ),
    "correlated step sizes": at_all_step_sizes,
}
