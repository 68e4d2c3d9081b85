"""A CPU weights a few examples at a time, and no example is lost or counted twice."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_lsdp as lsdp
from optax_lsdp.clipping.bookkeeping.strategies import leaves
from tests import oracles
from tests.cases import slow


class Case(NamedTuple):
    """The einsum of a loss ⟨einsum(a, w), g⟩, and the shapes of a, w and g for one example."""

    subscripts: str
    a: tuple[int, ...]
    w: tuple[int, ...]
    g: tuple[int, ...]
    strategy: str


ROW = Case("p,pq->q", (784,), (784, 10), (10,), "outer product")
CASES = {
    "one row": Case("p,pq->q", (6,), (6, 5), (5,), "outer product"),
    "one row, more outputs": Case("p,pq->q", (3,), (3, 9), (9,), "outer product"),
    "rows": Case("tp,pq->tq", (2, 9), (9, 8), (2, 8), "Gram matrices"),
    "blocks": Case("bp,bpq->bq", (3, 6), (3, 6, 5), (3, 5), "outer product"),
    "rows and blocks": Case("btp,bpq->btq", (2, 2, 9), (2, 9, 8), (2, 2, 8), "Gram matrices"),
}


def clipped_sums(case, n, masked):
    """Return the clipped sums by bookkeeping, vmap and the oracle, in units of the clip norm.

    The operands of masked examples are NaN. The clip norm is the median of the norms. Assert that
    the program of the bookkeeping engine has a loop.
    """
    rng, mask = np.random.default_rng(0), ~np.isin(np.arange(n), masked)
    a, g = (np.float32(rng.normal(size=(n, *shape))) for shape in (case.a, case.g))
    subscripts = case.subscripts.replace("->", ",").split(",")
    gradient = "n{0},n{2}->n{1}".format(*subscripts)
    rows = np.einsum(gradient, *(x[mask].astype(np.float64) for x in (a, g))).reshape(sum(mask), -1)
    clip_norm = float(np.median(np.linalg.norm(rows, axis=1)))
    a[~mask], g[~mask] = np.nan, np.nan
    w = jnp.zeros(case.w)

    def loss(w, example):
        return jnp.vdot(jnp.einsum(case.subscripts, example[0], w), example[1])

    (row,) = lsdp.explain_clipping(loss, w, (a[0], g[0])).rows
    assert row.strategy == case.strategy
    run, vmap = (
        jax.jit(lsdp.clipped_grad(loss, clip_norm=clip_norm, engine=engine)).lower(w, (a, g), mask)
        for engine in ("bookkeeping", "vmap")
    )
    assert "stablehlo.while" in run.as_text() and "stablehlo.while" not in vmap.as_text()
    found, expected = (one.compile()(w, (a, g), mask).value.reshape(-1) for one in (run, vmap))
    oracle = oracles.clip_rows(rows, clip_norm).sum(axis=0)
    return (np.asarray(x, np.float64) / clip_norm for x in (found, expected, oracle))


def assert_no_example_is_lost_or_counted_twice(sums, n):
    """A clipped example that is lost or counted twice moves the sum by the clip norm.

    The bound on rounding takes at most 10⁻⁴ of an example; the errors point in all directions.
    """
    found, expected, oracle = sums
    for other in (expected, oracle):
        assert np.linalg.norm(found - other) <= 1e-4 * np.sqrt(n)


def test_a_full_batch_is_weighted_a_few_examples_at_a_time():
    """The batch has 1,501 examples, of which 660 fit into the cache; the last chunk has 181."""
    n, few = 1501, leaves.examples_in_cache(2 * (784 + 10))
    assert 0 < n % few < few < n / 2
    sums = clipped_sums(ROW, n, masked=[0, few - 1, few, n - few, n - few + 1, n - 1])
    assert_no_example_is_lost_or_counted_twice(sums, n)


@pytest.mark.parametrize("few", [4, *slow(1, 10)])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_weighting_a_few_of_eleven_examples_at_a_time_changes_nothing(monkeypatch, case, few):
    """With 4 and 10 at a time, the last chunk reads examples that were already counted."""
    monkeypatch.setattr(leaves, "examples_in_cache", lambda floats: few)
    assert_no_example_is_lost_or_counted_twice(clipped_sums(case, 11, masked=[2, 8]), 11)
