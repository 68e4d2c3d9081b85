"""Build the gradient of one leaf by its strategy: an object that knows its norm and its sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from optax_lsdp._trees import wide_dtype
from optax_lsdp.clipping.bookkeeping._leaves import ParameterLeaf
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping._rounded import Rounded
from optax_lsdp.clipping.bookkeeping._strategy import Kind
from optax_lsdp.clipping.bookkeeping.strategies._bounds import NormBound, joint_bound
from optax_lsdp.clipping.bookkeeping.strategies._terms import part_factors, to_leaf, weighted_leaves
from optax_lsdp.clipping.bookkeeping.strategies.convolution import (
    convolution_bound,
    convolution_sum,
)
from optax_lsdp.clipping.bookkeeping.strategies.forgotten import forgotten_bound
from optax_lsdp.clipping.bookkeeping.strategies.gram import gram_bound
from optax_lsdp.clipping.bookkeeping.strategies.kept import form_gradients, kept_bound, kept_sum
from optax_lsdp.clipping.bookkeeping.strategies.outer import outer_bound

_BY_FACTORS = {
    "outer product": outer_bound,
    "Gram matrices": gram_bound,
    "formed and forgotten": forgotten_bound,
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
    leaves: Sequence[jax.Array]
    rounded: Rounded
    platform: Platform

    def bound(self) -> NormBound:
        """Return the bound over all parts, which share no entry."""
        parts = part_factors(self.leaf, self.rounded)
        bounds = [_BY_FACTORS[self.kind](part, self.platform) for part in parts]
        return joint_bound(bounds, self.platform)

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return the sums as products of operands and weighted cotangents."""
        return weighted_leaves(self.leaf, self.leaves, self.rounded, factors, self.platform)


@dataclass(frozen=True)
class Convolved:
    """The gradient of the kernel of a single convolution."""

    kind: Kind
    leaf: ParameterLeaf
    leaves: Sequence[jax.Array]
    rounded: Rounded
    platform: Platform

    def bound(self) -> NormBound:
        """Return the bound by Gram matrices, or offset by offset."""
        (term,), by_gram = self.leaf.terms, self.kind == "Gram matrices of patches"
        arrays = self.rounded.of(term, self.leaf.index)
        return convolution_bound(term, *arrays, self.platform, by_gram=by_gram)

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return the sum as a transposed convolution."""
        (term,), index = self.leaf.terms, self.leaf.index
        arrays = self.rounded.of(term, index)
        weighted = convolution_sum(term, *arrays, factors, self.platform)
        return {index: to_leaf(term, index, self.leaves, self.rounded.scales[index], weighted)}


@dataclass(frozen=True)
class Kept:
    """A gradient that is formed for every example and kept: rows (n, …)."""

    index: int
    rows: jax.Array
    platform: Platform

    def bound(self) -> NormBound:
        """Return the norms of the rows."""
        return kept_bound(self.rows, self.platform)

    def weighted_sums(self, factors: jax.Array) -> dict[int, jax.Array]:
        """Return the weighted sum of the rows."""
        return {self.index: kept_sum(self.rows, factors, self.platform)}


def leaf_gradient(
    kind: Kind,
    leaf: ParameterLeaf,
    leaves: Sequence[jax.Array],
    rounded: Rounded,
    platform: Platform,
) -> LeafGradient:
    """Return the gradient of a leaf by the strategy `kind`; `leaves` are all parameters."""
    if kind == "unused":
        return Unused(leaf.index, leaves[leaf.index])
    if kind in _BY_FACTORS:
        return ByFactors(kind, leaf, leaves, rounded, platform)
    if kind in ("by offset", "Gram matrices of patches"):
        return Convolved(kind, leaf, leaves, rounded, platform)
    return Kept(leaf.index, form_gradients(leaf, leaves, rounded, platform), platform)
