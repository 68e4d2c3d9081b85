"""A plan with correlated noise has the matching batches, noise, ε and ledger, and says so."""

import contextlib
import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp.accounting import CorrelatedGaussian, Ledger, SampledGaussian
from optax_lsdp.correlation import banded_inverse, optimize_banded, square_root
from tests.oracles import toeplitz_dense

DELTA = 1e-5


def make_plan(**changes):
    settings = {"dataset_size": 400, "expected_batch_size": 20, "steps": 30, "delta": DELTA}
    return lsdp.PrivacyPlan(**{**settings, "noise_multiplier": 1.0, **changes})


BANDED = make_plan(correlation=4)
INVERSE = banded_inverse(30, 3, min_separation=20)
ORDERED = make_plan(correlation=INVERSE, neighbouring="zero_out")
BOTH = pytest.mark.parametrize("plan", [BANDED, ORDERED], ids=["cyclic", "fixed order"])


def test_one_word_chooses_matrix_batches_and_analysis():
    assert BANDED.correlation == optimize_banded(30, 4)
    assert (BANDED.sampling, BANDED.neighbouring) == ("cyclic_poisson", "add_remove")
    assert ORDERED.sampling == "fixed_order"
    run = CorrelatedGaussian(1.0, BANDED.correlation, 30, sampling_rate=0.05)
    assert BANDED.epsilon == run.epsilon(0.99 * DELTA)
    eight = SampledGaussian(1.0, 0.2, 8)  # ⌈30/4⌉ steps at the rate 4·0.05
    assert BANDED.epsilon == pytest.approx(eight.epsilon(0.99 * DELTA), rel=1e-6)
    order = CorrelatedGaussian(1.0, INVERSE, min_separation=20, neighbouring="zero_out")
    assert ORDERED.epsilon == order.epsilon(DELTA)
    alone = make_plan(correlation=1).epsilon  # one band is independent noise
    assert alone == pytest.approx(make_plan().epsilon, rel=1e-6)


@pytest.mark.parametrize("options", [{}, {"correlation": INVERSE, "neighbouring": "replace_one"}])
def test_the_smallest_noise_within_the_budget_is_found(options):
    options = {"correlation": 4, **options}
    plan = make_plan(noise_multiplier=None, epsilon=3.0, **options)
    assert plan.mechanism.epsilon(plan.delta_of_noise) <= 3.0
    with pytest.raises(ValueError, match=r"`epsilon` must be at least 3\.0"):
        make_plan(noise_multiplier=plan.noise_multiplier * 0.9999, epsilon=3.0, **options)


@BOTH
def test_a_plan_survives_json_and_has_a_digest_of_its_correlation(plan):
    again = lsdp.PrivacyPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    other = replace(plan, correlation=square_root(30, 2) if plan is BANDED else 3)
    assert other.digest != plan.digest


@BOTH
def test_epsilon_after_each_step_is_that_of_the_steps_taken(plan):
    for steps in (0, 1, 4, 5, 20, 21, 29, 30):
        run = replace(plan.mechanism.phases[0], steps=steps)
        exact = run.epsilon(plan.delta_of_noise) if steps else 0.0
        # Both are upper bounds, computed on different lattices.
        assert plan.epsilon_after(steps) == pytest.approx(exact, rel=1e-4)
    curve = [plan.epsilon_after(steps) for steps in range(31)]
    assert curve == sorted(curve) and curve[-1] == pytest.approx(plan.epsilon)


@BOTH
def test_a_ledger_of_single_steps_counts_one_mechanism(plan):
    ledger = Ledger()
    for step in range(30):
        assert plan.allows(ledger, step) and plan.remaining_steps(ledger) == 30 - step
        ledger.append(plan.event(step), continues=True)
    assert ledger.phases == plan.mechanism.phases
    assert plan.spent(ledger) == pytest.approx(plan.epsilon)
    again = Ledger.from_json(ledger.to_json())
    assert again == ledger and again.epsilon(DELTA) == ledger.epsilon(DELTA)
    with pytest.raises(ValueError, match=r"`steps` must be at most 30 in all, .* got 31; start"):
        ledger.append(plan.event(29), continues=True)


