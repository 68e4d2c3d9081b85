"""Filters in time and debiased moments: their definitions, and the noise that they leave."""

import copy
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.signal import butter

import optax_lsdp as lsdp
from optax_lsdp.filters import LowPassState, ScaleByDebiasedAdamState, denoised
from optax_lsdp.smoothing import chosen_smoothing, low_pass_gain
from tests import oracles

FILTERS = {
    "average of the last three": ([1.0, 1.0, 1.0], [1.0]),
    "exponential average": ([0.1], [1.0, -0.9]),
    "scaled": ([-3.0], [2.0, -1.0]),
    "Butterworth": butter(2, 0.3),
    "more zeros than poles": ([0.4, 0.3, 0.2], [1.0, -0.5]),
    "oscillating": ([0.5], [1.0, 0.5]),
    "identity": ([2.0], [1.0]),
}
KEY = jax.random.key(0)
PRIVATE = dict(clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=2, key=KEY)


def states_of(state, kind):
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [leaf for leaf in leaves if isinstance(leaf, kind)]


def run(tx, updates, params=None):
    """Return the outputs for a stack of updates, and the last state."""
    first = jax.tree.map(lambda x: x[0], updates)

    def step(state, update):
        output, state = tx.update(update, state, params)
        return state, output

    state, outputs = jax.jit(lambda xs: jax.lax.scan(step, tx.init(first), xs))(updates)
    return outputs, state


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_follows_its_recursion_and_knows_its_gain(name):
    x = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    tx = lsdp.low_pass(*FILTERS[name])
    outputs, state = run(tx, {"a": jnp.asarray(x), "b": jnp.ones((9, 2))})
    rounding = 1e-5  # float32, nine steps
    np.testing.assert_allclose(
        outputs["a"], oracles.filter_in_time(x, *FILTERS[name]), atol=rounding
    )
    np.testing.assert_allclose(outputs["b"], 1, atol=rounding)  # constants pass
    gains = oracles.filtered_variance(np.ones(600), *FILTERS[name])
    for step in (0, 1, 2, 8):
        np.testing.assert_allclose(low_pass_gain(*FILTERS[name], step=step), gains[step])
    np.testing.assert_allclose(low_pass_gain(*FILTERS[name]), gains[-1])
    np.testing.assert_allclose(state.noise_variance, gains[8], rtol=rounding)


def test_a_filter_keeps_dtypes_and_computes_in_float32():
    updates = {"half": jnp.ones((50, 3), jnp.bfloat16), "none": jnp.zeros((50, 0))}
    outputs, state = run(lsdp.low_pass([0.01], [1, -0.99]), updates)
    assert outputs["half"].dtype == jnp.bfloat16 and outputs["none"].shape == (50, 0)
    assert (outputs["half"] == 1).all()  # bfloat16 delays would stop growing early
    assert state.delays[0]["half"].dtype == jnp.float32


def test_smoothing_and_filters_leave_the_noise_that_their_gains_say():
    """Scheduled noise and σ, AdaptiveClip, three layouts: the variance in every leaf and step."""
    params = {"line": jnp.zeros(20_000), "grid": jnp.zeros((4, 5_000)), "plain": jnp.zeros(20_000)}
    layouts = {"line": "inputs", "grid": lsdp.Grid((0, 1)), "plain": None}
    smooth = lsdp.laplacian_smooth(
        lambda t: 0.5 * t.astype(float), layout=lambda path, shape: layouts[path]
    )
    tx = lsdp.privatize(
        lsdp.scale_by_debiased_adam(b2=0.5),
        clip_norm=lsdp.AdaptiveClip(0.3, method="quantile"),
        noise_multiplier=lambda t: 2.0 + (t % 2).astype(float),
        expected_batch_size=7,
        smoothing=[smooth, lsdp.low_pass(*butter(1, 0.4))],
        key=KEY,
    )
    zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape)), params)
    state, update, clip_norms = tx.init(params), jax.jit(tx.update), set()
    for _ in range(6):
        _, state = update(zeros, state, params)
        (moments,) = states_of(state, ScaleByDebiasedAdamState)
        clip_norms.add(float(lsdp.current_clip_norm(state)))
        for name, expected in zip(sorted(params), moments.noise, strict=True):
            # nu averages the squares of what reaches Adam, which here is only noise.
            measured = float(jnp.mean(moments.nu[name]))
            few_entries = 0.08  # five standard errors of 20,000 entries, smoothed with σ ≤ 2.5
            assert measured == pytest.approx(float(expected), rel=few_entries), name
    assert len(clip_norms) == 6
    (filtered,) = states_of(state, LowPassState)
    least = np.sort(filtered.noise_variance)
    assert (least[1:] > 1.5 * least[:-1]).all()  # the layouts differ


