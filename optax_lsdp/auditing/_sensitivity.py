"""Search for two neighbouring batches on which a release differs by more than its sensitivity.

A release is a function of a batch and a mask to which noise will be added, such as a clipped sum.
The audit builds batches from the caller's examples and changes one example in each. Gradient ascent
then increases the largest differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_choice, check_non_negative, check_positive, check_whole
from optax_lsdp._types import PyTree
from optax_lsdp.auditing._report import format_report

Release = Callable[[PyTree, jax.Array], PyTree]
Masks = tuple[jax.Array, jax.Array]
_FACTORS = (1.0, -1.0, 0.0, 1e-40, 1e-30, 1e-3, 1e3, 1e10, 1e30, math.nan, math.inf, -math.inf)
_ENTRIES = (math.nan, math.inf, 1e30)  # that replace a single number of an example
_SCALES = (1.0, 1e-3, 1e3)  # of all other examples
_FEW = 64  # examples whose sum float32 computes almost exactly
_CROWD = 1024  # equal examples: a small effect of one example on every other adds up
_ROUNDING = 2.0**-22  # 4 units in the last place of float32, granted for each example of a sum


@dataclass(frozen=True)
class SensitivityReport:
    """The largest effect of one example on a release. It depends on the batch, so it is private.

    Attributes:
        declared: the declared sensitivity.
        largest: the largest difference between two neighbours.
        how: a description of these neighbours.
        masked: the largest effect of an example outside the mask.
        pairs: the number of pairs of neighbours.
        tolerance: the relative error that the audit grants to rounding.
        granted: the relative error that it grants to the batch with the largest difference, which
            is more than `tolerance` for large batches.
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
        """Whether examples had an effect, and none a larger one than declared."""
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
    """Two batches: the second has `example` at `row`, and its own mask."""

    batch: PyTree
    example: PyTree
    row: int
    masks: Masks

    def granted(self, tolerance: float) -> float:
        """Return the relative error that a float32 sum over the first mask may have."""
        return max(tolerance, _ROUNDING * float(jnp.sum(self.masks[0])))


class _Setting(NamedTuple):
    """A batch, its mask, and an example that will replace the one at `row`."""

    how: str
    batch: PyTree
    mask: jax.Array
    row: int
    example: PyTree

    def replaced(self, factor: float) -> PyTree:
        """Return the batch with `factor` times the example at `row`."""
        batch = jax.tree.map(lambda x, one: x.at[self.row].set(one), self.batch, self.example)
        return _scaled(batch, np.where(np.arange(len(self.mask)) == self.row, factor, 1.0))

    def with_entry(self, value: float, rng: np.random.Generator) -> _Setting:
        """Return the setting with a random number of the example replaced by `value`."""
        leaves, structure = jax.tree.flatten(self.example)
        places = [i for i, x in enumerate(leaves) if _is_float(x) and x.size]
        if places:
            leaf = int(rng.choice(places))
            entry = int(rng.integers(leaves[leaf].size))
            flat = leaves[leaf].ravel().at[entry].set(value)
            leaves[leaf] = flat.reshape(leaves[leaf].shape)
        return self._replace(example=jax.tree.unflatten(structure, leaves))

    def neighbours(self, factor: float, neighbouring: str) -> _Neighbours:
        """Return two batches that the neighbouring relation connects."""
        changed = self.replaced(factor)
        example = jax.tree.map(lambda x: x[self.row], changed)
        if neighbouring == "add_remove":
            return _Neighbours(changed, example, self.row, (self.mask, self._mask_without()))
        return _Neighbours(self.batch, example, self.row, (self.mask, self.mask))

    def masked_out(self, factor: float) -> _Neighbours:
        """Return two batches that differ outside their mask alone."""
        without = self._mask_without()
        example = jax.tree.map(lambda x: x[self.row], self.replaced(factor))
        return _Neighbours(self.batch, example, self.row, (without, without))

    def _mask_without(self) -> jax.Array:
        return self.mask.at[self.row].set(False)


