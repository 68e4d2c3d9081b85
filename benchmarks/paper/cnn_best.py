"""The best MNIST accuracy at ε = 1 and ε = 3, and the gain of each technique of the library.

There are two models: the paper's CNN with tanh instead of ReLU, and softmax regression on fixed
wavelets. All choices use public images. One fifth of them chooses batch size and learning rate. The
other four fifths measure what each technique gains alone, and what the helpful ones gain together.
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

EPSILONS, EPOCHS, SEEDS = (1.0, 3.0), 20, 3
FIRST, OTHERS = 100, (101, 102, 103, 104)  # seeds of rehearsals; each holds out another fifth
BATCHES = {"CNN": (512, 2048), "wavelets": (1024, 8192)}
RATES = {"CNN": (0.5, 1.0, 2.0), "wavelets": (0.1, 0.3, 1.0, 3.0)}
HELPS = 2  # a technique is used if its gain exceeds so many standard errors

MEANS: dict[str, dict[str, Any]] = {  # techniques of the library: the settings that each changes
    "none": {},
    "momentum 0.9": {"momentum": 0.9},
    "averaged parameters": {"average": 0.95},
    "averaged, twice the rate": {"average": 0.95, "rate": 2},
    "σ = 1": {"smoothing": 1.0},
    "σ = 1, twice the rate": {"smoothing": 1.0, "rate": 2},
    "σ = 1 on grids, twice the rate": {"smoothing": 1.0, "layout": "grid", "rate": 2},
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
    """Return both models, each with its own features of the same images."""
    task = mnist(args)
    cnn = task._replace(model=MnistCNN(max_pool_by_slices, conv_by_blocks, nn.tanh))
    return {"CNN": cnn, "wavelets": on_wavelets(task)}


def changed(
    task: Task, setting: Setting, kind: str, names: tuple[str, ...]
) -> tuple[Task, Setting]:
    """Return a model and a setting with some techniques applied.

    Momentum lengthens steps, so the learning rate is divided. Other techniques may need a larger
    rate.
    """
    rate = setting.learning_rate or 0.0
    for name in names:
        changes = dict(PARTS[kind][name])
        task = task._replace(model=changes.pop("model", task.model))
        rate *= changes.pop("rate", 1) * (1 - changes.get("momentum", 0.0))
        setting = replace(setting, **changes)
    renamed = task._replace(name=", ".join((task.name, *names)))
    return renamed, replace(setting, learning_rate=rate)


def first(path: Path, epsilon: float, kind: str) -> Setting:
    """Return the best setting of a model in rehearsals without techniques."""
    rows = load_record(path)["settings"].items()
    found = [row["found"] for name, row in rows if name.startswith(f"{epsilon} {kind}, ")]
    best = max(found, key=lambda row: row["accuracy"])
    return Setting(**{name: best[name] for name in Setting.__dataclass_fields__})


def try_parts(
    path: Path,
    task: Task,
    epsilon: float,
    kind: str,
    names: tuple[str, ...],
    seeds: tuple[int, ...],
) -> Any:
    """Rehearse with some techniques."""
    task, setting = changed(task, first(path, epsilon, kind), kind, names)
    return {"parts": names, **rehearse(task, setting, seeds)}


def tried(path: Path, epsilon: float, kind: str) -> Iterator[tuple[tuple[str, ...], np.ndarray]]:
    """Return the rehearsed techniques, and the accuracy of each rehearsal."""
    record = load_record(path)
    for name, row in [*record["parts"].items(), *record.get("together", {}).items()]:
        if name.startswith(f"{epsilon} {kind}, "):
            yield tuple(row["found"]["parts"]), np.array(row["found"]["accuracies"])


def gains(path: Path, epsilon: float, kind: str) -> dict[tuple[str, ...], tuple[float, float]]:
    """Return the mean gain of techniques over the folds, and its standard error."""
    found = dict(tried(path, epsilon, kind))
    changes = {names: seen - found["none",] for names, seen in found.items()}
    roots = {names: len(change) ** 0.5 for names, change in changes.items()}
    return {
        names: (float(change.mean()), float(change.std(ddof=1) / roots[names]))
        for names, change in changes.items()
        if len(change) > 1
    }


def helpful(path: Path, epsilon: float, kind: str) -> dict[tuple[str, ...], float]:
    """Return the gains of techniques that helped by enough standard errors."""
    known = gains(path, epsilon, kind).items()
    return {names: mean for names, (mean, error) in known if mean > HELPS * error}


def try_together(path: Path, task: Task, epsilon: float, kind: str, seeds: tuple[int, ...]) -> Any:
    """Rehearse with all helpful techniques; if several change one setting, with the best."""
    chosen: list[str] = []
    better = {names[0]: gain for names, gain in helpful(path, epsilon, kind).items()}
    for name in sorted(better, key=better.__getitem__, reverse=True):
        taken = {field for other in chosen for field in PARTS[kind][other]} - {"rate"}
        if not taken & PARTS[kind][name].keys():
            chosen.append(name)
    if len(chosen) < 2:  # already rehearsed alone
        known = load_record(path)["parts"][f"{epsilon} {kind}, {(*chosen, 'none')[0]}"]["found"]
        return {**known, "parts": chosen}
    return try_parts(path, task, epsilon, kind, tuple(chosen), seeds)


def final(path: Path, task: Task, epsilon: float, kind: str, choice: str, seed: int) -> Any:
    """Train on private images, without techniques or with the most helpful ones."""
    better = helpful(path, epsilon, kind) if choice == "best" else {}
    names = max(better, key=better.__getitem__, default=())
    if choice == "best" and not names:  # the same run
        return load_record(path)["final"][f"{epsilon} {kind}, without parts, seed {seed}"]["found"]
    task, setting = changed(task, first(path, epsilon, kind), kind, names)
    return {"parts": names, **run(task, replace(setting, seed=seed))}


def main() -> None:
    """Rehearse and train everything that has no record yet."""
    args = _record.arguments(__doc__, "cnn_best")
    few, path = 1 if args.smoke else None, args.output
    others = OTHERS[:2] if args.smoke else OTHERS
    settings: dict[str, Any] = {}
    parts, together, finals = {}, {}, {}
    for epsilon, (kind, task) in product(EPSILONS[:few], networks(args).items()):
        size, name = len(task.data.private[1]), f"{epsilon} {kind}"
        for batch, rate in product(BATCHES[kind][:few], RATES[kind][:few]):
            epochs = 1 if args.smoke else EPOCHS
            setting = Setting(batch=batch, epochs=epochs, learning_rate=rate)
            settings[f"{name}, batch {batch}, rate {rate:g}"] = partial(
                rehearse, task, least_noise(epsilon, size, setting), (FIRST,)
            )
        for part in list(PARTS[kind])[: 2 if args.smoke else None]:
            parts[f"{name}, {part}"] = partial(
                try_parts, path, task, epsilon, kind, (part,), others
            )
        together[f"{name}, all that helped"] = partial(
            try_together, path, task, epsilon, kind, others
        )
        for choice, seed in product(("without parts", "best"), range(few or SEEDS)):
            finals[f"{name}, {choice}, seed {seed}"] = partial(
                final, path, task, epsilon, kind, choice, seed
            )
    work = {"settings": settings, "parts": parts, "together": together, "final": finals}
    _record.measure(path, work)


if __name__ == "__main__":
    main()
