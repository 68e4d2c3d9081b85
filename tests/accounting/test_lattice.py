"""Pessimistic lattices overestimate divergences, optimistic ones underestimate, both slightly."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from optax_lsdp.accounting._dominating_pairs import (
    addition_pair,
    fixed_size_pair,
    group_removal_pair,
    removal_pair,
    replacement_pair,
)
from optax_lsdp.accounting._lattice import _cell_masses, optimistic_lattice, pessimistic_lattice
from optax_lsdp.accounting._quadrature import quadrature
from tests.oracles import delta_of_one_step

kinds = st.sampled_from([removal_pair, addition_pair, replacement_pair])
rates = st.floats(-6, -0.01).map(lambda exponent: 10**exponent)
shifts = st.floats(0.01, 3.3)
shares = st.floats(-1.2, 1.2)


def divergence(lattice, mesh, epsilon):
    losses = lattice.positions * mesh
    kept = losses > epsilon
    return float(lattice.masses[kept] @ -np.expm1(epsilon - losses[kept])) + lattice.infinite


def scale(pair):
    losses, masses = quadrature(((1.0, pair),), 1e-25)
    return math.sqrt(masses @ losses**2)


@given(kind=kinds, rate=rates, shift=shifts, share=shares)
def test_the_true_divergence_lies_between_the_optimistic_and_the_pessimistic_lattice(
    kind, rate, shift, share
):
    pair = kind(rate, shift)
    mesh, tail = scale(pair) / 20, 1e-25
    epsilon = 3 * share * scale(pair)
    with mpmath.workdps(40):
        true = float(delta_of_one_step(pair.centres, pair.base, pair.change, epsilon))
    above = pessimistic_lattice(((1.0, pair),), mesh, 64, tail)
    below = optimistic_lattice(pair, mesh, 64, tail)
    high = divergence(above, mesh, epsilon - above.slack)
    low = divergence(below, mesh, epsilon)
    assert low <= true * (1 + 1e-9) + 1e-15
    assert true <= high * (1 + 1e-9) + 1e-300
    if shift <= 1:
        assert high - low <= 0.03 * scale(pair) + 1e-15  # both are close


@given(rate=rates, shift=shifts)
def test_a_pessimistic_lattice_keeps_the_masses_of_p_and_q(rate, shift):
    for pair in (
        removal_pair(rate, shift),
        addition_pair(rate, shift),
        replacement_pair(rate, shift),
    ):
        mesh = scale(pair) / 20
        lattice = pessimistic_lattice(((1.0, pair),), mesh, 64, 1e-25)
        total = lattice.masses.sum() + lattice.infinite
        assert 1 - 1e-14 <= total <= 1 + 1e-11
        other = float(lattice.masses @ np.exp(-lattice.positions * mesh))
        assert abs(other - 1) < 1e-9  # except for the mass at infinity


@pytest.mark.parametrize("rate", [0.001, 0.2])
def test_a_folded_pair_covers_both_directions(rate):
    pair, mirrored = removal_pair(rate, 1.5), addition_pair(rate, 1.5)
    mesh = scale(pair) / 30
    lattice = pessimistic_lattice(((1.0, fixed_size_pair(rate, 1.5)),), mesh, 128, 1e-25)
    for epsilon in (0.5 * mesh, 3 * mesh, 40 * mesh):
        for sign, one in ((1, pair), (-1, mirrored)):
            true = float(delta_of_one_step(one.centres, one.base, one.change, sign * epsilon))
            found = divergence(lattice, mesh, sign * epsilon)
            assert true <= found * (1 + 1e-12) <= true * 1.02 + 1e-9


def test_the_divergence_of_a_mixture_is_the_mean_divergence():
    pairs = removal_pair(0.1, 1.0), group_removal_pair(0.1, 1.0, 2)
    lattices = [pessimistic_lattice(((1.0, pair),), 0.01, 64, 1e-25) for pair in pairs]
    mixed = pessimistic_lattice(((0.75, pairs[0]), (0.25, pairs[1])), 0.01, 64, 1e-25)
    for epsilon in (-0.05, 0.0, 0.3):
        parts = [divergence(lattice, 0.01, epsilon) for lattice in lattices]
        found = divergence(mixed, 0.01, epsilon)
        np.testing.assert_allclose(found, 0.75 * parts[0] + 0.25 * parts[1], rtol=1e-12)


def test_the_quadrature_integrates_p_and_q():
    for pair in (removal_pair(0.01, 1.0), addition_pair(0.01, 1.0), replacement_pair(0.3, 0.5)):
        losses, masses = quadrature(((1.0, pair),), 1e-25)
        np.testing.assert_allclose(masses.sum(), 1, rtol=1e-12)
        np.testing.assert_allclose(masses @ np.exp(-losses), 1, rtol=1e-12)  # E_P[Q/P]


@given(
    left=st.floats(-36, 36),
    width=st.floats(-6, 1).map(lambda exponent: 10**exponent),
)
def test_the_error_of_a_cell_mass_is_bounded(left, width):
    ends = np.array([[left], [left + width]])
    mass, error = _cell_masses(ends)
    with mpmath.workdps(40):
        a, b = (mpmath.mpf(float(end)) for end in ends[:, 0])
        true = mpmath.ncdf(-a) - mpmath.ncdf(-b) if a > 0 else mpmath.ncdf(b) - mpmath.ncdf(a)
        assert abs(true - mpmath.mpf(float(mass[0, 0]))) <= error[0, 0]
    assert error[0, 0] <= 4e-12 * ndtr(-abs(left) + width)
