"""Fuzz tests: no example moves the sum too far, for random trees, numbers and models.

Here, a few hundred cases run. `make fuzz` runs more than 10,000 and prints a summary.
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
SIZE = strategies.SIZE
MASKS = np.concatenate([np.eye(SIZE, dtype=bool), np.ones((1, SIZE), bool)])  # each alone, then all


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

    @jax.jit
    def clip(stacked, masks):
        def masked(mask):
            return link.update(stacked, link.init(params), params, mask=mask)[0]

        return jax.vmap(masked)(masks)

    totals = jax.device_get(clip(stacked, MASKS))
    alone = [jax.tree.map(lambda x, i=i: x[i], totals) for i in range(SIZE)]
    for i, total in enumerate(alone):
        assert is_finite(total) and norm(total) <= clip_norm * SLACK
        if not is_finite(jax.tree.map(lambda x, i=i: x[i], stacked)):
            assert norm(total) == 0
    corpus.saw(clipped=max(map(norm, alone)) / clip_norm)
    off = jax.tree.map(lambda x: x[-1] - np.sum(x[:-1], 0, dtype=np.float64), totals)
    corpus.saw(order=norm(off) / clip_norm)
    assert norm(off) <= 1e-6 * SIZE * clip_norm


def network(params, x):
    """Return a loss whose leaves have three different strategies."""
    hidden = jnp.tanh(x @ params["rows"]).mean(axis=0)
    return jnp.sum((hidden @ params["dense"] + params["bias"]) ** 2)


PARAMS = {
    name: jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    for name, shape in {"rows": (20, 20), "dense": (20, 5), "bias": (5,)}.items()
}


def any_clip_norm(step):
    """Return a clip norm from 1e-30 to 1e30 that depends on the step, to compile only once."""
    return 10.0 ** (jnp.asarray(step, jnp.float32) / 10)


@functools.cache
def clipper(engine):
    return jax.jit(lsdp.value_and_clipped_grad(network, clip_norm=any_clip_norm, engine=engine))


def test_the_network_has_all_strategies_with_a_rule():
    rows = lsdp.explain_clipping(network, PARAMS, jnp.ones((3, 20))).rows
    assert {row.strategy for row in rows} == {"Gram matrices", "outer product", "materialised"}


@settings(max_examples=CHEAP)
@given(
    numbers=strategies.numbers,
    exponent=st.integers(-300, 300),
    mask=strategies.masks,
    place=st.integers(0, SIZE - 1),
    engine=st.sampled_from(["bookkeeping", "vmap"]),
)
def test_one_more_example_moves_the_sum_by_at_most_the_clip_norm(
    numbers, exponent, mask, place, engine
):
    """In both engines and all dtypes, among any others; masked examples do not matter."""
    batch = strategies.draw(numbers, (3, 20), 0)
    params = jax.tree.map(lambda x: x.astype(numbers.dtype), PARAMS)
    mask = np.array(mask)
    alone = np.arange(SIZE) == place

    def clip(batch, mask):
        """Return norms and the sum, in units of the clip norm."""
        private, total = clipper(engine)(params, batch, jnp.asarray(mask), step=exponent)
        assert is_finite(total)
        return private.norms, total

    (norms, with_it), (_, without) = clip(batch, mask | alone), clip(batch, mask & ~alone)
    moved = norm(jax.tree.map(jnp.subtract, with_it, without))
    corpus.saw(moved=moved)
    assert moved <= 1 + 1e-6 * SIZE
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
def test_the_order_of_many_examples_changes_the_sum_by_rounding_only(numbers, exponent, engine):
    """Rounding is 2⁻²⁴ of the summed magnitudes, times the root of the number of additions."""
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
    grads = [
        lsdp.value_and_clipped_grad(loss, clip_norm=0.5, engine=engine)
        for engine in ("bookkeeping", "vmap")
    ]
    run = jax.jit(lambda *inputs: [grad(*inputs) for grad in grads])
    (book, total), (vmap, expected) = run(params, batch, mask)
    corpus.saw(models=1)
    half = any(step.layer == "half precision" for step in program)
    close = 2e-2 if half else 2e-4  # bfloat16 has 8 bits, and rounds before or after a product
    top = float(jnp.max(jnp.where(jnp.isfinite(vmap.norms), vmap.norms, 0.0)))
    np.testing.assert_allclose(book.norms, vmap.norms, rtol=close, atol=close * 1e-2 * (1 + top))
    if not is_finite(vmap.norms):
        return
    off = norm(jax.tree.map(jnp.subtract, total, expected))
    possible = float(np.minimum(vmap.norms, 0.5).sum())  # if all contributions had one direction
    assert off <= (0.005 + close) * possible + 1e-30  # bounds on rounding may take 0.5 % of each
    assert norm(total) <= possible * (1 + close)


def test_a_long_run_tries_at_least_ten_thousand_cases():
    if corpus.IS_LONG:
        assert 2 * CHEAP + CROWDS + DEAR >= 10_000
    assert CHEAP and CROWDS and DEAR


@functools.cache
def gradients_of_layers():
    """Return the gradients of a model of each layer, compiled together."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, models.ROWS, models.WIDTH)), "float32")
    built = {name: models.build([models.Step(name, "tanh", False)], 0) for name in models.LAYERS}
    losses = {name: loss for name, (loss, _) in built.items()}

    @jax.jit
    def run(params):
        return {n: jax.vmap(jax.grad(loss), (None, 0))(params[n], x) for n, loss in losses.items()}

    return run({name: params for name, (_, params) in built.items()})


@pytest.mark.parametrize("name", models.LAYERS)
def test_every_layer_but_the_unused_one_has_a_gradient(name):
    assert (norm(gradients_of_layers()[name]) > 0) == (name != "unused")
