"""SampledGaussian has the reference values of other accountants, and handles extreme arguments."""

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
    _composition,
    _quadrature,
    show_epsilon,
    statement,
    steps_of_epochs,
)

# Values of an independent accountant, to as many digits as are known.
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
def test_epsilon_is_at_least_the_reference_value_and_close_to_it(
    rate, noise, steps, delta, reference
):
    epsilon = SampledGaussian(noise, rate, steps).epsilon(delta)
    half_a_digit = 0.5 * 10.0 ** -len(f"{reference}".partition(".")[2])
    assert reference - half_a_digit <= epsilon <= (reference + half_a_digit) * 1.001


@pytest.mark.parametrize(("noise", "batch", "steps", "lower", "upper"), FIXED_SIZE)
def test_bounds_without_replacement_are_the_known_ones(noise, batch, steps, lower, upper):
    kind = "without_replacement", "replace_one"
    low, high = build(noise, batch / 60_000, steps, kind).epsilon_bounds(1e-5)
    np.testing.assert_allclose([low, high], [lower, upper], rtol=2e-3)
    if noise >= 8:
        assert high <= 1.10 * low
    if noise >= 33:
        assert high <= 1.03 * low


@pytest.mark.parametrize("rate", [1e-6, 1e-4, 1e-2, 0.3, 1.0])
@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0, 3.0, 100.0])
def test_extreme_phases_have_an_answer_without_a_warning(noise, rate):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, epsilon = SampledGaussian(noise, rate, 10**6).epsilon_bounds(1e-12)
    assert 0 <= low <= epsilon < math.inf
    if noise >= 1:
        assert epsilon <= 1.02 * low
    finer = SampledGaussian(noise, rate, 10**6).delta(0.999 * epsilon)
    assert finer > 1e-12  # the answer is within 0.1 % of where the bound meets δ


@pytest.mark.parametrize("noise", [1e-200, 1e-3, 0.05])
def test_hardly_any_noise_has_an_answer(noise):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in (("poisson", "add_remove"), ("without_replacement", "replace_one")):
            low, epsilon = build(noise, 0.01, 100, kind).epsilon_bounds(1e-5)
            assert 0 <= low <= epsilon and epsilon > 100


@pytest.mark.parametrize(("most", "cost"), [(256, 3.0), (256 + 5 * 16, 1 + 1e-5)])
def test_truncating_batches_costs_little_at_a_large_limit(most, cost):
    phase = SampledGaussian(2.0, 256 / 60_000, 14_100)
    cut = SampledGaussian(2.0, 256 / 60_000, 14_100, max_batch_size=most, dataset_size=60_000)
    ratio = cut.epsilon(1e-5) / phase.epsilon(1e-5)
    assert 1 - 1e-9 <= ratio <= cost
    assert cut.epsilon_bounds(1e-5)[0] <= cut.epsilon(1e-5)


def test_a_limit_of_the_dataset_size_changes_nothing():
    options = dict(max_batch_size=1000, dataset_size=1000)
    cut = SampledGaussian(1.0, 0.01, 100, neighbouring="zero_out", **options)
    assert cut.epsilon(1e-5) == SampledGaussian(1.0, 0.01, 100).epsilon(1e-5)


def test_parts_of_shuffled_epochs_count_as_whole_epochs():
    def phase(steps):
        return build(2.0, 1 / 235, steps, ("shuffled", "zero_out"))

    assert phase(235 * 4).mu == 1.0
    assert phase(235 * 3 + 1).mu == 1.0
    assert phase(235 * 2).epsilon(1e-5) < phase(235 * 2 + 1).epsilon(1e-5)
    assert build(2.0, 256 / 60_000, 235, ("shuffled", "zero_out")).mu == math.sqrt(2) / 2
    assert build(2.0, 1 / 235, 235, ("shuffled", "replace_one")).mu == 1.0
    # Two parts of an epoch may be parts of two different epochs.
    np.testing.assert_allclose((phase(100) + phase(100)).epsilon(1e-5), phase(470).epsilon(1e-5))
    assert phase(470).epsilon_bounds(1e-5)[0] == 0.0


