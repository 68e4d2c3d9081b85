"""The tournament of denoisers on the paper's network, and correlated noise on networks.

Every method gets eight trials on public images at each ε, which choose its step size and, for fixed
smoothing, σ. Then five seeds train on private images. They draw the same batches and, except for
correlated noise, the same noise for all methods. The step size falls linearly to zero.

On MNIST, a quarter of the private images is used, in Poisson batches of 256 on average. The noise
is that of the mean of 1,000 out of 50,000 images, so it is a quarter of what these batches would
need. On CIFAR-10, with half of these batches, steps and trials, the noise is that of the mean of
256 out of 50,000 images.
"""

import argparse
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from scipy.signal import butter

import optax_lsdp as lsdp
from benchmarks._timing import load_record
from benchmarks.paper import _networks, _record, _search
from benchmarks.paper._tasks import Task, cifar10, mnist

SEEDS, SEARCH_SEED = 5, 1000
REAL_SIZE = 50_000  # for the noise
PUBLIC = 8000  # train in the search; the other public images judge
EPSILONS = (0.1, 0.4)  # of the tournament
LARGE_EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)  # of correlated noise
LARGEST = {"sgd": 8.0, "momentum": 0.8, "adam": 0.032, "debiased": 0.016}  # step sizes


class Network(NamedTuple):
    """A network and its images, and how long it trains.

    Attributes:
        read: returns the network and the images.
        batch: the expected size of a batch.
        real_batch: the batch size that decides the noise.
        room: batches are truncated to this size; they would need to be padded otherwise.
        private: how many private images are used.
        steps: the number of steps.
        trials: how many trials each method gets.
        folder: where the images are, or None for the cache.
    """

    read: Callable[[argparse.Namespace], Task]
    batch: int
    real_batch: int
    room: int
    private: int
    steps: int
    trials: int
    folder: Path | None = None


CIFAR10_NAME = "CIFAR-10"  # begins the names of parts of the record
MNIST = Network(mnist, 256, real_batch=1000, room=288, private=12_800, steps=200, trials=8)
CIFAR10 = Network(cifar10, 128, real_batch=256, room=152, private=6_400, steps=100, trials=4)


class Method(NamedTuple):
    """A way to denoise, and an optimizer.

    Attributes:
        smoothings: the values of σ that the search tries; "auto" chooses σ itself.
        has_filter: whether a low-pass filter follows.
        optimizer: "sgd", "momentum", "adam" or "debiased".
        average: the decay of an average of the parameters, or None. The average is what is judged.
        bands: of correlated noise; 1 for independent noise.
    """

    smoothings: tuple[float | str, ...] = (0.0,)
    has_filter: bool = False
    optimizer: str = "sgd"
    average: float | None = None
    bands: int = 1

    def trials(self, number: int) -> list[tuple[float, float | str]]:
        """Return pairs of step size and σ."""
        count = number // len(self.smoothings)
        rates = [LARGEST[self.optimizer] * 2 ** (-3.5 * k / (count - 1)) for k in range(count)]
        return list(product(rates, self.smoothings))


METHODS = {
    "none": Method(),
    "Laplacian": Method((0.3, 1.0)),
    "auto": Method(("auto",)),
    "low-pass": Method(has_filter=True),
    "debiased Adam": Method(optimizer="debiased"),
    "Adam": Method(optimizer="adam"),
    "momentum": Method(optimizer="momentum"),
    "averaging": Method(average=0.98),
}
NOISES = {
    "independent": Method(),
    "independent, Laplacian": Method((0.3, 1.0)),
    "4 bands": Method(bands=4),
    "16 bands": Method(bands=16),
    "16 bands, Laplacian": Method((0.3, 1.0), bands=16),
    "4 bands, Laplacian": Method((0.3, 1.0), bands=4),
}
ON_CIFAR10 = {
    "independent": Method(),
    "16 bands": Method(bands=16),
    "independent, Laplacian": Method((0.3,)),
    "16 bands, Laplacian": Method((0.3,), bands=16),
}
Row = dict[str, Any]


