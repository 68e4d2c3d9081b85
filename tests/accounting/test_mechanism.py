"""SampledGaussian: reference values, laws, extremes and bad input."""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from optax_lsdp.accounting import Composition, SampledGaussian
from optax_lsdp.accounting._gaussian import gaussian_delta

# Values of an independent accountant, to the digits given.
REFERENCES = [
    (256 / 60_000, 1.1, 14_100, 1e-5, 2.38512),
    (4096 / 50_000, 3.0, 2_450, 1e-5, 6.50127),
    (1024 / 1_281_167, 1.0, 112_500, 1e-7, 1.72636),
    (0.01, 0.5, 1_000, 1e-5, 13.36082),
    (128 / 60_000, 10.08, 23_450, 1e-5, 0.10000),
    (1e-3, 1.0, 10**6, 1e-6, 6.69427),
    (1.0, 20.0, 1_000, 1e-5, 7.51128),
    (0.01, 1.0, 10**4, 1e-12, 10.347),
    (128 / 60_000, 99.36, 23_450, 1e-5, 0.00777),
    (256 / 60_000, 2.0, 14_100, 1e-5, 1.017),
    (256 / 60_000, 5.0, 14_100, 1e-5, 0.3505),
]
FIXED_SIZE = [  # z, batch size, steps, lower and upper bound, replacing one of 60,000
    (99.36, 128, 23_450, 0.01704, 0.01719),
    (33.26, 128, 23_450, 0.05757, 0.05904),
    (14.87, 128, 23_450, 0.13984, 0.14759),
    (8.0, 256, 14_100, 0.450, 0.494),
    (2.0, 256, 14_100, 2.83, 3.68),
]

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
few = settings(max_examples=12)


def build(noise, rate, steps, kind=("poisson", "add_remove"), **options):
    sampling, neighbouring = kind
    return SampledGaussian(
        noise, rate, steps, sampling=sampling, neighbouring=neighbouring, **options
    )


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "reference"), REFERENCES)
def test_reference_values_are_met_from_above(rate, noise, steps, delta, reference):
    epsilon = SampledGaussian(noise, rate, steps).epsilon(delta)
    half_a_digit = 0.5 * 10.0 ** -len(f"{reference}".partition(".")[2])
    assert reference - half_a_digit <= epsilon <= (reference + half_a_digit) * 1.001


@pytest.mark.parametrize(("noise", "batch", "steps", "lower", "upper"), FIXED_SIZE)
def test_without_replacement_the_bounds_are_those_known(noise, batch, steps, lower, upper):
    kind = "without_replacement", "replace_one"
    low, high = build(noise, batch / 60_000, steps, kind).epsilon_bounds(1e-5)
    np.testing.assert_allclose([low, high], [lower, upper], rtol=2e-3)
    if noise >= 8:
        assert high <= 1.10 * low
    if noise >= 33:
        assert high <= 1.03 * low


@settings(max_examples=30)
@given(noise=noises, rate=rates, steps=counts, delta=deltas, kind=kinds)
def test_delta_of_epsilon_is_no_more_than_delta(noise, rate, steps, delta, kind):
    run = build(noise, rate, steps, kind)
    low, epsilon = run.epsilon_bounds(delta)
    assert run.delta(epsilon) <= delta
    assert 0 <= low <= epsilon
    if kind[0] == "poisson" and noise > 1 and steps > 10 and low > 0:
        assert epsilon <= 1.01 * low


@few
@given(noise=noises, rate=rates, steps=counts, delta=deltas, kind=kinds)
def test_epsilon_falls_with_noise_and_delta_and_grows_with_steps_and_rate(
    noise, rate, steps, delta, kind
):
    epsilon = build(noise, rate, steps, kind).epsilon(delta)
    looseness = 1.001  # within which every answer is above the truth
    assert build(1.1 * noise, rate, steps, kind).epsilon(delta) <= looseness * epsilon
    assert build(noise, rate, steps, kind).epsilon(2 * delta) <= looseness * epsilon
    assert build(noise, rate, 2 * steps, kind).epsilon(delta) * looseness >= epsilon
    assert build(noise, min(1, 1.1 * rate), steps, kind).epsilon(delta) * looseness >= epsilon


