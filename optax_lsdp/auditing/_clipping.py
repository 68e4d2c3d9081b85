"""Audit the library's clipping by search, and by comparison with an oracle.

The oracle is `jax.grad` of one example at a time in float64. It shares no code with `clipping`. The
comparison measures in two ways what each example contributes to a clipped sum: as the sum of a
batch whose mask keeps only this example, and as the difference between the sums of a batch with and
without this example. For "hard models", see `_hard_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.auditing._hard_models import (
    ALL_MODELS,
    ODD_SCALES,
    PLAIN_SCALES,
    Model,
    hard_batch,
    hard_loss,
    hard_params,
)
from optax_lsdp.auditing._report import ClaimsReport
from optax_lsdp.auditing._sensitivity import Release, SensitivityReport, audit_sensitivity
from optax_lsdp.clipping import clip_per_example, clipped_grad

Engine = Literal["bookkeeping", "vmap"]
Vectors = dict[str, np.ndarray]  # one flat float64 vector for each group
_CLIP_NORM, _BATCH_SIZE = 0.5, 16
_SEARCHES, _ASCENT_STEPS = 12, 20
_ASCENTS = {"bookkeeping": 2, "vmap": 0}  # gradients through "vmap" take long to compile
_MICROBATCH = 5  # does not divide the 12 examples, so two microbatches overlap
_UNCERTAIN = ("cancelling",)  # fast norms are so uncertain that the engine computes them again
EXACT = tuple(name for name in ALL_MODELS if name not in _UNCERTAIN)
ONE_GROUP = ("dense", "scanned", "small", "tied")
_PRECISION = 1e-4  # relative error of gradients in float32
_PRECISIONS = {"half": 3e-2, "cancelling": 3e-2}  # models with larger errors
_STABILITY = 0.01  # the constant of automatic clipping; see `clipped_grad`
_ROUNDING = 1e-5  # of one contribution in float32, relative to the clip norm
_SUM_ROUNDING = 1e-4  # of the difference of two sums, relative to the clip norm
_CONSERVATIVE = 0.01  # factors may be too small by this share: engines may overestimate norms


class Group(NamedTuple):
    """Leaves that are clipped together.

    Attributes:
        clip_norm: the clip norm of the group.
        select: a function that returns the group's part of a tree.
        precision: the relative error that gradients may have.
    """

    clip_norm: float
    select: Callable[[PyTree], PyTree]
    precision: float = _PRECISION


class Case(NamedTuple):
    """A batch, and the oracle's gradient of each example."""

    batch: PyTree
    gradients: list[PyTree]


class HardCases(NamedTuple):
    """A loss made of hard models, its parameters, and batches with the oracle's gradients."""

    loss: Model
    params: optax.Params
    cases: list[Case]


def audit_clipping_by_search(engine: Engine, key: jax.Array) -> SensitivityReport:
    """Search for neighbours whose clipped sums, for a dense layer, differ by too much."""
    keys = jax.random.split(key, 3)
    params = {"kernel": jax.random.normal(keys[0], (12, 8)), "bias": jnp.zeros(8)}
    batch = jax.random.normal(keys[1], (_BATCH_SIZE, 12))

    def loss(params: optax.Params, example: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(example @ params["kernel"] + params["bias"]) ** 2)

    gradient = clipped_grad(loss, clip_norm=_CLIP_NORM, engine=engine)
    return audit_sensitivity(
        clipped_sum(gradient, params, _CLIP_NORM),
        batch,
        declared=_CLIP_NORM,
        searches=_SEARCHES,
        ascents=_ASCENTS[engine],
        ascent_steps=_ASCENT_STEPS,
        key=keys[2],
    )


def audit_hard_models(
    engine: Engine, key: jax.Array, models: Sequence[str] = EXACT
) -> ClaimsReport:
    """Compare the clipped sums of hard models with the oracle, with one clip norm per model."""
    loss, params, cases = hard_cases(key, models, PLAIN_SCALES, ODD_SCALES)
    groups = one_group_per_model(models)
    clip_norms = {name: group.clip_norm for name, group in groups.items()}
    microbatch_size = _MICROBATCH if engine == "vmap" else None
    gradient = clipped_grad(
        loss, clip_norm=clip_norms, engine=engine, microbatch_size=microbatch_size
    )
    return compare_with_oracle(clipped_sum(gradient, params, clip_norms), cases, groups)