def plan(network: Network, method: Method, epsilon: float, smoke: bool) -> lsdp.PrivacyPlan:
    """Return the plan of a run on all private images."""
    return lsdp.PrivacyPlan(
        dataset_size=REAL_SIZE,
        expected_batch_size=network.real_batch,
        steps=20 if smoke else network.steps,
        epsilon=epsilon,
        delta=_record.DELTA,
        correlation=None if method.bands == 1 else method.bands,
    )


def optimizer(
    network: Network,
    method: Method,
    plan: lsdp.PrivacyPlan,
    noise: Any,
    rate: Any,
    smoothing: Any,
    key: jax.Array,
) -> optax.GradientTransformationExtraArgs:
    """Return clipping, noise, denoisers and an optimizer."""

    def falling(step: jax.Array) -> jax.Array:
        return rate * (1 - step / plan.steps)

    stage: Any = "auto"
    if method.smoothings != ("auto",):
        stage = lsdp.laplacian_smooth(lambda step: smoothing, layout="images")
    low_pass = [lsdp.low_pass(*butter(1, 0.1))] if method.has_filter else []
    ends: dict[str, Callable[[], optax.GradientTransformation]] = {
        "sgd": lambda: optax.sgd(falling),
        "momentum": lambda: optax.sgd(falling, momentum=0.9),
        "adam": lambda: optax.adam(falling),
        "debiased": lambda: optax.chain(
            lsdp.scale_by_debiased_adam(), optax.scale_by_learning_rate(falling)
        ),
    }
    is_plain = method.smoothings == (0.0,)
    return lsdp.privatize(
        ends[method.optimizer](),
        clip_norm=1.0,
        noise_multiplier=noise if plan.correlation else lambda step: noise,
        expected_batch_size=network.batch,
        smoothing=low_pass if is_plain else [stage, *low_pass],
        correlation=plan.correlation,
        sampling_rate=None if plan.correlation else network.batch / network.private,
        key=key,
    )


@cache
def task(network: Network, smoke: bool) -> Task:
    """Return the network and its images; digits for a smoke run."""
    return network.read(argparse.Namespace(data_dir=network.folder, smoke=smoke))