@few
@given(
    noise=noises, rate=rates, first=counts, second=counts, delta=deltas, share=st.floats(0.1, 0.9)
)
def test_two_halves_cost_no_more_together_than_apart(noise, rate, first, second, delta, share):
    one, two = build(noise, rate, first), build(1.3 * noise, rate, second)
    apart = one.epsilon(share * delta) + two.epsilon((1 - share) * delta)
    assert (one + two).epsilon(delta) <= 1.001 * apart + 1e-12


@few
@given(noise=noises, rate=rates, first=counts, second=counts, delta=deltas, kind=kinds)
def test_adding_runs_of_one_kind_is_one_longer_run(noise, rate, first, second, delta, kind):
    together = build(noise, rate, first, kind) + build(noise, rate, second, kind)
    assert together.epsilon(delta) == build(noise, rate, first + second, kind).epsilon(delta)


@given(noise=noises, steps=counts, delta=deltas, relation=kinds.map(lambda kind: kind[1]))
def test_at_a_rate_of_one_every_example_is_in_every_batch(noise, steps, delta, relation):
    full = build(noise, 1.0, steps, ("full", relation)).epsilon(delta)
    assert build(noise, 1, steps, ("poisson", relation)).epsilon(delta) == full
    almost = build(noise, 1 - 1e-6, steps, ("poisson", relation)).epsilon(delta)
    np.testing.assert_allclose(almost, full, rtol=1e-3)


@given(noise=noises, rate=rates, delta=deltas)
def test_one_step_is_amplified_in_closed_form(noise, rate, delta):
    epsilon = SampledGaussian(noise, rate, 1).epsilon(delta)

    def true(epsilon):  # removing is worse than adding at ε ≥ 0
        return rate * gaussian_delta(math.log1p(math.expm1(epsilon) / rate), 1 / noise)

    assert true(epsilon) <= delta
    if epsilon > 0:
        assert true(epsilon * 0.999) >= delta * (1 - 1e-9)
    else:
        assert true(0.0) <= delta


@few
@given(noise=st.floats(0.7, 20), rate=rates, steps=counts, delta=deltas)
def test_replacing_one_lies_between_one_and_two(noise, rate, steps, delta):
    one = build(noise, rate, steps)
    replaced = build(noise, rate, steps, ("poisson", "replace_one")).epsilon(delta)
    assert one.epsilon(delta) <= 1.001 * replaced
    assert replaced <= 1.001 * one.group(2).epsilon(delta)


@few
@given(noise=st.floats(0.7, 20), rate=rates, steps=counts, size=st.integers(2, 6))
def test_a_group_costs_less_than_its_members_one_by_one(noise, rate, steps, size):
    one = build(noise, rate, steps)
    epsilon = one.epsilon(1e-8)
    grown = sum(math.exp(i * epsilon) for i in range(size)) * 1e-8
    if grown < 0.5:
        assert one.group(size).epsilon(grown) <= 1.001 * size * epsilon + 1e-9
    replaced = build(noise, rate, 10, ("poisson", "replace_one"))
    assert replaced.group(2).delta(1.0) <= 1.0
    assert replaced.group(2).epsilon(1e-6) >= replaced.epsilon(1e-6)


@few
@given(noise=noises, rate=rates, steps=counts)
def test_a_trade_off_is_convex_and_falls_and_agrees_with_delta(noise, rate, steps):
    run = build(noise, rate, steps)
    alphas = np.linspace(0, 1, 41)
    curve = run.trade_off(alphas)
    assert np.all(np.diff(curve) <= 1e-12) and np.all(np.diff(curve, 2) >= -1e-9)
    assert np.all(curve <= 1 - alphas + 1e-12) and curve[-1] == 0
    for epsilon in (0.0, 0.5, 2.0):
        delta = run.delta(epsilon)
        assert np.all(curve >= 1 - delta - math.exp(epsilon) * alphas - 2e-3)
    advantage = run.advantage()
    assert np.max(1 - alphas - curve) <= advantage + 1e-3
    assert run.trade_off(0.25) == curve[10]