def test_adam_knows_the_noise_behind_a_smoothing_that_is_chosen():
    """`auto_smooth` leaves the share ℓ²β of the noise's variance."""
    tx = lsdp.privatize(
        lsdp.scale_by_debiased_adam(b1=0.0, b2=0.0),
        smoothing=["auto", lsdp.low_pass([1.0, 1.0])],
        sampling_rate=1.0,
        **dict(PRIVATE, clip_norm=100.0, noise_multiplier=0.01),
    )
    params = jnp.zeros(20_000)
    signal = jnp.sin(jnp.arange(20_000.0) / 300)[None] / 2  # so that strong smoothing pays
    state, update = tx.init(params), jax.jit(tx.update)
    left = []
    for _ in range(9):
        chosen = chosen_smoothing(state)
        left.append(chosen.length**2 * chosen.beta)
        _, state = update(signal, state, params)
    (moments,) = states_of(state, ScaleByDebiasedAdamState)
    assert float(moments.noise[0]) == pytest.approx(0.5**2 * sum(left[-2:]) / 4, rel=1e-4)
    assert chosen.smoothing > 1 and left[-1] < 0.9


def dense_beta(tx, state, updates):
    """Return the mean square of unit noise in each leaf, from the columns of the operator."""
    leaves, structure = jax.tree.flatten(updates)
    flat = jnp.eye(sum(leaf.size for leaf in leaves))
    cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]

    def smooth(column):
        parts = [x.reshape(y.shape) for x, y in zip(jnp.split(column, cuts), leaves, strict=True)]
        return tx.update(jax.tree.unflatten(structure, parts), state)[0]

    columns = jax.tree.leaves(jax.jit(jax.vmap(smooth))(flat))
    return [float((column**2).sum(0).mean()) for column in columns]


SMOOTHINGS = {
    "by default": {},
    "a grid": dict(layout=lambda path, shape: lsdp.Grid((0, 1)) if path == "w" else "inputs"),
    "not all leaves": dict(layout=lambda path, shape: None if path == "b" else "stored"),
    "one ring": dict(scope="tree"),
    "reflecting ends": dict(boundary="neumann"),
    "order 2": dict(order=2),
    "order 2, a grid with ends": dict(
        order=2, boundary="neumann", layout=lambda path, shape: lsdp.Grid((0, 1), (3, 4))
    ),
}


@pytest.mark.parametrize("name", SMOOTHINGS)
def test_smoothing_knows_what_it_leaves_of_noise(name):
    updates = {"b": jnp.zeros((4, 3)), "w": jnp.zeros((3, 4))}
    fixed = lsdp.laplacian_smooth(1.5, **SMOOTHINGS[name])
    scheduled = lsdp.laplacian_smooth(lambda t: 0.5 + t.astype(float), **SMOOTHINGS[name])
    before = fixed.init(None)._replace(step=jnp.array(1))
    expected = np.array([1.0, 2.0]) * dense_beta(fixed, before, updates)
    for tx in (fixed, scheduled):
        found = tx.variance_after(jnp.array([1.0, 2.0]), before, None, updates)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_debiased_adam_agrees_with_weighted_means_in_float64():
    x = np.random.default_rng(0).normal(size=(12, 2, 40)).astype(np.float32)
    stddev = {"a": lambda t: 0.5 + 0.1 * t, "b": lambda t: 1.0 + 0 * t}
    variances = {name: np.array([s(t) for t in range(12)]) ** 2 for name, s in stddev.items()}
    updates = {"a": jnp.asarray(x[:, 0]), "b": jnp.asarray(x[:, 1])}

    def schedule(t):
        return {name: s(t.astype(float)) for name, s in stddev.items()}

    for floor in (1.0, 0.05):
        tx = lsdp.scale_by_debiased_adam(noise_stddev=schedule, floor=floor)
        outputs, _ = run(tx, updates)
        for index, name in enumerate("ab"):
            expected = oracles.debiased_adam(x[:, index].astype(float), variances[name], floor)
            # float32 loses digits in v̂ − n̂, which may be a twentieth of both
            np.testing.assert_allclose(outputs[name][-1], expected, rtol=1e-3)


def test_debiased_adam_without_noise_is_adam():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        updates = {"a": jax.random.normal(KEY, (6, 5), float)}
        debiased, _ = run(lsdp.scale_by_debiased_adam(noise_stddev=0.0), updates)
        adam, _ = run(optax.scale_by_adam(), updates)
        exact = 1e-12  # float64; Optax computes 1 − b2ᵗ with an error of 1e-5 in float32
        np.testing.assert_allclose(debiased["a"], adam["a"], rtol=exact)


