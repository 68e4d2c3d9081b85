"""A tournament of denoisers on softmax regression: smoothing, filters in time, and simple rivals.

Every method gets twelve trials on public examples at each ε, which choose its step size and, for
fixed smoothing, σ. Then five seeds train on private examples; they draw the same noise for all
methods. Batches are full, and step sizes fall linearly to zero. A part of the private examples is
used, with the noise that the mean of all of them would have.

Beside the tournament, three methods train with four step sizes, to see what smoothing does where
the step size was not chosen for it.
"""

import argparse
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from scipy.signal import butter

import optax_lsdp as lsdp
from benchmarks._timing import load_record
from benchmarks.paper import _features, _record, _search
from benchmarks.paper._stacked import Recipe, Runs, train
from benchmarks.paper.correlated import adult
from benchmarks.paper.records import FIRST_SEED, Features, pixels
from optax_lsdp.filters import denoised
from optax_lsdp.smoothing import Grid

EPSILONS = (0.1, 0.3, 1.0, 3.0)
CLIP_NORM, STEPS, SEEDS, TRIALS = 10.0, 60, 5, 12
SMOOTHINGS = (1.0, 3.0, 10.0)
FIRST_RATES = {"sgd": 1.0, "adam": 1 / 256}  # the largest, as multiples of the problem's