def test_new_noise_is_a_second_mechanism_that_counts_its_own_cycles():
    plan = make_plan(correlation=4, epsilon=20.0)
    ledger = Ledger([replace(plan.event(0), steps=9)])  # three cycles
    ledger.append(plan.event(7), continues=False)  # restarted at step 7
    ledger.append(plan.event(8), continues=True)
    assert [phase.steps for phase in ledger.phases] == [9, 2]
    assert sum(part.steps for part in ledger.parts) == 3 + 1
    assert Ledger.from_json(ledger.to_json()) == ledger  # two phases stay two

    def spent(cycles):
        return SampledGaussian(1.0, 0.2, cycles).epsilon(plan.delta_of_noise)

    assert plan.spent(ledger) == pytest.approx(spent(4), rel=1e-6)
    # Steps 9 and 10 belong to the cycle that has begun, unless noise is new again.
    assert plan.epsilons(ledger, 9, continues=True)[:3] == pytest.approx(
        [spent(4), spent(4), spent(5)], rel=1e-3
    )
    assert plan.epsilons(ledger, 9)[0] == pytest.approx(spent(5), rel=1e-3)
    assert ledger.remaining_steps(spent(4) * 1.0001, plan.delta_of_noise) == 2


def test_a_ledger_never_guesses_which_noise_continues():
    # Two mechanisms with few steps can have a smaller sensitivity than one with all steps.
    ledger, metric = (
        Ledger(),
        SampledGaussian(9.0, 1.0, 1, sampling="full", neighbouring="zero_out"),
    )
    ledger.append(ORDERED.event(0))
    with pytest.raises(ValueError, match=r"`continues` must be True or False .* pass True if"):
        ledger.append(ORDERED.event(1))
    ledger.append(ORDERED.event(1), continues=True)
    ledger.append(metric)
    for ask in (ledger.append, partial(ORDERED.allows, ledger, 2)):
        arguments = (ORDERED.event(2),) if ask == ledger.append else ()
        with pytest.raises(ValueError, match=r"`continues` must be False, .* in a second ledger"):
            ask(*arguments, continues=True)
    assert ledger.steps == 3
    noise, metrics = Ledger(ORDERED.mechanism.phases), Ledger([metric] * 10)
    assert (noise + metrics).epsilon(DELTA) == pytest.approx(
        (ORDERED.mechanism + replace(metric, steps=10)).epsilon(DELTA)
    )


def test_a_budget_that_is_almost_spent_lasts_for_the_cycle_that_has_begun():
    plan = make_plan(correlation=4, epsilon=make_plan(correlation=4).epsilon * 1.0005)
    ledger = Ledger([replace(plan.event(0), steps=steps) for steps in (27, 2)])  # 7 + 1 cycles
    assert plan.allows(ledger, 27, continues=True) and not plan.allows(ledger, 27)
    assert plan.remaining_steps(ledger, 26, continues=True) == 2
    assert plan.remaining_steps(ledger, 26) == 0


def test_the_sampler_is_cyclic_or_keeps_its_order():
    sampler = BANDED.sampler(jax.random.key(0))
    assert isinstance(sampler, lsdp.CyclicPoissonSampler) and sampler.cycle == 4
    assert sampler.max_batch_size == BANDED.room
    order = ORDERED.sampler(jax.random.key(0), multiple_of=8)
    for step in range(10):
        first, second = order.batch(step), order.batch(step + 20)
        np.testing.assert_array_equal(first.indices, second.indices)


def test_room_covers_both_truncations_of_cyclic_batches():
    # A hundredth of δ pays for twice the planned steps, each truncated with twice this probability.
    sampler = BANDED.sampler(jax.random.key(0))
    rare = 0.01 * DELTA / (2 * 30) / (1 + math.exp(BANDED.epsilon))
    whole = lsdp.PoissonSampler(401, 0.05, jax.random.key(0), BANDED.room)
    candidates = replace(sampler._candidates, dataset_size=401)
    assert whole.overflow_probability + candidates.overflow_probability <= rare * 1.02


@BOTH
def test_the_optimizer_adds_the_planned_noise_and_no_more_than_the_planned_steps(plan):
    def zero(params, example):
        return 0.0 * (params.sum() + example)

    params, key = jnp.zeros(2000), jax.random.key(1)
    tx = plan.optimizer(optax.sgd(1.0), key)
    gradient = plan.clipped_grad(zero)

    @jax.jit
    def step(state):
        total = gradient(params, jnp.zeros(2), jnp.zeros(2, bool))
        return tx.update(total, state, params)

    state, noises = tx.init(params), []
    for _ in range(31):
        noise, state = step(state)
        noises.append(np.asarray(noise))
    assert not np.any(noises[30])
    scale = plan.noise_multiplier / plan.expected_batch_size
    drawn = toeplitz_dense(plan.correlation.column()) @ np.float64(noises[:30]) / scale
    np.testing.assert_allclose(drawn @ drawn.T / 2000, np.eye(30), atol=6 / 2000**0.5)
    with pytest.raises(ValueError, match="fewer than 30 steps, the number of planned steps"):
        tx.update(gradient(params, jnp.zeros(2), jnp.zeros(2, bool)), state, params)


