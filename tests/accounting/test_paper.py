"""Theorem 1 of the paper: its noise, its conditions, and the true ε of that noise."""

import math

import pytest

from optax_lsdp.accounting import paper_noise

SETTING = dict(delta=1e-5, dataset_size=60_000, batch_size=128, steps=23_450, lipschitz=1.0)


@pytest.mark.parametrize(
    ("epsilon", "multiplier", "poisson", "fixed_size"),
    [(0.10, 99.36, 0.00777, 0.01719), (0.30, 33.26, 0.02669, 0.05904)],
)
def test_noise_without_its_conditions_comes_with_the_true_epsilon(
    epsilon, multiplier, poisson, fixed_size
):
    noise = paper_noise(epsilon=epsilon, number_alone=True, **SETTING)
    assert not noise.holds
    assert noise.noise_multiplier == pytest.approx(multiplier, rel=1e-4)
    assert noise.noise_stddev == pytest.approx(noise.noise_multiplier / 128)
    assert noise.poisson_epsilon == pytest.approx(poisson, rel=1e-3)
    assert noise.fixed_size_epsilon == pytest.approx(fixed_size, rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "steps", "first"), [(128, 23_450, "3.86"), (256, 14_100, "5.25")]
)
def test_a_refusal_says_how_far_the_conditions_fail_and_where_they_hold(batch, steps, first):
    setting = {**SETTING, "batch_size": batch, "steps": steps}
    with pytest.raises(ValueError, match=rf"α = 117\.12 must be .* to {first}, where both"):
        paper_noise(epsilon=0.1, **setting)
    for epsilon, holds in ((float(first) - 0.02, False), (float(first) + 0.02, True)):
        if holds:
            assert paper_noise(epsilon=epsilon, **setting).holds
        else:
            with pytest.raises(ValueError, match="both conditions"):
                paper_noise(epsilon=epsilon, **setting)


def test_the_noise_is_the_formula_of_the_theorem():
    noise = paper_noise(epsilon=4.0, **{**SETTING, "lipschitz": 2.0})
    log, mu, alpha = math.log(1e5), noise.mu, noise.alpha
    assert alpha == pytest.approx(log / ((1 - mu) * 4) + 1)
    assert noise.noise_stddev**2 == pytest.approx(20 * 23_450 * alpha * 4 / (mu * 60_000**2 * 4))
    inner = 5 * 128**3 * 23_450 * alpha + mu * 128 * 60_000**2 * 4
    assert noise.largest_alpha == pytest.approx(math.log(mu * 60_000**3 * 4 / inner))
    assert noise.spread == pytest.approx(5 * 128**2 * 23_450 * alpha / (mu * 60_000**2 * 4))
    assert alpha <= noise.largest_alpha and noise.spread >= 1.5
    assert noise.poisson_epsilon < 0.1 * 4.0  # the theorem is loose


def test_the_noise_is_unsafe_if_the_conditions_fail():
    setting = {**SETTING, "batch_size": 256, "steps": 235}
    noise = paper_noise(epsilon=8.0, mu=0.56, number_alone=True, **setting)
    assert not noise.holds
    assert noise.noise_multiplier == pytest.approx(0.286, abs=1e-3)
    assert noise.poisson_epsilon > 26.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0}, "`epsilon` .* got 0"),
        ({"mu": 1.5}, "`mu` .* got 1.5"),
        ({"batch_size": 70_000}, "`batch_size` must be at most .* 60000, got 70000"),
        ({"steps": 1.5}, "`steps` .* got 1.5"),
        ({"lipschitz": -1}, "`lipschitz` .* got -1"),
    ],
)
def test_a_message_names_the_wrong_argument(changes, message):
    with pytest.raises(ValueError, match=message):
        paper_noise(**{"epsilon": 1.0, **SETTING, **changes})
