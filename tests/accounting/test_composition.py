"""Laws that the answers of every mechanism obey."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.accounting._bounds import gaussian_delta
from tests.cases import FULL

noises = st.floats(math.log(0.4), math.log(50)).map(math.exp)
rates = st.floats(math.log(1e-5), math.log(0.5)).map(math.exp)
counts = st.integers(1, 20_000)
deltas = st.floats(math.log(1e-10), math.log(0.05)).map(math.exp)
kinds = st.sampled_from(
    [
        ("poisson", "add_remove"),
        ("poisson", "replace_one"),
        ("poisson", "zero_out"),
        ("without_replacement", "replace_one"),
    ]
)
few = settings(max_examples=40 if FULL else 4)


def build(noise, rate, steps, kind=("poisson", "add_remove"), **options):
    sampling, neighbouring = kind
    return SampledGaussian(
        noise, rate, steps, sampling=sampling, neighbouring=neighbouring, **options
    )


@settings(max_examples=40 if FULL else 12)
@given(noise=noises, rate=rates, steps=counts, delta=deltas, kind=kinds)
def test_delta_of_epsilon_is_no_more_than_delta(noise, rate, steps, delta, kind):
    phase = build(noise, rate, steps, kind)
    low, epsilon = phase.epsilon_bounds(delta)
    assert phase.delta(epsilon) <= delta
    assert 0 <= low <= epsilon
    if kind[0] == "poisson" and noise > 1 and steps > 10 and low > 0:
        assert epsilon <= 1.01 * low


@few
@given(noise=noises, rate=rates, steps=counts, delta=deltas, kind=kinds)
def test_epsilon_falls_with_noise_and_delta_and_grows_with_steps_and_rate(
    noise, rate, steps, delta, kind
):
    epsilon = build(noise, rate, steps, kind).epsilon(delta)
    looseness = 1.001  # answers are above the true ε by at most this factor
    assert build(1.1 * noise, rate, steps, kind).epsilon(delta) <= looseness * epsilon
    assert build(noise, rate, steps, kind).epsilon(2 * delta) <= looseness * epsilon
    assert build(noise, rate, 2 * steps, kind).epsilon(delta) * looseness >= epsilon
    assert build(noise, min(1, 1.1 * rate), steps, kind).epsilon(delta) * looseness >= epsilon


@few
@given(
    noise=noises, rate=rates, first=counts, second=counts, delta=deltas, share=st.floats(0.1, 0.9)
)
def test_a_composition_costs_no_more_than_the_sum_of_its_phases(
    noise, rate, first, second, delta, share
):
    one, two = build(noise, rate, first), build(1.3 * noise, rate, second)
    apart = one.epsilon(share * delta) + two.epsilon((1 - share) * delta)
    assert (one + two).epsilon(delta) <= 1.001 * apart + 1e-12


@few
@given(noise=noises, rate=rates, first=counts, second=counts, delta=deltas, kind=kinds)
def test_adding_equal_phases_gives_one_longer_phase(noise, rate, first, second, delta, kind):
    together = build(noise, rate, first, kind) + build(noise, rate, second, kind)
    assert together.epsilon(delta) == build(noise, rate, first + second, kind).epsilon(delta)


@given(noise=noises, steps=counts, delta=deltas, relation=kinds.map(lambda kind: kind[1]))
def test_poisson_sampling_at_rate_one_is_full_batches(noise, steps, delta, relation):
    full = build(noise, 1.0, steps, ("full", relation)).epsilon(delta)
    assert build(noise, 1, steps, ("poisson", relation)).epsilon(delta) == full
    almost = build(noise, 1 - 1e-6, steps, ("poisson", relation)).epsilon(delta)
    np.testing.assert_allclose(almost, full, rtol=1e-3)


@given(noise=noises, rate=rates, delta=deltas)
def test_one_step_agrees_with_amplification_in_closed_form(noise, rate, delta):
    epsilon = SampledGaussian(noise, rate, 1).epsilon(delta)

    def true(epsilon):  # at ε ≥ 0 removing reveals more than adding
        return rate * gaussian_delta(math.log1p(math.expm1(epsilon) / rate), 1 / noise)

    assert true(epsilon) <= delta
    if epsilon > 0:
        assert true(epsilon * 0.999) >= delta * (1 - 1e-9)
    else:
        assert true(0.0) <= delta


@few
@given(noise=st.floats(0.7, 20), rate=rates, steps=counts, delta=deltas)
def test_replacing_one_costs_between_removing_one_and_removing_two(noise, rate, steps, delta):
    one = build(noise, rate, steps)
    replaced = build(noise, rate, steps, ("poisson", "replace_one")).epsilon(delta)
    assert one.epsilon(delta) <= 1.001 * replaced
    assert replaced <= 1.001 * one.group(2).epsilon(delta)


@few
@given(noise=st.floats(0.7, 20), rate=rates, steps=counts, size=st.integers(2, 6))
def test_a_group_costs_no_more_than_a_chain_of_single_changes(noise, rate, steps, size):
    one = build(noise, rate, steps)
    epsilon = one.epsilon(1e-8)
    grown = sum(math.exp(i * epsilon) for i in range(size)) * 1e-8
    if grown < 0.5:
        assert one.group(size).epsilon(grown) <= 1.001 * size * epsilon + 1e-9
    replaced = build(noise, rate, 10, ("poisson", "replace_one"))
    assert replaced.group(2).delta(1.0) <= 1.0
    assert replaced.group(2).epsilon(1e-6) >= replaced.epsilon(1e-6)


@few
@given(noise=st.floats(1, 20), rate=st.floats(1e-3, 0.3), steps=st.integers(20, 5000))
def test_a_trade_off_curve_is_convex_and_decreasing_and_agrees_with_delta(noise, rate, steps):
    phase = build(noise, rate, steps)
    alphas = np.linspace(0, 1, 41)
    curve = phase.trade_off(alphas)
    assert np.all(np.diff(curve) <= 1e-12) and np.all(np.diff(curve, 2) >= -1e-9)
    assert np.all(curve <= 1 - alphas + 1e-12) and curve[-1] == 0
    for epsilon in (0.0, 0.5, 2.0):
        delta = phase.delta(epsilon)
        assert np.all(curve >= 1 - delta - math.exp(epsilon) * alphas - 2e-3)
    advantage = phase.advantage()
    assert np.max(1 - alphas - curve) <= advantage + 1e-3
    assert phase.trade_off(0.25) == curve[10]


def test_the_trade_off_curve_of_full_batches_is_gaussian():
    phase = SampledGaussian(5.0, 1, 25, sampling="full")
    alphas = np.linspace(0.01, 0.99, 9)
    np.testing.assert_allclose(ndtri(1 - alphas) - ndtri(phase.trade_off(alphas)), 1.0, rtol=1e-9)
