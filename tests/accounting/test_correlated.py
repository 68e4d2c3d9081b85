"""The ε of correlated noise is that of the reduced mechanism, under stated conditions only."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from optax_lsdp.accounting import (
    CorrelatedGaussian,
    Ledger,
    SampledGaussian,
    calibrate_scale,
    statement,
)
from optax_lsdp.correlation import Correlation, banded_inverse, independent, square_root
from tests.oracles import largest_movement, toeplitz_dense

DELTA = 1e-5


def test_a_part_of_a_cycle_counts_as_a_whole_cycle():
    run = CorrelatedGaussian(1.0, square_root(100, 64), sampling_rate=0.01)
    assert run.epsilon(DELTA) == pytest.approx(5.45, abs=0.005)  # 3.83 with 100/64 steps
    two = SampledGaussian(1.0, 0.64, 2).epsilon(DELTA)
    assert two <= run.epsilon(DELTA) <= two * (1 + 1e-6)


def test_epsilon_is_never_below_the_reduced_mechanism_and_close_to_it():
    run = CorrelatedGaussian(1.0, square_root(2000, 8), sampling_rate=0.01)
    lower, upper = SampledGaussian(1.0, 0.08, 250).epsilon_bounds(DELTA)
    assert lower <= upper <= run.epsilon(DELTA) <= lower * 1.001


@pytest.mark.parametrize("how", [{"sampling_rate": 0.5}, {"min_separation": 1}])
def test_a_dominating_phase_proves_no_lower_bound(how):
    """The only step releases X + Z/0.6: less than the phase that dominates it."""
    how = how | {"neighbouring": "zero_out"}
    one_step = CorrelatedGaussian(1.0, Correlation(2, (0.6, 0.8)), 1, **how)
    truth = SampledGaussian(1 / 0.6, 1.0, 1, sampling="full").epsilon(DELTA)
    lower, upper = one_step.epsilon_bounds(DELTA)
    assert lower <= truth <= upper * (1 + 1e-6)


def test_epsilon_of_bandmf_is_that_of_another_accountant():
    """The reference is discretised in float64, for T = 2,000, b = 8, q = 0.01 and z = 1."""
    reference = pytest.importorskip("dp_accounting.pld.privacy_loss_distribution")

    def bound(interval, **options):
        step = reference.from_gaussian_mechanism(
            1.0, value_discretization_interval=interval, sampling_prob=0.08, **options
        )
        return step.self_compose(250).get_epsilon_for_delta(DELTA)

    most = bound(1e-3)
    least = bound(4e-5, pessimistic_estimate=False, use_connect_dots=False)
    run = CorrelatedGaussian(1.0, square_root(2000, 8), sampling_rate=0.01)
    assert least <= run.epsilon(DELTA) <= 1.001 * least
    assert run.epsilon(DELTA) == pytest.approx(most, rel=1e-3)


def test_independent_noise_is_that_of_poisson_batches():
    run = CorrelatedGaussian(1.1, independent(1000), sampling_rate=0.01)
    assert run.epsilon(DELTA) == pytest.approx(SampledGaussian(1.1, 0.01, 1000).epsilon(DELTA))


def hockey_stick(epsilon, shifts, rate):
    """Return δ(ε) between z and a random choice of means, on a grid in two dimensions.

    One example is used in each of two steps with probability `rate`, and each use adds a column of
    C to the mean of z. The neighbour has no such example.
    """
    axis = np.linspace(-8, 9, 700)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    cell = (axis[1] - axis[0]) ** 2
    without = norm.pdf(x) * norm.pdf(y) * cell
    with_example = np.zeros_like(without)
    for used in itertools.product((0, 1), repeat=2):
        weight = np.prod([rate if one else 1 - rate for one in used])
        mean = used @ shifts
        with_example += weight * norm.pdf(x - mean[0]) * norm.pdf(y - mean[1]) * cell
    pairs = (with_example, without), (without, with_example)
    return max(np.maximum(p - np.exp(epsilon) * q, 0).sum() for p, q in pairs)


def test_delta_covers_what_two_steps_of_one_example_reveal():
    # With one band the example may be used in both steps; with two bands in one of them.
    single = CorrelatedGaussian(1.0, independent(2), sampling_rate=0.3)
    double = CorrelatedGaussian(1.0, square_root(2, 2), sampling_rate=0.3)
    dense = toeplitz_dense(double.correlation.column())
    once = np.stack([dense[:, 0], np.zeros(2)])  # the example is in the part of the first step
    for epsilon in (0.2, 0.8):
        exact = hockey_stick(epsilon, np.eye(2), 0.3)
        assert single.delta(epsilon) == pytest.approx(exact, rel=2e-3)  # of the grid
        assert single.delta(epsilon) >= exact * (1 - 1e-4)
        exact = hockey_stick(epsilon, once, 0.6)
        assert double.delta(epsilon) == pytest.approx(exact, rel=2e-3)
        # Drawing with two bands from all examples in both steps would reveal more.
        assert hockey_stick(epsilon, dense.T, 0.6) > 1.5 * double.delta(epsilon)


@pytest.mark.parametrize(("relation", "factor"), [("zero_out", 1), ("replace_one", 2)])
def test_in_one_fixed_order_all_steps_are_one_gaussian_mechanism(relation, factor):
    for correlation in (square_root(9, 4), banded_inverse(9, 3), Correlation(9, (0.5, -0.5, 0.3))):
        run = CorrelatedGaussian(5.0, correlation, min_separation=3, neighbouring=relation)
        worst = largest_movement(toeplitz_dense(correlation.column()), 3)
        full = SampledGaussian(5.0 / worst / factor, 1.0, 1, sampling="full")
        assert run.epsilon(DELTA) == pytest.approx(full.epsilon(DELTA), rel=1e-7)
        assert run.epsilon(DELTA) >= full.epsilon(DELTA)


def test_fewer_steps_cost_less_and_none_cost_nothing():
    options = ({"sampling_rate": 0.05}, {"min_separation": 25, "neighbouring": "zero_out"})
    for option in options:
        costs = [
            CorrelatedGaussian(1.0, square_root(100, 20), steps, **option).epsilon(DELTA)
            for steps in (0, 20, 21, 60, 100)
        ]
        assert costs[0] == 0 and costs == sorted(costs)
    assert CorrelatedGaussian(1.0, square_root(100, 20), **options[0]).steps == 100


def test_a_run_that_goes_on_with_new_noise_counts_its_own_cycles():
    short = CorrelatedGaussian(1.0, square_root(100, 64), 10, sampling_rate=0.01)
    again = sum([short] * 6)
    assert sum(phase.steps for phase in again.parts) == 6  # not ⌈60/64⌉


def test_noise_can_be_calibrated():
    correlation = square_root(200, 8)

    def run(noise):
        return CorrelatedGaussian(noise, correlation, sampling_rate=0.02)

    noise = calibrate_scale(run, epsilon=2.0, delta=DELTA)
    assert run(noise).epsilon(DELTA) <= 2 < run(noise * 0.999).epsilon(DELTA)


def test_a_statement_says_how_parts_are_chosen_and_which_noise_is_added():
    run = CorrelatedGaussian(1.5, square_root(100, 8), sampling_rate=0.05)
    text = " ".join(statement(run, DELTA).split())
    assert "100 steps; each example is assigned at random, independently of all else" in text
    assert "part t mod 8 with probability 0.4" in text and "8 bands" in text and "1.5·C" in text
    assert "at most (an upper bound" in text and "fresh in every step" not in text
    split = CorrelatedGaussian(1.5, square_root(9, 8), sampling_rate=0.05, neighbouring="zero_out")
    assert "is assigned beforehand to" in " ".join(statement(split, DELTA).split())
    order = CorrelatedGaussian(9.0, square_root(9, 2), min_separation=3, neighbouring="zero_out")
    assert "at least 3 steps apart" in " ".join(statement(order, DELTA).split())


def test_sums_and_ledgers_hold_correlated_noise_as_phases_of_its_own():
    run = CorrelatedGaussian(1.0, square_root(100, 64), 10, sampling_rate=0.01)
    phase = SampledGaussian(1.0, 0.01, 5)
    expected = (SampledGaussian(1.0, 0.64, 2) + phase).epsilon(DELTA)
    for whole in (run + run + phase, sum([phase, run, run]), Ledger([run, phase, run])):
        assert whole.epsilon(DELTA) == pytest.approx(expected, rel=1e-6)
        assert whole.epsilon(DELTA) >= expected
    ledger = Ledger([run, run])
    ledger.append(run, continues=True)
    assert [one.steps for one in ledger.phases] == [10, 20]
    assert ledger.epsilons(DELTA)[-1] == pytest.approx(ledger.epsilon(DELTA), rel=1e-4)


def test_the_curve_of_a_ledger_with_several_kinds_of_noise_is_an_upper_bound():
    order = CorrelatedGaussian(
        5.0, banded_inverse(12, 3), min_separation=4, neighbouring="zero_out"
    )
    cycle = CorrelatedGaussian(2.0, square_root(12, 3), sampling_rate=0.1, neighbouring="zero_out")
    poisson = SampledGaussian(2.0, 0.1, 6, neighbouring="zero_out")
    curve = Ledger([order, cycle, poisson]).epsilons(DELTA)
    assert (np.diff(curve) >= 0).all()
    for steps in (12, 18, 24, 30):
        kept = [order, cycle, poisson][: 1 + (steps > 12) + (steps > 24)]
        kept[-1] = replace(kept[-1], steps=steps - sum(one.steps for one in kept[:-1]))
        exact = Ledger(kept).epsilon(DELTA)
        # Beside sampled steps, squared sensitivities are rounded up to whole numbers.
        assert exact * (1 - 1e-4) <= curve[steps - 1] <= exact * 1.15


def test_only_correlated_noise_itself_can_be_recorded():
    run = CorrelatedGaussian(1.0, square_root(100, 64), sampling_rate=0.01)
    words = "for correlated noise the CorrelatedGaussian itself, not its `dominating` phase"
    with pytest.raises(TypeError, match=words):
        Ledger([run.dominating])


def test_the_sensitivity_after_each_step_is_that_of_fewer_steps():
    for correlation in (square_root(9, 4), banded_inverse(9, 3), Correlation(9, (0.5, -0.5, 0.3))):
        for separation in (1, 3, 4, 20):
            found = correlation.sensitivities(separation)
            exact = [correlation.sensitivity(separation, steps) for steps in range(1, 10)]
            assert (found >= np.array(exact) * (1 - 1e-12)).all()
            np.testing.assert_allclose(found, exact, rtol=1e-6)  # of float32, in upper bounds


def made(*args, correlation=None, **kwargs):
    return CorrelatedGaussian(1.0, correlation or square_root(100, 8), *args, **kwargs)


BAD = {
    "no analysis": (lambda: made(), "Either `sampling_rate` or `min_separation` must be given"),
    "two analyses": (lambda: made(sampling_rate=0.1, min_separation=3), "and not both"),
    "rate above 1": (
        lambda: made(sampling_rate=0.2),
        "`sampling_rate` .* at most 1/8, .* got 0.2; take smaller batches",
    ),
    "cycle below the band": (lambda: made(sampling_rate=0.1, cycle=7), "`cycle` .* 8, got 7"),
    "banded inverse": (
        lambda: made(correlation=banded_inverse(100, 2), sampling_rate=0.001, cycle=2),
        "`cycle` .* bands of the correlation, 100, got 2; use one fixed order",
    ),
    "cycle without a rate": (
        lambda: made(cycle=8, min_separation=8, neighbouring="zero_out"),
        "`cycle` must be None without `sampling_rate`, got 8",
    ),
    "steps beyond the end": (lambda: made(101, sampling_rate=0.1), "`steps` .* 100, got 101"),
    "fixed order without a relation": (
        lambda: made(min_separation=8),
        "`neighbouring` must be 'zero_out' or 'replace_one', because .* got None; pass one",
    ),
    "add and remove in a fixed order": (
        lambda: made(min_separation=8, neighbouring="add_remove"),
        "`neighbouring` .* got 'add_remove'",
    ),
    "schedule": (
        lambda: CorrelatedGaussian(lambda step: 1.0, square_root(9, 2), sampling_rate=0.1),
        "`noise_multiplier` must be one number, because schedules",
    ),
    "no noise": (
        lambda: CorrelatedGaussian(0.0, square_root(9, 2), sampling_rate=0.1),
        "`noise_multiplier` must be positive",
    ),
    "a matrix": (lambda: CorrelatedGaussian(1.0, np.eye(3)), "`correlation` must be a Correlation"),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=list(BAD))
def test_bad_input_is_answered_in_one_sentence(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        call()