def test_debiased_adam_does_not_depend_on_the_unit_of_gradients():
    updates = jax.random.normal(KEY, (6, 50))
    small, _ = run(lsdp.scale_by_debiased_adam(noise_stddev=0.9, eps=0.0), updates)
    large, _ = run(lsdp.scale_by_debiased_adam(noise_stddev=900.0, eps=0.0), 1e3 * updates)
    np.testing.assert_allclose(small, large, rtol=1e-4)


def test_noise_that_is_correlated_between_steps_has_a_schedule():
    """Row t of C⁻¹Z has the variance of row t of C⁻¹, whatever the other rows are."""
    correlation = lsdp.correlation.optimize_banded(6, bands=3)
    column = oracles.toeplitz_dense(correlation.column())
    rows = jnp.asarray(np.linalg.norm(np.linalg.inv(column), axis=1), jnp.float32)
    noise = lsdp.add_correlated_noise(2.0, correlation, key=KEY)
    adam = lsdp.scale_by_debiased_adam(b2=0.5, noise_stddev=lambda t: 2 * rows[t])
    _, state = run(optax.chain(noise, adam), jnp.zeros((6, 20_000)))
    few_entries = 0.05  # five standard errors of 20,000 entries
    assert float(state[1].nu.mean()) == pytest.approx(float(state[1].noise[0]), rel=few_entries)


LOW_PASS = lsdp.low_pass([0.2], [1, -0.8])
PARAMS = {"w": jnp.zeros((8, 3)), "b": jnp.zeros(8)}
STACKED = jax.tree.map(lambda x: jax.random.normal(KEY, (2, *x.shape)), PARAMS)


def two_steps(tx, stacked=STACKED, params=PARAMS):
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(stacked, state, params)
    return updates, state


def test_debias_is_the_chain_that_it_names_and_may_be_watched():
    smoothing = [lsdp.laplacian_smooth(2.0), LOW_PASS]
    optimizer = optax.chain(lsdp.scale_by_debiased_adam(), optax.scale_by_learning_rate(0.1))
    options = dict(smoothing=smoothing, **PRIVATE)
    transforms = [
        lsdp.dp_lsadam(0.1, debias=True, **options),
        lsdp.privatize(optimizer, **options),
        lsdp.privatize(optimizer, watch_steps=3, **options),
        lsdp.dp_lsadam(0.1, **options),
    ]
    with jax.numpy_dtype_promotion("standard"):
        named, chained, watched, plain = jax.jit(lambda: [two_steps(tx)[0] for tx in transforms])()
    jax.tree.map(np.testing.assert_array_equal, named, chained)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), named, watched)
    assert float(jnp.max(abs(named["w"] - plain["w"]))) > 0.01


def test_shards_are_filtered_and_debiased_as_the_whole():
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.P("shards")

    def steps(updates, **options):
        stages = [lsdp.laplacian_smooth(2.0, **options), LOW_PASS]
        tx = denoised(stages, lsdp.scale_by_debiased_adam())
        state = tx.init(updates)
        for _ in range(2):
            result, state = tx.update(updates, state, noise_stddev=0.5)
        return result

    inside = partial(steps, shard_specs=specs)
    split = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=specs)
    mean = jax.tree.map(lambda x: x.mean(axis=0), STACKED)
    placed = jax.device_put(mean, jax.sharding.NamedSharding(mesh, specs))
    whole, *others = jax.jit(steps)(mean), jax.jit(steps)(placed), jax.jit(split)(placed)
    assert others[0]["w"].sharding.is_equivalent_to(placed["w"].sharding, 2)
    for other in others:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), other, whole)


def adam(**options):
    return lambda: lsdp.scale_by_debiased_adam(**options)


def private(optimizer=None, **options):
    optimizer = lsdp.scale_by_debiased_adam() if optimizer is None else optimizer
    tx = lsdp.privatize(optimizer, **{**PRIVATE, **options})
    return lambda: jax.eval_shape(lambda: two_steps(tx))


def pairs_of_clip_norms():
    return {"w": lsdp.AdaptiveClip(1.0), "b": lsdp.AdaptiveClip(2.0)}


