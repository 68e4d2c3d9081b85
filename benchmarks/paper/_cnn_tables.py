"""Tables of the CNNs: the records of the paper's networks go in, Markdown and numbers come out."""

from typing import Any

import numpy as np

from benchmarks._results import load, markdown

OPTIMIZERS = {"sgd": "DP-SGD", "lssgd": "DP-LSSGD", "adam": "DP-Adam", "lsadam": "DP-LSAdam"}
WARM = 5  # epochs after which an accuracy that falls is a sign of instability


def curves(noise_multiplier: float) -> dict[str, list[Any]]:
    """Return all seeds of each optimizer's runs of fifteen epochs."""
    rows = load("paper/cnn")["noise"]
    return {
        name: [
            row["found"]
            for key, row in rows.items()
            if key.startswith(f"{name} {noise_multiplier:g} ")
        ]
        for name in OPTIMIZERS
    }


def worst(run: Any) -> float:
    """Return the lowest validation accuracy once training has warmed up."""
    return min(run["validation_accuracies"][WARM:])


def cnn() -> str:
    """Return final and worst accuracies at each level of noise."""
    rows = []
    for z in (2, 5, 8, 10):
        for name, runs in curves(z).items():
            finals = [run["test_accuracies"][-1] for run in runs]
            cells = [
                f"{runs[0]['smoothing']:g}",
                f"{np.mean(finals):.2f}" + (f" ± {np.std(finals, ddof=1):.2f}" if z == 10 else ""),
                f"{np.mean([worst(run) for run in runs]):.2f}",
                f"{runs[0]['epsilons'][-1]:.4f}",
            ]
            rows.append([str(z) if name == "sgd" else "", OPTIMIZERS[name], *cells])
    head = ["noise multiplier", "optimizer", "σ", "test accuracy after 15 epochs, %"]
    return markdown([*head, f"lowest validation accuracy after epoch {WARM}", "ε"], rows)


def cnn_long() -> str:
    """Return how sixty epochs end, and how deep they fall."""
    rows = []
    for name, row in load("paper/cnn")["long"].items():
        run = row["found"]
        seen = np.array(run["validation_accuracies"])
        steps = np.abs(np.diff(seen[WARM:]))
        rows.append(
            [
                OPTIMIZERS[name],
                f"{run['smoothing']:g}",
                f"{run['test_accuracies'][-1]:.2f}",
                f"{seen.max():.2f} (epoch {seen.argmax() + 1})",
                f"{worst(run):.2f}",
                f"{steps.mean():.2f}",
                f"{run['epsilons'][-1]:.4f}",
            ]
        )
    head = ["optimizer", "σ", "test accuracy, %", "best validation", f"worst after epoch {WARM}"]
    return markdown([*head, "mean change from epoch to epoch", "ε"], rows)


def cnn_layouts() -> str:
    """Return the accuracies of the layouts at the best σ."""
    effects = load("paper/cnn_effects")
    stored = effects["layout"]["stored"]["found"]
    found = {name: row["found"] for name, row in effects["layout"].items()}
    found["inputs"] = effects["smoothing"][f"{stored['smoothing']:g}"]["found"]
    rows = [
        [name, f"{found[name]['smoothing']:g}", f"{found[name]['test_accuracies'][-1]:.2f}"]
        for name in ("inputs", "stored", "grid")
    ]
    return markdown(["layout", "σ", "test accuracy after 15 epochs, %"], rows)


def budget_accuracies(name: str) -> dict[float, list[float]]:
    """Return an optimizer's test accuracies by ε."""
    return {
        float(key.split(" ")[0]): [run["test_accuracies"][-1] for run in row["found"]]
        for key, row in load("paper/cnn_budgets")["final"].items()
        if key.split(" ")[1] == name
    }


def cnn_budgets() -> str:
    """Return test accuracies by ε, and what smoothing gained."""
    found = {name: budget_accuracies(name) for name in OPTIMIZERS}
    rows = []
    for epsilon in found["sgd"]:
        means = {name: np.mean(found[name][epsilon]) for name in OPTIMIZERS}
        gains = (means["lssgd"] - means["sgd"], means["lsadam"] - means["adam"])
        printed = {0.4: "+3.2", 0.2: "+5.0"}.get(epsilon, "")
        cells = [*(f"{mean:.2f}" for mean in means.values()), *(f"{gain:+.2f}" for gain in gains)]
        rows.append([f"{epsilon:g}", *cells, printed])
    head = ["ε", *OPTIMIZERS.values(), "LSSGD − SGD", "LSAdam − Adam", "the paper's LSSGD − SGD"]
    return markdown(head, rows)


def cifar() -> str:
    """Return the accuracies on CIFAR-10."""
    rows = load("paper/cifar")["runs"]
    lines = []
    for name, label in OPTIMIZERS.items():
        runs = [row["found"] for key, row in rows.items() if key.split(" ")[0] == name]
        finals = [f"{run['test_accuracies'][-1]:.2f}" for run in runs]
        lines.append(
            [label, f"{runs[0]['smoothing']:g}", *finals, f"{runs[0]['epsilons'][-1]:.3f}"]
        )
    return markdown(["optimizer", "σ", "test accuracy, seed 0", "seed 1", "ε"], lines)


def cnn_best() -> str:
    """Return what each part did on public images, and the best accuracies on the test set."""
    record = load("paper/cnn_best")
    columns: dict[str, dict[str, float]] = {}
    for key, row in record["parts"].items():
        epsilon, name = key.split(" ", 1)
        columns.setdefault(name, {})[epsilon] = np.mean([run["accuracy"] for run in row["found"]])
    rows = [
        [name, *(f"{seen[e]:.2f} ({seen[e] - columns['none'][e]:+.2f})" for e in ("1.0", "3.0"))]
        for name, seen in columns.items()
    ]
    for title in ("without parts", "best"):
        cells = []
        for epsilon in ("1.0", "3.0"):
            runs = [
                row["found"]
                for key, row in record["final"].items()
                if key.startswith(f"{epsilon} {title} ")
            ]
            finals = [run["test_accuracies"][-1] for run in runs]
            how = ", ".join(runs[0]["parts"]) or (
                f"batch {runs[0]['batch']}, {runs[0]['epochs']} epochs, "
                f"rate {runs[0]['learning_rate']:g}"
            )
            cells.append(f"**{np.mean(finals):.2f}** ± {np.std(finals, ddof=1):.2f} ({how})")
        rows.append([f"**{title}, test**", *cells])
    return markdown(["part", "ε = 1", "ε = 3"], rows)


CNN_TABLES = {  # as TABLES
    "cnn": ("cnn", cnn),
    "cnn_long": ("cnn", cnn_long),
    "cnn_layouts": ("cnn_effects", cnn_layouts),
    "cnn_budgets": ("cnn_budgets", cnn_budgets),
    "cnn_best": ("cnn_best", cnn_best),
    "cifar": ("cifar", cifar),
}
