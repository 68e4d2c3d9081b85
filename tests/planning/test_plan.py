"""The parts of a plan agree with each other and with the accountant."""

import dataclasses
import functools
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import binom

import optax_lsdp as lsdp
from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.planning import _plan

BASE = {"dataset_size": 1000, "expected_batch_size": 50, "steps": 100, "delta": 1e-5}
PIECES = lsdp.Piecewise((0, 30), (2.0, 1.0))
KEY = jax.random.key(0)
PLANS = {
    "poisson": {"epsilon": 2.0},
    "noise": {"noise_multiplier": 1.5},
    "cut": {"noise_multiplier": 2.0, "max_batch_size": 60, "steps": 3},
    "fixed": {"epsilon": 2.0, "sampling": "without_replacement", "neighbouring": "replace_one"},
    "shuffled": {"epsilon": 8.0, "sampling": "shuffled", "neighbouring": "zero_out"},
    "full": {"epsilon": 1.0, "sampling": "full", "expected_batch_size": 1000},
    "scheduled": {
        "epsilon": 2.0,
        "noise_schedule": PIECES,
        "clip_norm": PIECES,
        "smoothing": PIECES,
    },
    "grouped": {"epsilon": 2.0, "group_size": 2},
}


def make(name="poisson", **changes):
    """Return a plan with some settings changed. Without changes, plans are shared by all tests."""
    return lsdp.PrivacyPlan(**{**BASE, **PLANS[name], **changes}) if changes else shared(name)


@functools.cache
def shared(name):
    return lsdp.PrivacyPlan(**{**BASE, **PLANS[name]})


@pytest.mark.parametrize("name", PLANS)
def test_the_mechanism_spends_the_budget_and_no_more(name):
    plan = make(name)
    spent = plan.mechanism.epsilon(plan.delta_of_noise)
    assert spent <= plan.epsilon * (1 + 1e-12)
    assert spent >= 0.999 * plan.epsilon


@pytest.mark.parametrize(
    "changes",
    [
        *({"name": name} for name in PLANS),
        {"name": "noise", "clip_norm": (1.0, [2.0, {"a": 3}])},
        {"name": "noise", "clip_norm": {"starts": 1.0, "values": 2.0}},
        {
            **{"name": "noise", "dataset_size": np.int64(1000), "delta": np.float64(1e-5)},
            "steps": np.int32(100),
        },
    ],
)
def test_a_plan_survives_json(changes):
    plan = make(**changes)
    again = lsdp.PrivacyPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest
    assert "key" not in json.loads(plan.to_json())


def test_an_epsilon_of_zero_needs_noise_that_spends_nothing():
    free = lsdp.PrivacyPlan(**{**BASE, "steps": 1, "delta": 9e-4}, noise_multiplier=50.0)
    assert free.epsilon == 0 and lsdp.PrivacyPlan.from_json(free.to_json()) == free
    with pytest.raises(ValueError, match=r"`epsilon` must be at least .*, got 0\.0"):
        make("noise", epsilon=0.0)
    with pytest.raises(ValueError, match=r"`epsilon` must be positive and finite, got 0\.0"):
        make(epsilon=0.0)
    with pytest.raises(ValueError, match=r"`epsilon` must be zero or positive.*got -1\.0"):
        make("noise", epsilon=-1.0)


def test_a_plan_that_claims_too_small_an_epsilon_is_refused():
    found = json.loads(make().to_json())
    found["epsilon"] /= 2
    with pytest.raises(ValueError, match="`epsilon` must be at least"):
        lsdp.PrivacyPlan.from_json(json.dumps(found))
    found["surprise"] = 1
    with pytest.raises(ValueError, match="`text` must be a plan of version 1"):
        lsdp.PrivacyPlan.from_json(json.dumps(found))
    with pytest.raises(ValueError, match="`text` must be what to_json returned"):
        lsdp.PrivacyPlan.from_json("[]")


@pytest.mark.parametrize(("batch", "epochs", "steps"), [(30, 3, 100), (300, 1, 4), (7, 0.7, 100)])
def test_epochs_are_converted_to_steps_and_rounded_up(batch, epochs, steps):
    plan = lsdp.PrivacyPlan(
        dataset_size=1000, expected_batch_size=batch, epochs=epochs, delta=1e-5, noise_multiplier=1
    )
    assert plan.steps == steps


