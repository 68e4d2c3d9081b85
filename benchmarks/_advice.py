"""Generate the tables and the figure of the page on choosing settings."""

import math
import statistics

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import t

from benchmarks import auto_smoothing, choosing
from benchmarks._results import RESULTS, geometric_mean, load, markdown
from benchmarks._trust import NOT_RUN, is_run
from benchmarks.clip_norms import STARTS

COLORS = ("#c1121f", "#e07a5f", "#2a6f97", "#8ecae6")
METHOD_NAMES = {
    "slack": "adaptive, by slack",
    "quantile": "adaptive, by quantiles",
    "fixed": "fixed",
    "automatic": "automatic clipping",
}


def _noise_table(part: str, symbol: str, values: tuple[int, ...]) -> str:
    """Return z, and the noise of a whole run relative to the last column, for each ε."""
    found = load("choosing")[part]
    rows = []
    for epsilon in choosing.EPSILONS:
        row = [found[f"{epsilon:g} {value}"] for value in values]
        times = [x["whole_run"] / row[-1]["whole_run"] for x in row]
        shown = zip(times, row, strict=True)
        rows.append(
            [f"{epsilon:g}", *(f"{t:.2f} (z = {x['noise_multiplier']:.2f})" for t, x in shown)]
        )
    return markdown(["ε", *(f"{symbol} = {value:,}" for value in values)], rows)


def batch_sizes() -> str:
    """Return the noise of a whole run by batch size, relative to the largest batch."""
    return _noise_table("batches", "b", choosing.BATCHES)


def step_counts() -> str:
    """Return the noise of a whole run by the number of steps, relative to the longest run."""
    return _noise_table("steps", "T", choosing.STEPS)


def deltas() -> str:
    """Return ε by δ for some noise multipliers."""
    found = load("choosing")["deltas"]
    rows = [
        [f"{noise:g}", *(f"{found[f'{noise:g} {delta:g}']:.2f}" for delta in choosing.DELTAS)]
        for noise in choosing.NOISES
    ]
    return markdown(["z", *(f"δ = {delta:g}" for delta in choosing.DELTAS)], rows)


def learning_rates() -> str:
    """Return validation accuracies of softmax regression by learning rate, without smoothing."""
    found = _rates()
    rates = sorted({rate for row in found.values() for rate in row})
    rows = [
        [f"{epsilon:g}", str(steps), *(f"{row[rate]:.1f}" for rate in rates)]
        for (epsilon, steps), row in sorted(found.items())
    ]
    return markdown(["ε", "steps", *(f"rate {rate:g}" for rate in rates)], rows)


def clip_norms() -> str:
    """Return final accuracies by the initial clip norm, for each method of `AdaptiveClip`."""
    if not is_run("clip_norms"):
        return NOT_RUN
    rows = []
    for (problem, epsilon, method), points in _final_accuracies().items():
        shown = [f"{mean:.1f} ± {error:.1f}" for mean, error in points.values()]
        shown = shown if len(shown) > 1 else ["", "", *shown, "", ""]
        rows.append([problem, f"{epsilon:g}", METHOD_NAMES[method], *shown])
    starts = [f"{start:g} × best" for start in STARTS]
    return markdown(["problem", "ε", "clip norm", *starts], rows)


def _final_accuracies() -> dict[tuple[str, float, str], dict[float, tuple[float, float]]]:
    """Return mean accuracies and 95 % intervals by problem, ε and method, then by the start."""
    found: dict[tuple[str, float, str], dict[float, tuple[float, float]]] = {}
    for name, row in load("clip_norms")["final"].items():
        problem, method, budget, _ = name.split(", ")
        line = found.setdefault((problem, float(budget.removeprefix("ε = ")), method), {})
        count = len(row["accuracies"])
        error = t.ppf(0.975, count - 1) * statistics.stdev(row["accuracies"]) / math.sqrt(count)
        line[row["start"]] = statistics.fmean(row["accuracies"]), error
    return found


