"""Generate tables and headline numbers of the paper's networks from their records."""

from itertools import product
from typing import Any

import numpy as np

from benchmarks._results import RESULTS, load, markdown
from benchmarks.paper._tables import spread
from benchmarks.paper.cnn_best import EPSILONS, PARTS, gains, tried

OPTIMIZERS = {"sgd": "DP-SGD", "lssgd": "DP-LSSGD", "adam": "DP-Adam", "lsadam": "DP-LSAdam"}
BEST = RESULTS / "paper" / "cnn_best.json"
DECAYS = 10_000  # from this step on, the learning rate is a tenth
PRINTED_GAINS = {0.4: "+3.2", 0.2: "+5.0"}
WARM = 5  # after these epochs, a falling accuracy is a sign of instability


def runs_of(record: str, part: str, start: str) -> list[Any]:
    """Return all runs whose name starts with a prefix."""
    rows = load(f"paper/{record}")[part]
    return [row["found"] for name, row in rows.items() if name.startswith(start)]


def ends(runs: list[Any]) -> list[float]:
    """Return the final test accuracies of runs."""
    return [run["test_accuracies"][-1] for run in runs]


def curves(noise_multiplier: float) -> dict[str, list[Any]]:
    """Return each optimizer's runs of fifteen epochs, for all seeds."""
    return {name: runs_of("cnn", "noise", f"{name} {noise_multiplier:g} ") for name in OPTIMIZERS}


def worst(run: Any) -> float:
    """Return the lowest validation accuracy after the first epochs."""
    return min(run["validation_accuracies"][WARM:])


def fall(run: Any) -> float:
    """Return the largest fall of the validation accuracy from an earlier maximum."""
    seen = np.array(run["validation_accuracies"])
    return float((np.maximum.accumulate(seen) - seen).max())


def cnn() -> str:
    """Return the accuracies after fifteen epochs."""
    rows = []
    for z in (2, 5, 8, 10):
        for name, runs in curves(z).items():
            cells = [
                f"{runs[0]['smoothing']:g}",
                spread(ends(runs)) if len(runs) > 1 else f"{ends(runs)[0]:.2f}",
                f"{np.mean([worst(run) for run in runs]):.2f}",
                f"{np.mean([fall(run) for run in runs]):.2f}",
                f"{runs[0]['epsilons'][-1]:.4f}",
            ]
            rows.append([str(z), OPTIMIZERS[name], *cells])
    head = ["noise multiplier", "optimizer", "σ", "test accuracy, %", f"worst after epoch {WARM}"]
    return markdown([*head, "largest fall", "ε"], rows)


def cnn_long() -> str:
    """Return the runs of sixty epochs: final accuracy, accuracy before the decay, and falls."""
    rows = []
    for name, row in load("paper/cnn")["long"].items():
        run, (kind, *layout) = row["found"], name.split(", ")
        seen, test = run["validation_accuracies"], run["test_accuracies"]
        before = int(DECAYS * len(seen) / run["steps"])  # the last whole epoch at the first rate
        low = int(np.argmin(seen[WARM:])) + WARM
        cells = [
            f"{run['smoothing']:g}{', ' + layout[0] if layout else ''}",
            *(f"{test[epoch - 1]:.2f}" for epoch in (before, len(seen))),
            f"{max(seen):.2f} (epoch {int(np.argmax(seen)) + 1})",
            f"{seen[low]:.2f} (epoch {low + 1})",
            f"{fall(run):.2f}",
            f"{run['epsilons'][-1]:.4f}",
        ]
        rows.append([OPTIMIZERS[kind], *cells])
    ends_at = ["test, rate not yet decayed", "test, 60 epochs"]
    head = ["optimizer", "σ", *ends_at, "best validation", f"worst validation after epoch {WARM}"]
    return markdown([*head, "largest fall", "ε"], rows)


def cnn_layouts() -> str:
    """Return the accuracies of the layouts at the best σ."""
    rows = []
    for layout in ("inputs", "stored", "grid"):
        runs = runs_of("cnn_effects", "layout", f"{layout} ")
        accuracies = [f"{accuracy:.2f}" for accuracy in ends(runs)]
        rows.append([layout, f"{runs[0]['smoothing']:g}", *accuracies])
    return markdown(["layout", "σ", "test accuracy after 15 epochs, %, seed 1", "seed 2"], rows)


def budget_accuracies(name: str) -> dict[float, list[float]]:
    """Return an optimizer's test accuracies by ε."""
    return {
        float(key.split(" ")[0]): ends(row["found"])
        for key, row in load("paper/cnn_budgets")["final"].items()
        if key.split(" ")[1] == name
    }


