"""The table of bugs in clipping: for each bug, the audit that must reject it, and where it is."""

from functools import partial

import jax
import jax.numpy as jnp

from optax_lsdp import _mesh, _trees
from tests.auditing._patches import Mutation, Patch, replace, rewrite, wrap

CLIPPING, BOOKKEEPING = "optax_lsdp.clipping", "optax_lsdp.clipping.bookkeeping"


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
    squares = squared_norms(parts)
    values, slack = squares
    return type(squares)(values.astype(jnp.bfloat16).astype(values.dtype), slack)


def _without_slack(squared_norms, parts):
    squares = squared_norms(parts)
    values, slack = squares
    return type(squares)(values, jnp.zeros_like(slack))


def _tokens_once(inner, u, v):
    same, roundings = inner(u, v)
    if u is v and jnp.issubdtype(u.dtype, jnp.integer):
        same = same * jnp.eye(u.shape[-1], dtype=same.dtype)
    return same, roundings


def _each_use_apart(disjoint_parts, pieces):
    parts = disjoint_parts(pieces)
    return None if parts is None else tuple((use,) for part in parts for use in part)


def _zeros(function, *args):
    return jax.tree.map(jnp.zeros_like, function(*args))


def _ones(clip_factors, norms, *args, **options):
    return jnp.ones_like(clip_factors(norms, *args, **options))


def _unchecked_sum(weighted_sum, rows, factors):
    return jnp.einsum("n...,n->...", _trees.widen(rows), factors)


def engines(change):
    """Patch both engines: `change(run, batch, mask, groups)` in place of `run(...)`."""

    def around(engine, loss_fn, params, batch, mask, *, groups, style):
        def run(batch, mask, groups):
            return engine(loss_fn, params, batch, mask, groups=groups, style=style)

        return change(run, batch, mask, groups)

    def wrap_all(table):
        return {name: partial(around, engine) for name, engine in table.items()}

    return Patch(f"{CLIPPING}._grad:_ENGINES", wrap_all)


def _swapped_clip_norms(run, batch, mask, groups):
    """Give the first group the clip norm of the last one, and so on."""
    clip_norms = dict(groups)
    swapped = dict(zip(clip_norms, reversed(clip_norms.values()), strict=True))
    return run(batch, mask, [group._replace(clip_norm=swapped[group.path]) for group in groups])


def _divided(run, batch, mask, groups):
    outputs, norms, total = run(batch, mask, groups)
    count = jnp.maximum(mask.sum(), 1).astype(jnp.float32)
    return outputs, norms, jax.tree.map(lambda x: x / count.astype(x.dtype), total)


def _less_without_odd_examples(run, batch, mask, groups):
    outputs, norms, total = run(batch, mask, groups)
    odd = jnp.stack([(~jnp.isfinite(x) & mask).any() for x in norms.values()]).any()
    factor = jnp.where(odd, 1.0, 0.998).astype(jnp.float32)
    return outputs, norms, jax.tree.map(lambda x: x * factor.astype(x.dtype), total)


def _unmasked(run, batch, mask, groups):
    return run(batch, jnp.ones_like(mask), groups)


def _unmasked_on_devices(run, batch, mask, groups):
    return run(batch, jnp.ones_like(mask) if _mesh.manual_axes() else mask, groups)


def _without_split(clip_and_sum, *args, split=None, **options):
    return clip_and_sum(*args, **options)


def _without_mask(clip_and_sum, *args, mask=None, **options):
    return clip_and_sum(*args, **options)


