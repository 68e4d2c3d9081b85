"""Layouts: the neighbours in a Flax kernel are those in PyTorch's copy of it."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optax_lsdp as lsdp
from optax_lsdp.smoothing import _layout
from tests import oracles


def smooth(tree, smoothing=2.0, **kwargs):
    tx = lsdp.laplacian_smooth(smoothing, **kwargs)
    return jax.jit(tx.update)(tree, tx.init(tree))[0]


def random_like(tree):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)


def kernels(layer, shape):
    variables = layer.init(jax.random.key(0), jnp.zeros(shape))
    return random_like(variables["params"])


def assert_ordered_like_pytorch(kernel, smoothed):
    expected = oracles.smooth_dense(oracles.walk_like_pytorch(np.asarray(kernel)), 2.0)
    got = oracles.walk_like_pytorch(np.asarray(smoothed))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_flax_dense_kernel_is_ordered_as_in_pytorch():
    params = kernels(nn.Dense(10), (1, 28))
    assert params["kernel"].shape == (28, 10)
    assert_ordered_like_pytorch(params["kernel"], smooth(params)["kernel"])


def test_a_flax_conv_kernel_is_ordered_as_in_pytorch():
    params = kernels(nn.Conv(5, (3, 4)), (1, 8, 8, 2))
    assert params["kernel"].shape == (3, 4, 2, 5)
    assert_ordered_like_pytorch(params["kernel"], smooth(params)["kernel"])


def test_an_nnx_kernel_is_ordered_as_in_pytorch():
    state = random_like(nnx.state(nnx.Linear(28, 10, rngs=nnx.Rngs(0)), nnx.Param))
    assert_ordered_like_pytorch(state["kernel"][...], smooth(state)["kernel"][...])


def test_an_equinox_weight_is_stored_and_ordered_as_in_pytorch():
    model = random_like(eqx.nn.Linear(28, 10, key=jax.random.key(0)))
    assert model.weight.shape == (10, 28)
    assert_ordered_like_pytorch(model.weight.T, smooth(model).weight.T)


def test_a_layout_function_sees_an_nnx_kernel_under_its_own_name():
    seen = []
    state = nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), nnx.Param)
    smooth(state, layout=lambda path, shape: seen.append(path))
    assert seen == ["bias", "kernel"]


def test_only_arrays_named_weight_count_as_out_by_in():
    table = random_like({"weights": jnp.zeros((5, 3))})
    expected = oracles.smooth_dense(np.asarray(table["weights"]).T.reshape(-1), 2.0)
    got = np.asarray(smooth(table)["weights"]).T.reshape(-1)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_inputs_of_an_attention_kernel_are_neighbours():
    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)
    kernel = kernels(layer, (1, 4, 5))["query"]["kernel"]
    assert kernel.shape == (5, 2, 3)
    # A signal that is constant along the inputs of every unit, and differs between units,
    # changes only where one unit ends: most entries stay as they are.
    units = jnp.broadcast_to(jnp.arange(6.0).reshape(2, 3), (5, 2, 3))
    middle = smooth({"kernel": units}, 0.01)["kernel"][2]
    np.testing.assert_allclose(middle, units[2], atol=1e-3)


def test_the_vocabulary_of_an_embedding_is_a_row_of_neighbours():
    table = random_like({"embedding": jnp.zeros((11, 4))})["embedding"]
    expected = oracles.smooth_dense(np.asarray(table).T.reshape(-1), 2.0)
    got = smooth({"embedding": table})["embedding"]
    np.testing.assert_allclose(np.asarray(got).T.reshape(-1), expected, atol=1e-5)


def test_a_grid_smooths_over_its_axes_and_no_others():
    leaf = random_like(jnp.zeros((4, 5, 3)))
    grids = {str(axes): axes for axes in [(0,), (1,), (0, 1), (1, 2), (-1,), (0, 1, 2)]}
    got = smooth(dict.fromkeys(grids, leaf), layout=lambda path, shape: lsdp.Grid(grids[path]))
    for name, axes in grids.items():
        np.testing.assert_allclose(got[name], oracles.smooth_grid(leaf, 2.0, axes), atol=1e-5)


def test_a_grid_of_five_axes_works():
    leaf = random_like(jnp.zeros((2, 3, 2, 3, 2)))
    axes = (0, 1, 2, 3, 4)
    got = smooth({"x": leaf}, layout=lambda path, shape: lsdp.Grid(axes))["x"]
    np.testing.assert_allclose(got, oracles.smooth_grid(leaf, 2.0, axes), atol=1e-5)


def test_a_dense_kernel_on_images_is_smoothed_on_the_image():
    kernel = random_like(jnp.zeros((35, 3)))
    grid = lsdp.Grid(axes=(0, 1), shape=(5, 7, 3))
    got = smooth({"kernel": kernel}, layout=lambda path, shape: grid)["kernel"]
    expected = oracles.smooth_grid(np.asarray(kernel).reshape(5, 7, 3), 2.0, (0, 1))
    np.testing.assert_allclose(got, expected.reshape(35, 3), atol=1e-5)


def test_a_function_chooses_leaf_by_leaf():
    seen = {}

    def layout(path, shape):
        seen[path] = shape
        return None if path.endswith("bias") else "stored"

    tree = random_like({"params": {"Dense_0": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}}})
    for scope in ("leaf", "tree"):
        got = smooth(tree, layout=layout, scope=scope)["params"]["Dense_0"]
        want = tree["params"]["Dense_0"]
        np.testing.assert_array_equal(got["bias"], want["bias"])
        expected = oracles.smooth_dense(np.asarray(want["kernel"]).reshape(-1), 2.0)
        np.testing.assert_allclose(np.asarray(got["kernel"]).reshape(-1), expected, atol=1e-5)
    assert seen == {"params/Dense_0/kernel": (4, 3), "params/Dense_0/bias": (3,)}


AXIS_TYPES = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}


def few_units(monkeypatch):
    """Keep 32 of 64 units of a leaf, as otherwise of large leaves only."""
    monkeypatch.setattr(_layout, "_ENOUGH", 32 * 9)
    monkeypatch.setattr(_layout, "_UNITS", 32)
    rng = np.random.default_rng(3)
    wave = 2 * np.sin(np.arange(9 * 64).reshape(64, 9).T / 2)
    return (rng.normal(size=(6, 9, 64)) + wave).astype(np.float32)


@pytest.mark.parametrize("name", ["kernel", "weight"])
def test_of_a_large_leaf_the_first_units_choose_for_all(name, monkeypatch):
    rows = few_units(monkeypatch)
    others = rows.copy()
    others[:, :, 32:] = np.random.default_rng(4).normal(size=(6, 9, 32))  # without a signal
    if name == "weight":  # stores outputs first
        rows, others = rows.transpose(0, 2, 1), others.transpose(0, 2, 1)
    tx, moves, states = lsdp.auto_smooth(optax.identity(), stddev=1.0), [], []
    update = jax.jit(tx.update)
    for run in (rows, others):
        state = tx.init({name: run[0]})
        for y in run:
            last, (move, state) = state, update({name: y}, state)
        moves.append(move[name]), states.append(state)
    total = states[0].total[name]
    assert total.shape == ((9, 32) if name == "kernel" else (32, 9))
    half = rows[:, :, :32] if name == "kernel" else rows[:, :32]
    np.testing.assert_allclose(total, half.sum(axis=0), atol=1e-5)
    chosen, same = map(lsdp.chosen_smoothing, states)
    assert chosen == same and chosen[name].smoothing > 0
    now = lsdp.chosen_smoothing(last)[name]  # of the last move, which smooths all units as one ring
    fixed = lsdp.laplacian_smooth(now.smoothing)
    expected = fixed.update({name: others[-1]}, fixed.init(None))[0][name]
    np.testing.assert_allclose(moves[1], now.length * expected, atol=1e-5)
    whole = lsdp.auto_smooth(optax.identity(), stddev=1.0, layouts=["stored"])
    assert whole.init({name: rows[0]}).total[name].shape == rows[0].shape


@pytest.mark.parametrize("axis_type", list(AXIS_TYPES))
def test_meshes_split_the_units_that_are_kept(axis_type, monkeypatch):
    rows = few_units(monkeypatch)
    tx = lsdp.auto_smooth(optax.identity(), stddev=1.0)

    def run(state, rows):
        return jax.lax.scan(lambda s, y: tx.update(y, s)[::-1], state, rows)[::-1]

    whole = jax.jit(run)(tx.init(rows[0]), rows)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AXIS_TYPES[axis_type],))
    with jax.set_mesh(mesh):
        split = jax.device_put(rows, jax.NamedSharding(mesh, jax.P(None, None, "x")))
        got = jax.jit(run)(tx.init(split[0]), split)
    assert whole[1].choice.smoothing[0] > 0
    for one, other in zip(*map(jax.tree.leaves, (got, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_shards_keep_their_own_units(monkeypatch):
    rows = few_units(monkeypatch)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = lsdp.auto_smooth(optax.identity(), stddev=1.0, shard_specs=jax.P(None, "x"))
    state = tx.init(rows[0])  # outside, so D keeps 32 units, and each shard keeps 8 of its 16
    inside = jax.tree.map(lambda x: jax.P(), state)._replace(total=jax.P(None, "x"))
    run = jax.shard_map(
        tx.update,
        mesh=mesh,
        in_specs=(jax.P(None, "x"), inside),
        out_specs=(jax.P(None, "x"), inside),
    )
    for y in rows:
        _, state = jax.jit(run)(y, state)
    kept = np.arange(64).reshape(4, 16)[:, :8].reshape(-1)
    np.testing.assert_allclose(state.total, rows.sum(axis=0)[:, kept], atol=1e-5)
    assert lsdp.chosen_smoothing(state).smoothing > 0
