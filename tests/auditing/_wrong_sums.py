"""Bugs in the clipping of the library itself, each a patch of one internal function."""

import inspect
import textwrap
from contextlib import contextmanager
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp

from optax_lsdp import _isolation, _mesh, _trees
from optax_lsdp.clipping import _factors, _grad, _microbatch, _transform, _vmap
from optax_lsdp.clipping.bookkeeping import _conv, _engine, _grams, _norms, _plan, _sites
from optax_lsdp.discrete import _quantized

Squares = _grams.Squares


def replaced(target, name, new):
    """Return a patch of one name of a module, class or dictionary."""
    return partial(mock.patch.object, target, name, new)


def wrapped(target, name, wrapper):
    """Return a patch by `wrapper(original, *args, **options)`."""
    return replaced(target, name, partial(wrapper, getattr(target, name)))


def rewritten(module, name, old, new, *places):
    """Return a patch of a function with some of its text replaced, wherever it was imported."""

    @contextmanager
    def patch():
        source = textwrap.dedent(inspect.getsource(getattr(module, name)))
        assert source.count(old) == 1, f"{name} has changed: {old!r} is in it {source.count(old)}x"
        scope = dict(vars(module))
        exec("from __future__ import annotations\n" + source.replace(old, new), scope)
        patches = [mock.patch.object(place, name, scope[name]) for place in (module, *places)]
        for one in patches:
            one.start()
        try:
            yield
        finally:
            for one in patches:
                one.stop()

    return patch


def engines(change):
    """Return a patch of both engines: `change(run, params, batch, mask, groups)`."""

    def around(engine, loss_fn, params, batch, mask, *, groups, style):
        def run(batch, mask, groups):
            return engine(loss_fn, params, batch, mask, groups=groups, style=style)

        return change(run, batch, mask, groups)

    changed = {name: partial(around, engine) for name, engine in _grad._ENGINES.items()}
    return partial(mock.patch.dict, _grad._ENGINES, changed)


def _first_two_leaves(row_norms, leaves):
    return row_norms(leaves[:2])


def _first_two_squares(group_squares, squares, groups, zero):
    seen, kept = {}, {}
    for index, group in enumerate(groups):
        seen[group.path] = seen.get(group.path, 0) + (index in squares)
        if index in squares and seen[group.path] <= 2:
            kept[index] = squares[index]
    return group_squares(kept, groups, zero)


def _norms_in_half(row_norms, leaves):
    del row_norms
    rows = [x.astype(jnp.bfloat16).reshape(len(x), -1) for x in leaves]
    return jnp.sqrt(sum(jnp.sum(x * x, axis=1) for x in rows)).astype(jnp.float32)


def _squares_in_half(squared_norms, parts):
    values, slack = squared_norms(parts)
    return Squares(values.astype(jnp.bfloat16).astype(values.dtype), slack)


def _without_slack(squared_norms, parts):
    values, slack = squared_norms(parts)
    return Squares(values, jnp.zeros_like(slack))


def _tokens_once(inner, u, v):
    same, roundings = inner(u, v)
    if u is v and jnp.issubdtype(u.dtype, jnp.integer):
        same = same * jnp.eye(u.shape[-1], dtype=same.dtype)
    return same, roundings


def _each_use_apart(disjoint_parts, pieces):
    parts = disjoint_parts(pieces)
    return None if parts is None else tuple((use,) for part in parts for use in part)


def _nothing(function, *args):
    return jax.tree.map(jnp.zeros_like, function(*args))


def _ones(clip_factors, norms, *args, **options):
    return jnp.ones_like(clip_factors(norms, *args, **options))


def _mixed_up(run, batch, mask, groups):
    swapped = {group.path: norm for group, norm in zip(groups, _reversed(groups), strict=True)}
    return run(batch, mask, [group._replace(clip_norm=swapped[group.path]) for group in groups])


def _reversed(groups):
    norms = list(dict(groups).values())
    places = list(dict(groups))
    return [norms[::-1][places.index(group.path)] for group in groups]


def _divided(run, batch, mask, groups):
    outputs, norms, total = run(batch, mask, groups)
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    return outputs, norms, jax.tree.map(lambda x: x / count.astype(x.dtype), total)


def _by_the_loudest(run, batch, mask, groups):
    outputs, norms, total = run(batch, mask, groups)
    odd = jnp.stack([(~jnp.isfinite(x) & mask).any() for x in norms.values()]).any()
    factor = jnp.where(odd, 1.0, 0.998).astype(jnp.float32)
    return outputs, norms, jax.tree.map(lambda x: x * factor.astype(x.dtype), total)


def _unmasked(run, batch, mask, groups):
    return run(batch, jnp.ones_like(mask), groups)


def _unmasked_on_devices(run, batch, mask, groups):
    return run(batch, jnp.ones_like(mask) if _mesh.manual_axes() else mask, groups)


@contextmanager
def _kept_clip_norms():
    with (
        mock.patch.object(_grad, "frozen_clip_norm", lambda clip_norm: clip_norm),
        mock.patch.object(_transform, "frozen_clip_norm", lambda clip_norm: clip_norm),
    ):
        yield