class Method(NamedTuple):
    """A way to denoise, and an optimizer.

    Attributes:
        space: "none", "fixed" (σ is tuned) or "auto".
        has_filter: whether a low-pass filter follows.
        optimizer: "sgd", "momentum", "adam" or "debiased".
        average: the decay of an average of the parameters, or None.
    """

    space: str = "none"
    has_filter: bool = False
    optimizer: str = "sgd"
    average: float | None = None

    def trials(self, largest: float) -> list[tuple[float, float]]:
        """Return twelve pairs of step size and σ."""
        adaptive = self.optimizer in ("adam", "debiased")
        largest *= FIRST_RATES["adam" if adaptive else "sgd"]
        if self.space != "fixed":
            return [(largest * 2 ** (-k / 2), 0.0) for k in range(TRIALS)]
        rates = [largest * 2 ** (-3 * k / 2) for k in range(TRIALS // len(SMOOTHINGS))]
        return list(product(rates, SMOOTHINGS))


METHODS = {
    "none": Method(),
    "momentum": Method(optimizer="momentum"),
    "averaging": Method(average=0.9),
    "low-pass": Method(has_filter=True),
    "Adam": Method(optimizer="adam"),
    "debiased Adam": Method(optimizer="debiased"),
    "Laplacian": Method("fixed"),
    "auto": Method("auto"),
    "Laplacian, momentum": Method("fixed", optimizer="momentum"),
    "auto, momentum": Method("auto", optimizer="momentum"),
    "Laplacian, low-pass": Method("fixed", has_filter=True),
    "Laplacian, debiased Adam": Method("fixed", optimizer="debiased"),
}
AT_ALL_RATES = ("none", "auto", "Laplacian")


class Problem(NamedTuple):
    """Features, and how many of them are used.

    Attributes:
        data: returns features (n, rows, columns, …).
        private: how many private examples are used.
        public: how many public examples train in the search; the others judge.
        largest: the largest step size.
        epsilons: the budgets.
        has_all_rates: whether some methods train with all step sizes as well.
    """

    data: Callable[[argparse.Namespace], _record.Split]
    private: int
    public: int
    largest: float
    epsilons: tuple[float, ...] = EPSILONS
    has_all_rates: bool = False


PROBLEMS = {
    "MNIST, pixels": Problem(pixels, 5_000, 4_000, 64.0, has_all_rates=True),
    "Adult": Problem(adult, 26_561, 3_000, 64.0, has_all_rates=True),
    "MNIST, scattering": Problem(_features.mnist, 5_000, 4_000, 512.0),
    "CIFAR-10, scattering": Problem(_features.cifar10, 5_000, 4_000, 512.0),
}
SMOKE = {"digits": Problem(_features.digits, 500, 200, 16.0, (0.3,), True)}


def optimizer(
    method: Method, shape: tuple[int, ...], run: Runs, key: jax.Array, recipe: Recipe
) -> optax.GradientTransformation:
    """Return noise, denoisers and an optimizer."""

    def grid(path: str, leaf: tuple[int, ...]) -> Any:
        rest = leaf[0] // (shape[0] * shape[1])
        return None if len(leaf) == 1 else Grid((0, 1), (*shape[:2], rest, leaf[1]))

    def inputs(path: str, leaf: tuple[int, ...]) -> Any:
        return None if len(leaf) == 1 else "inputs"

    def rate(step: jax.Array) -> jax.Array:
        return run.step_size * (1 - step / recipe.steps)

    def slow_rate(step: jax.Array) -> jax.Array:
        return rate(step) / 10

    stages: list[optax.GradientTransformation] = []
    if method.space == "fixed":
        stages.append(lsdp.laplacian_smooth(lambda step: run.smoothing, layout=grid))
    if method.has_filter:
        stages.append(lsdp.low_pass(*butter(1, 0.1)))
    ends = {
        "sgd": lambda: optax.sgd(rate),
        "momentum": lambda: optax.sgd(slow_rate, momentum=0.9),
        "adam": lambda: optax.adam(rate),
        "debiased": lambda: optax.chain(
            lsdp.scale_by_debiased_adam(), optax.scale_by_learning_rate(rate)
        ),
    }
    last = denoised(stages, ends[method.optimizer]())
    stddev = run.noise_multiplier / recipe.batch
    if method.space == "auto":
        last = lsdp.auto_smooth(last, stddev=lambda step: stddev, layouts=(inputs, grid))
    return optax.chain(
        lsdp.add_gaussian_noise(lambda step: run.noise_multiplier, key=key),
        optax.scale(1 / recipe.batch),
        last,
    )


def trained(
    features: Features,
    method: Method,
    part: str,
    rows: list[dict[str, Any]],
    seeds: tuple[int, ...],
) -> np.ndarray:
    """Return the accuracies of all rows, (seeds, rows), on public or private examples."""
    data, shape = features.read
    problem = features.problem
    steps = 5 if features.args.smoke else STEPS
    if part == "public":
        (x, y), cut = data.public, problem.public
        parts = (x[:cut], y[:cut]), (x[cut:], y[cut:])
    else:
        x, y = data.private
        parts = (x[: problem.private], y[: problem.private]), data.test
    size = len(parts[0][1])
    scale = size / len(data.private[1])
    noises = [scale * _search.noise(row["epsilon"], steps) for row in rows]
    rates, smoothings = ([row[name] for row in rows] for name in ("step_size", "smoothing"))
    runs = Runs(noises, np.full(len(rows), CLIP_NORM), rates, smoothings)
    program = Recipe(steps, size, partial(optimizer, method, shape), average=method.average)
    return train(program, *parts, runs, seeds, classes=data.classes)[:, :, -1]


def trials(features: Features, method: Method) -> list[dict[str, Any]]:
    """Return all trials at all ε."""
    problem = features.problem
    pairs = product(problem.epsilons, method.trials(problem.largest))
    return [{"epsilon": e, "step_size": rate, "smoothing": s} for e, (rate, s) in pairs]


def search(features: Features, method: Method) -> Any:
    """Return the accuracies of all trials on public examples."""
    rows = trials(features, method)
    found = trained(features, method, "public", rows, (FIRST_SEED,))
    accuracies = _record.rounded(found[0])
    return [{**row, "accuracy": a} for row, a in zip(rows, accuracies, strict=True)]


def final(
    path: Path, features: Features, part: str, name: str, method: Method, seeds: tuple[int, ...]
) -> Any:
    """Train the best trial at each ε on private examples."""
    rows = load_record(path)[part][name]["found"]
    problem = features.problem
    chosen = [_search.best([r for r in rows if r["epsilon"] == e]) for e in problem.epsilons]
    found = _record.rounded(trained(features, method, "private", chosen, seeds).T)
    return [{**row, "test_accuracies": a} for row, a in zip(chosen, found, strict=True)]


def at_all_rates(features: Features, method: Method, seeds: tuple[int, ...]) -> Any:
    """Train with four of the step sizes on private examples, and with all σ if they are fixed."""
    problem = features.problem
    rates = [problem.largest / 4**k for k in range(4)]
    smoothings = SMOOTHINGS if method.space == "fixed" else (0.0,)
    every = product(problem.epsilons, rates, smoothings)
    rows = [{"epsilon": e, "step_size": rate, "smoothing": s} for e, rate, s in every]
    found = _record.rounded(trained(features, method, "private", rows, seeds).T)
    return [{**row, "test_accuracies": a} for row, a in zip(rows, found, strict=True)]


def main() -> None:
    """Search and train everything that has no record yet."""
    args = _record.arguments(__doc__, "tournament")
    names = ("Laplacian, debiased Adam",) if args.smoke else tuple(METHODS)
    seeds = tuple(range(2 if args.smoke else SEEDS))
    work: dict[str, dict[str, Any]] = {}
    for title, problem in (SMOKE if args.smoke else PROBLEMS).items():
        features = Features(problem, args)
        part = f"search, {title}"
        searched, finals = work.setdefault(part, {}), work.setdefault(f"final, {title}", {})
        for name in names:
            method = METHODS[name]
            searched[name] = partial(search, features, method)
            finals[name] = partial(final, args.output, features, part, name, method, seeds)
        if problem.has_all_rates:
            work[f"all rates, {title}"] = {
                name: partial(at_all_rates, features, METHODS[name], seeds)
                for name in (("auto",) if args.smoke else AT_ALL_RATES)
            }
    _record.measure(args.output, work)


if __name__ == "__main__":
    main()
