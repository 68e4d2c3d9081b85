"""Collect the headline numbers of all records under flat names."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from benchmarks._results import load
from benchmarks.paper._cnn_tables import (
    OPTIMIZERS,
    best_kind,
    best_runs,
    budget_accuracies,
    curves,
    ends,
    fall,
    runs_of,
    worst,
)
from benchmarks.paper._record import EPSILONS
from benchmarks.paper._tables import gain, rows_of
from benchmarks.paper.cnn_best import EPSILONS as EPSILONS_OF_THE_BEST
from benchmarks.paper.cnn_best import PARTS

Numbers = Iterator[tuple[str, float]]


def summary(is_run: Callable[[str], bool]) -> dict[str, float]:
    """Return the headline numbers of all complete records; accuracies are in percent."""
    found: dict[str, float] = {}
    for name, numbers in NUMBERS.items():
        if is_run(name):
            found |= {key: round(float(value), 3) for key, value in numbers()}
    return found


def _best() -> Numbers:
    final = load("paper/best")["final"]
    for epsilon in EPSILONS:
        for kind in ("unsmoothed", "smoothed", "best"):
            accuracies = final[f"{epsilon} {kind}"]["found"]["test_accuracies"]
            yield f"table1.private.eps={epsilon:.2f}.{kind}.test_accuracy", np.mean(accuracies)


def _table1() -> Numbers:
    for column in ("published", "private"):
        for (epsilon, smoothing), row in rows_of(column).items():
            name = f"table1.protocol.{column}.eps={epsilon:.2f}.sigma={smoothing:g}.test_accuracy"
            yield name, np.mean(row["test_accuracies"])


def _when() -> Numbers:
    for key in load("paper/when")["final"]:
        data, epsilon, variant = key.split(" ", 2)
        if variant != "none":
            mean, half = gain(data, float(epsilon), variant)
            name = f"when.{data.lower()}.eps={epsilon}.{variant.replace(', ', '.')}"
            yield f"{name.replace(' ', '_')}.gain", mean
            yield f"{name.replace(' ', '_')}.gain_half_interval", half


def _theory() -> Numbers:
    for name, row in load("paper/theory")["holds from"].items():
        yield f"theory.theorem1_holds_from.{name.lower().replace(' ', '_')}.epsilon", row["found"]


def _cnn() -> Numbers:
    for z in (2, 5, 8, 10):
        for name, runs in curves(z).items():
            yield f"cnn.z={z}.epochs=15.{name}.test_accuracy", np.mean(ends(runs))
    for name, row in load("paper/cnn")["long"].items():
        key = f"cnn.z=10.{name.replace(', ', '.')}"  # 60 epochs
        yield f"{key}.final_accuracy", row["found"]["test_accuracies"][-1]
        yield f"{key}.final_validation_accuracy", row["found"]["validation_accuracies"][-1]
        yield f"{key}.worst_validation_accuracy", worst(row["found"])
        yield f"{key}.largest_fall", fall(row["found"])


def _cnn_effects() -> Numbers:
    record = load("paper/cnn_effects")
    for part, sign in (("smoothing", "sigma"), ("learning rate", "rate"), ("layout", "layout")):
        for name, row in record[part].items():
            key = f"cnn.z=10.epochs=15.{sign}={name.replace(' seed ', '.seed=').replace(' ', '.')}"
            yield f"{key}.test_accuracy", row["found"]["test_accuracies"][-1]


def _cnn_budgets() -> Numbers:
    for name in OPTIMIZERS:
        for epsilon, accuracies in budget_accuracies(name).items():
            yield f"cnn.eps={epsilon:g}.{name}.test_accuracy", np.mean(accuracies)


def _cnn_best() -> Numbers:
    for epsilon in EPSILONS_OF_THE_BEST:
        kind = best_kind(epsilon)
        runs = best_runs(epsilon, kind, "best")
        yield f"mnist.eps={epsilon:g}.best.test_accuracy", np.mean(ends(runs))
        for kind, choice in product(PARTS, ("without parts", "best")):
            runs = best_runs(epsilon, kind, choice)
            title = f"{kind.lower()}.{choice.replace(' ', '_')}"
            yield f"mnist.eps={epsilon:g}.{title}.test_accuracy", np.mean(ends(runs))


def _cifar() -> Numbers:
    for name in OPTIMIZERS:
        for run in runs_of("cifar", "runs", f"{name} "):
            yield f"cifar.{name}.seed={run['seed']}.test_accuracy", ends([run])[0]


NUMBERS: dict[str, Callable[[], Numbers]] = {  # by record
    "best": _best,
    "table1": _table1,
    "when": _when,
    "theory": _theory,
    "cnn": _cnn,
    "cnn_effects": _cnn_effects,
    "cnn_budgets": _cnn_budgets,
    "cnn_best": _cnn_best,
    "cifar": _cifar,
}
