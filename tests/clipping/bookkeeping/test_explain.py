"""The table of `explain_clipping`: which platform it is for, and how much of C an example keeps."""

import dataclasses
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping import emulate_platform
from optax_lsdp.clipping.bookkeeping._explain import ClippingExplanation, LeafClipping
from tests.cases import slow
from tests.clipping.bookkeeping import losses, structures

CASES = losses.LOSSES | structures.LOSSES
QUICK = ("row", "rows", "tied", "2-d", "embedding")
NAMES = [*QUICK, *slow(*(name for name in CASES if name not in QUICK))]
ROUNDED_TO = {"cpu": "float32", "cuda": "TF32", "rocm": "float32", "tpu": "bfloat16"}
SHAPE = jax.ShapeDtypeStruct((6,), jnp.float32)
PARAMS = {"w": jnp.linspace(-1, 1, 30).reshape(6, 5), "b": jnp.zeros(5), "unused": jnp.ones(2)}
X = jnp.linspace(0.5, 2, 6)


def dense(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def explain(example, platform=None, loss=dense, params=PARAMS):
    return lsdp.explain_clipping(loss, params, example, platform=platform)


def without_numbers(rows):
    """Return the rows without what depends on the numbers of the example."""
    return [dataclasses.replace(row, effective_clip_norm=None) for row in rows]


@pytest.mark.parametrize("example", [X, SHAPE], ids=["numbers", "shapes"])
@pytest.mark.parametrize("platform", ROUNDED_TO)
def test_a_table_names_its_platform_and_how_it_rounds(platform, example):
    table = explain(example, platform)
    (sentence,) = (line for line in str(table).splitlines() if "platform" in line)
    assert f"the platform {platform}:" in sentence and f"{ROUNDED_TO[platform]}." in sentence
    assert sentence in xml.etree.ElementTree.fromstring(table._repr_html_()).find("caption").text
    assert repr(table) == str(table)


def test_a_table_is_for_the_platform_of_jax_unless_another_is_named():
    assert explain(SHAPE).platform == jax.default_backend()
    assert str(explain(SHAPE)) == str(explain(SHAPE, jax.default_backend()))


@pytest.mark.parametrize("platform", ["cpu", "tpu", *slow("cuda", "rocm")])
@pytest.mark.parametrize("name", NAMES)
def test_an_effective_clip_norm_is_what_the_engine_contributes(name, platform):
    """The computed norm and that of the contribution are both within the bounds."""
    case, clip_norm = CASES[name], 1e-6
    first = jax.tree.map(lambda x: x[:1], case.batch)
    example = jax.tree.map(lambda x: x[0], first)
    table = explain(example, platform, case.loss, case.params)
    share = table.effective_clip_norm
    each = [row.effective_clip_norm for row in table.rows]
    assert all(one is None or 0 < one <= 1 for one in [share, *each])
    assert share >= (0.99 if ROUNDED_TO[platform] == "float32" else 0.95)
    with emulate_platform(platform):
        total = jax.jit(lsdp.clipped_grad(case.loss, clip_norm=clip_norm))(case.params, first)
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(total)]
    contributed = np.linalg.norm(np.concatenate(leaves)) / clip_norm
    together = 1e-4  # the engine bounds some leaves together, with a longer sum of squares
    assert abs(contributed - share) <= 1 - share + together


@pytest.mark.parametrize("example", [SHAPE, X], ids=["shapes", "traced"])
def test_without_numbers_there_is_no_effective_clip_norm(example):
    found = []

    def trace(example, factor=1.0):
        found.append(explain(example, "tpu", lambda p, x: factor * dense(p, x)))

    if example is SHAPE:
        trace(example)
    else:
        jax.eval_shape(trace, example)
        jax.eval_shape(lambda _: trace(example), 2.0)  # nothing runs while JAX traces
        jax.eval_shape(lambda factor: trace(example, factor), 2.0)
    known = explain(X, "tpu")
    for table in found:
        assert table.effective_clip_norm is None
        assert list(table.rows) == without_numbers(known.rows)
        assert "effective" not in str(table) and "private" not in str(table)
    assert "effective" in str(known)
    shapes = jax.eval_shape(lambda: PARAMS)
    assert explain(X, "tpu", params=shapes).effective_clip_norm is None


def test_effective_clip_norms_are_called_private():
    assert "private" in str(explain(X))
    for documented in (lsdp.explain_clipping, ClippingExplanation, LeafClipping):
        assert "*private*" in documented.__doc__.lower()


def test_a_gradient_of_another_length_gets_the_same_effective_clip_norm():
    shares = [
        explain(X, "tpu", lambda p, x, scale=scale: scale * dense(p, x)).effective_clip_norm
        for scale in (1.0, 2.0**-20, 2.0**20)  # exact factors
    ]
    np.testing.assert_allclose(shares, shares[0], rtol=1e-6)


def test_an_example_whose_rows_cancel_gets_less():
    a = jax.random.normal(jax.random.key(0), (4, 40))
    g = jax.random.normal(jax.random.key(1), (4, 40))

    def loss(w, example):
        return jnp.vdot(example[0] @ w, example[1])

    def share(sign):
        rows = jnp.concatenate([a, a]), jnp.concatenate([g, sign * g])
        return explain(rows, "tpu", loss, jnp.zeros((40, 40))).effective_clip_norm

    assert 0 < share(-0.9) < 0.9 < share(0.9)


def test_examples_without_a_usable_gradient_are_no_error():
    zero, broken = explain(0 * X), explain(jnp.nan * X)
    rows = {row.path: row.effective_clip_norm for row in zero.rows}
    assert rows["w"] is None and rows["unused"] is None
    assert zero.effective_clip_norm is None  # tanh² is flat at 0
    assert broken.effective_clip_norm == 0 and "0.0000·C" in str(broken)


def test_a_sharding_constraint_on_a_parameter_does_not_change_its_strategy():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P())

    def constrained(params, x):
        return dense(jax.lax.with_sharding_constraint(params, sharding), x)

    assert str(explain(X[None])) == str(explain(X[None], loss=constrained))
