"""Compute norms and weighted sums of gradients from their factors, without forming gradients.

All strategies use the rounded arrays of `round_recorded`, for norms and for sums. The gradient that
the rounded arrays define depends only on its own example, so clipping it is as private as clipping
the exact gradient. This module also maps the gradient of a weight back to the leaves, through
scans, views and concatenations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._jaxpr import shape_of
from optax_lsdp._mesh import is_multi_device_mesh, vary, varying_axes
from optax_lsdp._trees import compute_once, wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._backward import Recorded
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._strategy import Kind, Leaf
from optax_lsdp.clipping.bookkeeping._uses import Path, Use, Weight
from optax_lsdp.clipping.bookkeeping.strategies.bounds import (
    Factors,
    NormBound,
    gram_bound,
    is_one_hot,
    outer_bound,
)

_CACHE_FLOATS = 2**20  # 4 MiB, which fit into a CPU's cache


class Rounded(NamedTuple):
    """The rounded operands and cotangents of all uses, with a leading axis of examples.

    Attributes:
        pairs: the factors a and g of each use. Each scan around the use adds an axis after that of
            the examples. If a rule has factors that are larger than the operand, such as patches,
            `pairs` holds the operand and the cotangent instead. Each g or cotangent is multiplied
            by `scale_of` the use.
        gradients: for each leaf with uses that have no rule, the gradient from those uses,
            multiplied by the scale of the leaf.
        scales: for each leaf, the power of two nearest to 1/C. Multiplied by it, clip norms are
            near 1, so that squares neither overflow nor underflow.
        leaves: the parameters themselves.
        platform: the kind of device that all arrays are rounded for.
    """

    pairs: dict[Path, tuple[jax.Array, jax.Array]]
    gradients: dict[int, jax.Array]
    scales: Sequence[ArrayLike]
    leaves: Sequence[jax.Array]
    platform: Platform


def round_recorded(
    recorded: Recorded,
    leaves: Sequence[jax.Array],
    uses: Mapping[Path, Use],
    groups: Sequence[ClipGroup],
    platform: Platform,
) -> Rounded:
    """Round all recorded arrays, and multiply cotangents and gradients by their scales."""
    by_group = {path: _scale(clip_norm) for path, clip_norm in groups}
    scales = [by_group[path] for path, _ in groups]
    pairs, known = {}, dict[object, jax.Array]()
    for path, use in uses.items():
        a, g = recorded.operands[use.operand], recorded.cotangents[path]
        g = _scaled(g, scales[min(use.weight.leaves)])
        if not use.rule.expands:
            a, g = _apply_rule(use, a, g)
        if wide_dtype(a, g) == jnp.float64 and not use.rule.is_one_hot:
            a, g = a.astype(jnp.float64), g.astype(jnp.float64)  # bounds assume one precision
        key = use.operand, use.rule.operand_key(use.equation, use.place), a.dtype
        if key not in known:  # uses of one operand share its rounded copy
            known[key] = _round_once(a, platform)
        pairs[path] = known[key], _round_once(g, platform)
    gradients = {
        i: compute_once(_scaled(widen(x), scales[i])) for i, x in recorded.gradients.items()
    }
    return Rounded(pairs, gradients, scales, leaves, platform)


def _round_once(x: jax.Array, platform: Platform) -> jax.Array:
    """Return a rounded array that XLA computes once, so that norms and sums use equal numbers.

    Axes of length 1 are removed before the rounding and restored after it. On a TPU, they would
    keep XLA from fusing the rounding with the product that computes x.
    """
    dense = x.reshape(x.shape[0], *(size for size in x.shape[1:] if size != 1))
    return compute_once(platform.rounded(dense)).reshape(x.shape)


def _scale(clip_norm: ArrayLike) -> ArrayLike:
    """Return the power of two nearest to 1/C; C may be traced."""
    if isinstance(clip_norm, int | float):
        return 2.0 ** -round(math.log2(clip_norm))
    inverse = 1 / jnp.asarray(clip_norm)
    bits = 11 if inverse.dtype == jnp.float64 else 8
    return lax.reduce_precision(inverse, exponent_bits=bits, mantissa_bits=0)


def _scaled(x: jax.Array, scale: ArrayLike) -> jax.Array:
    """Return x times a power of two, in float32 if x is float16, whose range is too small."""
    if isinstance(scale, float) and scale == 1:
        return x
    x = widen(x) if x.dtype == jnp.float16 else x
    return x * jnp.asarray(scale, x.dtype)


def _apply_rule(use: Use, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factors of a use for all examples and all iterations of scans."""
    factors = partial(use.rule.factors, use.equation, use.place)
    for _ in range(len(use.loops) + 1):
        factors = jax.vmap(factors)
    return factors(a, g)


