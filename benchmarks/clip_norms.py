"""Measure what adaptive clip norms are worth: final accuracy against the initial clip norm.

Softmax regression (full batches) and the paper's network (Poisson batches) are trained on a part of
MNIST at two ε, the network on images of half the height and width. The methods are those of
`AdaptiveClip`: "slack", "quantile" and "fixed". Automatic clipping stands beside them, without a
clip norm to choose. Each method has one learning rate per problem and ε, which a search on another
seed chooses; for "fixed", the search chooses the best clip norm as well. Then five seeds train from
0.01 to 100 times the best fixed clip norm.

The search sees the test images. The study compares methods; it is no claim about an accuracy.

Each result is written as soon as it is known, and a run that was interrupted continues. To measure
again, delete the record.
"""

import argparse
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optax_lsdp as lsdp
from benchmarks import _data, _timing
from benchmarks._results import RESULTS
from benchmarks.paper._tasks import Softmax
from benchmarks.zoo import MnistCNN, conv_by_blocks, max_pool_by_slices

EPSILONS, DELTA = (0.5, 3.0), 1e-5
METHODS = ("slack", "quantile", "fixed", "automatic")
STARTS = (0.01, 0.1, 1.0, 10.0, 100.0)  # initial clip norms, in units of the best fixed one
SEEDS, SEARCH_SEED = 5, 100
Row = dict[str, Any]


class Problem(NamedTuple):
    """A model, its data, and what the search tries.

    Attributes:
        model: returns the logits of one image.
        private: images and labels to train on.
        test: images and labels to test on.
        batch: the expected batch size; as large as the data for full batches.
        steps: how many steps are taken.
        clip_norms: those that the search tries for "fixed".
        paces: learning rates times clip norm, for "fixed" and "automatic".
        rates: learning rates of adaptive methods.
    """

    model: nn.Module
    private: tuple[Any, Any]
    test: tuple[Any, Any]
    batch: int
    steps: int
    clip_norms: tuple[float, ...]
    paces: tuple[float, ...]
    rates: tuple[float, ...]

    def plan(self, epsilon: float) -> lsdp.PrivacyPlan:
        """Return the plan, whose clip norm is not used."""
        return lsdp.PrivacyPlan(
            dataset_size=len(self.private[1]),
            expected_batch_size=self.batch,
            steps=self.steps,
            epsilon=epsilon,
            delta=DELTA,
            sampling="full" if self.batch == len(self.private[1]) else "poisson",
        )


@cache
def problems(folder: Path | None, smoke: bool) -> dict[str, Problem]:
    """Return both problems; tiny ones on scikit-learn's digits for a smoke run."""
    if smoke:
        images, labels = load_digits(return_X_y=True)
        images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)
        cut = (images[:200], labels[:200]), (images[200:300], labels[200:300])
        return {"softmax regression": Problem(Softmax(), *cut, 200, 3, (1.0,), (1.0,), (1.0,))}
    data = _data.mnist(folder)
    (images, labels), (tests, answers) = data.train, data.test
    images, tests = (x * 0.3081 + 0.1307 for x in (images, tests))  # pixels between 0 and 1
    cut = (images[:10_000], labels[:10_000]), (tests[:5000], answers[:5000])
    network = MnistCNN(max_pool_by_slices, conv_by_blocks)
    halves = tuple((_half(x), y) for x, y in cut)
    return {
        "softmax regression": Problem(
            Softmax(),
            *cut,
            batch=10_000,
            steps=50,
            clip_norms=(0.3, 1.0, 3.0, 10.0),
            paces=(2.0, 4.0, 8.0, 16.0),
            rates=(0.7, 1.4, 2.8, 5.6),
        ),
        "network": Problem(
            network,
            *halves,
            batch=256,
            steps=160,
            clip_norms=(0.3, 1.0, 3.0, 10.0),
            paces=(0.5, 1.0, 2.0, 4.0),
            rates=(0.4, 0.8, 1.6, 3.2),
        ),
    }


