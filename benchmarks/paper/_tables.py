"""Generate the tables of the paper's experiments from their records."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.stats import t as student

from benchmarks._results import load, markdown
from benchmarks.paper._record import EPSILONS

PRINTED = {  # the paper's Table 1: mean and deviation of five runs, by σ and ε
    0.0: {0.30: (81.74, 0.96), 0.25: (81.45, 1.59), 0.20: (78.92, 1.14), 0.15: (77.03, 0.69)}
    | {0.10: (73.49, 1.60)},
    1.0: {0.30: (84.21, 0.51), 0.25: (83.27, 0.35), 0.20: (81.56, 0.79), 0.15: (79.46, 1.33)}
    | {0.10: (76.29, 0.53)},
    2.0: {0.30: (84.23, 0.65), 0.25: (83.65, 0.76), 0.20: (82.15, 0.59), 0.15: (80.77, 1.26)}
    | {0.10: (76.31, 0.93)},
    3.0: {0.30: (85.11, 0.45), 0.25: (82.97, 0.48), 0.20: (82.22, 0.28), 0.15: (80.81, 1.03)}
    | {0.10: (77.13, 0.77)},
}
CONSTANTS_AT = (1.0, 2.0, 3.0, 4.0, 5.0)
PRINTED_CONSTANTS = {  # the paper's tables, the same for all three sizes
    "gamma": (0.447, 0.333, 0.277, 0.243, 0.218),
    "beta": (0.268, 0.185, 0.149, 0.128, 0.114),
}


def spread(values: Any) -> str:
    """Return mean and standard deviation."""
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"


def rows_of(column: str) -> dict[tuple[float, float], Any]:
    """Return the rows of a column of Table 1, by ε and σ."""
    found = load("paper/table1")["columns"][column]["found"]
    return {(row["epsilon"], row["smoothing"]): row for row in found}


def table1() -> str:
    """Return Table 1: the paper's numbers, our numbers as published, and as private."""
    published, private = rows_of("published"), rows_of("private")
    rows = []
    for smoothing, printed in PRINTED.items():
        rows.append([f"σ = {smoothing:g}", "printed", *(f"{m} ± {d}" for m, d in printed.values())])
        for name, found in (("as published", published), ("as private", private)):
            cells = [spread(found[epsilon, smoothing]["test_accuracies"]) for epsilon in EPSILONS]
            rows.append(["", name, *cells])
    return markdown(["", "", *(f"ε = {epsilon:.2f}" for epsilon in EPSILONS)], rows)


def best() -> str:
    """Return the best private accuracies, with their settings."""
    final = load("paper/best")["final"]
    rows = []
    for epsilon in EPSILONS:
        cells = []
        for kind in ("unsmoothed", "smoothed", "best"):
            row = final[f"{epsilon} {kind}"]["found"]
            how = f"{row['steps']} steps of {row['step_size']:g}"
            if row["smoothing"]:
                how += f", σ = {row['smoothing']:g}, {row['layout']}"
            cells.append(f"{spread(row['test_accuracies'])} ({how})")
        top = max(mean[epsilon][0] for mean in PRINTED.values())
        rows.append([f"{epsilon:.2f}", f"{top:.1f}", *cells])
    head = ["ε", "the paper's best", "σ = 0", "best σ, inputs", "best of all"]
    return markdown(head, rows)


def gain(name: str, epsilon: float, variant: str) -> tuple[float, float]:
    """Return the mean gain of a variant over σ = 0 in points, and half its 95 % interval."""
    final = load("paper/when")["final"]
    smoothed, plain = (
        np.array(final[f"{name} {epsilon} {kind}"]["found"]["test_accuracies"])
        for kind in (variant, "none")
    )
    differences = smoothed - plain
    half = student.ppf(0.975, len(differences) - 1) * differences.std(ddof=1)
    return float(differences.mean()), float(half / math.sqrt(len(differences)))