def use_factors(use: Use, a: jax.Array, g: jax.Array) -> Factors:
    """Return the factors of one use for every example, from its pair in `Rounded`.

    The iterations of a scan that slices the weight become blocks. The iterations of other scans
    become rows.
    """
    if use.rule.expands:
        a, g = _apply_rule(use, a, g)
    sliced = [1 + i for i, loop in enumerate(use.loops) if loop in use.weight.sliced]
    shared = [1 + i for i, loop in enumerate(use.loops) if loop not in use.weight.sliced]
    block, split = 1 + len(use.loops), 2 + len(sliced)
    merged = []
    for x in (a, g):
        x = x.transpose([0, *sliced, block, *shared, *range(block + 1, x.ndim)])
        height = math.prod(x.shape[split : block + 2])
        merged.append(x.reshape(len(x), use.size.blocks, height, *x.shape[block + 2 :]))
    return Factors(*merged)


class ByFactors(NamedTuple):
    """A leaf whose norms are outer products, or come from Gram matrices."""

    leaf: Leaf
    kind: Kind
    rounded: Rounded

    def bounds(self) -> list[NormBound]:
        """Return the bound of each part. Swap a and g of transposed uses."""
        bound, found = outer_bound if self.kind == "outer product" else gram_bound, []
        for part in self.leaf.parts or ():
            pairs = [(use, use_factors(use, *self.rounded.pairs[use.path])) for use in part]
            terms = [Factors(p.g, p.a) if use.is_transposed else p for use, p in pairs]
            found.append(bound(terms, self.rounded.platform))
        return found

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ, by one product per use, as in ordinary training."""
        sums: dict[int, jax.Array] = {}
        for use in self.leaf.uses:
            pair = use_factors(use, *self.rounded.pairs[use.path])
            matrix = weighted_sum(pair, factors, use.size.inputs, self.rounded.platform)
            for index, x in to_leaves(use, self.leaf, self.rounded, to_weight(use, matrix)).items():
                sums[index] = sums[index] + x if index in sums else x
        return sums


def weighted_sum(term: Factors, factors: jax.Array, inputs: int, platform: Platform) -> jax.Array:
    """Return Σᵢ cᵢ Σ_t a_it ⊗ g_it, of shape (blocks, inputs, outputs).

    The operand with shorter rows is multiplied by cᵢ and rounded again. Where cᵢ is 0, zeros
    replace both operands, because 0 · NaN is NaN. On a CPU, this function weights a few examples at
    a time, so that their copies fit into the cache. If the result is large, it weights all examples
    at once: otherwise it would read and write the result for every few examples.
    """
    if is_one_hot(term.a):
        pair = term.a, weigh(term.g, factors)
        ids, added = (x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]) for x in pair)
        return scatter(ids, added, inputs)
    (n, blocks, rows, _), outputs = term.a.shape, term.g.shape[-1]
    few = examples_in_cache(blocks * rows * (inputs + outputs))
    is_large = blocks * inputs * outputs > _CACHE_FLOATS // 4
    if platform is not CPU or is_large or few >= n or is_multi_device_mesh():
        return _weighted_product(term, factors, platform)

    flat = [x.reshape(n, -1) for x in term]  # axes of length 1 would cost a copy

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        start = jnp.minimum(i * few, n - few)  # the last chunk may overlap
        a, g, some = (lax.dynamic_slice_in_dim(x, start, few) for x in (*flat, factors))
        chunk = Factors(a.reshape(few, *term.a.shape[1:]), g.reshape(few, *term.g.shape[1:]))
        is_new = start + jnp.arange(few, dtype=jnp.int32) >= i * few
        return total + _weighted_product(chunk, jnp.where(is_new, some, 0), platform)

    zeros = jnp.zeros((blocks, inputs, outputs), wide_dtype(*term))
    return lax.fori_loop(0, -(-n // few), step, vary(zeros, varying_axes((term, factors))))


def examples_in_cache(floats: int) -> int:
    """Return how many examples, of `floats` floats each, fit into a CPU's cache; at least one."""
    return max(1, _CACHE_FLOATS // max(floats, 1))


def _weighted_product(term: Factors, factors: jax.Array, platform: Platform) -> jax.Array:
    """Return Σᵢ cᵢ Σ_t a_it ⊗ g_it as one product."""
    a, g = term
    if a.shape[-1] < g.shape[-1]:
        a, g = platform.rounded(weigh(a, factors), *term), select(g, factors)
    else:
        a, g = select(a, factors), platform.rounded(weigh(g, factors), *term)
    if platform is CPU and a.shape[-1] > g.shape[-1]:  # fastest with the longer side last
        return platform.product("nbtp,nbtq->bqp", a, g).swapaxes(-1, -2)
    return platform.product("nbtp,nbtq->bpq", a, g)


def weigh(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Return cᵢ·xᵢ for x of shape (n, …), in float32 or wider, with zeros where cᵢ is 0."""
    column = factors.reshape(-1, *[1] * (x.ndim - 1)).astype(wide_dtype(x))
    return jnp.where(column > 0, column * widen(x), jnp.zeros_like(x, wide_dtype(x)))


def select(x: jax.Array, factors: jax.Array) -> jax.Array:
    """Return x, with zeros for the examples i whose factor cᵢ is 0."""
    return jnp.where(factors.reshape(-1, *[1] * (x.ndim - 1)) > 0, x, jnp.zeros_like(x))


def scatter(ids: jax.Array, rows: jax.Array, inputs: int) -> jax.Array:
    """Add row t of `rows` to row `ids[t]` of a matrix of zeros, for each block.

    `ids` has shape (blocks, t), `rows` has shape (blocks, t, outputs), and the result has shape
    (blocks, inputs, outputs). Rows with a negative index are dropped.
    """
    zeros = jnp.zeros((len(ids), inputs, rows.shape[-1]), rows.dtype)
    places = jnp.where(ids >= 0, ids, inputs)  # an index beyond the end is dropped
    return jax.vmap(lambda zeros, places, rows: zeros.at[places].add(rows, mode="drop"))(
        zeros, places, rows
    )


def to_weight(use: Use, gradient: jax.Array) -> jax.Array:
    """Convert (blocks, inputs, outputs) to the shape of the weight, with leading axes of scans."""
    matrix, stack = use.matrix, [loop.length for loop in use.weight.sliced]
    order = (*matrix.blocks, *matrix.inputs, *matrix.outputs)
    sizes = [matrix.split[axis] for axis in order]
    back = [len(stack) + order.index(axis) for axis in range(len(order))]
    return gradient.reshape(*stack, *sizes).transpose([*range(len(stack)), *back])


def to_leaves(use: Use, leaf: Leaf, rounded: Rounded, gradient: jax.Array) -> dict[int, jax.Array]:
    """Map a weight's gradient to the leaves. Argument and result have the scale of `Rounded`."""
    weight, leaves = use.weight, rounded.leaves
    members = [leaves[index] for index in leaf.indices]
    stack = [loop.length for loop in weight.sliced]
    gradient = gradient.reshape(*stack, *shape_of(use.equation.invars[use.place]))
    gradient = gradient.astype(wide_dtype(*members))
    if leaf.parts is not None or weight.entries is not None:
        build = partial(_weight_value, weight, (), leaf.indices, False)
        pulled = jax.linear_transpose(build, *map(widen, members))(gradient)
        return dict(zip(leaf.indices, pulled, strict=True))
    # A derived weight has its dtype, which may be float16: pull its gradient back without a scale.
    build = partial(_weight_value, weight, leaves, leaf.indices, True)
    value, pull = jax.vjp(build, *members)
    unscaled = gradient / jnp.asarray(rounded.scales[min(weight.leaves)], gradient.dtype)
    pulled = map(widen, pull(unscaled.astype(value.dtype)))
    pairs = zip(leaf.indices, pulled, strict=True)
    return {i: x * jnp.asarray(rounded.scales[i], x.dtype) for i, x in pairs}


def _weight_value(
    weight: Weight,
    leaves: Sequence[jax.Array],
    indices: Sequence[int],
    casts: bool,
    *members: jax.Array,
) -> jax.Array:
    """Return the value of a weight if `members` are the leaves at `indices`; see `Weight.value`."""
    return weight.value(dict(enumerate(leaves)) | dict(zip(indices, members, strict=True)), {}, casts)