def audit_cancelling_rows(key: jax.Array) -> ClaimsReport:
    """Compare clipping with the oracle where rows cancel, so Gram matrices round norms most."""
    return audit_hard_models("bookkeeping", key, _UNCERTAIN)


def audit_microbatches(key: jax.Array, models: Sequence[str] = ONE_GROUP) -> ClaimsReport:
    """Compare automatic clipping in microbatches with the oracle; all leaves share a clip norm."""
    loss, params, cases = hard_cases(key, models, PLAIN_SCALES, ODD_SCALES)
    gradient = clipped_grad(
        loss,
        clip_norm=_CLIP_NORM,
        engine="bookkeeping",
        clip_style="automatic",
        microbatch_size=_MICROBATCH,
    )
    release = clipped_sum(gradient, params, _CLIP_NORM)
    return compare_with_oracle(release, cases, all_leaves(_CLIP_NORM), automatic=True)


def clipped_sum(
    gradient: Callable[..., optax.Updates], params: optax.Params, clip_norm: ClipNorm
) -> Release:
    """Return `release(batch, mask)`, which passes the marked sum through `clip_per_example`."""
    clip = clip_per_example(clip_norm)

    @jax.jit
    def release(params: optax.Params, batch: PyTree, mask: jax.Array) -> optax.Updates:
        return clip.update(gradient(params, batch, mask), clip.init(params), params)[0]

    return partial(release, params)


def one_group_per_model(models: Sequence[str]) -> dict[str, Group]:
    """Return one group for each hard model. All groups have different clip norms."""

    def group(index: int, name: str) -> Group:
        precision = _PRECISIONS.get(name, _PRECISION)
        return Group(_CLIP_NORM + 0.1 * index, lambda tree: tree[name], precision)

    return {name: group(index, name) for index, name in enumerate(models)}


def all_leaves(clip_norm: float) -> dict[str, Group]:
    """Return one group with all leaves."""
    return {"all leaves": Group(clip_norm, lambda tree: tree)}


def hard_cases(key: jax.Array, models: Sequence[str], *scales: Sequence[float]) -> HardCases:
    """Return hard models, one batch for each list of scales, and the oracle's gradients."""
    first, *others = jax.random.split(key, 1 + len(scales))
    drawn = hard_params(first)
    params = {name: drawn[name] for name in models}
    batches = [hard_batch(one, scale) for one, scale in zip(others, scales, strict=True)]
    loss = hard_loss(tuple(models))
    return HardCases(loss, params, [oracle_case(loss, params, batch) for batch in batches])


def oracle_case(loss: Model, params: optax.Params, batch: PyTree) -> Case:
    """Return a batch with the gradient of each example, computed one by one in float64."""

    def widen(x: jax.Array) -> np.ndarray:
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return np.asarray(x).astype(np.float64) if is_float else np.asarray(x)

    params, wide = jax.tree.map(widen, (params, batch))
    count = len(jax.tree.leaves(batch)[0])
    examples = [jax.tree.map(lambda x, i=i: x[i], wide) for i in range(count)]
    with jax.enable_x64(True):
        return Case(batch, [jax.device_get(_gradient(loss, params, one)) for one in examples])


@partial(jax.jit, static_argnums=0)  # repeated audits of one loss compile it once
def _gradient(loss: Model, params: optax.Params, example: PyTree) -> optax.Updates:
    return jax.grad(loss)(params, example)


class _Claim:
    """A claim that holds if no measured error exceeds its limit; `wrong` is the worst error."""

    def __init__(self) -> None:
        self.worst, self.wrong = 1.0, ""

    def add(self, error: float, limit: float, text: str) -> None:
        """Record `text` if error / limit exceeds 1 and all earlier ratios, or is NaN."""
        excess = error / limit
        if not excess <= self.worst:
            self.worst, self.wrong = (excess if np.isfinite(excess) else np.inf), text


