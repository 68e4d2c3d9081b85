"""Adaptive clip norms follow the gradients, and never change what a step costs in privacy."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import optax_lsdp as lsdp
from optax_lsdp import training
from optax_lsdp._clipped import CurrentClipNorm
from tests.clipping.test_slack import GROUPS, ROUNDING, flat, loss, make_examples, params_like
from tests.training.problem import make_plan

KEY = jax.random.key(0)
PRIVATE = dict(noise_multiplier=1e-6, expected_batch_size=64, key=KEY)


def adaptive(initial, **options):
    if isinstance(initial, dict):
        return {name: lsdp.AdaptiveClip(one, **options) for name, one in initial.items()}
    return lsdp.AdaptiveClip(initial, **options)


@pytest.mark.parametrize("method", ["slack", "quantile"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_clip_norm_that_is_passed_changes_the_sensitivity(method, dtype):
    """The sum in units of the clip norm, with its coordinates, keeps the declared sensitivity."""
    for initial in (0.3, GROUPS):
        clip = adaptive(initial, method=method, slack=16)
        declared = lsdp.sensitivity(clip)
        root = np.sqrt(1.01) if method == "quantile" else 1.0  # w = 0.2
        assert declared == pytest.approx(root * np.sqrt(len(jax.tree.leaves(initial))))
        gradient = lsdp.clipped_grad(loss, clip_norm=clip)
        tx = lsdp.clip_per_example(clip)

        def alone(params, scale, example, tx=tx, gradient=gradient, initial=initial):
            now = jax.tree.map(lambda norm: CurrentClipNorm(norm * scale), initial)
            marked = gradient(params, jax.tree.map(lambda x: x[None], example), clip_norm=now)
            return tx.update(marked, tx.init(params), params)[0]

        each = jax.jit(jax.vmap(alone, (None, None, 0)))
        for scale in (1.0, 1e-12, 1e12):
            released = each(params_like(dtype), scale, make_examples(0, 200, 0.3 * scale, 16))
            whole = np.linalg.norm(flat(released), axis=1)
            assert whole.max() <= declared * ROUNDING
            assert whole.max() > 0.9 * declared
        for bad in (np.nan, 0.0, -1.0, np.inf):
            released = flat(each(params_like(dtype), bad, make_examples(0, 200, 0.3, 16)))
            is_nan = np.isnan(released)
            assert (is_nan == is_nan[0]).all()  # whatever the example is
            assert np.linalg.norm(np.where(is_nan, 0, released), axis=1).max() <= declared


def test_noise_counts_the_indicator_exactly():
    """With w = 0.2, the sum gets noise of z·√1.01·C, and (z⁻² − (2σ_b)⁻²)^(−½) is that z_sum."""
    z, weight = 1.7, 0.2
    z_sum = z * np.sqrt(1 + weight**2 / 4)
    noise_of_count = z_sum / weight
    assert (z**-2 - (2 * noise_of_count) ** -2) ** -0.5 == pytest.approx(z_sum)
    params = {"w": jnp.zeros(40_000), "b": jnp.zeros(40_000)}
    for clip, wanted in (
        (adaptive(0.5, method="quantile", rate=1e-9), 0.5 * z_sum),
        (adaptive(0.5, method="fixed"), 0.5 * z),
        (adaptive({"w": 0.5, "b": 3.0}, method="fixed"), 0.5 * z * np.sqrt(2)),
    ):
        tx = lsdp.privatize(
            optax.sgd(1.0), clip_norm=clip, noise_multiplier=z, expected_batch_size=1, key=KEY
        )
        zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape)), params)
        updates, _ = jax.jit(tx.update)(zeros, tx.init(params), params, mask=jnp.zeros(1, bool))
        assert float(updates["w"].std()) == pytest.approx(wanted, rel=0.02)  # 5 standard errors
        if isinstance(clip, dict):
            assert float(updates["b"].std()) == pytest.approx(6 * wanted, rel=0.02)


@functools.cache
def paths_of(method, initial, steps=60, noise=1e-6, batch=64, runs=1, **options):
    """Return clip norms and updates of runs with fixed gradients, of norms 0.5 to 1.5."""
    clip = adaptive(initial, method=method, **options)
    private = dict(clip_norm=clip, noise_multiplier=noise, expected_batch_size=batch)
    params, stacked = jnp.zeros(1), jnp.linspace(0.5, 1.5, batch)[:, None]

    def run(seed):
        tx = lsdp.privatize(optax.sgd(1.0), **private, key=jax.random.key(seed))

        def step(state, _):
            updates, after = tx.update(stacked, state, params)
            return after, (lsdp.current_clip_norm(state).value, updates[0])

        state, (norms, updates) = jax.lax.scan(step, tx.init(params), length=steps)
        return jnp.append(norms, lsdp.current_clip_norm(state)), updates

    return tuple(map(np.asarray, jax.jit(jax.vmap(run))(jnp.arange(runs))))


def path_of(*args, **options):
    norms, updates = paths_of(*args, **options)
    return norms[0], updates[0]


def share_of(norm):
    """Return the mean of min(1, ‖g‖²/C²) over the gradients of `path_of`."""
    return np.minimum(1, (np.linspace(0.5, 1.5, 64) / norm) ** 2).mean()


@pytest.mark.parametrize("initial", [1e-3, 1.0, 1e3])
def test_slack_finds_a_third_of_the_scale_of_the_gradients_from_any_start(initial):
    norms, updates = path_of("slack", initial, slack=256, steps=1500)
    factors = norms[1:] / norms[:-1]
    begin = 1 + np.argmin((norms[1:] > 0.8) | (factors > 2.9))  # the first after the search
    assert begin < 15
    assert 0.5 < share_of(3 * norms[begin]) < 0.8  # the target is 0.7
    assert (updates[:begin][norms[:begin] > 5] == 0).all()  # mostly noise
    assert (updates[begin:] < -0.2).all()
    assert factors.max() <= 3 * (1 + 1e-6) and (factors[begin:] < 1.004).all()
    assert share_of(norms[-1]) == pytest.approx(0.7, abs=0.03)  # in the long run


def test_noise_does_not_end_the_search_far_below_the_scale():
    """One estimate of s has the standard error 0.16, and s is 1: the search ends below 0.85."""
    norms, _ = paths_of("slack", 0.01, noise=6.0, steps=15, runs=200)
    assert np.mean(norms.max(axis=1) > 0.5) > 0.97


@pytest.mark.parametrize("initial", [0.2, 1.0, 5.0])
def test_quantiles_find_the_share_of_clipped_gradients(initial):
    norms, _ = path_of("quantile", initial, target=0.25)
    assert norms[-1] == pytest.approx(1.25, abs=0.02)  # the third quartile


def test_noise_that_drowns_the_counts_moves_nothing():
    norms, updates = path_of("slack", 1.0, noise=100.0, steps=20)  # z/b = 1.6: 84 steps to wait
    assert (norms == 1.0).all() and (updates == 0).all()


def test_a_clip_norm_stays_in_its_range():
    norms, _ = path_of("slack", 0.01, least=0.01, most=0.1)
    assert norms.max() == pytest.approx(0.1) and norms.min() >= 0.01 - 1e-9
    norms, _ = path_of("slack", 100.0, least=20.0, most=100.0)
    assert norms[-1] == pytest.approx(20.0)


def test_marked_and_stacked_gradients_move_the_clip_norms_alike_and_compile_once():
    clip = adaptive({"w": 0.1, "b": 30.0}, slack=8)
    tx = lsdp.privatize(optax.sgd(0.1), clip_norm=clip, **PRIVATE)
    gradient = lsdp.clipped_grad(loss, clip_norm=clip, engine="vmap")
    batch, params = make_examples(3, 64, 1.0, 8), params_like()
    mask = jnp.arange(64) < 60

    @jax.jit
    def by_sum(state):
        total = gradient(params, batch, mask, clip_norm=lsdp.current_clip_norm(state))
        return tx.update(total, state, params)

    stacked = jax.jit(lambda state: tx.update(batch, state, params, mask=mask))
    one = other = tx.init(params)
    for _ in range(4):
        (moves, one), (also, other) = by_sum(one), stacked(other)
        for a, b in zip(*map(jax.tree.leaves, (moves, also)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)  # sums in another order
    now = lsdp.current_clip_norm(one)
    assert now == lsdp.current_clip_norm(other)
    assert float(now["w"]) > 0.1 and float(now["b"]) < 30
    assert by_sum._cache_size() == stacked._cache_size() == 1


BAD = {
    "target": (lambda: adaptive(1.0, target=1.0), "`target` .* above 0 and below 1, got 1.0"),
    "initial": (lambda: adaptive(0.0), "`initial` .* positive.* got 0.0"),
    "range": (lambda: adaptive(1.0, least=2.0), "`initial` must be between `least` and `most`"),
    "method": (lambda: adaptive(1.0, method="mean"), "`method` .* got 'mean'"),
    "slack of two": (lambda: adaptive(1.0, slack=2), "`slack` .* 3 or more, got 2"),
    "fixed": (lambda: adaptive(1.0, method="fixed", slack=1), "`slack` .* 2 or more, got 1"),
    "weight": (lambda: adaptive(1.0, indicator_weight=-1), "`indicator_weight` .* got -1"),
    "a tiny weight": (
        lambda: adaptive(1.0, method="quantile", indicator_weight=1e-40),
        "`indicator_weight` must be at least 1e-06, or noise would drown the count, got 1e-40",
    ),
    "a function": (
        lambda: lsdp.clipped_grad(loss, clip_norm=lambda step: adaptive(1.0)),
        r"`clip_norm` must be a positive number.*got AdaptiveClip\(.*let the function of the step",
    ),
    "style": (
        lambda: lsdp.clipped_grad(loss, clip_norm=adaptive(1.0), clip_style="automatic"),
        "`clip_style` must be 'threshold' with an AdaptiveClip",
    ),
    "slack beside it": (
        lambda: lsdp.clipped_grad(loss, clip_norm=adaptive(1.0), slack=4),
        "`slack` must be set in the AdaptiveClip",
    ),
    "a number beside it": (
        lambda: lsdp.sensitivity({"w": adaptive(1.0), "b": 1.0}),
        "`clip_norm` must have an AdaptiveClip with the same",
    ),
    "no clip norm passed": (
        lambda: lsdp.clipped_grad(loss, clip_norm=adaptive(1.0))(
            params_like(), make_examples(0, 2, 1.0, 2)
        ),
        r"`clip_norm` must be passed with an AdaptiveClip.*current_clip_norm\(state\)",
    ),
    "a clip norm passed in vain": (
        lambda: lsdp.clipped_grad(loss, clip_norm=1.0)(
            params_like(), make_examples(0, 2, 1.0, 2), clip_norm=2.0
        ),
        "`clip_norm` must be passed to the gradient function only if `clipped_grad` got an "
        "AdaptiveClip",
    ),
    "discrete": (
        lambda: lsdp.discrete.quantized_grad(loss, clip_norm=adaptive(1.0)),
        "`clip_norm` must be a number with discrete noise, which supports neither slack",
    ),
}


@pytest.mark.parametrize(("call", "message"), BAD.values(), ids=list(BAD))
def test_bad_settings_get_one_sentence(call, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("clip", [adaptive(0.3), adaptive(GROUPS, method="quantile", rate=0.7)])
def test_a_plan_with_adaptive_clip_norms_survives_json(clip):
    plan = make_plan(clip_norm=clip)
    assert lsdp.PrivacyPlan.from_json(plan.to_json()) == plan
    assert plan.epsilon == make_plan(clip_norm=1.0).epsilon  # z does not depend on the clip norm
    with pytest.raises(ValueError, match="must be what to_json returned"):
        lsdp.PrivacyPlan.from_json(plan.to_json().replace('"rate"', '"pace"'))


def squared(params, x):
    return 0.5 * jnp.sum((params - x) ** 2)


def test_fit_shows_the_clip_norm_and_resumes_it_to_the_bit(tmp_path, capsys):
    plan = make_plan(steps=8, clip_norm=adaptive(100.0, slack=32))
    data = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    seen = []

    def stop(report):
        seen.append(float(report.norms.clip_norm))
        if report.step == 3 and len(seen) == 3:
            raise training.StopTraining

    fit = functools.partial(
        training.fit, plan, squared, jnp.ones(3), data, optimizer=optax.sgd(0.1), key=KEY
    )
    whole = fit(microbatch_size=16)
    assert "released with noise: clip norm" in capsys.readouterr().err
    options = dict(microbatch_size=16, folder=tmp_path, progress=False, callbacks=[stop])
    assert fit(**options).stopped == "callback"
    resumed = fit(**options)
    np.testing.assert_array_equal(resumed.params, whole.params)
    for one, other in zip(resumed.norms, whole.norms, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(seen) == 8 and seen[-1] == float(whole.norms.clip_norm) < 30
    assert (
        training.fit(
            make_plan(steps=1), squared, jnp.ones(3), data, optimizer=optax.sgd(0.1), progress=False
        ).norms
        is None
    )


CLIP = adaptive(50.0, slack=8)
BATCH = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)


def check_step(step, state_of):
    """Take two steps, and see the clip norm fall."""
    before = float(lsdp.current_clip_norm(state_of()))
    step()
    step()
    assert float(lsdp.current_clip_norm(state_of())) < 0.7 * before


def test_a_linen_train_state_carries_the_clip_norm():
    model = nn.Dense(1)
    params = model.init(KEY, BATCH[0])
    gradient = lsdp.clipped_grad(lambda p, x: jnp.sum(model.apply(p, x) ** 2), clip_norm=CLIP)
    tx = lsdp.dp_sgd(0.01, clip_norm=CLIP, **PRIVATE)
    held = [TrainState.create(apply_fn=model.apply, params=params, tx=tx)]

    @jax.jit
    def update(state):
        now = lsdp.current_clip_norm(state.opt_state)
        return state.apply_gradients(grads=gradient(state.params, BATCH, clip_norm=now))

    check_step(lambda: held.append(update(held[-1])), lambda: held[-1].opt_state)


def test_an_nnx_optimizer_carries_the_clip_norm():
    module = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(module, lsdp.dp_sgd(0.01, clip_norm=CLIP, **PRIVATE), wrt=nnx.Param)
    graph, _ = nnx.split(module, nnx.Param)
    gradient = lsdp.clipped_grad(lambda p, x: jnp.sum(nnx.merge(graph, p)(x) ** 2), clip_norm=CLIP)

    @nnx.jit
    def update(module, optimizer):
        now = lsdp.current_clip_norm(optimizer.opt_state)
        grads = gradient(nnx.state(module, nnx.Param), BATCH, clip_norm=now)
        optimizer.update(module, grads)

    check_step(lambda: update(module, optimizer), lambda: optimizer.opt_state)


def test_an_equinox_loop_carries_the_clip_norm():
    params, static = eqx.partition(eqx.nn.Linear(4, 1, key=KEY), eqx.is_inexact_array)
    gradient = lsdp.clipped_grad(
        lambda p, x: jnp.sum(eqx.combine(p, static)(x) ** 2), clip_norm=CLIP
    )
    tx = lsdp.dp_sgd(0.01, clip_norm=CLIP, **PRIVATE)
    held = [tx.init(params)]

    @eqx.filter_jit
    def update(state):
        total = gradient(params, BATCH, clip_norm=lsdp.current_clip_norm(state))
        return tx.update(total, state, params)[1]

    check_step(lambda: held.append(update(held[-1])), lambda: held[-1])


@pytest.mark.parametrize("now", [float("nan"), 0.0, -1.0, float("inf"), jnp.ones(2)])
def test_a_clip_norm_that_is_no_positive_number_is_refused(now):
    f = lsdp.clipped_grad(jnp.vdot, clip_norm=lsdp.AdaptiveClip(1.0))
    with pytest.raises(ValueError, match=r"pass clip_norm=current_clip_norm\(state\)"):
        f(jnp.zeros(2), jnp.ones((3, 2)), clip_norm=CurrentClipNorm(now))


@pytest.mark.parametrize("initial", [1e-30, 1e30])
def test_the_clip_norm_of_a_state_is_accepted_up_to_the_ends_of_the_range(initial):
    """In float32, 1e30 is rounded up."""
    clip = lsdp.AdaptiveClip(initial, method="fixed")
    state = lsdp.privatize(optax.sgd(1.0), clip_norm=clip, **PRIVATE).init(jnp.zeros(2))
    f = lsdp.clipped_grad(jnp.vdot, clip_norm=clip, engine="vmap")
    total = f(jnp.zeros(2), jnp.ones((3, 2)), clip_norm=lsdp.current_clip_norm(state))
    assert np.isfinite(total.value).all()


def test_only_the_clip_norm_of_a_state_is_accepted():
    """A clip norm from raw gradients would let one example move the parts of all others."""
    f = lsdp.clipped_grad(jnp.vdot, clip_norm=lsdp.AdaptiveClip(1.0))
    stacked = jnp.ones((3, 2))
    tx = lsdp.clip_per_example(lsdp.AdaptiveClip(1.0))
    for now in (1.0, jnp.median(jnp.linalg.norm(stacked, axis=1))):
        with pytest.raises(ValueError, match=r"pass clip_norm=current_clip_norm\(state\)"):
            f(jnp.zeros(2), stacked, clip_norm=now)
        with pytest.raises(ValueError, match=r"pass clip_norm=current_clip_norm\(state\)"):
            jax.jit(f)(jnp.zeros(2), stacked, clip_norm=now)
        with pytest.raises(ValueError, match=r"pass clip_norm=current_clip_norm\(state\)"):
            tx.update(stacked, tx.init(jnp.zeros(2)), jnp.zeros(2), clip_norm=now)


def test_numbers_of_numpy_are_numbers():
    clip = lsdp.AdaptiveClip(
        np.float32(0.5), target=np.float64(0.6), slack=np.int64(8), most=np.array(2.0)
    )
    assert clip == lsdp.AdaptiveClip(0.5, target=0.6, slack=8, most=2.0)
    plan = make_plan(clip_norm=clip)
    assert lsdp.PrivacyPlan.from_json(plan.to_json()) == plan


def test_the_optimizer_takes_its_clip_norm_from_its_state_alone():
    private = {"noise_multiplier": 1.0, "expected_batch_size": 4, "key": jax.random.key(0)}
    tx = lsdp.privatize(optax.sgd(1.0), clip_norm=lsdp.AdaptiveClip(1.0), **private)
    with pytest.raises(ValueError, match="must be passed to the gradient function"):
        tx.update(jnp.ones((4, 2)), tx.init(jnp.zeros(2)), jnp.zeros(2), clip_norm=2.0)


def test_a_jax_number_becomes_a_number_of_python():
    made = lsdp.AdaptiveClip(jnp.float32(2.0), target=jnp.array(0.5), slack=np.int64(8))
    assert made == lsdp.AdaptiveClip(2.0, target=0.5, slack=8)
    assert [type(x) for x in (made.initial, made.target, made.most)] == [float] * 3
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lambda x: lsdp.AdaptiveClip(x).initial)(1.0)