def test_groups_get_the_generic_bound_or_that_of_one_gaussian_mechanism():
    run = CorrelatedGaussian(3.0, square_root(30, 4), sampling_rate=0.05)
    one, two = (run.group(size).epsilon(DELTA) for size in (1, 2))
    assert two > 2 * one and Ledger.from_json(Ledger([run.group(2)]).to_json()).epsilon(
        DELTA
    ) == pytest.approx(two)
    tight = SampledGaussian(3.0, 0.2, 8, group_size=2).epsilon(DELTA)
    assert two > tight  # the analysis of Poisson groups, which does not hold here
    order = CorrelatedGaussian(9.0, INVERSE, min_separation=20, neighbouring="zero_out")
    halved = replace(order, noise_multiplier=4.5)
    assert order.group(2).epsilon(DELTA) == pytest.approx(halved.epsilon(DELTA), rel=1e-8)


def test_a_statement_names_parts_people_and_restarts():
    text = " ".join(make_plan(correlation=4, unit="user").statement().split())
    assert "each person is assigned at random" in text and "with probability 0.2" in text
    assert "Of a larger batch, a random subset" in text
    twice = lsdp.accounting.Composition((BANDED.event(0), BANDED.event(0)))
    text = " ".join(lsdp.accounting.statement(twice, DELTA).split())
    assert "2 steps" in text and "start again 1 times" in text


WATCH = (lsdp.AdaptiveClip(1.0), lsdp.Piecewise((0, 5), (1.0, 2.0)))
BAD = {
    "another scheme": ({"correlation": 4, "sampling": "poisson"}, "`sampling` .* got 'poisson'; l"),
    "no correlation": ({"sampling": "cyclic_poisson"}, "`correlation` must be given with sampling"),
    "rate above 1": ({"correlation": 21}, "`correlation` .* at most 20 bands, .* got 21; take"),
    "more bands than steps": ({"correlation": 31}, "`correlation` .* number of steps, 30, got 31"),
    "no bands": ({"correlation": 0}, "`correlation` must be a whole number, 1 or more, got 0"),
    "a word": ({"correlation": "8"}, "`correlation` must be a number of bands, or .* got str;"),
    "a matrix": ({"correlation": np.eye(30)}, "`correlation` .* got ndarray; pass a number such"),
    "too few steps": ({"correlation": square_root(29, 2)}, "for at least 30 steps, .* got 29; m"),
    "schedule": (
        {"correlation": 4, "noise_schedule": WATCH[1]},
        "`noise_schedule` must be None with a correlation, .* got Piecewise",
    ),
    "adaptive": ({"correlation": 4, "clip_norm": WATCH[0]}, "`clip_norm` must be constant with"),
    "scheduled": ({"correlation": 4, "clip_norm": WATCH[1]}, "`clip_norm` must be constant with"),
    "auto": (
        {"correlation": 4, "smoothing": "auto"},
        "`smoothing` must be a number with a correlation, because .* got 'auto'",
    ),
    "truncated": ({"correlation": 4, "max_batch_size": 40}, "`max_batch_size` must be None with"),
    "inverse": (
        {"correlation": INVERSE, "sampling": "cyclic_poisson"},
        "at most 20 bands, .* got 30; pass sampling='fixed_order' for a banded inverse",
    ),
    "relation": ({"correlation": INVERSE}, "`neighbouring` must be 'zero_out' or .* got None; pas"),
    "full": (
        {"correlation": 1, "sampling": "full", "expected_batch_size": 20},
        "`sampling` must be 'cyclic_poisson' or 'fixed_order' with a correlation, got 'full'",
    ),
}


@pytest.mark.parametrize(("settings", "sentence"), BAD.values(), ids=list(BAD))
def test_bad_input_is_answered_in_one_sentence(settings, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence):
        make_plan(**settings)


