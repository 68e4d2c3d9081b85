"""The effect of σ, learning rate and layout on the CNN at noise multiplier 10.

The record of `cnn` has σ = 0 and 1 too, and a test checks that both records agree.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._timing import load_record
from benchmarks.paper import _record
from benchmarks.paper._networks import Setting, run
from benchmarks.paper._tasks import Task, mnist

SMOOTHINGS = (0.0, 0.5, 1.0, 2.0, 3.0)
LAYOUT_SEEDS = (1, 2)  # not the seed that chose σ
LEARNING_RATES = (0.05, 0.3, 0.6)  # ours, beside the paper's 0.15


def by_layout(path: Path, task: Task, setting: Setting) -> Any:
    """Train with a layout, at the best σ on the validation images."""
    rows = [row["found"] for s, row in load_record(path)["smoothing"].items() if s != "0"]
    best = max(rows, key=lambda row: row["validation_accuracies"][-1])
    return run(task, replace(setting, smoothing=best["smoothing"]))


def main() -> None:
    """Train everything that has no record yet."""
    args = _record.arguments(__doc__, "cnn_effects")
    task = mnist(args)
    usual = Setting(epochs=1 if args.smoke else 15)
    few = 1 if args.smoke else None
    rates = {
        f"{name} {rate:g}": partial(
            run, task, replace(usual, smoothing=smoothing, learning_rate=rate)
        )
        for rate in LEARNING_RATES[:few]
        for name, smoothing in (("sgd", 0.0), ("lssgd", 1.0))
    }
    _record.measure(
        args.output,
        {
            "smoothing": {
                f"{s:g}": partial(run, task, replace(usual, smoothing=s))
                for s in SMOOTHINGS[: 2 * few if few else None]
            },
            "learning rate": rates,
            "layout": {
                f"{layout} seed {seed}": partial(
                    by_layout, args.output, task, replace(usual, layout=layout, seed=seed)
                )
                for layout, seed in product(("inputs", "stored", "grid"), LAYOUT_SEEDS[:few])
            },
        },
    )


if __name__ == "__main__":
    main()
