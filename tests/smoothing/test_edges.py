"""Cases in which smoothing could fail silently: odd shards, tiny and huge σ, very long trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_lsdp as lsdp
from optax_lsdp import Grid
from optax_lsdp.smoothing import grid_beta
from tests.cases import slow

P = PartitionSpec
STATE = lsdp.laplacian_smooth(1.0).init(None)


def mesh(kind):
    return jax.make_mesh((8,), ("a",), axis_types=(kind,))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("shape", "spec"), [((1001,), P("a")), ((30, 50), P("a")), ((30, 50), P(None, "a"))]
)
def test_shards_of_different_sizes_are_smoothed_as_one_leaf(shape, spec):
    where = NamedSharding(mesh(AxisType.Auto), spec)
    tx, fft = lsdp.laplacian_smooth(3.0), lsdp.laplacian_smooth(3.0, method="fft")

    @jax.jit
    def run(v):
        split = jax.lax.with_sharding_constraint(v, where)
        return tx.update(split, STATE)[0], fft.update(v, STATE)[0]

    np.testing.assert_allclose(*run(normal(*shape)), atol=2e-6)


@pytest.mark.parametrize("devices", [*slow(1), 8])
def test_a_schedule_runs_on_an_explicit_mesh_with_replicated_leaves(devices):
    updates = {"w": normal(20, 10)}
    schedule = lsdp.laplacian_smooth(optax.linear_schedule(1.0, 0.0, 10))
    injected = optax.inject_hyperparams(lsdp.laplacian_smooth)(smoothing=1.0)
    expected, _ = jax.jit(lsdp.laplacian_smooth(1.0).update)(updates, STATE)
    with jax.set_mesh(jax.make_mesh((devices,), ("a",), axis_types=(AxisType.Explicit,))):
        for tx in (schedule, injected):
            for update in (tx.update, jax.jit(tx.update)):
                got, _ = update(jax.tree.map(jnp.asarray, updates), tx.init(updates))
                np.testing.assert_allclose(got["w"], expected["w"], atol=1e-6)


def test_the_ring_of_a_very_long_tree_closes():
    tx = lsdp.laplacian_smooth(1.0, scope="tree", method="recursive")
    long = jnp.zeros(2**25 + 2).at[0].set(1.0)
    got, _ = jax.jit(tx.update)({"a": long, "b": jnp.zeros(1)}, STATE)
    decay = (3 - np.sqrt(5)) / 2
    expected = decay ** np.array([4, 3, 2]) / np.sqrt(5)
    np.testing.assert_allclose(got["a"][-3:], expected, rtol=1e-5)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("size", [100, 256, 300])
def test_the_matrix_method_keeps_the_mean(size, boundary):
    tx = lsdp.laplacian_smooth(0.01, method="matrix", boundary=boundary, order=2)
    np.testing.assert_allclose(jax.jit(tx.update)(jnp.ones(size), STATE)[0], 1, atol=2e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_grid_whose_rows_are_whole_is_smoothed_without_communication(kind):
    """The window of a convolution does not depend on other output channels."""
    tx = lsdp.laplacian_smooth(2.0, layout=lambda path, shape: Grid((0, 1)))
    leaf = jax.device_put(normal(3, 3, 16, 64), NamedSharding(mesh(kind), P(None, None, None, "a")))
    compiled = jax.jit(tx.update).lower(leaf, STATE).compile()
    assert not any(
        word in compiled.as_text() for word in ("all-gather", "all-to-all", "all-reduce")
    )
    expected, _ = jax.jit(tx.update)(normal(3, 3, 16, 64), STATE)
    np.testing.assert_allclose(compiled(leaf, STATE)[0], expected, atol=1e-6)


def in_shards(leaf, spec, **options):
    tx = lsdp.laplacian_smooth(2.0, shard_specs=spec, **options)
    mapped = jax.shard_map(
        lambda x: tx.update(x, STATE)[0],
        mesh=mesh(AxisType.Auto),
        in_specs=(spec,),
        out_specs=spec,
    )
    return jax.jit(mapped)(leaf)


def test_whole_grids_are_smoothed_inside_shard_map():
    tx = lsdp.laplacian_smooth(2.0, layout=lambda path, shape: Grid((0, 1)))
    got = in_shards(normal(3, 4, 8), P(None, None, "a"), layout=lambda path, shape: Grid((0, 1)))
    np.testing.assert_allclose(got, jax.jit(tx.update)(normal(3, 4, 8), STATE)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "spec", "options"),
    [
        ((64,), P("a"), {"order": 2}),
        ((64,), P("a"), {"method": "fft"}),
        ((64,), P("a"), {"method": "recursive"}),
        ((64,), P("a"), {"scope": "tree", "order": 2}),
        ((16, 24), P("a"), {"layout": lambda path, shape: Grid((0,), (8, 2, 24))}),
    ],
)
def test_shards_that_a_method_cannot_smooth_are_refused(shape, spec, options):
    with pytest.raises(ValueError, match="`shard_specs` must not split the axes"):
        in_shards(normal(*shape), spec, **options)


def test_specs_are_for_shard_map_and_fit_the_rank():
    with pytest.raises(ValueError, match="`shard_specs` must be None outside shard_map"):
        lsdp.laplacian_smooth(1.0, shard_specs=P("a")).update(jnp.ones(8), STATE)

    def run(tree):
        return lsdp.laplacian_smooth(1.0, shard_specs=P(None, "a")).update(tree, STATE)[0]

    specs = {"kernel": P(None, "a"), "bias": P()}
    mapped = jax.shard_map(run, mesh=mesh(AxisType.Auto), in_specs=(specs,), out_specs=specs)
    with pytest.raises(ValueError, match="`shard_specs` must have at most as many entries"):
        jax.eval_shape(mapped, {"kernel": normal(4, 8), "bias": normal(8)})


def test_untracked_shards_need_specs():
    def run(x, **options):
        mapped = jax.shard_map(
            lambda x: lsdp.laplacian_smooth(1.0, **options).update(x, STATE)[0],
            mesh=mesh(AxisType.Auto),
            in_specs=P("a"),
            out_specs=P("a"),
            check_vma=False,
        )
        return jax.jit(mapped)(x)

    with pytest.raises(ValueError, match="`shard_specs` must be set where JAX does not track"):
        run(normal(64))
    expected, _ = jax.jit(lsdp.laplacian_smooth(1.0).update)(normal(64), STATE)
    np.testing.assert_allclose(run(normal(64), shard_specs=P("a")), expected, atol=1e-6)


def by_every_method(v, *smoothings):
    """Return the vector smoothed by three methods with every σ."""
    return [
        lsdp.laplacian_smooth(smoothing, method=method).update(v, STATE)[0]
        for smoothing in smoothings
        for method in ("recursive", "fft", "matrix")
    ]


@pytest.mark.parametrize("compiled", [*slow(False), True])
def test_a_smoothing_that_no_float_distinguishes_from_zero_changes_nothing(compiled):
    def run(v):
        return by_every_method(v, 1e-40, 1e-50)

    for wide in (False, True):
        with jax.enable_x64(wide):
            for smoothed in (jax.jit(run) if compiled else run)(normal(6)):
                np.testing.assert_array_equal(smoothed, normal(6))


def test_a_tiny_smoothing_changes_nothing_outside_jit():
    for smoothed in by_every_method(normal(6), 1e-40):
        np.testing.assert_array_equal(smoothed, normal(6))


def test_the_largest_smoothing_leaves_the_mean():
    for smoothed in jax.jit(lambda v: by_every_method(v, 1e30))(jnp.arange(5.0)):
        np.testing.assert_allclose(smoothed, 2, rtol=1e-5)


@pytest.mark.parametrize("smoothing", [-1.0, -0.2, np.inf, np.nan, 1e31])
def test_a_smoothing_out_of_range_raises_or_gives_nan(smoothing):
    for method in ("recursive", "fft", "matrix"):
        with pytest.raises(ValueError, match="`smoothing` must be"):
            lsdp.laplacian_smooth(smoothing, method=method)
        tx = lsdp.laplacian_smooth(lambda step: smoothing, method=method)
        with pytest.raises(ValueError, match="`smoothing` must be"):
            tx.update(jnp.arange(6.0), STATE)
    for smoothed in by_traced_smoothing(jnp.arange(6.0), smoothing):
        assert np.isnan(smoothed).all()


by_traced_smoothing = jax.jit(by_every_method)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(0), "`Grid.axes` must be a tuple of whole numbers, got 0"),
        (lambda: Grid((0.5,)), "`Grid.axes` must be a tuple of whole numbers"),
        (lambda: Grid((0,), 6), "`Grid.shape` must be a tuple of positive whole numbers, got 6"),
        (lambda: Grid((0,), (-2, -3)), "`Grid.shape` must be a tuple of positive whole numbers"),
        (
            lambda: lsdp.laplacian_smooth(1.0, layout=Grid((0,))),
            "`layout` must be a function of a leaf's path",
        ),
        (
            lambda: lsdp.laplacian_smooth(1.0, layout=lambda p, s: np.ones(3)).update(
                jnp.ones(6), STATE
            ),
            "`layout` must give 'inputs', 'stored', 'images', a Grid or None",
        ),
        (
            lambda: lsdp.laplacian_smooth(
                1.0, scope="tree", layout=lambda p, s: Grid((0, 1))
            ).update(jnp.ones((3, 4)), STATE),
            "`layout` must not give a Grid with scope='tree'",
        ),
        (lambda: grid_beta(-1.0, (5,)), "`smoothing` must be zero or positive"),
        (lambda: grid_beta(1.0, ()), "`sizes` must name"),
        (lambda: grid_beta(1.0, (5,), order=0), "`order` must be a whole number"),
        (lambda: grid_beta(1.0, (5,), boundary="x"), "`boundary` must be one of"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
