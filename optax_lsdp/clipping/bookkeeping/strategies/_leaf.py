"""Build the gradients of leaves by their strategies: objects that know their norms and sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import jax
import jax.numpy as jnp

from optax_lsdp._mesh import is_multi_device_mesh
from optax_lsdp._trees import wide_dtype
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf
from optax_lsdp.clipping.bookkeeping._platforms import CPU, Platform
from optax_lsdp.clipping.bookkeeping._rounded import Rounded
from optax_lsdp.clipping.bookkeeping._strategy import Kind
from optax_lsdp.clipping.bookkeeping.strategies._bounds import NormBound, joint_bound
from optax_lsdp.clipping.bookkeeping.strategies._terms import part_factors, to_leaf, weighted_leaves
from optax_lsdp.clipping.bookkeeping.strategies.convolution import (
    convolution_bound,
    convolution_sum,
)
from optax_lsdp.clipping.bookkeeping.strategies.gram import gram_bound
from optax_lsdp.clipping.bookkeeping.strategies.kept import form_gradients, kept_bound, kept_sum
from optax_lsdp.clipping.bookkeeping.strategies.outer import outer_bound

_SMALL = 2**15  # entries of gradients, over all examples, that a kernel handles in no time

_BY_FACTORS = {
    "outer product": outer_bound,
    "Gram matrices": gram_bound,
}


class LeafGradient(Protocol):
    """Every example's gradient of one leaf, in units of the leaf's scale."""

    def bound(self) -> NormBound | None:
        """Return the bound on each example's norm, or None if the gradient is zero."""

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return Σᵢ cᵢGᵢ for clip factors cᵢ: (n,), by the index of the leaf."""


@dataclass(frozen=True)
class Unused:
    """The gradient of a leaf that the loss does not use."""

    index: int
    value: jax.Array

    def bound(self) -> None:
        """Return None: the gradient is zero."""

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return zeros."""
        del factors
        return {self.index: jnp.zeros(self.value.shape, wide_dtype(self.value))}


@dataclass(frozen=True)
class ByFactors:
    """A gradient that is never formed: norms come from its factors."""

    kind: Kind
    leaf: ParameterLeaf
    rounded: Rounded

    def bound(self) -> NormBound:
        """Return the bound over all parts, which share no entry."""
        parts = part_factors(self.leaf, self.rounded)
        platform = self.rounded.platform
        return joint_bound([_BY_FACTORS[self.kind](part, platform) for part in parts], platform)

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return the sums as products of operands and weighted cotangents."""
        return weighted_leaves(self.leaf, self.rounded, factors)


@dataclass(frozen=True)
class Convolved:
    """The gradient of the kernel of a single convolution."""

    kind: Kind
    leaf: ParameterLeaf
    rounded: Rounded

    def bound(self) -> NormBound:
        """Return the bound by Gram matrices, by patches, or offset by offset."""
        (term,) = self.leaf.terms
        arrays = self.rounded.of(term, self.leaf.index)
        return convolution_bound(term, *arrays, self.rounded.platform, self.kind)

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return the sum as a transposed convolution."""
        (term,), index = self.leaf.terms, self.leaf.index
        arrays = self.rounded.of(term, index)
        weighted = convolution_sum(term, *arrays, factors, self.rounded.platform)
        return {index: to_leaf(term, index, self.rounded, weighted)}


@dataclass(frozen=True)
class Kept:
    """Gradients that are formed for every example and kept.

    Attributes:
        rows: the gradients of one or several leaves, by the index of the leaf: (n, …).
        platform: the kind of device.
    """

    rows: Mapping[int, jax.Array]
    platform: Platform

    def bound(self) -> NormBound:
        """Return the norms of the gradients of all leaves together."""
        return kept_bound(self._joined(), self.platform)

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return the weighted sums of the gradients."""
        total = kept_sum(self._joined(), factors, self.platform)
        if len(self.rows) == 1:
            return dict.fromkeys(self.rows, total)
        ends = accumulate(math.prod(rows.shape[1:]) for rows in self.rows.values())
        parts = jnp.split(total, list(ends)[:-1])
        leaves = zip(self.rows.items(), parts, strict=True)
        return {index: part.reshape(rows.shape[1:]) for (index, rows), part in leaves}

    def _joined(self) -> jax.Array:
        """Return the gradients of all leaves as one array."""
        rows = list(self.rows.values())
        if len(rows) == 1:
            return rows[0]
        return jnp.concatenate([x.reshape(len(x), math.prod(x.shape[1:])) for x in rows], axis=1)


def leaf_gradients(
    leaves: Sequence[tuple[ParameterLeaf, Kind]], rounded: Rounded
) -> list[LeafGradient]:
    """Return the gradients of the leaves of one group, each by its strategy.

    On accelerators, many small kernels take longer than the work in them. So small gradients that
    are kept, such as those of biases, are handled together.
    """
    platform = rounded.platform
    gradients = [_leaf_gradient(leaf, kind, rounded) for leaf, kind in leaves]
    if platform is CPU or is_multi_device_mesh():  # on a mesh, joining could gather shards
        return gradients
    small = {
        index: rows
        for gradient in gradients
        if isinstance(gradient, Kept)
        for index, rows in gradient.rows.items()
        if rows.size <= _SMALL
    }
    others = [g for g in gradients if not (isinstance(g, Kept) and g.rows.keys() <= small.keys())]
    by_dtype = {rows.dtype: dict[int, jax.Array]() for rows in small.values()}
    for index, rows in small.items():
        by_dtype[rows.dtype][index] = rows
    return [*others, *(Kept(rows, platform) for rows in by_dtype.values())]


def _leaf_gradient(leaf: ParameterLeaf, kind: Kind, rounded: Rounded) -> LeafGradient:
    """Return the gradient of a leaf by the strategy `kind`."""
    if kind == "unused":
        return Unused(leaf.index, rounded.leaves[leaf.index])
    if kind in _BY_FACTORS:
        return ByFactors(kind, leaf, rounded)
    if kind in ("by offset", "by patches", "Gram matrices of patches"):
        return Convolved(kind, leaf, rounded)
    return Kept({leaf.index: form_gradients(leaf, rounded)}, rounded.platform)