@np.errstate(all="ignore")  # `_Claim` handles numbers that are not finite
def compare_with_oracle(
    release: Release,
    cases: Iterable[Case],
    groups: Mapping[str, Group],
    *,
    automatic: bool = False,
) -> ClaimsReport:
    """Compare each example's contribution to a clipped sum with the oracle's clipped gradient.

    Args:
        release: `release(batch, mask)` returns the clipped sum, a tree like a gradient.
        cases: batches with the oracle's gradients.
        groups: the groups of leaves that are clipped together, by name.
        automatic: whether to expect C·g/(‖g‖ + 0.01) instead of min(1, C/‖g‖)·g.
    """
    bound, right, difference, total, masked = (_Claim() for _ in range(5))
    largest, clipped, compared = 0.0, 0, 0
    for number, (batch, gradients) in enumerate(cases):
        indices = np.arange(len(gradients))
        expected = [_clip(_flatten(tree, groups), groups, automatic) for tree in gradients]
        released = partial(_released, release, batch, groups)
        everyone, nobody = released(indices >= 0), released(indices < 0)
        alone = [released(indices == i) for i in indices]
        others = [released(indices != i) for i in indices]
        for name, (clip_norm, _, precision) in groups.items():
            for i in indices:
                where = f"by {name!r}, example {i} of batch {number}"
                one, wanted = alone[i][name], expected[i][name]
                length, target = _length(one), _length(wanted)
                largest = max(largest, length / clip_norm)
                clipped += bool(length > (1 - _CONSERVATIVE) * clip_norm)
                text = f"{length / clip_norm:.6g} clip norms {where}"
                bound.add(length / clip_norm - 1, _ROUNDING, text)
                share = float(one @ wanted / max(target**2, 1e-300))  # of the clipped gradient
                off = _length(one - min(max(share, 1 - _CONSERVATIVE), 1.0) * wanted)
                text = f"{length:.6g} instead of {target:.6g} {where}, an error of {off:.3g}"
                right.add(off, precision * target + _ROUNDING * 1e-3 * clip_norm, text)
                off = _length(everyone[name] - others[i][name] - one) / clip_norm
                difference.add(off, _SUM_ROUNDING, f"an error of {off:.3g} clip norms {where}")
            off = _length(sum(x[name] for x in alone) - everyone[name]) / clip_norm
            total.add(off, _SUM_ROUNDING, f"an error of {off:.3g} clip norms by {name!r}")
            left = float(np.abs(nobody[name]).max(initial=0.0))
            masked.add(2.0 * (left != 0), 1.0, f"{left:.3g} remains by {name!r}")
        compared += len(indices) * len(groups)
    claims = {
        "no example adds more than its clip norm": bound.wrong,
        "each example adds its clipped gradient": right.wrong,
        "each example adds the same in a full batch": difference.wrong,
        "a batch is the sum of its examples": total.wrong,
        "masked-out examples add nothing": masked.wrong,
        "some examples are clipped": "" if clipped else f"none of {compared:,} contributions is",
    }
    measured = {
        "contributions compared": f"{compared:,}, of which {clipped:,} are clipped",
        "largest contribution": f"{largest:.6g} clip norms",
    }
    return ClaimsReport(claims, measured)


def _released(
    release: Release, batch: PyTree, groups: Mapping[str, Group], mask: np.ndarray
) -> Vectors:
    # By default, accelerators round the operands of the model's matrix products.
    with jax.default_matmul_precision("highest"):
        return _flatten(jax.device_get(release(batch, jnp.asarray(mask))), groups)


def _length(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def _flatten(tree: PyTree, groups: Mapping[str, Group]) -> Vectors:
    """Return the leaves of each group as one float64 vector."""

    def vector(part: PyTree) -> np.ndarray:
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(part)])

    return {name: vector(group.select(tree)) for name, group in groups.items()}


def _clip(gradient: Vectors, groups: Mapping[str, Group], automatic: bool) -> Vectors:
    """Return the clipped gradient, or zeros if any entry of the gradient is not finite."""
    if not all(np.isfinite(x).all() for x in gradient.values()):
        return {name: np.zeros_like(x) for name, x in gradient.items()}

    def factor(norm: float, clip_norm: float) -> float:
        if automatic:
            return clip_norm / (norm + _STABILITY)
        return min(1.0, clip_norm / max(norm, 1e-300))

    return {n: factor(_length(x), groups[n].clip_norm) * x for n, x in gradient.items()}
