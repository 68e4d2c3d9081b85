"""Calibration stays within the budget and leaves hardly any of it."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_lsdp.accounting import (
    SampledGaussian,
    calibrate_batch_size,
    calibrate_noise_multiplier,
    calibrate_scale,
    calibrate_steps,
)

TABLE_1 = [  # n, ε, and the smallest z by another accountant; 50 epochs with batches of 128
    (60_000, 0.10, 10.080),
    (60_000, 0.30, 3.749),
    (50_000, 0.10, 11.040),
    (50_000, 0.20, 5.890),
]
kinds = st.sampled_from(
    [
        {},
        {"neighbouring": "replace_one"},
        {"sampling": "without_replacement", "neighbouring": "replace_one"},
        {"sampling": "shuffled", "neighbouring": "zero_out"},
        {"max_batch_size": 60, "dataset_size": 1000},
        {"group_size": 2},
    ]
)


@pytest.mark.parametrize(("size", "epsilon", "noise"), TABLE_1)
def test_noise_agrees_with_another_accountant(size, epsilon, noise):
    steps = 50 * math.ceil(size / 128)
    found = calibrate_noise_multiplier(
        epsilon=epsilon, delta=1e-5, sampling_rate=128 / size, steps=steps
    )
    assert noise * (1 - 1e-4) <= found <= noise * (1 + 3e-4)


@settings(max_examples=10)
@given(
    epsilon=st.floats(0.05, 20), rate=st.floats(0.002, 0.2), steps=st.integers(1, 5000), kind=kinds
)
def test_calibrated_noise_is_the_least_within_the_budget(epsilon, rate, steps, kind):
    noise = calibrate_noise_multiplier(
        epsilon=epsilon, delta=1e-6, sampling_rate=rate, steps=steps, **kind
    )
    assert SampledGaussian(noise, rate, steps, **kind).epsilon(1e-6) <= epsilon
    assert SampledGaussian(noise * (1 - 1e-4), rate, steps, **kind).epsilon(1e-6) > epsilon


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_a_calibrated_scale_is_the_least_within_the_budget(factor):
    def schedule(scale):
        return SampledGaussian(scale, 0.02, 100) + SampledGaussian(factor * scale, 0.02, 200)

    scale = calibrate_scale(schedule, epsilon=2.0, delta=1e-6)
    assert schedule(scale).epsilon(1e-6) <= 2.0 < schedule(scale * (1 - 1e-4)).epsilon(1e-6)
    if factor == 1:  # the noise does not vary
        noise = calibrate_noise_multiplier(epsilon=2.0, delta=1e-6, sampling_rate=0.02, steps=300)
        assert scale == pytest.approx(noise, rel=1e-4)


@pytest.mark.parametrize("kind", [{}, {"sampling": "shuffled", "neighbouring": "replace_one"}])
def test_calibrated_steps_are_the_most_within_the_budget(kind):
    most = calibrate_steps(epsilon=2, delta=1e-6, noise_multiplier=5, sampling_rate=0.02, **kind)
    assert SampledGaussian(5, 0.02, most, **kind).epsilon(1e-6) <= 2
    assert SampledGaussian(5, 0.02, most + 1, **kind).epsilon(1e-6) > 2


@pytest.mark.parametrize(
    "kind", [{}, {"sampling": "without_replacement", "neighbouring": "replace_one"}]
)
def test_calibrated_batches_are_the_largest_within_the_budget(kind):
    most = calibrate_batch_size(
        epsilon=2, delta=1e-6, noise_multiplier=4, dataset_size=5000, steps=500, **kind
    )
    assert SampledGaussian(4, most / 5000, 500, **kind).epsilon(1e-6) <= 2
    assert SampledGaussian(4, (most + 1) / 5000, 500, **kind).epsilon(1e-6) > 2


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "steps", "size"),
    [(100, 1e-5, 0.01, 10, 1), (1, 0.5, 0.01, 10, 1), (1, 1e-5, 0.001, 100, 3)],
)
def test_generous_budgets_and_groups_need_little_noise(epsilon, delta, rate, steps, size):
    noise = calibrate_noise_multiplier(
        epsilon=epsilon, delta=delta, sampling_rate=rate, steps=steps, group_size=size
    )
    assert SampledGaussian(noise, rate, steps, group_size=size).epsilon(delta) <= epsilon
    assert noise < 3


def test_a_budget_that_no_batch_exceeds_allows_full_batches():
    options = dict(epsilon=50, delta=1e-6, noise_multiplier=10, dataset_size=100, steps=5)
    assert calibrate_batch_size(**options) == 100


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: calibrate_steps(
                epsilon=0.01, delta=1e-5, noise_multiplier=0.5, sampling_rate=0.5
            ),
            "`epsilon` must be at least .* for a single step",
        ),
        (
            lambda: calibrate_batch_size(
                epsilon=1e-4, delta=1e-9, noise_multiplier=0.5, dataset_size=100, steps=10
            ),
            "`epsilon` must be at least .* for batches of one example",
        ),
        (
            lambda: calibrate_noise_multiplier(
                epsilon=1e-12, delta=1e-15, sampling_rate=0.5, steps=10**6
            ),
            "`epsilon` must be reachable with a noise multiplier below",
        ),
        (
            lambda: calibrate_noise_multiplier(epsilon=0, delta=1e-5, sampling_rate=0.5, steps=10),
            "`epsilon` .* got 0",
        ),
        (
            lambda: calibrate_noise_multiplier(epsilon=1, delta=1e-5, sampling_rate=0.5, steps=0),
            "`steps` .* got 0",
        ),
        (
            lambda: calibrate_batch_size(
                epsilon=1, delta=1e-5, noise_multiplier=1, dataset_size=0, steps=1
            ),
            "`dataset_size` .* got 0",
        ),
    ],
)
def test_an_impossible_budget_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
