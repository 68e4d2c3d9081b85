"""Bookkeeping works with models of Linen, NNX, Equinox, Haiku and Diffrax as they are."""

import diffrax
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import optax_lsdp as lsdp
from benchmarks.zoo import ZOO
from tests.cases import slow

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Allow dtype promotion, which these libraries rely on."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def assert_agreement(loss, params, batch):
    """Assert that both engines agree without clipping; return the strategies of large leaves."""
    grads = [
        lsdp.value_and_clipped_grad(loss, clip_norm=1e6, engine=engine)
        for engine in ("bookkeeping", "vmap")
    ]
    run = jax.jit(lambda params, batch: [grad(params, batch) for grad in grads])
    (private, total), (expected, sums) = run(params, batch)
    np.testing.assert_allclose(private.norms, expected.norms, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-5 * max(1, float(expected.norms.max())))
    rows = lsdp.explain_clipping(loss, params, jax.tree.map(lambda x: x[0], batch)).rows
    return {row.strategy for row in rows if np.prod(row.shape) > 600}


QUICK = ("softmax regression", "MLP", "MNIST CNN")
# Their large leaves are not operands: exp(w) of a flow, and latents that a Perceiver normalises.
WITHOUT_RULE = ("autoregressive flow", "Perceiver")


@pytest.mark.parametrize("name", [*QUICK, *slow(*(n for n in ZOO if n not in QUICK))])
def test_every_model_of_the_zoo_agrees_with_vmap(name):
    strategies = assert_agreement(*ZOO[name](3))
    assert ("materialised, no rule" in strategies) == (name in WITHOUT_RULE)


@pytest.mark.parametrize("name", ["MLP", *slow(*(n for n in ZOO if n != "MLP"))])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_no_contribution_in_half_precision_exceeds_the_clip_norm(name, dtype):
    loss, params, batch = ZOO[name](3)

    def cast(tree):
        floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(tree)]
        leaves = zip(jax.tree.leaves(tree), floats, strict=True)
        cast = [x.astype(dtype) if is_float else x for x, is_float in leaves]
        return jax.tree.unflatten(jax.tree.structure(tree), cast)

    grad = jax.jit(lsdp.clipped_grad(loss, clip_norm=0.01))
    for i in range(3):
        total = grad(cast(params), cast(batch), jnp.arange(3) == i)
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
        assert 0.0099 <= np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)) <= 0.01 * (1 + 1e-6)


class NnxBlocks(nnx.Module):
    """Layers in a scan, written with `nnx.vmap` and `nnx.scan`."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return nnx.Linear(32, 32, rngs=rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x):
        """Return four numbers."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return jnp.tanh(layer(x))

        return self.head(run(x, self.layers))


def test_nnx_layers_in_a_scan_are_outer_products():
    graph, params = nnx.split(NnxBlocks(nnx.Rngs(0)), nnx.Param)

    def loss(params, x):
        return jnp.sum(nnx.merge(graph, params)(x) ** 2)

    strategies = assert_agreement(loss, params, jax.random.normal(KEY, (4, 32)))
    assert strategies == {"outer product"}


def test_large_leaves_of_an_equinox_model_are_outer_products():
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(2, 8, 3, key=KEY),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.MLP(8 * 36, 5, 64, 2, key=KEY),
        ]
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, x):
        return jnp.sum(eqx.combine(params, static)(x) ** 2)

    assert assert_agreement(loss, params, jax.random.normal(KEY, (4, 2, 8, 8))) == {"outer product"}


def test_large_leaves_of_a_haiku_model_are_gram_matrices():
    def model(x):
        core = hk.LSTM(32)
        states, _ = hk.dynamic_unroll(core, x, core.initial_state(None))
        attended = hk.MultiHeadAttention(2, 16, w_init=hk.initializers.RandomNormal(0.2))(
            states, states, states
        )
        return hk.Linear(3)(attended.mean(axis=0))

    network = hk.without_apply_rng(hk.transform(model))
    batch = jax.random.normal(KEY, (4, 5, 24))
    params = network.init(KEY, batch[0])
    strategies = assert_agreement(lambda p, x: jnp.sum(network.apply(p, x) ** 2), params, batch)
    assert strategies == {"Gram matrices"}


@pytest.mark.parametrize("adjoint", slow(diffrax.DirectAdjoint, diffrax.RecursiveCheckpointAdjoint))
def test_a_neural_differential_equation_of_diffrax_agrees_with_vmap(adjoint):
    """The solver reports errors by callbacks, and loops over many small products."""
    params = {"w": jax.random.normal(KEY, (3, 5)), "v": jax.random.normal(KEY, (5, 3)) / 5}

    def loss(params, x):
        term = diffrax.ODETerm(lambda t, y, _: jnp.tanh(y @ params["w"]) @ params["v"])
        solution = diffrax.diffeqsolve(
            term, diffrax.Heun(), 0.0, 1.0, 0.1, x, adjoint=adjoint(), max_steps=32
        )
        return jnp.sum(solution.ys**2)

    assert_agreement(loss, params, jax.random.normal(KEY, (4, 3)))
