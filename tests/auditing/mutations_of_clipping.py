"""The table of bugs in clipping: for each bug, the audit that must reject it, and where it is."""

from functools import partial

import jax
import jax.numpy as jnp

from optax_lsdp import _mesh, _trees
from tests.auditing._patches import Mutation, Patch, replace, rewrite, wrap

CLIPPING, BOOKKEEPING = "optax_lsdp.clipping", "optax_lsdp.clipping.bookkeeping"
STRATEGIES = f"{BOOKKEEPING}.strategies"


def _first_two_leaves(row_norms, leaves):
    return row_norms(leaves[:2])


def _first_two_bounds(joint_bound, bounds, platform):
    return joint_bound(bounds[:2], platform)


def _norms_in_half(row_norms, leaves):
    del row_norms
    rows = [x.astype(jnp.bfloat16).reshape(len(x), -1) for x in leaves]
    return jnp.sqrt(sum(jnp.sum(x * x, axis=1) for x in rows)).astype(jnp.float32)


def _bounds_in_half(bound_by_grams, *args):
    bound = bound_by_grams(*args)
    return type(bound)(*(x.astype(jnp.bfloat16).astype(x.dtype) for x in bound))


def _first_block(joint_bound, bounds, platform):
    return joint_bound([type(bound)(*(x[:, :1] for x in bound)) for bound in bounds], platform)


def _tokens_once(inner, u, v, platform):
    same, roundings = inner(u, v, platform)
    if u is v and jnp.issubdtype(u.dtype, jnp.integer):
        same = same * jnp.eye(u.shape[-1], dtype=same.dtype)
    return same, roundings


def _each_use_apart(disjoint_parts, pieces):
    parts = disjoint_parts(pieces)
    return None if parts is None else tuple((use,) for part in parts for use in part)


def _all_but_first(seen, *args):
    return list(seen(*args))[1:]


def _other_side(padded):
    def swapped(move, *sizes):
        low, high, interior = padded(move, *sizes)
        return high, low, interior

    return swapped


def _without_rounding(outer_bound, terms, platform):
    known = outer_bound(terms, platform)
    return known._replace(rounding=jnp.zeros_like(known.rounding))


def _first_for_all(to_leaves, use, leaf, rounded, gradient):
    parts = to_leaves(use, leaf, rounded, gradient)
    return dict.fromkeys(parts, parts[leaf.indices[0]])


def _zeros(function, *args):
    return jax.tree.map(jnp.zeros_like, function(*args))


