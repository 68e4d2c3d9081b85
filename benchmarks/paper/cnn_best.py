"""The best MNIST accuracy at ε = 1 and ε = 3, by any means of the library, and what each is worth.

Two models: the paper's CNN with tanh instead of ReLU, and softmax regression on wavelets, which
nobody's images have chosen. Public images decide everything: batch and learning rate first, then
what each part adds alone, then what all that helped add together.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np

from benchmarks._timing import load_record
from benchmarks.paper import _record
from benchmarks.paper._networks import Setting, rehearse, run
from benchmarks.paper._tasks import Task, mnist, on_wavelets
from benchmarks.paper.cnn_budgets import least_noise
from benchmarks.zoo import Dense, MnistCNN, conv_by_blocks, max_pool_by_slices

EPSILONS, EPOCHS, SEEDS, FOLDS = (1.0, 3.0), 20, 3, 3
BATCHES = {"CNN": (512, 2048), "wavelets": (1024, 8192)}
RATES = {"CNN": (0.5, 1.0, 2.0), "wavelets": (0.1, 0.3, 1.0, 3.0)}
HELPS = 0.1  # points by which a part must help in rehearsals to be taken

MEANS: dict[str, dict[str, Any]] = {  # of the library, and what each changes in the setting
    "none": {},
    "momentum 0.9": {"momentum": 0.9},
    "averaged parameters": {"average": 0.95},
    "σ = 0.2": {"smoothing": 0.2},
    "σ = 1": {"smoothing": 1.0},
    "σ = 1 on grids": {"smoothing": 1.0, "layout": "grid"},
}
PARTS: dict[str, dict[str, dict[str, Any]]] = {
    "CNN": {
        **MEANS,
        "ReLU instead of tanh": {"model": MnistCNN(max_pool_by_slices, conv_by_blocks)},
        "4 shifted views": {"views": 4},
    },
    "wavelets": {**MEANS, "100 hidden units": {"model": Dense((100, 10), nn.tanh)}},
}


def networks(args: Any) -> dict[str, Task]:
    """Return both models with their features of the same images."""
    task = mnist(args)
    cnn = task._replace(model=MnistCNN(max_pool_by_slices, conv_by_blocks, nn.tanh))
    return {"CNN": cnn, "wavelets": on_wavelets(task)}


def changed(
    task: Task, setting: Setting, kind: str, names: tuple[str, ...]
) -> tuple[Task, Setting]:
    """Return a model and a setting with some parts changed."""
    for name in names:
        changes = dict(PARTS[kind][name])
        task = task._replace(model=changes.pop("model", task.model))
        setting = replace(setting, **changes)
    if setting.momentum:  # it multiplies the length of a step, so that is divided
        setting = replace(setting, learning_rate=(1 - setting.momentum) * setting.learning_rate)
    return task._replace(name=", ".join((task.name, *names))), setting


def first(path: Path, epsilon: float, kind: str) -> Setting:
    """Return the setting of a model that was best in rehearsals, without parts."""
    rows = load_record(path)["settings"].items()
    found = [row["found"] for name, row in rows if name.startswith(f"{epsilon} {kind}, ")]
    best = max(found, key=lambda row: row["accuracy"])
    return Setting(**{name: best[name] for name in Setting.__dataclass_fields__})


def try_parts(path: Path, task: Task, epsilon: float, kind: str, *names: str) -> Any:
    """Rehearse with some parts."""
    task, setting = changed(task, first(path, epsilon, kind), kind, names)
    accuracies = [rehearse(task, replace(setting, seed=seed))["accuracy"] for seed in range(FOLDS)]
    return {"parts": names, "accuracy": float(np.mean(accuracies))}


def tried(path: Path, epsilon: float, kind: str) -> Iterator[tuple[tuple[str, ...], float]]:
    """Return what was rehearsed, and the mean accuracy that it had."""
    record = load_record(path)
    for name, row in [*record["parts"].items(), *record.get("together", {}).items()]:
        if name.startswith(f"{epsilon} {kind}, "):
            yield tuple(row["found"]["parts"]), row["found"]["accuracy"]


def try_together(path: Path, task: Task, epsilon: float, kind: str) -> Any:
    """Rehearse with all parts that helped, of several kinds of smoothing with the best one."""
    accuracies = {names[0]: accuracy for names, accuracy in tried(path, epsilon, kind)}
    better = {n: a for n, a in accuracies.items() if a > accuracies["none"] + HELPS}
    smoothed = sorted((n for n in better if "smoothing" in PARTS[kind][n]), key=better.__getitem__)
    return try_parts(path, task, epsilon, kind, *(n for n in better if n not in smoothed[:-1]))


def final(path: Path, task: Task, epsilon: float, kind: str, choice: str, seed: int) -> Any:
    """Train on private images, without parts or with those that were best in rehearsals."""
    names: tuple[str, ...] = ()
    if choice == "best":
        names, _ = max(tried(path, epsilon, kind), key=lambda found: found[1])
    task, setting = changed(task, first(path, epsilon, kind), kind, names)
    return {"parts": names, **run(task, replace(setting, seed=seed))}


def main() -> None:
    """Rehearse and train what is not in the record yet."""
    args = _record.arguments(__doc__, "cnn_best")
    few, path = 1 if args.smoke else None, args.output
    settings: dict[str, Any] = {}
    parts, together, finals = {}, {}, {}
    for epsilon, (kind, task) in product(EPSILONS[:few], networks(args).items()):
        size, name = len(task.data.private[1]), f"{epsilon} {kind}"
        for batch, rate in product(BATCHES[kind][:few], RATES[kind][:few]):
            setting = Setting(batch=batch, epochs=1 if args.smoke else EPOCHS, learning_rate=rate)
            settings[f"{name}, batch {batch}, rate {rate:g}"] = partial(
                rehearse, task, least_noise(epsilon, size, setting)
            )
        for part in list(PARTS[kind])[: 2 if args.smoke else None]:
            parts[f"{name}, {part}"] = partial(try_parts, path, task, epsilon, kind, part)
        together[f"{name}, all that helped"] = partial(try_together, path, task, epsilon, kind)
        for choice, seed in product(("without parts", "best"), range(few or SEEDS)):
            finals[f"{name}, {choice}, seed {seed}"] = partial(
                final, path, task, epsilon, kind, choice, seed
            )
    work = {"settings": settings, "parts": parts, "together": together, "final": finals}
    _record.measure(path, work)


if __name__ == "__main__":
    main()
