"""σ and layout are chosen from past releases by the rule, and from releases alone."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
import optax_lsdp.optimizers
from tests import oracles

SMOOTHINGS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHAPE = (16, 3)  # three units on images of 4 × 4 pixels
DUE = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32}
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "expected_batch_size": 4}


@pytest.fixture
def _standard_promotion(_strict_promotion):  # Adam promotes dtypes
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def matrices():
    """Return all candidates for a leaf of `SHAPE` as dense matrices, σ = 0 first."""
    size = int(np.prod(SHAPE))
    basis = np.eye(size).reshape(size, *SHAPE)

    def ring(x, smoothing):
        return oracles.smooth_dense(x.T.reshape(-1), smoothing).reshape(x.T.shape).T

    def image(x, smoothing):
        return oracles.smooth_grid(x.reshape(4, 4, 3), smoothing, (0, 1)).reshape(SHAPE)

    found = [np.eye(size)]
    for smooth in (ring, image):
        for smoothing in SMOOTHINGS:
            found.append(np.stack([smooth(x, smoothing).reshape(-1) for x in basis]))
    return found


def smooth_image():
    wave = np.sin(np.arange(4) * np.pi / 2 + 0.3)
    return np.repeat((wave[:, None] + wave).reshape(16, 1), 3, axis=1)


def releases(steps, seed, signal=0.0, noise=1.0):
    rng = np.random.default_rng(seed)
    images = signal * smooth_image() + noise * rng.normal(size=(steps, *SHAPE))
    return images.astype(np.float32)


@functools.cache
def feed(stddev=1.0, sampling_stddev=0.0, optimizer=None, **options):
    """Return a compiled function of releases (steps, …): all updates, and all choices."""
    tx = lsdp.auto_smooth(
        optimizer or optax.identity(), stddev=stddev, sampling_stddev=sampling_stddev, **options
    )

    def run(rows):
        def step(state, y):
            updates, state = tx.update(y, state)
            return state, (updates, state.choice)

        return jax.lax.scan(step, tx.init(rows[0]), rows)[1]

    return jax.jit(run)


@pytest.mark.parametrize("sampling_stddev", [0.0, 0.9])
def test_choices_and_updates_follow_the_rule(sampling_stddev):
    seen = set()
    for seed, signal in enumerate([0.0, 0.3, 0.6, 1.5]):
        rows = releases(13, seed, signal)
        rows[9:] -= 2 * signal * smooth_image()  # the signal turns, and its evidence disappears
        updates, choices = feed(sampling_stddev=sampling_stddev)(rows)
        now = (0, 1.0)
        for step, y in enumerate(rows.astype(np.float64).reshape(13, -1)):
            expected = now[1] * matrices()[now[0]] @ y
            np.testing.assert_allclose(updates[step].reshape(-1), expected, atol=2e-5)
            count = step + 1
            if count in DUE:
                total = rows[:count].astype(np.float64).sum(axis=0)
                total = (total - total.mean(axis=0)).reshape(-1)  # of each unit
                now = oracles.choose_smoothing(
                    total, count, count * sampling_stddev**2, matrices(), now
                )
            seen.add(now[0])
            place = 0 if now[0] == 0 else 1 + (now[0] - 1) // 6
            assert choices.layout[step, 0] == place
            expected = 0.0 if now[0] == 0 else SMOOTHINGS[(now[0] - 1) % 6]
            np.testing.assert_allclose(choices.smoothing[step, 0], expected)
            np.testing.assert_allclose(choices.length[step, 0], now[1], rtol=1e-4)
    assert len(seen) > 2 and 0 in seen


@pytest.mark.parametrize("shape", [(3,), (10,), (16, 3), (64, 10)])
def test_pure_noise_is_rarely_smoothed(shape):
    noise = jax.random.normal(jax.random.key(1), (1, 2000, *shape))
    tx = lsdp.auto_smooth(optax.identity(), stddev=1.0)
    one = jax.vmap(lambda y: tx.update(y, tx.init(y))[1].choice.layout[0] > 0)
    share = jax.jit(one)(noise[0]).mean()
    assert share < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 2000)


def test_noise_of_sampling_does_not_pass_for_signal():
    rng = np.random.default_rng(0)
    wave = smooth_image() / np.linalg.norm(smooth_image())
    rows = rng.normal(size=(32, *SHAPE)) + 12 * rng.normal(size=(32, 1, 1)) * wave
    rows = rows.astype(np.float32)
    known = feed(sampling_stddev=12.0)(rows)[1]
    assert (known.layout == 0).mean() > 0.8
    assert (feed()(rows)[1].layout > 0).mean() > 0.8


def test_images_are_smoothed_and_permuted_pixels_are_left_alone():
    rows = releases(32, 2, signal=0.3)
    chosen = feed()(rows)[1]
    assert (chosen.layout[12:] == 2).all() and (chosen.smoothing[12:] > 0).all()
    order = np.random.default_rng(1).permutation(16)
    permuted = rows + 2 * smooth_image()[order].astype(np.float32) - 0.3 * smooth_image()
    assert (feed()(permuted.astype(np.float32))[1].layout == 0).all()


def test_an_update_is_linear_in_the_release_given_the_past():
    tx = lsdp.auto_smooth(optax.sgd(0.1, 0.9), stddev=1.0)
    state, update = tx.init(jnp.zeros(SHAPE)), jax.jit(tx.update)
    for y in releases(9, 0, signal=1.0):
        _, state = update(y, state)
    assert lsdp.chosen_smoothing(state).smoothing > 0
    a, b = releases(2, 1)
    zero, of_a, of_b, both = (update(y, state)[0] for y in (0 * a, a, b, 3 * a - 2 * b))
    np.testing.assert_allclose(both - zero, 3 * (of_a - zero) - 2 * (of_b - zero), atol=1e-5)


@pytest.mark.parametrize("watch_steps", [None, 12])
def test_updates_are_a_function_of_the_releases_alone(watch_steps, monkeypatch):
    """A rule that looks at the clipped sum would see the examples through the same releases."""
    published = releases(12, 3, signal=1.0)

    def publish(stddev, *, key, shard_specs=None):
        real = lsdp.add_gaussian_noise(stddev, key=key, shard_specs=shard_specs)

        def update(updates, state, params=None, **extra_args):
            noisy, after = real.update(updates, state, params, **extra_args)
            return 4 * jnp.asarray(published)[state.step] + 0 * noisy, after

        return optax.GradientTransformationExtraArgs(real.init, update)

    monkeypatch.setattr(optax_lsdp.optimizers, "add_gaussian_noise", publish)
    options = {"watch_steps": watch_steps, "key": jax.random.key(0), "smoothing": "auto"}
    tx = lsdp.privatize(optax.sgd(1.0), **PRIVATE, **options)
    update = jax.jit(tx.update)

    def train(examples):
        state, seen = tx.init(jnp.zeros(SHAPE)), []
        for _ in range(12):
            updates, state = update(examples, state, jnp.zeros(SHAPE))
            seen.append(np.asarray(updates))
        return np.stack(seen), lsdp.chosen_smoothing(state)

    some, chosen = train(jnp.zeros((4, *SHAPE)))
    others, same = train(jnp.broadcast_to(smooth_image().astype(np.float32), (4, *SHAPE)))
    np.testing.assert_array_equal(some, others)
    assert chosen == same and chosen.smoothing > 0


def test_the_choice_says_how_much_noise_the_optimizer_sees():
    sees = optax.stateless(lambda updates, params: updates)
    rows = releases(600, 5, signal=1.0)
    tx = lsdp.auto_smooth(sees, stddev=1.0)
    state = tx.init(rows[0])
    for y in rows[:8]:
        _, state = tx.update(y, state)
    chosen = lsdp.chosen_smoothing(state)
    assert chosen.beta < 0.5
    moves = jax.jit(jax.vmap(lambda y: tx.update(y, state)[0]))(rows[8:] - smooth_image())
    seen = moves / (chosen.length * np.sqrt(chosen.beta))
    error = np.sqrt(2 / (592 * 48 * chosen.beta))  # neighbours are correlated
    assert float(jnp.mean(seen**2)) == pytest.approx(1, abs=4 * error)


@pytest.mark.usefixtures("_standard_promotion")
def test_adam_takes_steps_of_the_same_length_with_and_without_smoothing():
    rows = releases(32, 6, signal=0.3)
    adam = feed(optimizer=optax.adam(0.1))(rows)[0]
    plain, _ = optax.adam(0.1).update(rows[0], optax.adam(0.1).init(rows[0]))
    np.testing.assert_allclose(adam[0], plain, rtol=1e-6)
    ratio = np.linalg.norm(adam[16:], axis=(1, 2)) / np.linalg.norm(adam[:2], axis=(1, 2)).mean()
    assert (ratio < 1.5).all()


def test_a_run_goes_on_from_a_saved_state():
    tx = lsdp.auto_smooth(optax.sgd(0.1), stddev=1.0)
    rows, update = releases(12, 7, signal=1.0), jax.jit(tx.update)
    state = tx.init(rows[0])
    for y in rows[:6]:
        _, state = update(y, state)
    saved = jax.tree.map(jnp.asarray, pickle.loads(pickle.dumps(jax.device_get(state))))
    for y in rows[6:]:
        here, state = update(y, state)
        there, saved = update(y, saved)
        np.testing.assert_array_equal(here, there)
    assert update._cache_size() == 1
    assert lsdp.chosen_smoothing(saved).smoothing > 0


@pytest.mark.parametrize("specs", [jax.P("x"), jax.P(None, "x"), None])
def test_shards_choose_what_the_whole_chooses(specs):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    wave = np.sin(np.arange(64).reshape(16, 4).T / 9).T
    rows = (rng.normal(size=(6, 16, 4)) + wave).astype(np.float32)

    def run(specs, rows):
        tx = lsdp.auto_smooth(optax.sgd(0.1), stddev=1.0, shard_specs=specs)
        state, updates = jax.lax.scan(lambda s, y: tx.update(y, s)[::-1], tx.init(rows[0]), rows)
        return updates[-1], state.choice

    whole = jax.jit(functools.partial(run, None))(rows)
    if specs is None:
        split = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
        got = jax.jit(functools.partial(run, None))(jax.device_put(rows, split))
    else:
        inside = jax.P(None, *specs)
        function = jax.shard_map(
            functools.partial(run, specs), mesh=mesh, in_specs=inside, out_specs=(specs, jax.P())
        )
        got = jax.jit(function)(rows)
    assert whole[1].layout[0] == 1
    for one, other in zip(*map(jax.tree.leaves, (got, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_half_precision_adds_up_in_float32_and_keeps_its_dtype():
    tx = lsdp.auto_smooth(optax.sgd(0.1), stddev=1.0)
    rows = releases(6, 8, signal=2.0)
    state, exact = tx.init(jnp.zeros(SHAPE, jnp.bfloat16)), tx.init(rows[0])
    for y in rows:
        updates, state = tx.update(jnp.asarray(y, jnp.bfloat16), state)
        _, exact = tx.update(y, exact)
    assert updates.dtype == jnp.bfloat16 and state.total.dtype == jnp.float32
    assert lsdp.chosen_smoothing(state).smoothing == lsdp.chosen_smoothing(exact).smoothing > 0


def test_many_runs_under_vmap_choose_each_for_itself():
    rows = np.stack([releases(6, seed, signal=seed / 2) for seed in range(3)])
    updates, choices = jax.jit(jax.vmap(feed()))(rows)
    for index, mine in enumerate(rows):
        expected, chosen = feed()(mine)
        np.testing.assert_allclose(updates[index], expected, atol=1e-5)
        np.testing.assert_array_equal(choices.smoothing[index], chosen.smoothing)


def test_a_noise_scale_of_an_adaptive_clip_norm_is_counted():
    tx = lsdp.auto_smooth(optax.identity(), stddev=2.0, sampling_stddev=3.0)
    state = tx.init(jnp.zeros(5))
    for scale in (1.0, 0.5, 0.0):
        _, state = tx.update(jnp.ones(5) * scale, state, release_scale=scale)
    assert state.variance == 4 * 1.25 and state.sampling == 9 * 1.25
    adaptive = PRIVATE | {"clip_norm": lsdp.AdaptiveClip(2.0), "key": jax.random.key(0)}
    tx = lsdp.privatize(optax.sgd(0.1), smoothing="auto", watch_steps=5, **adaptive)
    _, state = jax.jit(tx.update)(jnp.ones((4, 5)), tx.init(jnp.zeros(5)), jnp.zeros(5))
    groups = {"clip_norm": {"a": lsdp.AdaptiveClip(1.0), "b": lsdp.AdaptiveClip(1.0)}}
    with pytest.raises(ValueError, match="`smoothing` must not be 'auto' with an AdaptiveClip"):
        lsdp.privatize(optax.sgd(0.1), smoothing="auto", **adaptive | groups)


def test_plans_and_fit_take_auto():
    sizes = {"dataset_size": 64, "expected_batch_size": 16, "steps": 6}
    plan = lsdp.PrivacyPlan(**sizes, epsilon=100.0, delta=1e-5, smoothing="auto")
    fixed = lsdp.PrivacyPlan(**sizes, epsilon=100.0, delta=1e-5)
    assert lsdp.PrivacyPlan.from_json(plan.to_json()) == plan
    assert plan.digest != fixed.digest and plan.noise_multiplier == fixed.noise_multiplier
    x = np.ones((64, 5), np.float32)
    options = {"optimizer": optax.sgd(0.1), "progress": False}
    found = lsdp.training.fit(plan, lambda w, x: -jnp.sum(w * x), jnp.zeros(5), x, **options)
    assert float(found.params.mean()) > 0


def test_bad_input_is_refused_in_one_sentence():
    auto = functools.partial(lsdp.auto_smooth, optax.identity())
    cases = {
        "`stddev` must be positive and finite, got 0.0": lambda: auto(stddev=0.0),
        "`layouts` must be a sequence of layouts": lambda: auto(stddev=1.0, layouts="inputs"),
        "`method` must be one of": lambda: auto(stddev=1.0, method="banded"),
        "`stddev` must be set": lambda: lsdp.laplacian_smooth("auto"),
        "`scope` must be one of": lambda: lsdp.laplacian_smooth("auto", stddev=1.0, scope="tree"),
        "`smoothing` must be one of 'auto'": lambda: lsdp.laplacian_smooth("automatic"),
        "`smoothing` must be a number, a schedule, a transform": lambda: lsdp.privatize(
            optax.sgd(0.1), smoothing="some", key=jax.random.key(0), **PRIVATE
        ),
        "`state` must be the state of an optimizer with": lambda: lsdp.chosen_smoothing(()),
    }
    for message, call in cases.items():
        with pytest.raises(ValueError, match=message):
            call()
    tx = auto(stddev=1.0)
    with pytest.raises(ValueError, match="`updates` must have the shapes of `params`"):
        tx.update(jnp.zeros((4, 3)), tx.init(jnp.zeros(3)))


def test_the_plain_transform_is_auto_smooth_around_nothing():
    rows = releases(6, 9, signal=1.0)
    tx = lsdp.laplacian_smooth("auto", stddev=1.0, layout="inputs")
    state = tx.init(rows[0])
    for y, expected in zip(rows, feed(layouts=("inputs",))(rows)[0], strict=True):
        updates, state = tx.update(y, state)
        np.testing.assert_allclose(updates, expected, atol=1e-5)
