"""Accuracy against ε: four private optimizers, with learning rate and σ chosen on public images.

Each run takes ten epochs of batches of 1,024. One more run uses the paper's settings with so little
noise and so large a clip norm that it is ordinary training.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._timing import load_record
from benchmarks.paper import _record
from benchmarks.paper._networks import Setting, rehearse, run
from benchmarks.paper._tasks import Task, mnist
from benchmarks.paper.cnn import NAMES
from optax_lsdp import PrivacyPlan

EPSILONS = (0.2, 0.4, 1.0)
LEARNING_RATES = {"sgd": (0.15, 0.5, 1.5, 4.5), "adam": (0.0005, 0.002, 0.008, 0.032)}
SMOOTHINGS = (0.2, 1.0)
SEEDS, REHEARSALS = 3, (100, 101)  # each rehearsal holds out another fifth of the public images


def least_noise(epsilon: float, size: int, setting: Setting) -> Setting:
    """Return a setting with the smallest noise that ε allows for a number of examples."""
    plan = PrivacyPlan(
        dataset_size=size,
        expected_batch_size=min(setting.batch, size),
        epochs=setting.epochs,
        epsilon=epsilon,
        delta=_record.DELTA,
    )
    return replace(setting, noise_multiplier=plan.noise_multiplier)


def chosen(path: Path, task: Task, name: str, usual: Setting, seeds: int) -> Any:
    """Train the best setting on public images."""
    rows = [
        row["found"]
        for key, row in load_record(path)["rehearsal"].items()
        if key.startswith(f"{name}, ")
    ]
    best = max(rows, key=lambda row: row["accuracy"])
    fields = {key: best[key] for key in ("optimizer", "smoothing", "learning_rate")}
    fields["noise_multiplier"] = best["noise_multiplier"]
    return [run(task, replace(usual, **fields, seed=seed)) for seed in range(seeds)]


def main() -> None:
    """Rehearse and train everything that has no record yet."""
    args = _record.arguments(__doc__, "cnn_budgets")
    task = mnist(args)
    size = len(task.data.private[1])
    epochs, few, seeds = (1, 1, 1) if args.smoke else (10, None, SEEDS)
    usual = Setting(epochs=epochs, batch=1024)
    rehearsals, finals = {}, {}
    names = list(NAMES.items())[:few]
    for epsilon, (name, (optimizer, is_smoothed)) in product(EPSILONS[:few], names):
        finals[f"{epsilon} {name}"] = partial(
            chosen, args.output, task, f"{epsilon} {name}", usual, seeds
        )
        smoothings = SMOOTHINGS[:few] if is_smoothed else (0.0,)
        for rate, smoothing in product(LEARNING_RATES[optimizer][:few], smoothings):
            setting = replace(usual, optimizer=optimizer, learning_rate=rate, smoothing=smoothing)
            rehearsals[f"{epsilon} {name}, {rate:g}, σ = {smoothing:g}"] = partial(
                rehearse, task, least_noise(epsilon, size, setting), REHEARSALS[:few]
            )
    without = replace(usual, batch=256, noise_multiplier=1e-3, clip_norm=10.0, sampling="shuffled")
    _record.measure(
        args.output,
        {
            "rehearsal": rehearsals,
            "final": finals,
            "without privacy": {"sgd": partial(run, task, without)},
        },
    )


if __name__ == "__main__":
    main()