class _Found(NamedTuple):
    """The difference between two neighbours."""

    distance: float
    how: str
    pair: _Neighbours


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
    """Search for neighbouring batches on which a release differs by more than declared.

    The search cannot prove that there are none, but it finds common mistakes. It builds batches
    with many or few examples, large or small ones, or a thousand equal ones. It removes or replaces
    one example, and multiplies it by −1, by huge or tiny factors, by ∞ or by NaN, as a whole
    or in one entry. Gradient ascent then increases the largest differences. An example outside
    the mask must not have any effect.

    Args:
        release: `release(batch, mask)` returns what noise is added to, such as a clipped sum; or
            the result of a whole step with a fixed key, so that the noise cancels. The function
            is compiled.
        batch: realistic examples, with a leading batch axis.
        declared: the sensitivity: the largest ℓ₂ distance that one example may cause.
        neighbouring: "add_remove" if neighbours differ by the presence of one example, or
            "replace_one" if they differ by its value.
        searches: the number of batches in which the audit tries each kind of change.
        ascents: the number of pairs that gradient ascent starts from.
        ascent_steps: the number of steps of each ascent.
        tolerance: the relative rounding error to accept. The audit accepts 2⁻²² for each example
            of a batch if that is more, which is so from about 400 examples on.
        key: the source of the search's randomness.

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
    found: list[_Found] = []
    masked = 0.0

    def compare(pair: _Neighbours, how: str) -> float:
        found.append(_Found(_norm(_difference(release, *pair)), how, pair))
        return found[-1].distance

    for here in _settings(batch, searches, rng):
        changes = [(f"scaled by {factor:g}", here, factor) for factor in _FACTORS]
        changes += [(f"with one entry {x:g}", here.with_entry(x, rng), 1.0) for x in _ENTRIES]
        for how, setting, factor in changes:
            compare(setting.neighbours(factor, neighbouring), f"{here.how}; one example {how}")
            masked = max(masked, _norm(_difference(release, *setting.masked_out(factor))))
    worst = sorted(found, key=lambda one: -one.distance)
    for pair in [one.pair for one in worst if math.isfinite(one.distance)][:ascents]:
        for step in range(ascent_steps):
            pair = _ascend(release, pair, 0.3 * (1 - step / ascent_steps))
            if not math.isfinite(compare(pair, "found by gradient ascent")):
                break
    most = max(found, key=lambda one: one.distance - declared * one.pair.granted(tolerance))
    granted = most.pair.granted(tolerance)
    return SensitivityReport(
        declared, most.distance, most.how, masked, len(found), tolerance, granted
    )


@partial(jax.jit, static_argnums=0)  # repeated audits of one release compile it once
def _difference(release: Release, batch: PyTree, example: PyTree, row: int, masks: Masks) -> PyTree:
    """Return the release of the first neighbour minus that of the second."""
    other = jax.tree.map(lambda x, one: x.at[row].set(one), batch, example)
    return jax.tree.map(jnp.subtract, release(batch, masks[0]), release(other, masks[1]))


def _norm(difference: PyTree) -> float:
    """Return the ℓ₂ norm in float64; infinite if a number is not finite."""
    arrays = jax.tree.leaves(jax.device_get(difference))
    leaves = [np.abs(x).astype(np.float64) for x in arrays]  # magnitudes of complex numbers too
    squares = sum(np.sum(x**2) for x in leaves)
    return math.sqrt(squares) if np.isfinite(squares) else math.inf


def _settings(batch: PyTree, count: int, rng: np.random.Generator) -> Iterator[_Setting]:
    """Yield batches of random examples: in turn all, few, of two scales, and a crowd of one."""
    available = len(jax.tree.leaves(batch)[0])
    for number in range(count):
        kind = ("all", "few", "two scales", "crowd")[number % 4]
        if kind == "crowd":
            size = max(available, _CROWD)
            order = np.full(size, rng.integers(available))
        else:
            size = available
            order = rng.integers(size, size=size)
        examples = jax.tree.map(lambda x, o=order: x[o], batch)
        kept = int(rng.integers(1, min(size, _FEW) + 1)) if kind == "few" else size
        mask = np.zeros(size, bool)
        mask[rng.permutation(size)[:kept]] = True
        row = int(rng.choice(np.flatnonzero(mask)))
        scale = _SCALES[number % len(_SCALES)]
        scales = np.full(size, scale)
        if kind == "two scales":  # one example more changes the median
            scales = np.full(size, max(_SCALES))
            small = rng.permutation(np.flatnonzero(np.arange(size) != row))[: size // 2]
            scales[small] = min(_SCALES)
        scales[row] = 1.0
        source = int(rng.integers(available))
        example = jax.tree.map(lambda x, i=source: x[i], batch)
        by = f"{max(_SCALES):g} or {min(_SCALES):g}" if kind == "two scales" else f"{scale:g}"
        how = f"{kept} of {size} examples in the mask, scaled by {by}"
        yield _Setting(how, _scaled(examples, scales), jnp.asarray(mask), row, example)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _scaled(batch: PyTree, factors: np.ndarray) -> PyTree:
    """Multiply the floats of each example by the example's factor."""

    def scale(x: jax.Array) -> jax.Array:
        if not _is_float(x):
            return x
        return x * jnp.asarray(factors, x.dtype).reshape(-1, *(1,) * (x.ndim - 1))

    return jax.tree.map(scale, batch)


@partial(jax.jit, static_argnums=0)
def _ascend(release: Release, pair: _Neighbours, rate: float) -> _Neighbours:
    """Take a step of gradient ascent on the distance, in all floats of both batches."""
    leaves, structure = jax.tree.flatten((pair.batch, pair.example))
    floats = [x for x in leaves if _is_float(x)]

    def assemble(floats: list[jax.Array]) -> tuple[PyTree, PyTree]:
        new = iter(floats)
        return jax.tree.unflatten(structure, [next(new) if _is_float(x) else x for x in leaves])

    def distance(floats: list[jax.Array]) -> jax.Array:
        change = _difference(release, *assemble(floats), pair.row, pair.masks)
        return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(change)) + 1e-30)

    def move(x: jax.Array, slope: jax.Array) -> jax.Array:
        size, steepness = (jnp.sqrt(jnp.mean(y**2)) for y in (x, slope))
        return x + rate * (size + 1e-6) * slope / (steepness + 1e-30)

    moved = [move(x, slope) for x, slope in zip(floats, jax.grad(distance)(floats), strict=True)]
    batch, example = assemble(moved)
    return pair._replace(batch=batch, example=example)
