"""Time whole private steps on the zoo, with free estimates and without.

A step clips, adds noise, smooths with σ = 1 and updates by SGD. It estimates nothing, or the
distribution of norms from 16 slack coordinates, or a training curve. A training curve probes the
optimizer in every eighth step, so steps that probe ("probe") and steps between probes ("between")
are timed apart. A run pays (probe + 7·between)/8 per step on average. Every round calls all steps
in turn. Results are written model by model, and an interrupted run continues.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import optax

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks.zoo import ZOO, Model

WAYS: dict[str, dict[str, int]] = {
    "plain": {},
    "norms": {"slack": 16},
    "probe": {"watch_steps": 1000},
    "between": {"watch_steps": 1000},
}
PERIOD = 8  # steps from one probe to the next


def make_step(model: Model, options: dict[str, int], taken: int) -> Callable[[], Any]:
    """Return a function that takes one step, always from the state after `taken` steps."""
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

    params, state = model.params, private.init(model.params)
    for _ in range(taken):
        params, state = step(params, state, model.batch)
    return partial(step, params, state, model.batch)


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way."""
    model = ZOO[name](None)
    taken = {"between": PERIOD + 1}
    steps = {
        way: make_step(model, options, taken.get(way, PERIOD)) for way, options in WAYS.items()
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
