"""Extreme arguments give an answer that is not below the true value, or a one-sentence error."""

import math
import re

import numpy as np
import pytest

from optax_lsdp import accounting
from optax_lsdp.accounting import DiscreteGaussian, Ledger, SampledGaussian
from optax_lsdp.accounting._bounds import gaussian_epsilon
from tests.cases import slow

REPLACE = {"neighbouring": "replace_one"}
FIXED = {"sampling": "without_replacement", **REPLACE}
TRUNCATED = {"max_batch_size": 1, "dataset_size": 10}
HUGE = {"max_batch_size": 10**6, "dataset_size": 10**18}
PHASES = {
    "a large group": SampledGaussian(1.0, 0.5, 20).group(300),
    "all people": SampledGaussian(1.0, 0.5, 20).group(10**10),
    "all people, replaced": SampledGaussian(1.0, 0.5, 20, **REPLACE).group(10**10),
    "a group that is almost surely drawn": SampledGaussian(1.0, 1 - 1e-12, 1).group(10**9),
    "a large group and much noise": SampledGaussian(1e8, 1e-13, 10**9).group(10**17),
    "a large group in truncated batches": SampledGaussian(1e-5, 0.5, 10**12, **TRUNCATED).group(
        10**9
    ),
    "no noise": SampledGaussian(1e-300, 1e-300, 10**18, **REPLACE).group(2),
    "a group without noise": SampledGaussian(1e-300, 1e-6, 20).group(2),
    "a coarse mesh": SampledGaussian(1000.0, 0.5, 10**9, **FIXED),
    "no noise, truncated": SampledGaussian(1e-300, 1.0, 1, **HUGE).group(10**17),
    "the most steps": SampledGaussian(0.3, 1e-13, 10**18),
    "the most truncated steps": SampledGaussian(1.0, 1e-300, 10**18, **TRUNCATED).group(2),
    "truncated steps of everybody": SampledGaussian(1e8, 1 - 1e-12, 10**18, **HUGE).group(2),
    "nearly all of the data": SampledGaussian(1.0, 1 - 1e-12, 10**6),
    "nearly none of the data": SampledGaussian(0.5, 1e-300, 1),
    "a few shuffled": SampledGaussian(
        1e-3, 1e-300, 10**18, sampling="shuffled", neighbouring="zero_out"
    ),
}
SLOW = {
    "a group without replacement": SampledGaussian(1.0, 1e-6, 10**6, **FIXED).group(10**9),
    "all noise": SampledGaussian(1e300, 0.5, 10**9),
    "a billion steps": SampledGaussian(1.0, 1e-4, 10**9),
    "a group with more noise than is counted": SampledGaussian(1e300, 0.5, 1, group_size=300),
    "rare and large losses": SampledGaussian(0.3, 1e-6, 20, **TRUNCATED),
    "a rare group": SampledGaussian(0.3, 1e-300, 20, group_size=2),
}
all_phases = pytest.mark.parametrize("name", [*PHASES, *slow(*SLOW)])


@all_phases
def test_epsilon_is_at_most_that_without_sampling(name):
    phase = (PHASES | SLOW)[name]
    moved = 2 if phase.neighbouring == "replace_one" or phase.max_batch_size else 1
    worst = math.sqrt(phase.steps) * moved * phase.group_size / phase.noise_multiplier
    for delta in (1e-300, 1e-5):
        epsilon = phase.epsilon(delta)
        assert 0 <= epsilon <= gaussian_epsilon(delta, worst * (1 + 1e-12))
    assert 0 <= phase.delta(1.0) <= 1


@all_phases
def test_lower_bounds_and_trade_offs_have_an_answer(name):
    phase = (PHASES | SLOW)[name]
    lower, upper = phase.epsilon_bounds(1e-5)
    assert 0 <= lower <= upper
    assert 0 <= phase.trade_off(0.1) <= 0.9


