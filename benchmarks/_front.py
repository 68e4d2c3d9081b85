"""Generate the headline numbers of README.md and the manual, and README's figure."""

import textwrap
from collections.abc import Callable

import numpy as np
from matplotlib.figure import Figure

from benchmarks import _priced
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
    device = load("clipping")["circumstances"]["device"].upper()
    whole = [
        row["ways"]["DP-LSSGD"]["milliseconds"] / row["ways"]["SGD"]["milliseconds"]
        for row in load("smoothing")["steps"].values()
    ]
    least = EPSILONS.index(min(EPSILONS))
    smoothed, plain = (accuracies(kind)[least].mean() for kind in ("best", "unsmoothed"))
    cifar = load("paper/records")["final, CIFAR-10, scattering"]["ε = 3"]["found"]
    text = (
        f"On a {device}, a private gradient takes **{geometric_mean(ours.values()):.2f} times** as "
        f"long as an ordinary one (geometric mean of {len(ours)} models, from "
        f"{min(ours.values()):.2f} to {max(ours.values()):.2f}). JAX Privacy 2.0 takes "
        f"{theirs:.1f} times and `optax.contrib` {optax:.1f} times as long ({rest:.1f} and "
        f"{optax_rest:.1f} without their worst model). {_priced.claim()} A whole private step "
        f"takes {geometric_mean(whole):.2f} times as long on a {device} (from "
        f"{min(whole):.2f} to {max(whole):.2f}). Softmax regression on MNIST reaches "
        f"**{smoothed:.1f} %** at ε = {EPSILONS[least]:g}, δ = 1e-5 ({plain:.1f} % without "
        f"smoothing, five seeds); the DP-LSSGD paper reports {printed()[least]:.1f} %, "
        "from code that is not private. On fixed wavelets of CIFAR-10 it reaches "
        f"**{np.mean(cifar['test_accuracies']):.1f} %** at ε = 3."
    )
    return _wrapped(text)


def when() -> str:
    """Return how much smoothing gains by data and layout, and on CNNs."""
    numbers = _report.numbers()
    epsilons = (0.02, 0.1, 1.0)
    rows = {
        "MNIST, the pixels as a grid": "when.mnist.eps={}.grid.gain",
        "MNIST, the inputs of each class in a row (the default)": "when.mnist.eps={}.inputs.gain",
        "MNIST, the stored order, whose neighbours are classes": "when.mnist.eps={}.stored.gain",
        "Adult, whose columns have no order (the default)": "when.adult.eps={}.inputs.gain",
    }
    table = markdown(
        ["data, and which entries are neighbours", *(f"ε = {epsilon:g}" for epsilon in epsilons)],
        [
            [name, *(_points(numbers[key.format(epsilon)]) for epsilon in epsilons)]
            for name, key in rows.items()
        ],
    )
    gains = {
        name: [
            numbers[f"cnn.eps={epsilon}.ls{name}.test_accuracy"]
            - numbers[f"cnn.eps={epsilon}.{name}.test_accuracy"]
            for epsilon in ("0.2", "0.4", "1")
        ]
        for name in ("sgd", "adam")
    }
    sgd, adam = (f"{_points(min(g))} to {_points(max(g))}" for g in gains.values())
    text = (
        "Points of test accuracy that the best σ gains for softmax regression, with a step size "
        "tuned for each σ (20 seeds). On the paper's CNN for MNIST at ε = 0.2 to 1, with a "
        f"learning rate tuned for each, smoothing changes DP-SGD by {sgd} points and DP-Adam by "
        f"{adam} (three seeds)."
    )
    return f"{table}\n\n{_wrapped(text)}"


def _wrapped(text: str) -> str:
    """Return a paragraph in lines of the manual's width."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _points(gain: float) -> str:
    """Return a gain with its sign and one digit; -0.0 is +0.0."""
    return f"{round(gain, 1) + 0.0:+.1f}"


def paper() -> str:
    """Return the best accuracies at the ε of the paper's Table 1."""
    columns = (accuracies("unsmoothed").mean(axis=1), accuracies("best").mean(axis=1), printed())
    rows = [
        [f"{epsilon:.2f}", *(f"{value:.1f}" for value in row)]
        for epsilon, *row in zip(EPSILONS, *columns, strict=True)
    ]
    head = ["ε", "σ = 0", "smoothed, σ and layout chosen", "the paper's best, not private"]
    return markdown(head, rows)


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


README: dict[str, Callable[[], str]] = {"claim": claim, "when": when}
