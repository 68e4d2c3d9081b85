"""No contribution exceeds the clip norm: in half precision, where rows cancel, at any magnitude."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping.bookkeeping._platforms import CPU
from optax_lsdp.clipping.bookkeeping.strategies.bounds import Factors, gram_bound
from tests.cases import slow
from tests.clipping.bookkeeping import losses, structures

CASES = losses.LOSSES | structures.LOSSES
SLACK = 1 + 1e-6


def contributions(case, params, batch, clip_norm):
    """Return the norm of each example's own contribution to the sum, in float64."""
    grad = jax.jit(lsdp.clipped_grad(case.loss, clip_norm=clip_norm))
    for i in range(len(jax.tree.leaves(batch)[0])):
        total = grad(params, batch, jnp.arange(losses.N) == i)
        leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
        yield np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["row", "rows", *slow("tied", "2-d", "recurrent")])
def test_no_contribution_exceeds_the_clip_norm_in_any_dtype(name, dtype):
    case = CASES[name]

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    with jax.numpy_dtype_promotion("standard"):
        lengths = list(contributions(case, cast(case.params), cast(case.batch), 0.01))
    assert max(lengths) <= 0.01 * SLACK
    assert min(lengths) >= 0.01 * 0.99


def test_gradients_of_parameters_that_the_loss_casts_are_summed_in_float32():
    case = CASES["rows"]

    def half(w, x):
        return case.loss(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    crowd = jnp.tile(case.batch, (200, 1, 1))
    total = jax.jit(lsdp.clipped_grad(half, clip_norm=1e6))(case.params, crowd).value
    each = jax.jit(jax.vmap(jax.grad(half), (None, 0)))(case.params, case.batch)
    expected = 200 * np.asarray(each, np.float64).sum(axis=0)
    assert total.dtype == jnp.float32
    np.testing.assert_allclose(total, expected, atol=2**-8 * np.abs(expected).max())
    assert np.mean(total == total.astype(jnp.bfloat16).astype(jnp.float32)) < 0.1


def cancelling_rows(height, width, seed=0):
    """Return factors whose products cancel almost entirely: aᵀg is about 1e-5 of its terms."""
    rng = np.random.default_rng(seed)
    a = np.repeat(rng.normal(size=(height // 2, width)), 2, axis=0)
    g = np.repeat(rng.normal(size=(height // 2, width)), 2, axis=0)
    g[1::2] *= -1 + 1e-5 * rng.normal(size=(height // 2, 1))
    return a.astype(np.float32), g.astype(np.float32)


def test_a_naive_gram_norm_is_too_small_and_ours_is_not():
    too_small, compiled = 0, jax.jit(lambda factors: gram_bound([factors], CPU, factors.g.dtype))
    for seed in range(20):
        a, g = cancelling_rows(64, 512, seed)
        naive = np.sum((a @ a.T) * (g @ g.T))
        exact = np.linalg.norm(a.astype(np.float64).T @ g.astype(np.float64)) ** 2
        too_small += bool(naive < exact * (1 - 1e-3))
        assert compiled(Factors(a[None, None], g[None, None])).upper[0, 0] ** 2 >= exact
    assert too_small > 3


def test_cancelling_gradients_are_clipped_harder_and_never_too_little():
    a, g = zip(*(cancelling_rows(8, 40, seed) for seed in range(losses.N)), strict=True)
    batch = (jnp.stack(a), jnp.stack(g))

    def loss(w, example):
        return jnp.vdot(example[0] @ w, example[1])

    params = jnp.zeros((40, 40))
    (row,) = lsdp.explain_clipping(loss, params, jax.tree.map(lambda x: x[0], batch)).rows
    assert row.strategy == "Gram matrices"
    lengths = list(contributions(losses.Case(loss, params, batch), params, batch, 1e-4))
    assert max(lengths) <= 1e-4 * SLACK
    assert min(lengths) > 0


@pytest.mark.parametrize(
    "name", ["row", "rows", *slow("2-d", "layers in a scan, rows", "embedding")]
)
def test_gradients_of_any_magnitude_have_a_norm(name):
    case = CASES[name]
    scales = [np.float32(10.0**exponent) for exponent in (0, -25, 25)]

    @jax.jit
    def run(params, batch):
        return [
            lsdp.value_and_clipped_grad(
                lambda params, example, scale=scale: scale * case.loss(params, example),
                clip_norm=0.01 * float(scale),
            )(params, batch)
            for scale in scales
        ]

    (expected, sums), *scaled = run(case.params, case.batch)
    for scale, (private, total) in zip(scales[1:], scaled, strict=True):
        np.testing.assert_allclose(private.norms / scale, expected.norms, rtol=1e-5)
        for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(sums), strict=True):
            np.testing.assert_allclose(leaf / scale, other, atol=1e-5)


@pytest.mark.parametrize(("platform", "bits"), [("tpu", "e8m7"), ("cuda", "e8m10")])
@pytest.mark.parametrize("name", ["rows", "row", "many rows", "tied", "2-d, Gram", "2-d"])
def test_operands_are_rounded_once_to_what_the_platform_multiplies(platform, bits, name):
    """Rounding is `reduce_precision`: XLA may remove a pair of casts."""
    case = CASES[name]
    grad = jax.jit(lsdp.clipped_grad(case.loss, clip_norm=1.0))
    program = jax.export.export(grad, platforms=[platform])(case.params, case.batch).mlir_module()
    rounded = re.findall(r"reduce_precision %\S+, format = (\w+)", program)
    (row,) = lsdp.explain_clipping(case.loss, case.params, case.batch[0], platform=platform).rows
    uses = 2 if name == "tied" else 1
    weighted = 0 if row.strategy == "materialised" else uses
    assert rounded.count(bits) == 2 * uses + weighted
    assert "highest" not in program.lower()


def test_losses_that_mix_examples_or_send_them_out_are_refused():
    mixing = jax.custom_batching.custom_vmap(lambda x: x)
    mixing.def_vmap(lambda size, batched, x: (x - x.mean(axis=0), True))

    def printing(w, x):
        jax.debug.print("{}", x)
        return jnp.vdot(w, x)

    def calling(w, x):
        return jnp.vdot(w, jax.pure_callback(lambda x: x, x, x))

    for engine in ("bookkeeping", "vmap"):
        for loss in (lambda w, x: jnp.vdot(w, mixing(x)), printing, calling):
            with pytest.raises(ValueError, match="must neither mix nor reveal examples"):
                lsdp.clipped_grad(loss, clip_norm=1.0, engine=engine)(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_losses_that_look_across_shards_are_refused(engine, check_vma):
    mesh = jax.make_mesh((8,), ("shards",), axis_types=(jax.sharding.AxisType.Auto,))

    def centred(w, x):
        return jnp.vdot(w, x - jax.lax.pmean(x, "shards"))

    grad = lsdp.clipped_grad(centred, clip_norm=1.0, engine=engine, replicated_axes="shards")
    specs = dict(in_specs=(jax.P(), jax.P("shards")), out_specs=jax.P("shards"))
    run = jax.shard_map(grad, mesh=mesh, check_vma=check_vma, **specs)
    with pytest.raises(ValueError, match="across the shards"):
        run(jnp.ones(3), jnp.ones((8, 3)))


@pytest.mark.parametrize(
    "name", ["rows", *slow("row", "2-d"), "tied embedding", "layers in a scan"]
)
def test_a_sharded_batch_gives_the_same_sum(name):
    case = CASES[name]
    batch = jnp.concatenate([case.batch, case.batch])[:8]

    def clipped_sum():
        return jax.jit(lsdp.clipped_grad(case.loss, clip_norm=0.3))

    expected = clipped_sum()(case.params, batch)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        with jax.set_mesh(mesh):
            sharded = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
            params = jax.device_put(case.params, jax.NamedSharding(mesh, jax.P()))
            total = clipped_sum()(params, sharded)
        for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(leaf, other, atol=1e-5)


@functools.cache
def cancelling_crowd():
    """Return 512 equal examples whose rows cancel, their clipped gradient, and its sum but one."""
    rng, count, clip_norm = np.random.default_rng(0), 512, 1e-3
    a = np.repeat(rng.normal(size=(4, 200)), 2, axis=0)
    g = np.repeat(rng.normal(size=(4, 200)), 2, axis=0)
    g[1::2] *= -0.85  # cancels most of its partner
    crowd = jax.tree.map(lambda x: np.repeat(np.float32(x)[None], count, axis=0), (a, g))

    def loss(w, example):
        return jnp.vdot(example[0] @ w, example[1])

    grad = jax.jit(lsdp.clipped_grad(loss, clip_norm=clip_norm))

    def run(batch, mask):
        return np.asarray(grad(jnp.zeros((200, 200)), batch, mask).value, np.float64)

    total = run(crowd, np.arange(count) > 0)
    assert np.linalg.norm(total) < clip_norm * (count - 1) * (1 - 1e-3)
    return crowd, run, total, clip_norm


@pytest.mark.parametrize("odd", [np.nan, np.inf, 1e30, 1e-30])
def test_an_odd_example_does_not_change_how_others_are_clipped(odd):
    """The bound of an example depends on no other example."""
    crowd, run, total, clip_norm = cancelling_crowd()
    batch = jax.tree.map(lambda x: np.concatenate([0 * x[:1] + np.float32(odd), x[1:]]), crowd)
    with_odd = run(batch, np.ones(len(batch[0]), bool))
    assert np.linalg.norm(with_odd - total) <= clip_norm * (1 + 1e-3)
    if not np.isfinite(odd):  # it contributes nothing, and the others add up to the same bits
        np.testing.assert_array_equal(with_odd, total)


def test_a_masked_or_broken_example_changes_no_bit_of_the_sum():
    """In a model with Gram matrices, an outer product and a materialised leaf."""
    params = {"rows": jnp.ones((20, 20)) / 20, "dense": jnp.ones((20, 5)), "bias": jnp.zeros(5)}
    batch = jnp.asarray(np.random.default_rng(0).normal(size=(300, 3, 20)), jnp.float32)

    def loss(params, x):
        hidden = jnp.tanh(x @ params["rows"]).mean(axis=0)
        return jnp.sum((hidden @ params["dense"] + params["bias"]) ** 2)

    rows = lsdp.explain_clipping(loss, params, batch[0]).rows
    assert {"Gram matrices", "outer product"} <= {row.strategy for row in rows}
    grad = jax.jit(lsdp.clipped_grad(loss, clip_norm=0.1))
    mask = jnp.arange(300) != 7
    expected = grad(params, batch, mask)
    for odd in (np.nan, np.inf):
        for counted in (mask, jnp.ones(300, bool)):  # what is not finite contributes nothing either
            found = grad(params, batch.at[7].set(odd), counted)
            jax.tree.map(np.testing.assert_array_equal, found, expected)
