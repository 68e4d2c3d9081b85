"""Cases that once gave a wrong norm, a wrong sum or an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import optax_lsdp as lsdp
from optax_lsdp._trees import row_norms
from tests.cases import slow
from tests.clipping.bookkeeping.losses import normal

N = 4


def lora_in_scan(p, x):
    def layer(h, q):
        return jnp.tanh(h @ (q["w"] + q["a"] @ q["b"])), None

    return jnp.sum(lax.scan(layer, x, p)[0])


def two_orders_of_blocks(w, e):
    x, s = e
    one = lax.dot_general(x, w, (((2,), (1,)), ((0, 1), (0, 2))))
    other = lax.dot_general(x.transpose(1, 0, 2), w, (((2,), (1,)), ((0, 1), (2, 0))))
    return jnp.sum(one * s) + jnp.sum(other * s.transpose(1, 0, 2))


def over_concatenation(p, x):
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.concatenate(p))[0])


def clipped_lookup(w, i):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    rows = lax.gather(w, i[:, None], numbers, (1, 30), mode="clip")
    return jnp.sum(jnp.tanh(rows) * jnp.arange(30.0))


CASES = {
    "two orders of blocks": (
        two_orders_of_blocks,
        normal(4, 24, 5, 24),
        (normal(N, 4, 5, 24), normal(N, 4, 5, 24)),
    ),
    "complex": (lambda w, x: jnp.sum(jnp.abs(jnp.fft.fft(w)) * x), normal(9), normal(N, 9)),
    "complex product": (
        lambda p, x: jnp.sum(jnp.abs(x @ lax.complex(*p))),
        [normal(9, 30)] * 2,
        lax.complex(normal(N, 9), normal(N, 9)),
    ),
    "infinite loss": (
        lambda w, x: jnp.sum((x @ w) ** 2),
        1e20 * normal(30, 40),
        normal(N, 30),
        1e10,
    ),
    "unsigned ids": (clipped_lookup, normal(50, 30), jnp.full((N, 3), 2**31 + 7, jnp.uint32)),
    "small ids": (
        lambda w, i: jnp.sum(jnp.tanh(w[i])),
        normal(300, 30),
        jnp.ones((N, 3), jnp.uint8),
    ),
    "low rank in a scan": (
        lora_in_scan,
        {"w": normal(3, 30, 30), "a": normal(3, 30, 2), "b": normal(3, 2, 30)},
        normal(N, 30),
    ),
    "scan of a concatenation": (
        over_concatenation,
        [normal(2, 30, 30), normal(1, 30, 30)],
        normal(N, 30),
    ),
    "integers times floats": (
        lambda w, x: jnp.sum(
            jnp.tanh(
                lax.dot_general(x, w, (((0,), (0,)), ((), ())), preferred_element_type="float32")
            )
        ),
        normal(30, 40),
        jnp.ones((N, 30), jnp.int8),
    ),
    "no rows": (lambda w, x: jnp.sum(x[:0] @ w) + jnp.sum(x @ w), normal(30, 40), normal(N, 3, 30)),
    "no entries": (
        lambda p, x: jnp.sum(p[0].reshape(-1)) + jnp.sum(x @ p[1]),
        [jnp.ones((0, 4)), normal(30, 40)],
        normal(N, 30),
    ),
    "no positions": (
        lambda p, x: jnp.sum(lax.conv(x, p[0], (1, 1), "VALID")) + jnp.sum(x * p[1]),
        [normal(2, 3, 9, 9), normal(1, 3, 5, 5)],
        normal(N, 1, 3, 5, 5),
    ),
    "large and small": (
        lambda w, e: jnp.sum((e[0] @ w) * e[1]),
        jnp.zeros((30, 40)),
        (1e-15 * normal(N, 30), 1e20 * normal(N, 40)),
        1e5,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("clip_norm", [1e-10, *slow(1e30)])
def test_both_engines_agree(case, clip_norm):
    loss, params, batch, *least = case
    clip_norm = max(clip_norm, *least, 0)  # squares of gradients overflow above 10¹⁹ clip norms
    grads = [
        lsdp.value_and_clipped_grad(loss, clip_norm=clip_norm, engine=engine)
        for engine in ("bookkeeping", "vmap")
    ]
    run = jax.jit(lambda *inputs: [grad(*inputs) for grad in grads])
    (private, total), (expected, sums) = run(params, batch)
    np.testing.assert_allclose(private.norms, expected.norms, rtol=1e-5)
    scale = min(clip_norm, float(expected.norms.max()))
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(leaf / scale, other / scale, atol=1e-4)


@pytest.mark.parametrize("magnitude", [1e-37, 1.0, 8e37, 1.5e38])
def test_a_row_has_a_norm_up_to_the_largest_float(magnitude):
    norms = jax.jit(lambda x: row_norms([x]))(jnp.full((1, 4), magnitude))
    np.testing.assert_allclose(norms, 2 * magnitude, rtol=1e-6)


def test_an_outer_product_of_huge_cotangents_is_clipped_to_the_clip_norm():
    def loss(p, e):
        x, s = e
        return jnp.sum((x[0] @ p[0]) * s[0]) + jnp.sum((x[1] @ p[1]) * s[1])

    params = [jnp.zeros((30, 40)), jnp.zeros((30, 40))]
    x = jnp.stack([jnp.full((1, 30), 1e-30), jnp.ones((1, 30))], axis=1)
    s = jnp.stack([jnp.full((1, 40), 1e38), jnp.ones((1, 40))], axis=1)
    total = jax.jit(lsdp.clipped_grad(loss, clip_norm=1.0))(params, (x, s))
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(total)]
    assert np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)) <= 1 + 1e-6


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("clip_norm", [1e-25, 1e-10, 1.0, 1e25])
def test_a_gradient_of_any_magnitude_is_clipped_or_contributes_nothing(clip_norm, engine):
    def loss(p, e):
        x, s = e
        return jnp.sum((x @ p[0]) * s) + jnp.vdot(p[1], s)

    exponents = np.arange(-36, 38, 4)
    x, s = (10.0 ** np.array(np.meshgrid(exponents, exponents))).reshape(2, -1)
    batch = [np.float32(scale[:, None] * np.ones(8)) for scale in (x, s)]
    grad = jax.jit(lsdp.clipped_grad(loss, clip_norm=clip_norm, engine=engine))
    masks = jnp.eye(len(x), dtype=bool)
    params = [jnp.zeros((8, 8)), jnp.zeros(8)]
    alone = jax.jit(jax.vmap(grad, (None, None, 0)))(params, batch, masks)
    rows = [np.asarray(leaf, np.float64).reshape(len(x), -1) for leaf in jax.tree.leaves(alone)]
    lengths = np.linalg.norm(np.concatenate(rows, axis=1) / clip_norm, axis=1)
    assert np.all(np.isfinite(lengths)) and lengths.max() <= 1 + 1e-6
    exact = np.hypot(8 * x * s, np.sqrt(8) * s) / clip_norm
    usual = (exact > 1) & (exact < 1e18) & (x > 1e-18) & (x < 1e18) & (s / clip_norm < 1e18)
    usual &= exact * clip_norm < 1e37  # float32 holds the gradient itself
    assert lengths[usual].min() >= 1 - 1e-4


def test_casts_to_float64_and_back_keep_both_engines_in_agreement():
    with jax.enable_x64(True):
        w, x = jnp.asarray(normal(40, 50), "float32"), jnp.asarray(normal(N, 3, 40), "float32")

        def widened(w, x):
            return jnp.sum(jnp.tanh(x.astype("float64") @ w.astype("float64")))

        def row(w, x):
            return widened(w, x[0])

        @jax.jit
        def run(params, x):
            return [
                [
                    lsdp.clipped_grad(loss, clip_norm=1e6, engine=engine)(params, x).value
                    for engine in ("bookkeeping", "vmap")
                ]
                for loss in (widened, row)
            ]

        for params in (w, w.astype("float64")):
            for grads in run(params, x):
                assert grads[0].dtype == params.dtype
                np.testing.assert_allclose(*grads, atol=1e-4)


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("rule", ["forward", "backward"])
def test_custom_derivatives_that_mix_examples_are_refused(engine, rule):
    mix = jax.custom_batching.custom_vmap(lambda g: g)
    mix.def_vmap(lambda size, batched, g: (jnp.broadcast_to(g.sum(0), g.shape), True))
    hidden = jax.custom_vjp(lambda x: x)
    if rule == "forward":
        hidden.defvjp(lambda x: (mix(x), None), lambda residuals, g: (g,))
    else:
        hidden.defvjp(lambda x: (x, None), lambda residuals, g: (mix(g),))

    def loss(w, x):
        return jnp.sum(hidden(x @ w) ** 2)

    with pytest.raises(ValueError, match="must neither mix nor reveal examples"):
        lsdp.clipped_grad(loss, clip_norm=1.0, engine=engine)(normal(3, 4), normal(2, 3))


def test_indices_of_64_bits_select_the_same_rows():
    with jax.enable_x64(True):
        table, ids = normal(50, 30).astype(jnp.float32), jnp.arange(N * 3).reshape(N, 3) - 2
        assert ids.dtype == jnp.int64

        def loss(table, ids):
            return jnp.sum(jnp.tanh(table[ids]) * jnp.arange(30.0, dtype=jnp.float32))

        (strategy,) = (row.strategy for row in lsdp.explain_clipping(loss, table, ids[0]).rows)
        sums = [
            jax.jit(lsdp.clipped_grad(loss, clip_norm=0.1, engine=engine))(table, ids).value
            for engine in ("bookkeeping", "vmap")
        ]
        assert strategy == "Gram matrices"
        np.testing.assert_allclose(*sums, atol=1e-6)


def test_uses_in_several_precisions_are_bounded_by_the_coarsest():
    """One leaf is used in float32, where rows cancel, and in float64; or its sums are float32."""
    rng, size, clip_norm = np.random.default_rng(0), 300, 1e-4
    u, g, noise = rng.normal(size=(3, N, 1, size))
    rows, cotangents = np.concatenate([u, u + 1e-5 * u * noise], 1), np.concatenate([g, -g], 1)

    def in_both(p, e):
        x, g, z = e
        return jnp.sum((x @ p.astype("float32") * g).astype("float64")) + 1e-12 * jnp.sum(z @ p)

    def rounded_once_each(p, e):
        index, u, v = e
        wide = p.astype("float64")
        return jnp.vdot(wide[index], u) - jnp.vdot(wide[index], v)

    with jax.enable_x64(True):
        near = 1 + 2.0**-24 * np.array([1 + 1e-6, 1 - 1e-6])
        pairs = (np.full((N, 1, 3), value) for value in near)
        cases = (
            (in_both, jnp.zeros((size, size)), (rows, cotangents, np.ones((N, 1, size)))),
            (rounded_once_each, jnp.ones((100, 3), "float32"), (np.zeros((N, 1), int), *pairs)),
        )
        for loss, p, (first, *rest) in cases:
            first = first.astype("float32") if first.ndim == 3 else first
            rest = [np.float32(rest[0]), *rest[1:]] if loss is in_both else rest
            for factor in (1.0, 1e-3):  # the second clips what float64 sees of the difference
                grad = lsdp.clipped_grad(loss, clip_norm=factor * clip_norm, engine="bookkeeping")
                alone = jax.jit(jax.vmap(grad, (None, None, 0)))
                total = alone(p, (first, *rest), jnp.eye(N, dtype=bool)).value
                norms = np.linalg.norm(np.float64(total).reshape(N, -1), axis=1)
                assert norms.max() <= factor * clip_norm * (1 + 1e-6)


@pytest.mark.parametrize("clip_norm", [1e-25, 1.0, 1e20, 1e30])
def test_automatic_clipping_works_for_any_clip_norm(clip_norm):
    def loss(w, e):
        return jnp.sum((e[0] @ w) * e[1])

    batch = [np.ones((1, 1, size), np.float32) for size in (8, 30)]
    grad = lsdp.clipped_grad(loss, clip_norm=clip_norm, clip_style="automatic")
    found = np.linalg.norm(np.asarray(grad(jnp.zeros((8, 30)), batch).value) / clip_norm)
    norm = np.sqrt(8 * 30)
    np.testing.assert_allclose(found, norm / (norm + 0.01), rtol=1e-5)


def test_concatenated_leaves_of_several_dtypes_are_not_joined():
    with jax.enable_x64(True):
        params = {"a": jnp.ones((60, 50)), "b": jnp.ones((60, 50), "float32")}

        def loss(p, x):
            both = jnp.concatenate([p["a"].astype("float32"), p["b"]], axis=1)
            return jnp.sum((x @ both) ** 2)

        sums = [
            jax.jit(lsdp.clipped_grad(loss, clip_norm=1.0, engine=engine))(
                params, jnp.ones((3, 2, 60), "float32")
            )
            for engine in ("bookkeeping", "vmap")
        ]
        for leaf, other in zip(*map(jax.tree.leaves, sums), strict=True):
            np.testing.assert_allclose(leaf, other, rtol=1e-5)
