"""A ledger records steps, merges equal ones, survives JSON, and answers without changing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_lsdp.accounting import Ledger, SampledGaussian, _ledger

STEP = SampledGaussian(1.1, 256 / 60_000, 1)
OTHER = SampledGaussian(2.0, 0.01, 1)

steps = st.builds(
    SampledGaussian,
    st.floats(0.5, 50),
    st.floats(1e-4, 0.5),
    st.integers(0, 10**6),
    max_batch_size=st.none() | st.integers(1, 9999),
    dataset_size=st.integers(1, 10**9),
)


@settings(max_examples=20)
@given(phases=st.lists(steps, max_size=5))
def test_a_ledger_survives_json(phases):
    ledger = Ledger(phases)
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger and again.phases == ledger.phases
    assert again.steps == sum(phase.steps for phase in phases)


def test_equal_steps_are_merged_into_one_phase():
    ledger = Ledger()
    for _ in range(100):
        ledger.append(STEP)
    for _ in range(50):
        ledger.append(SampledGaussian(1.1, 256 / 60_000, 2))  # equal, but not the same object
    ledger.append(OTHER)
    ledger.append(STEP)
    assert [phase.steps for phase in ledger.phases] == [200, 1, 1]
    assert sorted(phase.steps for phase in ledger.parts) == [1, 201]
    expected = SampledGaussian(1.1, 256 / 60_000, 201) + OTHER
    assert ledger.epsilon(1e-5) == expected.epsilon(1e-5)


def test_a_question_changes_nothing():
    ledger = Ledger([STEP, OTHER])
    before = ledger.to_json()
    ledger.epsilon(1e-5), ledger.delta(1.0), ledger.epsilons(1e-5), ledger.epsilon_bounds(1e-5)
    ledger.remaining_steps(1.0, 1e-5)
    assert ledger.to_json() == before


@pytest.mark.parametrize(
    "phases",
    [
        [SampledGaussian(1.1, 256 / 60_000, 3000)],
        [SampledGaussian(3.0, 0.02, 200), SampledGaussian(1.5, 0.01, 500)],
        [SampledGaussian(3.0, 0.02, 100), SampledGaussian(20.0, 1, 50, sampling="full")],
        [SampledGaussian(20.0, 1, 3000, sampling="full")],
        [SampledGaussian(8.0, 0.1, 95, sampling="shuffled", neighbouring="zero_out")],
        [
            SampledGaussian(
                8.0, 0.01, 300, sampling="without_replacement", neighbouring="replace_one"
            )
        ],
    ],
    ids=["one", "two", "mixed", "full", "shuffled", "fixed size"],
)
def test_the_curve_agrees_with_epsilon_after_each_step(phases):
    ledger = Ledger(phases)
    curve = ledger.epsilons(1e-6)
    assert len(curve) == ledger.steps
    assert np.all(np.diff(curve) >= 0)
    for taken in {1, 2, 37, ledger.steps // 3, ledger.steps}:
        rest, prefix = taken, Ledger()
        for phase in phases:
            prefix.append(SampledGaussian(**{**vars(phase), "steps": min(rest, phase.steps)}))
            rest -= min(rest, phase.steps)
        low, high = prefix.epsilon_bounds(1e-6)
        assert low * (1 - 1e-9) <= curve[taken - 1] <= high * 1.002 + 1e-12


def test_the_curve_takes_the_next_computed_value(monkeypatch):
    monkeypatch.setattr(_ledger, "_RATIO", 0.5)
    curve = Ledger([SampledGaussian(3.0, 0.02, 100)]).epsilons(1e-6)
    assert len(set(curve)) < 20  # few are computed
    for taken in (5, 17, 50, 99):
        assert curve[taken - 1] >= SampledGaussian(3.0, 0.02, taken).epsilon_bounds(1e-6)[0]


def test_remaining_steps_are_the_most_within_the_budget():
    ledger = Ledger([SampledGaussian(1.1, 256 / 60_000, 5000), OTHER])
    more = ledger.remaining_steps(2.0, 1e-5)
    next_steps = SampledGaussian(2.0, 0.01, more)
    assert (ledger + next_steps).epsilon(1e-5) <= 2.0
    assert (ledger + next_steps + OTHER).epsilon(1e-5) > 2.0
    assert ledger.remaining_steps(1.0, 1e-5) == 0


def test_parts_of_shuffled_epochs_are_not_merged():
    part = SampledGaussian(8.0, 0.1, 4, sampling="shuffled", neighbouring="zero_out")
    ledger = Ledger([part, part, part])
    assert [phase.steps for phase in ledger.phases] == [4, 4, 4]
    assert ledger.epsilon(1e-5) == pytest.approx(
        SampledGaussian(8.0, 0.1, 30, sampling="shuffled", neighbouring="zero_out").epsilon(1e-5)
    )
    assert Ledger.from_json(ledger.to_json()) == ledger


def altered(**changes):
    found = json.loads(Ledger([STEP]).to_json())
    found.update(changes)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Ledger.from_json(altered(optax_lsdp_ledger=2)), "of version 1, got version 2"),
        (lambda: Ledger.from_json(altered(extra=1)), "only the keys .* got .*'extra'"),
        (lambda: Ledger.from_json(altered(optax_lsdp_ledger=True)), "got version True"),
        (lambda: Ledger.from_json(None), "`text` must be what to_json returned, got 'None'"),
        (lambda: Ledger.from_json("{}"), "`text` must be what to_json returned, got '{}'"),
        (lambda: Ledger.from_json("no"), "`text` must be what to_json returned, got 'no'"),
        (lambda: Ledger.from_json("[]"), "`text` must be what to_json returned"),
        (lambda: Ledger.from_json(altered(phases=[{"steps": 1}])), "`text` must have phases with"),
        (lambda: Ledger.from_json(altered(phases=[3])), "`text` must have phases with .* got 3"),
        (lambda: Ledger.from_json(altered(phases=3)), "`text` must have"),
        (
            lambda: Ledger.from_json(
                altered(phases=[{**vars(STEP), "noise_multiplier": math.nan}])
            ),
            "`noise_multiplier` .* got nan",
        ),
        (
            lambda: Ledger.from_json(
                altered(phases=[vars(STEP), {**vars(STEP), "noise_multiplier": "much"}])
            ),
            "`text` must have valid phases, got an error in phase 2 of 2: `noise_multiplier` .*",
        ),
        (
            lambda: Ledger.from_json(
                altered(phases=[vars(STEP), vars(OTHER), {**vars(STEP), "group_size": 2}])
            ),
            "in phase 3 of 3: `group_size` must be the same in all phases .*to_json unchanged",
        ),
        (lambda: Ledger.from_json('{"optax_lsdp_plan": 1}'), r"\(it has no 'optax_lsdp_ledger'\)"),
        (lambda: Ledger().remaining_steps(1.0, 1e-5), "`remaining_steps` must follow a step"),
        (
            lambda: Ledger([STEP, SampledGaussian(1.0, 0.1, 1, neighbouring="zero_out")]),
            "`neighbouring` must be the same",
        ),
        (lambda: Ledger([STEP.group(2)]).append(STEP), "`group_size` must be the same"),
    ],
)
def test_a_message_names_the_wrong_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_group_with_the_generic_bound_gets_the_epsilon_of_a_later_step():
    replaced = SampledGaussian(4.0, 0.1, 1, neighbouring="replace_one").group(2)
    phases = [replace(replaced, steps=3), replace(replaced, steps=2, noise_multiplier=8.0)]
    curve = Ledger(phases).epsilons(1e-5)
    assert (np.diff(curve) >= 0).all() and len(set(curve)) == 4
    for steps in range(1, 6):
        taken = [
            replace(phases[0], steps=min(3, steps)),
            replace(phases[1], steps=max(0, steps - 3)),
        ]
        assert curve[steps - 1] >= Ledger(taken).epsilon(1e-5)
    assert curve[-1] == Ledger(phases).epsilon(1e-5)


def test_a_ledger_records_only_sampled_gaussians():
    with pytest.raises(
        TypeError, match="`phase` must be a SampledGaussian or a CorrelatedGaussian, got 1"
    ):
        Ledger().append(1)
