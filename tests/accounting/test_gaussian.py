"""The Gaussian mechanism in closed form: held to its definition, and rounded the safe way."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier
from optax_lsdp.accounting._gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu

multipliers = st.floats(0.1, 1e4)
counts = st.integers(1, 10**5)
deltas = st.floats(1e-12, 0.1)
relations = st.sampled_from(["add_remove", "zero_out", "replace_one"])


def run(z, steps, neighbouring="add_remove"):
    return SampledGaussian(z, 1, steps, sampling="full", neighbouring=neighbouring)


@pytest.mark.parametrize("mu", [0.05, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0, 4.0])
def test_delta_is_the_hockey_stick_divergence(mu, epsilon):
    p, q = scipy.stats.norm(mu), scipy.stats.norm(0)
    start = epsilon / mu + mu / 2  # where p = e^ε q
    expected, _ = scipy.integrate.quad(
        lambda x: p.pdf(x) - np.exp(epsilon) * q.pdf(x), start, start + 40, epsabs=1e-14
    )
    np.testing.assert_allclose(gaussian_delta(epsilon, mu), expected, rtol=1e-6, atol=1e-13)


def test_the_reference_value_holds():
    # From an independent accountant: q = 1, z = 20, T = 1000, δ = 1e-5.
    assert 7.51127 < run(20, 1000).epsilon(1e-5) < 7.51129


@given(z=multipliers, steps=counts, delta=deltas, neighbouring=relations)
def test_epsilon_and_delta_are_inverse_and_err_upwards(z, steps, delta, neighbouring):
    mechanism = run(z, steps, neighbouring)
    epsilon = mechanism.epsilon(delta)
    assert mechanism.delta(epsilon) <= delta
    if epsilon > 1e-6:
        assert mechanism.delta(epsilon * (1 - 1e-6)) > delta


@given(z=multipliers, steps=counts, delta=deltas)
def test_epsilon_falls_with_noise_and_delta_and_grows_with_steps(z, steps, delta):
    epsilon = run(z, steps).epsilon(delta)
    assert run(z * 1.1, steps).epsilon(delta) <= epsilon
    assert run(z, steps).epsilon(min(delta * 2, 0.5)) <= epsilon
    assert run(z, steps + 1).epsilon(delta) >= epsilon


@given(z=multipliers, steps=counts, delta=deltas)
def test_replacing_an_example_is_removing_it_at_half_the_noise(z, steps, delta):
    replaced = run(z, steps, "replace_one").epsilon(delta)
    np.testing.assert_allclose(replaced, run(z / 2, steps).epsilon(delta), rtol=1e-12)


@given(epsilon=st.floats(0.01, 20), delta=deltas, steps=counts, neighbouring=relations)
def test_calibrated_noise_meets_the_budget_and_no_more(epsilon, delta, steps, neighbouring):
    kwargs = dict(sampling_rate=1, steps=steps, sampling="full", neighbouring=neighbouring)
    z = calibrate_noise_multiplier(epsilon=epsilon, delta=delta, **kwargs)
    assert run(z, steps, neighbouring).epsilon(delta) <= epsilon
    assert run(z * (1 - 1e-6), steps, neighbouring).epsilon(delta) > epsilon


def test_tiny_delta_is_not_lost_to_cancellation():
    import mpmath

    mpmath.mp.dps = 60
    for mu, epsilon in [(0.1, 0.7), (1.0, 9.0), (0.01, 0.08), (5.0, 45.0)]:
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        true = mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)
        assert true <= gaussian_delta(epsilon, mu) <= true * (1 + 1e-6)


def test_extreme_numbers_are_answered():
    assert run(1.0, 1).epsilon(1e-310) > 30
    assert run(1e-200, 1).epsilon(1e-5) == math.inf
    budget = dict(epsilon=1e300, delta=1e-5, sampling_rate=1, steps=1, sampling="full")
    assert calibrate_noise_multiplier(**budget) > 0


def test_the_inverses_agree():
    for mu in (0.01, 0.3, 2.0):
        for delta in (1e-10, 1e-3):
            np.testing.assert_allclose(
                gaussian_mu(gaussian_epsilon(delta, mu), delta), mu, rtol=1e-9
            )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(0, 10), "`noise_multiplier` .* got 0; without noise"),
        (lambda: run(float("nan"), 10), "`noise_multiplier` .* got nan"),
        (lambda: run(1, -1), "`steps` .* got -1"),
        (lambda: run(1, 1.5), "`steps` .* got 1.5"),
        (lambda: run(1, 1, "swap"), "`neighbouring` .*'replace_one'.* got 'swap'"),
        (lambda: run(1, 1).epsilon(0), "`delta` .* got 0"),
        (lambda: run(1, 1).epsilon(1.0), "`delta` .* below 1, got 1.0"),
        (lambda: run(1, 1).delta(-1), "`epsilon` .* got -1"),
        (lambda: SampledGaussian(1, 0.5, 1, sampling="full"), "`sampling_rate` must be 1"),
        (lambda: SampledGaussian(1, 1, 1, sampling="shuffle"), "`sampling` .* got 'shuffle'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