def test_a_group_too_large_for_its_pair_is_accounted_for_without_sampling():
    # More than 20 of 40 members are almost surely in a batch at a rate of 0.9.
    few, many = (SampledGaussian(1.0, 0.9, 1, group_size=size) for size in (20, 40))
    assert few.epsilon(1e-5) <= many.epsilon(1e-5)
    assert many.epsilon(1e-5) == gaussian_epsilon(1e-5, 40.0 * (1 + 1e-15))


def test_rare_and_large_losses_cost_little_delta():
    # The probability to be drawn in any of 20 steps is 2e-5.
    assert SampledGaussian(0.3, 1e-6, 20).delta(0.5) < 2e-7
    assert SampledGaussian(0.3, 1e-6, 20, **TRUNCATED).delta(0.5) < 2e-7


TOO_LARGE = 10**5000
STEPS = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 10}
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
PAPER = {**BUDGET, "dataset_size": 100, "batch_size": 10, "steps": 5, "lipschitz": 1.0}
CALLS = {
    "SampledGaussian": (SampledGaussian, {**STEPS, "group_size": 2, **TRUNCATED}),
    "DiscreteGaussian": (DiscreteGaussian, {"noise_multiplier": 1.0, "steps": 10}),
    "calibrate_noise_multiplier": (
        accounting.calibrate_noise_multiplier,
        {**BUDGET, "sampling_rate": 0.1, "steps": 10, "group_size": 1, **TRUNCATED},
    ),
    "calibrate_steps": (
        accounting.calibrate_steps,
        {**BUDGET, "noise_multiplier": 9.0, "sampling_rate": 0.1},
    ),
    "calibrate_batch_size": (
        accounting.calibrate_batch_size,
        {**BUDGET, "noise_multiplier": 9.0, "dataset_size": 100, "steps": 5},
    ),
    "paper_noise": (accounting.paper_noise, {**PAPER, "number_alone": True}),
    "steps_of_epochs": (
        accounting.steps_of_epochs,
        {"epochs": 3, "dataset_size": 100, "batch_size": 10},
    ),
}
ARGUMENTS = [
    (call, name) for call, (_, given) in CALLS.items() for name in given if name != "number_alone"
]
WRONG = (TOO_LARGE, -TOO_LARGE, math.nan, math.inf, "1", None, [], {}, True, 1j, b"", np.ones(2))
VALUES = (1e-300, 1e300, 10**18, 1 - 1e-16)


@pytest.mark.parametrize(("call", "name"), ARGUMENTS)
def test_every_wrong_argument_raises_one_sentence_that_names_it(call, name):
    function, given = CALLS[call]
    for value in WRONG:
        if value is None and name in ("max_batch_size", "dataset_size"):
            continue
        with pytest.raises((ValueError, TypeError), match=f"^`{name}` must"):
            function(**{**given, name: value})


@pytest.mark.parametrize(
    ("call", "name"),
    [
        pytest.param(*case, marks=pytest.mark.full) if case[0].startswith("calibrate") else case
        for case in ARGUMENTS
    ],
)
def test_every_extreme_argument_has_an_answer_or_raises_one_sentence(call, name):
    function, given = CALLS[call]
    for value in VALUES:
        try:
            found = function(**{**given, name: value})
            if isinstance(found, DiscreteGaussian | SampledGaussian):
                assert found.epsilon(1e-5) >= 0
        except (ValueError, TypeError) as error:
            assert re.match(r"`\w+` must", str(error)), error


def test_curves_and_ledgers_have_a_largest_number_of_steps():
    ledger = Ledger([SampledGaussian(1.0, 0.1, 10**18)])
    with pytest.raises(ValueError, match=r"`epsilons` must be called on at most 1e\+08 steps"):
        ledger.epsilons(1e-5)
    ledger.append(SampledGaussian(1.0, 0.1, 10**18))
    with pytest.raises(ValueError, match=r"`steps` must be a whole number, 1e\+18 at most"):
        ledger.epsilon(1e-5)