@pytest.mark.parametrize("kind", [{"correlation": 2}, {"neighbouring": "replace_one"}])
def test_groups_with_the_generic_bound_have_an_epsilon_after_every_step(kind):
    plan = make_plan(**kind, group_size=2, steps=3, noise_multiplier=4.0)
    ledger = Ledger()
    assert plan.remaining_steps(ledger) == 3
    ledger.append(plan.event(0), continues=True)
    assert ledger.epsilon(plan.delta_of_noise) <= plan.spent(ledger) <= plan.epsilon
    assert plan.remaining_steps(ledger) == 2
    assert plan.epsilon_after(3) == plan.epsilon


def test_a_gradient_with_slack_is_refused_by_name():
    for make in (BANDED.clipped_grad, BANDED.value_and_clipped_grad):
        with pytest.raises(ValueError, match=r"`slack` must be None with a .* got 4"):
            make(jnp.vdot, slack=4)


def test_watch_refuses_private_sums_before_correlated_noise():
    noise = lsdp.add_correlated_noise(1.0, BANDED.correlation, key=jax.random.key(0))
    watched = lsdp.watch(optax.chain(noise, optax.sgd(0.1)), steps=3, stddev=1.0)
    with pytest.raises(ValueError, match="`optimizer` must be what follows the noise"):
        watched.init(jnp.zeros(2))


def test_estimates_that_assume_independent_noise_are_refused():
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 2}
    private |= {"correlation": BANDED.correlation, "key": jax.random.key(0)}
    for name, value in (
        ("slack", 8),
        ("watch_steps", 9),
        ("clip_norm", WATCH[0]),
        ("noise_multiplier", WATCH[1]),
        ("smoothing", "auto"),
        ("smoothing", ["auto", lsdp.low_pass([0.2], [1, -0.8])]),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be .* with a `correlation`"):
            lsdp.privatize(optax.sgd(1.0), **{**private, name: value})
    with pytest.raises(ValueError, match="`watch` must be False with correlated noise, got True"):
        BANDED.optimizer(optax.sgd(1.0), jax.random.key(0), watch=True)
    watched = lsdp.watch(optax.sgd(0.1), steps=3, stddev=1.0)
    for optimizer, smoothing in ((watched, 0.0), (optax.sgd(0.1), [watched])):
        tx = lsdp.privatize(optimizer, smoothing=smoothing, **private)
        with pytest.raises(ValueError, match="`optimizer` must not be watched with a `correlation"):
            tx.init(jnp.zeros(3))
    noise = lsdp.add_correlated_noise(1.0, BANDED.correlation, key=jax.random.key(0))
    chain = optax.chain(noise, watched)
    with pytest.raises(ValueError, match="`state` must have independent noise, got correlated"):
        lsdp.training_curve(chain.init(jnp.zeros(3)))
    for known, outcome in (
        (
            {},
            pytest.raises(ValueError, match=r"`noise_stddev` must be set .* without `correlation`"),
        ),
        ({"noise_stddev": 0.7}, contextlib.nullcontext()),
    ):
        debiased = lsdp.privatize(lsdp.scale_by_debiased_adam(**known), smoothing=0.5, **private)
        with outcome:
            jax.eval_shape(
                lambda grads, params, tx=debiased: tx.update(grads, tx.init(params), params),
                jnp.ones((2, 3)),
                jnp.zeros(3),
            )


@pytest.mark.parametrize("start", [50, 0])
def test_remaining_steps_are_those_that_the_budget_allows(start):
    """A curve of ε lies slightly above ε; one step too few would waste a cycle of 16 steps."""
    settings = dict(dataset_size=1000, expected_batch_size=50, steps=100, delta=1e-5, epsilon=8.0)
    plan = lsdp.PrivacyPlan(**settings, correlation=16)
    ledger = Ledger()
    for step in range(start):
        ledger.append(plan.event(step), continues=step > 0)
    found = plan.remaining_steps(ledger, start, continues=False)
    allowed = start
    while plan.allows(ledger, allowed, continues=allowed > start):
        ledger.append(plan.event(allowed), continues=allowed > start)
        allowed += 1
    assert found == allowed - start >= 40


def test_correlated_noise_does_not_continue_beyond_its_steps():
    plan = make_plan(correlation=4)
    whole, larger = Ledger(plan.mechanism.phases), make_plan(correlation=4, epsilon=90.0)
    assert not larger.allows(whole, plan.steps - 1, continues=True)
    assert larger.remaining_steps(whole, 3, continues=True) == 0
