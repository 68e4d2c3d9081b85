"""A plan computes ε of a ledger, how many steps its budget covers, and the sampling error."""

import dataclasses
import itertools

import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.accounting import Ledger, SampledGaussian
from optax_lsdp.planning._budget import watched_rate
from tests.planning.test_plan import BASE, make


@pytest.mark.parametrize("name", ["poisson", "scheduled"])
def test_the_events_of_all_steps_are_the_mechanism(name):
    plan = make(name)
    ledger = Ledger(plan.event(step) for step in range(plan.steps))
    assert ledger == Ledger(plan.mechanism.phases)
    assert plan.spent(ledger) <= plan.epsilon
    assert plan.remaining_steps(ledger) == 0


def test_epsilon_increases_with_every_step_up_to_the_budget():
    plan = make()
    curve = [plan.epsilon_after(step) for step in range(plan.steps + 1)]
    assert curve[0] == 0 and curve == sorted(curve)
    assert 0.999 * plan.epsilon <= curve[-1] <= plan.epsilon
    exact = dataclasses.replace(plan.event(0), steps=40).epsilon(plan.delta_of_noise)
    assert exact * 0.9999 <= curve[40] <= exact * 1.002


def test_a_ledger_that_deviates_from_the_schedule_is_accounted_as_recorded():
    """The plan has twice the noise in thirty steps. A thirty-first such step deviates from it."""
    plan = make("scheduled")
    first, later = plan.event(0), plan.event(99)
    for events in ([(first, 31)], [(first, 29), (later, 1)], [(first, 30), (later, 71)]):
        ledger = Ledger([dataclasses.replace(event, steps=steps) for event, steps in events])
        expected = Ledger(ledger.phases).epsilon(plan.delta_of_noise)
        assert plan.spent(ledger) == pytest.approx(expected, rel=1e-9)


def test_remaining_steps_follow_the_schedule():
    schedule = lsdp.Piecewise((0, 40), (0.5, 2.0))
    plan = lsdp.PrivacyPlan(**BASE, noise_multiplier=2.0, noise_schedule=schedule)
    ledger = Ledger([dataclasses.replace(plan.event(0), steps=40)])
    assert plan.remaining_steps(ledger) == 60
    recounted = ledger + plan.event(0)
    recounted = Ledger(recounted.phases)  # one of the costly steps was taken twice
    left = plan.remaining_steps(recounted, 40)
    epsilons = plan.epsilons(recounted, 40)
    assert 0 < left < 60 and epsilons[left - 1] <= plan.epsilon < epsilons[left]
    for _ in range(left):
        recounted.append(plan.event(40))
    assert epsilons[left - 1] == pytest.approx(recounted.epsilon(plan.delta_of_noise), rel=1e-3)


def test_a_ledger_holds_at_most_twice_the_planned_steps():
    plan = make("noise", epsilon=50.0)
    ledger = Ledger([dataclasses.replace(plan.event(0), steps=200)])
    assert plan.spent(ledger) < plan.epsilon
    assert not plan.allows(ledger, 50) and plan.remaining_steps(ledger, 50) == 0
    shorter = Ledger([dataclasses.replace(plan.event(0), steps=199)])
    assert plan.allows(shorter, 50) and plan.remaining_steps(shorter, 50) == 1


def test_shuffled_steps_that_continue_an_order_count_as_whole_epochs():
    plan, ledger = make("shuffled"), Ledger()
    for step in range(plan.steps):
        assert plan.allows(ledger, step)
        ledger.append(plan.event(step), continues=True)
    assert plan.spent(ledger) <= plan.epsilon
    apart = Ledger([plan.event(0)] * 5)
    assert plan.spent(apart) > plan.epsilon_after(20)  # five orders, each counted as an epoch


def test_steps_beyond_the_budget_are_not_allowed():
    plan = make()
    ledger = Ledger()
    assert plan.allows(ledger, 0)
    ledger.append(dataclasses.replace(plan.event(0), steps=99))
    assert plan.allows(ledger, 99) and plan.remaining_steps(ledger) == 1
    ledger.append(plan.event(0))
    assert not plan.allows(ledger, 99) and not plan.allows(ledger, 100)
    counted_twice = Ledger([dataclasses.replace(plan.event(0), steps=130)])
    assert not plan.allows(counted_twice, 50)
    costly = make("scheduled")  # its last seventy steps have half the noise
    assert costly.remaining_steps(Ledger([dataclasses.replace(costly.event(99), steps=85)])) == 0


def test_an_event_is_a_single_step():
    assert make().event(3) == SampledGaussian(make().noise_multiplier, 0.05, 1)


def test_a_step_beyond_the_plan_is_refused():
    plan = make()
    with pytest.raises(ValueError, match="`step` must be at most the last planned step, 99"):
        plan.event(plan.steps)
    assert not plan.allows(Ledger(), plan.steps)


@pytest.mark.parametrize("ask", ["spent", "remaining_steps", "allows", "epsilons"])
def test_anything_but_a_ledger_is_refused(ask):
    step = (0,) if ask in ("allows", "epsilons") else ()
    with pytest.raises(TypeError, match="`ledger` must be a Ledger, got NoneType"):
        getattr(make(), ask)(None, *step)


@pytest.mark.parametrize("sampling", ["poisson", "without_replacement", "full"])
def test_the_plan_bounds_the_sampling_error_of_every_scheme(sampling):
    size, batch = 5, 5 if sampling == "full" else 2
    plan = lsdp.PrivacyPlan(
        dataset_size=size,
        expected_batch_size=batch,
        steps=1,
        noise_multiplier=1.0,
        delta=1e-3,
        sampling=sampling,
        neighbouring="replace_one",
    )
    members = [np.array(x) for x in itertools.product([0, 1], repeat=size)]
    rate = batch / size
    if sampling == "poisson":
        chances = [rate ** x.sum() * (1 - rate) ** (size - x.sum()) for x in members]
    else:
        members = [x for x in members if x.sum() == batch]
        chances = [1 / len(members)] * len(members)
    rows = np.random.default_rng(0).normal(size=(size, 3))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    means = np.array([x @ rows / batch for x in members])
    centred = means - rows.mean(0)
    np.testing.assert_allclose(chances @ centred, 0, atol=1e-12)
    spread = chances @ (centred**2).sum(1)
    bound = (1 - watched_rate(plan)) / batch  # C = 1
    share = 1.0 if sampling == "poisson" else ((rows - rows.mean(0)) ** 2).sum(1).mean()
    np.testing.assert_allclose(spread, share * bound, atol=1e-12)  # equal if all norms are C
