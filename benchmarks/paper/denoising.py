"""The paper's illustration: a noisy sine and a noisy product of sines, smoothed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_lsdp as lsdp
from benchmarks.paper import _record

PLACE = 2 * np.pi * np.arange(1, 101) / 100


def lines() -> dict[str, np.ndarray]:
    """Return a sine: exact, noisy and smoothed."""
    signal = np.sin(PLACE)
    noisy = signal + 0.1 * np.random.default_rng(0).normal(size=100)
    return {"signal": signal, "noisy": noisy, "σ = 10": smooth(noisy, 10.0, "stored")}


def planes() -> dict[str, np.ndarray]:
    """Return a product of sines: exact, noisy, and smoothed in three ways, the paper's first."""
    signal = np.outer(np.sin(PLACE), np.sin(PLACE))
    noisy = signal + 0.2 * np.random.default_rng(1).normal(size=(100, 100))
    return {
        "signal": signal,
        "noisy": noisy,
        "row by row, σ = 100": smooth(noisy, 100.0, "stored"),
        "row by row, σ = 10": smooth(noisy, 10.0, "stored"),
        "on the grid, σ = 10": smooth(noisy, 10.0, lambda path, shape: lsdp.Grid((0, 1))),
    }


def smooth(v: np.ndarray, smoothing: float, layout: Any) -> np.ndarray:
    """Smooth an array with `laplacian_smooth`."""
    tx = lsdp.laplacian_smooth(smoothing, layout=layout)
    return np.asarray(jax.jit(tx.update)(jnp.asarray(v, jnp.float32), tx.init(None))[0])


def errors(make: Callable[[], dict[str, np.ndarray]]) -> dict[str, float]:
    """Return the root mean squared error of each."""
    found = make()
    return {name: float(np.sqrt(np.mean((v - found["signal"]) ** 2))) for name, v in found.items()}


def main() -> None:
    """Compute everything that has no record yet."""
    args = _record.arguments(__doc__, "denoising")
    work = {make.__name__: partial(errors, make) for make in (lines, planes)}
    _record.measure(args.output, {"errors": work})


if __name__ == "__main__":
    main()
