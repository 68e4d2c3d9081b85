"""What correlated noise costs in a step and gains in error, beside JAX Privacy's.

`python -m benchmarks.correlated_noise` times one step of every way of adding noise, in interleaved
rounds, and computes the errors of the strategies. Each result is written at once, and a run that
was interrupted goes on.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.linalg import toeplitz as dense_toeplitz

import optax_lsdp as lsdp
from benchmarks import _banded, _timing, smoothing
from optax_lsdp import correlation

STEPS, BANDS = 2000, 8
INVERSE_BANDS = (2, 4)
SETTINGS = ((100, 8), (500, 16), (2000, 8), (2000, 32))  # steps and bands
Transforms = dict[str, Callable[[], optax.GradientTransformation]]


def transforms(steps: int, bands: int) -> Transforms:
    """Return every way of adding noise to a vector. Both libraries have the same strategies."""
    from jax_privacy import noise_addition
    from jax_privacy.matrix_factorization import toeplitz

    key = jax.random.key(0)
    theirs = partial(noise_addition.matrix_factorization_privatizer, stddev=1.0, prng_key=key)
    banded = correlation.optimize_banded(steps, bands)
    coefficients = jnp.asarray(banded.coefficients, jnp.float32)
    ways: Transforms = {
        "independent": lambda: lsdp.add_gaussian_noise(1.0, key=key),
        "independent, JAX Privacy": lambda: noise_addition.gaussian_privatizer(
            stddev=1.0, prng_key=key
        ),
        f"{bands} bands": lambda: lsdp.add_correlated_noise(1.0, banded, key=key),
        f"{bands} bands, JAX Privacy": lambda: theirs(
            toeplitz.inverse_as_streaming_matrix(coefficients)
        ),
    }
    for count in INVERSE_BANDS:
        inverse = correlation.banded_inverse(steps, count)
        row = dense_toeplitz(inverse.noise_column(), np.zeros(steps)).astype(np.float32)
        name = f"inverse of {count} bands"
        ways[name] = partial(lsdp.add_correlated_noise, 1.0, inverse, key=key)
        ways[f"{name}, JAX Privacy"] = partial(theirs, jnp.asarray(row))
    return ways


def step(size: int, steps: int, bands: int, seconds: float) -> dict[str, Any]:
    """Measure one step of every way on a vector: time, temporary memory, and past noises."""
    vector, ways = jnp.zeros(size), transforms(steps, bands)
    made = {name: partial(_stage, make, vector) for name, make in ways.items()}
    rows = smoothing.measure(made, seconds, fed=2)
    for name, make in ways.items():
        rows[name]["past_bytes"] = past_bytes(make(), vector.shape)
    return rows


def past_bytes(tx: optax.GradientTransformation, shape: tuple[int, ...]) -> int:
    """Return the memory of the past noises in the state for one float32 leaf."""
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    state = jax.tree.leaves(jax.eval_shape(tx.init, leaf))
    past = [x for x in state if x.size >= leaf.size]  # neither key nor step
    return sum(x.size * x.dtype.itemsize for x in past)


def _stage(make: Callable[[], optax.GradientTransformation], vector: jax.Array) -> tuple[Any, ...]:
    return smoothing.stage(make(), vector)


def errors(steps: int, bands: int) -> dict[str, Any]:
    """Return the squared errors of strategies with as many bands, and the bound on all of them."""
    from jax_privacy.matrix_factorization import toeplitz

    def optimized_by_them() -> correlation.Correlation:
        found = np.float64(toeplitz.optimize_banded_toeplitz(steps, bands))
        return correlation.Correlation(steps, tuple(found / np.linalg.norm(found)))

    ways = {
        "optimize_banded": partial(correlation.optimize_banded, steps, bands),
        "JAX Privacy, optimize_banded_toeplitz": optimized_by_them,
        "square_root": partial(correlation.square_root, steps, bands),
        "banded_inverse": partial(correlation.banded_inverse, steps, bands),
        "independent": partial(correlation.independent, steps),
    }
    rows: dict[str, Any] = {}
    for name, make in ways.items():
        start = time.perf_counter()
        squared = make().squared_errors()
        seconds = round(time.perf_counter() - start, 3)
        rows[name] = {"mean": squared.mean(), "max": squared.max(), "seconds": seconds}
    return {"least": correlation.least_error(steps), "ways": rows}


def best(steps: int, bands: int) -> dict[str, float]:
    """Return the mean squared errors of `optimize_banded` and of the best banded matrix."""
    toeplitz = correlation.optimize_banded(steps, bands).squared_errors().mean()
    return {"optimize_banded": toeplitz, **_banded.best(steps, bands)._asdict()}


def main() -> None:
    """Measure everything that has no record yet."""
    args = _timing.arguments(__doc__, "correlated_noise.json")
    size, steps, bands, seconds = (10**7, STEPS, BANDS, 60.0)
    widths, settings = (8, 32), SETTINGS
    if args.smoke:
        size, steps, bands, seconds, widths = 10**3, 30, 3, 0.01, (3,)
        settings = ((30, 3),)
    work = {
        "steps": {str(size): partial(step, size, steps, bands, seconds)},
        "errors": {f"{steps} {width}": partial(errors, steps, width) for width in widths},
        "best": {f"{steps} {bands}": partial(best, steps, bands) for steps, bands in settings},
    }
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
