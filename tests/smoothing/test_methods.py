"""Every method agrees with one float64 oracle: dense up to 300 entries, tridiagonal above."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.smoothing.methods import band_reach, halo, recursive
from optax_lsdp.smoothing.methods.spectral import Operator
from tests import oracles
from tests.cases import FULL, slow

ROUNDING = 2e-6  # of the largest entry, float32
SMOOTHINGS = [0.01, 0.3, 1.0, 10.0, 100.0, 1000.0]
SIZES = [1, 2, 3, 5, 17, 63, 64, 65, 127, 128, 129, 200, 300]
FEW_SIZES = [2, 17, 64, 129, 300]
LONG_SIZES = [1_000, 4_096, 10_007, 65_537, 100_000, 1_000_003]


def smooth(v, smoothing, **kwargs):
    tx = lsdp.laplacian_smooth(smoothing, **kwargs)
    return jax.jit(tx.update)(v, tx.init(v))[0]


def smooth_all(vectors, smoothings, **kwargs):
    """Return every vector smoothed with every σ, from one compiled program."""
    transforms = {s: lsdp.laplacian_smooth(s, **kwargs) for s in smoothings}

    @jax.jit
    def run(vectors):
        return {
            smoothing: [tx.update(v, tx.init(v))[0] for v in vectors]
            for smoothing, tx in transforms.items()
        }

    return run(vectors)


def vector(size, seed=0):
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def assert_close(got, expected, v):
    assert got.dtype == jnp.float32
    error = np.abs(np.asarray(got, np.float64) - expected).max()
    assert error <= ROUNDING * np.abs(v).max(), error / np.abs(v).max()


def test_the_tridiagonal_oracle_agrees_with_the_dense_one():
    for boundary in ("periodic", "neumann"):
        for size in (3, 50, 300):
            for smoothing in SMOOTHINGS:
                np.testing.assert_allclose(
                    oracles.smooth_tridiagonal(vector(size), smoothing, boundary),
                    oracles.smooth_dense(vector(size), smoothing, boundary),
                    atol=1e-12,
                )


def assert_traced_smoothing_agrees(vectors, method, boundary, oracle):
    """Compare with an oracle for all σ, which is traced: one program serves them all."""

    @jax.jit
    def run(vectors, smoothing):
        tx = lsdp.laplacian_smooth(smoothing, method=method, boundary=boundary)
        return [tx.update(v, tx.init(v))[0] for v in vectors]

    for smoothing in SMOOTHINGS:
        for v, got in zip(vectors, run(vectors, smoothing), strict=True):
            assert_close(got, oracle(v, smoothing, boundary), v)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("method", ["recursive", "matrix", "halo", *slow("auto", "fft")])
def test_short_vectors_with_a_traced_smoothing(method, boundary):
    vectors = [vector(size, size) for size in (SIZES if FULL else FEW_SIZES)]
    assert_traced_smoothing_agrees(vectors, method, boundary, oracles.smooth_dense)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("method", ["fft", "recursive", *slow("auto")])
def test_long_vectors_with_a_traced_smoothing(method, boundary):
    sizes = LONG_SIZES[: -1 if method == "fft" else None]  # the FFT is slow for the large prime
    vectors = [vector(size, size) for size in sizes]
    assert_traced_smoothing_agrees(vectors, method, boundary, oracles.smooth_tridiagonal)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_banded_vectors(smoothing, boundary):
    reach = band_reach(Operator(smoothing, boundary), jnp.dtype("float32"))
    sizes = [n for n in (20, 100, 300, 1_000, 10_007, 100_000) if n > 2 * reach]
    vectors = [vector(size, size) for size in sizes]
    smoothed = smooth_all(vectors, [smoothing], method="banded", boundary=boundary)[smoothing]
    for v, got in zip(vectors, smoothed, strict=True):
        assert_close(got, oracles.smooth_tridiagonal(v, smoothing, boundary), v)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("method", ["fft", "matrix", "banded", "auto"])
def test_higher_orders(method, order, boundary):
    sizes = (1, 2, 7, 300) if method != "banded" else (200, 300)
    vectors = [vector(size, size) for size in sizes]
    by_smoothing = smooth_all(vectors, (0.3, 10.0), method=method, boundary=boundary, order=order)
    for smoothing, smoothed in by_smoothing.items():
        for v, got in zip(vectors, smoothed, strict=True):
            assert_close(got, oracles.smooth_dense(v, smoothing, boundary, order), v)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("method", ["fft", "matrix", "auto"])
def test_grids(method, order, boundary):
    grids = {"a": (0, 1), "b": (2, 0), "c": (0, 1, 2)}
    x = vector((5, 4, 3))
    got = smooth(
        dict.fromkeys(grids, x),
        2.0,
        method=method,
        boundary=boundary,
        order=order,
        layout=lambda path, shape: lsdp.Grid(grids[path]),
    )
    for name, axes in grids.items():
        assert_close(got[name], oracles.smooth_grid(x, 2.0, axes, boundary, order), x)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("method", ["fft", "matrix", "recursive", "halo", "auto"])
def test_one_axis_of_a_grid_is_smoothed_row_by_row(method, boundary):
    x = vector((5, 40, 3))

    def layout(path, shape):
        return lsdp.Grid((1,))

    got = smooth(x, 2.0, method=method, boundary=boundary, layout=layout)
    assert_close(got, oracles.smooth_grid(x, 2.0, (1,), boundary), x)


@pytest.mark.parametrize("method", ["fft", "recursive", "halo", "auto"])
@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
def test_a_tree_is_smoothed_as_one_vector(method, boundary):
    sizes = [1, 3, 200, 7, 10_000, 150, 2]
    tree = {f"{i:02}": vector(size, i) for i, size in enumerate(sizes)}
    joined = np.concatenate(list(tree.values()))
    options = dict(scope="tree", method=method, boundary=boundary)
    for smoothing, (got,) in smooth_all([tree], (0.3, 300.0), **options).items():
        assert_close(
            np.concatenate(list(got.values())),
            oracles.smooth_tridiagonal(joined, smoothing, boundary),
            joined,
        )


@pytest.mark.parametrize("scope", ["leaf", "tree"])
def test_smoothing_takes_one_extra_copy(scope):
    shapes = {"kernel": (512, 1024), "table": (4096, 64), "flat": (300_000,)}
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    tx = lsdp.laplacian_smooth(10.0, scope=scope, method="recursive")
    memory = jax.jit(tx.update).lower(tree, tx.init(tree)).compile().memory_analysis()
    assert memory.temp_size_in_bytes <= 1.1 * 4 * sum(leaf.size for leaf in tree.values())


@pytest.mark.parametrize("shape", [2**23, 2**23 + 1, (2**13, 2**10)])
def test_a_very_large_leaf_is_smoothed_in_place(shape):
    leaf = jax.ShapeDtypeStruct(np.atleast_1d(shape), jnp.float32)
    tx = lsdp.laplacian_smooth(10.0, method="recursive")
    compiled = jax.jit(tx.update, donate_argnums=0).lower(leaf, tx.init(None)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 4 * leaf.size
    assert memory.temp_size_in_bytes <= 0.3 * 4 * leaf.size


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("scope", ["leaf", "tree"])
@pytest.mark.parametrize("smoothing", [1.0, *slow(1000.0)])
def test_chunks_change_nothing(smoothing, scope, boundary, monkeypatch):
    shapes = {"long": 1_000, "prime": 1_009, "kernel": (300, 40), "odd": (269, 40), "one": 512}
    tree = {name: vector(shape, i) for i, (name, shape) in enumerate(shapes.items())}

    def run():
        return {
            boundary: smooth(tree, smoothing, method="recursive", scope=scope, boundary=boundary),
            "rows": smooth(
                tree["kernel"],
                smoothing,
                method="recursive",
                layout=lambda path, shape: lsdp.Grid((1,)),
                boundary=boundary,
            ),
        }

    expected = run()
    for name, value in {"_CHUNK": 128, "_PADDED": 256, "_LONG": 256}.items():
        monkeypatch.setattr(recursive, name, value)
    monkeypatch.setattr(halo, "_SMALL", 0)
    for got, whole in zip(*map(jax.tree.leaves, (run(), expected)), strict=True):
        np.testing.assert_allclose(got, whole, atol=1e-6)


COLUMNS = {
    "kernel": (300, 70),
    "conv": (5, 5, 40, 80),
    "query": (64, 4, 40),
    "short": (2, 100, 20),
    "few": (35_000, 2),
}  # their sizes differ so much that no two are packed together


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("scope", ["leaf", "tree"])
@pytest.mark.parametrize("smoothing", [3.0, *slow(0.3, 300.0)])
def test_columns_are_smoothed_without_transposition(smoothing, scope, boundary):
    tree = {name: vector(shape, i) for i, (name, shape) in enumerate(COLUMNS.items())}
    got, expected = (
        smooth(tree, smoothing, method=method, scope=scope, boundary=boundary)
        for method in ("recursive", "fft")
    )
    for name, leaf in tree.items():
        assert_close(got[name], np.asarray(expected[name], np.float64), leaf)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_column_of_a_grid_is_a_ring(axis):
    x = vector((64, 5, 40))

    def layout(path, shape):
        return lsdp.Grid((axis,))

    got, expected = (smooth(x, 30.0, method=m, layout=layout) for m in ("recursive", "fft"))
    assert_close(got, np.asarray(expected, np.float64), x)


def test_many_small_leaves_are_smoothed_each_by_itself():
    sizes = [*range(1, 40), 100, 100, 127, 128, 129, 1000, 1023, 5000]
    tree = {f"{i:02}": vector(size, i) for i, size in enumerate(sizes)}
    got = smooth(tree, 3.0, method="recursive")
    for name, v in tree.items():
        assert_close(
            got[name],
            oracles.smooth_tridiagonal(v, 3.0) if v.size > 2 else oracles.smooth_dense(v, 3.0),
            v,
        )


@pytest.mark.parametrize("method", ["recursive", "fft", "banded", "matrix"])
def test_methods_are_precise_in_float64(method):
    with jax.enable_x64(True):
        v = np.random.default_rng(0).normal(size=300)
        got = smooth(v, 5.0, method=method)
        np.testing.assert_allclose(got, oracles.smooth_tridiagonal(v, 5.0), atol=1e-14)


def test_smoothing_can_be_mapped_and_differentiated():
    tx = lsdp.laplacian_smooth(1.0)
    rows = vector((3, 50))
    mapped = jax.jit(jax.vmap(lambda v: tx.update(v, tx.init(v))[0]))(rows)
    for got, v in zip(mapped, rows, strict=True):
        assert_close(got, oracles.smooth_dense(v, 1.0), v)
    # A⁻¹ is its own transpose.
    pulled = jax.grad(lambda v: jnp.vdot(tx.update(v, tx.init(v))[0], rows[1]))(rows[0])
    np.testing.assert_allclose(pulled, oracles.smooth_dense(rows[1], 1.0), atol=1e-5)


def test_auto_never_chooses_the_fft_on_a_tpu(monkeypatch):
    def program(x, smoothing):
        tx = lsdp.laplacian_smooth(smoothing, order=2)
        return str(jax.make_jaxpr(tx.update)(x, tx.init(x)))

    def schedule(step):
        return jnp.float32(1)

    medium, long = vector(280), vector(1_000)
    assert "fft" in program(medium, schedule)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert "fft" not in program(medium, schedule) + program(long, 1.0)
    with pytest.raises(
        ValueError, match=r"`method` must be 'fft' .* \(1000,\) with order 2 on a TPU"
    ):
        program(long, schedule)
