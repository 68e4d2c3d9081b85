"""One step on the lattice: above the true divergence at every ε, or below it, and close."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from optax_lsdp.accounting._loss import _cell_masses, contract, sample, spread
from optax_lsdp.accounting._pairs import add, fixed_size, remove, remove_group, replace
from tests.oracles import delta_of_one_step

kinds = st.sampled_from([remove, add, replace])
rates = st.floats(-6, -0.01).map(lambda exponent: 10**exponent)
shifts = st.floats(0.01, 3.3)
shares = st.floats(-1.2, 1.2)


def divergence(lattice, mesh, epsilon):
    losses = lattice.positions * mesh
    kept = losses > epsilon
    return float(lattice.masses[kept] @ -np.expm1(epsilon - losses[kept])) + lattice.infinite


def scale(pair):
    losses, masses = sample(((1.0, pair),), 1e-25)
    return math.sqrt(masses @ losses**2)


@given(kind=kinds, rate=rates, shift=shifts, share=shares)
def test_what_is_spread_is_above_and_what_is_contracted_is_below(kind, rate, shift, share):
    pair = kind(rate, shift)
    mesh, tail = scale(pair) / 20, 1e-25
    epsilon = 3 * share * scale(pair)
    with mpmath.workdps(40):
        true = float(delta_of_one_step(pair.centres, pair.base, pair.change, epsilon))
    above = spread(((1.0, pair),), mesh, 64, tail)
    below = contract(pair, mesh, 64, tail)
    high = divergence(above, mesh, epsilon - above.slack)
    low = divergence(below, mesh, epsilon)
    assert low <= true * (1 + 1e-9) + 1e-15
    assert true <= high * (1 + 1e-9) + 1e-300
    if shift <= 1:
        assert high - low <= 0.03 * scale(pair) + 1e-15  # both are close


@given(rate=rates, shift=shifts)
def test_nothing_is_lost(rate, shift):
    for pair in (remove(rate, shift), add(rate, shift), replace(rate, shift)):
        mesh = scale(pair) / 20
        lattice = spread(((1.0, pair),), mesh, 64, 1e-25)
        total = lattice.masses.sum() + lattice.infinite
        assert 1 - 1e-14 <= total <= 1 + 1e-11
        other = float(lattice.masses @ np.exp(-lattice.positions * mesh))
        assert abs(other - 1) < 1e-9  # Q keeps its mass too, but for what is at infinity


@pytest.mark.parametrize("rate", [0.001, 0.2])
def test_folded_losses_are_those_of_both_directions(rate):
    pair, mirrored = remove(rate, 1.5), add(rate, 1.5)
    mesh = scale(pair) / 30
    lattice = spread(((1.0, fixed_size(rate, 1.5)),), mesh, 128, 1e-25)
    for epsilon in (0.5 * mesh, 3 * mesh, 40 * mesh):
        for sign, one in ((1, pair), (-1, mirrored)):
            true = float(delta_of_one_step(one.centres, one.base, one.change, sign * epsilon))
            found = divergence(lattice, mesh, sign * epsilon)
            assert true <= found * (1 + 1e-12) <= true * 1.02 + 1e-9


def test_a_mixture_of_pairs_is_their_mean():
    pairs = remove(0.1, 1.0), remove_group(0.1, 1.0, 2)
    lattices = [spread(((1.0, pair),), 0.01, 64, 1e-25) for pair in pairs]
    mixed = spread(((0.75, pairs[0]), (0.25, pairs[1])), 0.01, 64, 1e-25)
    for epsilon in (-0.05, 0.0, 0.3):
        parts = [divergence(lattice, 0.01, epsilon) for lattice in lattices]
        found = divergence(mixed, 0.01, epsilon)
        np.testing.assert_allclose(found, 0.75 * parts[0] + 0.25 * parts[1], rtol=1e-12)


def test_the_nodes_integrate():
    for pair in (remove(0.01, 1.0), add(0.01, 1.0), replace(0.3, 0.5)):
        losses, masses = sample(((1.0, pair),), 1e-25)
        np.testing.assert_allclose(masses.sum(), 1, rtol=1e-12)
        np.testing.assert_allclose(masses @ np.exp(-losses), 1, rtol=1e-12)  # E_P[Q/P]


@given(
    left=st.floats(-36, 36),
    width=st.floats(-6, 1).map(lambda exponent: 10**exponent),
)
def test_the_error_of_a_cells_mass_is_bounded(left, width):
    ends = np.array([[left], [left + width]])
    mass, error = _cell_masses(ends)
    with mpmath.workdps(40):
        a, b = (mpmath.mpf(float(end)) for end in ends[:, 0])
        true = mpmath.ncdf(-a) - mpmath.ncdf(-b) if a > 0 else mpmath.ncdf(b) - mpmath.ncdf(a)
        assert abs(true - mpmath.mpf(float(mass[0, 0]))) <= error[0, 0]
    assert error[0, 0] <= 4e-12 * ndtr(-abs(left) + width)
