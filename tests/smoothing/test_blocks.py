"""Blocks, which smooth large leaves on TPUs, agree with the method of all other platforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from benchmarks import _hlo
from optax_lsdp.smoothing._layout import Leaf, _choose
from optax_lsdp.smoothing.methods import banded, choose_blocking, smooth_in_blocks, smooth_recursive
from optax_lsdp.smoothing.methods.spectral import Operator

ROUNDING = 2e-6  # of the largest entry, float32
LEAVES = {
    "kernel": (600, 120),  # 120 inputs divide it
    "odd": (1_001, 70),  # smoothed in steps, by convolution
    "wide": (557, 2_050),  # smoothed in steps, by one product each
    "weight": (150, 600),  # stored as (out, in)
    "conv": (3, 3, 100, 80),
    "conv_5": (5, 5, 40, 80),
    "conv_1": (1, 1, 500, 140),
    "vector": (2**20 + 77,),
}


def vector(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def case(name, smoothing=1.0, boundary="periodic"):
    """Return a leaf with its operator and its blocking."""
    x = vector(LEAVES[name])
    leaf = Leaf(x, _choose("inputs", name, x.shape), jax.P(), False)
    operator = Operator(smoothing, boundary)
    return leaf, operator, choose_blocking(leaf, operator)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("smoothing", [0.01, 1.0, 20.0])
@pytest.mark.parametrize("name", LEAVES)
def test_blocks_agree_with_the_recursion(name, smoothing, boundary):
    leaf, operator, blocking = case(name, smoothing, boundary)
    assert blocking is not None

    @jax.jit
    def both(x):
        recursive = smooth_recursive([leaf._replace(array=x)], operator, "leaf")[0]
        return smooth_in_blocks(x, blocking), recursive

    got, expected = both(leaf.array)
    largest = np.abs(leaf.array).max()
    np.testing.assert_allclose(got, expected, atol=ROUNDING * largest)


def _halves(x):
    """Return x as the sum of two bfloat16 numbers, as `Precision.HIGH` takes operands on a TPU."""
    high = jax.lax.reduce_precision(x, 8, 7)
    return high, jax.lax.reduce_precision(x - high, 8, 7)


def _in_three_passes(multiply):
    """Return a product that leaves out the product of the lower halves, as a TPU does."""

    def product(one, other, *args, **kwargs):
        (high, low), (other_high, other_low) = _halves(one), _halves(other)
        pairs = ((high, other_high), (high, other_low), (low, other_high))
        return sum(multiply(a, b, *args, **kwargs) for a, b in pairs)

    return product


@pytest.mark.parametrize("name", ["kernel", "odd", "wide", "conv"])
def test_three_passes_of_bfloat16_keep_the_mean_and_the_stated_error(name, monkeypatch):
    leaf, operator, blocking = case(name)
    expected = jax.jit(lambda: smooth_recursive([leaf], operator, "leaf")[0])()
    shifted = jnp.full(leaf.array.shape, 0.3)  # not a bfloat16 number
    einsum = jnp.einsum
    monkeypatch.setattr(banded, "_convolve", _in_three_passes(banded._convolve))
    monkeypatch.setattr(banded, "_product", _in_three_passes(banded._product))
    monkeypatch.setattr(
        banded.jnp,
        "einsum",
        lambda s, a, b, **kw: _in_three_passes(lambda x, y: einsum(s, x, y))(a, b),
    )
    got, constant = (smooth_in_blocks(x, blocking) for x in (leaf.array, shifted))
    largest = float(jnp.abs(leaf.array).max())
    error = float(jnp.abs(got - expected).max())
    assert ROUNDING * largest < error <= banded.ERROR * largest  # the emulation does round
    np.testing.assert_allclose(constant, 0.3, rtol=banded.ERROR)
    assert abs(float(got.mean() - leaf.array.mean())) <= banded.ERROR * largest / 10


def test_blocks_are_not_for_small_leaves_large_or_traced_smoothing_and_shards():
    leaf, operator, blocking = case("kernel")
    assert blocking is not None
    others = [
        (leaf, operator._replace(smoothing=1000.0)),
        (leaf, operator._replace(smoothing=jnp.float32(1.0))),
        (leaf, operator._replace(order=2)),
        (leaf._replace(is_split=True), operator),
        (leaf._replace(spec=jax.P("data")), operator),
        (leaf._replace(array=leaf.array.astype(jnp.bfloat16)[:10]), operator),
    ]
    assert [choose_blocking(*other) for other in others] == [None] * len(others)


@pytest.fixture
def one_device(monkeypatch):
    """With several devices, "auto" takes "halo", because a leaf may be split."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.usefixtures("one_device")
def test_a_cpu_runs_the_program_of_the_recursion():
    x = vector(LEAVES["kernel"])

    def operations(method):
        tx = lsdp.laplacian_smooth(1.0, method=method)
        text = jax.jit(tx.update).lower(x, tx.init(x)).compile().as_text()
        return sorted(i.operation for part in _hlo.parse(text).values() for i in part)

    assert operations("auto") == operations("recursive")


@pytest.mark.usefixtures("one_device")
def test_only_auto_takes_blocks_and_only_on_a_tpu():
    x = vector(LEAVES["kernel"])

    def text(method, platform):
        tx = lsdp.laplacian_smooth(1.0, method=method)
        lowered = jax.jit(tx.update).trace(x, tx.init(x)).lower(lowering_platforms=(platform,))
        return lowered.as_text()

    assert "stablehlo.convolution" in text("auto", "tpu")
    assert "stablehlo.convolution" not in text("auto", "cpu") + text("recursive", "tpu")
    assert "HIGHEST" not in text("auto", "tpu")


def test_blocks_can_be_mapped_and_differentiated():
    leaf, _, blocking = case("odd")
    rows = jnp.stack([leaf.array, leaf.array[::-1]])
    mapped = jax.vmap(lambda x: smooth_in_blocks(x, blocking))(rows)
    np.testing.assert_allclose(mapped[1], smooth_in_blocks(rows[1], blocking), atol=1e-6)
    # A⁻¹ is its own transpose.
    pulled = jax.grad(lambda x: jnp.vdot(smooth_in_blocks(x, blocking), rows[1]))(rows[0])
    np.testing.assert_allclose(pulled, mapped[1], atol=1e-5)