def test_the_trade_off_of_full_batches_is_gaussian():
    run = SampledGaussian(5.0, 1, 25, sampling="full")
    alphas = np.linspace(0.01, 0.99, 9)
    np.testing.assert_allclose(ndtri(1 - alphas) - ndtri(run.trade_off(alphas)), 1.0, rtol=1e-9)


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-2, 0.3, 1.0])
@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0, 3.0, 100.0])
def test_extremes_are_answered_without_a_warning(noise, rate):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, epsilon = SampledGaussian(noise, rate, 10**6).epsilon_bounds(1e-12)
    assert 0 <= low <= epsilon < math.inf
    if noise >= 1:
        assert epsilon <= 1.02 * low
    finer = SampledGaussian(noise, rate, 10**6).delta(0.999 * epsilon)
    assert finer > 1e-12  # within 0.1 %, as far as the bound itself can tell


@pytest.mark.parametrize(("most", "cost"), [(256, 3.0), (256 + 5 * 16, 1 + 1e-5)])
def test_cutting_batches_costs_what_it_must(most, cost):
    run = SampledGaussian(2.0, 256 / 60_000, 14_100)
    cut = SampledGaussian(2.0, 256 / 60_000, 14_100, max_batch_size=most, dataset_size=60_000)
    ratio = cut.epsilon(1e-5) / run.epsilon(1e-5)
    assert 1 - 1e-9 <= ratio <= cost
    assert cut.epsilon_bounds(1e-5)[0] <= cut.epsilon(1e-5)


def test_a_batch_that_cannot_be_cut_is_not():
    options = dict(max_batch_size=1000, dataset_size=1000)
    cut = SampledGaussian(1.0, 0.01, 100, neighbouring="zero_out", **options)
    assert cut.epsilon(1e-5) == SampledGaussian(1.0, 0.01, 100).epsilon(1e-5)


def test_shuffled_epochs_are_counted_whole():
    def run(steps):
        return build(2.0, 1 / 235, steps, ("shuffled", "zero_out"))

    assert run(235 * 4).mu == 1.0
    assert run(235 * 3 + 1).mu == 1.0
    assert run(235 * 2).epsilon(1e-5) < run(235 * 2 + 1).epsilon(1e-5)
    assert build(2.0, 256 / 60_000, 235, ("shuffled", "zero_out")).mu == math.sqrt(2) / 2
    assert build(2.0, 1 / 235, 235, ("shuffled", "replace_one")).mu == 1.0
    # Two parts of an epoch may be parts of two.
    np.testing.assert_allclose((run(100) + run(100)).epsilon(1e-5), run(470).epsilon(1e-5))
    assert run(470).epsilon_bounds(1e-5)[0] == 0.0


def test_nothing_done_costs_nothing():
    run = SampledGaussian(1.0, 0.1, 0)
    assert run.epsilon(1e-5) == run.delta(0.0) == run.advantage() == 0.0
    assert run.epsilon_bounds(1e-5) == (0.0, 0.0)
    assert run.trade_off(0.25) == pytest.approx(0.75)
    assert Composition(()).epsilon(1e-5) == 0.0
    assert (run + SampledGaussian(1.0, 0.1, 5)).parts == (SampledGaussian(1.0, 0.1, 5),)


def test_a_schedule_of_noise_is_composed_and_long_ones_are_rounded_up():
    noises = np.linspace(1.0, 2.0, 200)
    many = sum(SampledGaussian(float(noise), 0.01, 5) for noise in noises)
    few = sum(SampledGaussian(float(noise), 0.01, 100) for noise in noises[::20])
    fewer = sum(SampledGaussian(float(noise), 0.01, 100) for noise in noises[19::20])
    assert len(many.parts) == 200
    assert fewer.epsilon(1e-5) < many.epsilon(1e-5) < few.epsilon(1e-5)


