"""Sharded arrays are smoothed on their devices: the same numbers, and no leaf is ever gathered."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_lsdp as lsdp
from tests.cases import slow

P = PartitionSpec
TREE = {
    "bias": (4096,),
    "conv": (3, 3, 16, 32),
    "kernel": (64, 48),
    "query": (32, 4, 16),
    "scalar": (),
    "small": (5,),
}
SPECS = {
    "replicated": {name: P() for name in TREE},
    "fully sharded": {
        "bias": P("a"),
        "conv": P(None, None, "a"),
        "kernel": P("a"),
        "query": P("a"),
        "scalar": P(),
        "small": P(),
    },
    "outputs": {
        "bias": P("a"),
        "conv": P(None, None, None, "a"),
        "kernel": P(None, "a"),
        "query": P(None, None, "a"),
        "scalar": P(),
        "small": P(),
    },
    "two axes": {
        "bias": P(("b", "a")),
        "conv": P(None, None, "b", "a"),
        "kernel": P("a", "b"),
        "query": P("b", "a"),
        "scalar": P(),
        "small": P(),
    },
}
KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


def make_mesh(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(KINDS[kind],) * 2)


def tree():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in TREE.items()}


@functools.cache
def on_one_device(smoothing, **options):
    """Return the whole tree, smoothed by the method "recursive"."""
    tx = lsdp.laplacian_smooth(smoothing, method="recursive", **options)
    return jax.jit(tx.update)(tree(), tx.init(None))[0]


def put(mesh, specs):
    return {k: jax.device_put(v, NamedSharding(mesh, specs[k])) for k, v in tree().items()}


def moved(text):
    """Return the sizes of all arrays that a compiled program sends between devices."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    sent = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = [dims for types in sent for dims in re.findall(r"\w\[([\d,]*)\]", types)]
    return [int(np.prod([int(n) for n in dims.split(",") if n] or [1])) for dims in shapes]


def number_of_segments(shape, spec):
    """Return into how many segments devices cut a leaf whose inputs are neighbours."""
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    rank = len(shape)
    order = [rank - 1, rank - 2, *range(rank - 2)] if rank > 1 else range(rank)
    ways = {None: 1, "a": 4, "b": 2, ("b", "a"): 8}
    last = max((i for i, axis in enumerate(order) if entries[axis]), default=None)
    if last is None:
        return 0
    return int(np.prod([shape[axis] for axis in order[:last]])) * ways[entries[order[last]]]


