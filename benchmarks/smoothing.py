"""What smoothing costs: every method from 10³ to 10⁸ entries, beside noise, in trees and in steps.

Every result is written as soon as it is there; a run that was interrupted goes on. It runs
unchanged on any device, and names it.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lsdp as lsdp
from benchmarks import _noises, _peers, _timing
from benchmarks.zoo import ZOO, Model

PRIMES = {3: 1_009, 4: 10_007, 5: 100_003, 6: 1_000_003, 7: 10_000_019, 8: 100_000_007}
SMOOTHINGS = (0.1, 1.0, 10.0, 1000.0)
METHODS = ("auto", "recursive", "banded", "fft")
SLOW = 1.0  # a method whose first call takes longer (seconds) is not called again


def sizes(decades: range) -> dict[int, str]:
    """Return a power of two, a power of ten and a prime for each decade."""
    found = {}
    for decade in decades:
        found[1 << (10**decade).bit_length()] = "power of two"
        found[10**decade] = "round"
        found[PRIMES[decade]] = "prime"
    return found


def measure(ways: dict[str, Callable[[], Any]], seconds: float, fed: int = 0) -> dict[str, Any]:
    """Compile every function, then time all of them in turn for about `seconds`.

    A way makes a function and its arguments. The first `fed` of these are given away, as training
    does with gradients, parameters and states, and are next what the function returned.
    """
    runs, rows = {}, {}
    for name, make in ways.items():
        try:
            function, *arguments = make()
            donated = tuple(range(fed))
            run = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
        except ValueError as error:  # this method does not support this size and σ
            rows[name] = {"error": str(error)}
            continue
        memory = run.memory_analysis()
        rows[name] = {"temp_bytes": memory.temp_size_in_bytes if memory else None}
        runs[name] = _again(run, arguments, fed)
    first = {name: _first_call(run) for name, run in runs.items()}
    quick = {name: run for name, run in runs.items() if first[name] < SLOW}
    once = sum(first[name] for name in quick)
    rounds = int(min(200, max(21 if once < SLOW else 7, seconds / once)))
    times = {name: 1e3 * first[name] for name in runs} | _timing.medians(quick, rounds)
    for name, milliseconds in times.items():
        rows[name]["milliseconds"] = milliseconds
    return rows


def _again(run: Callable[..., Any], arguments: list[Any], fed: int) -> Callable[[], Any]:
    """Return a function that feeds its results back as its first arguments."""
    given, rest = jax.tree.map(jnp.copy, arguments[:fed]), arguments[fed:]

    def call() -> Any:
        results = run(*given, *rest)
        given[:] = results[:fed]
        return results

    return call


def _first_call(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def stage(tx: optax.GradientTransformation, updates: Any) -> tuple[Any, ...]:
    """Return a transform's update and its arguments."""
    return tx.update, updates, tx.init(updates)


def methods(size: int, smoothing: float, seconds: float) -> dict[str, Any]:
    """Measure every method on a vector, and the noise for it."""
    vector = jnp.ones(size)

    def smooth(method: Any) -> tuple[Any, ...]:
        return stage(lsdp.laplacian_smooth(smoothing, method=method), vector)

    ways: dict[str, Any] = {name: partial(smooth, name) for name in METHODS}
    ways["noise"] = lambda: stage(lsdp.add_gaussian_noise(1.0, key=jax.random.key(0)), vector)
    return measure(ways, seconds, fed=2)


def trees(total: int, counts: tuple[int, ...], seconds: float) -> dict[str, Any]:
    """Measure `privatize` with the same number of entries in one leaf and in several."""

    def private(count: int) -> tuple[Any, ...]:
        tx = lsdp.privatize(
            optax.sgd(0.1),
            clip_norm=1.0,
            noise_multiplier=1.0,
            expected_batch_size=1,
            smoothing=1.0,
            key=jax.random.key(0),
        )
        params = {f"{i:05}": jnp.ones(total // count) for i in range(count)}
        clipped = lsdp.clipped_grad(_linear, clip_norm=1.0)(params, jnp.ones(1))
        return tx.update, clipped, tx.init(params), params

    return measure({str(count): partial(private, count) for count in counts}, seconds)


def _linear(params: Any, example: jax.Array) -> jax.Array:
    return example * sum(leaf.sum() for leaf in jax.tree.leaves(params))


def steps(model: Model, seconds: float) -> dict[str, Any]:
    """Measure whole steps: not private, private, and private with smoothing."""
    size = len(jax.tree.leaves(model.batch)[0])
    private: Any = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": size}
    private["key"] = jax.random.key(0)
    clipped = lsdp.clipped_grad(model.loss, clip_norm=1.0)

    def step(grad: Any, tx: optax.GradientTransformation) -> tuple[Any, ...]:
        def run(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(grad(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return run, model.params, tx.init(model.params), model.batch

    ways = {
        "SGD": partial(step, _peers.mean_gradient(model), optax.sgd(0.1)),
        "DP-SGD": partial(step, clipped, lsdp.dp_sgd(0.1, **private)),
        "DP-LSSGD": partial(step, clipped, lsdp.dp_lssgd(0.1, **private)),
    }
    return {"batch": size, "ways": measure(ways, seconds, fed=2)}


def main() -> None:
    """Measure everything that has no record yet."""
    args = _timing.arguments(__doc__, "smoothing.json")
    seconds = 0.1 if args.smoke else 3.0
    decades, names = (range(3, 5), list(ZOO)[:1]) if args.smoke else (range(3, 9), list(ZOO))
    work: dict[str, dict[str, Callable[[], Any]]] = {"methods": {}, "noises": {}}
    for size, kind in sizes(decades).items():
        for smoothing in SMOOTHINGS if size <= 10**7 else SMOOTHINGS[1:3]:
            label = f"{size} {smoothing:g} {kind}"
            work["methods"][label] = partial(methods, size, smoothing, seconds)
    for size in (10**4,) if args.smoke else (10**6, 10**7):
        work["noises"][str(size)] = partial(measure, _noises.ways(size), seconds)
    total = 10**4 if args.smoke else 10**6
    work["trees"] = {str(total): partial(trees, total, (1, 10, 100), seconds)}
    work["steps"] = {name: partial(steps, ZOO[name](None), 3 * seconds) for name in names}
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