def _halved(weighting_error):
    return lambda platform, *operands: weighting_error(platform, *operands) / 2


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

    return Patch(f"{CLIPPING}._engines:ENGINES", wrap_all)


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
ON_TPU = "clipping of hard models, rounded as on a TPU"
MICROBATCHES, MISTAKES = "clipping in microbatches", "likely mistakes"
MUTATIONS_OF_CLIPPING = {
    "a norm without the third leaf": Mutation(
        BY_VMAP, (wrap(f"{CLIPPING}._clip_norm:row_norms", _first_two_leaves),), ("scanned",)
    ),
    "a norm without the third leaf, engine 'bookkeeping'": Mutation(
        BY_BOOKKEEPING,
        (wrap(f"{BOOKKEEPING}._engine:joint_bound", _first_two_bounds),),
        ("scanned", "small"),
    ),
    "cross terms counted once": Mutation(
        BY_BOOKKEEPING,
        rewrite(f"{STRATEGIES}.bounds:bound_by_grams", "2 if gram.weighting is None else 1", "1"),
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
        (wrap(f"{BOOKKEEPING}._engine:joint_bound", _first_block),),
        ("scanned",),
    ),
    "norms in half precision": Mutation(
        BY_VMAP, (wrap(f"{CLIPPING}._clip_norm:row_norms", _norms_in_half),), ("dense",)
    ),
    "bounds on norms in half precision": Mutation(
        BY_BOOKKEEPING,
        (wrap(f"{STRATEGIES}.bounds:bound_by_grams", _bounds_in_half),),
        ("tied",),
    ),
    "rounding slack dropped": Mutation(
        "clipping of cancelling rows",
        rewrite(f"{STRATEGIES}.bounds:bound_by_grams", "root(total + slack, ", "root(total, "),
        ("cancelling",),
    ),
    "repeated tokens counted once": Mutation(
        BY_BOOKKEEPING, (wrap(f"{STRATEGIES}.bounds:_inner", _tokens_once),), ("gathered",)
    ),
    "padding of a convolution on the wrong side": Mutation(
        BY_BOOKKEEPING,
        rewrite(f"{BOOKKEEPING}._rules:patches", "((low, high, d - 1)", "((high, low, d - 1)"),
        ("convolved",),
    ),
    "biases missing from the norm": Mutation(
        BY_BOOKKEEPING, (wrap(f"{STRATEGIES}.leaves:kept_bound", _zeros),), ("dense",)
    ),
    "padding of a convolution on the wrong side, without patches": Mutation(
        ON_TPU,
        rewrite(
            f"{BOOKKEEPING}._rules:movements",
            "[low for low, _ in",
            "[high for _, high in",
            f"{STRATEGIES}.convolution",
        ),
        ("many positions",),
    ),
    "padding of patches on the wrong side": Mutation(
        ON_TPU,
        rewrite(
            f"{STRATEGIES}.convolution:_patches",
            'params["padding"]',
            '[edge[::-1] for edge in params["padding"]]',
        ),
        ("few channels",),
    ),
    "padding of Gram matrices of patches on the wrong side": Mutation(
        ON_TPU,
        (Patch(f"{BOOKKEEPING}._rules:Movement.padded", _other_side),),
        ("few positions of many channels",),
    ),
    "the first offset of a window left out": Mutation(
        ON_TPU,
        (wrap(f"{STRATEGIES}.convolution:_seen", _all_but_first),),
        ("many positions",),
    ),
    "the first offset of a window left out of Gram matrices": Mutation(
        ON_TPU,
        (wrap(f"{STRATEGIES}.convolution:_seen", _all_but_first),),
        ("few positions of many channels",),
    ),
    "a norm with the products of neighbouring examples": Mutation(
        ON_TPU,
        rewrite(
            f"{STRATEGIES}.convolution:_product",
            "jnp.where(rows[:, None] == columns, formed, jnp.zeros_like(formed))",
            "formed",
        ),
        ("many positions",),
    ),
    "the norm of one of several leaves of equal shape": Mutation(
        ON_TPU,
        rewrite(
            f"{STRATEGIES}.bounds:lengths",
            "squares[x.shape] + y if x.shape in squares else y",
            "y",
        ),
        ("small",),
    ),
    "half of the unit roundoff of weighted rows": Mutation(
        ON_TPU,
        (Patch(f"{BOOKKEEPING}._platforms:Platform.weighting_error", _halved),),
        ("constant row", "constant rows"),
    ),
    "weighted rows whose rounding is not in the bound": Mutation(
        ON_TPU,
        (replace(f"{STRATEGIES}.bounds:_weighting", lambda term, platform: (0.0, 0.0)),),
        ("constant rows",),
    ),
    "a weighted outer product whose rounding is not in the bound": Mutation(
        ON_TPU,
        (wrap(f"{STRATEGIES}.leaves:outer_bound", _without_rounding),),
        ("constant row",),
    ),
    "the reach of rows, as if they were orthogonal": Mutation(
        BY_BOOKKEEPING,
        rewrite(
            f"{STRATEGIES}.bounds:bound_by_grams", "along = jnp.sum(", "along = jnp.linalg.norm("
        ),
        ("constant rows",),
    ),
    "the operand of a masked example, which is NaN, not replaced": Mutation(
        BY_BOOKKEEPING,
        (replace(f"{STRATEGIES}.leaves:select", lambda x, factors: x),),
        ("dense",),
    ),
    "the image of a masked example, which is NaN, not replaced": Mutation(
        ON_TPU,
        rewrite(
            f"{STRATEGIES}.convolution:convolution_sum",
            "jnp.where(jnp.isfinite(image), image, jnp.zeros_like(image))",
            "image",
        ),
        ("convolved",),
    ),
    "the first part of a sum for all leaves that are concatenated": Mutation(
        BY_BOOKKEEPING,
        (wrap(f"{STRATEGIES}.leaves:to_leaves", _first_for_all),),
        ("concatenated",),
    ),
    "one slack coordinate too many": Mutation(
        "clipping by search, engine 'vmap'",
        rewrite(
            f"{CLIPPING}._slack:count_slack",
            "room[:, None] >= places",
            "room[:, None] + 1 >= places",
            f"{CLIPPING}._grad",
        ),
    ),
    "a sum in units of the clip norm": Mutation(
        BY_BOOKKEEPING,
        rewrite(
            f"{BOOKKEEPING}._engine:clip_recorded",
            "total / jnp.asarray(scale, total.dtype)",
            "total",
        ),
        ("dense",),
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
        "parameters split over devices",
        (wrap(f"{CLIPPING}._engines:clip_and_sum", _without_split),),
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
            f"{CLIPPING}._engines:in_microbatches",
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