@pytest.mark.parametrize("scope", ["leaf", *slow("tree")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPECS)
def test_many_devices_agree_with_one_and_no_leaf_is_gathered(name, kind, scope):
    mesh, specs = make_mesh(kind), SPECS[name]
    tx = lsdp.laplacian_smooth(2.0, scope=scope)
    expected = on_one_device(2.0, scope=scope)
    updates = put(mesh, specs)
    compiled = jax.jit(tx.update).lower(updates, tx.init(None)).compile()
    got, _ = compiled(updates, tx.init(None))
    for leaf in TREE:
        np.testing.assert_allclose(got[leaf], expected[leaf], atol=1e-6)
        assert got[leaf].sharding.is_equivalent_to(NamedSharding(mesh, specs[leaf]), got[leaf].ndim)
    # Devices exchange two numbers for each segment of a leaf.
    segments = sum(number_of_segments(shape, specs[k]) for k, shape in TREE.items())
    assert sum(moved(compiled.as_text())) <= 2 * segments


@pytest.mark.parametrize("method", [*slow("fft"), "auto"])
@pytest.mark.parametrize("kind", [*slow("Auto"), "Explicit"])
def test_a_mesh_may_be_set_for_the_whole_program(kind, method):
    """With `jax.set_mesh`, all arrays have the axes of the mesh, also intermediate results."""
    tx = lsdp.laplacian_smooth(2.0, method=method)
    expected, _ = jax.jit(tx.update)(tree(), tx.init(None))
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        for update in (tx.update, jax.jit(tx.update)):
            got, _ = update(put(mesh, SPECS["two axes"]), tx.init(None))
            for leaf in TREE:
                np.testing.assert_allclose(got[leaf], expected[leaf], atol=1e-6)
                sharding = NamedSharding(mesh, SPECS["two axes"][leaf])
                assert got[leaf].sharding.is_equivalent_to(sharding, got[leaf].ndim)


@pytest.mark.parametrize("boundary", ["periodic", *slow("neumann")])
@pytest.mark.parametrize("scope", ["leaf", "tree"])
@pytest.mark.parametrize("name", ["fully sharded", "two axes"])
def test_inside_shard_map_shards_are_smoothed_as_parts_of_the_whole(name, scope, boundary):
    mesh, specs = make_mesh("Auto"), SPECS[name]
    kwargs = {"scope": scope, "boundary": boundary}
    tx = lsdp.laplacian_smooth(50.0, shard_specs=specs, **kwargs)
    run = jax.shard_map(
        lambda x: tx.update(x, tx.init(None))[0], mesh=mesh, in_specs=(specs,), out_specs=specs
    )
    got, expected = jax.jit(run)(tree()), on_one_device(50.0, **kwargs)
    for leaf in TREE:
        np.testing.assert_allclose(got[leaf], expected[leaf], atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_devices_may_split_the_rows_of_a_grid_and_their_entries(kind, axes):
    mesh = make_mesh(kind)
    x = tree()["kernel"]
    grid = lsdp.Grid(axes)
    tx = lsdp.laplacian_smooth(2.0, layout=lambda path, shape: grid)
    expected, _ = jax.jit(tx.update)(x, tx.init(None))
    split = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
    compiled = jax.jit(tx.update).lower(split, tx.init(None)).compile()
    np.testing.assert_allclose(compiled(split, tx.init(None))[0], expected, atol=1e-6)
    ways, other = {0: (4, 48), 1: (2, 64)}[axes[0]]
    assert sum(moved(compiled.as_text())) <= 2 * ways * other


@pytest.mark.parametrize("kind", KINDS)
def test_grids_of_several_axes_are_smoothed_on_any_mesh(kind):
    mesh = make_mesh(kind)
    x = tree()["conv"]
    for operator in ({"order": 2}, {"boundary": "neumann"}):
        tx = lsdp.laplacian_smooth(2.0, layout=lambda p, s: lsdp.Grid((0, 1)), **operator)
        expected, _ = jax.jit(tx.update)(x, tx.init(None))
        split = jax.device_put(x, NamedSharding(mesh, P(None, None, "a", "b")))
        got, _ = jax.jit(tx.update)(split, tx.init(None))
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert got.sharding.is_equivalent_to(split.sharding, 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_grid_of_another_shape_is_smoothed_on_any_mesh_but_not_by_halo(kind):
    x = tree()["kernel"]

    def layout(path, shape):
        return lsdp.Grid((1,), shape=(8, 8, 48))

    tx = lsdp.laplacian_smooth(2.0, layout=layout)
    fft = lsdp.laplacian_smooth(2.0, layout=layout, method="fft")
    expected, _ = jax.jit(fft.update)(x, tx.init(None))
    split = jax.device_put(x, NamedSharding(make_mesh(kind), P("a", "b")))
    np.testing.assert_allclose(jax.jit(tx.update)(split, tx.init(None))[0], expected, atol=1e-6)
    halo = lsdp.laplacian_smooth(2.0, layout=layout, method="halo")
    with pytest.raises(ValueError, match=r"'halo', which does not support .* \(8, 8, 48\)"):
        halo.update(split, halo.init(None))


def test_a_scheduled_smoothing_compiles_once_on_a_mesh():
    mesh = make_mesh("Auto")
    split = jax.device_put(tree()["kernel"], NamedSharding(mesh, P("a")))
    traces = []

    @jax.jit
    def update(x, smoothing):
        traces.append(None)
        tx = lsdp.laplacian_smooth(smoothing)
        return tx.update(x, tx.init(None))[0]

    for smoothing in (0.0, 0.3, 300.0):
        whole = lsdp.laplacian_smooth(smoothing, method="fft")
        expected, _ = jax.jit(whole.update)(tree()["kernel"], whole.init(None))
        np.testing.assert_allclose(update(split, smoothing), expected, atol=2e-6)
    assert len(traces) == 1


@pytest.mark.parametrize("smoothing", [2.0, lambda step: 2.0 / (1.0 + step.astype(jnp.float32))])
def test_programs_for_tpus_have_no_custom_partitioning(smoothing):
    """XLA:TPU does not compile it, so XLA has to split the method "recursive" itself."""
    tx = lsdp.laplacian_smooth(smoothing)
    traced = jax.jit(tx.update).trace(put(make_mesh("Auto"), SPECS["two axes"]), tx.init(None))
    name = "CustomSPMDPartitioning"
    assert name in traced.lower().as_text()
    assert name not in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_xla_splits_the_recursive_method_without_changing_its_numbers():
    mesh, specs = make_mesh("Auto"), SPECS["two axes"]
    tx = lsdp.laplacian_smooth(2.0, method="recursive")
    got, _ = jax.jit(tx.update)(put(mesh, specs), tx.init(None))
    for leaf, expected in on_one_device(2.0).items():
        np.testing.assert_allclose(got[leaf], expected, atol=1e-6)  # float32, sums in two orders
        assert got[leaf].sharding.is_equivalent_to(NamedSharding(mesh, specs[leaf]), got[leaf].ndim)


SIXTY_FOUR = """
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import optax_lsdp as lsdp
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((64,), ("a",), axis_types=(kind,))
    for spec in (P("a"), P(None, "a")):
        leaf = jax.ShapeDtypeStruct((1024, 512), jnp.float32, sharding=NamedSharding(mesh, spec))
        tx = lsdp.laplacian_smooth(2.0)
        print(jax.jit(tx.update).lower(leaf, tx.init(None)).compile().as_text())
"""


def test_sixty_four_devices_exchange_two_numbers_per_segment():
    result = subprocess.run(
        [sys.executable, "-c", SIXTY_FOUR],
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=64"},
        capture_output=True,
        text=True,
        check=True,
    )
    sizes = moved(result.stdout)
    # Each of 512 outputs has 64 segments of 16 inputs, or the outputs are 64 segments.
    assert sizes and max(sizes) <= 64 * 512
    assert sizes.count(64) >= 4  # two numbers from each device, on either mesh


def test_a_shard_over_an_axis_that_no_spec_names_is_refused():
    mesh = make_mesh("Auto")
    tx = lsdp.laplacian_smooth(1.0, shard_specs=P("a"))
    run = jax.shard_map(
        lambda x: tx.update(x, tx.init(None))[0],
        mesh=mesh,
        in_specs=P("a", "b"),
        out_specs=P("a", "b"),
    )
    with pytest.raises(ValueError, match=r"`shard_specs` must name .* over b at ''"):
        jax.jit(run)(jnp.ones((8, 8)))
