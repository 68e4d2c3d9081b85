"""Train the paper's CNN on MNIST under a privacy budget: `python -m benchmarks.mnist --help`."""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks import _data
from benchmarks.zoo import MnistCNN, max_pool_by_slices
from optax_lsdp import training

MODEL = MnistCNN(max_pool_by_slices)


def loss(params: Any, example: Any) -> jax.Array:
    """Return the cross entropy of one image."""
    image, label = example
    return optax.softmax_cross_entropy_with_integer_labels(MODEL.apply(params, image), label)


def accuracy(params: Any, images: np.ndarray, labels: np.ndarray) -> float:
    """Return the accuracy."""
    predict = jax.jit(lambda x: jax.vmap(lambda image: MODEL.apply(params, image).argmax())(x))
    right = [
        np.asarray(predict(images[i : i + 1000])) == labels[i : i + 1000]
        for i in range(0, len(images), 1000)
    ]
    return float(np.concatenate(right).mean())


def first_params(seed: int) -> Any:
    """Return random parameters."""
    return MODEL.init(jax.random.key(seed), jnp.zeros((28, 28, 1)))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, help="a folder that holds mnist/*.gz")
    parser.add_argument("--epsilon", type=float, default=3.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--epochs", type=float, default=5.0)
    parser.add_argument("--batch", type=int, default=256, help="expected size of a batch")
    parser.add_argument("--smoothing", type=float, default=0.0)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, help="where the run is kept, to go on later")
    parser.add_argument("--output", type=Path, help="where the model is written, as .npz")
    return parser.parse_args()


def main() -> None:
    """Train, and print accuracy and ε."""
    args = parse()
    data = _data.mnist(args.data_dir)
    plan = lsdp.PrivacyPlan(
        dataset_size=len(data.train[1]),
        expected_batch_size=args.batch,
        epochs=args.epochs,
        epsilon=args.epsilon,
        delta=args.delta,
        smoothing=args.smoothing,
    )
    print(plan.statement(), end="\n\n")
    done = training.fit(
        plan,
        loss,
        first_params(0),
        data.train,
        optimizer=optax.sgd(args.learning_rate),
        folder=args.folder,
    )
    spent = lsdp.accounting.show_epsilon(plan.spent(done.ledger))
    print(f"{done.steps} steps, ε = {spent}; test accuracy {accuracy(done.params, *data.test):.2%}")
    if args.output:
        training.export_params(args.output, done.params)


if __name__ == "__main__":
    main()
