"""SampledGaussian: reference values, extremes and bad input."""

import math
import warnings

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optax_lsdp.accounting import (
    Composition,
    SampledGaussian,
    _queries,
    show_epsilon,
    statement,
    steps_of_epochs,
)
from tests.cases import slow

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


@pytest.mark.parametrize("noise", [1e-200, 1e-3, 0.05])
def test_hardly_any_noise_is_answered(noise):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (("poisson", "add_remove"), ("without_replacement", "replace_one")):
            low, epsilon = build(noise, 0.01, 100, kind).epsilon_bounds(1e-5)
            assert 0 <= low <= epsilon and epsilon > 100


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


@pytest.mark.parametrize("count", [17, *slow(140)])
def test_many_different_steps_are_bounded_from_both_sides(count, monkeypatch):
    steps = 2000 // count
    run = Composition(tuple(SampledGaussian(1 + i / count, 0.005, steps) for i in range(count)))
    low, high = run.epsilon_bounds(1e-5)
    worse = Composition(tuple(SampledGaussian(1 + i / 8, 0.005, 250) for i in range(8)))
    assert low <= high <= 1.06 * low
    assert high < worse.epsilon(1e-5)  # eighths of the schedule at their least noise
    monkeypatch.setattr(_queries, "_MOST_PARTS", 1000)  # nothing is rounded
    exact = run.epsilon(1e-5)
    assert low <= exact <= high * (1 + 1e-4)


@pytest.mark.parametrize(
    ("run", "least"),
    [
        # All of q = 1, cut: the example takes the place of another.
        (SampledGaussian(1.0, 1.0, 1, dataset_size=100, max_batch_size=99), 9.9),
        (SampledGaussian(10.0, 1.0, 1000, dataset_size=1000, max_batch_size=900), 39.81),
        # Groups that δ in doubles cannot follow.
        (SampledGaussian(1.0, 1.0, 1, neighbouring="replace_one").group(50), 5425.5),
        (build(0.05, 0.99, 1, ("without_replacement", "replace_one")).group(10), 78_000),
        # Steps that are counted in a narrow type.
        (
            SampledGaussian(1.0, 0.01, np.uint8(200)) + SampledGaussian(1.0, 0.01, np.uint8(200)),
            1.2,
        ),
    ],
)
def test_what_once_was_reported_too_low_is_not(run, least):
    assert run.epsilon(1e-5) >= least


@pytest.mark.parametrize("noise", [1e5, 1e7])
def test_the_closed_form_is_bounded_from_both_sides(noise):
    low, high = SampledGaussian(noise, 1, 1).epsilon_bounds(1e-15)
    with mpmath.workdps(60):
        mu = 1 / mpmath.mpf(noise)

        def delta(epsilon):
            e = mpmath.mpf(epsilon)
            return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)

        assert delta(high) <= mpmath.mpf(1e-15) <= delta(low)
    assert high <= 1.0001 * low


@pytest.mark.parametrize(
    ("run", "delta"),
    [
        (SampledGaussian(1.0, 0.01, 1000), 0.161),
        (SampledGaussian(0.3, 1e-7, 2), 1e-3),
        (SampledGaussian(0.3, 1e-7, 2), 1e-8),
        (SampledGaussian(50.0, 1e-4, 1000).group(1000), 1e-5),
        (SampledGaussian(1.0, 1, 1000, sampling="full") + SampledGaussian(1.0, 0.01, 10), 1e-5),
        (SampledGaussian(1e300, 0.1, 10), 1e-5),
    ],
)
def test_strange_questions_are_answered(run, delta):
    low, high = run.epsilon_bounds(delta)
    assert 0 <= low <= high < math.inf
    assert run.delta(high) <= delta


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
        "must be 'replace_one' with sampling='without_replacement', got None; there is no default",
    ),
    "no relation, shuffled": (
        lambda: build(1.0, 0.1, 1, ("shuffled", None)),
        "must be 'zero_out' or 'replace_one' with sampling='shuffled', got None; there is no",
    ),
    "no analysis": (
        lambda: build(1.0, 0.1, 1, ("without_replacement", "add_remove")),
        "must be 'replace_one' with sampling='without_replacement', got 'add_remove'; nothing else",
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
    "no epochs": (
        lambda: steps_of_epochs(0, dataset_size=9, batch_size=3),
        "`epochs` must be positive and finite, got 0",
    ),
    "more than there is": (
        lambda: steps_of_epochs(1, dataset_size=3, batch_size=9),
        "`batch_size` must be at most `dataset_size`, got 9 of 3",
    ),
    "epochs of something else": (
        lambda: steps_of_epochs(1, dataset_size=9, batch_size=3, sampling="sorted"),
        "`sampling` must be .* got 'sorted'",
    ),
    "two relations": (
        lambda: build(1.0, 0.1, 1) + build(1.0, 0.1, 1, ("poisson", "zero_out")),
        "`neighbouring` must be the same in all runs",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_statement_of_a_huge_epsilon_does_not_reassure():
    little = SampledGaussian(1.0, 1.0, 10, sampling="full")
    assert little.advantage() > 0.85  # nine of ten guesses are right
    said = " ".join(statement(little, 1e-5).split())
    assert "promises little" in said and "cannot" not in said
    assert "promises" not in statement(SampledGaussian(1.1, 0.01, 100), 1e-5)


@given(st.floats(1e-9, 1e9), st.integers(1, 8))
def test_bounds_are_rounded_to_their_safe_side(epsilon, digits):
    upper = float(show_epsilon(epsilon, digits))
    lower = float(show_epsilon(epsilon, digits, is_lower_bound=True))
    close = 1 + 1e-9
    assert lower <= epsilon * close and epsilon <= upper * close
    assert upper - lower <= 10.0 ** (1 - digits) * epsilon * close
