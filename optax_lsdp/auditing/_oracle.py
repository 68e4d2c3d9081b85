"""Compare clipped sums with an oracle: `jax.grad` of one example at a time, in float64.

The oracle shares no code with `clipping`. Every example's contribution is looked at by itself, as
what is left of a batch whose mask keeps it alone, and as the difference that it makes to a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.auditing._report import Report

Release = Callable[[Any, jax.Array], Any]
_STABILITY = 0.01  # of automatic clipping, as its docstring says
_ROUNDING = 1e-5  # of one contribution in float32, relative to the clip norm
_SUM_ROUNDING = 1e-4  # of the difference of two sums of a dozen contributions
_CLAIMS = (
    "no example adds more than its clip norm",
    "each adds its clipped gradient",
    "each makes that difference to a batch",
    "a batch adds up to its examples",
    "what is masked adds nothing",
)
_COARSE = 0.01  # by which a clip factor may be too small, because norms are bounded from above


class Group(NamedTuple):
    """Leaves that are clipped together.

    Attributes:
        clip_norm: C.
        select: a tree → the leaves of the group.
        precision: by how much gradients may differ from those of the oracle, relatively.
    """

    clip_norm: float
    select: Callable[[Any], Any]
    precision: float


class Case(NamedTuple):
    """A batch, and the gradient of each of its examples."""

    batch: Any
    gradients: list[Any]


@dataclass(frozen=True)
class AgreementReport(Report):
    """Whether each example contributed what an oracle says.

    Attributes:
        contributions: how many contributions were compared.
        largest: the longest of them, in units of its clip norm.
        clipped: how many of them are as long as the clip norm allows.
        wrong: what is wrong with each claim; empty where nothing is.
    """

    contributions: int
    largest: float
    clipped: int
    wrong: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether all claims hold, and something was clipped."""
        return not any(self.wrong.values()) and self.clipped > 0

    def lines(self) -> dict[str, str]:
        """Return what is printed."""
        return {
            "contributions": f"{self.contributions:,}, of which {self.clipped:,} are clipped",
            "largest of them": f"{self.largest:.6g} clip norms",
            **{claim: text or "yes" for claim, text in self.wrong.items()},
        }


class _Worst:
    """The worst breach of each claim: a claim holds while its excess is at most 1."""

    def __init__(self, *claims: str) -> None:
        self.found: dict[str, tuple[float, str]] = {claim: (1.0, "") for claim in claims}

    def add(self, claim: str, excess: float, text: str) -> None:
        """Remember a breach that is worse than those before it; NaN is one."""
        if not excess <= self.found[claim][0]:
            self.found[claim] = (excess if np.isfinite(excess) else np.inf, text)

    def texts(self) -> dict[str, str]:
        """Return what is wrong with each claim."""
        return {claim: text for claim, (_, text) in self.found.items()}


def single_gradients(loss_fn: Callable[..., jax.Array], params: Any, *batches: Any) -> list[Case]:
    """Return each batch with the gradients of its examples, one by one, in float64."""

    def wide(x: jax.Array) -> jax.Array:
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    with jax.enable_x64(True):
        gradient = partial(_gradient, loss_fn, jax.tree.map(wide, params))

        def gradients(batch: Any) -> list[Any]:
            count = len(jax.tree.leaves(batch)[0])
            examples = [jax.tree.map(lambda x, i=i: wide(x[i]), batch) for i in range(count)]
            return [jax.device_get(gradient(example)) for example in examples]

        return [Case(batch, gradients(batch)) for batch in batches]


@partial(jax.jit, static_argnums=0)  # compiled once for a loss, however often it is asked
def _gradient(loss_fn: Callable[..., jax.Array], params: Any, example: Any) -> Any:
    return jax.grad(loss_fn)(params, example)