@pytest.mark.parametrize("group_size", [1, 30])
def test_delta_covers_truncated_batches(group_size):
    """δ + (1 + e^ε)·2T·P[batch > room] ≤ the plan's δ, also if a group is added to the data."""
    for noise_multiplier, steps in ((1.5, 100), (0.6, 100), (3.0, 10_000)):
        noise = {"noise_multiplier": noise_multiplier * group_size, "steps": steps}
        plan = make("noise", group_size=group_size, **noise)
        rate = plan.expected_batch_size / plan.dataset_size
        overflow = binom.sf(plan.room, plan.dataset_size + group_size, rate)
        extra = (1 + np.exp(plan.epsilon)) * 2 * plan.steps * overflow
        assert plan.delta_of_noise + extra <= plan.delta
        assert plan.delta_of_noise >= 0.98 * plan.delta
        assert plan.sampler(KEY).max_batch_size == plan.room


@pytest.mark.parametrize("name", PLANS)
def test_the_sampler_agrees_with_the_accountant(name):
    plan = make(name)
    sampler = plan.sampler(KEY)
    phase = plan.mechanism.phases[0]
    assert sampler.dataset_size == plan.dataset_size
    kinds = {
        "poisson": lsdp.PoissonSampler,
        "without_replacement": lsdp.FixedSizeSampler,
        "full": lsdp.FullBatchSampler,
        "shuffled": lsdp.ShuffledSampler,
    }
    assert type(sampler) is kinds[plan.sampling]
    rate = getattr(sampler, "sampling_rate", None)
    rate = rate or getattr(sampler, "batch_size", plan.dataset_size) / plan.dataset_size
    assert rate == phase.sampling_rate
    if phase.max_batch_size is not None:
        assert sampler.max_batch_size == phase.max_batch_size


@pytest.mark.parametrize("name", PLANS)
def test_the_accountant_gets_every_setting(name):
    plan = make(name)
    is_truncated = plan.max_batch_size is not None
    expected = SampledGaussian(
        plan.noise_multiplier * (2.0 if name == "scheduled" else 1.0),
        plan.expected_batch_size / plan.dataset_size,
        1,
        sampling=PLANS[name].get("sampling", "poisson"),
        neighbouring=PLANS[name].get("neighbouring"),
        group_size=PLANS[name].get("group_size", 1),
        max_batch_size=PLANS[name].get("max_batch_size"),
        dataset_size=1000 if is_truncated else None,
    )
    assert plan.event(0) == expected
    assert dataclasses.replace(plan.mechanism.phases[0], steps=1) == expected


def measure_noise(plan):
    """Return a function from a step to its noise, in units of the clip norm."""
    params = jnp.zeros(20_000)
    tx = plan.optimizer(optax.sgd(-float(plan.expected_batch_size)), KEY, smoothing=0.0)
    gradient = plan.clipped_grad(lambda p, x: x * p.sum())

    @jax.jit
    def noise_at(step):
        state = jax.tree.map(lambda x: x + step if x.dtype == jnp.int32 else x, tx.init(params))
        options = {"step": step} if callable(plan.clip_norm) else {}
        total = gradient(params, jnp.zeros(2), jnp.ones(2, bool), **options)
        updates, _ = tx.update(total, state, params)
        clip_norm = plan.clip_norm(step) if callable(plan.clip_norm) else plan.clip_norm
        return updates.std() / clip_norm

    return noise_at


@pytest.mark.parametrize("name", ["poisson", "scheduled"])
def test_the_optimizer_adds_the_noise_that_the_accountant_assumes(name):
    plan = make(name)
    noise_at = measure_noise(plan)
    for step in (0, 29, 30, 99):
        expected = plan.event(step).noise_multiplier
        assert float(noise_at(step)) == pytest.approx(expected, rel=0.03)  # of 20,000 draws


def test_the_optimizer_passes_shard_specs_on_to_privatize(monkeypatch):
    passed = {}

    def privatize(optimizer, **options):
        passed.update(options)
        return optimizer

    monkeypatch.setattr(_plan, "privatize", privatize)
    specs = {"shard_specs": jax.P("x"), "replicated_axes": "y"}
    make("noise").optimizer(optax.sgd(1.0), KEY, **specs)
    assert {name: passed[name] for name in specs} == specs


def test_different_plans_and_labels_have_different_keys():
    one, other = make("noise"), make("noise", clip_norm=2.0)
    keys = [p.derive_key(KEY, label) for p in (one, other) for label in ("noise", "sampling")]
    assert len({tuple(jax.random.key_data(k).tolist()) for k in keys}) == 4


def test_the_statement_names_all_settings():
    text = make("scheduled").statement()
    for words in (
        "ε = 2",
        "δ = 1e-05",
        "100 steps",
        "as scheduled",
        "room for",
        "probability 0.05",
    ):
        assert words in text, words
    assert "9.9e-06" not in text
    rare = {"dataset_size": 10**8, "expected_batch_size": 990, "steps": 10}
    with pytest.warns(UserWarning, match="should be far below 1/n"):
        assert "probability 9.9e-06," in make("noise", **rare).statement()
    assert "budget" not in text
    assert "The budget is ε = 50" in make("noise", epsilon=50.0).statement()