BY_BOOKKEEPING, BY_VMAP = (
    f"clipping of hard models, engine {engine!r}" for engine in ("bookkeeping", "vmap")
)
MICROBATCHES, MISTAKES = "clipping in microbatches", "likely mistakes"
MUTATIONS_OF_CLIPPING = {
    "a norm without the third leaf": Mutation(
        BY_VMAP, (wrap(f"{CLIPPING}._clip_norm:row_norms", _first_two_leaves),), ("scanned",)
    ),
    "a norm without the third leaf, engine 'bookkeeping'": Mutation(
        BY_BOOKKEEPING,
        (wrap(f"{BOOKKEEPING}._engine:group_squares", _first_two_squares),),
        ("scanned", "small"),
    ),
    "cross terms counted once": Mutation(
        BY_BOOKKEEPING,
        rewrite(f"{BOOKKEEPING}._gram:_squared_norms", "1 if i == j else 2", "1"),
        ("tied",),
    ),
    "no cross terms of tied weights": Mutation(
        BY_BOOKKEEPING,
        (wrap(f"{BOOKKEEPING}._strategy:_disjoint_parts", _each_use_apart),),
        ("tied",),
    ),
    "overlapping views taken for disjoint": Mutation(
        BY_BOOKKEEPING,
        (replace(f"{BOOKKEEPING}._strategy:are_disjoint", lambda one, other: True),),
        ("sliced",),
    ),
    "only the first block of a scan counted": Mutation(
        BY_BOOKKEEPING,
        rewrite(
            f"{BOOKKEEPING}._gram:_squared_norms",
            "Squares(jnp.sum(total, axis=-1),",
            "Squares(total[..., 0],",
        ),
        ("scanned",),
    ),
    "norms in half precision": Mutation(
        BY_VMAP, (wrap(f"{CLIPPING}._clip_norm:row_norms", _norms_in_half),), ("dense",)
    ),
    "squared norms in half precision": Mutation(
        BY_BOOKKEEPING,
        (wrap(f"{BOOKKEEPING}._engine:squared_norms", _squares_in_half),),
        ("tied",),
    ),
    "rounding slack dropped": Mutation(
        "clipping of cancelling rows",
        (wrap(f"{BOOKKEEPING}._engine:squared_norms", _without_slack),),
        ("cancelling",),
    ),
    "repeated tokens counted once": Mutation(
        BY_BOOKKEEPING, (wrap(f"{BOOKKEEPING}._gram:_inner", _tokens_once),), ("gathered",)
    ),
    "padding of a convolution on the wrong side": Mutation(
        BY_BOOKKEEPING,
        rewrite(f"{BOOKKEEPING}._rules:patches", "((low, high, d - 1)", "((high, low, d - 1)"),
        ("convolved",),
    ),
    "biases missing from the norm": Mutation(
        BY_BOOKKEEPING, (wrap(f"{BOOKKEEPING}._engine:row_squares", _zeros),), ("dense",)
    ),
    "a carry taken for unused": Mutation(
        BY_BOOKKEEPING,
        rewrite(
            f"{BOOKKEEPING}._uses:_walk_scan",
            "changed += [w for w, same in zip(results",
            "[w for w, same in zip(results",
        ),
        ("carried",),
    ),
    "clip factors that ignore the norm": Mutation(
        "clipping by search, engine 'bookkeeping'",
        (wrap(f"{BOOKKEEPING}._engine:clip_factors", _ones),),
    ),
    "clip factors that ignore the norm, engine 'vmap'": Mutation(
        "clipping by search, engine 'vmap'", (wrap(f"{CLIPPING}._clip_norm:clip_factors", _ones),)
    ),
    "clip norms of groups swapped": Mutation(
        BY_BOOKKEEPING, (engines(_swapped_clip_norms),), ("dense", "tied")
    ),
    "a mask that is ignored": Mutation(BY_BOOKKEEPING, (engines(_unmasked),), ("dense",)),
    "a mask that is ignored on several devices": Mutation(
        "clipping on several devices", (engines(_unmasked_on_devices),)
    ),
    "a mask of stacked gradients that is ignored": Mutation(
        MISTAKES, (wrap(f"{CLIPPING}._transform:clip_and_sum", _without_mask),)
    ),
    "split parameters clipped part by part": Mutation(
        "parameters split over devices", (wrap(f"{CLIPPING}._vmap:clip_and_sum", _without_split),)
    ),
    "division by the realised batch size": Mutation(
        BY_BOOKKEEPING, (engines(_divided),), ("dense",)
    ),
    "an odd example that changes how others are clipped": Mutation(
        BY_BOOKKEEPING, (engines(_less_without_odd_examples),), ("dense",)
    ),
    "a NaN gradient that is kept": Mutation(
        BY_VMAP, (wrap(f"{CLIPPING}._clip_norm:_weighted_sum", _unchecked_sum),), ("dense",)
    ),
    "automatic clipping without its constant": Mutation(
        MICROBATCHES, (replace(f"{CLIPPING}._clip_norm:STABILITY", 0.0),), ("dense",)
    ),
    "overlapping microbatches counted twice": Mutation(
        MICROBATCHES,
        rewrite(
            f"{CLIPPING}._microbatch:in_microbatches",
            "window(given_mask) & is_new",
            "window(given_mask)",
            f"{CLIPPING}._grad",
        ),
        ("dense",),
    ),
    "a dict of clip norms that is not copied": Mutation(
        MISTAKES,
        rewrite(
            f"{CLIPPING}._clip_norm:checked_clip_norm",
            "jax.tree.map(lambda norm: norm, clip_norm)",
            "clip_norm",
            f"{CLIPPING}._grad",
            f"{CLIPPING}._transform",
        ),
    ),
    "collectives over an axis of vmap accepted": Mutation(
        MISTAKES, (replace("optax_lsdp._isolation:_axis_names", lambda equation: set()),)
    ),
    "collectives over devices accepted": Mutation(
        "collectives on several devices",
        (replace("optax_lsdp._isolation:_check_no_collective", lambda equation, axes: None),),
    ),
    "a quantized sum whose norms ignore the third leaf": Mutation(
        "quantized sums", (wrap("optax_lsdp.discrete._quantized:row_norms", _first_two_leaves),)
    ),
}
