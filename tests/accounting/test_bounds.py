"""Composition: held to an independent integral in 25 digits, to sampling, and to itself."""

import math

import mpmath
import numpy as np
import pytest

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.accounting import _bounds as bounds
from optax_lsdp.accounting._contour import contour_delta
from optax_lsdp.accounting._loss import sample
from optax_lsdp.accounting._pairs import add, remove, replace
from optax_lsdp.accounting._plan import plan_epsilon
from tests.oracles import delta_by_contour

CASES = [  # rate, noise, steps, ε, θ
    (0.01, 1.0, 1000, 1.9, 5.0),
    (0.02, 4.0, 5000, 1.5, 8.0),
    (0.001, 0.8, 10**5, 4.0, 5.0),
]


@pytest.mark.parametrize(("rate", "noise", "steps", "epsilon", "tilt"), CASES)
def test_delta_brackets_an_integral_in_many_digits(rate, noise, steps, epsilon, tilt):
    mu, q = 1 / mpmath.mpf(noise), mpmath.mpf(rate)

    def removed(x):
        ratio = 1 - q + q * mpmath.exp(mu * x - mu**2 / 2)
        return mpmath.log(ratio), ratio * mpmath.npdf(x)

    def added(x):
        ratio = 1 - q + q * mpmath.exp(-mu * x - mu**2 / 2)
        return -mpmath.log(ratio), mpmath.npdf(x)

    with mpmath.workdps(25):
        for pair, both in ((remove, removed), (add, added)):
            true = float(delta_by_contour(both, steps, epsilon, tilt))
            step = pair(rate, 1 / noise)
            found = bounds.delta_above([(((1.0, step),), steps)], epsilon)
            assert true <= found <= true * (1 + 2e-3 * tilt * epsilon)
            above = bounds.epsilon_above([(((1.0, step),), steps)], true)
            assert epsilon <= above <= epsilon * 1.0003
            below = bounds.epsilon_below([(step, steps)], true, above)
            assert epsilon * 0.97 <= below <= epsilon


@pytest.mark.parametrize(
    ("pair", "steps", "delta"),
    [
        (remove(0.01, 2.0), 200, 1e-9),
        (add(0.05, 1.0), 300, 1e-7),
        (replace(0.02, 1.5), 100, 1e-10),
        (remove(0.3, 0.3), 50, 1e-12),
    ],
    ids=["remove", "add", "replace", "often"],
)
def test_tails_are_those_of_sampled_runs(pair, steps, delta):
    # Importance sampling: losses are drawn from their tilted distribution, and weighed back.
    step = ((1.0, pair),)
    plan = plan_epsilon([(step, steps)], delta)
    epsilon = bounds.epsilon_above([(step, steps)], delta)
    x = np.linspace(-14, 14 + pair.centres.max(), 200_001)
    losses = pair.loss(x)
    masses = np.exp(-((x[:, None] - pair.centres) ** 2) / 2) @ pair.weights
    masses *= (x[1] - x[0]) / math.sqrt(2 * math.pi)
    tilted = masses * np.exp(plan.tilt * losses)
    moment = tilted.sum()
    rng = np.random.default_rng(0)
    cumulated = np.cumsum(tilted) / moment
    drawn = losses[np.searchsorted(cumulated, rng.uniform(size=(20_000, steps)) * cumulated[-1])]
    total = drawn.sum(axis=1)
    weights = np.exp(steps * math.log(moment) - plan.tilt * total)
    values = weights * np.maximum(-np.expm1(epsilon - total), 0.0)
    mean, error = values.mean(), values.std() / math.sqrt(len(values))
    assert error < 0.05 * mean
    assert mean - 4.5 * error <= delta <= 1.02 * (mean + 4.5 * error)


def test_the_contour_agrees_where_it_is_sure_and_abstains_where_it_is_not():
    sure = [(sample(((1.0, remove(0.02, 0.25)),), 1e-20), 5000)]
    value = contour_delta(sure, 1.5, 8.0, 40.0)
    np.testing.assert_allclose(value, contour_delta(sure, 1.5, 7.0, 45.0), rtol=1e-5)
    unsure = [(sample(((1.0, remove(0.01, 1.0)),), 1e-20), 1)]
    assert contour_delta(unsure, 0.2, 20.0, 40.0) is None


@pytest.mark.parametrize("factor", [0.99, 3.0])
def test_two_methods_that_disagree_are_an_error(monkeypatch, factor):
    def biased(*args):
        value = contour_delta(*args)
        return value and value / factor

    run = SampledGaussian(1.1, 256 / 60_000, 14_100)
    monkeypatch.setattr(bounds, "contour_delta", biased)
    with pytest.raises(ArithmeticError, match="two methods disagree on δ"):
        run.delta(2.0)


def test_a_bad_plan_makes_a_bound_loose_and_not_wrong():
    steps = [(((1.0, remove(0.01, 1.0)),), 1000)]
    counts = np.array([[1000.0]])
    epsilon = np.array([1.9])
    plan = plan_epsilon(steps, 1e-5)
    true = float(bounds._compose([steps[0][0]], counts, plan).above(epsilon)[0])
    for change in (
        {"tilt": plan.tilt / 3, "window": plan.window * 3},
        {"tilt": plan.tilt * 1.5},
        {"mesh": plan.mesh * 5},
        {"window": plan.window / 8},
        {"per_octave": 16},
        {"tail": 1e-9},
    ):
        worse = bounds._compose([steps[0][0]], counts, plan._replace(**change))
        assert float(worse.above(epsilon)[0]) >= true * (1 - 1e-3)
