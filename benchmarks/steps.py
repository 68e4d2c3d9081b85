"""What a private step costs: each stage against the same step without privacy."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import optax_lsdp as lsdp
from benchmarks import _timing


class Classifier(nn.Module):
    """Dense layers of the given widths, after a convolution if it has filters."""

    widths: tuple[int, ...]
    filters: int = 0

    @nn.compact
    def __call__(self, image: jax.Array) -> jax.Array:
        """Return the logits of one image."""
        if self.filters:
            image = nn.relu(nn.Conv(self.filters, (8, 8), strides=2)(image))
        hidden = image.reshape(-1)
        for width in self.widths[:-1]:
            hidden = nn.relu(nn.Dense(width)(hidden))
        return nn.Dense(self.widths[-1])(hidden)


MODELS = {
    "softmax regression": (Classifier((10,)), 128),
    "MLP 784-256-10": (Classifier((256, 10)), 64),
    "CNN, 16 filters 8×8": (Classifier((32, 10), filters=16), 64),
}


def loss(model: nn.Module, params: Any, example: Any) -> jax.Array:
    """Return the cross-entropy of one example."""
    image, label = example
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, image), label)


def steps(model: nn.Module, size: int) -> dict[str, Any]:
    """Return a compiled training step for each way to train."""
    one = partial(loss, model)
    batch = (jax.random.normal(jax.random.key(1), (size, 28, 28, 1)), jnp.arange(size) % 10)
    params = model.init(jax.random.key(2), batch[0][0])

    def mean_grad(params: Any, batch: Any) -> Any:
        return jax.grad(lambda p: jax.vmap(one, (None, 0))(p, batch).mean())(params)

    private = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": size}
    private["key"] = jax.random.key(0)
    ways = {
        "SGD": (mean_grad, optax.sgd(0.1)),
        "DP-SGD": (lsdp.clipped_grad(one, clip_norm=1.0), lsdp.dp_sgd(0.1, **private)),
        "DP-LSSGD": (lsdp.clipped_grad(one, clip_norm=1.0), lsdp.dp_lssgd(0.1, **private)),
    }

    def compiled(grad: Any, tx: optax.GradientTransformation) -> Any:
        @jax.jit
        def step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(grad(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        return partial(step, params, tx.init(params), batch)

    return {name: compiled(*way) for name, way in ways.items()}


def main() -> None:
    """Time all models and write the record."""
    args = _timing.arguments(__doc__, "steps.json")
    rounds = 3 if args.smoke else 50
    rows = []
    for name, (model, size) in MODELS.items():
        times = _timing.medians(steps(model, size), rounds)
        rows.append({"model": name, "batch": size, "milliseconds": times})
    _timing.write(args.output, {"rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
