"""The noise has the right distribution, scale and tails, and no two draws share anything."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from jax.sharding import AxisType, PartitionSpec

import optax_lsdp as lsdp
from optax_lsdp import _keys
from optax_lsdp._keys import fold_in_text, standard_normal
from optax_lsdp.correlation import optimize_banded

SIZE = 200_000
TREE = {"a": jnp.zeros(SIZE), "b": {"c": jnp.zeros((SIZE // 100, 100))}}


def draw(tree, stddev=1.0, key=None, steps=1):
    """Return, for each of the first steps, one vector of noise per leaf."""
    tx = lsdp.add_gaussian_noise(stddev, key=jax.random.key(0) if key is None else key)
    state, update, noises = tx.init(tree), jax.jit(tx.update), []
    for _ in range(steps):
        noise, state = update(tree, state)
        noises.append([np.asarray(x, np.float64).reshape(-1) for x in jax.tree.leaves(noise)])
    return noises


@functools.cache
def unit_noise():
    """Return the noise of TREE in three steps, with stddev 1."""
    return draw(TREE, steps=3)


def is_standard_normal(noise):
    """Test mean, variance, kurtosis and the whole distribution at five standard errors."""
    error = 5 / np.sqrt(noise.size)
    return (
        abs(noise.mean()) < error
        and abs(noise.var() - 1) < error * np.sqrt(2)
        and abs((noise**4).mean() - 3) < error * np.sqrt(96)
        and scipy.stats.kstest(noise, "norm").pvalue > 1e-6
    )


def test_noise_is_normal_with_the_requested_stddev():
    for noise in draw(TREE, stddev=3.0)[0]:
        assert is_standard_normal(noise / 3.0)
        assert not is_standard_normal(noise / 3.0 * 1.05)  # the test itself can tell


def test_leaves_and_steps_are_independent():
    streams = list(itertools.chain(*unit_noise()))
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / np.sqrt(SIZE)
    # Correlation is blind to a shift by one entry, a shared magnitude, and a shared pattern.
    for one, other in itertools.combinations(streams, 2):
        assert abs(np.corrcoef(one[1:], other[:-1])[0, 1]) < 5 / np.sqrt(SIZE)
        assert abs(np.corrcoef(one**2, other**2)[0, 1]) < 5 / np.sqrt(SIZE)


def test_neighbouring_entries_are_independent():
    noise = unit_noise()[0][0]
    for lag in (1, 2, 100):
        assert abs(np.corrcoef(noise[lag:], noise[:-lag])[0, 1]) < 5 / np.sqrt(SIZE)


def test_tails_reach_beyond_eight_standard_deviations(monkeypatch):
    def every_word(high):
        def words(keys, shape):
            return jnp.full(shape, high, jnp.uint32), jnp.zeros(shape, jnp.uint32)

        return words

    monkeypatch.setattr(_keys, "random_words", every_word(0))
    assert draw(jnp.zeros(1))[0][0][0] > 9.1  # what README says
    monkeypatch.setattr(_keys, "random_words", every_word(1))
    assert draw(jnp.zeros(1))[0][0][0] < -9.1


def test_other_generators_draw_standard_normals_too():
    assert is_standard_normal(draw(TREE, key=jax.random.key(0, impl="rbg"))[0][0])


def test_a_vector_of_odd_size_draws_the_same_noise_as_a_matrix():
    vector, matrix = (draw({"a": jnp.zeros(shape)})[0][0] for shape in ((90_003,), (30_001, 3)))
    np.testing.assert_allclose(vector, matrix, rtol=1e-6)


def test_small_leaves_draw_the_same_noise_together_and_alone():
    tree = {f"{i}": jnp.zeros(i, "bfloat16" if i % 3 else "float32") for i in range(1, 40)}
    tree |= {"matrix": jnp.zeros((5, 7)), "scalar": jnp.zeros(()), "empty": jnp.zeros(0)}
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))
    together, _ = jax.jit(tx.update)(tree, tx.init(tree))

    @jax.jit
    def each_alone(tree):
        return {name: tx.update({name: leaf}, tx.init(tree))[0] for name, leaf in tree.items()}

    names = ("1", "7", "33", "matrix", "scalar", "empty")
    for name, alone in each_alone({name: tree[name] for name in names}).items():
        np.testing.assert_array_equal(together[name], alone[name])


def test_noise_folds_a_label_into_its_key():
    # A sampler that folds the step and a name into the same key must draw other numbers.
    key = jax.random.key(0)
    unlabelled = fold_in_text(jax.random.fold_in(key, 0), "['a']")
    np.testing.assert_raises(
        AssertionError,
        np.testing.assert_array_equal,
        draw({"a": jnp.zeros(5)})[0][0],
        np.asarray(standard_normal(unlabelled, (5,), jnp.dtype("float32"))),
    )


def test_paths_that_look_alike_share_no_noise():
    one, other = draw({"a": {"b": jnp.zeros(100)}, "a/b": jnp.zeros(100)})[0]
    assert not np.isin(one, other).any()


def test_tails_have_the_right_weight():
    noise = np.abs(draw(jnp.zeros(10_000_000), key=jax.random.key(1))[0][0])
    for threshold in (2.0, 3.0, 4.0):
        expected = noise.size * 2 * scipy.stats.norm.sf(threshold)
        assert abs((noise > threshold).sum() - expected) < 5 * np.sqrt(expected)


def test_the_noise_of_a_leaf_depends_on_its_path_alone():
    alone = draw({"b": {"c": TREE["b"]["c"]}})[0][0]
    np.testing.assert_array_equal(alone, unit_noise()[0][1])


def test_a_resumed_run_draws_the_same_noise_as_an_uninterrupted_run():
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(5))
    update = jax.jit(tx.update)
    _, state = update(TREE, tx.init(TREE))
    restored = jax.tree.map(lambda x: x, state)
    expected, _ = update(TREE, state)
    other = lsdp.add_gaussian_noise(1.0, key=jax.random.key(6))
    got, _ = jax.jit(other.update)(TREE, restored)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_are_kept_and_noise_is_drawn_in_float32_or_wider(dtype):
    with jax.enable_x64(dtype == "float64"):
        noise = draw(jnp.zeros(20_000, dtype))[0][0]
        wide = draw(jnp.zeros(20_000, "float64" if dtype == "float64" else "float32"))[0][0]
        # A value is rounded to the nearest one; two programs may differ in float32's last bit.
        limits = jnp.finfo(dtype)
        rounding = 0.505 * float(limits.eps) * np.abs(wide) + float(limits.smallest_normal)
        assert (np.abs(noise - wide) <= rounding).all()


def test_a_schedule_sets_the_stddev_of_each_step():
    noises = draw(TREE, stddev=lambda step: 1.0 + step.astype(float), steps=3)
    for step, leaves in enumerate(noises):
        assert is_standard_normal(leaves[0] / (1 + step))


def test_a_scheduled_stddev_that_is_not_positive_releases_nothing():
    bad = jnp.array([0.0, -1.0, jnp.nan])
    for leaves in draw(TREE, stddev=lambda step: bad[step], steps=3):
        assert all(np.isnan(noise).all() for noise in leaves)


def test_a_schedule_in_half_precision_is_refused():
    tx = lsdp.add_gaussian_noise(lambda step: jnp.bfloat16(1.003), key=jax.random.key(0))
    with pytest.raises(ValueError, match="float32 or float64"):
        tx.update(jnp.zeros(3), tx.init(None))


def test_the_stddev_may_be_an_integer():
    assert is_standard_normal(draw(TREE, stddev=np.int64(2))[0][0] / 2)


def test_donating_the_state_does_not_delete_the_callers_key():
    key = jax.random.key(0)
    tx = lsdp.add_gaussian_noise(1.0, key=key)
    update = jax.jit(tx.update, donate_argnums=1)
    update(TREE, tx.init(TREE))
    jax.random.normal(key)


def test_fresh_keys_differ_and_hold_full_entropy():
    data = np.array([jax.random.key_data(lsdp.fresh_key()) for _ in range(64)])
    assert len({tuple(words) for words in data}) == 64
    assert (np.bitwise_or.reduce(data) == 2**32 - 1).all()  # each bit was set in some key


def test_a_fresh_key_cannot_become_a_constant_of_a_compiled_program():
    with pytest.raises(RuntimeError, match="outside jit"):
        jax.jit(lsdp.fresh_key)()


def mesh_of(kind):
    return jax.make_mesh((8,), ("shards",), axis_types=(kind,))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
@pytest.mark.parametrize("shape", [(8, 1001), (800, 1000)], ids=["small", "large"])
def test_sharded_noise_equals_that_of_one_device_and_each_device_draws_its_own(kind, shape):
    sharding = jax.NamedSharding(mesh_of(kind), PartitionSpec("shards"))
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))
    zeros = jnp.zeros(shape)
    expected, _ = jax.jit(tx.update)(zeros, tx.init(zeros))
    split = jax.device_put(zeros, sharding)
    compiled = jax.jit(tx.update).lower(split, tx.init(zeros)).compile()
    got, _ = compiled(split, tx.init(zeros))
    np.testing.assert_array_equal(got, expected)
    assert got.sharding.is_equivalent_to(sharding, 2)
    text = compiled.as_text()
    assert not re.search("all-gather|all-reduce|all-to-all|collective-permute", text)
    drawn = [int(n) for n in re.findall(r"u32\[(\d+),", text)]
    assert max(drawn) <= shape[0] // 8


def in_shard_map(updates, spec, *, key_varies=False, check_vma=True, reduce=False):
    """Add noise to `updates` inside shard_map."""
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0))

    def step(shard):
        state = tx.init(shard)
        if reduce:
            shard = jax.lax.psum(shard, "shards")
        if key_varies:
            key = jax.random.fold_in(state.key, jax.lax.axis_index("shards"))
            state = state._replace(key=key)
        return tx.update(shard, state)[0]

    out = PartitionSpec() if reduce else spec
    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out, check_vma=check_vma)
    return jax.jit(run)(updates)


def test_inside_shard_map_noise_that_would_repeat_is_refused():
    with pytest.raises(ValueError, match="equal noise"):
        in_shard_map(jnp.zeros((8, 100)), PartitionSpec("shards"))


def test_inside_unchecked_shard_map_noise_is_refused():
    with pytest.raises(ValueError, match="may vary"):
        in_shard_map(jnp.zeros((8, 100)), PartitionSpec("shards"), check_vma=False)


def test_inside_shard_map_a_summed_gradient_gets_one_noise():
    total = in_shard_map(jnp.zeros((8, 100)), PartitionSpec("shards"), reduce=True)
    np.testing.assert_array_equal(total[0], draw(jnp.zeros((1, 100)))[0][0])


def test_inside_shard_map_a_key_that_varies_gives_each_shard_its_own_noise():
    rows = in_shard_map(jnp.zeros((8, 100)), PartitionSpec("shards"), key_varies=True)
    assert len(np.unique(rows)) > 0.99 * rows.size  # two floats may agree by chance


SPECS = {"split": PartitionSpec("shards"), "whole": PartitionSpec(), "scalar": PartitionSpec()}
SPLIT_TREE = {"split": jnp.zeros((8, 100)), "whole": jnp.zeros(100), "scalar": jnp.zeros(())}


def in_shards(shard_specs, check_vma=True):
    """Return a function that adds noise to SPLIT_TREE inside shard_map."""
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0), shard_specs=shard_specs)
    return jax.shard_map(
        lambda tree: tx.update(tree, tx.init(tree))[0],
        mesh=mesh_of(AxisType.Auto),
        in_specs=(SPECS,),
        out_specs=SPECS,
        check_vma=check_vma,
    )


def test_inside_shard_map_a_named_axis_gives_each_shard_its_own_noise():
    # One spec for all leaves may name an axis that does not split some of them.
    run = jax.jit(lambda x: [in_shards(s)(x) for s in (PartitionSpec("shards"), SPECS)])
    expected = draw({"whole": jnp.zeros(100)})[0][0]
    for got in run(SPLIT_TREE):
        assert len(np.unique(got["split"])) > 0.99 * got["split"].size
        np.testing.assert_array_equal(got["whole"], expected)


def test_specs_of_single_leaves_allow_no_repeated_noise():
    swapped = {**SPECS, "split": PartitionSpec(), "whole": PartitionSpec("shards")}
    with pytest.raises(ValueError, match="got 'split', which varies over shards: unequal shards"):
        jax.eval_shape(in_shards(swapped), SPLIT_TREE)
    with pytest.raises(ValueError, match=r"got 'scalar', which may vary .* over shards"):
        jax.eval_shape(in_shards(SPECS, check_vma=False), SPLIT_TREE)
    with pytest.raises(ValueError, match="got 2 for 3 leaves"):
        jax.eval_shape(in_shards({"a": PartitionSpec(), "b": PartitionSpec()}), SPLIT_TREE)
    tx = lsdp.add_gaussian_noise(1.0, key=jax.random.key(0), shard_specs=SPECS)
    with pytest.raises(ValueError, match="`shard_specs` must be None outside shard_map"):
        jax.eval_shape(tx.update, SPLIT_TREE, tx.init(None))


def test_inside_shard_map_an_unsummed_gradient_is_refused_although_its_spec_names_an_axis():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = lsdp.add_gaussian_noise(
        1.0, key=jax.random.key(0), shard_specs=PartitionSpec(None, "model")
    )
    spec = PartitionSpec("data", "model")

    def run(is_summed):
        def step(x):
            x = jax.lax.psum(x, "data") if is_summed else x
            return tx.update(x, tx.init(x))[0]

        out = PartitionSpec(None, "model") if is_summed else spec
        mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=out)
        return jax.eval_shape(mapped, jnp.zeros((8, 8)))

    run(is_summed=True)
    with pytest.raises(ValueError, match="over data: unequal shards would get equal"):
        run(is_summed=False)


def test_two_groups_under_one_partition_share_no_noise():
    key = jax.random.key(0)
    params = {"a": jnp.zeros(100), "b": jnp.zeros(100)}
    tx = optax.partition(
        {name: lsdp.add_gaussian_noise(1.0, key=key) for name in params}, {"a": "a", "b": "b"}
    )
    noise, _ = jax.jit(tx.update)(params, tx.init(params))
    assert not np.isin(noise["a"], noise["b"]).any()


def test_the_state_of_another_noise_is_refused():
    """Noise would be drawn again that the other mechanism has released already."""
    key, zeros = jax.random.key(0), jnp.zeros(3)
    matrix = lsdp.correlation.square_root(10, 3)
    state = lsdp.add_correlated_noise(1.0, matrix, key=key).init(zeros)
    message = "`state` must be the state of `add_gaussian_noise`, got AddCor"
    with pytest.raises(TypeError, match=message):
        lsdp.add_gaussian_noise(1.0, key=key).update(zeros, state)


@pytest.mark.parametrize("banded", [False, True])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_mean_has_the_bits_of_a_scaled_noisy_sum(dtype, banded):
    tree = {"a": jnp.full((30, 70), 3, dtype), "b": jnp.ones(5, dtype)}
    make = functools.partial(lsdp.add_gaussian_noise, 2.0, key=jax.random.key(3))
    if banded:
        correlation = optimize_banded(9, 2)
        make = functools.partial(lsdp.add_correlated_noise, 2.0, correlation, key=jax.random.key(3))
    scaled, mean = optax.chain(make(), optax.scale(1 / 7)), make(expected_batch_size=7)
    for compiled in (lambda function: function, jax.jit):
        expected, _ = compiled(scaled.update)(tree, scaled.init(tree))
        found, _ = compiled(mean.update)(tree, mean.init(tree))
        assert all(map(np.array_equal, *map(jax.tree.leaves, (found, expected))))


@pytest.mark.parametrize("size", [0, -1.0, np.inf, np.nan, "many", True, jnp.ones(3), np.ones(2)])
def test_a_sum_is_divided_by_plain_positive_numbers_only(size):
    with pytest.raises((TypeError, ValueError), match="`expected_batch_size` must be"):
        lsdp.add_gaussian_noise(2.0, key=jax.random.key(3), expected_batch_size=size)


def test_a_sum_with_slack_is_not_divided_before_its_counts_are_read():
    tx = optax.chain(
        lsdp.clip_per_example(1.0, slack=8),
        lsdp.add_gaussian_noise(1.0, key=jax.random.key(3), expected_batch_size=4),
    )
    params, rows = jnp.zeros(3), jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"`expected_batch_size` must be left out .* slack"):
        tx.update(rows, tx.init(params), params)


@pytest.mark.parametrize("slack", [None, 4])
def test_only_the_expected_batch_size_divides_a_private_sum(slack):
    private = {"clip_norm": 1.0, "noise_multiplier": 1e-3, "expected_batch_size": 4}
    tx = lsdp.privatize(optax.sgd(1.0), key=jax.random.key(0), slack=slack, **private)
    params, rows = jnp.zeros(3), jnp.ones((4, 3))
    expected, _ = tx.update(rows, tx.init(params), params)
    found, _ = tx.update(rows, tx.init(params), params, mean_over=2.0, expected_batch_size=2.0)
    np.testing.assert_array_equal(found, expected)
