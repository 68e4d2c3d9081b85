"""Models in Linen, NNX, Equinox and plain JAX train, and each step draws the noise it should."""

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


class Model:
    """A model in training: its loss, its parameters, and a step in the style of its library."""

    def __init__(self, loss, params, logits):
        self.loss, self.params, self.logits = loss, params, jax.jit(logits)
        self.grad = jax.jit(lsdp.clipped_grad(loss, clip_norm=C))

    def accuracy(self):
        """Return the share of examples that the model classifies correctly."""
        return float((np.argmax(self.logits(self.params, X), axis=-1) == Y).mean())


def optax_step(model, apply_updates):
    """Return a step that uses Optax alone."""
    tx = lsdp.dp_lssgd(LR, key=jax.random.key(1), **PRIVATE)
    state = tx.init(model.params)

    @jax.jit
    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    def step(grads):
        nonlocal state
        model.params, state = update(grads, state, model.params)

    return step


def plain_model():
    def logits(params, x):
        return jax.nn.relu(x @ params["w1"]) @ params["w2"]

    keys = jax.random.split(jax.random.key(0))
    params = {
        "w1": jax.random.normal(keys[0], (FEATURES, 8)) / 4,
        "w2": jax.random.normal(keys[1], (8, CLASSES)) / 4,
    }
    model = Model(lambda p, e: cross_entropy(logits(p, e[0]), e[1]), params, logits)
    model.step = optax_step(model, optax.apply_updates)
    return model


def linen_model():
    layers = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(CLASSES)])
    params = jax.jit(layers.init)(jax.random.key(0), X[0])
    model = Model(lambda p, e: cross_entropy(layers.apply(p, e[0]), e[1]), params, layers.apply)
    tx = lsdp.dp_lssgd(LR, key=jax.random.key(1), **PRIVATE)
    train_state = TrainState.create(apply_fn=layers.apply, params=params, tx=tx)
    apply_gradients = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))

    def step(grads):
        nonlocal train_state
        train_state = apply_gradients(train_state, grads)
        model.params = train_state.params

    model.step = step
    return model


def nnx_model():
    rngs = nnx.Rngs(0)
    module = nnx.Sequential(
        nnx.Linear(FEATURES, 8, rngs=rngs), nnx.relu, nnx.Linear(8, CLASSES, rngs=rngs)
    )
    optimizer = nnx.Optimizer(
        module, lsdp.dp_lssgd(LR, key=jax.random.key(1), **PRIVATE), wrt=nnx.Param
    )
    graph, params = nnx.split(module, nnx.Param)
    params = jax.tree.map(jnp.copy, params)  # not a live view

    def logits(params, x):
        return nnx.merge(graph, params)(x)

    model = Model(lambda p, e: cross_entropy(logits(p, e[0]), e[1]), params, logits)

    update = nnx.jit(lambda optimizer, module, grads: optimizer.update(module, grads))

    def step(grads):
        update(optimizer, module, grads)
        model.params = jax.tree.map(jnp.copy, nnx.state(module, nnx.Param))

    model.step = step
    return model


def equinox_model():
    make = eqx.filter_jit(lambda key: eqx.nn.MLP(FEATURES, CLASSES, 8, 1, key=key))
    module = make(jax.random.key(0))
    params, static = eqx.partition(module, eqx.is_inexact_array)

    def logits(params, x):
        apply = eqx.combine(params, static)
        return apply(x) if x.ndim == 1 else jax.vmap(apply)(x)

    model = Model(lambda p, e: cross_entropy(logits(p, e[0]), e[1]), params, logits)
    model.step = optax_step(model, eqx.apply_updates)
    return model


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (plain_model, "marked"),
        (linen_model, "marked"),
        (linen_model, "stacked"),
        (nnx_model, "marked"),
        pytest.param(nnx_model, "stacked", marks=pytest.mark.full),
        (equinox_model, "marked"),
    ],
)
def test_a_small_model_trains_and_each_step_draws_its_noise(make, kind):
    model = make()
    start = model.accuracy()
    residuals = []
    stack = jax.jit(jax.vmap(jax.grad(model.loss), in_axes=(None, 0)))
    for _ in range(STEPS):
        before = model.params
        grads = model.grad(before, (X, Y))
        model.step(stack(before, (X, Y)) if kind == "stacked" else grads)
        residuals.append(np.asarray(noise_in(before, model.params, grads)))
    assert model.accuracy() > max(0.75, start)
    noise = np.concatenate(residuals)
    error = 5 / np.sqrt(2 * noise.size)
    assert abs(noise.std() / (Z * C) - 1) < error
    assert abs(noise.mean()) < 5 * Z * C / np.sqrt(noise.size)


@jax.jit
def noise_in(before, after, grads):
    """Return the noise of one step: A_σ of its update, times −b/η, minus the clipped sum."""
    update = jax.tree.map(lambda a, b: (a - b) * (-N / LR), after, before)
    sums = jax.tree.leaves(grads)
    noisy = jax.tree.leaves(sharpen(update))
    return jnp.concatenate([(x - s).reshape(-1) for x, s in zip(noisy, sums, strict=True)])


def sharpen(update):
    """Return A_σ of a smoothed tree by the iteration u ← u + (x − A_σ⁻¹ u)."""
    tx = lsdp.laplacian_smooth(SMOOTHING)

    def iterate(_, u):
        smoothed, _ = tx.update(u, tx.init(u))
        return jax.tree.map(lambda u, x, s: u + (x - s), u, update, smoothed)

    return jax.lax.fori_loop(0, 100, iterate, update)


def test_estimates_are_read_from_the_opt_state_of_an_nnx_optimizer():
    module = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    private = {"clip_norm": lsdp.AdaptiveClip(1.0), "key": jax.random.key(1), "watch_steps": 3}
    tx = lsdp.privatize(optax.sgd(LR), noise_multiplier=Z, expected_batch_size=N, **private)
    optimizer = nnx.Optimizer(module, tx, wrt=nnx.Param)
    for read in (lsdp.training_curve, lsdp.norm_estimates, lsdp.current_clip_norm):
        read(optimizer.opt_state)
        with pytest.raises(ValueError, match=r"with Flax NNX .*`optimizer\.opt_state`"):
            read(nnx.state(optimizer))  # which has lost the types of all states
