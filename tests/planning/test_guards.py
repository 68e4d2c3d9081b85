"""A plan's gradient and optimizer accept only the plan's batches, with masks, and its steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from tests.planning.test_plan import KEY, make


def trace(function, *args):
    """Trace a function, and return its output shapes. Errors occur while tracing."""
    return jax.eval_shape(function, *args)


def test_poisson_batches_need_their_mask():
    plan = make()
    grad, params = plan.clipped_grad(jnp.vdot), jnp.zeros(3)
    indices, mask = plan.sampler(KEY).batch(0)
    batch = jnp.ones((len(indices), 3))
    with pytest.raises(ValueError, match="`mask` must be given with 'poisson' batches"):
        grad(params, batch)
    total = jax.jit(grad)(params, batch, jnp.asarray(mask))
    assert total.value.shape == (3,)
    tx = plan.optimizer(optax.sgd(1.0), KEY)
    state = tx.init(params)
    trace(tx.update, total, state, params)
    unmasked = trace(lsdp.clipped_grad(jnp.vdot, clip_norm=plan.clip_norm), params, batch)
    for updates, got in ((unmasked, "a sum without a mask"), (batch, "arrays")):
        with pytest.raises(ValueError, match=f"sums that were computed with a mask, .*got {got}"):
            trace(tx.update, updates, state, params)
    fixed = make("fixed")
    whole = trace(fixed.clipped_grad(jnp.vdot), params, jnp.ones((fixed.room, 3)))
    assert whole.value.shape == (3,)
    with pytest.raises(ValueError, match="`mask` must be given"):
        fixed.clipped_grad(jnp.vdot)(params, jnp.ones((fixed.room + 1, 3)))


@pytest.mark.parametrize("name", ["fixed", "full", "shuffled"])
def test_batches_that_are_padded_to_a_multiple_need_their_mask(name):
    plan, params = make(name), jnp.zeros(3)
    indices, mask = plan.sampler(KEY, multiple_of=64).batch(0)
    batch, tx = jnp.ones((len(indices), 3)), plan.optimizer(optax.sgd(1.0), KEY)
    state = tx.init(params)
    assert not mask.all()
    unmasked = trace(lsdp.clipped_grad(jnp.vdot, clip_norm=plan.clip_norm), params, batch)
    for updates in (unmasked, batch):
        with pytest.raises(ValueError, match="sums that were computed with a mask"):
            trace(tx.update, updates, state, params)
    without_padding = trace(plan.clipped_grad(jnp.vdot), params, batch[: plan.room])
    trace(tx.update, without_padding, state, params)


def test_steps_beyond_the_plan_return_zero_updates_or_raise():
    plan, params = make("noise", steps=3), jnp.zeros(3)
    tx = plan.optimizer(optax.sgd(0.1, momentum=0.9), KEY)
    grad = jax.jit(plan.clipped_grad(jnp.vdot))(params, jnp.ones((4, 3)), jnp.ones(4, bool))

    def run(update, steps):
        moves, state = [], tx.init(params)
        for _ in range(steps):
            move, state = update(grad, state, params)
            moves.append(move)
        return jnp.stack(moves)

    moves = run(jax.jit(tx.update), 5)
    assert (moves[:3] != 0).all() and (moves[3:] == 0).all()
    np.testing.assert_allclose(run(tx.update, 3), moves[:3], rtol=1e-5)
    with pytest.raises(ValueError, match="fewer than 3 steps, the number of planned steps"):
        run(tx.update, 4)


OPTIMIZERS = {
    "adam": optax.adam(0.1),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "averages": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "draws noise": optax.noisy_sgd(0.1, key=jax.random.key(1)),
    "injected": optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(0.1, 0.0, 9)),
}


@pytest.fixture(scope="module")
def total():
    """Return a clipped sum of a linear loss: it is the same for all parameters."""
    grad = jax.jit(make("noise", steps=2).clipped_grad(jnp.vdot))
    return grad(jnp.ones(3), jnp.ones((4, 3)), jnp.ones(4, bool))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_beyond_the_plan_leave_the_state_unchanged(name, total):
    plan, params = make("noise", steps=2), jnp.ones(3)
    tx = plan.optimizer(OPTIMIZERS[name], KEY)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(total, state, params)
        return optax.apply_updates(params, updates), state

    run = [(params, tx.init(params))]
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(4):
            run.append(step(*run[-1]))
    data = [
        [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in xs]
        for xs in map(jax.tree.leaves, run)
    ]
    assert any((a != b).any() for a, b in zip(data[1], data[2], strict=True))
    for later in data[3:]:
        for one, other in zip(data[2], later, strict=True):
            np.testing.assert_array_equal(one, other)


def test_changing_the_dict_of_clip_norms_does_not_change_the_clipping():
    norms = {"w": 1.0, "b": 2.0}
    plan = make("noise", clip_norm=norms)
    params, batch = {"w": jnp.zeros(3), "b": jnp.zeros(())}, 1e6 * jnp.ones((2, 3))

    def loss(params, x):
        return jnp.vdot(params["w"], x) + 1e6 * params["b"]

    def norm_of_sum(grad):
        total = jax.jit(grad)(params, batch, jnp.array([True, False]))
        return float(optax.tree.norm(jax.tree.map(lambda x: x, total)))

    early = plan.clipped_grad(loss)
    norms["w"] = 1000.0
    assert plan.clip_norm == {"w": 1.0, "b": 2.0}
    assert norm_of_sum(plan.clipped_grad(loss)) == pytest.approx(5**0.5, rel=1e-4)
    plan.clip_norm["w"] = 1000.0
    assert norm_of_sum(early) == pytest.approx(5**0.5, rel=1e-4)
    for use in (
        lambda: plan.clipped_grad(loss),
        lambda: plan.value_and_clipped_grad(loss),
        lambda: plan.optimizer(optax.sgd(0.1), KEY),
        lambda: plan.sampler(KEY),
    ):
        with pytest.raises(ValueError, match="`clip_norm` must not change after the plan was"):
            use()


def test_the_gradient_refuses_a_second_clip_norm():
    plan = make()
    for grad in (plan.clipped_grad, plan.value_and_clipped_grad):
        with pytest.raises(TypeError, match="`clip_norm` must be a setting of the plan only"):
            grad(jnp.vdot, clip_norm=2.0)


def test_batches_with_more_examples_than_the_room_are_refused_or_become_nan():
    plan, params = make(), (jnp.zeros(3), jnp.zeros(()))
    most, tree = plan.room, jax.tree.structure(params)

    def loss(params, x):
        return jnp.vdot(params[0], x) + params[1]

    value_and_grad = plan.value_and_clipped_grad(loss)
    for grad in (plan.clipped_grad(loss), lambda *args: value_and_grad(*args)[1]):
        batch = jnp.ones((2 * most, 3))
        few, many = (jnp.arange(2 * most) < count for count in (most, most + 1))
        with pytest.raises(ValueError, match=f"`mask` must have at most {most} examples"):
            grad(params, batch, many)
        compiled = jax.jit(grad)
        for mask, is_good in ((few, True), (many, False)):
            total = compiled(params, batch, mask)
            assert jax.tree.structure(total, is_leaf=lambda x: isinstance(x, lsdp.Clipped)) == tree
            for leaf in jax.tree.leaves(total):
                assert np.isfinite(leaf).all() == is_good


def test_shuffled_batches_cannot_be_watched_and_watch_must_be_a_bool():
    plan, watched = make("shuffled"), lsdp.watch(optax.sgd(0.1), steps=3, stddev=1.0)
    with pytest.raises(ValueError, match="`optimizer` must not be watched with sampling='shuffled"):
        plan.optimizer(watched, KEY).init(jnp.zeros(3))
    for value in ("no", 1, None):
        with pytest.raises(ValueError, match="`watch` must be True or False, got"):
            make("full").optimizer(optax.sgd(0.1), KEY, watch=value)