def cnn_budgets() -> str:
    """Return test accuracies by ε with their chosen settings, and the gain of smoothing."""
    final = load("paper/cnn_budgets")["final"]
    rows = []
    for epsilon in budget_accuracies("sgd"):
        runs = {name: final[f"{epsilon} {name}"]["found"] for name in OPTIMIZERS}
        accuracies = {name: np.array(ends(found)) for name, found in runs.items()}
        cells = [
            f"{accuracies[name].mean():.2f} ({found[0]['learning_rate']:g}"
            + (f", σ = {found[0]['smoothing']:g})" if found[0]["smoothing"] else ")")
            for name, found in runs.items()
        ]
        gained = [
            spread((accuracies[f"ls{plain}"] - accuracies[plain]).tolist())
            for plain in ("sgd", "adam")
        ]
        rows.append([f"{epsilon:g}", *cells, *gained, PRINTED_GAINS.get(epsilon, "")])
    head = ["ε", *OPTIMIZERS.values(), "LSSGD − SGD", "LSAdam − Adam", "the paper's LSSGD − SGD"]
    return markdown(head, rows)


def cnn_gains() -> str:
    """Return the gain of smoothing at the paper's batch size and learning rates, by seed."""
    rows = []
    for z in (2, 5, 8, 10):
        runs = curves(z)
        gained = [
            ", ".join(
                f"{one - other:+.2f}"
                for one, other in zip(ends(runs[f"ls{plain}"]), ends(runs[plain]), strict=True)
            )
            for plain in ("sgd", "adam")
        ]
        rows.append([str(z), f"{runs['sgd'][0]['epsilons'][-1]:.3f}", *gained])
    head = ["noise multiplier", "ε after 15 epochs", "LSSGD − SGD", "LSAdam − Adam"]
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
    return max(PARTS, key=lambda kind: max(seen.mean() for _, seen in tried(BEST, epsilon, kind)))


def best_runs(epsilon: float, kind: str, choice: str) -> list[Any]:
    """Return all runs of a model on private images, with or without the best techniques."""
    return runs_of("cnn_best", "final", f"{epsilon} {kind}, {choice}, ")


def how(first: Any) -> str:
    """Describe the setting of a run."""
    plain = f"batch {first['batch']}, rate {first['learning_rate']:g}"
    return ", ".join([plain, *first["parts"]])


def cnn_settings() -> str:
    """Return accuracies on public images by batch size and learning rate."""
    found: dict[str, dict[str, float]] = {}
    for name, row in load("paper/cnn_best")["settings"].items():
        epsilon, words = name.split(" ", 1)
        found.setdefault(words, {})[epsilon] = row["found"]["accuracy"]
    rows = [[words, *(f"{seen[str(e)]:.2f}" for e in EPSILONS)] for words, seen in found.items()]
    return markdown(["model", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], rows)


def cnn_parts() -> str:
    """Return what each technique gained on public images."""
    rows = []
    for kind in PARTS:
        found = [dict(tried(BEST, epsilon, kind)) for epsilon in EPSILONS]
        changes = [gains(BEST, epsilon, kind) for epsilon in EPSILONS]
        for name in PARTS[kind]:
            cells = [
                f"{seen[name,].mean():.2f} ({change[name,][0]:+.2f} ± {change[name,][1]:.2f})"
                for seen, change in zip(found, changes, strict=True)
            ]
            rows.append([kind, name, *cells])
        together = load("paper/cnn_best")["together"]
        both = [together[f"{epsilon} {kind}, all that helped"]["found"] for epsilon in EPSILONS]
        cells = [f"{row['accuracy']:.2f} ({', '.join(row['parts']) or 'nothing'})" for row in both]
        rows.append([kind, "all that helped", *cells])
    return markdown(["model", "part", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], rows)


def cnn_best() -> str:
    """Return the accuracies on the test set, after training on private images."""
    rows = []
    for kind, choice in product(PARTS, ("without parts", "best")):
        runs = [best_runs(epsilon, kind, choice) for epsilon in EPSILONS]
        cells = [f"**{spread(ends(some))}** ({how(some[0])})" for some in runs]
        rows.append([f"{kind}, {choice}", *cells])
    return markdown(["", *(f"ε = {epsilon:g}" for epsilon in EPSILONS)], rows)


CNN_TABLES = {  # as TABLES
    "cnn": ("cnn", cnn),
    "cnn_long": ("cnn", cnn_long),
    "cnn_layouts": ("cnn_effects", cnn_layouts),
    "cnn_budgets": ("cnn_budgets", cnn_budgets),
    "cnn_gains": ("cnn", cnn_gains),
    "cnn_settings": ("cnn_best", cnn_settings),
    "cnn_parts": ("cnn_best", cnn_parts),
    "cnn_best": ("cnn_best", cnn_best),
    "cifar": ("cifar", cifar),
}
