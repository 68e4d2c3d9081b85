"""What correlated noise is worth: softmax regression with correlated and independent noise.

All runs take 500 steps with batches of 2 % of the data, which are ten epochs. The step size falls
linearly to zero. Independent noise has Poisson batches. Banded noise has cyclic Poisson batches.
Noise whose matrix has a banded inverse has one fixed order, without amplification. Runs of 60
full batches and independent noise stand beside: they read the data six times as often. Each kind of
noise has its own step size at each ε, with smoothing and without. A search on public examples
chooses it.
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks._timing import load_record
from benchmarks.paper import _features, _record, _search
from benchmarks.paper._stacked import Recipe, Runs, train
from benchmarks.paper.records import FIRST_SEED, Features, Problem, pixels
from optax_lsdp.accounting import CorrelatedGaussian, calibrate_scale
from optax_lsdp.correlation import Correlation, Workload, banded_inverse, optimize_banded
from optax_lsdp.smoothing import Grid

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
STEPS, PART, FULL_STEPS = 500, 50, 60  # a batch is one of 50 parts of the data
CLIP_NORM = 10.0
STEP_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
FULL_STEP_SIZES = (8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
SMOOTHINGS = (0.0, 1.0)
WEAK_SMOOTHINGS = (0.3,)  # for the small grids of scattering coefficients
SMOOTHED = ", smoothed"  # ends the names of the problems that have these
SEEDS = 5
HARDEST, LARGE_EPSILONS = "CIFAR-10, scattering", (4.0, 8.0)  # trained with all step sizes as well


class Noise(NamedTuple):
    """A kind of noise, and the batches that its analysis allows."""

    bands: int = 1
    is_inverse: bool = False
    is_full: bool = False

    def steps(self, smoke: bool) -> int:
        """Return the number of steps."""
        return 10 if smoke else FULL_STEPS if self.is_full else STEPS

    @property
    def step_sizes(self) -> tuple[float, ...]:
        """The step sizes that the search tries."""
        return FULL_STEP_SIZES if self.is_full else STEP_SIZES


NOISES = {
    "independent": Noise(),
    "4 bands": Noise(4),
    "16 bands": Noise(16),
    "inverse of 8 bands": Noise(8, is_inverse=True),
    "independent, full batches": Noise(is_full=True),
}
SMOKE = ("4 bands",)


def adult(args: argparse.Namespace) -> _record.Split:
    """Return Adult: (n, d, 1, 1)."""
    return _record.Split(*((x[:, :, None, None], y) for x, y in _record.adult(args)))


def problems(smoke: bool) -> dict[str, Problem]:
    """Return the data of all problems, and their σ; other settings are not used."""
    data: dict[str, tuple[Callable[[argparse.Namespace], _record.Split], tuple[float, ...]]] = {
        "MNIST, pixels": (pixels, SMOOTHINGS),
        "Adult": (adult, SMOOTHINGS),
        "CIFAR-10, scattering": (_features.cifar10, (0.0,)),
        "MNIST, scattering": (_features.mnist, (0.0,)),
        f"CIFAR-10, scattering{SMOOTHED}": (_features.cifar10, WEAK_SMOOTHINGS),
        f"MNIST, scattering{SMOOTHED}": (_features.mnist, WEAK_SMOOTHINGS),
    }
    if smoke:
        data = {"digits": (_features.digits, SMOOTHINGS)}
    return {
        name: Problem(read, (), (), (), (), smoothings) for name, (read, smoothings) in data.items()
    }


@cache
def correlation(noise: Noise, steps: int) -> Correlation:
    """Return the matrix that is best for step sizes that fall linearly."""
    workload = Workload(learning_rates=tuple(1 - step / steps for step in range(steps)))
    if noise.is_inverse:
        return banded_inverse(steps, noise.bands, min_separation=PART, workload=workload)
    return optimize_banded(steps, noise.bands, workload=workload)


@cache
def multiplier(noise: Noise, steps: int, epsilon: float) -> float:
    """Return a noise multiplier that suffices, even after rounding to float32."""
    if noise.is_full:
        return _search.noise(epsilon, steps)
    matrix = correlation(noise, steps)

    def phase(z: float) -> Any:
        if noise.is_inverse:
            how: Any = {"min_separation": PART, "neighbouring": "zero_out"}
        else:
            how = {"sampling_rate": 1 / PART}
        return CorrelatedGaussian(z, matrix, **how).dominating

    return (1 + 1e-6) * calibrate_scale(phase, epsilon=epsilon, delta=_record.DELTA)


def spread(noise: Noise, steps: int, epsilon: float, size: int) -> float:
    """Return the noise in the parameters: a root mean square over all steps, for step size 1.

    It counts a step of full batches as often as all runs have the same sum of step sizes.
    """
    workload = Workload(learning_rates=tuple(1 - step / steps for step in range(steps)))
    batch, scale = (size, STEPS / steps) if noise.is_full else (size // PART, 1.0)
    errors = correlation(noise, steps).squared_errors(workload)
    return float(multiplier(noise, steps, epsilon) * scale * errors.mean() ** 0.5 / batch)


def optimizer(
    noise: Noise, shape: tuple[int, ...], run: Runs, key: jax.Array, recipe: Recipe
) -> optax.GradientTransformation:
    """Return noise, smoothing and SGD."""

    def layout(path: str, leaf: tuple[int, ...]) -> Any:
        rest = leaf[0] // (shape[0] * shape[1])
        return None if len(leaf) == 1 else Grid((0, 1), (*shape[:2], rest, leaf[1]))

    matrix = correlation(noise, recipe.steps)
    return optax.chain(
        lsdp.add_gaussian_noise(lambda step: run.noise_multiplier, key=key)
        if noise.bands == 1
        else lsdp.add_correlated_noise(run.noise_multiplier, matrix, key=key),
        optax.scale(1 / recipe.batch),
        lsdp.laplacian_smooth(lambda step: run.smoothing, layout=layout),
        optax.sgd(lambda step: run.step_size * (1 - step / recipe.steps)),
    )


def choose(noise: Noise, size: int, seed: int, step: jax.Array) -> Any:
    """Return the indices and the mask of a batch."""
    if noise.is_inverse:  # the examples were shuffled when they were cut
        batch = size // PART
        return (step % PART) * batch + jnp.arange(batch), jnp.ones(batch, bool)
    with jax.ensure_compile_time_eval():  # samplers want to see their key
        key = jax.random.fold_in(jax.random.key(seed), 1)
        sampler = lsdp.CyclicPoissonSampler(size, 1 / PART, cycle=noise.bands, key=key)
    return sampler.batch(step)


def recipe(noise: Noise, shape: tuple[int, ...], size: int, smoke: bool) -> Recipe:
    """Return the program for a number of examples."""
    steps = noise.steps(smoke)
    chooser = None if noise.is_full else partial(choose, noise, size)
    batch = size if noise.is_full else size // PART
    return Recipe(steps, batch, partial(optimizer, noise, shape), chooser)


def search(features: Features, noise: Noise, epsilons: tuple[float, ...]) -> Any:
    """Return the accuracy of all settings on a fifth of the public examples."""
    data, shape = features.read
    smoke = features.args.smoke
    x, y = data.public
    cut = len(y) // 5
    size = len(y) - cut
    program = recipe(noise, shape, size, smoke)
    smoothings = features.problem.smoothings
    grid = np.array(list(product(epsilons, smoothings, noise.step_sizes)))
    scale = size / len(data.private[1])
    scaled = [scale * multiplier(noise, program.steps, epsilon) for epsilon in grid[:, 0]]
    runs = Runs(scaled, np.full(len(grid), CLIP_NORM), grid[:, 2], grid[:, 1])
    parts = (x[cut:], y[cut:]), (x[:cut], y[:cut])
    found = train(program, *parts, runs, [FIRST_SEED], classes=data.classes)
    names = ("epsilon", "smoothing", "step_size", "accuracy")
    rows = zip(grid.tolist(), _record.rounded(found[0, :, -1]), strict=True)
    return [dict(zip(names, (*row, accuracy), strict=True)) for row, accuracy in rows]


def final(path: Path, features: Features, part: str, name: str, noise: Noise, seeds: int) -> Any:
    """Train the best setting for each ε and σ on private examples."""
    rows = load_record(path)[part][name]["found"]
    kinds = dict.fromkeys((row["epsilon"], row["smoothing"]) for row in rows)
    chosen = [
        _search.best([r for r in rows if (r["epsilon"], r["smoothing"]) == kind]) for kind in kinds
    ]
    data, shape = features.read
    size = len(data.private[1])
    program = recipe(noise, shape, size, features.args.smoke)
    numbers = [multiplier(noise, program.steps, row["epsilon"]) for row in chosen]
    steps, smoothings = ([row[x] for row in chosen] for x in ("step_size", "smoothing"))
    runs = Runs(numbers, np.full(len(chosen), CLIP_NORM), steps, smoothings)
    found = train(program, data.private, data.test, runs, range(seeds), classes=data.classes)
    return [
        {
            **row,
            "noise_multiplier": z,
            "spread": spread(noise, program.steps, row["epsilon"], size),
            "test_accuracies": _record.rounded(accuracies),
        }
        for row, z, accuracies in zip(chosen, numbers, found[:, :, -1].T, strict=True)
    ]


def at_all_step_sizes(features: Features, noise: Noise, seeds: int) -> Any:
    """Train with all step sizes on private examples, to see what the choice of one matters."""
    data, shape = features.read
    size = len(data.private[1])
    program = recipe(noise, shape, size, features.args.smoke)
    grid = np.array(list(product(LARGE_EPSILONS, noise.step_sizes)))
    numbers = [multiplier(noise, program.steps, epsilon) for epsilon in grid[:, 0]]
    full = np.full(len(grid), CLIP_NORM)
    runs = Runs(numbers, full, grid[:, 1], 0 * full)
    found = train(program, data.private, data.test, runs, range(seeds), classes=data.classes)
    return [
        {"epsilon": epsilon, "step_size": step_size, "test_accuracies": _record.rounded(accuracies)}
        for (epsilon, step_size), accuracies in zip(grid.tolist(), found[:, :, -1].T, strict=True)
    ]


def main() -> None:
    """Search and train everything that has no record yet."""
    args = _record.arguments(__doc__, "correlated")
    epsilons, seeds = ((8.0,), 2) if args.smoke else (EPSILONS, SEEDS)
    work: dict[str, dict[str, Any]] = {}
    every: dict[str, Any] = {}
    for name, problem in problems(args.smoke).items():
        features, part = Features(problem, args), f"search, {name}"
        searched, trained = work.setdefault(part, {}), work.setdefault(f"final, {name}", {})
        for title in SMOKE if args.smoke else NOISES:
            noise = NOISES[title]
            searched[title] = partial(search, features, noise, epsilons)
            trained[title] = partial(final, args.output, features, part, title, noise, seeds)
        if name == HARDEST:
            every = {
                title: partial(at_all_step_sizes, features, NOISES[title], 3)
                for title in ("independent", "16 bands")
            }
    if not args.smoke:
        work[f"all step sizes, {HARDEST}"] = every
    _record.measure(args.output, work)


if __name__ == "__main__":
    main()
