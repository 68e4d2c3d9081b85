"""Fuzz: whatever the tree, the numbers and the model, no example moves the sum too far.

A few hundred examples here; `make fuzz` tries more than 10,000 and prints what it saw.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_lsdp as lsdp
from tests.fuzz import corpus, models, strategies

SLACK = 1 + 1e-6  # what float32 may add to one contribution
CHEAP, CROWDS, DEAR = corpus.example_counts()


def norm(tree):
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return np.sqrt(sum(np.sum(leaf**2) for leaf in leaves))


def is_finite(tree):
    return all(np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(tree))


@settings(max_examples=CHEAP)
@given(tree=strategies.trees, numbers=strategies.numbers, clip_norm=strategies.clip_norms)
def test_no_example_of_any_tree_contributes_more_than_the_clip_norm(tree, numbers, clip_norm):
    shapes, structure = jax.tree.flatten(tree, is_leaf=strategies.is_shape)
    leaves = [strategies.draw(numbers, shape, i) for i, shape in enumerate(shapes)]
    stacked = jax.tree.unflatten(structure, leaves)
    params = jax.tree.unflatten(structure, [jnp.zeros(s, numbers.dtype) for s in shapes])
    link = lsdp.clip_per_example(clip_norm)
    alone = []
    for i in range(strategies.SIZE):
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], stacked)
        total, _ = link.update(one, link.init(params), params)
        assert is_finite(total) and norm(total) <= clip_norm * SLACK
        alone.append(total)
        if not is_finite(one):
            assert norm(total) == 0
    corpus.saw(clipped=max(map(norm, alone)) / clip_norm)
    total, _ = link.update(stacked, link.init(params), params)
    added = jax.tree.map(lambda *xs: np.sum([np.asarray(x, np.float64) for x in xs], 0), *alone)
    off = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, total, added)
    corpus.saw(order=norm(off) / clip_norm)
    assert norm(off) <= 1e-6 * strategies.SIZE * clip_norm


def network(params, x):
    """Return a loss with a Gram rule, an outer product, and a gradient that is formed."""
    hidden = jnp.tanh(x @ params["rows"]).mean(axis=0)
    return jnp.sum((hidden @ params["dense"] + params["bias"]) ** 2)


PARAMS = {
    name: jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    for name, shape in {"rows": (20, 20), "dense": (20, 5), "bias": (5,)}.items()
}


def any_clip_norm(step):
    """Return a clip norm from 1e-30 to 1e30: one program for all of them."""
    return 10.0 ** (jnp.asarray(step, jnp.float32) / 10)


@functools.cache
def clipper(engine):
    return jax.jit(lsdp.value_and_clipped_grad(network, clip_norm=any_clip_norm, engine=engine))


def test_the_network_has_all_kinds_of_rules():
    rows = lsdp.explain_clipping(network, PARAMS, jnp.ones((3, 20))).rows
    assert {row.strategy for row in rows} == {"Gram matrices", "outer product", "materialised"}


@settings(max_examples=CHEAP)
@given(
    numbers=strategies.numbers,
    exponent=st.integers(-300, 300),
    mask=strategies.masks,
    place=st.integers(0, strategies.SIZE - 1),
    engine=st.sampled_from(["bookkeeping", "vmap"]),
)
def test_one_example_more_moves_the_sum_by_the_clip_norm_at_most(
    numbers, exponent, mask, place, engine
):
    """In both engines and all dtypes, among whatever others; what is masked does not matter."""
    batch = strategies.draw(numbers, (3, 20), 0)
    params = jax.tree.map(lambda x: x.astype(numbers.dtype), PARAMS)
    mask = np.array(mask)
    alone = np.arange(strategies.SIZE) == place

    def clip(batch, mask):
        """Return norms and the sum, in units of the clip norm."""
        private, total = clipper(engine)(params, batch, jnp.asarray(mask), step=exponent)
        assert is_finite(total)
        return private.norms, total

    (norms, with_it), (_, without) = clip(batch, mask | alone), clip(batch, mask & ~alone)
    moved = norm(jax.tree.map(jnp.subtract, with_it, without))
    corpus.saw(moved=moved)
    assert moved <= 1 + 1e-6 * strategies.SIZE
    poisoned = clip(batch.at[place].set(jnp.nan), mask & ~alone)[1]
    jax.tree.map(np.testing.assert_array_equal, poisoned, without)
    length = float(norms[place]) / float(any_clip_norm(exponent))
    contributed = norm(clip(batch, alone)[1])
    assert contributed <= SLACK
    if 1e-2 < length < 1e30 and numbers.dtype == "float32":  # far below, norms may be coarse
        assert contributed >= 0.99 * min(1.0, length)


@settings(max_examples=CROWDS)
@given(
    numbers=strategies.numbers,
    exponent=st.integers(-300, 300),
    engine=st.sampled_from(["bookkeeping", "vmap"]),
)
def test_the_order_of_a_crowd_moves_the_sum_by_rounding_alone(numbers, exponent, engine):
    """Which is 2⁻²⁴ of what was added up, and grows with the root of the number of additions."""
    size = 1024
    batch = strategies.draw(numbers, (3, 20), 0, size).astype(jnp.float32)
    order = np.random.default_rng(numbers.seed).permutation(size)
    totals = [
        clipper(engine)(PARAMS, batch[order], jnp.ones(size, bool), step=exponent)[1]
        for order in (np.arange(size), order)
    ]
    moved = norm(jax.tree.map(jnp.subtract, *totals))
    corpus.saw(crowd=moved)
    assert moved <= np.sqrt(size) * 2.0**-24 * size


@settings(max_examples=DEAR)
@given(program=models.programs, seed=st.integers(0, 2**31), quiet=st.booleans())
def test_both_engines_agree_on_any_model(program, seed, quiet):
    loss, params = models.build(program, seed)
    scale = 1e-3 if quiet else 1.0
    rng = np.random.default_rng(seed + 1)
    batch = jnp.asarray(scale * rng.normal(size=(4, models.ROWS, models.WIDTH)), jnp.float32)
    mask = jnp.array([True, True, False, True])
    found = {}
    for engine in ("bookkeeping", "vmap"):
        gradient = lsdp.value_and_clipped_grad(loss, clip_norm=0.5, engine=engine)
        found[engine] = gradient(params, batch, mask)
    (book, total), (vmap, expected) = found["bookkeeping"], found["vmap"]
    corpus.saw(models=1)
    half = any(step.layer == "half precision" for step in program)
    close = 2e-2 if half else 2e-4  # bfloat16 has 8 bits, and rounds before or after a product
    top = float(jnp.max(jnp.where(jnp.isfinite(vmap.norms), vmap.norms, 0.0)))
    np.testing.assert_allclose(book.norms, vmap.norms, rtol=close, atol=close * 1e-2 * (1 + top))
    if not is_finite(vmap.norms):
        return
    off = norm(jax.tree.map(jnp.subtract, total, expected))
    possible = float(np.minimum(vmap.norms, 0.5).sum())  # were all contributions alike
    assert off <= (0.005 + close) * possible + 1e-30  # bounds on rounding may take 0.5 % of each
    assert norm(total) <= possible * (1 + close)


def test_the_count_is_at_least_what_is_promised():
    if corpus.IS_LONG:
        assert 2 * CHEAP + CROWDS + DEAR >= 10_000
    assert CHEAP and CROWDS and DEAR


@pytest.mark.parametrize("name", models.LAYERS)
def test_every_layer_of_the_fuzz_is_a_model(name):
    """And each weight has a gradient, but for the one that is not used."""
    loss, params = models.build([models.Step(name, "tanh", False)], 0)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, models.ROWS, models.WIDTH)), "float32")
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, x)
    assert (norm(grads) > 0) == (name != "unused")
