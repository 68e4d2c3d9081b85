"""σ and layout are chosen from past releases by the rule, and from releases alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_lsdp as lsdp
import optax_lsdp.optimizers
from tests import oracles
from tests.cases import slow

SMOOTHINGS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHAPE = (16, 3)  # three units on images of 4 × 4 pixels
DUE = {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32}
STEPS = 32  # of every run, so that one compiled program serves many tests
PRIVATE = {"clip_norm": 1.0, "noise_multiplier": 2.0, "expected_batch_size": 4}


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


def releases(seed, signal=0.0, steps=STEPS):
    noise = np.random.default_rng(seed).normal(size=(steps, *SHAPE))
    return (signal * smooth_image() + noise).astype(np.float32)


@jax.jit
@jax.vmap
def feed_four(rows, sampling_stddev):
    """Return updates and choices of four runs with these releases: (4, steps, …)."""
    options = {"stddev": 1.0, "sampling_stddev": lambda step: sampling_stddev}
    tx = lsdp.auto_smooth(optax.identity(), **options)

    def step(state, y):
        updates, state = tx.update(y, state)
        return state, (updates, state.choice)

    return jax.lax.scan(step, tx.init(rows[0]), rows)[1]


def feed(*runs, sampling_stddev=0.0):
    """Return updates and choices of up to four runs: (runs, steps, …)."""
    rows = np.stack([*runs, *runs[:1] * (4 - len(runs))])
    found = feed_four(rows, np.float32(sampling_stddev) * np.ones(4, np.float32))
    return jax.tree.map(lambda x: np.asarray(x)[: len(runs)], found)


MOMENTUM = lsdp.auto_smooth(optax.sgd(1.0, 0.9), stddev=1.0)
momentum_step = jax.jit(MOMENTUM.update)


def momentum_state(seed):
    """Return the state after nine steps of SGD with momentum; the next step chooses again."""
    state = MOMENTUM.init(jnp.zeros(SHAPE))
    for y in releases(seed, signal=1.0, steps=9):
        _, state = momentum_step(y, state)
    assert lsdp.chosen_smoothing(state).smoothing > 0
    return state


@pytest.mark.parametrize("sampling_stddev", [0.0, 0.9])
def test_choices_and_updates_follow_the_rule(sampling_stddev):
    """Four runs under vmap choose each for itself."""
    seen = set()
    runs = [releases(seed, signal) for seed, signal in enumerate([0.0, 0.3, 0.6, 1.5])]
    for rows, signal in zip(runs, [0.0, 0.3, 0.6, 1.5], strict=True):
        rows[9:] -= 2 * signal * smooth_image()  # the signal turns, and its evidence disappears
    found = feed(*runs, sampling_stddev=sampling_stddev)
    for index, rows in enumerate(runs):
        updates, choices = jax.tree.map(lambda x, index=index: x[index], found)
        now = (0, 1.0)
        for step, y in enumerate(rows.astype(np.float64).reshape(STEPS, -1)):
            expected = now[1] * matrices()[now[0]] @ y
            np.testing.assert_allclose(updates[step].reshape(-1), expected, atol=2e-5)
            count = step + 1
            if count in DUE:
                total = rows[:count].astype(np.float64).sum(axis=0)
                total = (total - total.mean(axis=0)).reshape(-1)  # of each unit
                sampling = count * sampling_stddev**2
                now = oracles.choose_smoothing(total, count, sampling, matrices(), now)
            seen.add(now[0])
            place = 0 if now[0] == 0 else 1 + (now[0] - 1) // 6
            assert choices.layout[step, 0] == place
            expected = 0.0 if now[0] == 0 else SMOOTHINGS[(now[0] - 1) % 6]
            np.testing.assert_allclose(choices.smoothing[step, 0], expected)
            np.testing.assert_allclose(choices.length[step, 0], now[1], rtol=1e-4)
    assert len(seen) > 2 and 0 in seen


@jax.jit
@jax.vmap
def first_choice(releases):
    tx = lsdp.auto_smooth(optax.identity(), stddev=1.0)
    return tx.update(releases, tx.init(releases))[1].choice


def test_pure_noise_is_rarely_smoothed_and_steps_are_lengthened_by_four_at_most():
    rng = np.random.default_rng(1)
    shapes = {"image": (16, 3), "ring": (200,), "tiny": (3,)}
    noise = {name: rng.normal(size=(500, *shape)) for name, shape in shapes.items()}
    noise = {name: array.astype(np.float32) for name, array in noise.items()}
    share = (first_choice(noise).layout > 0).mean(axis=0)
    assert (share < 0.05 + 3 * np.sqrt(0.05 * 0.95 / 500)).all()
    noise["ring"] += 0.4 * np.sin(np.arange(200) * np.pi / 100).astype(np.float32)
    smoothing, length = (x[:, 1] for x in first_choice(noise)[1::2])
    assert (smoothing == 100).mean() > 0.1
    assert length.max() == 4 and length.min() == 1


def test_noise_of_sampling_does_not_pass_for_signal():
    rng = np.random.default_rng(0)
    wave = smooth_image() / np.linalg.norm(smooth_image())
    rows = rng.normal(size=(STEPS, *SHAPE)) + 12 * rng.normal(size=(STEPS, 1, 1)) * wave
    rows = rows.astype(np.float32)
    assert (feed(rows, sampling_stddev=12.0)[1].layout == 0).mean() > 0.8
    assert (feed(rows)[1].layout > 0).mean() > 0.8


def test_images_are_smoothed_and_permuted_pixels_and_means_of_units_do_not_count():
    rows = releases(2, signal=0.3)
    order = np.random.default_rng(1).permutation(16)
    permuted = rows + 2 * smooth_image()[order] - 0.3 * smooth_image()
    moved = rows + np.array([3, -2, 1])
    choices = feed(rows, permuted.astype(np.float32), moved.astype(np.float32))[1]
    assert (choices.layout[0, 12:] == 2).all() and (choices.smoothing[0, 12:] > 0).all()
    assert (choices.layout[1] == 0).all()
    for values in choices:
        np.testing.assert_allclose(values[2], values[0], rtol=1e-3)


def test_an_update_is_linear_in_the_release_given_the_past():
    state = momentum_state(0)
    a, b = 100 * releases(1, steps=2)  # a rule that looks at the release would follow it
    zero, of_a, of_b, both = (momentum_step(y, state)[0] for y in (0 * a, a, b, 3 * a - 2 * b))
    np.testing.assert_allclose(both - zero, 3 * (of_a - zero) - 2 * (of_b - zero), atol=5e-3)
    assert momentum_step._cache_size() == 1
    chosen = lsdp.chosen_smoothing(state)
    place = 1 + 6 * (chosen.layout - 1) + np.searchsorted(SMOOTHINGS, chosen.smoothing - 1e-3)
    expected = chosen.length * matrices()[place] @ a.reshape(-1)
    np.testing.assert_allclose((zero - of_a).reshape(-1), expected, atol=5e-3)


@pytest.mark.parametrize("watch_steps", [None, *slow(12)])
def test_updates_are_a_function_of_the_releases_alone(watch_steps, monkeypatch):
    """A rule that looks at the clipped sum would see the examples through the same releases."""
    published = releases(3, signal=1.0, steps=12)

    def publish(stddev, **options):
        real = lsdp.add_gaussian_noise(stddev, **options)

        def update(updates, state, params=None, **extra_args):
            noisy, after = real.update(updates, state, params, **extra_args)
            return jnp.asarray(published)[state.step] + 0 * noisy, after

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
    state = momentum_state(5)
    chosen = lsdp.chosen_smoothing(state)
    assert chosen.beta < 0.5
    zero = momentum_step(np.zeros(SHAPE, np.float32), state)[0]
    moves = np.stack([momentum_step(y, state)[0] - zero for y in releases(6, steps=400)])
    seen = moves / (chosen.length * np.sqrt(chosen.beta))
    error = np.sqrt(2 / (400 * 48 * chosen.beta))  # neighbours are correlated
    assert float(np.mean(seen**2)) == pytest.approx(1, abs=4 * error)


def test_adam_takes_steps_of_the_same_length_with_and_without_smoothing():
    (smoothed,), chosen = feed(releases(6, signal=0.3))
    assert (chosen.smoothing[0, 16:] > 0).all()
    adam = optax.adam(0.1)
    with jax.numpy_dtype_promotion("standard"):  # Adam promotes dtypes
        state, moves = adam.init(smoothed[0]), []
        for y in smoothed:
            move, state = adam.update(y, state)
            moves.append(move)
    lengths = np.linalg.norm(moves, axis=(1, 2))
    assert (lengths[16:] < 1.5 * lengths[:2].mean()).all()


def run_of_waves(specs, rows):
    tx = lsdp.auto_smooth(optax.sgd(0.1), stddev=1.0, shard_specs=specs)
    first = jax.tree.map(lambda x: x[0], rows)
    state, updates = jax.lax.scan(lambda s, y: tx.update(y, s)[::-1], tx.init(first), rows)
    return jax.tree.map(lambda x: x[-1], updates), state.choice


whole_run_of_waves = jax.jit(functools.partial(run_of_waves, None))


@pytest.mark.parametrize("specs", [jax.P("x"), jax.P(None, "x"), None])
def test_shards_choose_what_the_whole_chooses(specs):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    wave = np.sin(np.arange(64).reshape(16, 4).T / 9).T
    rows = {"split": (rng.normal(size=(6, 16, 4)) + wave).astype(np.float32)}
    rows["replicated"] = rng.normal(size=(6, 5)).astype(np.float32)

    whole = whole_run_of_waves(rows)
    if specs is None:
        inside = {"split": jax.P(None, "x"), "replicated": jax.P()}
        split = jax.tree.map(functools.partial(jax.sharding.NamedSharding, mesh), inside)
        got = whole_run_of_waves(jax.device_put(rows, split))
    else:
        inside = {"split": jax.P(None, *specs), "replicated": jax.P()}
        specs = {"split": specs, "replicated": jax.P()}
        run = functools.partial(run_of_waves, specs)
        outside = specs, jax.P()
        got = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(inside,), out_specs=outside))(rows)
    assert whole[1].layout[1] == 1
    for one, other in zip(*map(jax.tree.leaves, (got, whole)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_half_precision_adds_up_in_float32_and_keeps_its_dtype():
    state, exact = MOMENTUM.init(jnp.zeros(SHAPE, jnp.bfloat16)), MOMENTUM.init(jnp.zeros(SHAPE))
    half_step = jax.jit(MOMENTUM.update)
    for y in releases(8, signal=2.0, steps=6):
        updates, state = half_step(jnp.asarray(y, jnp.bfloat16), state)
        _, exact = momentum_step(y, exact)
    assert updates.dtype == jnp.bfloat16 and state.total.dtype == jnp.float32
    assert lsdp.chosen_smoothing(state).smoothing == lsdp.chosen_smoothing(exact).smoothing > 0


def test_a_noise_scale_of_an_adaptive_clip_norm_is_counted():
    adaptive = PRIVATE | {"clip_norm": lsdp.AdaptiveClip(8.0, method="fixed")}
    adaptive["key"] = jax.random.key(0)
    tx = lsdp.privatize(optax.sgd(0.1), smoothing="auto", **adaptive)
    state, update = tx.init(jnp.zeros(5)), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(jnp.ones((4, 5)), state, jnp.zeros(5))
    nodes = jax.tree.leaves(state, is_leaf=lambda node: hasattr(node, "sampling"))
    [auto] = [node for node in nodes if hasattr(node, "sampling")]
    np.testing.assert_allclose(auto.variance, 2 * (2 * 8 / 4) ** 2)  # 2·(z·C/b)²
    np.testing.assert_allclose(auto.sampling, 2 * 8**2 / 4, rtol=1e-6)  # 2·C²/b
    groups = {"clip_norm": {"a": lsdp.AdaptiveClip(1.0), "b": lsdp.AdaptiveClip(1.0)}}
    with pytest.raises(ValueError, match="`smoothing` must be left out with several AdaptiveClips"):
        lsdp.privatize(optax.sgd(0.1), smoothing="auto", **adaptive | groups)


def test_plans_take_auto():
    sizes = {"dataset_size": 64, "expected_batch_size": 64, "steps": 6, "sampling": "full"}
    plan = lsdp.PrivacyPlan(**sizes, epsilon=1.0, delta=1e-5, smoothing="auto")
    fixed = lsdp.PrivacyPlan(**sizes, epsilon=1.0, delta=1e-5)
    assert lsdp.PrivacyPlan.from_json(plan.to_json()) == plan
    assert plan.digest != fixed.digest and plan.noise_multiplier == fixed.noise_multiplier


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


def test_choices_are_shown_for_one_run_outside_jit():
    tx = lsdp.auto_smooth(optax.identity(), stddev=1.0)
    states = jax.vmap(tx.init)(jnp.zeros((3, 5)))
    assert lsdp.chosen_smoothing(jax.tree.map(lambda x: x[0], states)).smoothing == 0
    with pytest.raises(ValueError, match="`state` must belong to one run, got 3 runs; pass"):
        lsdp.chosen_smoothing(states)
    with pytest.raises(ValueError, match="`state` must have values, got one inside `jit`"):
        jax.jit(lsdp.chosen_smoothing)(tx.init(jnp.zeros(5)))


@pytest.mark.parametrize("place", ["smoothing", "list", "optimizer"])
def test_a_stage_that_cannot_know_the_noise_is_refused(place):
    stage = lsdp.laplacian_smooth("auto", stddev=0.5)
    optimizer = optax.chain(stage, optax.sgd(0.1)) if place == "optimizer" else optax.sgd(0.1)
    smoothing = {"smoothing": stage, "list": ["auto", stage], "optimizer": 0.0}[place]
    adaptive = PRIVATE | {"clip_norm": lsdp.AdaptiveClip(1.0)}
    correlated = PRIVATE | {"correlation": lsdp.correlation.optimize_banded(4, bands=2)}
    options = {"smoothing": smoothing, "key": jax.random.key(0)}
    for kind in (adaptive, correlated) if place != "list" else (adaptive,):
        tx = lsdp.privatize(optimizer, **kind, **options)
        with pytest.raises(ValueError, match="`smoothing` must be 'auto' with an AdaptiveClip"):
            tx.init(jnp.zeros(3))
    lsdp.privatize(optimizer, **PRIVATE, **options).init(jnp.zeros(3))


def test_a_schedule_counts_correlated_noise():
    correlation = lsdp.correlation.optimize_banded(8, bands=4)
    sums = jnp.abs(jnp.cumsum(jnp.asarray(correlation.noise_column(), jnp.float32)))
    noise = lsdp.add_correlated_noise(1.0, correlation, key=jax.random.key(0))
    tx = optax.chain(noise, lsdp.auto_smooth(optax.identity(), stddev=lambda step: sums[step]))
    zeros = jnp.zeros(20_000)
    state, update = tx.init(zeros), jax.jit(tx.update)
    for count in range(1, 7):
        _, state = update(zeros, state)
        measured = float(jnp.mean(state[1].total ** 2))
        assert measured == pytest.approx(float(state[1].variance), rel=0.04)  # four errors
        assert measured > 1.05 or count > 1  # more than independent noise, at first


def test_the_plain_transform_chooses_between_the_layouts_that_are_named():
    tx = lsdp.laplacian_smooth("auto", stddev=1.0, layout="inputs")
    rows, rings = releases(9, signal=1.0, steps=4), matrices()[:7]
    state, update, now = tx.init(rows[0]), jax.jit(tx.update), (0, 1.0)
    for count, y in enumerate(rows.astype(np.float64), 1):
        updates, state = update(y.astype(np.float32), state)
        expected = now[1] * rings[now[0]] @ y.reshape(-1)
        np.testing.assert_allclose(updates.reshape(-1), expected, atol=2e-5)
        total = rows[:count].astype(np.float64).sum(axis=0)
        total = (total - total.mean(axis=0)).reshape(-1)
        now = oracles.choose_smoothing(total, count, 0.0, rings, now)
    assert now[0] > 0


def test_a_choice_from_private_sums_is_refused():
    noise = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="`optimizer` must be what follows the noise"):
        lsdp.auto_smooth(optax.chain(noise, optax.sgd(0.1)), stddev=1.0).init(jnp.zeros(3))
    before = optax.chain(lsdp.laplacian_smooth("auto", stddev=1.0), noise)
    with pytest.raises(ValueError, match="`state` must have `auto_smooth` after the noise"):
        lsdp.chosen_smoothing(before.init(jnp.zeros(3)))
