"""γ and β agree with the paper's tables, their sums, and the variance of smoothed noise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.smoothing import grid_beta, grid_gamma, ring_beta, ring_gamma
from optax_lsdp.smoothing._spectrum import line_kernel, ring_decay

PAPER_GAMMA = {1: 0.447, 2: 0.333, 3: 0.277, 4: 0.243, 5: 0.218}  # its tables, at all three d
PAPER_BETA = {1: 0.268, 2: 0.185, 3: 0.149, 4: 0.128, 5: 0.114}


def eigenvalues(smoothing, size):
    return 1 + 2 * smoothing * (1 - np.cos(2 * np.pi * np.arange(size) / size))


@pytest.mark.parametrize("size", [1_000, 10_000, 100_000])
@pytest.mark.parametrize("smoothing", [1, 2, 3, 4, 5])
def test_the_papers_tables_are_reproduced(smoothing, size):
    unit = 1e-3  # the tables print three digits, cut or rounded
    assert abs(ring_gamma(smoothing, size) - PAPER_GAMMA[smoothing]) < unit
    assert abs(ring_beta(smoothing, size) - PAPER_BETA[smoothing]) < unit


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 50, 1001])
@pytest.mark.parametrize("smoothing", [0.0, 1e-9, 1e-3, 0.5, 1.0, 30.0, 1e4])
def test_gamma_and_beta_of_a_ring_are_means_over_its_spectrum(smoothing, size):
    spectrum = eigenvalues(smoothing, size)
    np.testing.assert_allclose(ring_gamma(smoothing, size), (1 / spectrum).mean(), rtol=1e-9)
    np.testing.assert_allclose(ring_beta(smoothing, size), (1 / spectrum**2).mean(), rtol=1e-9)


@pytest.mark.parametrize("smoothing", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("size", [5, 1000])
def test_smoothed_noise_has_the_variance_beta(smoothing, size):
    rows = 200_000 // size
    noise = jax.random.normal(jax.random.key(0), (rows, size))
    tx = lsdp.laplacian_smooth(smoothing, layout=lambda path, shape: lsdp.Grid((1,)))
    smoothed, _ = jax.jit(tx.update)(noise, tx.init(noise))
    # Neighbours are correlated over 1/(1 − ρ) entries: fewer independent samples.
    samples = noise.size * (1 - ring_decay(smoothing))
    error = 5 * np.sqrt(2 / samples)
    assert abs(float(smoothed.var()) / ring_beta(smoothing, size) - 1) < error


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("sizes", [(1,), (2,), (7,), (50,), (1, 1), (2, 3), (8, 8), (3, 4, 5)])
def test_gamma_and_beta_of_a_grid_are_means_over_its_spectrum(sizes, order, boundary):
    around = 1 if boundary == "periodic" else 2
    waves = [4 * np.sin(np.pi * np.arange(d) / (around * d)) ** 2 for d in sizes]
    energy = sum(np.meshgrid(*waves, indexing="ij"))
    for smoothing in (0.0, 1e-3, 0.5, 3.0, 1e3):
        spectrum = 1 + smoothing * energy**order
        for mean, power in ((grid_gamma, 1), (grid_beta, 2)):
            got = mean(smoothing, sizes, boundary=boundary, order=order)
            np.testing.assert_allclose(got, (1 / spectrum**power).mean(), rtol=1e-9)


@pytest.mark.parametrize("boundary", ["periodic", "neumann"])
@pytest.mark.parametrize("order", [1, 2])
def test_smoothed_noise_on_a_grid_has_the_variance_beta(order, boundary):
    noise = jax.random.normal(jax.random.key(0), (2_000, 8, 8))
    grid = lsdp.Grid((1, 2))
    tx = lsdp.laplacian_smooth(2.0, layout=lambda path, shape: grid, order=order, boundary=boundary)
    smoothed, _ = jax.jit(tx.update)(noise, tx.init(noise))
    promised = grid_beta(2.0, (8, 8), boundary=boundary, order=order)
    # Few waves survive: about one for each row at worst.
    assert abs(float(smoothed.var()) / promised - 1) < 5 * np.sqrt(2 / len(noise))


@pytest.mark.parametrize("order", [1, 2, 4])
@pytest.mark.parametrize("smoothing", [0.01, 1.0, 100.0])
def test_the_kernel_on_a_line_agrees_with_a_long_ring(smoothing, order):
    size, error = 2**14, 1e-12
    waves = 4 * np.sin(np.pi * np.arange(size // 2 + 1) / size) ** 2
    ring = np.fft.irfft(1 / (1 + smoothing * waves**order), size)
    half = line_kernel(smoothing, order, error)
    np.testing.assert_allclose(half, ring[: len(half)], atol=1e-14)
    assert 2 * np.abs(ring[len(half) : size // 2]).sum() < 2 * error


@pytest.mark.parametrize("size", [1, 50, 10_000])
@pytest.mark.parametrize("smoothing", [0.0, 1e-3, 1.0, 1e6, 1e12, 1e20, 1e30])
def test_rings_leave_the_noise_that_their_waves_leave_for_any_strength(smoothing, size):
    eigenvalues = 1 + 4 * smoothing * np.sin(np.pi * np.arange(size) / size) ** 2
    for found, power in ((ring_gamma, 1), (ring_beta, 2)):
        exact = np.mean(eigenvalues**-power)
        np.testing.assert_allclose(found(smoothing, size), exact, rtol=1e-9)
        np.testing.assert_allclose(found(jnp.float32(smoothing), size, jnp), exact, rtol=1e-4)
