"""Search for two neighbouring batches whose releases differ by more than the sensitivity.

In this module, a release is the value to which noise will be added, such as a clipped sum. The
caller passes a function that computes the release from a batch and its mask.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from optax_lsdp._checks import check_choice, check_non_negative, check_positive, check_whole
from optax_lsdp._types import PyTree
from optax_lsdp.auditing._hard_models import generator
from optax_lsdp.auditing._report import format_report

Release = Callable[[PyTree, jax.Array], PyTree]
# The search multiplies one example by each of these factors.
_FACTORS = (1.0, -1.0, 0.0, 1e-40, 1e-30, 1e-3, 1e3, 1e10, 1e30, math.nan, math.inf, -math.inf)
_ENTRIES = (math.nan, math.inf, 1e30)  # values that replace one entry of an example
_SCALES = (1.0, 1e-3, 1e3)  # factors for all other examples of the batch
_FEW = 64  # most examples in a small batch; float32 adds up 64 examples almost exactly
_CROWD = 1024  # equal examples in a batch: small effects of one example on the others add up
_ROUNDING = 2.0**-22  # relative error accepted per example: four roundings of float32, each 2⁻²⁴


@dataclass(frozen=True)
class SensitivityReport:
    """The largest effect of one example on a release. Secret: it depends on single examples.

    Attributes:
        declared: the sensitivity that the caller claims.
        largest: the ℓ₂ distance between the releases of the worst pair of neighbours. For this
            pair, the distance minus the accepted rounding error is largest.
        how: how the audit made the worst pair.
        masked: the largest ℓ₂ distance between the releases of two batches that differ only in an
            example outside the mask.
        pairs: the number of pairs of neighbours that the audit compared.
        tolerance: the rounding error accepted in `masked`, relative to `declared`. It is the
            argument `tolerance` of `audit_sensitivity`.
        granted: the rounding error accepted in `largest`, relative to `declared`. It is larger than
            `tolerance` if the worst pair has many examples, and equals `tolerance` otherwise.
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
        """Whether examples have an effect of at most `declared`, and masked-out examples have none.

        Effects may exceed these limits by the rounding errors `granted` and `tolerance`. If no
        example has an effect, the audit does not pass.
        """
        most = self.declared * (1 + self.granted)
        return 0 < self.largest <= most and self.masked <= self.tolerance * self.declared

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        rows = {
            "declared sensitivity": f"{self.declared:.6g}",
            "largest change": f"{self.largest:.6g} ({self.how})",
            "largest change by masked-out examples": f"{self.masked:.6g}",
            "pairs of neighbours tried": f"{self.pairs:,}",
        }
        return format_report(self.passed, rows)


class _Neighbours(NamedTuple):
    """Two batches and their masks. The second batch is `batch` with `example` in row `row`."""

    batch: PyTree
    example: PyTree
    row: int
    masks: tuple[np.ndarray, np.ndarray]

    def releases(self, release: Release) -> tuple[PyTree, PyTree]:
        """Return the release of each batch."""
        other_batch = _with_example(self.batch, self.example, self.row)
        one = _released(release, self.batch, self.masks[0])
        return one, _released(release, other_batch, self.masks[1])


