"""Tables of the CNNs: the records of the paper's networks go in, Markdown and numbers come out."""

from typing import Any

import numpy as np

from benchmarks._results import RESULTS, load, markdown
from benchmarks.paper._tables import spread
from benchmarks.paper.cnn_best import EPSILONS, PARTS, tried

OPTIMIZERS = {"sgd": "DP-SGD", "lssgd": "DP-LSSGD", "adam": "DP-Adam", "lsadam": "DP-LSAdam"}
BEST = RESULTS / "paper" / "cnn_best.json"
WARM = 5  # epochs after which an accuracy that falls is a sign of instability


def runs_of(record: str, part: str, start: str) -> list[Any]:
    """Return all runs whose name starts like this."""
    rows = load(f"paper/{record}")[part]
    return [row["found"] for name, row in rows.items() if name.startswith(start)]


def ends(runs: list[Any]) -> list[float]:
    """Return the test accuracies with which runs ended."""
    return [run["test_accuracies"][-1] for run in runs]


def curves(noise_multiplier: float) -> dict[str, list[Any]]:
    """Return all seeds of each optimizer's runs of fifteen epochs."""
    return {name: runs_of("cnn", "noise", f"{name} {noise_multiplier:g} ") for name in OPTIMIZERS}


def worst(run: Any) -> float:
    """Return the lowest validation accuracy once training has warmed up."""
    return min(run["validation_accuracies"][WARM:])


def cnn() -> str:
    """Return final and worst accuracies at each level of noise."""
    rows = []
    for z in (2, 5, 8, 10):
        for name, runs in curves(z).items():
            cells = [
                f"{runs[0]['smoothing']:g}",
                spread(ends(runs)) if len(runs) > 1 else f"{ends(runs)[0]:.2f}",
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
        float(key.split(" ")[0]): ends(row["found"])
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
    rows = []
    for name, label in OPTIMIZERS.items():
        runs = runs_of("cifar", "runs", f"{name} ")
        accuracies = [f"{accuracy:.2f}" for accuracy in ends(runs)]
        smoothing, epsilon = runs[0]["smoothing"], runs[0]["epsilons"][-1]
        rows.append([label, f"{smoothing:g}", *accuracies, f"{epsilon:.3f}"])
    return markdown(["optimizer", "σ", "test accuracy, seed 0", "seed 1", "ε"], rows)


def best_kind(epsilon: float) -> str:
    """Return the model that was best on public images."""
    return max(PARTS, key=lambda kind: max(accuracy for _, accuracy in tried(BEST, epsilon, kind)))


def best_runs(epsilon: float, kind: str, choice: str) -> list[Any]:
    """Return all seeds of a model on private images, with the best parts or without."""
    return runs_of("cnn_best", "final", f"{epsilon} {kind}, {choice}, ")


def how(first: Any) -> str:
    """Say with what a run was made."""
    plain = f"batch {first['batch']}, rate {first['learning_rate']:g}"
    return ", ".join([name for name in first["parts"] if name != "none"] or [plain])


def cnn_best() -> str:
    """Return what each part did on public images, and the accuracies on the test set."""
    rows = []
    for kind in PARTS:
        found = [dict(tried(BEST, epsilon, kind)) for epsilon in EPSILONS]
        for name in PARTS[kind]:
            seen = [(accuracies[name,], accuracies["none",]) for accuracies in found]
            cells = [f"{mean:.2f} ({mean - none:+.2f})" for mean, none in seen]
            rows.append([kind, name, *cells])
        for choice in ("without parts", "best"):
            runs = [best_runs(epsilon, kind, choice) for epsilon in EPSILONS]
            cells = [f"**{spread(ends(some))}** ({how(some[0])})" for some in runs]
            rows.append([kind, f"**{choice}, private images, test**", *cells])
    return markdown(["model", "part", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], rows)


CNN_TABLES = {  # as TABLES
    "cnn": ("cnn", cnn),
    "cnn_long": ("cnn", cnn_long),
    "cnn_layouts": ("cnn_effects", cnn_layouts),
    "cnn_budgets": ("cnn_budgets", cnn_budgets),
    "cnn_best": ("cnn_best", cnn_best),
    "cifar": ("cifar", cifar),
}
