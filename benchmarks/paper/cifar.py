"""CIFAR-10 by TensorFlow's tutorial CNN: four private optimizers at noise multiplier 2, C = 3."""

from dataclasses import replace
from functools import partial
from itertools import product

from benchmarks.paper import _record
from benchmarks.paper._networks import run
from benchmarks.paper._tasks import cifar10
from benchmarks.paper.cnn import NAMES, named

EPOCHS, SEEDS = 5, 2


def main() -> None:
    """Train everything that has no record yet."""
    args = _record.arguments(__doc__, "cifar")
    task = cifar10(args)
    epochs, seeds = (1, 1) if args.smoke else (EPOCHS, SEEDS)
    names = ("sgd",) if args.smoke else tuple(NAMES)
    runs = {
        f"{name} seed {seed}": partial(
            run, task, replace(named(name, 2.0), clip_norm=3.0, epochs=epochs, seed=seed)
        )
        for seed, name in product(range(seeds), names)
    }
    _record.measure(args.output, {"runs": runs})


if __name__ == "__main__":
    main()