def test_no_steps_cost_nothing():
    phase = SampledGaussian(1.0, 0.1, 0)
    assert phase.epsilon(1e-5) == phase.delta(0.0) == phase.advantage() == 0.0
    assert phase.epsilon_bounds(1e-5) == (0.0, 0.0)
    assert phase.trade_off(0.25) == pytest.approx(0.75)
    assert Composition(()).epsilon(1e-5) == 0.0
    assert (phase + SampledGaussian(1.0, 0.1, 5)).parts == (SampledGaussian(1.0, 0.1, 5),)


@pytest.mark.parametrize(
    ("count", "most"), [(40, 16), pytest.param(200, 64, marks=pytest.mark.full)]
)
def test_a_long_noise_schedule_is_rounded_to_less_noise(count, most, monkeypatch):
    monkeypatch.setattr(_composition, "_MOST_KINDS", most)
    noises, group = np.linspace(1.0, 2.0, count), count // 5
    schedule = sum(SampledGaussian(float(noise), 0.01, 5) for noise in noises)
    at_most = sum(SampledGaussian(float(noise), 0.01, 5 * group) for noise in noises[::group])
    at_least = sum(
        SampledGaussian(float(noise), 0.01, 5 * group) for noise in noises[group - 1 :: group]
    )
    assert len(schedule.parts) == count
    assert at_least.epsilon(1e-5) < schedule.epsilon(1e-5) < at_most.epsilon(1e-5)


@pytest.mark.parametrize(
    ("count", "most", "highest", "pieces"),
    [
        (6, 4, 1.04, 1),
        pytest.param(17, 64, 2.0, 8, marks=pytest.mark.full),
        pytest.param(140, 64, 2.0, 8, marks=pytest.mark.full),
    ],
)
def test_many_different_phases_are_bounded_from_both_sides(
    count, most, highest, pieces, monkeypatch
):
    monkeypatch.setattr(_composition, "_MOST_KINDS", most)
    monkeypatch.setattr(_quadrature, "_MOST_KINDS", min(most, 16))

    def schedule(count):
        noises = np.linspace(1.0, highest, count, endpoint=False)
        steps = 2000 // count
        return Composition(tuple(SampledGaussian(float(z), 0.005, steps) for z in noises))

    low, high = schedule(count).epsilon_bounds(1e-5)
    assert low <= high <= 1.06 * low
    assert high < schedule(pieces).epsilon(1e-5)  # a few pieces, each at its least noise
    monkeypatch.setattr(_composition, "_MOST_KINDS", 1000)  # nothing is rounded
    exact = schedule(count).epsilon(1e-5)
    assert low <= exact <= high * (1 + 1e-4)


@pytest.mark.parametrize(
    ("phase", "least"),
    [
        # Truncated at q = 1: the example takes the place of another.
        (SampledGaussian(1.0, 1.0, 1, dataset_size=100, max_batch_size=99), 9.9),
        (SampledGaussian(10.0, 1.0, 1000, dataset_size=1000, max_batch_size=900), 39.81),
        # Groups whose δ is below the smallest double.
        (SampledGaussian(1.0, 1.0, 1, neighbouring="replace_one").group(50), 5425.5),
        (build(0.05, 0.99, 1, ("without_replacement", "replace_one")).group(10), 78_000),
        # Steps as a narrow integer type, which overflows.
        (
            SampledGaussian(1.0, 0.01, np.uint8(200)) + SampledGaussian(1.0, 0.01, np.uint8(200)),
            1.2,
        ),
    ],
)
def test_epsilon_is_not_too_low_in_cases_that_once_failed(phase, least):
    assert phase.epsilon(1e-5) >= least


