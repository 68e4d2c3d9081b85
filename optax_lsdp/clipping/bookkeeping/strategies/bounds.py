"""Bound the gradient norms of examples, and the rounding errors of their weighted sums.

The gradient of one example is G = Σ_t a_t ⊗ g_t, with the rows a_t and g_t of its factors a and g;
see `_rules`. A strategy computes the norm of G. The factors are rounded first, so that a matrix
unit computes exact products and rounds only when it adds; see `_platforms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_lsdp._trees import wide_dtype
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform


class Factors(NamedTuple):
    """The factors of one term Σ_t a_t ⊗ g_t of a gradient, for n examples.

    Attributes:
        a: array of shape (n, blocks, rows, inputs). If the rows are one-hot, a holds the index of
            the 1 in each row instead: integers of shape (n, blocks, rows), −1 for a row of zeros.
        g: array of shape (n, blocks, rows, outputs).
    """

    a: jax.Array
    g: jax.Array


class NormBound(NamedTuple):
    """The norm of each block G of an example's gradient, and bounds: arrays of shape (n, blocks).

    Let c be the example's clip factor, and let c·Ĝ be the contribution of G to the weighted sum,
    including all rounding. The norm of this contribution is at most c·(upper + rounding).

    Attributes:
        norm: the computed ‖G‖.
        upper: an upper bound on ‖G‖.
        rounding: an upper bound on ‖Ĝ − G‖.
    """

    norm: jax.Array
    upper: jax.Array
    rounding: jax.Array


def is_one_hot(rows: jax.Array) -> bool:
    """Return whether an array holds the indices of one-hot rows."""
    return jnp.issubdtype(rows.dtype, jnp.integer)


def joint_bound(bounds: Sequence[NormBound], platform: Platform) -> NormBound:
    """Combine bounds for blocks that share no entry into one bound with arrays of shape (n,).

    Each result is the root of a sum of squares. Both bounds are rounded up. Squares may underflow
    to zero, so this function adds a bound on the lost squares. Otherwise, the bounds would be too
    small for automatic clipping to a huge clip norm.
    """
    dtype = wide_dtype(*(bound.upper for bound in bounds))
    terms = sum(bound.upper.shape[1] for bound in bounds)
    if terms == 1:
        return NormBound(*(x[:, 0] for x in bounds[0]))
    norm, upper, rounding = (
        sum(jnp.sum(jnp.square(x.astype(dtype)), axis=1) for x in items)
        for items in zip(*bounds, strict=True)
    )
    grow, underflow = platform.growth(terms / 2 + 1, dtype), 2 * terms * _tiny(dtype)
    roots = (grow * jnp.sqrt(x + underflow) for x in (upper, rounding))
    return NormBound(jnp.sqrt(norm), *roots)


def _tiny(dtype: jnp.dtype) -> float:
    """Return the smallest normal number. A square that underflows loses less than this."""
    return float(jnp.finfo(dtype).tiny)


def lengths(arrays: Sequence[jax.Array], platform: Platform) -> tuple[jax.Array, jax.Array]:
    """Return the length of each row and an upper bound. Row i joins x[i] of all arrays x.

    Squares in arrays of equal shape are added entry by entry, which needs no copies. Long sums are
    split into parts. The barrier keeps XLA from merging the parts into one long sum, which XLA
    would add up in an unknown order.
    """
    squares: dict[tuple[int, ...], jax.Array] = {}
    dtype = wide_dtype(*arrays)
    for x in arrays:
        y = jnp.square(x.astype(dtype))
        squares[x.shape] = squares[x.shape] + y if x.shape in squares else y
    entries = sum(math.prod(x.shape[1:]) for x in arrays)
    roundings, longest = 1 + len(arrays) - len(squares), platform.longest_sum
    if len(squares) == 1:
        (x,) = squares.values()
    else:
        flat = [x.reshape(len(x), math.prod(x.shape[1:])) for x in squares.values()]
        x = jnp.concatenate(flat, axis=1)
    while math.prod(x.shape[1:]) > longest:
        last = x.shape[-1]
        if last > longest or x.ndim == 2:
            part = next((b for b in range(longest, longest // 4, -1) if last % b == 0), longest)
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -last % part)])
            x = x.reshape(*x.shape[:-1], x.shape[-1] // part, part)
        roundings += x.shape[-1] - 1
        x = lax.optimization_barrier(jnp.sum(x, axis=-1))
    roundings += math.prod(x.shape[1:]) - 1
    total = jnp.sum(x, axis=tuple(range(1, x.ndim)))
    grow = platform.growth(roundings / 2 + 1, total.dtype)
    return jnp.sqrt(total), grow * jnp.sqrt(total + 2 * entries * _tiny(total.dtype))


def root(square: jax.Array, fallback: jax.Array) -> jax.Array:
    """Return √square for a computed square, or `fallback` where the square overflows."""
    return jnp.where(jnp.isfinite(square), jnp.sqrt(jnp.maximum(square, 0)), fallback)


def spectral_square(
    square: jax.Array,
    trace: jax.Array,
    size: int,
    roundings: int,
    platform: Platform,
    dtype: jnp.dtype,
) -> jax.Array:
    """Return an upper bound on the spectral norm of a Gram matrix K, from its Frobenius norm ‖K‖.

    For K = XXᵀ, the spectral norm of K is the square of the spectral norm of X.

    Args:
        square: ‖K‖² as computed.
        trace: an upper bound on tr K.
        size: how many rows K has.
        roundings: how often an entry of K is rounded. The error of K is at most roundings·u·tr K,
            where u is `platform.unit(dtype)`.
        platform: the kind of device.
        dtype: the coarsest precision in which K was computed.
    """
    computed = root(square + 2 * size**2 * _tiny(dtype), trace) * platform.growth(size + 2, dtype)
    return computed + roundings * platform.unit(dtype) * trace


def kept_bound(rows: Sequence[jax.Array], platform: Platform) -> NormBound:
    """Return the joint bound of stored gradients; `rows` are arrays of shape (n, …).

    The weighted sum multiplies by clip factors, which rounds each entry once.
    """
    norm, upper = (x[:, None] for x in lengths(rows, platform))
    return NormBound(norm, upper, platform.unit(upper.dtype) * upper)


def outer_bound(terms: Sequence[Factors], platform: Platform) -> NormBound:
    """Return the bound ‖a‖‖g‖ of gradients G = a ⊗ g; `terms` holds one term, (a, g).

    The factors a and g have one row per block. The weighted sum multiplies a or g by the clip
    factors and rounds the products. So ‖Ĝ − G‖ ≤ u·‖G‖, with Ĝ as in `NormBound` and
    u = `weighting_error`. If a is one-hot, the weighted sum multiplies g, and u is the error of one
    rounding.
    """
    ((a, g),) = terms
    norm, upper = _row_lengths(g, platform)
    if is_one_hot(a):
        is_row = a[..., 0] >= 0
        norm, upper = (jnp.where(is_row, x, jnp.zeros_like(x)) for x in (norm, upper))
        return NormBound(norm, upper, platform.unit(upper.dtype) * upper)
    others = _row_lengths(a, platform)
    norm, upper = (x * y.astype(x.dtype) for x, y in zip((norm, upper), others, strict=True))
    upper = upper * platform.growth(3, upper.dtype)
    return NormBound(norm, upper, platform.weighting_error(a, g) * upper)


def _row_lengths(rows: jax.Array, platform: Platform) -> list[jax.Array]:
    """Return `lengths` of the only row of each block, as arrays of shape (n, blocks)."""
    n, blocks, _, size = rows.shape
    found = lengths([rows.reshape(n * blocks, size)], platform)
    return [x.reshape(n, blocks) for x in found]


class Gram(NamedTuple):
    """The Gram matrices of the rows of two terms, and how often their entries are rounded.

    Attributes:
        a: the inner products of each row of one term's factor a with each row of the other term's
            factor a: an array of shape (n, blocks, rows, rows of the other term).
        g: the inner products of the rows of the factors g, in the same shape.
        rounded_a: how often an entry of `a` is rounded.
        rounded_g: how often an entry of `g` is rounded.
        weighting: the relative errors of the factors a and g after `weighted_sum` multiplies one of
            them by the clip factors and rounds it. None unless both terms are the same.
    """

    a: jax.Array
    g: jax.Array
    rounded_a: int
    rounded_g: int
    weighting: tuple[float, float] | None


def gram_bound(terms: Sequence[Factors], platform: Platform, dtype: jnp.dtype) -> NormBound:
    """Return the bound of the gradient Σ_t a_t ⊗ g_t over the rows t of all terms.

    The weighted sum of each term is rounded to `dtype` before the terms are added.
    """
    grams = []
    for i, j in combinations_with_replacement(range(len(terms)), 2):
        (a, rounded_a), (g, rounded_g) = (
            _inner(*pair, platform) for pair in zip(terms[i], terms[j], strict=True)
        )
        weighting = _weighting(terms[i], platform) if i == j else None
        grams.append(Gram(a, g, rounded_a, rounded_g, weighting))
    return bound_by_grams(grams, platform, dtype)


def _weighting(term: Factors, platform: Platform) -> tuple[float, float]:
    """Return the errors of a and g after `weighted_sum` weights the one with shorter rows."""
    if any(map(is_one_hot, term)):
        return 0.0, 0.0
    error, (a, g) = platform.weighting_error(*term), (x.shape[-1] for x in term)
    return error if a <= g else 0.0, error if g <= a else 0.0


def bound_by_grams(grams: Sequence[Gram], platform: Platform, dtype: jnp.dtype) -> NormBound:
    """Return the bound of a gradient from the Gram matrices of all pairs of its terms.

    The precision of the sum is `dtype`. Let u be the `unit` of the coarsest precision among the
    terms and the sum. Let K_a and K_g be the Gram matrices of the rows a_t and g_t of all terms,
    and ‖K_a‖ and ‖K_g‖ their Frobenius norms. Let R = Σ_t ‖a_t‖‖g_t‖.

    1. An entry of K_a is rounded k_a times. So the entry ⟨a_t, a_s⟩ has an error of at most
       k_a·u·‖a_t‖‖a_s‖. Likewise, an entry of K_g is rounded k_g times.
    2. The squared norm N² is the sum of all entries of the entrywise product of K_a and K_g. This
       sum is rounded k times. By the inequality of Cauchy and Schwarz, the error of N² is at most
       s₁ = u·(k_a·tr K_a·‖K_g‖ + k_g·tr K_g·‖K_a‖ + k·‖K_a‖‖K_g‖) + k_a·k_g·u²·R².
    3. The error of N² is also at most s₂ = u·(k_a + k_g + k + k_a·k_g·u)·R². This bound is smaller
       if g_t is short where a_t is long, and long where a_t is short, as in tied weights of which
       one use is transposed.
    4. With s = min(s₁, s₂), the norm is at most min(R, √(N² + s)). Products that underflow add a
       little to s.
    5. Let w be the relative error of g after weighting by clip factors. This error changes the
       gradient by at most w·R, and also by at most w·‖A‖·√(tr K_g). Here ‖A‖ is the spectral norm
       of the matrix with the rows a_t, and ‖A‖² ≤ ‖K_a‖. The same holds with a and g swapped.
    """
    found = {wide_dtype(gram.a, gram.g) for gram in grams} | {jnp.dtype(dtype)}
    narrow = min(found, key=lambda one: one.itemsize)
    dtype = wide_dtype(*(gram.g for gram in grams))
    unit, tiny = platform.unit(narrow), _tiny(narrow)
    rounded_a, rounded_g = (
        max(items) for items in zip(*(gram[2:4] for gram in grams), strict=True)
    )
    total = norm_a = norm_g = trace_a = trace_g = reach = coarse = jnp.zeros([], dtype)
    rows = adding = 0
    for gram in grams:
        a, g = gram.a.astype(dtype), gram.g.astype(dtype)
        times = 2 if gram.weighting is None else 1  # a pair of different terms counts twice
        sums, added = _sum_of_rows(platform, a * g, a * a, g * g)
        total, norm_a, norm_g = (
            x + times * more for x, more in zip((total, norm_a, norm_g), sums, strict=True)
        )
        if gram.weighting is not None:
            a, g = (_diagonal(k, platform) for k in (a, g))
            along = jnp.sum(
                jnp.sqrt(a + rounded_a * tiny) * jnp.sqrt(g + rounded_g * tiny), axis=-1
            )
            height = a.shape[-1]
            own_a = jnp.sum(a, axis=-1) + height * rounded_a * tiny
            own_g = jnp.sum(g, axis=-1) + height * rounded_g * tiny
            spectral_a = spectral_square(sums[1], own_a, height, rounded_a, platform, narrow)
            spectral_g = spectral_square(sums[2], own_g, height, rounded_g, platform, narrow)
            error_a, error_g = gram.weighting
            changed = jnp.maximum(
                error_a * jnp.sqrt(spectral_g) * jnp.sqrt(own_a),
                error_g * jnp.sqrt(spectral_a) * jnp.sqrt(own_g),
            )
            trace_a, trace_g, reach = trace_a + own_a, trace_g + own_g, reach + along
            coarse += jnp.minimum(max(error_a, error_g) * along, changed)
            rows += height
        adding = max(adding, added)
    adding += len(grams)
    # The quantities above are rounded too.
    grow = platform.growth(rounded_a + rounded_g + adding + rows, narrow)
    reach, coarse = grow * reach, grow * coarse
    lost = 2 * rows * rows * tiny  # squares of entries that underflow
    norm_a, norm_g = jnp.sqrt(norm_a + lost), jnp.sqrt(norm_g + lost)
    slack = unit * (rounded_a * trace_a + adding * norm_a) * norm_g
    slack = grow * (slack + unit * rounded_g * trace_g * norm_a)
    slack = jnp.minimum(slack, (rounded_a + rounded_g + adding) * unit * jnp.square(reach))
    slack += rounded_a * rounded_g * unit**2 * jnp.square(reach)
    slack += 4 * tiny * max(rounded_a, rounded_g) * rows * (trace_a + trace_g + rows)
    upper = jnp.minimum(reach, root(total + slack, reach) * platform.growth(2, narrow))
    rounding = coarse + rows * unit * reach
    return NormBound(root(total, upper), upper, rounding)


def _diagonal(gram: jax.Array, platform: Platform) -> jax.Array:
    """Return the diagonals of Gram matrices of shape (n, blocks, rows, rows).

    On a CPU, this function reads the diagonals only. Accelerators would have to change the layout
    of the matrices for that. So on accelerators, this function replaces all other entries by zeros,
    which XLA does not store, and adds up each row.
    """
    if platform is CPU:
        return jnp.diagonal(gram, axis1=-2, axis2=-1)
    eye = jnp.eye(gram.shape[-1], dtype=bool)
    return jnp.sum(jnp.where(eye, gram, jnp.zeros_like(gram)), axis=-1)


def _sum_of_rows(platform: Platform, *items: jax.Array) -> tuple[list[jax.Array], int]:
    """Return the sum over the last two axes of each array, and how often a term is rounded.

    Many terms are added in two steps: first each row, then the sums of the rows. The barrier keeps
    XLA from merging the steps into one long sum, which XLA would add up in an unknown order.
    """
    rows, columns = items[0].shape[-2:]
    if rows * columns <= platform.longest_sum:
        return [jnp.sum(x, axis=(-2, -1)) for x in items], rows * columns
    sums = lax.optimization_barrier([jnp.sum(x, axis=-1) for x in items])
    return [jnp.sum(x, axis=-1) for x in sums], rows + columns


def _inner(u: jax.Array, v: jax.Array, platform: Platform) -> tuple[jax.Array, int]:
    """Return the inner products of all rows of u with all rows of v, and how often each is rounded.

    Their shape is (n, blocks, rows of u, rows of v).
    """
    if is_one_hot(u) and is_one_hot(v):
        same = (u[..., :, None] == v[..., None, :]) & (u[..., :, None] >= 0)
        return same.astype(jnp.float32), 1
    if is_one_hot(v):
        transposed, roundings = _inner(v, u, platform)
        return transposed.swapaxes(-1, -2), roundings
    if is_one_hot(u) and platform.fuses:  # a matrix unit is faster than a gather of columns
        rows = jax.nn.one_hot(u, v.shape[-1], dtype=v.dtype)  # negative indices give rows of zeros
        return platform.product("nbtp,nbsp->nbts", rows, v), 1
    if is_one_hot(u):
        # First of shape (…, rows of v, rows of u), then swapped:
        taken = jnp.take_along_axis(v, jnp.maximum(u, 0)[..., None, :], axis=-1)
        taken = taken.swapaxes(-1, -2).astype(wide_dtype(v))
        return jnp.where((u >= 0)[..., None], taken, jnp.zeros_like(taken)), 1
    size = u.shape[-1]
    pieces = -(-size // platform.longest_product)
    step = -(-size // pieces)

    def part(start: int) -> jax.Array:
        stop = min(start + step, size)
        u_part, v_part = (lax.slice_in_dim(x, start, stop, axis=-1) for x in (u, v))
        return platform.product("nbtp,nbsp->nbts", u_part, v_part)

    total = part(0)
    for start in range(step, size, step):
        total = lax.optimization_barrier(total) + part(start)  # the barrier fixes the order
    return total, step + pieces
