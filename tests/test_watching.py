"""The training curve: what it estimates, how far it is off, and that it needs releases alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping import last_factor
from tests import oracles

N, STEPS, SEEDS = 100, 30, 60
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1.0),
    "momentum": lambda: optax.sgd(0.2, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.2, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "falling step size": lambda: optax.sgd(optax.exponential_decay(1.0, 8, 0.5)),
}
MOVING = lsdp.AdaptiveClip(0.1, rate=0.5)
SHRINKING = optax.stateless(lambda y, _: y / (0.05 + jnp.linalg.norm(y)))  # by its own release


def quadratic():
    """Return per-example gradients of ½ Σ hⱼ(wⱼ − xⱼ)², and initial parameters."""
    x = jax.random.normal(jax.random.key(0), (N, 20)) / 2
    curvatures = jnp.linspace(0.01, 1.0, 20)
    return lambda w: (w - x) * curvatures, jnp.ones(20)


def softmax_regression():
    """Return per-example gradients of softmax regression with 3 classes, and zeros."""
    keys = jax.random.split(jax.random.key(1), 3)
    x = jax.random.normal(keys[0], (N, 10)) * jnp.linspace(2.0, 0.1, 10)
    labels = jax.random.categorical(keys[1], x @ jax.random.normal(keys[2], (10, 3)))

    def gradients(w):
        wrong = jax.nn.softmax(x @ w.reshape(10, 3)) - jax.nn.one_hot(labels, 3)
        return (x[:, :, None] * wrong[:, None, :]).reshape(N, 30)

    return gradients, jnp.zeros(30)


PROBLEMS = {"quadratic": quadratic, "softmax regression": softmax_regression}


@pytest.fixture(autouse=True)
def _standard_promotion(_strict_promotion):  # Adam promotes dtypes
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def runner(problem, optimizer, rate, smoothing, clip):
    """Return a compiled function of keys and z: parameters, clipped means, curves, clip norms."""
    gradients, initial = PROBLEMS[problem]()
    is_adaptive = isinstance(clip, lsdp.AdaptiveClip)

    def clipped_mean(w, norm, factor):
        rows = gradients(w)
        norms = jnp.linalg.norm(rows, axis=1, keepdims=True)
        return jnp.mean(factor * rows / jnp.maximum(norms, norm), axis=0)

    def run(key, noise_multiplier):
        noise_key, batch_key = jax.random.split(key)
        tx = lsdp.privatize(
            OPTIMIZERS[optimizer](),
            clip_norm=clip,
            noise_multiplier=noise_multiplier,
            expected_batch_size=rate * N,
            smoothing=smoothing,
            key=noise_key,
            watch_steps=STEPS,
            sampling_rate=rate,
        )

        def step(carry, index):
            w, state = carry
            mask = jax.random.bernoulli(jax.random.fold_in(batch_key, index), rate, (N,))
            norm = lsdp.current_clip_norm(state).value if is_adaptive else clip
            updates, state = tx.update(gradients(w), state, w, mask=mask)
            mean = clipped_mean(w, norm, last_factor(state) if is_adaptive else norm)
            return (optax.apply_updates(w, updates), state), (w, mean, norm)

        (_, state), path = jax.lax.scan(step, (initial, tx.init(initial)), jnp.arange(STEPS))
        return path, state[-1].curve

    return jax.jit(jax.vmap(run, (0, None)))


def train(problem, optimizer, rate, noise_multiplier, smoothing=0.0, clip=1.0):
    """Return the true work and the curves of several runs: three arrays (SEEDS, STEPS)."""
    keys = jax.random.split(jax.random.key(7), SEEDS)
    (*path, norms), curves = runner(problem, optimizer, rate, smoothing, clip)(
        keys, noise_multiplier
    )
    assert isinstance(clip, float) or norms[:, -1].min() > 2 * clip.initial  # it has moved
    return oracles.work_along(*path), np.asarray(curves[..., 0]), np.asarray(curves[..., 1])


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov", "adam"])
def test_without_noise_the_curve_is_the_true_work(optimizer):
    truth, work, _ = train("softmax regression", optimizer, 1.0, 1e-3)
    small = 1e-4  # noise of 1e-5 in each entry, and the rounding of float32
    np.testing.assert_allclose(work, truth, atol=small)
    assert truth[:, -1].max() < -0.1


@pytest.mark.parametrize("rate", [1.0, 0.1], ids=["full", "poisson"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_the_true_work_lies_within_two_standard_errors(problem, optimizer, rate):
    truth, work, stderr = train(problem, optimizer, rate, 2.0 if rate == 1 else 1.0)
    covered = np.abs(work - truth) <= 2 * stderr
    assert covered[:, 1:].mean() >= 0.9  # the target; normal errors would be covered in 95 %


@pytest.mark.parametrize("rate", [1.0, 0.1], ids=["full", "poisson"])
def test_coverage_survives_a_clip_norm_that_moves(rate):
    noise = 2.0 if rate == 1 else 0.5
    truth, work, stderr = train("softmax regression", "momentum", rate, noise, clip=MOVING)
    covered = np.abs(work - truth) <= 2 * stderr
    assert covered[:, 1:].mean() >= 0.9
    assert (stderr[:, -1] < 2 * np.abs(truth[:, -1])).all()  # it says something


def adaptive_run(clip, optimizer, steps=12, **options):
    """Return the state of a watched run of full batches on the quadratic problem."""
    gradients, params = quadratic()
    private = {"noise_multiplier": 1.0, "expected_batch_size": N, "key": jax.random.key(2)}
    tx = lsdp.privatize(
        optimizer, clip_norm=clip, watch_steps=steps, sampling_rate=1.0, **private, **options
    )
    state = tx.init(params)
    update = jax.jit(tx.update, donate_argnums=1)
    for _ in range(steps):
        updates, state = update(gradients(params), state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
    return state


def test_an_adaptive_clip_norm_that_stays_has_the_curve_of_a_fixed_one():
    clip = lsdp.AdaptiveClip(0.5, method="fixed", slack=8)
    got = lsdp.training_curve(adaptive_run(clip, optax.sgd(0.5, 0.9)))
    expected = lsdp.training_curve(adaptive_run(0.5, optax.sgd(0.5, 0.9), slack=8))
    rounding = 1e-4  # the clip norm is divided out and multiplied in again; the noise is the same
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding * 1e-2)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_releases_that_an_adaptive_clip_norm_makes_zero_count_nowhere(optimizer):
    state = adaptive_run(lsdp.AdaptiveClip(300.0), OPTIMIZERS[optimizer](), steps=20)
    watched, curve = state[-1], lsdp.training_curve(state)
    for array in jax.tree.leaves((watched, curve)):
        assert np.isfinite(array).all()
    silent = 20 - int(watched.noisy)
    assert 3 <= silent < 15
    assert (curve.work[: silent + 1] == 0).all() and (curve.stderr[: silent + 1] == 0).all()
    assert (curve.stderr[silent + 1 :] > 0).all()


@pytest.mark.parametrize(
    ("optimizer", "smoothing"),
    [
        ("nesterov", 0.0),
        ("sgd", 2.0),
        ("sgd", "auto"),
        ("sgd", SHRINKING),
        ("falling step size", 0.0),
    ],
)
def test_full_batches_have_no_bias_and_an_error_of_the_stated_size(optimizer, smoothing):
    truth, work, stderr = train("softmax regression", optimizer, 1.0, 3.0, smoothing)
    errors = (work - truth)[:, -1] / stderr[:, -1]
    # All runs have the same signs, so the signs' error remains. It is zero without smoothing.
    assert abs(errors.mean()) < 4 / np.sqrt(SEEDS) + (0.7 if smoothing else 0)
    # 200 runs know it to 5 %; the stated error is at most 29 % too large.
    assert 0.7 < errors.std() < 1.15


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_the_curve_of_sampled_batches_errs_upward(optimizer):
    truth, work, _ = train("softmax regression", optimizer, 0.1, 1.0)
    errors = (work - truth)[:, -1]
    assert errors.mean() > -2 * errors.std() / np.sqrt(SEEDS)


def feed(tx, releases, params):
    """Return the state of a transform that has seen these releases."""

    def step(carry, release):
        params, state = carry
        updates, state = tx.update(release, state, params)
        return (optax.apply_updates(params, updates), state), None

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *releases)
    return jax.lax.scan(step, (params, tx.init(params)), stacked)[0][1]


def test_the_state_is_a_function_of_the_releases_alone():
    noise = optax.linear_schedule(1.0, 3.0, 5)
    clip_norm = lsdp.Piecewise(starts=(0, 2), values=(1.0, 0.5))
    private = {
        "clip_norm": clip_norm,
        "noise_multiplier": noise,
        "expected_batch_size": 4,
        "key": jax.random.key(3),
    }
    tx = lsdp.privatize(optax.scale(-1.0), watch_steps=5, sampling_rate=0.25, **private)
    params = {"a": jnp.zeros((3, 2)), "b": jnp.ones(4)}
    state, here, releases, update = tx.init(params), params, [], jax.jit(tx.update)
    for step in range(5):
        rows = jax.tree.map(lambda x, step=step: jnp.full((4, *x.shape), 1.0 + step), params)
        updates, state = update(rows, state, here)
        releases.append(jax.tree.map(jnp.negative, updates))
        here = optax.apply_updates(here, updates)
    alone = lsdp.watch(
        optax.scale(-1.0),
        steps=5,
        stddev=lambda step: noise(step) * clip_norm(step) / 4,
        sampling_stddev=lambda step: clip_norm(step) * np.sqrt(0.75 / 4),
    )
    rounding = 1e-6  # of the schedules' products
    expected = lsdp.training_curve(feed(alone, releases, params))
    got = lsdp.training_curve(state)
    for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(one, other, rtol=rounding)
    assert len(got.steps) == 5 and np.all(got.stderr[1:] > 0)


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1, 0.9)], ids=["adam", "sgd"])
def test_watching_changes_no_update(optimizer):
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0}
    params, rows = jnp.ones(50), jnp.ones((4, 50))
    paths = []
    for steps in (None, 3):
        key = jax.random.key(0)
        tx = lsdp.privatize(optimizer, smoothing=1.0, key=key, watch_steps=steps, **private)
        state, here = tx.init(params), params
        for _ in range(3):
            updates, state = jax.jit(tx.update)(rows, state, here)
            here = optax.apply_updates(here, updates)
        paths.append(np.asarray(here))
    rounding = 1e-6  # the compiler fuses a longer program in another way
    np.testing.assert_allclose(paths[0], paths[1], rtol=rounding)


def test_in_half_precision_the_curve_follows_the_rounded_parameters():
    target = jnp.linspace(-2.0, 2.0, 64)
    tx = lsdp.watch(optax.sgd(0.003), steps=100, stddev=1e-4)
    params = jnp.zeros(64, jnp.bfloat16)
    state, path = tx.init(params), []
    assert state.move.dtype == jnp.bfloat16  # one copy of the parameters
    step = jax.jit(tx.update)
    for _ in range(100):
        release = params.astype(jnp.float32) - target
        path.append(params)
        updates, state = step(release.astype(jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
    path = np.asarray(jnp.stack(path), np.float64)
    truth = oracles.work_along(path, path - np.asarray(target))
    curve = lsdp.training_curve(state)
    np.testing.assert_allclose(curve.work, truth, rtol=0.01)  # bfloat16 keeps 8 bits of a step


SPLIT = {"split": jax.P("x"), "replicated": jax.P()}


@pytest.mark.parametrize("specs", [SPLIT, jax.P("x"), None], ids=["shard_map", "one spec", "jit"])
def test_shards_have_the_curve_of_the_whole(specs):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    params = {"split": jnp.ones((8, 3)), "replicated": jnp.ones(5)}
    keys = jax.random.split(jax.random.key(0), 6)
    releases = [
        jax.tree.map(lambda x, k=key: jax.random.normal(k, x.shape), params) for key in keys
    ]

    def curve(specs, releases, params):
        tx = lsdp.watch(
            optax.sgd(0.1, 0.9), steps=6, stddev=0.5, sampling_stddev=0.3, shard_specs=specs
        )
        state = feed(tx, releases, params)
        return state.curve, state.ratio

    whole = curve(None, releases, params)
    function, inside = functools.partial(curve, specs), ([SPLIT] * 6, SPLIT)
    if specs is None:
        split = jax.tree.map(functools.partial(jax.sharding.NamedSharding, mesh), inside)
        got = jax.jit(function)(*jax.device_put((releases, params), split))
    else:
        on_shards = jax.shard_map(function, mesh=mesh, in_specs=inside, out_specs=jax.P())
        got = jax.jit(on_shards)(releases, params)
    # Optimizers that treat every entry by itself give the same trace for any signs.
    for one, other in zip(*map(jax.tree.leaves, (got, whole)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_no_step_compiles_the_program_again():
    tx = lsdp.watch(optax.adam(0.1), steps=2, stddev=optax.linear_schedule(1.0, 2.0, 3))
    step = jax.jit(tx.update)
    state = tx.init(jnp.ones(3))
    curves = []
    for _ in range(4):  # two more than are recorded
        _, state = step(jnp.ones(3), state, jnp.ones(3))
        curves.append(lsdp.training_curve(state).work.tolist())
    assert step._cache_size() == 1
    assert curves[1] == curves[3] and len(curves[3]) == 2 and curves[3][1] != 0


def test_bad_input_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="`state` must be the state of a watched optimizer"):
        lsdp.training_curve(optax.adam(0.1).init(jnp.ones(2)))
    with pytest.raises(ValueError, match="`stddev` must be positive and finite, got 0"):
        lsdp.watch(optax.sgd(0.1), steps=1, stddev=0)
    with pytest.raises(ValueError, match="`steps` must be a whole number, 1 or more, got 0"):
        lsdp.watch(optax.sgd(0.1), steps=0, stddev=1.0)
    private = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0}
    private["key"] = jax.random.key(0)
    with pytest.raises(ValueError, match="`watch_steps` must be a whole number, 1 or more, got 0"):
        lsdp.privatize(optax.sgd(0.1), watch_steps=0, **private)
    with pytest.raises(ValueError, match="`sampling_rate` must be from 0 to 1, got 2"):
        lsdp.privatize(optax.sgd(0.1), watch_steps=1, sampling_rate=2, **private)
    private["clip_norm"] = {"a": lsdp.AdaptiveClip(1.0), "b": lsdp.AdaptiveClip(2.0)}
    with pytest.raises(ValueError, match="`watch_steps` must be left out with several Adap"):
        lsdp.privatize(optax.sgd(0.1), watch_steps=1, **private)
    plan = lsdp.PrivacyPlan(
        dataset_size=10,
        expected_batch_size=5,
        steps=2,
        noise_multiplier=1.0,
        delta=1e-3,
        sampling="shuffled",
        neighbouring="zero_out",
    )
    with pytest.raises(ValueError, match="`watch` must be False with sampling='shuffled'"):
        plan.optimizer(optax.sgd(0.1), jax.random.key(0), watch=True)


def test_the_curve_is_drawn_with_a_band():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    tx = lsdp.watch(optax.sgd(0.1), steps=4, stddev=0.1)
    curve = lsdp.training_curve(feed(tx, [jnp.ones(3)] * 4, jnp.ones(3)))
    ax = pyplot.figure().add_subplot()
    assert curve.plot(ax) is ax and len(ax.lines) == len(ax.collections) == 1
    assert repr(curve).startswith("TrainingCurve(4 points, clipped loss −")
    pyplot.close("all")


def test_per_example_gradients_and_marked_sums_are_not_watched():
    tx, params = lsdp.watch(optax.sgd(0.1), steps=3, stddev=1.0), jnp.zeros(2)
    marked = lsdp.clipped_grad(jnp.vdot, clip_norm=1.0)(params, jnp.ones((3, 2)))
    for private in (jnp.ones((3, 2)), marked):
        with pytest.raises(ValueError, match="`updates` must have the"):
            tx.update(private, tx.init(params), params)
