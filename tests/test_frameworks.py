"""Linen, NNX, Equinox and plain trees: each trains, and each drew the noise that it owes."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_lsdp as lsdp

CLASSES, FEATURES, N, STEPS = 3, 16, 120, 20
C, Z, LR, SMOOTHING = 1.0, 2.0, 2.0, 0.5
PRIVATE = dict(clip_norm=C, noise_multiplier=Z, expected_batch_size=N, smoothing=SMOOTHING)

_rng = np.random.default_rng(0)
Y = np.arange(N) % CLASSES
_centres = np.repeat(_rng.normal(size=(CLASSES, FEATURES // 4)), 4, axis=1)
X = (_centres[Y] + 0.5 * _rng.normal(size=(N, FEATURES))).astype(np.float32)


def cross_entropy(logits, label):
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)


class Run:
    """A model under training: its loss, its parameters, and a step through its own tools."""

    def __init__(self, loss, params, logits):
        self.loss, self.params, self.logits = loss, params, logits
        self.grad = jax.jit(lsdp.clipped_grad(loss, clip_norm=C))

    def accuracy(self):
        """Return the share of examples that the model gets right."""
        return float((jnp.argmax(self.logits(self.params, X), axis=-1) == Y).mean())


def optax_step(run, apply_updates):
    """Return a step through Optax alone."""
    tx = lsdp.dp_lssgd(LR, key=jax.random.key(1), **PRIVATE)
    state, update = tx.init(run.params), jax.jit(tx.update)

    def step(grads):
        nonlocal state
        updates, state = update(grads, state, run.params)
        run.params = apply_updates(run.params, updates)

    return step


def plain_run():
    def logits(params, x):
        return jax.nn.relu(x @ params["w1"]) @ params["w2"]

    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (FEATURES, 8)) / 4,
        "w2": jax.random.normal(keys[1], (8, CLASSES)) / 4,
    }
    run = Run(lambda p, e: cross_entropy(logits(p, e[0]), e[1]), params, logits)
    run.step = optax_step(run, optax.apply_updates)
    return run


def linen_run():
    model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(CLASSES)])
    params = model.init(jax.random.key(0), X[0])
    run = Run(lambda p, e: cross_entropy(model.apply(p, e[0]), e[1]), params, model.apply)
    tx = lsdp.dp_lssgd(LR, key=jax.random.key(1), **PRIVATE)
    train_state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(grads):
        nonlocal train_state
        train_state = train_state.apply_gradients(grads=grads)
        run.params = train_state.params

    run.step = step
    return run


def nnx_run():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(FEATURES, 8, rngs=rngs), nnx.relu, nnx.Linear(8, CLASSES, rngs=rngs)
    )
    optimizer = nnx.Optimizer(
        model, lsdp.dp_lssgd(LR, key=jax.random.key(1), **PRIVATE), wrt=nnx.Param
    )
    graph, params = nnx.split(model, nnx.Param)
    params = jax.tree.map(jnp.copy, params)  # not a live view

    def logits(params, x):
        return nnx.merge(graph, params)(x)

    run = Run(lambda p, e: cross_entropy(logits(p, e[0]), e[1]), params, logits)

    def step(grads):
        optimizer.update(model, grads)
        run.params = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    run.step = step
    return run


def equinox_run():
    model = eqx.nn.MLP(FEATURES, CLASSES, 8, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(params, x):
        apply = eqx.combine(params, static)
        return apply(x) if x.ndim == 1 else jax.vmap(apply)(x)

    run = Run(lambda p, e: cross_entropy(logits(p, e[0]), e[1]), params, logits)
    run.step = optax_step(run, eqx.apply_updates)
    return run


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (plain_run, "marked"),
        (linen_run, "marked"),
        (linen_run, "stacked"),
        (nnx_run, "marked"),
        pytest.param(nnx_run, "stacked", marks=pytest.mark.full),
        (equinox_run, "marked"),
    ],
)
def test_a_small_model_trains_and_draws_its_noise(make, kind):
    run = make()
    start = run.accuracy()
    residuals = []
    stack = jax.jit(jax.vmap(jax.grad(run.loss), in_axes=(None, 0)))
    for _ in range(STEPS):
        before = run.params
        grads = run.grad(before, (X, Y))
        run.step(stack(before, (X, Y)) if kind == "stacked" else grads)
        residuals.append(noise_in(before, run.params, grads))
    assert run.accuracy() > max(0.75, start)
    noise = np.concatenate(residuals)
    error = 5 / np.sqrt(2 * noise.size)
    assert abs(noise.std() / (Z * C) - 1) < error
    assert abs(noise.mean()) < 5 * Z * C / np.sqrt(noise.size)


def noise_in(before, after, grads):
    """Undo the step: A_σ of its update, times −b/η, is the noisy sum; take the sum away."""
    update = jax.tree.map(lambda a, b: (a - b) * (-N / LR), after, before)
    sums = jax.tree.leaves(grads)
    noisy = jax.tree.leaves(sharpen(update))
    return np.concatenate([np.asarray(x - s).reshape(-1) for x, s in zip(noisy, sums, strict=True)])


@jax.jit
def sharpen(update):
    """Return A_σ of a smoothed tree, through A_σ⁻¹ alone: iterate u ← u + (x − A_σ⁻¹ u)."""
    tx = lsdp.laplacian_smooth(SMOOTHING)

    def iterate(_, u):
        smoothed, _ = tx.update(u, tx.init(u))
        return jax.tree.map(lambda u, x, s: u + (x - s), u, update, smoothed)

    return jax.lax.fori_loop(0, 100, iterate, update)
