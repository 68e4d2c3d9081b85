"""Time whole private steps on the zoo, with smoothing="auto" and with σ = 1.

A step clips, adds noise, smooths and updates by SGD. With "auto", σ and layouts are chosen anew
after steps that the rule names, and these steps ("choosing") cost more than others ("between").
Both are timed apart, from a state in which σ = 1 is chosen for every leaf, because a leaf that is
left alone would cost less. The table shows the mean over a run of 1,000 steps. Every round calls
all steps in turn. Results are written model by model, and an interrupted run continues.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lsdp as lsdp
from benchmarks import _timing
from benchmarks.zoo import ZOO, Model

MODELS = ("MLP", "MNIST CNN")
STEPS = 1000  # of the run whose mean step is reported
TAKEN = {"choosing": 9, "between": 8}  # how many steps were taken before the step that is timed


def chooses(step: int) -> bool:
    """Return whether "auto" chooses after this step: 1 to 8, 10, 12, 14, 16, 20 and so on."""
    return step % (1 << max(step.bit_length() - 3, 0)) == 0


def mean_milliseconds(row: dict[str, float]) -> float:
    """Return the mean time of a step with "auto" over a run of `STEPS` steps."""
    share = sum(map(chooses, range(1, STEPS + 1))) / STEPS
    return share * row["choosing"] + (1 - share) * row["between"]


def smooth_all(state: Any) -> Any:
    """Return the state of a run in which "auto" has chosen σ = 1 for every leaf."""

    def smooth(node: Any) -> Any:
        if not hasattr(node, "choice"):
            return node
        ones = jax.tree.map(jnp.ones_like, node.choice)
        return node._replace(choice=ones)  # the first layout, which is that of the fixed σ

    return jax.tree.map(smooth, state, is_leaf=lambda node: hasattr(node, "choice"))


def make_steps(model: Model, smoothing: Any, taken: list[int]) -> list[Callable[[], Any]]:
    """Return functions that take one step, always from the states after `taken` steps."""
    private = lsdp.privatize(
        optax.sgd(0.1),
        clip_norm=1.0,
        noise_multiplier=1.0,
        expected_batch_size=len(jax.tree.leaves(model.batch)[0]),
        smoothing=smoothing,
        key=jax.random.key(0),
    )
    gradient = lsdp.clipped_grad(model.loss, clip_norm=1.0)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        updates, state = private.update(gradient(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    states = [(model.params, private.init(model.params))]
    for _ in range(max(taken)):
        states.append(step(*states[-1], model.batch))
    return [
        partial(step, params, smooth_all(state), model.batch)
        for params, state in (states[count] for count in taken)
    ]


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each way."""
    model = ZOO[name](None)
    [fixed] = make_steps(model, 1.0, [TAKEN["between"]])
    auto = make_steps(model, "auto", list(TAKEN.values()))
    steps = {"fixed": fixed, **dict(zip(TAKEN, auto, strict=True))}
    once = _timing.medians(steps, 1)["fixed"]
    return _timing.medians(steps, max(3, min(rounds, int(8000 / once))))


def main() -> None:
    """Measure every model that has no record yet."""
    options = _timing.arguments(__doc__ or "", "auto_smoothing.json")
    names = ("softmax regression",) if options.smoke else MODELS
    rounds = 3 if options.smoke else 300
    work = {"milliseconds": {name: partial(measure, name, rounds) for name in names}}
    _timing.measure_missing(options.output, work)


if __name__ == "__main__":
    main()
