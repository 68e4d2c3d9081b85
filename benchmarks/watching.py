"""Compare training curves with the true work: `python -m benchmarks.watching --data-dir PATH`.

The true work of a step is ½⟨Δ, ḡ(w) + ḡ(w + Δ)⟩, where ḡ is the mean of all clipped gradients. It
is private, so a run cannot show it; this script computes it from the whole dataset. It then counts
how often the true work lies within two standard errors of the curve that `lsdp.watch` records.

Each result is written as soon as it is known, and a run that was interrupted continues. To measure
again, delete the record.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lsdp as lsdp
from benchmarks import _data, _timing
from benchmarks._results import RESULTS

Data = tuple[jax.Array, jax.Array]
STEPS = 60
EPSILONS = (0.5, 0.1, 0.02)  # of full batches of the whole of MNIST
SIZE, RATE, EPSILON = 5_000, 0.05, 1.0  # of many smaller runs
HIDDEN = 32  # units of the network on digits, on which no rule of `lsdp.watch` was tuned
OPTIMIZERS = {
    "SGD": lambda: optax.sgd(1.0),
    "momentum": lambda: optax.sgd(0.2, momentum=0.9),
    "Adam": lambda: optax.adam(0.01),
}


def loss(params: dict[str, jax.Array], example: Data) -> jax.Array:
    """Return the cross entropy of softmax regression, or of a network with one hidden layer."""
    features, label = example
    if "hidden" in params:
        features = jnp.tanh(features @ params["hidden"])
    logits = features @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def make_params(features: jax.Array, hidden: int) -> dict[str, jax.Array]:
    """Return zeros, and a random hidden layer if `hidden` is not 0."""
    width = features.shape[1]
    params = {"kernel": jnp.zeros((hidden or width, 10)), "bias": jnp.zeros(10)}
    if hidden:
        draw = jax.random.normal(jax.random.key(1), (width, hidden))
        params["hidden"] = draw / jnp.sqrt(width)
    return params


def make_data(name: str, folder: Path | None, size: int | None) -> Data:
    """Return the first examples of a dataset, each as one row."""
    if name == "digits":
        images, answers = load_digits(return_X_y=True)
        return jnp.asarray(images[:size] / 16, jnp.float32), jnp.asarray(answers[:size])
    features, labels = getattr(_data, name)(folder).train
    return jnp.asarray(features[:size].reshape(len(labels[:size]), -1)), jnp.asarray(labels[:size])


def make_plan(size: int, rate: float, steps: int, epsilon: float) -> lsdp.PrivacyPlan:
    """Return a plan with full batches if the rate is 1, and Poisson batches otherwise."""
    return lsdp.PrivacyPlan(
        dataset_size=size,
        expected_batch_size=round(rate * size),
        steps=steps,
        epsilon=epsilon,
        delta=1e-5,
        sampling="full" if rate == 1 else "poisson",
    )


def make_run(
    plan: lsdp.PrivacyPlan, data: Data, optimizer: optax.GradientTransformation, hidden: int
) -> Callable[[jax.Array], tuple[jax.Array, optax.OptState]]:
    """Return a compiled function: key → the true work, and the final optimizer state."""
    features, labels = data
    rate = plan.expected_batch_size / plan.dataset_size
    initial = make_params(features, hidden)
    clipped = plan.clipped_grad(loss)
    everyone = lsdp.clipped_grad(loss, clip_norm=plan.clip_norm)

    def flat(tree: Any) -> jax.Array:
        return jnp.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(tree)])

    @jax.jit
    def run(key: jax.Array) -> tuple[jax.Array, optax.OptState]:
        noise_key, batch_key = jax.random.split(key)
        tx = plan.optimizer(optimizer, noise_key, watch=True)

        def step(carry: Any, index: jax.Array) -> Any:
            params, state, last = carry
            mean = flat(everyone(params, data)) / plan.dataset_size
            done = 0.5 * jnp.vdot(flat(params) - last[0], last[1] + mean)
            chosen = jax.random.fold_in(batch_key, index)
            mask = jax.random.uniform(chosen, labels.shape) < rate
            updates, state = tx.update(clipped(params, data, mask), state, params)
            return (optax.apply_updates(params, updates), state, (flat(params), mean)), done

        nothing = flat(initial), jnp.zeros_like(flat(initial))
        first = initial, tx.init(initial), nothing
        (_, state, _), works = jax.lax.scan(step, first, jnp.arange(plan.steps))
        return jnp.cumsum(works), state

    return run


def compare(
    plan: lsdp.PrivacyPlan, data: Data, optimizer: str, seeds: int, hidden: int = 0
) -> dict[str, Any]:
    """Train with each seed, and compare the curves with the truth."""
    start, covered, ends = time.perf_counter(), [], []
    run = make_run(plan, data, OPTIMIZERS[optimizer](), hidden)
    for seed in range(seeds):
        truth, state = run(jax.random.key(seed))
        curve = lsdp.training_curve(state)
        errors = np.abs(curve.work - np.asarray(truth))
        covered.append(np.mean(errors[1:] <= 2 * curve.stderr[1:]))
        ends.append([float(x[-1]) for x in (truth, curve.work, curve.stderr)])
    return {
        "epsilon": plan.epsilon,
        "expected_batch_size": plan.expected_batch_size,
        "noise_multiplier": round(plan.noise_multiplier, 4),
        "covered": round(float(np.mean(covered)), 4),
        "ends": [[round(x, 5) for x in end] for end in ends],  # truth, curve, standard error
        "seconds": round(time.perf_counter() - start, 1),
    }


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="a folder that holds mnist/ and adult/")
    parser.add_argument("--output", type=Path, default=RESULTS / "watching.json")
    parser.add_argument("--smoke", action="store_true", help="seconds instead of minutes")
    return parser.parse_args()


def main() -> None:
    """Compare all curves that the record does not have yet."""
    args = parse()
    size, small, steps, few, many, epsilons = None, SIZE, STEPS, 3, 10, EPSILONS
    if args.smoke:
        size, small, steps, few, many, epsilons = 100, 100, 3, 1, 1, EPSILONS[:1]

    def whole(epsilon: float) -> dict[str, Any]:
        data = make_data("mnist", args.data_dir, size)
        return compare(make_plan(len(data[1]), 1.0, steps, epsilon), data, "SGD", few)

    def part(name: str, optimizer: str, rate: float) -> dict[str, Any]:
        data = make_data(name, args.data_dir, small)
        plan = make_plan(len(data[1]), rate, steps, EPSILON)
        return compare(plan, data, optimizer, many, HIDDEN if name == "digits" else 0)

    work = {
        "full batches of MNIST": {f"ε = {x:g}": partial(whole, x) for x in epsilons},
        "coverage": {
            f"{name}, {optimizer}, {'full' if rate == 1 else 'Poisson'}": partial(
                part, name, optimizer, rate
            )
            for name in ("mnist", "adult", "digits")
            for optimizer in OPTIMIZERS
            for rate in (1.0, RATE)
        },
    }
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