@np.errstate(all="ignore")  # what is not finite breaches a claim
def audit_agreement(
    release: Release,
    cases: Iterable[Case],
    groups: Mapping[str, Group],
    *,
    automatic: bool = False,
) -> AgreementReport:
    """Compare what each example contributes to a release with what its gradient says.

    Args:
        release: `release(batch, mask)`: the clipped sum, a tree like that of a gradient.
        cases: batches and gradients, from `single_gradients`.
        groups: by name, leaves that are clipped together.
        automatic: whether contributions are C·g/(‖g‖ + 0.01), instead of min(1, C/‖g‖)·g.
    """
    worst = _Worst(*_CLAIMS)
    bound, right, difference, total, masked = _CLAIMS
    largest, clipped, compared = 0.0, 0, 0
    for number, (batch, gradients) in enumerate(cases):
        places = np.arange(len(gradients))
        expected = [_clipped(flat, groups, automatic) for flat in _flat(gradients, groups)]
        released = partial(_released, release, batch, groups)
        everyone, nobody = released(places >= 0), released(places < 0)
        alone = [released(places == i) for i in places]
        others = [released(places != i) for i in places]
        for name, (clip_norm, _, precision) in groups.items():
            for i in places:
                where = f"of {name!r}, example {i} of batch {number}"
                one, wanted = alone[i][name], expected[i][name]
                length, target = _length(one), _length(wanted)
                largest = max(largest, length / clip_norm)
                clipped += bool(length > (1 - _COARSE) * clip_norm)
                text = f"NO: {length / clip_norm:.6g} clip norms {where}"
                worst.add(bound, (length / clip_norm - 1) / _ROUNDING, text)
                share = float(one @ wanted / max(target**2, 1e-300))  # how much of it was added
                off = _length(one - min(max(share, 1 - _COARSE), 1.0) * wanted)
                text = f"NO: {length:.6g} instead of {target:.6g} {where}, off by {off:.3g}"
                worst.add(right, off / (precision * target + _ROUNDING * 1e-3 * clip_norm), text)
                off = _length(everyone[name] - others[i][name] - one) / clip_norm
                text = f"NO: off by {off:.3g} clip norms {where}"
                worst.add(difference, off / _SUM_ROUNDING, text)
            off = _length(sum(x[name] for x in alone) - everyone[name]) / clip_norm
            worst.add(total, off / _SUM_ROUNDING, f"NO: off by {off:.3g} clip norms of {name!r}")
            left = float(np.abs(nobody[name]).max(initial=0.0))
            worst.add(masked, 2.0 if left != 0 else 0.0, f"NO: {left:.3g} of {name!r} is left")
        compared += len(places) * len(groups)
    return AgreementReport(compared, largest, clipped, worst.texts())


def _released(
    release: Release, batch: Any, groups: Mapping[str, Group], mask: np.ndarray
) -> dict[str, np.ndarray]:
    # Accelerators would round the operands of the model's own products, not of norms.
    with jax.default_matmul_precision("highest"):
        return _flat([jax.device_get(release(batch, jnp.asarray(mask)))], groups)[0]


def _length(vector: Any) -> float:
    return float(np.linalg.norm(vector))


def _flat(trees: list[Any], groups: Mapping[str, Group]) -> list[dict[str, np.ndarray]]:
    """Return each tree as one vector of float64 for each group."""

    def vector(tree: Any) -> np.ndarray:
        leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
        return np.concatenate(leaves)

    return [{name: vector(group.select(tree)) for name, group in groups.items()} for tree in trees]


def _clipped(
    gradient: dict[str, np.ndarray], groups: Mapping[str, Group], automatic: bool
) -> dict[str, np.ndarray]:
    """Return what an example should add: nothing if any entry is not finite."""
    if not all(np.isfinite(x).all() for x in gradient.values()):
        return {name: np.zeros_like(x) for name, x in gradient.items()}
    norms = {name: _length(x) for name, x in gradient.items()}
    factors = {
        name: group.clip_norm / (norms[name] + _STABILITY)
        if automatic
        else min(1.0, group.clip_norm / max(norms[name], 1e-300))
        for name, group in groups.items()
    }
    return {name: factors[name] * x for name, x in gradient.items()}
