"""Tests of lower bounds on ε: they are rarely wrong, and close to ε where they can be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

import optax_lsdp as lsdp
from optax_lsdp.accounting import SampledGaussian, calibrate_noise_multiplier
from optax_lsdp.auditing import EpsilonReport, audit_epsilon, audit_one_run, audit_scores
from optax_lsdp.auditing._epsilon import Rates, epsilon_of_rates, one_run_p_value, rates

DELTA = 1e-5


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_bounds_on_rates_fail_as_rarely_as_they_claim(share):
    """The probability of failure is a sum over all outcomes."""
    trials, failure = 60, 0.1
    counts = np.arange(trials + 1)
    weights = binom.pmf(counts, trials, share)
    found = [rates(int(k), int(k), trials, failure) for k in counts]
    too_high = sum(w for w, r in zip(weights, found, strict=True) if r.true_positive > share)
    too_low = sum(w for w, r in zip(weights, found, strict=True) if r.false_positive < share)
    assert too_high <= failure / 2 and too_low <= failure / 2


def test_a_printed_bound_is_rounded_down():
    report = EpsilonReport(0.99951, 0.99959, 1.00009, DELTA, 1000, 1e-5)
    assert not report
    said = str(report)
    assert "0.9995\n" in said and "1.000\n" in said and "0.99951" in said


def test_the_rates_of_randomised_response_give_its_epsilon():
    for epsilon in (0.1, 1.0, 5.0):
        right = math.exp(epsilon) / (1 + math.exp(epsilon))  # randomised response
        assert epsilon_of_rates(Rates(right, 1 - right), 0.0) == pytest.approx(epsilon)
    assert epsilon_of_rates(Rates(0.3, 0.4), 0.0) == 0.0
    assert epsilon_of_rates(Rates(1.0, 0.0), 1e-5) == math.inf


def test_delta_is_subtracted_for_a_test_and_for_its_opposite():
    assert epsilon_of_rates(Rates(0.5, 0.1), 0.2) == pytest.approx(math.log(3))
    assert epsilon_of_rates(Rates(0.99, 0.9), 0.02) == pytest.approx(math.log(8))


def test_one_half_of_the_scores_chooses_a_threshold_and_the_other_half_decides():
    """A threshold of 5 separates the first half, and a threshold of 50 the second."""
    inside, outside = (np.repeat(scores, 1000) for scores in ([6.0, 60.0], [4.0, 40.0]))
    assert audit_scores(inside, outside, delta=DELTA).epsilon == 0
    assert audit_scores(inside[::-1], outside[::-1], delta=DELTA).epsilon == 0


def test_two_bounds_share_the_probability_of_failure():
    rng = np.random.default_rng(0)
    inside, outside = rng.normal(1, 1, 4000), rng.normal(0, 1, 4000)
    alone = audit_scores(inside, outside, delta=DELTA, failure=0.01)
    beside = audit_scores(inside, outside, delta=DELTA, failure=0.02, gaussian=True)
    assert alone.epsilon == beside.epsilon > 0


def test_smaller_scores_and_broken_trainings_may_reveal_the_canary():
    zeros, ones = np.zeros(2000), np.ones(2000)
    assert audit_scores(zeros, ones, delta=DELTA).epsilon > 3
    broken = np.where(np.arange(2000) % 20, 0.0, np.nan)
    found = audit_scores(broken, zeros, delta=DELTA).epsilon
    assert found > 0.5  # 50 of 1,000 scores against none
    for value in (np.inf, -np.inf):
        assert audit_scores(np.nan_to_num(broken, nan=value), zeros, delta=DELTA).epsilon == found


def test_the_p_value_of_one_run_is_exact_for_randomised_response():
    """With δ = 0 it is the probability of so many right answers."""
    epsilon, guesses, right = 1.0, 50, 45
    chance = math.exp(epsilon) / (1 + math.exp(epsilon))
    expected = binom.sf(right - 1, guesses, chance)
    assert one_run_p_value(epsilon, 0.0, 50, guesses, right) == pytest.approx(expected)
    slopes = [
        sum(binom.pmf(right - j, guesses, chance) for j in range(1, i + 1)) / i
        for i in range(1, right + 1)
    ]
    for canaries in (50, 400):
        with_delta = expected + 2 * canaries * DELTA * max(slopes)
        found = one_run_p_value(epsilon, DELTA, canaries, guesses, right)
        assert found == pytest.approx(with_delta)


def one_step(noise_multiplier):
    """Return a training with one Gaussian and a canary of the largest possible effect."""

    def train(key, is_in):
        return is_in.astype(jnp.float32) + noise_multiplier * jax.random.normal(key, ())

    return train


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 10.0])
def test_a_true_claim_passes_and_half_of_it_is_proved(epsilon):
    z = calibrate_noise_multiplier(
        epsilon=epsilon, delta=DELTA, steps=1, sampling="full", sampling_rate=1.0
    )
    report = audit_epsilon(
        one_step(z),
        delta=DELTA,
        claimed=epsilon,
        trials=60_000,
        gaussian=True,
        key=jax.random.key(0),
    )
    assert report, str(report)
    assert report.gaussian_epsilon >= epsilon / 2
    assert report.epsilon <= report.gaussian_epsilon + 0.5


def test_a_false_claim_is_rejected():
    z = calibrate_noise_multiplier(
        epsilon=4.0, delta=DELTA, steps=1, sampling="full", sampling_rate=1.0
    )
    report = audit_epsilon(
        one_step(0.3 * z), delta=DELTA, claimed=4.0, trials=20_000, key=jax.random.key(0)
    )
    assert not report and report.epsilon > 4.0


@pytest.mark.parametrize("seed", range(3))
def test_one_run_with_many_canaries_rejects_no_true_claim(seed):
    """Each canary has another coordinate, so that m canaries are m mechanisms of one step."""
    canaries, delta = 2000, 1e-6

    def train(noise_multiplier):
        def run(is_in):
            noise = jax.random.normal(jax.random.key(seed), (canaries,))
            return is_in.astype(jnp.float32) + noise_multiplier * noise

        return run

    def audit(noise_multiplier):
        claimed = SampledGaussian(
            noise_multiplier, sampling_rate=1.0, steps=1, sampling="full"
        ).epsilon(delta)
        return audit_one_run(
            train(noise_multiplier),
            canaries=canaries,
            delta=delta,
            claimed=claimed,
            failure=0.01,
            key=jax.random.key(100 + seed),
        )

    for noise_multiplier in (0.5, 1.0, 4.0):
        report = audit(noise_multiplier)
        assert report, str(report)
    assert audit(0.5).epsilon > 1.0


@pytest.mark.parametrize(("noise_multiplier", "least"), [(0.5, 2.0), (2.0, 0.05)])
def test_one_run_of_dp_sgd_bounds_its_epsilon(noise_multiplier, least):
    """Each canary moves another coordinate, in three steps."""
    canaries, steps, delta = 500, 3, 1e-7
    examples = 100 * jnp.eye(canaries)

    @jax.jit
    def train(is_in):
        params = jnp.zeros(canaries)
        optimizer = lsdp.dp_sgd(
            1.0,
            clip_norm=1.0,
            noise_multiplier=noise_multiplier,
            expected_batch_size=1,
            key=jax.random.key(3),
        )
        gradient = lsdp.clipped_grad(jnp.vdot, clip_norm=1.0)
        state = optimizer.init(params)
        for _ in range(steps):
            updates, state = optimizer.update(gradient(params, examples, is_in), state, params)
            params += updates
        return -params

    claimed = SampledGaussian(noise_multiplier, 1.0, steps, sampling="full").epsilon(delta)
    options = {"canaries": canaries, "delta": delta, "key": jax.random.key(4)}
    report = audit_one_run(train, claimed=claimed, **options)
    assert report, str(report)
    assert report.epsilon > least
    assert not audit_one_run(train, claimed=report.epsilon / 2, **options)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="`train` must return a number"):
        audit_epsilon(
            lambda key, is_in: jnp.zeros(3), delta=DELTA, trials=10, key=jax.random.key(0)
        )
    with pytest.raises(ValueError, match="`train` must return 10 scores"):
        audit_one_run(lambda is_in: jnp.zeros(3), canaries=10, delta=DELTA, key=jax.random.key(0))
    with pytest.raises(ValueError, match="`guesses` must be at most `canaries`, 10, got 12"):
        audit_one_run(
            lambda is_in: is_in, canaries=10, guesses=12, delta=DELTA, key=jax.random.key(0)
        )
    with pytest.raises(ValueError, match="`delta` must be above 0 and below 1"):
        audit_epsilon(one_step(1.0), delta=0.0, key=jax.random.key(0))