def test_piecewise_sample_follows_a_schedule():
    pieces = lsdp.Piecewise.sample(optax.linear_schedule(2.0, 1.0, 100), steps=100, pieces=4)
    assert pieces == lsdp.Piecewise((0, 25, 50, 75), (2.0, 1.75, 1.5, 1.25))
    assert float(jax.jit(pieces)(60)) == 1.5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_batch_size": 1001}, "`expected_batch_size` must be at most the dataset's size"),
        ({"steps": 0}, "`steps` must be a whole number"),
        ({"steps": None}, "`steps` or `epochs` must be given"),
        ({"epochs": 2}, "`steps` or `epochs` must be given, but not both"),
        ({"epsilon": None}, "`epsilon` or `noise_multiplier` must be given"),
        ({"epsilon": -1.0}, "`epsilon` must be positive"),
        ({"epsilon": 1e-12, "delta": 1e-300}, "`epsilon` must be reachable"),
        ({"noise_multiplier": 0.5}, "`epsilon` must be at least"),
        ({"delta": 1.0}, "`delta` must be above 0 and below 1"),
        ({"sampling": "without_replacement"}, "`neighbouring` must be"),
        ({"sampling": "bernoulli"}, "`sampling` must be one of"),
        ({"sampling": "full"}, "`expected_batch_size` must be the dataset's size, 1000, with"),
        ({"max_batch_size": 9}, "`max_batch_size` must be at least the expected batch size, 50"),
        ({"max_batch_size": 1001}, "`max_batch_size` must be at most the dataset's size"),
        ({"clip_norm": -1.0}, "`clip_norm` must be"),
        ({"clip_norm": {1: 1.0}}, "`clip_norm` must have keys that are strings"),
        ({"smoothing": -1.0}, "`smoothing` must be zero or positive"),
        ({"noise_schedule": 2.0}, "`noise_schedule` must be a Piecewise, got 2.0"),
        (
            {"noise_schedule": lsdp.Piecewise((0,), (1.0,)), "epsilon": 1e-12, "delta": 1e-300},
            "reach",
        ),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make(**changes)


def test_a_schedule_that_is_not_piecewise_is_refused():
    with pytest.raises(TypeError, match=r"Piecewise\.sample"):
        make(clip_norm=optax.constant_schedule(1.0))
    with pytest.raises(ValueError, match="`starts` must begin at 0"):
        lsdp.Piecewise((1, 2), (1.0, 2.0))


def test_a_large_delta_is_warned_about():
    with pytest.warns(UserWarning, match="publishes one example outright"):
        make("noise", delta=1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make("noise", delta=1e-5)


def test_settings_may_be_scalar_arrays():
    arrays = {"epsilon": jnp.float32(2.0), "dataset_size": np.array(1000), "steps": jnp.int32(9)}
    assert make(**arrays) == make(epsilon=2.0, dataset_size=1000, steps=9)


def test_the_statement_says_what_an_adaptive_clip_norm_changes():
    settings = dict(dataset_size=1000, expected_batch_size=50, steps=10, delta=1e-5)
    texts = [
        lsdp.PrivacyPlan(**settings, noise_multiplier=2.0, clip_norm=norm).statement()
        for norm in (
            1.0,
            lsdp.AdaptiveClip(1.0),
            lsdp.AdaptiveClip(1.0, method="quantile"),
            {
                "a": lsdp.AdaptiveClip(1.0, method="fixed"),
                "b": lsdp.AdaptiveClip(1.0, method="fixed"),
            },
        )
    ]
    words = [" ".join(text.split()) for text in texts]
    assert ["computed from the noisy sums" in text for text in words] == [False, True, True, True]
    assert ["1.00499 times as large" in text for text in words] == [False, False, True, False]
    assert "√2 times the stated standard deviation" in words[3]


def test_a_plan_warns_if_the_first_estimate_of_a_clip_norm_takes_long():
    settings = dict(dataset_size=400, expected_batch_size=16, steps=100, epsilon=3.0, delta=1e-4)
    with pytest.warns(UserWarning, match="`clip_norm` needs about .* steps for its first estimate"):
        lsdp.PrivacyPlan(**settings, clip_norm=lsdp.AdaptiveClip(0.3, target=0.1))
    lsdp.PrivacyPlan(**settings, clip_norm=lsdp.AdaptiveClip(0.3))  # no warning
