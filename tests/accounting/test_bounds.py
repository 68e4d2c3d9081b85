"""Bounds on ε and δ agree with integrals in many digits, with sampling, and with each other."""

import math

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier
from optax_lsdp.accounting import _bounds as bounds
from optax_lsdp.accounting._bounds import gaussian_delta, gaussian_epsilon, gaussian_mu
from optax_lsdp.accounting._dominating_pairs import addition_pair, removal_pair, replacement_pair
from optax_lsdp.accounting._quadrature import contour_delta, quadrature, settings_for_epsilon
from tests.oracles import delta_by_contour

CASES = [  # rate, noise, steps, ε, θ
    (0.02, 4.0, 5000, 1.5, 8.0),
    (0.001, 0.8, 10**5, 4.0, 5.0),
    pytest.param(0.01, 1.0, 1000, 1.9, 5.0, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "epsilon", "tilt"), CASES)
def test_bounds_bracket_an_integral_in_many_digits(rate, noise, steps, epsilon, tilt):
    mu, q = 1 / mpmath.mpf(noise), mpmath.mpf(rate)

    def removed(x):
        ratio = 1 - q + q * mpmath.exp(mu * x - mu**2 / 2)
        return mpmath.log(ratio), ratio * mpmath.npdf(x)

    def added(x):
        ratio = 1 - q + q * mpmath.exp(-mu * x - mu**2 / 2)
        return -mpmath.log(ratio), mpmath.npdf(x)

    with mpmath.workdps(25):
        for pair, both in ((removal_pair, removed), (addition_pair, added)):
            true = float(delta_by_contour(both, steps, epsilon, tilt))
            step = pair(rate, 1 / noise)
            found = bounds.upper_delta([(((1.0, step),), steps)], epsilon)
            assert true <= found <= true * (1 + 2e-3 * tilt * epsilon)
            above = bounds.upper_epsilon([(((1.0, step),), steps)], true)
            assert epsilon <= above <= epsilon * 1.0003
            below = bounds.lower_epsilon([(step, steps)], true, above)
            assert epsilon * 0.97 <= below <= epsilon


@pytest.mark.parametrize(
    ("pair", "steps", "delta"),
    [
        (removal_pair(0.01, 2.0), 200, 1e-9),
        (addition_pair(0.05, 1.0), 300, 1e-7),
        (replacement_pair(0.02, 1.5), 100, 1e-10),
        (removal_pair(0.3, 0.3), 50, 1e-12),
    ],
    ids=["remove", "add", "replace", "often"],
)
def test_the_tail_agrees_with_importance_sampling(pair, steps, delta):
    # Importance sampling: draw tilted losses, and weight them by the inverse tilt.
    step = ((1.0, pair),)
    tilt = settings_for_epsilon([(step, steps)], delta).tilt
    epsilon = bounds.upper_epsilon([(step, steps)], delta)
    x = np.linspace(-14, 14 + pair.centres.max(), 200_001)
    losses = pair.loss(x)
    masses = np.exp(-((x[:, None] - pair.centres) ** 2) / 2) @ pair.weights
    masses *= (x[1] - x[0]) / math.sqrt(2 * math.pi)
    tilted = masses * np.exp(tilt * losses)
    moment = tilted.sum()
    rng = np.random.default_rng(0)
    cumulated = np.cumsum(tilted) / moment
    drawn = losses[np.searchsorted(cumulated, rng.uniform(size=(20_000, steps)) * cumulated[-1])]
    total = drawn.sum(axis=1)
    weights = np.exp(steps * math.log(moment) - tilt * total)
    values = weights * np.maximum(-np.expm1(epsilon - total), 0.0)
    mean, error = values.mean(), values.std() / math.sqrt(len(values))
    assert error < 0.05 * mean
    assert mean - 4.5 * error <= delta <= 1.02 * (mean + 4.5 * error)


def test_the_contour_integral_agrees_with_itself_or_gives_no_value():
    sure = [(quadrature(((1.0, removal_pair(0.02, 0.25)),), 1e-20), 5000)]
    value = contour_delta(sure, 1.5, 8.0, 40.0)
    np.testing.assert_allclose(value, contour_delta(sure, 1.5, 7.0, 45.0), rtol=1e-5)
    unsure = [(quadrature(((1.0, removal_pair(0.01, 1.0)),), 1e-20), 1)]
    assert contour_delta(unsure, 0.2, 20.0, 40.0) is None


@pytest.mark.parametrize("factor", [0.99, 3.0])
def test_a_contour_integral_that_contradicts_the_lattice_is_an_error(monkeypatch, factor):
    def biased(*args):
        value = contour_delta(*args)
        return value and value / factor

    phase = SampledGaussian(1.1, 256 / 60_000, 14_100)
    monkeypatch.setattr(bounds.quadrature, "contour_delta", biased)
    with pytest.raises(ArithmeticError, match="two methods disagree on δ"):
        phase.delta(2.0)


def test_bad_settings_make_a_bound_loose_and_not_wrong():
    steps = [(((1.0, removal_pair(0.01, 1.0)),), 1000)]
    counts = np.array([[1000.0]])
    epsilon = np.array([1.9])
    good = settings_for_epsilon(steps, 1e-5)
    true = float(bounds._compose([steps[0][0]], counts, good).upper_delta(epsilon)[0])
    for change in (
        {"tilt": good.tilt / 3, "window": good.window * 3},
        {"tilt": good.tilt * 1.5},
        {"mesh": good.mesh * 5},
        {"window": good.window / 8},
        {"per_octave": 16},
        {"tail": 1e-9},
    ):
        worse = bounds._compose([steps[0][0]], counts, good._replace(**change))
        assert float(worse.upper_delta(epsilon)[0]) >= true * (1 - 1e-3)


