"""A batch of users: what is chosen, averaged and clipped, and what `fit` trains with it."""

import functools
import json
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from scipy.stats import chisquare

import optax_lsdp as lsdp
from optax_lsdp._keys import fold_in_text
from optax_lsdp.accounting import SampledGaussian, statement
from optax_lsdp.sampling import Batch, choose_within
from optax_lsdp.training import UserBatch, UserData, average_examples
from tests.oracles import sum_of_users
from tests.training.problem import (
    SEED,
    SHORT,
    assert_close,
    bits,
    crash,
    fit,
    loss,
    make_data,
    make_params,
    make_plan,
    reference,
)

DATA = make_data()
KEY = jax.random.key(SEED)
RNG = np.random.default_rng(3)
OWNERS = np.concatenate([np.arange(60), RNG.integers(0, 60, 340) ** 2 // 60])  # unbalanced
USERS = UserData(DATA, OWNERS, max_examples=3)
PLAN = make_plan(dataset_size=60, expected_batch_size=12, steps=12, unit="user", smoothing=0.5)
EVERYONE = Batch(np.arange(60), np.ones(60, bool))


def noisy_loss(params, example, key):
    """Depend on a key as dropout does."""
    kept = jax.random.bernoulli(key, 0.5, example["x"].shape)
    return loss(params, {**example, "x": jnp.where(kept, example["x"], 0)})


@functools.cache
def trained():
    return fit(PLAN, USERS)


def choose(users, counts, room, step=0, key=KEY):
    return choose_within(key, step, np.asarray(users), np.asarray(counts), room)


def test_the_shape_of_a_batch_does_not_tell_how_many_examples_users_have():
    for owners in (OWNERS, np.minimum(OWNERS, 3), np.arange(400) // 2):
        data = UserData(DATA, owners, max_examples=7)
        few = Batch(np.arange(3), np.ones(3, bool))
        assert data.batch(few, 0, key=KEY).mask.shape == (3, 7)


# Choosing examples.


def test_a_choice_has_no_example_twice_and_as_many_as_there_are():
    counts = np.arange(12)
    places, mask = choose(np.arange(12), counts, 5)
    assert (mask.sum(1) == np.minimum(counts, 5)).all()
    for chosen, kept, count in zip(places, mask, counts, strict=True):
        assert len(set(chosen[kept])) == kept.sum() and (chosen[kept] < max(count, 1)).all()


def test_every_choice_is_equally_likely():
    users = np.arange(5000)
    places, _ = choose(users, np.full(5000, 5), 2)
    subsets = list(combinations(range(5), 2))
    seen = [subsets.index(tuple(sorted(pair))) for pair in places.tolist()]
    assert chisquare(np.bincount(seen, minlength=10)).pvalue > 1e-4  # fixed seed


def test_a_choice_depends_on_key_step_and_user_alone():
    users, counts = np.array([7, 3, 9, 1000]), np.array([40, 50, 60, 70])
    places, _ = choose(users, counts, 4)
    order = [2, 0, 3]
    np.testing.assert_array_equal(choose(users[order], counts[order], 4)[0], places[order])
    assert len({row.tobytes() for row in choose(users, np.full(4, 50), 4)[0]}) == 4
    assert (choose(users, counts, 4, step=1)[0] != places).any(1).all()
    assert (choose(users, counts, 4, key=jax.random.key(1))[0] != places).any(1).all()


@pytest.mark.parametrize("names", [np.asarray, lambda x: np.char.add("user ", x.astype(str))])
def test_a_batch_holds_examples_of_its_users(names, tmp_path):
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (400, 16))
    x[:] = DATA["x"]
    data = UserData({**DATA, "x": x}, names(OWNERS), max_examples=3)
    picked = Batch(np.array([4, 0, 59, 5]), np.array([True, True, True, False]))
    found = data.batch(picked, 2, key=KEY)
    assert found.examples["x"].shape == (4, 3, 16) and len(data) == 60
    np.testing.assert_array_equal(found.users, [4, 0, 59, 0])
    batch = zip(picked.indices, found.examples["x"], found.mask, strict=True)
    for user, rows, mask in batch:
        own = DATA["x"][user == OWNERS]
        size = min(len(own), 3) if user != 5 else 0
        assert mask.sum() == size and (rows[~mask] == (rows[0] if size else 0)).all()
        assert {row.tobytes() for row in rows[mask]} <= {row.tobytes() for row in own}


def test_examples_are_chosen_afresh_at_every_step_and_again_when_a_run_resumes():
    drawn = [bits(USERS.batch(EVERYONE, step, key=KEY)) for step in (0, 1, 2, 0)]
    assert len(set(drawn[:3])) == 3 and drawn[0] == drawn[3]
    assert bits(USERS.batch(EVERYONE, 0, key=jax.random.key(1))) not in drawn


# Averaging and clipping.


def flat_gradients(params):
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, jax.tree.map(jnp.asarray, DATA))
    return np.concatenate([np.asarray(g).reshape(400, -1) for g in jax.tree.leaves(grads)], 1)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_averages_of_users_are_clipped_and_summed(engine):
    params = jax.tree.map(lambda x: x + 0.1, make_params())
    data = UserData(DATA, OWNERS, max_examples=400)  # all examples of each user
    found = data.batch(EVERYONE, 0, key=KEY)
    grad = lsdp.clipped_grad(average_examples(loss), clip_norm=0.7, engine=engine)
    total = jax.jit(grad)(params, found, jnp.ones(60, bool))
    got = np.concatenate([np.asarray(x).reshape(-1) for x in jax.tree.leaves(total)])
    wanted = sum_of_users(flat_gradients(params), OWNERS, 0.7)
    np.testing.assert_allclose(got, wanted, atol=1e-3 * 0.7)  # factors are rounded down by 5e-4


def root_loss(params, x):  # its gradient at x = 0 is NaN
    return params @ (x / jnp.linalg.norm(x)) + jnp.sum(jnp.log(x))


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_padding_counts_nothing_whatever_it_holds(engine):
    x = jax.random.uniform(KEY, (3, 4, 5)) + 0.1
    mask = jnp.array([[True, True, False, False], [False, True, False, True], [False] * 4])
    grad = jax.jit(lsdp.clipped_grad(average_examples(root_loss), clip_norm=10.0, engine=engine))
    everyone = jnp.ones(3, bool)
    totals = [
        grad(jnp.ones(5), (jnp.where(mask[..., None], x, filler), mask), everyone)
        for filler in (0.0, 1e38, jnp.nan)
    ]
    assert len({bits(total) for total in totals}) == 1
    directions = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    wanted = directions[0, :2].mean(0) + directions[1, 1::2].mean(0)
    np.testing.assert_allclose(totals[0].value, wanted, rtol=1e-5)


def test_padding_by_the_data_is_that_of_the_loss():
    params = jnp.ones(16)
    found = USERS.batch(EVERYONE, 0, key=KEY)
    examples, owned = found.examples["x"] ** 2 + 0.1, found.mask
    grad = jax.jit(lsdp.clipped_grad(average_examples(root_loss), clip_norm=1.0))
    ways = UserBatch(examples, owned, found.users), (examples, owned)
    totals = [grad(params, way, jnp.ones(60, bool)) for way in ways]
    assert not owned.all() and bits(totals[0]) == bits(totals[1])


def test_an_average_of_float16_losses_does_not_overflow():
    loss = average_examples(lambda params, x: (params * x).astype(jnp.float16))
    found, slope = jax.value_and_grad(loss)(1.0, (jnp.full(64, 3000.0), jnp.ones(64, bool)))
    assert found == slope == 3000 and found.dtype == jnp.float16


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_a_user_without_examples_contributes_exactly_zero(engine):
    grad = lsdp.value_and_clipped_grad(average_examples(root_loss), clip_norm=1.0, engine=engine)
    nothing = jnp.zeros((2, 3, 5)), jnp.zeros((2, 3), bool)
    private, total = jax.jit(grad)(jnp.ones(5), nothing, jnp.ones(2, bool))
    assert not total.value.any() and not private.values.any()


def test_every_example_of_a_user_gets_its_own_key():
    def noise(params, x, key):
        return params @ jax.random.normal(key, (2,))

    user = jnp.zeros(2), jnp.array([True, True])
    got = jax.grad(average_examples(noise))(jnp.zeros(2), user, KEY)
    keys = jax.random.split(KEY)
    wanted = sum(jax.random.normal(key, (2,)) for key in keys) / 2
    np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_gradients_of_single_examples_are_not_formed():
    def dense(params, example):
        return jnp.sum(jnp.tanh(example @ params))

    user = jnp.ones((4, 64)), jnp.ones(4, bool)
    explained = lsdp.explain_clipping(average_examples(dense), jnp.zeros((64, 64)), user)
    assert [row.strategy for row in explained.rows] == ["Gram matrices"]


# Runs.


@pytest.mark.parametrize(
    ("changes", "function"),
    [({}, noisy_loss), ({"sampling": "full", "expected_batch_size": 400}, loss)],
    ids=["Poisson batches, a loss with a key", "full batches"],
)
def test_one_example_per_user_trains_what_examples_train_to_the_bit(changes, function):
    plan, users = make_plan(steps=5, **changes), make_plan(steps=5, unit="user", **changes)
    alone = fit(plan, loss_fn=function)
    ids = np.random.default_rng(0).permutation(400)
    done = fit(users, UserData(DATA, ids, max_examples=9), loss_fn=function)
    assert bits(done.params) == bits(alone.params)


def test_fit_neither_refuses_nor_repeats_what_the_plan_said(tmp_path):
    """The noise is so large that δ alone covers the step: ε is 0. Warnings would be errors."""
    with pytest.warns(UserWarning, match="`delta` should be far below .* publishes one user"):
        plan = make_plan(steps=1, unit="user", noise_multiplier=20.0, delta=0.01)
    assert plan.epsilon == 0
    data = UserData(DATA, np.arange(400), max_examples=2)
    done = [fit(plan, data, folder=tmp_path) for _ in range(2)]  # starts, and resumes
    assert [one.steps for one in done] == [1, 1] and bits(done[0].params) == bits(done[1].params)


def test_one_of_many_equal_examples_trains_what_this_example_trains_to_the_bit():
    tripled = jax.tree.map(lambda x: np.concatenate([x] * 3), DATA)
    data = UserData(tripled, np.tile(np.arange(400), 3), max_examples=1)
    assert bits(fit(make_plan(steps=5, unit="user"), data).params) == bits(reference(SHORT).params)


def test_fit_trains_what_a_loop_over_batches_of_users_trains():
    key = fold_in_text(KEY, "first")  # the nonce of a new run
    sampler, choice = PLAN.sampler(key), PLAN.derive_key(key, "users")
    gradient = jax.jit(PLAN.clipped_grad(average_examples(loss)))
    private = PLAN.optimizer(optax.sgd(0.1, momentum=0.9), key)
    params = make_params()
    state = private.init(params)
    for step in range(PLAN.steps):
        chosen = sampler.batch(step)
        total = gradient(params, USERS.batch(chosen, step, key=choice), chosen.mask)
        updates, state = private.update(total, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(trained().params, params)


def test_a_run_with_users_is_the_same_on_any_mesh_and_with_any_microbatch():
    alone = fit(PLAN, USERS, loss_fn=noisy_loss)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for options in ({"microbatch_size": 7}, {"microbatch_size": 16, "mesh": mesh}):
        done = fit(PLAN, USERS, loss_fn=noisy_loss, **options)
        assert_close(done.params, alone.params, atol=1e-5)  # sums in another order


def test_a_run_with_users_resumes_to_the_bit_and_notices_other_users(tmp_path):
    crash(tmp_path / "same", 9, plan=PLAN, data=USERS)
    crash(tmp_path / "other", 9, plan=PLAN, data=USERS)
    done = fit(PLAN, USERS, folder=tmp_path / "same")
    assert bits(done.params) == bits(trained().params) and done.ledger.steps == 12
    moved = np.where(OWNERS == 0, 1, OWNERS)
    moved[0] = 0  # as many users, but other examples
    with pytest.warns(UserWarning, match="different data: it restarts from step 7"):
        done = fit(PLAN, UserData(DATA, moved, max_examples=3), folder=tmp_path / "other")
    assert done.stopped == "budget"


# Plans and statements.


def test_a_plan_for_users_speaks_of_people():
    said = " ".join(PLAN.statement().split())
    assert "whether the examples of any one person were in the data" in said
    assert "every person is in every batch with probability 0.2" in said
    assert "the contribution of each person" in said and "a person has one user id" in said
    shared = make_plan(
        unit="user",
        group_size=2,
        noise_multiplier=99.0,
        sampling="full",
        expected_batch_size=400,
        neighbouring="replace_one",
    )
    said = " ".join(shared.statement().split())
    assert "which of two sets of examples any one person had, or any 2 users that change" in said
    assert "a person has at most 2 user ids" in said
    assert "the contribution of each user id" in said
    assert "person" not in make_plan().statement()


def test_a_statement_says_that_each_of_a_persons_ids_is_sampled_and_clipped_by_itself():
    shared = SampledGaussian(9.0, 0.2, 12, group_size=2)
    said = " ".join(statement(shared, 1e-5, unit="user").split())
    assert "every user id is in every batch with probability 0.2" in said
    assert "the contribution of each user id to a step's sum is clipped" in said
    assert "every person" not in said and "of each person" not in said
    assert "every example is in every batch" in statement(shared, 1e-5)


def test_a_plan_for_users_has_the_noise_of_a_plan_for_examples_but_other_keys():
    users, examples = make_plan(unit="user"), make_plan()
    assert users.mechanism == examples.mechanism and users.epsilon == examples.epsilon
    assert users.digest != examples.digest
    assert lsdp.PrivacyPlan.from_json(users.to_json()) == users
    assert "unit" not in json.loads(examples.to_json())  # as in texts of before
    assert lsdp.PrivacyPlan.from_json(examples.to_json()).unit == "example"
