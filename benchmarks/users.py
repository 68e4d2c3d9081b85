"""Compare two ways to protect people with many examples, and count what users cost.

Both ways promise the same (ε, δ) to a person. "User level" averages up to m examples of each person
in every step, chosen afresh, and clips the average. "Group privacy" keeps at most m examples of
each person for the whole run, clips each example, and accounts for groups of m examples. All
batches are full. Accuracies are those of the best of some step sizes, and nothing accounts for this
choice.

- MNIST, at 14 × 14 pixels: 1,000 writers with 1 to 64 images each. A writer has their own position,
  brightness and preferred digits. The test images come from other writers.
- Adult: a person stands for all rows of the same age and occupation. Such cells are unbalanced, and
  their rows are alike, as the examples of one person are.

`--speed` also measures the time of a gradient with m = 16, relative to the same number of examples
without users. It needs a quiet machine. Each result is written as soon as it is known, and a run
that was interrupted continues. To measure again, delete the record.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks import _data, _timing
from benchmarks._results import RESULTS
from benchmarks.zoo import ZOO
from optax_lsdp.training import UserBatch, UserData, average_examples

Examples = tuple[np.ndarray, np.ndarray]  # features (n, d) and labels (n,)
Level = Literal["user level", "group privacy"]
LEVELS: tuple[Level, ...] = ("user level", "group privacy")
MOST = (1, 2, 4, 8, 16, 32, 64)  # examples of one person
STEP_SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # at the first step; they fall linearly to zero
SEEDS, STEPS = 5, 30
EPSILONS, DELTA, CLIP_NORM = (3.0, 1.0), 1e-5, 1.0
WRITERS, SLOTS = 1000, 16
MODELS = ("softmax regression", "MLP", "MNIST CNN", "encoder")


class People(NamedTuple):
    """Examples that belong to people, and examples to test with."""

    train: Examples
    owners: np.ndarray
    test: Examples


def write_like(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    """Return images by one writer: moved by up to one pixel, and of another brightness."""
    moved = np.roll(images, rng.integers(-1, 2, 2), axis=(1, 2)) * rng.uniform(0.4, 1.0)
    return moved.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4)).reshape(-1, 196).astype(np.float32)


def mnist(folder: Path | None) -> People:
    """Return images by writers. How many images a writer has is log-uniform from 1 to 64."""
    data, rng = _data.mnist(folder), np.random.default_rng(0)

    def pixels(images: np.ndarray) -> np.ndarray:  # from 0 to 1
        return (images[..., 0] * 0.3081 + 0.1307).clip(0, 1)

    (images, labels), (test, test_labels) = data
    by_digit = [list(rng.permutation(np.flatnonzero(labels == digit))) for digit in range(10)]
    features, rows, owners = [], [], []
    for writer in range(WRITERS):
        size = int(64 ** rng.uniform())
        digits = rng.choice(10, size, p=rng.dirichlet(np.ones(10)))
        own = [by_digit[digit].pop() for digit in digits]
        features.append(write_like(rng, pixels(images[own])))
        rows += own
        owners += [writer] * size
    others = [write_like(rng, part) for part in np.split(pixels(test), 1000)]
    return People(
        (np.concatenate(features), labels[rows]),
        np.array(owners),
        (np.concatenate(others), test_labels),
    )


def adult(folder: Path | None) -> People:
    """Return the rows of Adult. A person is a pair of an age and an occupation."""
    data = _data.adult(folder)
    return People(data.train, _data.adult_columns(folder, (0, 6)), data.test)


def invented() -> People:
    """Return random examples, for a smoke run."""
    rng = np.random.default_rng(0)
    examples = rng.normal(size=(40, 3)).astype(np.float32), np.arange(40) % 2
    return People(examples, np.arange(40) % 7, examples)


def loss(params: Any, example: Examples) -> jax.Array:
    """Return the cross entropy of one example."""
    logits = example[0] @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])


def kept(people: People, most: int) -> Examples:
    """Return at most `most` examples of each person, for a whole run."""
    order = np.random.default_rng(1).permutation(len(people.owners))
    _, inverse, counts = np.unique(people.owners[order], return_inverse=True, return_counts=True)
    by_owner = np.argsort(inverse, kind="stable")
    places = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = order[by_owner[places < most]]
    return people.train[0][rows], people.train[1][rows]


def compare(
    load: Callable[[], People], level: Level, epsilon: float, most: int, steps: int
) -> dict[str, Any]:
    """Train all step sizes and seeds, and return the test accuracies."""
    people = load()
    users = UserData(people.train, people.owners, max_examples=most)
    examples = kept(people, most)
    is_user = level == "user level"
    size = len(users) if is_user else len(examples[1])
    plan = lsdp.PrivacyPlan(
        dataset_size=size,
        expected_batch_size=size,
        steps=steps,
        epsilon=epsilon,
        delta=DELTA,
        clip_norm=CLIP_NORM,
        sampling="full",
        unit="user" if is_user else "example",
        group_size=1 if is_user else most,
    )
    gradient = plan.clipped_grad(average_examples(loss) if is_user else loss)
    falling = optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, steps))

    def make(step_size: float, seed: int) -> optax.GradientTransformation:
        sgd = optax.inject_hyperparams(optax.sgd)(step_size)  # the state holds the step size
        return plan.optimizer(optax.chain(sgd, falling), jax.random.key(seed))  # a public key

    update = make(1.0, 0).update

    @jax.jit
    def step(runs: Any, batch: Any) -> Any:
        def one(run: Any) -> Any:
            params, state = run
            updates, state = update(gradient(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return jax.lax.map(one, runs)

    shape = people.test[0].shape[1], int(people.test[1].max()) + 1
    params = {"kernel": jnp.zeros(shape), "bias": jnp.zeros(shape[1])}
    starts = [
        (params, make(size, seed).init(params)) for size in STEP_SIZES for seed in range(SEEDS)
    ]
    runs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *starts)
    batch: Any = jax.device_put(examples)
    sampler = plan.sampler(jax.random.key(0))
    for number in range(steps):
        if is_user:
            batch = users.batch(sampler.batch(number), number, key=jax.random.key(0))
        runs = step(runs, batch)
    logits = people.test[0] @ runs[0]["kernel"] + runs[0]["bias"][:, None]
    accuracies = 100 * np.mean(np.argmax(logits, axis=-1) == people.test[1], axis=1)
    by_size = (
        np.round(np.asarray(accuracies, np.float64), 2).reshape(len(STEP_SIZES), SEEDS).tolist()
    )
    return {
        "people": len(users),
        "examples": len(people.owners if is_user else examples[1]),
        "noise_multiplier": round(plan.noise_multiplier, 4),
        "accuracies": {f"{x:g}": found for x, found in zip(STEP_SIZES, by_size, strict=True)},
    }


def gradients(name: str) -> dict[str, Callable[[], Any]]:
    """Return clipped gradients of a model of the zoo, with and without users, compiled."""
    model = ZOO[name](None)
    count = len(jax.tree.leaves(model.batch)[0]) // SLOTS
    slots = jax.tree.map(lambda x: x.reshape(count, SLOTS, *x.shape[1:]), model.batch)
    users = UserBatch(slots, jnp.ones((count, SLOTS), bool), jnp.arange(count))
    ways = {
        "examples": (model.loss, model.batch, jnp.ones(count * SLOTS, bool)),
        "users": (average_examples(model.loss), users, jnp.ones(count, bool)),
    }
    found = {}
    for way, (function, batch, mask) in ways.items():
        clip = jax.jit(lsdp.clipped_grad(function, clip_norm=CLIP_NORM))
        compiled = clip.lower(model.params, batch, mask).compile()
        found[way] = partial(compiled, model.params, batch, mask)
    return found


def count_operations(name: str) -> dict[str, float]:
    """Return XLA's count of floating-point operations, with and without users."""
    ways = gradients(name)
    return {way: float(ways[way].func.cost_analysis()["flops"]) for way in ways}


def main() -> None:
    """Run everything that the record does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="a folder that holds mnist/ and adult/")
    parser.add_argument("--output", type=Path, default=RESULTS / "users.json", help="a JSON file")
    parser.add_argument("--smoke", action="store_true", help="random data, in seconds")
    parser.add_argument("--speed", action="store_true", help="also measure times")
    args = parser.parse_args()
    most, steps, models, rounds = MOST, STEPS, MODELS, 30
    if args.smoke:
        most, steps, models, rounds = (1, 2), 2, MODELS[:1], 1
    data: dict[str, Callable[[], People]] = {"invented": invented}
    if not args.smoke:
        data = {"MNIST": partial(mnist, args.data_dir), "Adult": partial(adult, args.data_dir)}
    work: dict[str, dict[str, Callable[[], Any]]] = {
        f"{name}, ε = {epsilon:g}, {level}": {
            str(m): partial(compare, load, level, epsilon, m, steps) for m in most
        }
        for epsilon in EPSILONS
        for name, load in data.items()
        for level in LEVELS
    }
    work["operations"] = {name: partial(count_operations, name) for name in models}
    if args.speed:
        work["milliseconds"] = {
            name: lambda name=name: _timing.medians(gradients(name), rounds) for name in models
        }
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