def audit_sensitivity(
    release: Release,
    batch: PyTree,
    *,
    declared: float,
    neighbouring: Literal["add_remove", "replace_one"] = "add_remove",
    searches: int = 20,
    ascents: int = 3,
    ascent_steps: int = 30,
    tolerance: float = 1e-4,
    key: jax.Array,
) -> SensitivityReport:
    """Search for neighbouring batches whose releases differ by more than `declared`.

    The search finds common mistakes, but cannot prove that there is none. It builds batches of many
    or few examples, of large or small examples, or of a thousand equal examples. In each batch, it
    multiplies one example by −1, ∞, NaN, or a huge or tiny factor, or sets one entry of this
    example to ∞, NaN or a huge number. It compares the result with a neighbour: the batch without
    this example or, for "replace_one", the batch before the change. Gradient ascent then increases
    the largest distances. The audit also fails if an example outside the mask has an effect.

    Args:
        release: `release(batch, mask)` returns the value to which noise will be added, such as a
            clipped sum. It may also return the result of a whole step. The step needs a fixed key,
            so that the noise of two steps is equal and cancels. The audit compiles `release`.
        batch: realistic examples, with a leading batch axis.
        declared: the sensitivity: the largest ℓ₂ distance that one example may cause.
        neighbouring: "add_remove" if one of two neighbours has one example more, or "replace_one"
            if they have different examples in one row.
        searches: the number of batches in which the audit tries each kind of change.
        ascents: the number of pairs from which gradient ascent starts.
        ascent_steps: the number of steps of each ascent.
        tolerance: the rounding error to accept, relative to `declared`. For a batch of n examples,
            the audit accepts at least n·2⁻²², which exceeds the default if n is 420 or more.
        key: the key of the search.

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
    rng = generator(key)
    pairs, masked = 0, 0.0
    most = SensitivityReport(declared, -math.inf, "", 0.0, 0, tolerance, 0.0)
    worst: list[tuple[float, _Neighbours]] = []  # finite distances, largest first

    def compare(pair: _Neighbours, releases: tuple[PyTree, PyTree], how: str) -> float:
        nonlocal pairs, most
        pairs += 1
        granted = max(tolerance, _ROUNDING * float(np.sum(pair.masks[0])))
        found = replace(most, largest=_distance(*releases), how=how, granted=granted)
        most = max(most, found, key=lambda one: one.largest - declared * one.granted)
        return found.largest

    for how_batch, drawn, mask, row, example in _settings(batch, searches, rng):
        without = mask & (np.arange(len(mask)) != row)
        before, before_without = (_released(release, drawn, kept) for kept in (mask, without))
        changes = {f"scaled by {factor:g}": _scaled(example, factor) for factor in _FACTORS}
        for value in _ENTRIES:
            changes[f"with one entry {value:g}"] = _with_entry(example, value, rng)
        for how, changed in changes.items():
            new = _with_example(drawn, changed, row)
            after, after_without = (_released(release, new, kept) for kept in (mask, without))
            pair, releases = _Neighbours(drawn, changed, row, (mask, mask)), (before, after)
            if neighbouring == "add_remove":
                pair = pair._replace(batch=new, masks=(mask, without))
                releases = after, after_without
            distance = compare(pair, releases, f"{how_batch}; one example {how}")
            if math.isfinite(distance):
                worst = sorted([*worst, (distance, pair)], key=lambda one: -one[0])[:ascents]
            masked = max(masked, _distance(before_without, after_without))
    for _, pair in worst:
        for step in range(ascent_steps):
            pair = _ascend(release, pair, 0.3 * (1 - step / ascent_steps))
            distance = compare(pair, pair.releases(release), "found by gradient ascent")
            if not math.isfinite(distance):
                break
    return replace(most, masked=masked, pairs=pairs)


@partial(jax.jit, static_argnums=0)  # repeated audits of one release compile it once
def _released(release: Release, batch: PyTree, mask: jax.Array) -> PyTree:
    return release(batch, mask)


@np.errstate(invalid="ignore", over="ignore")
def _distance(one: PyTree, other: PyTree) -> float:
    """Return the ℓ₂ distance in float64, or ∞ if an entry is not finite."""
    squares = 0.0
    for x, y in zip(*map(jax.tree.leaves, jax.device_get((one, other))), strict=True):
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        squares += float(np.sum(np.abs(x.astype(wide) - y.astype(wide)) ** 2))
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def _settings(
    batch: PyTree, count: int, rng: np.random.Generator
) -> Iterator[tuple[str, PyTree, np.ndarray, int, PyTree]]:
    """Yield a description, a batch, its mask, a row, and an example that will replace this row."""
    available = len(jax.tree.leaves(batch)[0])
    for number in range(count):
        # The mask keeps all examples, or a few; examples have two scales; or all are equal.
        kind = ("all", "few", "two scales", "crowd")[number % 4]
        size = max(available, _CROWD) if kind == "crowd" else available
        order = rng.integers(available, size=None if kind == "crowd" else size)
        kept = int(rng.integers(1, min(size, _FEW) + 1)) if kind == "few" else size
        mask = np.zeros(size, bool)
        mask[rng.permutation(size)[:kept]] = True
        row = int(rng.choice(np.flatnonzero(mask)))
        scale = _SCALES[number % len(_SCALES)]
        scales, by = np.full(size, scale), f"{scale:g}"
        if kind == "two scales":  # each for half of the examples, so `row` can move the median
            scales, by = np.full(size, max(_SCALES)), f"{max(_SCALES):g} or {min(_SCALES):g}"
            small = rng.permutation(np.flatnonzero(np.arange(size) != row))[: size // 2]
            scales[small] = min(_SCALES)
        scales[row] = 1.0
        example = _rows(batch, int(rng.integers(available)))
        how = f"{kept} of {size} examples in the mask, scaled by {by}"
        chosen = _rows(batch, np.broadcast_to(order, size))
        yield how, _scaled(chosen, scales), mask, row, example


@jax.jit  # compiled, like the functions below, because the audit builds many small batches
def _rows(batch: PyTree, indices: ArrayLike) -> PyTree:
    return jax.tree.map(lambda x: x[indices], batch)


@jax.jit
def _with_example(batch: PyTree, example: PyTree, row: int) -> PyTree:
    return jax.tree.map(lambda x, one: x.at[row].set(one), batch, example)


@jax.jit
def _scaled(tree: PyTree, factors: ArrayLike) -> PyTree:
    """Multiply all floats of an example by a factor.

    If `tree` is a batch, `factors` has one factor for each of its examples.
    """

    def scale(x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return x
        along = jnp.asarray(factors).astype(x.dtype)
        return x * along.reshape(along.shape + (1,) * (x.ndim - along.ndim))

    return jax.tree.map(scale, tree)


def _with_entry(example: PyTree, value: float, rng: np.random.Generator) -> PyTree:
    """Return the example with `value` in place of one float, chosen at random."""
    leaves, structure = jax.tree.flatten(example)
    places = [i for i, x in enumerate(leaves) if _is_float(x) and x.size]
    if places:
        leaf = int(rng.choice(places))
        leaves[leaf] = np.array(leaves[leaf])
        leaves[leaf].flat[int(rng.integers(leaves[leaf].size))] = value
    return jax.tree.unflatten(structure, leaves)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


@partial(jax.jit, static_argnums=0)
def _ascend(release: Release, pair: _Neighbours, rate: float) -> _Neighbours:
    """Increase the distance between two releases by a step of gradient ascent on both batches."""
    trees = pair.batch, pair.example

    def distance(floats: PyTree) -> jax.Array:
        batch, example = _with_floats(trees, floats)
        one, other = pair._replace(batch=batch, example=example).releases(release)
        change = jax.tree.map(jnp.subtract, one, other)
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(change)) + 1e-30)

    def move(x: jax.Array, slope: jax.Array) -> jax.Array:
        size, steepness = (jnp.sqrt(jnp.mean(y**2)) for y in (x, slope))
        return x + rate * (size + 1e-6) * slope / (steepness + 1e-30)

    floats = jax.tree.map(lambda x: x if _is_float(x) else None, trees)
    moved = jax.tree.map(move, floats, jax.grad(distance)(floats))
    batch, example = _with_floats(trees, moved)
    return pair._replace(batch=batch, example=example)


def _with_floats(tree: PyTree, floats: PyTree) -> PyTree:
    """Replace leaves of `tree` by those of `floats`. A None in `floats` keeps the leaf."""
    return jax.tree.map(lambda x, new: x if new is None else new, tree, floats)