def draw_clip_norms() -> None:
    """Draw final accuracies by the initial clip norm."""
    if not is_run("clip_norms"):
        return
    found = _final_accuracies()
    figure = Figure(figsize=(12, 3.4), layout="constrained")
    cases = list(dict.fromkeys(key[:2] for key in found))
    for axes, case in zip(figure.subplots(1, len(cases)), cases, strict=True):
        for method, color in zip(METHOD_NAMES, COLORS, strict=True):
            points = found[(*case, method)]
            label = METHOD_NAMES[method]
            if len(points) == 1:
                axes.axhline(points[1.0][0], color=color, label=label)
                continue
            means, errors = zip(*points.values(), strict=True)
            axes.errorbar(list(points), means, errors, fmt="o-", color=color, label=label, ms=4)
        axes.set_xscale("log")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 50))
        axes.set_title(f"{case[0]}, ε = {case[1]:g}", fontsize=10)
        axes.set_xlabel("initial clip norm / best fixed one")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("test accuracy, %")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "clip_norms.png", dpi=150)


def estimates() -> str:
    """Return what free estimates add to a private step."""
    if not is_run("estimates"):
        return NOT_RUN
    found = load("estimates")["milliseconds"]
    columns = {"norms": "with norms", "curve": "with a curve"}
    if any("probe" in row for row in found.values()):
        columns |= {"probe": "… in a step that probes", "between": "… in a step between"}
        for row in found.values():  # what a run pays per step on average
            row["curve"] = (row["probe"] + 7 * row["between"]) / 8
    ratios = {
        way: {name: row[way] / row["plain"] for name, row in found.items()} for way in columns
    }
    rows = [
        [name, f"{row['plain']:.3g} ms", *(f"{ratios[way][name]:.2f}" for way in ratios)]
        for name, row in found.items()
    ]
    means = [geometric_mean(ratio.values()) for ratio in ratios.values()]
    rows.append(["geometric mean", "", *(f"**{mean:.3f}**" for mean in means)])
    return markdown(["model", "private step", *columns.values()], rows)


def auto_smoothing_costs() -> str:
    """Return what smoothing="auto" adds to a private step with a fixed σ."""
    if not is_run("auto_smoothing"):
        return NOT_RUN
    rows = []
    for name, row in load("auto_smoothing")["milliseconds"].items():
        times = row["choosing"], row["between"], auto_smoothing.mean_milliseconds(row)
        ratios = [f"{time / row['fixed']:.2f}" for time in times]
        rows.append([name, f"{row['fixed']:.3g} ms", *ratios[:2], f"**{ratios[2]}**"])
    columns = ["model", "σ = 1", "auto, choosing", "auto, between", "auto, mean of 1,000 steps"]
    return markdown(columns, rows)


def _rates() -> dict[tuple[float, int], dict[float, float]]:
    """Return accuracies by learning rate, for each ε and number of steps."""
    found: dict[tuple[float, int], dict[float, float]] = {}
    for name, part in load("paper/best")["search"].items():
        epsilon = float(name.split()[0])
        for row in part["found"]:
            if row["smoothing"] == 0 and row["layout"] == "inputs" and epsilon in (0.1, 0.3):
                rates = found.setdefault((epsilon, row["steps"]), {})
                rates[row["step_size"]] = row["accuracy"]
    return found


def _plot_noise(axes: Axes, part: str, values: tuple[int, ...]) -> None:
    found = load("choosing")[part]
    for epsilon, color in zip(choosing.EPSILONS, COLORS, strict=True):
        noise = [found[f"{epsilon:g} {value}"]["whole_run"] for value in values]
        axes.loglog(values, noise, "o-", color=color, label=f"ε = {epsilon:g}", markersize=4)
    axes.set_ylabel("noise on the mean of all gradients / C")


def draw() -> None:
    """Draw noise by batch size and by steps, and accuracy by learning rate."""
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    middle.sharey(left)
    _plot_noise(left, "batches", choosing.BATCHES)
    left.set_xlabel(f"batch size, {choosing.EPOCHS} epochs")
    left.legend(frameon=False)
    _plot_noise(middle, "steps", choosing.STEPS)
    middle.set_xlabel(f"steps, batches of {choosing.BATCH:,}")
    for (line, row), color in zip(sorted(_rates().items()), COLORS, strict=True):
        label = f"ε = {line[0]:g}, {line[1]} steps"
        points = zip(*sorted(row.items()), strict=True)
        right.plot(*points, "o-", color=color, label=label, markersize=4)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter("{x:g}")
    right.set_xlabel("learning rate of softmax regression")
    right.set_ylabel("validation accuracy, %")
    right.legend(frameon=False, loc="lower left")
    right.set_ylim(75, 89)
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "choosing.png", dpi=150)


TABLES = {
    "batch sizes": batch_sizes,
    "step counts": step_counts,
    "deltas": deltas,
    "learning rates": learning_rates,
    "clip norms": clip_norms,
}
