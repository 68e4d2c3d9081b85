"""Whatever the loss, bookkeeping gives what differentiating each example gives."""

import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping.bookkeeping import _gradients
from tests.cases import slow
from tests.clipping.bookkeeping import losses, structures

CASES = losses.LOSSES | structures.LOSSES
NO_CLIP = 1e6  # above every norm, so that no rounding bound has any effect
CLIP = 0.3
ENGINES = ("bookkeeping", "vmap")


def run(case, engine, batch=None, mask=None, **kwargs):
    grad = jax.jit(lsdp.value_and_clipped_grad(case.loss, engine=engine, **kwargs))
    return grad(case.params, case.batch if batch is None else batch, mask)


def no_clip_then_clip(step):
    """Return a clip norm that does nothing, then one that does: one compilation for both."""
    return jnp.where(step == 0, NO_CLIP, CLIP)


@pytest.mark.parametrize("name", [*list(CASES)[::3], *slow(*list(CASES)[1::3], *list(CASES)[2::3])])
def test_norms_and_sums_are_those_of_vmap(name):
    case = CASES[name]
    book, vmap = (
        jax.jit(lsdp.value_and_clipped_grad(case.loss, clip_norm=no_clip_then_clip, engine=engine))
        for engine in ENGINES
    )
    (private, total), (expected, sums) = (f(case.params, case.batch, step=0) for f in (book, vmap))
    np.testing.assert_allclose(private.values, expected.values, rtol=1e-6)
    np.testing.assert_allclose(private.norms, expected.norms, rtol=1e-5)
    close = 1e-5 * max(1.0, float(expected.norms.max())) / NO_CLIP
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(sums), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=close)
    # Clipped, in units of the clip norm: the bound on rounding may take 0.5 % of each example.
    (_, total), (_, sums) = (f(case.params, case.batch, step=1) for f in (book, vmap))
    leaves = zip(jax.tree.leaves(total), jax.tree.leaves(sums), strict=True)
    off = sum(np.sum(np.square(np.subtract(a, b), dtype=np.float64)) for a, b in leaves)
    assert np.sqrt(off) <= 0.005 * len(private.norms)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_each_leaf_gets_its_rule(case):
    if case.strategies is not None:
        example = jax.tree.map(lambda x: x[0], case.batch)
        rows = lsdp.explain_clipping(case.loss, case.params, example).rows
        assert tuple(row.strategy for row in rows) == case.strategies


@pytest.mark.parametrize(
    "name", ["rows", "layers in a scan", *slow("row", "2-d", "tied embedding")]
)
@pytest.mark.parametrize(
    "kwargs",
    [
        dict(clip_norm=0.3, microbatch_size=2),
        dict(clip_norm=0.3, clip_style="automatic"),
        dict(clip_norm=0.3, microbatch_size=3, clip_style="automatic"),
    ],
    ids=["microbatches", "automatic", "both"],
)
def test_masks_microbatches_and_styles_are_as_with_vmap(name, kwargs):
    mask = jnp.array([True, False, True, True, False])
    (book, total), (vmap, expected) = (
        run(CASES[name], engine, mask=mask, **kwargs) for engine in ENGINES
    )
    np.testing.assert_allclose(book.norms, vmap.norms, rtol=1e-5)
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_groups_are_clipped_by_themselves(engine):
    case = CASES["recurrent"]
    clip_norm = [0.1, 0.2, 0.3]
    private, total = run(case, engine, clip_norm=clip_norm)
    alone = [
        run(case, "vmap", clip_norm=[norm if i == j else NO_CLIP for j in range(3)])[1][i]
        for i, norm in enumerate(clip_norm)
    ]
    assert [norm.shape for norm in private.norms] == [(losses.N,)] * 3
    for leaf, other in zip(total, alone, strict=True):
        np.testing.assert_allclose(leaf.value, other.value, atol=2e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", ["rows", "row", "2-d", "layers in a scan", "bias and scale"])
def test_an_example_that_is_not_finite_contributes_nothing(name, poison):
    case = CASES[name]
    spoilt = case.batch.at[2].set(poison)
    _, total = run(case, "bookkeeping", batch=spoilt, clip_norm=0.3)
    _, expected = run(case, "vmap", batch=spoilt, clip_norm=0.3)
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=2e-5)


@pytest.mark.parametrize("name", ["rows", "row", "2-d", "tied embedding", "cond", "recurrent"])
def test_an_empty_batch_gives_zero(name):
    case = CASES[name]
    private, total = jax.jit(lsdp.value_and_clipped_grad(case.loss, clip_norm=1.0))(
        case.params, case.batch[:0]
    )
    assert private.norms.shape == (0,)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("few", [2, 3, losses.N - 1])
def test_patches_of_a_few_examples_at_a_time_change_nothing(monkeypatch, few):
    case = CASES["2-d"]
    expected = lsdp.clipped_grad(case.loss, clip_norm=0.1, engine="vmap")(case.params, case.batch)
    forms = []
    form = _gradients._term_gradients

    def recorded(analysis, term, index, operand, cotangent):
        forms.append(len(operand))
        return form(analysis, term, index, operand, cotangent)

    monkeypatch.setattr(_gradients, "piece_size", lambda use, piece: (1, 1, 1, 0))
    monkeypatch.setattr(_gradients, "_CACHE_FLOATS", few)
    monkeypatch.setattr(_gradients, "_term_gradients", recorded)
    total = jax.jit(lsdp.clipped_grad(case.loss, clip_norm=0.1))(case.params, case.batch)
    assert few in forms
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-6)


def test_an_explanation_is_a_table_in_notebooks_too():
    params = {"<w>": jnp.ones((9, 9))}
    rows = lsdp.explain_clipping(lambda p, x: jnp.sum(x @ p["<w>"]), params, jnp.ones(9))
    table = xml.etree.ElementTree.fromstring(rows._repr_html_())
    cells = [[cell.text or "" for cell in line] for line in table.iter("tr")]
    text = [re.split(r"\s{2,}", line) for line in str(rows).splitlines()]
    assert cells[0] == text[0] and cells[1] == text[2] and "<w>" in cells[1]