@pytest.mark.parametrize("noise", [1e5, 1e7])
def test_bounds_of_one_gaussian_bracket_the_closed_form(noise):
    low, high = SampledGaussian(noise, 1, 1).epsilon_bounds(1e-15)
    with mpmath.workdps(60):
        mu = 1 / mpmath.mpf(noise)

        def delta(epsilon):
            e = mpmath.mpf(epsilon)
            return mpmath.ncdf(mu / 2 - e / mu) - mpmath.exp(e) * mpmath.ncdf(-mu / 2 - e / mu)

        assert delta(high) <= mpmath.mpf(1e-15) <= delta(low)
    assert high <= 1.0001 * low


@pytest.mark.parametrize(
    ("phase", "delta"),
    [
        (SampledGaussian(1.0, 0.01, 1000), 0.161),
        (SampledGaussian(0.3, 1e-7, 2), 1e-3),
        (SampledGaussian(0.3, 1e-7, 2), 1e-8),
        (SampledGaussian(50.0, 1e-4, 1000).group(1000), 1e-5),
        (SampledGaussian(1.0, 1, 1000, sampling="full") + SampledGaussian(1.0, 0.01, 10), 1e-5),
        (SampledGaussian(1e300, 0.1, 10), 1e-5),
    ],
)
def test_unusual_questions_have_an_answer(phase, delta):
    low, high = phase.epsilon_bounds(delta)
    assert 0 <= low <= high < math.inf
    assert phase.delta(high) <= delta


def test_different_sampling_schemes_compose():
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
        "must be 'replace_one' with sampling='without_replacement', got None; "
        "pass 'replace_one': there is no default",
    ),
    "no relation, shuffled": (
        lambda: build(1.0, 0.1, 1, ("shuffled", None)),
        "must be 'zero_out' or 'replace_one' with sampling='shuffled', got None; "
        "pass 'zero_out' or 'replace_one': there is no",
    ),
    "no analysis": (
        lambda: build(1.0, 0.1, 1, ("without_replacement", "add_remove")),
        "must be 'replace_one' with sampling='without_replacement', "
        "got 'add_remove'; pass 'replace_one': no other",
    ),
    "shuffled, adding": (
        lambda: build(1.0, 0.1, 1, ("shuffled", "add_remove")),
        "must be 'zero_out' or 'replace_one' with sampling='shuffled'",
    ),
    "truncated without a size": (
        lambda: SampledGaussian(1.0, 0.1, 1, max_batch_size=5),
        "`max_batch_size` must come with .* got sampling='poisson' and dataset_size=None",
    ),
    "truncated, but not Poisson": (
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
    "batch larger than the dataset": (
        lambda: steps_of_epochs(1, dataset_size=3, batch_size=9),
        "`batch_size` must be at most `dataset_size`, 3, got 9",
    ),
    "epochs of an unknown scheme": (
        lambda: steps_of_epochs(1, dataset_size=9, batch_size=3, sampling="sorted"),
        "`sampling` must be .* got 'sorted'",
    ),
    "two relations": (
        lambda: build(1.0, 0.1, 1) + build(1.0, 0.1, 1, ("poisson", "zero_out")),
        "`neighbouring` must be the same in all phases",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=BAD.keys())
def test_a_message_names_the_wrong_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_statement_with_a_huge_epsilon_does_not_reassure():
    little = SampledGaussian(1.0, 1.0, 10, sampling="full")
    assert little.advantage() > 0.85  # more than nine of ten guesses are right
    said = " ".join(statement(little, 1e-5).split())
    assert "promises little" in said and "cannot" not in said
    assert "promises" not in statement(SampledGaussian(1.1, 0.01, 100), 1e-5)


@given(st.floats(1e-9, 1e9), st.integers(1, 8))
def test_show_epsilon_rounds_to_the_safe_side(epsilon, digits):
    upper = float(show_epsilon(epsilon, digits))
    lower = float(show_epsilon(epsilon, digits, is_lower_bound=True))
    close = 1 + 1e-9
    assert lower <= epsilon * close and epsilon <= upper * close
    assert upper - lower <= 10.0 ** (1 - digits) * epsilon * close
