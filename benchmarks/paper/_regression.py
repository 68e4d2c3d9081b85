"""Train many runs of softmax regression at once, with different seeds, noise, σ and step sizes.

`jax.vmap` trains all runs of a protocol together. Private runs use the library. Published runs do
what the authors' code does, and are not differentially private.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import optax_lsdp as lsdp
from optax_lsdp.smoothing import Grid

Examples = tuple[Any, Any]  # features (n, d) and labels (n,)
Rate = Callable[[jax.Array], jax.Array]
RATES: dict[str, Callable[[int, int], Rate]] = {  # (steps, steps of an epoch) → factor at a step
    "constant": lambda steps, epoch: lambda step: jnp.ones([]),
    "1/t": lambda steps, epoch: lambda step: 1 / (step // epoch * epoch + 1),  # set once an epoch
    "linear": lambda steps, epoch: lambda step: 1 - step / steps,
}


@dataclass(frozen=True)
class Protocol:
    """The settings that runs trained together have in common.

    Attributes:
        steps: how many noisy sums are used.
        batch: the expected size of a batch; as large as the dataset, all examples in every step.
        clip_norm: C.
        momentum: of SGD.
        weight_decay: the factor of ‖w‖²/2 in the objective; it depends on no example.
        rate: by which the step size changes, one of `RATES`.
        layout: "inputs", "stored", or "grid" for images.
        scope: as in `laplacian_smooth`.
        is_private: whether each example is clipped and batches are Poisson; else each tensor of the
            batch's gradient is clipped, and batches are shuffled, as in the authors' code.
        points: how often, evenly spread, the model is looked at; once an epoch if not private.
    """

    steps: int
    batch: int
    clip_norm: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    rate: str = "constant"
    layout: str = "inputs"
    scope: Literal["leaf", "tree"] = "leaf"
    is_private: bool = True
    points: int = 1


class Settings(NamedTuple):
    """The settings in which runs of one seed differ: arrays of equal length."""

    noise_multiplier: Any
    smoothing: Any
    step_size: Any


class Curves(NamedTuple):
    """The evaluations at each point: arrays (seeds, settings, points)."""

    losses: dict[str, np.ndarray]
    accuracies: dict[str, np.ndarray]


def loss(params: Any, example: Any) -> jax.Array:
    """Return the cross entropy of one example."""
    features, label = example
    logits = features @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


def train(
    protocol: Protocol,
    data: Examples,
    looked_at: dict[str, Examples],
    settings: Settings,
    seeds: Sequence[int],
    classes: int = 10,
) -> Curves:
    """Train all settings for all seeds, and evaluate each model."""
    width = data[0].shape[1]
    first = {"kernel": jnp.zeros((width, classes)), "bias": jnp.zeros(classes)}
    shape = (len(seeds), len(settings.step_size))
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (*shape, *x.shape)) + 0, first)
    state = params, jax.tree.map(jnp.zeros_like, params)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))  # public, unlike the key of a real run
    settings = Settings(*(jnp.asarray(x, jnp.float32) for x in settings))
    data, looked_at = jax.tree.map(jnp.asarray, (data, looked_at))
    ends = np.linspace(0, protocol.steps, protocol.points + 1).round().astype(int)
    found = []
    for begin, end in tqdm(list(pairwise(ends)), leave=False):
        state = _advance(protocol, data, settings, keys, state, begin, int(end - begin))
        found.append(jax.device_get(_look(looked_at, state[0])))
    stacked = jax.tree.map(lambda *parts: np.stack(parts, axis=-1), *found)
    return Curves(
        {name: values for name, (values, _) in stacked.items()},
        {name: values for name, (_, values) in stacked.items()},
    )


@jax.jit
def _look(looked_at: dict[str, Examples], params: Any) -> Any:
    def one(params: Any, examples: Examples) -> tuple[jax.Array, jax.Array]:
        logits = examples[0] @ params["kernel"] + params["bias"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, examples[1])
        return losses.mean(), (logits.argmax(-1) == examples[1]).mean()

    several = jax.vmap(jax.vmap(one, (0, None)), (0, None))
    return {name: several(params, examples) for name, examples in looked_at.items()}


@partial(jax.jit, static_argnames=("protocol", "count"))
def _advance(
    protocol: Protocol,
    data: Examples,
    settings: Settings,
    keys: jax.Array,
    state: Any,
    begin: jax.Array,
    count: int,
) -> Any:
    """Take some steps of all runs."""
    size = len(data[1])
    epoch = size // protocol.batch
    factor = RATES[protocol.rate](protocol.steps, epoch)
    gradient = (_clipped if protocol.is_private else _published)(protocol, data)

    def shuffle(key: jax.Array) -> jax.Array:  # one call is one epoch
        return jax.random.permutation(jax.random.fold_in(key, begin // epoch), size)

    orders = None if protocol.is_private else jax.vmap(shuffle)(keys)

    def step(key: jax.Array, order: Any, setting: Settings, state: Any, step: jax.Array) -> Any:
        params, velocity = state
        total = gradient(key, order, step, params)
        noise = lsdp.add_gaussian_noise(
            lambda step: setting.noise_multiplier * protocol.clip_norm, key=key
        )
        noisy, _ = noise.update(total, noise.init(params)._replace(step=step))
        smooth = lsdp.laplacian_smooth(
            lambda step: setting.smoothing, layout=_layout(protocol), scope=protocol.scope
        )
        smoothed, _ = smooth.update(noisy, smooth.init(params))
        rate = setting.step_size * factor(step)

        velocity = jax.tree.map(
            lambda p, v, g: protocol.momentum * v + g / protocol.batch + protocol.weight_decay * p,
            params,
            velocity,
            smoothed,
        )
        return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity

    several = jax.vmap(jax.vmap(step, (None, None, 0, 0, None)), (0, 0, None, 0, None))
    steps = jnp.arange(count) + begin
    state, _ = jax.lax.scan(
        lambda s, t: (several(keys, orders, settings, s, t), None), state, steps
    )
    return state


def _clipped(protocol: Protocol, data: Examples) -> Callable[..., Any]:
    """Return the clipped sum of a Poisson batch, or of all examples."""
    size = len(data[1])
    marked = lsdp.clipped_grad(loss, clip_norm=protocol.clip_norm)
    link = lsdp.clip_per_example(protocol.clip_norm)

    def clipped(params: Any, *batch: Any) -> Any:
        return link.update(marked(params, *batch), link.init(params), params)[0]

    def gradient(key: jax.Array, order: Any, step: jax.Array, params: Any) -> Any:
        if protocol.batch == size:
            return clipped(params, data)
        key = jax.random.fold_in(key, 1)
        sampler = lsdp.PoissonSampler(size, protocol.batch / size, key)
        chosen = sampler.batch(step)
        batch = jax.tree.map(lambda x: x[chosen.indices], data)
        return clipped(params, batch, chosen.mask)

    return gradient


def _published(protocol: Protocol, data: Examples) -> Callable[..., Any]:
    """Return a shuffled batch's mean gradient, each tensor clipped, as in the authors' code."""
    size = len(data[1])

    def mean_loss(params: Any, batch: Examples) -> jax.Array:
        return jax.vmap(loss, (None, 0))(params, batch).mean()

    def clip(tensor: jax.Array) -> jax.Array:
        norm = jnp.linalg.norm(tensor)
        return protocol.batch * tensor / jnp.maximum(1, norm / protocol.clip_norm)

    def gradient(key: jax.Array, order: jax.Array, step: jax.Array, params: Any) -> Any:
        place = (step % (size // protocol.batch)) * protocol.batch
        chosen = jax.lax.dynamic_slice(order, (place,), (protocol.batch,))
        batch = jax.tree.map(lambda x: x[chosen], data)
        return jax.tree.map(clip, jax.grad(mean_loss)(params, batch))

    return gradient


def _layout(protocol: Protocol) -> Any:
    """Return the layout of the kernel; biases have no neighbours."""

    def choose(path: str, shape: tuple[int, ...]) -> Any:
        if len(shape) == 1:
            return "stored" if protocol.scope == "tree" else None
        if protocol.layout != "grid":
            return protocol.layout
        side = round(shape[0] ** 0.5)
        return Grid((0, 1), (side, side, shape[1]))

    return choose
