"""MNIST by the paper's CNN: four private optimizers at four levels of noise, and sixty epochs."""

from dataclasses import replace
from functools import partial
from itertools import product

from benchmarks.paper import _record
from benchmarks.paper._networks import Setting, run
from benchmarks.paper._tasks import mnist

SMOOTHINGS = {10.0: 1.0, 8.0: 1.0, 5.0: 1.0, 2.0: 0.2}  # the paper's, by noise multiplier
NAMES = {"sgd": ("sgd", False), "lssgd": ("sgd", True), "adam": ("adam", False)}
NAMES["lsadam"] = ("adam", True)


def named(name: str, noise_multiplier: float) -> Setting:
    """Return the paper's setting of one of its four optimizers."""
    optimizer, is_smoothed = NAMES[name]
    smoothing = SMOOTHINGS[noise_multiplier] if is_smoothed else 0.0
    return Setting(optimizer, smoothing=smoothing, noise_multiplier=noise_multiplier)


def main() -> None:
    """Train everything that has no record yet."""
    args = _record.arguments(__doc__, "cnn")
    task = mnist(args)
    few, many, seeds = (1, 2, 1) if args.smoke else (15, 60, 3)
    noises = (10.0,) if args.smoke else tuple(SMOOTHINGS)
    names = ("sgd", "lsadam") if args.smoke else tuple(NAMES)
    settings = {
        f"{name} {z:g} seed {seed}": replace(named(name, z), epochs=few, seed=seed)
        for seed, z, name in product(range(seeds), noises, names)
        if seed == 0 or z == 10
    }
    longest = names[:1] if args.smoke else names
    long = {name: replace(named(name, 10.0), epochs=many) for name in longest}
    if not args.smoke:  # the order in which TensorFlow stores a tensor
        for name in ("lssgd", "lsadam"):
            long[f"{name}, stored"] = replace(long[name], layout="stored")
    work = {
        part: {name: partial(run, task, setting) for name, setting in runs.items()}
        for part, runs in (("noise", settings), ("long", long))
    }
    _record.measure(args.output, work)


if __name__ == "__main__":
    main()