multipliers = st.floats(0.1, 1e4)
counts = st.integers(1, 10**5)
deltas = st.floats(1e-12, 0.1)
relations = st.sampled_from(["add_remove", "zero_out", "replace_one"])


def full(z, steps, neighbouring="add_remove"):
    return SampledGaussian(z, 1, steps, sampling="full", neighbouring=neighbouring)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
def test_gaussian_delta_is_the_hockey_stick_divergence(mu, epsilon):
    p, q = scipy.stats.norm(mu), scipy.stats.norm(0)
    start = epsilon / mu + mu / 2  # where p = e^ε q
    expected, _ = scipy.integrate.quad(
        lambda x: p.pdf(x) - np.exp(epsilon) * q.pdf(x), start, start + 40, epsabs=1e-14
    )
    np.testing.assert_allclose(gaussian_delta(epsilon, mu), expected, rtol=1e-6, atol=1e-13)


def test_a_gaussian_mechanism_has_its_reference_value():
    # From an independent accountant: q = 1, z = 20, T = 1000, δ = 1e-5.
    assert 7.51127 < full(20, 1000).epsilon(1e-5) < 7.51129


@given(z=multipliers, steps=counts, delta=deltas, neighbouring=relations)
def test_gaussian_epsilon_and_delta_are_inverse_and_rounded_up(z, steps, delta, neighbouring):
    mechanism = full(z, steps, neighbouring)
    epsilon = mechanism.epsilon(delta)
    assert mechanism.delta(epsilon) <= delta
    if epsilon > 1e-6:
        assert mechanism.delta(epsilon * (1 - 1e-6)) > delta


@given(z=multipliers, steps=counts, delta=deltas)
def test_gaussian_epsilon_falls_with_noise_and_delta_and_grows_with_steps(z, steps, delta):
    epsilon = full(z, steps).epsilon(delta)
    assert full(z * 1.1, steps).epsilon(delta) <= epsilon
    assert full(z, steps).epsilon(min(delta * 2, 0.5)) <= epsilon
    assert full(z, steps + 1).epsilon(delta) >= epsilon


@given(z=multipliers, steps=counts, delta=deltas)
def test_replacing_an_example_costs_as_much_as_removing_it_at_half_the_noise(z, steps, delta):
    replaced = full(z, steps, "replace_one").epsilon(delta)
    np.testing.assert_allclose(replaced, full(z / 2, steps).epsilon(delta), rtol=1e-12)


@given(epsilon=st.floats(0.01, 20), delta=deltas, steps=counts, neighbouring=relations)
def test_calibrated_gaussian_noise_is_the_least_within_the_budget(
    epsilon, delta, steps, neighbouring
):
    kwargs = dict(sampling_rate=1, steps=steps, sampling="full", neighbouring=neighbouring)
    z = calibrate_noise_multiplier(epsilon=epsilon, delta=delta, **kwargs)
    assert full(z, steps, neighbouring).epsilon(delta) <= epsilon
    assert full(z * (1 - 1e-6), steps, neighbouring).epsilon(delta) > epsilon


def test_a_tiny_gaussian_delta_is_not_lost_to_cancellation():
    with mpmath.workdps(60):
        for mu, epsilon in [(0.1, 0.7), (1.0, 9.0), (0.01, 0.08), (5.0, 45.0)]:
            m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
            true = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
            assert true <= gaussian_delta(epsilon, mu) <= true * (1 + 1e-6)


def test_extreme_gaussian_mechanisms_have_an_answer():
    assert full(1.0, 1).epsilon(1e-310) > 30
    assert full(1e-200, 1).epsilon(1e-5) == math.inf
    budget = dict(epsilon=1e300, delta=1e-5, sampling_rate=1, steps=1, sampling="full")
    assert calibrate_noise_multiplier(**budget) > 0


def test_gaussian_mu_is_the_inverse_of_gaussian_epsilon():
    for mu in (0.01, 0.3, 2.0):
        for delta in (1e-10, 1e-3):
            np.testing.assert_allclose(
                gaussian_mu(gaussian_epsilon(delta, mu), delta), mu, rtol=1e-9
            )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: full(0, 10), "`noise_multiplier` .* got 0; without noise"),
        (lambda: full(float("nan"), 10), "`noise_multiplier` .* got nan"),
        (lambda: full(1, -1), "`steps` .* got -1"),
        (lambda: full(1, 1.5), "`steps` .* got 1.5"),
        (lambda: full(1, 1, "swap"), "`neighbouring` .*'replace_one'.* got 'swap'"),
        (lambda: full(1, 1).epsilon(0), "`delta` .* got 0"),
        (lambda: full(1, 1).epsilon(1.0), "`delta` .* below 1, got 1.0"),
        (lambda: full(1, 1).delta(-1), "`epsilon` .* got -1"),
        (lambda: SampledGaussian(1, 0.5, 1, sampling="full"), "`sampling_rate` must be 1"),
        (lambda: SampledGaussian(1, 1, 1, sampling="shuffle"), "`sampling` .* got 'shuffle'"),
    ],
)
def test_a_message_names_the_wrong_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