def test_different_kinds_are_composed():
    sampled, full = SampledGaussian(1.0, 0.01, 100), SampledGaussian(20.0, 1, 50, sampling="full")
    both = sampled + full
    assert max(sampled.epsilon(1e-5), full.epsilon(1e-5)) < both.epsilon(1e-5)
    low, high = both.epsilon_bounds(1e-5)
    assert low <= high <= 1.002 * low
    assert sum([sampled, full]) == both


BAD = {
    "no noise": (lambda: SampledGaussian(0.0, 0.1, 1), "`noise_multiplier` .*ε is infinite"),
    "negative noise": (lambda: SampledGaussian(-1.0, 0.1, 1), "`noise_multiplier` .* got -1.0"),
    "rate of zero": (lambda: SampledGaussian(1.0, 0.0, 1), "`sampling_rate` .* got 0.0"),
    "rate above one": (lambda: SampledGaussian(1.0, 1.5, 1), "`sampling_rate` .* got 1.5"),
    "NaN rate": (lambda: SampledGaussian(1.0, math.nan, 1), "`sampling_rate` .* got nan"),
    "negative steps": (lambda: SampledGaussian(1.0, 0.1, -1), "`steps` .* got -1"),
    "half a step": (lambda: SampledGaussian(1.0, 0.1, 0.5), "`steps` .* got 0.5"),
    "δ of zero": (lambda: SampledGaussian(1.0, 0.1, 1).epsilon(0.0), "`delta` .* got 0.0"),
    "δ of one": (lambda: SampledGaussian(1.0, 0.1, 1).epsilon(1), "`delta` .* got 1"),
    "NaN δ": (lambda: SampledGaussian(1.0, 0.1, 1).epsilon(math.nan), "`delta` .* got nan"),
    "negative ε": (lambda: SampledGaussian(1.0, 0.1, 1).delta(-0.1), "`epsilon` .* got -0.1"),
    "sampling": (lambda: build(1.0, 0.1, 1, ("shuffle", None)), "`sampling` .* got 'shuffle'"),
    "relation": (lambda: build(1.0, 0.1, 1, ("poisson", "swap")), "`neighbouring` .* got 'swap'"),
    "no relation": (
        lambda: build(1.0, 0.1, 1, ("without_replacement", None)),
        "`neighbouring` must be one of 'replace_one', got None",
    ),
    "no relation, shuffled": (
        lambda: build(1.0, 0.1, 1, ("shuffled", None)),
        "`neighbouring` must be one of 'zero_out', 'replace_one', got None",
    ),
    "no analysis": (
        lambda: build(1.0, 0.1, 1, ("without_replacement", "add_remove")),
        "must be 'replace_one' with sampling='without_replacement', got 'add_remove'; no other",
    ),
    "shuffled, adding": (
        lambda: build(1.0, 0.1, 1, ("shuffled", "add_remove")),
        "must be 'zero_out' or 'replace_one' with sampling='shuffled'",
    ),
    "cut without a size": (
        lambda: SampledGaussian(1.0, 0.1, 1, max_batch_size=5),
        "`max_batch_size` must come with .* got sampling='poisson' and dataset_size=None",
    ),
    "cut, but not Poisson": (
        lambda: build(
            1.0, 0.1, 1, ("without_replacement", "replace_one"), max_batch_size=5, dataset_size=9
        ),
        "`max_batch_size` must come with",
    ),
    "group of none": (lambda: SampledGaussian(1.0, 0.1, 1).group(0), "`size` .* got 0"),
    "α above one": (lambda: SampledGaussian(1.0, 0.1, 1).trade_off(1.5), "`alpha` .* got 1.5"),
    "two relations": (
        lambda: build(1.0, 0.1, 1) + build(1.0, 0.1, 1, ("poisson", "zero_out")),
        "`neighbouring` must be the same in all runs",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