def _part_by_part(clip_and_sum, *args, split=None, **options):
    return clip_and_sum(*args, **options)


def _without_its_mask(clip_and_sum, *args, mask=None, **options):
    return clip_and_sum(*args, **options)


BOOK, VMAP = (f"clipping of hard models, engine {e!r}" for e in ("bookkeeping", "vmap"))
MICRO, SEARCH = "clipping in microbatches", "sensitivity of clipping, engine 'bookkeeping'"
CANCEL = "clipping of rows that cancel"
SHARDS, GRID = "collectives on several devices", "sums on a grid"
_squared = partial(rewritten, _grams, "_squared_norms")
# name → (patch, the audit that must reject, the hard models that show it)
WRONG_SUMS = {
    "a norm without the third leaf": (
        wrapped(_factors, "row_norms", _first_two_leaves),
        VMAP,
        ("scanned",),
    ),
    "a norm without the third leaf, bookkeeping": (
        wrapped(_engine, "group_squares", _first_two_squares),
        BOOK,
        ("scanned", "small"),
    ),
    "cross terms counted once": (_squared("1 if i == j else 2", "1"), BOOK, ("tied",)),
    "no cross terms of tied weights": (
        wrapped(_plan, "_disjoint_parts", _each_use_apart),
        BOOK,
        ("tied",),
    ),
    "overlapping views taken for disjoint": (
        replaced(_plan, "are_disjoint", lambda a, b: True),
        BOOK,
        ("sliced",),
    ),
    "the first block of a scan alone": (
        _squared("Squares(jnp.sum(total, axis=-1),", "Squares(total[..., 0],"),
        BOOK,
        ("scanned",),
    ),
    "norms in half precision": (wrapped(_factors, "row_norms", _norms_in_half), VMAP, ("dense",)),
    "squares in half precision": (
        wrapped(_engine, "squared_norms", _squares_in_half),
        BOOK,
        ("tied",),
    ),
    "rounding slack dropped": (
        wrapped(_engine, "squared_norms", _without_slack),
        CANCEL,
        ("cancelling",),
    ),
    "tokens that come twice counted once": (
        wrapped(_grams, "_inner", _tokens_once),
        BOOK,
        ("gathered",),
    ),
    "padding of a convolution on the wrong side": (
        rewritten(_conv, "patches", "((low, high, d - 1)", "((high, low, d - 1)"),
        BOOK,
        ("convolved",),
    ),
    "biases left out of the norm": (wrapped(_engine, "row_squares", _nothing), BOOK, ("dense",)),
    "a clip factor that ignores the norm": (
        wrapped(_norms, "clip_factors", _ones),
        SEARCH,
        ("dense",),
    ),
    "the same, every gradient formed": (
        wrapped(_factors, "clip_factors", _ones),
        "sensitivity of clipping, engine 'vmap'",
        (),
    ),
    "a mask that is forgotten on several devices": (
        engines(_unmasked_on_devices),
        "clipping on several devices",
        (),
    ),
    "split parameters clipped part by part": (
        wrapped(_vmap, "clip_and_sum", _part_by_part),
        "parameters split over devices",
        (),
    ),
    "a mask beside stacked gradients that is ignored": (
        wrapped(_transform, "clip_and_sum", _without_its_mask),
        "likely mistakes",
        (),
    ),
    "a dict of clip norms that is kept": (
        _kept_clip_norms,
        "likely mistakes",
        (),
    ),
    "a carry that is taken for unused": (
        rewritten(
            _sites,
            "_walk_scan",
            "changed += [w for w, same in zip(results",
            "[w for w, same in zip(results",
        ),
        BOOK,
        ("carried",),
    ),
    "collectives over an axis of vmap that are taken": (
        replaced(_isolation, "_axis_names", lambda equation: set()),
        "likely mistakes",
        (),
    ),
    "clip norms of groups mixed up": (engines(_mixed_up), BOOK, ("dense", "tied")),
    "automatic clipping without its constant": (
        replaced(_factors, "STABILITY", 0.0),
        MICRO,
        ("dense",),
    ),
    "an overlap of microbatches counted twice": (
        rewritten(_microbatch, "in_microbatches", "window(known) & fresh", "window(known)", _grad),
        MICRO,
        ("dense",),
    ),
    "a mask that is forgotten": (engines(_unmasked), BOOK, ("dense",)),
    "division by the number of examples that came": (engines(_divided), BOOK, ("dense",)),
    "an odd example that changes how others are clipped": (
        engines(_by_the_loudest),
        BOOK,
        ("dense",),
    ),
    "NaN that is kept": (
        replaced(
            _factors,
            "_weighted_sum",
            lambda rows, factors: jnp.einsum("n...,n->...", _trees.widen(rows), factors),
        ),
        VMAP,
        ("dense",),
    ),
    "a grid whose norms ignore the third leaf": (
        wrapped(_quantized, "row_norms", _first_two_leaves),
        GRID,
        (),
    ),
    "collectives that are not refused": (
        replaced(_isolation, "_check_no_collective", lambda equation, axes: None),
        SHARDS,
        (),
    ),
}
