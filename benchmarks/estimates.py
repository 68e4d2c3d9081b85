"""Time whole private steps on the zoo, with free estimates and without.

A step clips, adds noise, smooths with σ = 1 and updates by SGD. It estimates nothing, or the
distribution of norms from 16 slack coordinates, or a training curve. A training curve probes the
optimizer in every eighth step, so steps that probe ("probe") and steps between probes ("between")
are timed apart. A run pays (probe + 7·between)/8 per step on average. Every round calls all steps
in turn. The time of a short step also depends on where its arrays happen to lie, so short steps are
compiled and timed three times, and the median counts. Results are written model by model, and an
interrupted run continues. All models take about fifteen minutes on a quiet machine.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import jax
import optax

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks.zoo import ZOO, Model

PERIOD = 8  # steps from one probe to the next
SHORT = 20  # milliseconds


def make_steps(model: Model, taken: tuple[int, ...], **options: int) -> list[Callable[[], Any]]:
    """Return functions that take one step, always from the states after `taken` steps."""
    private = lsdp.privatize(
        optax.sgd(0.1),
        clip_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=len(jax.tree.leaves(model.batch)[0]),
        smoothing=1.0,
        key=jax.random.key(0),
        **options,
    )
    slack = options.get("slack")
    gradient = lsdp.clipped_grad(model.loss, clip_norm=1.0, slack=slack)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = private.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params, state, found = model.params, private.init(model.params), []
    for number in range(max(taken) + 1):
        if number in taken:
            found.append(partial(step, params, state, model.batch))
        params, state = step(params, state, model.batch)
    return found


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way."""
    found = [measure_once(name, rounds)]
    if found[0]["plain"] < SHORT:
        found += [measure_once(name, rounds) for _ in range(2)]
    return {way: median([row[way] for row in found]) for way in found[0]}


def measure_once(name: str, rounds: int) -> dict[str, float]:
    """Compile the steps, and return the median milliseconds of each way."""
    model = ZOO[name](None)
    probe, between = make_steps(model, (PERIOD, PERIOD + 1), watch_steps=1000)
    steps = {
        "plain": make_steps(model, (PERIOD,))[0],
        "norms": make_steps(model, (PERIOD,), slack=16)[0],
        "probe": probe,
        "between": between,
    }
    once = _timing.medians(steps, 1)["plain"]
    return _timing.medians(steps, max(3, min(rounds, int(3000 / once))))


def main() -> None:
    """Measure every model that has no record yet."""
    options = _timing.arguments(__doc__ or "", "estimates.json")
    names = list(ZOO)[:1] if options.smoke else list(ZOO)
    rounds = 3 if options.smoke else 100
    work = {"milliseconds": {name: partial(measure, name, rounds) for name in names}}
    _timing.measure_missing(options.output, work)


if __name__ == "__main__":
    main()
