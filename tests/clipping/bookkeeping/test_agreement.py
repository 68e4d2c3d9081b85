"""The bookkeeping engine agrees with the vmap engine on every kind of loss."""

import functools
import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping.bookkeeping.strategies import leaves
from tests.cases import slow
from tests.clipping.bookkeeping import losses, structures

CASES = losses.LOSSES | structures.LOSSES
QUICK = list(CASES)[::3]
NO_CLIP = 1e6  # above every norm, so that no rounding bound has any effect
CLIP = 0.3
ENGINES = ("bookkeeping", "vmap")


@functools.cache
def both_engines(name, **kwargs):
    """Return a function of a batch and a mask: the results of both engines, compiled once."""
    case = CASES[name]
    grads = [lsdp.value_and_clipped_grad(case.loss, engine=e, **kwargs) for e in ENGINES]
    run = jax.jit(lambda *inputs, **options: [f(*inputs, **options) for f in grads])
    return functools.partial(run, case.params)


def assert_sums_close(total, expected, atol):
    for leaf, other in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0, atol=atol)


def no_clip_then_clip(step):
    """Return a clip norm that clips nothing at step 0, and one that clips at step 1."""
    return jnp.where(step == 0, NO_CLIP, CLIP)


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in CASES if name not in QUICK))])
def test_norms_and_sums_agree_with_vmap(name):
    run = both_engines(name, clip_norm=no_clip_then_clip)
    unclipped, clipped = (run(CASES[name].batch, step=step) for step in (0, 1))
    (private, total), (expected, sums) = unclipped
    np.testing.assert_allclose(private.values, expected.values, rtol=1e-6)
    np.testing.assert_allclose(private.norms, expected.norms, rtol=1e-5)
    close = 1e-5 * max(1.0, float(expected.norms.max())) / NO_CLIP
    assert_sums_close(total, sums, close)
    # Clipped, in units of the clip norm: the bound on rounding may take 0.5 % of each example.
    (_, total), (_, sums) = clipped
    leaves = zip(jax.tree.leaves(total), jax.tree.leaves(sums), strict=True)
    off = sum(np.sum(np.square(np.subtract(a, b), dtype=np.float64)) for a, b in leaves)
    assert np.sqrt(off) <= 0.005 * len(private.norms)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_each_leaf_gets_its_strategy(case):
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
def test_masks_microbatches_and_styles_agree_with_vmap(name, kwargs):
    mask = jnp.array([True, False, True, True, False])
    (book, total), (vmap, expected) = both_engines(name, **kwargs)(CASES[name].batch, mask)
    np.testing.assert_allclose(book.norms, vmap.norms, rtol=1e-5)
    assert_sums_close(total, expected, atol=2e-5)


def test_groups_are_clipped_independently():
    """Each leaf of a grouped sum is what it would be if no other group were clipped."""
    case, clip_norm = CASES["recurrent"], [0.1, 0.2, 0.3]

    @jax.jit
    def run(params, batch):
        grouped = [
            lsdp.value_and_clipped_grad(case.loss, clip_norm=clip_norm, engine=engine)
            for engine in ENGINES
        ]
        alone = [
            lsdp.clipped_grad(
                case.loss, clip_norm=[norm if i == j else NO_CLIP for j in range(3)], engine="vmap"
            )
            for i, norm in enumerate(clip_norm)
        ]
        grouped = [f(params, batch) for f in grouped]
        return grouped, [f(params, batch)[i] for i, f in enumerate(alone)]

    grouped, alone = run(case.params, case.batch)
    for private, total in grouped:
        assert [norm.shape for norm in private.norms] == [(losses.N,)] * 3
        for leaf, other in zip(total, alone, strict=True):
            np.testing.assert_allclose(leaf.value, other.value, atol=2e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e12, 1e30])
@pytest.mark.parametrize("name", ["rows", "row", "2-d", "layers in a scan", "bias and scale"])
def test_an_example_that_is_not_finite_contributes_nothing(name, poison):
    """With bookkeeping, that includes operands whose squares overflow."""
    spoilt = CASES[name].batch.at[2].set(poison)
    mask = jnp.arange(losses.N) != (2 if poison == 1e30 else losses.N)
    run = both_engines(name, clip_norm=0.3)
    (_, total), (_, expected) = run(spoilt, mask)
    assert_sums_close(total, expected, atol=2e-5)
    if poison == 1e30:
        (_, total), _ = run(spoilt, jnp.ones(losses.N, bool))
        moved = sum(
            np.sum(np.square(np.subtract(a, b), dtype=np.float64))
            for a, b in zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True)
        )
        assert np.sqrt(moved) <= 0.3 * (1 + 1e-5)  # nothing, or at most the clip norm


@pytest.mark.parametrize("name", ["rows", "row", "2-d", "tied embedding", "cond", "recurrent"])
def test_an_empty_batch_gives_zero(name):
    case = CASES[name]
    private, total = jax.jit(lsdp.value_and_clipped_grad(case.loss, clip_norm=1.0))(
        case.params, case.batch[:0]
    )
    assert private.norms.shape == (0,)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(total))


@pytest.mark.parametrize("few", [2, 3, losses.N - 1])
def test_forming_patches_for_a_few_examples_at_a_time_changes_nothing(monkeypatch, few):
    case = CASES["2-d"]
    _, (_, expected) = both_engines("2-d", clip_norm=0.1)(case.batch)
    forms = []
    form = leaves._form

    def recorded(*arguments):
        forms.append(len(arguments[-1]))
        return form(*arguments)

    monkeypatch.setattr(leaves, "examples_in_cache", lambda floats: few)
    monkeypatch.setattr(leaves, "_form", recorded)
    total = jax.jit(lsdp.clipped_grad(case.loss, clip_norm=0.1))(case.params, case.batch)
    assert few in forms
    assert_sums_close(total, expected, atol=1e-6)


def test_notebooks_show_an_explanation_as_a_table():
    params = {"<w>": jnp.ones((9, 9))}
    rows = lsdp.explain_clipping(lambda p, x: jnp.sum(x @ p["<w>"]), params, jnp.ones(9))
    table = xml.etree.ElementTree.fromstring(rows._repr_html_())
    cells = [[cell.text or "" for cell in line] for line in table.iter("tr")]
    text = [re.split(r"\s{2,}", line) for line in str(rows).splitlines()]
    assert cells[0] == text[0] and cells[1] == text[2] and "<w>" in cells[1]
