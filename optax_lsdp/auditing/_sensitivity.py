"""Sensitivity: a release goes in, the largest change that one example has made comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_choice, check_non_negative, check_positive, check_whole
from optax_lsdp.auditing._report import Report

Release = Callable[[Any, jax.Array], Any]
_ODD = (1.0, -1.0, 0.0, 1e-40, 1e-30, 1e-3, 1e3, 1e10, 1e30, math.nan, math.inf, -math.inf)
_SPOILT = (math.nan, math.inf, 1e30)  # single numbers within an example
_LOUDNESS = (1.0, 1e-3, 1e3)  # of all other examples
_FEW = 64  # examples, of which a sum is as good as exact
_CROWD = 1024  # examples that are alike: what one of them changes a little in all others adds up
_ROUNDING = 2.0**-22  # four units in the last place of float32: what a sum of so many may be off


@dataclass(frozen=True)
class SensitivityReport(Report):
    """How far one example moved a release. It tells of the batch, so it is private.

    Attributes:
        declared: how far it may.
        largest: how far it did.
        how: between which neighbours.
        masked: how far an example that was masked out did.
        pairs: how many were tried.
        tolerance: what rounding is granted, as a share of `declared`.
        granted: what float32 is granted in a sum of as many as there were, likewise.
    """

    declared: float
    largest: float
    how: str
    masked: float
    pairs: int
    tolerance: float
    granted: float

    @property
    def passed(self) -> bool:
        """Whether neighbours were apart, and none farther than declared."""
        most = self.declared * (1 + self.granted)
        return 0 < self.largest <= most and self.masked <= self.tolerance * self.declared

    def lines(self) -> dict[str, str]:
        """Return what is printed."""
        return {
            "declared": f"{self.declared:.6g}",
            "largest change": f"{self.largest:.6g} ({self.how})",
            "by what is masked out": f"{self.masked:.6g}",
            "neighbours tried": f"{self.pairs:,}",
        }


class _Circumstances(NamedTuple):
    """A batch in which the example in one place is going to be another one."""

    how: str
    batch: Any
    mask: jax.Array
    place: int
    other: Any

    def odd_one(self, factor: float) -> Any:
        """Return the batch with that example in its place, multiplied."""
        changed = jax.tree.map(lambda x, one: x.at[self.place].set(one), self.batch, self.other)
        return _times(changed, np.where(np.arange(len(self.mask)) == self.place, factor, 1.0))

    def spoilt(self, value: float, rng: np.random.Generator) -> _Circumstances:
        """Return the same with one number of that example replaced."""
        leaves, structure = jax.tree.flatten(self.other)
        places = [i for i, x in enumerate(leaves) if _is_float(x) and x.size]
        if places:
            leaf = int(rng.choice(places))
            entry = int(rng.integers(leaves[leaf].size))
            flat = leaves[leaf].ravel().at[entry].set(value)
            leaves[leaf] = flat.reshape(leaves[leaf].shape)
        return self._replace(other=jax.tree.unflatten(structure, leaves))


class _Neighbours(NamedTuple):
    """Two batches: the second has another example in one place, and a mask of its own."""

    batch: Any
    example: Any
    place: Any
    masks: tuple[jax.Array, jax.Array]

    def granted(self, tolerance: float) -> float:
        """Return by what share of its sensitivity a sum of so many may be off in float32."""
        return max(tolerance, _ROUNDING * float(jnp.sum(self.masks[0])))


class _Found(NamedTuple):
    """How far two neighbours are apart."""

    distance: float
    how: str
    pair: _Neighbours


def audit_sensitivity(
    release: Release,
    batch: Any,
    *,
    declared: float,
    neighbouring: Literal["add_remove", "replace_one"] = "add_remove",
    searches: int = 20,
    ascents: int = 3,
    ascent_steps: int = 30,
    tolerance: float = 1e-4,
    key: jax.Array,
) -> SensitivityReport:
    """Look for two neighbouring batches on which a release differs by more than is declared.

    A search cannot prove that there are none; it finds what is commonly wrong. One example among
    many or few, loud or quiet ones, or a thousand that are alike, is removed, replaced, negated,
    made huge, tiny, infinite or NaN, as a whole or in one number; then the worst neighbours are
    driven apart by gradient ascent. Whatever is masked out must not matter at all.

    Args:
        release: `release(batch, mask)`: what noise is added to, such as a clipped sum; or a whole
            step with its randomness fixed, in which the noise cancels. It is compiled.
        batch: examples as they are in reality, with a leading axis.
        declared: the largest ℓ₂ distance that one example may cause, in units of the result.
        neighbouring: whether one example is there or not, or is another one.
        searches: in how many circumstances each odd example is tried.
        ascents: how many of the worst neighbours are driven apart.
        ascent_steps: in how many steps.
        tolerance: what rounding is granted, as a share of `declared`. Float32 is granted 2⁻²² of
            it for each example of a batch where that is more, from some 400 examples on.
        key: of the search.

    >>> def release(batch, mask):  # a sum of numbers between -1 and 1
    ...     return jnp.sum(jnp.where(mask, jnp.clip(jnp.nan_to_num(batch), -1, 1), 0))
    >>> batch = jnp.linspace(-2, 2, 8)
    >>> report = audit_sensitivity(release, batch, declared=1.0, searches=4, key=jax.random.key(0))
    >>> bool(report), round(report.largest, 3)
    (True, 1.0)
    >>> bool(audit_sensitivity(release, batch, declared=0.9, searches=4, key=jax.random.key(0)))
    False
    """
    check_positive("declared", declared)
    check_choice("neighbouring", neighbouring, ("add_remove", "replace_one"))
    check_non_negative("tolerance", tolerance)
    check_whole("searches", searches)
    check_whole("ascents", ascents, 0)
    check_whole("ascent_steps", ascent_steps)
    batch = jax.tree.map(jnp.asarray, batch)
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel().tolist())
    difference, drive = partial(_difference, release), partial(_drive, release)
    found: list[_Found] = []
    masked = 0.0

    def look(pair: _Neighbours, how: str) -> float:
        found.append(_Found(_norm(difference(*pair)), how, pair))
        return found[-1].distance

    for here in _circumstances(batch, searches, rng):
        odd_ones = [(f"times {odd:g}", here, odd) for odd in _ODD]
        odd_ones += [(f"with {x:g} in it", here.spoilt(x, rng), 1.0) for x in _SPOILT]
        for how, circumstances, odd in odd_ones:
            look(_neighbours(circumstances, odd, neighbouring), f"{here.how} one {how}")
            masked = max(masked, _norm(difference(*_masked_out(circumstances, odd))))
    worst = sorted(found, key=lambda one: -one.distance)
    for pair in [one.pair for one in worst if math.isfinite(one.distance)][:ascents]:
        for step in range(ascent_steps):
            pair = drive(pair, 0.3 * (1 - step / ascent_steps))
            if not math.isfinite(look(pair, "found by gradient ascent")):
                break
    most = max(found, key=lambda one: one.distance - declared * one.pair.granted(tolerance))
    granted = most.pair.granted(tolerance)
    return SensitivityReport(
        declared, most.distance, most.how, masked, len(found), tolerance, granted
    )


@partial(jax.jit, static_argnums=0)  # compiled once for a release, however often it is audited
def _difference(
    release: Release, batch: Any, example: Any, place: Any, masks: tuple[jax.Array, jax.Array]
) -> Any:
    """Return how a release changes from the first to the second of two neighbours."""
    other = jax.tree.map(lambda x, one: x.at[place].set(one), batch, example)
    return jax.tree.map(jnp.subtract, release(batch, masks[0]), release(other, masks[1]))


def _norm(difference: Any) -> float:
    """Return the ℓ₂ norm in float64; infinite where it is not a number."""
    arrays = jax.tree.leaves(jax.device_get(difference))
    leaves = [np.abs(x).astype(np.float64) for x in arrays]  # of complex numbers too
    squares = sum(np.sum(x**2) for x in leaves)
    return math.sqrt(squares) if np.isfinite(squares) else math.inf


def _circumstances(batch: Any, count: int, rng: np.random.Generator) -> Iterator[_Circumstances]:
    """Return batches of some of the examples, with their masks and the place that will differ."""
    available = len(jax.tree.leaves(batch)[0])
    for number in range(count):
        loudness = _LOUDNESS[number % len(_LOUDNESS)]
        alike = number % 4 == 3  # all others, so that they add up
        if alike:
            size = max(available, _CROWD)
            order = np.full(size, rng.integers(available))
        else:
            size = available
            order = rng.integers(size, size=size)
        examples = jax.tree.map(lambda x, o=order: x[o], batch)
        few = number % 4 == 1
        kept = int(rng.integers(1, min(size, _FEW) + 1)) if few else size
        mask = np.zeros(size, bool)
        mask[rng.permutation(size)[:kept]] = True
        place = int(rng.choice(np.flatnonzero(mask)))
        others = np.full(size, loudness)
        if number % 4 == 2:  # half of them quiet, so that one example more moves their median
            others = np.full(size, max(_LOUDNESS))
            quiet = rng.permutation(np.flatnonzero(np.arange(size) != place))[: size // 2]
            others[quiet] = min(_LOUDNESS)
        others[place] = 1.0
        row = int(rng.integers(available))
        other = jax.tree.map(lambda x, row=row: x[row], batch)
        by = "two factors" if number % 4 == 2 else f"{loudness:g}"
        how = f"{kept} of {size} examples times {by} and"
        yield _Circumstances(how, _times(examples, others), jnp.asarray(mask), place, other)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _times(batch: Any, factors: np.ndarray) -> Any:
    """Multiply each example's floats by a factor of its own."""

    def scale(x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return x
        along = jnp.asarray(factors, x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
        return x * along

    return jax.tree.map(scale, batch)


def _neighbours(here: _Circumstances, odd: float, neighbouring: str) -> _Neighbours:
    changed = here.odd_one(odd)
    example = jax.tree.map(lambda x: x[here.place], changed)
    if neighbouring == "add_remove":
        without = here.mask.at[here.place].set(False)
        return _Neighbours(changed, example, here.place, (here.mask, without))
    return _Neighbours(here.batch, example, here.place, (here.mask, here.mask))


def _masked_out(here: _Circumstances, odd: float) -> _Neighbours:
    without = here.mask.at[here.place].set(False)
    example = jax.tree.map(lambda x: x[here.place], here.odd_one(odd))
    return _Neighbours(here.batch, example, here.place, (without, without))


@partial(jax.jit, static_argnums=0)
def _drive(release: Release, pair: _Neighbours, rate: Any) -> _Neighbours:
    """Take a step of gradient ascent on the distance, in all floats of both batches."""
    leaves, structure = jax.tree.flatten((pair.batch, pair.example))
    floats = [x for x in leaves if _is_float(x)]

    def assemble(floats: list[jax.Array]) -> tuple[Any, Any]:
        given = iter(floats)
        return jax.tree.unflatten(structure, [next(given) if _is_float(x) else x for x in leaves])

    def distance(floats: list[jax.Array]) -> jax.Array:
        change = _difference(release, *assemble(floats), pair.place, pair.masks)
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(change)) + 1e-30)

    def move(x: jax.Array, slope: jax.Array) -> jax.Array:
        size, steepness = (jnp.sqrt(jnp.mean(y**2)) for y in (x, slope))
        return x + rate * (size + 1e-6) * slope / (steepness + 1e-30)

    moved = [move(x, slope) for x, slope in zip(floats, jax.grad(distance)(floats), strict=True)]
    batch, example = assemble(moved)
    return pair._replace(batch=batch, example=example)
