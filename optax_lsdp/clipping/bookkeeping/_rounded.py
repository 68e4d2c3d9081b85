"""Round what the backward pass recorded, once, for one kind of device.

Norms and sums both use the rounded numbers. A gradient of these numbers is a function of one
example, so clipping it is as private as clipping the gradient itself.
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
from optax_lsdp._trees import compute_once, wide_dtype, widen
from optax_lsdp.clipping.bookkeeping._backward import Recorded
from optax_lsdp.clipping.bookkeeping._leaves import Term
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping._uses import Path, Use


class Rounded(NamedTuple):
    """The rounded operands and cotangents of all uses, with a leading axis of examples.

    Attributes:
        pairs: the factors a and g of each use, as its rule gives them, after one axis for each scan
            around the use. If the factors are larger than the operand, as patches are, the operand
            and the cotangent instead. Cotangents are multiplied by the scale of the use.
        gradients: for each leaf with uses that have no rule, the gradient from these uses,
            multiplied by the scale of the leaf.
        scales: for each leaf, the power of two nearest to 1/C. In these units, clip norms are near
            1, so that squares neither overflow nor underflow.
        use_scales: the scale of each use, which is the scale of one of its leaves.
        leaves: the parameters themselves.
        platform: the kind of device that all arrays are rounded for.
    """

    pairs: dict[Path, tuple[jax.Array, jax.Array]]
    gradients: dict[int, jax.Array]
    scales: list[ArrayLike]
    use_scales: dict[Path, ArrayLike]
    leaves: Sequence[jax.Array]
    platform: Platform

    def of(self, term: Term, index: int) -> tuple[jax.Array, jax.Array]:
        """Return the pair of a term, in the units of the leaf `index`."""
        (a, g), scale = self.pairs[term.path], self.use_scales[term.path]
        same = scale is self.scales[index]
        return a, g if same else _scaled(g, self.scales[index] / scale)


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
    # All leaves of a use but those of concatenated weights are in one group.
    use_scales = {path: scales[min(use.pieces[0].weight.leaves)] for path, use in uses.items()}
    pairs, known = {}, dict[object, jax.Array]()
    for path, use in uses.items():
        a, g = recorded.operands[use.operand], _scaled(recorded.cotangents[path], use_scales[path])
        if not use.rule.expands:
            factors = partial(use.rule.factors, use.equation, use.place)
            for _ in range(len(use.loops) + 1):  # one more for the examples
                factors = jax.vmap(factors)
            a, g = factors(a, g)
        if wide_dtype(a, g) == jnp.float64 and not use.rule.is_one_hot:
            a, g = a.astype(jnp.float64), g.astype(jnp.float64)  # bounds assume one precision
        key = use.operand, use.rule.operand_key(use.equation, use.place), a.dtype
        if key not in known:  # uses of one operand share its rounded copy
            known[key] = _round_once(a, platform)
        pairs[path] = known[key], _round_once(g, platform)
    gradients = {
        i: compute_once(_scaled(widen(x), scales[i])) for i, x in recorded.gradients.items()
    }
    return Rounded(pairs, gradients, scales, use_scales, leaves, platform)


def _round_once(x: jax.Array, platform: Platform) -> jax.Array:
    """Return a rounded array that XLA computes once, so that norms and sums use equal numbers.

    Axes of length 1 are left out in between. On a TPU, they would keep XLA from fusing the rounding
    with the product that makes x.
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
    """Return x times a power of two. The range of float16 is too small for that."""
    if isinstance(scale, float) and scale == 1:
        return x
    x = widen(x) if x.dtype == jnp.float16 else x
    return x * jnp.asarray(scale, x.dtype)
