"""The best MNIST accuracy at ε = 1 and ε = 3, by any means of the library, and what each is worth.

Public images choose: first batch, epochs and learning rate, then which parts are added to them.
"""

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
from benchmarks.paper._tasks import Task, mnist
from benchmarks.paper.cnn_budgets import least_noise
from benchmarks.zoo import MnistCNN, max_pool_by_slices

EPSILONS = (1.0, 3.0)
BATCHES, EPOCHS, RATES = (1024, 2048), (20, 40), (0.5, 1.0, 2.0)
SEEDS, REHEARSALS = 3, 2
HELPS = 0.1  # points by which a part must help in rehearsals to be taken


PARTS: dict[str, dict[str, Any]] = {  # what each changes in the setting or in the network
    "none": {},
    "ReLU instead of tanh": {"activation": nn.relu},
    "twice as many channels": {"width": 2},
    "momentum 0.9": {"momentum": 0.9},
    "averaged parameters": {"average": 0.95},
    "4 shifted views": {"views": 4},
    "σ = 0.2": {"smoothing": 0.2},
    "σ = 1": {"smoothing": 1.0},
    "σ = 1 on grids": {"smoothing": 1.0, "layout": "grid"},
}


def apply(task: Task, setting: Setting, names: tuple[str, ...]) -> tuple[Task, Setting]:
    """Return the network and the setting with some parts changed."""
    model: dict[str, Any] = {"activation": nn.tanh}
    for name, value in (item for part in names for item in PARTS[part].items()):
        if name in ("activation", "width"):
            model[name] = value
        else:
            setting = replace(setting, **{name: value})
    if setting.momentum:  # it multiplies the length of a step, so that is divided
        setting = replace(setting, learning_rate=(1 - setting.momentum) * setting.learning_rate)
    network = MnistCNN(max_pool_by_slices, **model)
    return task._replace(name=", ".join((task.name, *names)), model=network), setting


def first(path: Path, epsilon: float) -> Setting:
    """Return the setting that was best in rehearsals, without parts."""
    rows = [
        row["found"]
        for name, row in load_record(path)["settings"].items()
        if name.startswith(f"{epsilon} ")
    ]
    best = max(rows, key=lambda row: row["accuracy"])
    return Setting(**{name: best[name] for name in Setting.__dataclass_fields__})


def part(path: Path, task: Task, epsilon: float, name: str) -> Any:
    """Rehearse with one part added."""
    setting = first(path, epsilon)
    changed, setting = apply(task, setting, (name,))
    return [rehearse(changed, replace(setting, seed=seed)) for seed in range(REHEARSALS)]


def helpful(path: Path, epsilon: float) -> tuple[str, ...]:
    """Return the parts that helped, at most one of them a kind of smoothing."""
    rows = load_record(path)["parts"]
    means = {
        name: np.mean([row["accuracy"] for row in rows[f"{epsilon} {name}"]["found"]])
        for name in PARTS
        if f"{epsilon} {name}" in rows
    }
    gains = {name: mean - means["none"] for name, mean in means.items()}
    smoothed = [name for name in gains if "smoothing" in PARTS[name]]
    worse = sorted(smoothed, key=lambda name: gains[name])[:-1]
    return tuple(name for name, gain in gains.items() if gain > HELPS and name not in worse)


def final(path: Path, task: Task, epsilon: float, names: tuple[str, ...] | None, seed: int) -> Any:
    """Train on private images with the parts that helped, or with given ones."""
    names = helpful(path, epsilon) if names is None else names
    changed, setting = apply(task, first(path, epsilon), names)
    return {"parts": names, **run(changed, replace(setting, seed=seed))}


def main() -> None:
    """Rehearse and train what is not in the record yet."""
    args = _record.arguments(__doc__, "cnn_best")
    task = mnist(args)
    size = len(task.data.private[1])
    few = 1 if args.smoke else None
    settings: dict[str, Any] = {}
    for e, b, t, r in product(EPSILONS[:few], BATCHES[:few], EPOCHS[:few], RATES[:few]):
        setting = Setting(batch=b, epochs=1 if args.smoke else t, learning_rate=r)
        changed, setting = apply(task, least_noise(e, size, setting), ())
        settings[f"{e} {b}, {t} epochs, {r:g}"] = partial(rehearse, changed, setting)
    parts = {
        f"{e} {name}": partial(part, args.output, task, e, name)
        for e, name in product(EPSILONS[:few], list(PARTS)[: 2 if args.smoke else None])
    }
    finals = {
        f"{e} {title} seed {seed}": partial(final, args.output, task, e, names, seed)
        for title, names in (("best", None), ("without parts", ()))
        for seed, e in product(range(1 if args.smoke else SEEDS), EPSILONS[:few])
    }
    _record.measure(args.output, {"settings": settings, "parts": parts, "final": finals})


if __name__ == "__main__":
    main()