def _half(images: np.ndarray) -> np.ndarray:
    """Return images of half the height and width: the means of blocks of 2 × 2 pixels."""
    n, height, width, channels = images.shape
    blocks = images.reshape(n, height // 2, 2, width // 2, 2, channels)
    return blocks.mean(axis=(2, 4))


@cache
def trainer(problem: str, folder: Path | None, smoke: bool, method: str) -> Callable[..., Row]:
    """Return a compiled function: (z, initial clip norm, learning rate, seed) → results.

    One program serves all initial clip norms C: it clips gradients of loss/C to norms that begin at
    1, and multiplies the learning rate by C.
    """
    chosen = problems(folder, smoke)[problem]
    plan = chosen.plan(EPSILONS[0])  # for its sampler, whose room is about the same for both ε
    private, test = jax.tree.map(jnp.asarray, (chosen.private, chosen.test))
    is_automatic = method == "automatic"
    clip = 1.0 if is_automatic else lsdp.AdaptiveClip(1.0, method=method)

    def loss(params: Any, example: Any) -> jax.Array:
        image, label, scale = example
        logits = chosen.model.apply(params, image)
        return optax.softmax_cross_entropy_with_integer_labels(logits, label) / scale

    style = "automatic" if is_automatic else "threshold"
    gradient = lsdp.clipped_grad(loss, clip_norm=clip, clip_style=style)

    def train(private: Any, test: Any, noise: Any, initial: Any, rate: Any, seed: Any) -> Row:
        key = jax.random.key(seed)
        sampler = plan.sampler(key)
        params = chosen.model.init(key, private[0][0])
        tx = lsdp.privatize(
            optax.sgd(rate * initial),
            clip_norm=clip,
            noise_multiplier=noise,
            expected_batch_size=chosen.batch,
            key=jax.random.fold_in(key, 1),
        )
        state = tx.init(params)

        def step(carry: Any, index: jax.Array) -> tuple[Any, Any]:
            params, state = carry
            batch = sampler.batch(index)
            images, labels = jax.tree.map(lambda x: x[batch.indices], private)
            examples = images, labels, jnp.full(len(labels), initial)
            now = {} if is_automatic else {"clip_norm": lsdp.current_clip_norm(state)}
            total = gradient(params, examples, batch.mask, **now)
            updates, state = tx.update(total, state, params)
            norms = [initial * jnp.asarray(norm) for norm in now.values()]
            return (optax.apply_updates(params, updates), state), norms

        (params, state), norms = jax.lax.scan(step, (params, state), jnp.arange(chosen.steps))
        logits = jax.vmap(partial(chosen.model.apply, params))(test[0])
        accuracy = jnp.mean(jnp.argmax(logits, axis=1) == test[1])
        return {"accuracy": accuracy, "clip_norms": norms[0] if norms else jnp.zeros(0)}

    return partial(jax.jit(train), private, test)


def run(
    folder: Path | None,
    smoke: bool,
    problem: str,
    method: str,
    epsilon: float,
    initial: float,
    rate: float,
    seeds: tuple[int, ...],
) -> Row:
    """Train once per seed; return accuracies in percent, and the first seed's clip norms."""
    begin = time.perf_counter()
    train = trainer(problem, folder, smoke, method)
    z = problems(folder, smoke)[problem].plan(epsilon).noise_multiplier
    found = [jax.device_get(train(z, initial, rate, seed)) for seed in seeds]
    return {
        "initial": initial,
        "rate": rate,
        "accuracies": [round(100 * float(one["accuracy"]), 2) for one in found],
        "clip_norms": [float(f"{x:.4g}") for x in found[0]["clip_norms"]],
        "seconds": round(time.perf_counter() - begin, 1),
    }


def best(path: Path, part: str, problem: str, method: str, epsilon: float) -> Row:
    """Return the row of the search with the highest accuracy."""
    rows = _timing.load_record(path)[part]
    start = f"{problem}, {method}, ε = {epsilon:g}, "
    return max((rows[x] for x in rows if x.startswith(start)), key=lambda row: row["accuracies"])


def final(
    path: Path,
    folder: Path | None,
    smoke: bool,
    problem: str,
    method: str,
    epsilon: float,
    at: float,
) -> Row:
    """Train five seeds from `at` times the best fixed clip norm, with the method's best rate."""
    fixed = best(path, "search", problem, "fixed", epsilon)
    part = "search" if method in ("fixed", "automatic") else "search of adaptive rates"
    rate = best(path, part, problem, method, epsilon)["rate"]
    seeds = tuple(range(1 if smoke else SEEDS))
    row = run(folder, smoke, problem, method, epsilon, at * fixed["initial"], rate, seeds)
    return {**row, "start": at}


def search_adaptive(
    path: Path,
    folder: Path | None,
    smoke: bool,
    problem: str,
    method: str,
    epsilon: float,
    rate: float,
) -> Row:
    """Try a learning rate from the best fixed clip norm."""
    initial = best(path, "search", problem, "fixed", epsilon)["initial"]
    return run(folder, smoke, problem, method, epsilon, initial, rate, (SEARCH_SEED,))


def main() -> None:
    """Run everything that has no record yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=RESULTS / "clip_norms.json")
    parser.add_argument("--data-dir", type=Path, help="a folder that holds mnist/")
    parser.add_argument("--smoke", action="store_true", help="digits instead of MNIST, in seconds")
    names = ("softmax regression", "network")
    parser.add_argument("--problems", nargs="*", choices=names, default=names)
    args = parser.parse_args()
    given = (args.data_dir, args.smoke)
    search, adaptive, finals = {}, {}, {}
    epsilons, starts = (EPSILONS[:1], STARTS[:1]) if args.smoke else (EPSILONS, STARTS)
    chosen = {n: problem for n, problem in problems(*given).items() if n in args.problems}
    for name, problem in chosen.items():
        for epsilon in epsilons:
            for pace in problem.paces:
                for clip_norm in problem.clip_norms:
                    key = f"{name}, fixed, ε = {epsilon:g}, C = {clip_norm:g}, {pace:g}/C"
                    fixed = (name, "fixed", epsilon, clip_norm, pace / clip_norm)
                    search[key] = partial(run, *given, *fixed, (SEARCH_SEED,))
                automatic = (name, "automatic", epsilon, 1.0, pace)
                key = f"{name}, automatic, ε = {epsilon:g}, {pace:g}"
                search[key] = partial(run, *given, *automatic, (SEARCH_SEED,))
            for method in METHODS[:2]:
                for rate in problem.rates:
                    key = f"{name}, {method}, ε = {epsilon:g}, {rate:g}"
                    task = partial(search_adaptive, args.output, *given, name, method)
                    adaptive[key] = partial(task, epsilon, rate)
            for method in METHODS:
                for start in (1.0,) if method == "automatic" else starts:
                    key = f"{name}, {method}, ε = {epsilon:g}, {start:g}"
                    task = partial(final, args.output, *given, name, method, epsilon)
                    finals[key] = partial(task, start)
    work = {"search": search, "search of adaptive rates": adaptive, "final": finals}
    _timing.measure_missing(args.output, work)


if __name__ == "__main__":
    main()