REFUSED = {
    "no numbers": (lambda: lsdp.low_pass([]), "`numerator` must be a sequence of finite numbers"),
    "a text": (lambda: lsdp.low_pass([1], "ema"), "`denominator` must be a sequence of .* 'ema'"),
    "a late start": (lambda: lsdp.low_pass([0, 1]), "`numerator` .* starts with a number other"),
    "no scale": (lambda: lsdp.low_pass([1], [0, 1]), "`denominator` .* starts with a number"),
    "unstable": (lambda: lsdp.low_pass([1], [1, -1.1]), "`denominator` .* unit circle.* value 1.1"),
    "a sum": (lambda: lsdp.low_pass([1], [1, -1]), "`denominator` .* unit circle"),
    "only in float64": (
        lambda: lsdp.low_pass([1], [1, -1 + 1e-9]),
        "`denominator` .* unit circle, in float32",
    ),
    "a high pass": (lambda: lsdp.low_pass([1, -1]), "`numerator` .* positive .* low-pass filter"),
    "a dip": (lambda: lsdp.low_pass([1, -1.5, 1.5]), "`numerator` .* positive in all steps"),
    "a gain before the first step": (lambda: low_pass_gain([1], step=-1), "`step` .* got -1"),
    "b1": (adam(b1=1.0), "`b1` must be below 1, got 1.0"),
    "b2": (adam(b2=-0.5), "`b2` must be zero or positive.* got -0.5"),
    "floor": (adam(floor=0.0), "`floor` must be positive.* got 0.0"),
    "negative noise": (adam(noise_stddev={"w": -1.0}), "`noise_stddev` .* got -1.0"),
    "two noises for three leaves": (
        private(lsdp.scale_by_debiased_adam(noise_stddev=(1.0, 1.0, 1.0))),
        "`noise_stddev` must be one number, or a tree of numbers like the updates",
    ),
    "no noise": (
        lambda: two_steps(lsdp.scale_by_debiased_adam(), PARAMS),
        "`noise_stddev` must be set where the noise is not known, got None; pass it, or put",
    ),
    "a stranger before Adam": (private(smoothing=optax.scale(2.0)), "`noise_stddev` must be set"),
    "several clip norms that adapt": (
        private(clip_norm=pairs_of_clip_norms()),
        "`noise_stddev` .* at most one AdaptiveClip",
    ),
    "some of the leaves": (
        private(optax.masked(lsdp.scale_by_debiased_adam(), {"w": True, "b": False})),
        "`scale_by_debiased_adam` must see all leaves .* got 1 of 2; .* pass `noise_stddev`",
    ),
    "a hidden filter": (
        private(optax.chain(LOW_PASS, lsdp.scale_by_debiased_adam())),
        "`smoothing` must hold the `low_pass` filter .*; pass smoothing=",
    ),
    "auto after smoothing": (
        lambda: lsdp.dp_lssgd(0.1, smoothing=[1.0, "auto"], **PRIVATE),
        "`smoothing` must be a number.* 'auto' only first, got 'auto'",
    ),
    "debias as a text": (
        lambda: lsdp.dp_adam(0.1, debias="no", **PRIVATE),
        "`debias` must be True or False, got 'no'",
    ),
    "a marked sum": (
        lambda: LOW_PASS.update(lsdp.Clipped(jnp.ones(8), 1.0), LOW_PASS.init(jnp.ones(8))),
        "`updates` must have passed `clip_per_example` before `low_pass`",
    ),
    "another shape": (
        lambda: LOW_PASS.update(jnp.ones(3), LOW_PASS.init(jnp.ones(8))),
        "`updates` must have the shapes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_sentence(name):
    call, words = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        ([lsdp.low_pass([0.1], [1, -0.9])] * 2, "at most one smoothing and one filter .*2 stages"),
        ([1.0, 3.0], "`smoothing` must be at most one smoothing and one filter .* got '2 stages'"),
        (["auto", 1.0], "`smoothing` must be at most one smoothing and one filter"),
        (
            [lsdp.low_pass(*butter(4, 0.03))],
            "float32 can compute the noise variance .* got order 4",
        ),
    ],
)
def test_noise_that_debiased_moments_cannot_follow_is_refused(stages, sentence):
    private = dict(clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=1.0)
    tx = lsdp.dp_lsadam(1e-3, smoothing=stages, debias=True, key=jax.random.key(0), **private)
    params = jnp.zeros(3)
    with pytest.raises(ValueError, match=sentence):
        tx.update(jnp.zeros((1, 3)), tx.init(params), params)


def test_denoisers_can_be_copied():
    tx = lsdp.low_pass([1.0, 1.0])
    again = copy.deepcopy(tx)
    assert again == tx and again.variance_after is tx.variance_after


def test_decays_close_to_one_keep_the_size_of_steps():
    """In float32, 1 − 1e-8 is 1, and 1 − bᵗ would be 0. The result is 2 / √(2² − 1)."""
    tx = lsdp.scale_by_debiased_adam(b1=1 - 1e-7, b2=1 - 1e-8, noise_stddev=1.0, floor=1e-6)
    outputs, _ = run(tx, jnp.full((3, 2), 2.0))
    np.testing.assert_allclose(outputs, 2 / np.sqrt(3), rtol=1e-5)