@cache
def trainer(network: Network, smoke: bool, method: Method, size: int) -> Callable[..., Any]:
    """Return a function that trains and returns the parameters that are judged.

    Its arguments are the examples, z, the step size, σ and the seed. One program serves all trials
    and seeds of a method, except for correlated noise, whose z is static.
    """
    model = task(network, smoke).model
    used = plan(network, method, 1.0, smoke)  # its ε is not used

    def loss(params: Any, example: Any) -> jax.Array:
        logits = model.apply(params, example[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, example[1])

    gradient = lsdp.clipped_grad(loss, clip_norm=1.0)

    def chain(z: Any, rate: Any, smoothing: Any, key: jax.Array) -> Any:
        return optimizer(network, method, used, z, rate, smoothing, jax.random.fold_in(key, 1))

    def begin(z: Any, rate: Any, smoothing: Any, key: jax.Array, image: jax.Array) -> Any:
        params = model.init(key, image)
        return params, chain(z, rate, smoothing, key).init(params), params

    def step(
        z: Any,
        rate: Any,
        smoothing: Any,
        key: jax.Array,
        carry: Any,
        data: Any,
        batch: Any,
        index: jax.Array,
    ) -> Any:
        params, state, mean = carry
        total = gradient(params, jax.tree.map(lambda x: x[batch.indices], data), batch.mask)
        updates, state = chain(z, rate, smoothing, key).update(total, state, params)
        params = optax.apply_updates(params, updates)
        weight = jnp.maximum(1 - (method.average or 0.0), 1 / (index + 1))
        return params, state, optax.incremental_update(params, mean, weight)

    static = (0,) if method.bands > 1 else ()
    begin, step = (jax.jit(function, static_argnums=static) for function in (begin, step))

    def train(data: Any, z: float, rate: float, smoothing: float, seed: int) -> Any:
        run = (z, rate, smoothing, jax.random.key(seed))  # public, unlike the key of a real run
        rooms: Any = {"max_batch_size": min(network.room, size), "key": run[-1]}
        sampler: Any = lsdp.PoissonSampler(size, network.batch / size, **rooms)
        if method.bands > 1:
            rooms["cycle"] = method.bands
            sampler = lsdp.CyclicPoissonSampler(size, network.batch / size, **rooms)
        carry = begin(*run, data[0][0])
        for index in range(used.steps):
            carry = step(*run, carry, data, sampler.batch(index), index)
        return carry[2]

    return train


@cache
def noise(network: Network, method: Method, epsilon: float, smoke: bool) -> float:
    """Return z for a batch of the network, such that its mean has the noise of a real batch."""
    real = plan(network, method, epsilon, smoke).noise_multiplier
    return real * network.batch / network.real_batch


def accuracy(
    network: Network, smoke: bool, part: str, method: Method, row: Row, seed: int
) -> float:
    """Train one run on public or private images, and return its accuracy in percent."""
    model, images = task(network, smoke).model, task(network, smoke).data
    (x, y), cut, judges = images.private, network.private, images.test
    if part == "public":
        x, y = images.public
        cut = min(PUBLIC, 4 * len(y) // 5)
        judges = x[cut:], y[cut:]
    data = jax.tree.map(jnp.asarray, (x[:cut], y[:cut]))
    z = noise(network, method, row["epsilon"], smoke)
    smoothing = 0.0 if row["smoothing"] == "auto" else row["smoothing"]
    train = trainer(network, smoke, method, len(data[1]))
    return _networks.accuracy(model, train(data, z, row["step_size"], smoothing, seed), judges)


def search(
    network: Network, smoke: bool, method: Method, epsilon: float, rate: float, smoothing: Any
) -> Row:
    """Return the accuracy of one trial on public images."""
    row = {"epsilon": epsilon, "step_size": rate, "smoothing": smoothing}
    found = accuracy(network, smoke, "public", method, row, SEARCH_SEED)
    return {**row, "accuracy": round(found, 4)}


def final(
    path: Path, network: Network, smoke: bool, name: str, method: Method, epsilon: float
) -> Row:
    """Train the best trial on private images."""
    rows = [row["found"] for row in load_record(path)[f"search, {name}"].values()]
    chosen = _search.best([row for row in rows if row["epsilon"] == epsilon])
    run = partial(accuracy, network, smoke, "private", method, chosen)
    found = [round(run(seed), 4) for seed in range(1 if smoke else SEEDS)]
    return {**chosen, "test_accuracies": found}


def main() -> None:
    """Search and train everything that has no record yet."""
    args = _record.arguments(__doc__, "cnn_tournament")
    smoke, work = args.smoke, dict[str, dict[str, Any]]()
    entries = [(MNIST, name, method, EPSILONS) for name, method in METHODS.items()]
    entries += [(MNIST, name, method, LARGE_EPSILONS) for name, method in NOISES.items()]
    for name, method in ON_CIFAR10.items():
        entries.append((CIFAR10, f"{CIFAR10_NAME}, {name}", method, LARGE_EPSILONS))
    if smoke:
        entries = [(MNIST, "auto", METHODS["auto"], EPSILONS[:1])]
    for network, name, method, epsilons in entries:
        network = network._replace(folder=args.data_dir)
        searched, finals = work.setdefault(f"search, {name}", {}), {}
        for epsilon in epsilons:
            for rate, smoothing in method.trials(network.trials)[: 2 if smoke else None]:
                key = f"ε = {epsilon:g}, {rate:.4g}, σ = {smoothing}"
                searched[key] = partial(search, network, smoke, method, epsilon, rate, smoothing)
            task = partial(final, args.output, network, smoke, name, method, epsilon)
            finals[f"ε = {epsilon:g}"] = task
        work[f"final, {name}"] = finals
    _record.measure(args.output, work)


if __name__ == "__main__":
    main()
