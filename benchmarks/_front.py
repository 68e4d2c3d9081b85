"""Generate README's headline numbers and its figure from the records."""

from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from benchmarks import _trust
from benchmarks._figures import plot_costs
from benchmarks._results import RESULTS, geometric_mean, load, markdown, times
from benchmarks.paper import _report
from benchmarks.paper._record import EPSILONS
from benchmarks.paper._tables import PRINTED


def accuracies(kind: str) -> np.ndarray:
    """Return test accuracies of softmax regression on MNIST: (ε of the paper, seeds)."""
    final = load("paper/best")["final"]
    return np.array([final[f"{e} {kind}"]["found"]["test_accuracies"] for e in EPSILONS])


def printed() -> list[float]:
    """Return the paper's best printed accuracy for each ε."""
    return [max(row[epsilon][0] for row in PRINTED.values()) for epsilon in EPSILONS]


def _with_and_without_the_worst(ratios: dict[str, float]) -> tuple[float, float]:
    """Return the geometric mean of all models, and of all but the worst one."""
    *others, worst = sorted(ratios.values())
    return geometric_mean([*others, worst]), geometric_mean(others)


def claim() -> str:
    """Return the headline numbers."""
    ours, *peers = (times(name) for name in ("bookkeeping", "JAX Privacy", "Optax"))
    (theirs, rest), (optax, optax_rest) = map(_with_and_without_the_worst, peers)
    where = load("clipping")["circumstances"]
    whole = [
        row["ways"]["DP-LSSGD"]["milliseconds"] / row["ways"]["SGD"]["milliseconds"]
        for row in load("smoothing")["steps"].values()
    ]
    least = EPSILONS.index(min(EPSILONS))
    smoothed, plain = (accuracies(kind)[least].mean() for kind in ("best", "unsmoothed"))
    return (
        f"A private gradient takes **{geometric_mean(ours.values()):.2f} times** as long as an "
        f"ordinary one (geometric mean of {len(ours)} models on {where['device']}, from "
        f"{min(ours.values()):.2f} to {max(ours.values()):.2f}); JAX Privacy's\ntakes "
        f"{theirs:.1f} times as long, and that of `optax.contrib` {optax:.1f} times "
        f"({rest:.1f} and {optax_rest:.1f} without the model that is worst for them). A whole step "
        f"with noise, smoothing\nand update takes {geometric_mean(whole):.2f} times as long as "
        f"without privacy (the same models, from {min(whole):.2f} to {max(whole):.2f}). Softmax\n"
        f"regression on MNIST reaches **{smoothed:.1f} %** at ε = {EPSILONS[least]:g} "
        f"({plain:.1f} % without smoothing; δ = 1e-5, mean of\nfive seeds); the paper "
        f"reports {printed()[least]:.1f} %, from code that is not private."
    )


def paper() -> str:
    """Return the best accuracies at the ε of the paper's Table 1."""
    numbers = _report.numbers()
    columns = (accuracies("unsmoothed").mean(axis=1), accuracies("best").mean(axis=1), printed())
    rows = [
        [f"{epsilon:.2f}", *(f"{value:.1f}" for value in row)]
        for epsilon, *row in zip(EPSILONS, *columns, strict=True)
    ]
    head = ["ε", "σ = 0", "smoothed, σ and layout chosen", "the paper's best, not private"]
    loud, quiet = (numbers[f"when.mnist.eps={epsilon}.grid.gain"] for epsilon in (0.02, 1.0))
    adult = [v for k, v in numbers.items() if k.startswith("when.adult") and k.endswith(".gain")]
    return (
        f"{markdown(head, rows)}\n\nSettings were chosen on the validation images, treated as "
        "public. [The paper's experiments](benchmarks/paper/README.md), as\npublished and as "
        "private, have the rest: with step sizes tuned for each σ, the gain on images grows with "
        f"the noise, on the grid from {quiet:+.1f} points\nat ε = 1 to {loud:+.1f} at ε = 0.02 "
        f"(20 seeds), and on a table of census data it lies between {min(adult):+.1f} and "
        f"{max(adult):+.1f}."
    )


def draw() -> None:
    """Draw the cost of privacy in time and in accuracy."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    looks = {
        "optax_lsdp": ("bookkeeping", "o", "#c1121f"),
        "JAX Privacy": ("JAX Privacy", "D", "#2a6f97"),
        "Optax": ("Optax", "^", "#9a8c98"),
    }
    plot_costs(left, looks)
    left.set_xlabel("time of a private gradient / of an ordinary one")
    lines = {
        "smoothed": ("best", "o-", "#c1121f"),
        "not smoothed": ("unsmoothed", "s--", "#c1121f"),
    }
    for label, (kind, style, color) in lines.items():
        seen = accuracies(kind)
        mean, spread = seen.mean(axis=1), seen.std(axis=1, ddof=1)
        look = {"color": color, "markersize": 4, "capsize": 3}
        right.errorbar(EPSILONS, mean, spread, fmt=style, label=label, **look)
    right.plot(EPSILONS, printed(), "x-", color="#9a8c98", label="the paper's best, not private")
    right.set_xlabel("ε, δ = 1e-5 (softmax regression on MNIST)")
    right.set_ylabel(f"test accuracy, %, {seen.shape[1]} seeds, ± 1 s.d.")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(RESULTS / "front.png", dpi=150)


TABLES: dict[str, Callable[[], str]] = {"claim": claim, "paper": paper, "trust": _trust.in_short}