def when() -> str:
    """Return the gain of smoothing, with intervals."""
    final = load("paper/when")["final"]
    keys = [key.split(" ", 2) for key in final]
    rows = []
    for name, epsilon in dict.fromkeys((name, epsilon) for name, epsilon, _ in keys):
        plain = final[f"{name} {epsilon} none"]["found"]["test_accuracies"]
        cells = []
        for variant in ("inputs", "stored", "grid", "inputs, whole tree"):
            if [name, epsilon, variant] not in keys:
                cells.append("")
                continue
            mean, half = gain(name, float(epsilon), variant)
            row = final[f"{name} {epsilon} {variant}"]["found"]
            cells.append(
                f"{mean:+.2f} ± {half:.2f} (σ = {row['smoothing']:g}, {row['step_size']:g})"
            )
        step_size = final[f"{name} {epsilon} none"]["found"]["step_size"]
        rows.append([name, epsilon, f"{np.mean(plain):.2f} ({step_size:g})", *cells])
    head = ["data", "ε", "σ = 0, % (step size)", "inputs", "stored", "grid", "inputs, whole tree"]
    return markdown(head, rows)


def constants() -> str:
    """Return γ and β beside the printed values."""
    exact = load("paper/theory")["constants"]["tables"]["found"]
    rows = []
    for name, symbol in (("gamma", "γ"), ("beta", "β")):
        rows.append([f"{symbol}, printed", *(f"{value:.3f}" for value in PRINTED_CONSTANTS[name])])
        for size, values in exact[name].items():
            rows.append([f"{symbol}, d = {int(size):,}", *(f"{value:.4f}" for value in values)])
    return markdown(["", *(f"σ = {s:g}" for s in CONSTANTS_AT)], rows)


def noises() -> str:
    """Return the noise of Theorem 1, of the authors' code, and the least that suffices."""
    rows = [
        [
            epsilon,
            f"{row['theorem']:.2f}",
            "yes" if row["theorem_holds"] else "no",
            f"{row['epsilon_of_theorem']:.4f}",
            f"{row['code']:.2f}",
            f"{row['epsilon_of_code']:.4f}",
            f"{row['tight']:.3f}",
        ]
        for epsilon, row in (
            (name, row["found"]) for name, row in load("paper/theory")["noise"].items()
        )
    ]
    head = ["ε claimed", "z of Theorem 1", "its conditions hold", "true ε", "z of the code"]
    table = markdown([*head, "true ε, were it private", "least z"], rows)
    holds = {name: row["found"] for name, row in load("paper/theory")["holds from"].items()}
    return (
        f"{table}\n\nFor these batches and steps the conditions first hold at "
        f"ε = {holds['logistic regression']:.2f}; for those of the MNIST CNN at "
        f"{holds['MNIST CNN']:.2f}."
    )


def bounds() -> str:
    """Return the factor of smoothing in Theorem 2's bound, and the energy of noise."""
    record = load("paper/theory")
    factors = record["bounds"]["Theorem 2"]["found"]["factors"]
    rows = []
    for smoothing, row in record["energy"].items():
        seen = row["found"]
        rows.append(
            [
                f"σ = {float(smoothing):g}",
                f"{factors[smoothing]:.3f}",
                *(
                    f"{seen[name][kind]:.4f}"
                    for name in ("gamma", "beta")
                    for kind in ("exact", "seen")
                ),
            ]
        )
    optimum = record["bounds"]["Theorem 2"]["found"]
    table = markdown(["", "bound / bound at σ = 0", "γ", "γ, seen", "β", "β, seen"], rows)
    return (
        f"{table}\n\nThe optimum has ‖w‖² = {optimum['distance']:.0f}; its gradient's norm is "
        f"{optimum['gradient_norm']:.0e}."
    )


def example() -> str:
    """Return the two points of the nonconvex example."""
    points = load("paper/theory")["example"]["points"]["found"]
    rows = [
        [name, *(f"{row[key]:.4f}" for key in ("distance", "inside", "outside"))]
        for name, row in points.items()
    ]
    return markdown(["point", "distance", "‖∇f‖ from inside", "‖∇f‖ from outside"], rows)


TABLES: dict[
    str, tuple[str, Callable[[], str]]
] = {  # name: (record, function that makes the table)
    "table1": ("table1", table1),
    "best": ("best", best),
    "when": ("when", when),
    "constants": ("theory", constants),
    "noises": ("theory", noises),
    "bounds": ("theory", bounds),
    "example": ("theory", example),
}
