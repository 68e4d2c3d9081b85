"""A view names exactly those entries of a parameter that a weight consists of."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_lsdp.clipping.bookkeeping import _uses
from optax_lsdp.clipping.bookkeeping._uses import are_disjoint, derived, parameter

SHAPE = (4, 6, 5)
VIEWS = {
    "whole": lambda w: w,
    "cast": lambda w: w.astype(jnp.bfloat16),
    "transposed": lambda w: w.transpose(2, 0, 1),
    "reshaped": lambda w: w.reshape(2, 12, 5),
    "transposed, split": lambda w: w.transpose(1, 0, 2).reshape(3, 2, 2, 2, 5),
    "first rows": lambda w: w[:2],
    "last rows": lambda w: w[2:],
    "even columns": lambda w: w[:, ::2],
    "odd columns": lambda w: w[:, 1::2].reshape(-1, 5),
    "row and axis": lambda w: w[1][None, :, :, None],
    "corner": lambda w: w[2:, :3, 1:4:2].transpose(1, 2, 0),
    "one entry": lambda w: w[3, 5, 4],
}
NO_VIEWS = {
    "repeated": lambda w: jnp.broadcast_to(w[None], (2, *SHAPE)),
    "transposed, then merged": lambda w: w.transpose(1, 0, 2).reshape(24, 5),
    "changed": lambda w: jnp.sin(w),
}


def entries_of(function):
    """Return the view of the entries that `function` takes from a parameter of shape SHAPE."""
    jaxpr = jax.make_jaxpr(function)(jnp.zeros(SHAPE)).jaxpr
    known = dict(zip(jaxpr.invars, [parameter(0, SHAPE)], strict=True))
    for equation in jaxpr.eqns:
        inputs = [known[atom] for atom in equation.invars]
        known |= zip(equation.outvars, derived(equation, inputs), strict=True)
    return known[jaxpr.outvars[0]].entries


def indices_of(entries, base):
    """Return the index of each entry, from addresses: the bytes of a parameter are its entries."""
    places = np.indices(entries.shape).reshape(entries.ndim, entries.size)
    steps = np.array(entries.strides, int) @ places if entries.ndim else np.zeros(1, int)
    return (entries.ctypes.data - base.ctypes.data + steps).reshape(entries.shape)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_names_the_entries_that_the_operations_take(name):
    entries = entries_of(VIEWS[name])
    base = entries if entries.base is None else entries.base
    numbered = jnp.arange(np.prod(SHAPE), dtype=jnp.float32).reshape(SHAPE)
    np.testing.assert_array_equal(indices_of(entries, base), VIEWS[name](numbered))


@pytest.mark.parametrize("name", NO_VIEWS)
def test_what_repeats_moves_or_changes_entries_is_no_view(name):
    assert entries_of(NO_VIEWS[name]) is None


def test_views_are_disjoint_if_no_entry_is_in_both():
    whole = parameter(0, SHAPE).entries
    cuts = [slice(None), slice(0, 2), slice(2, None), slice(1, 4, 2), slice(0, 4, 2)]
    views = [whole[cut] for cut in itertools.product(cuts, cuts[:4], cuts[:3])]
    sets = [set(indices_of(view, whole).ravel()) for view in views]
    for (a, one), (b, other) in itertools.combinations(zip(views, sets, strict=True), 2):
        assert are_disjoint(a, b) == one.isdisjoint(other)


def test_views_that_are_too_hard_to_compare_may_share_entries(monkeypatch):
    whole = parameter(0, (60, 60, 60)).entries
    views = whole[8:41:7, 8:49:6, 6:51:7], whole[7:34:4, 6:55:6, 3:39:5]
    assert are_disjoint(*views)
    monkeypatch.setattr(_uses, "_WORK", 1)
    assert not are_disjoint(*views)
