"""Audit clipping: search for contributions above the clip norm, and compare with an oracle.

The oracle is `jax.grad` of one example at a time in float64. It shares no code with `clipping`. The
comparison measures the contribution of an example to a clipped sum in two ways: as the sum of a
batch whose mask keeps only this example, and as the difference between the sums of a full batch
with and without this example. Some audits split the batch or the parameters over eight devices.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.auditing import _hard_models as hard
from optax_lsdp.auditing._report import ClaimsReport, expect_refusal
from optax_lsdp.auditing._sensitivity import Release, SensitivityReport, audit_sensitivity
from optax_lsdp.clipping import Clipped, clip_per_example, clipped_grad, emulate_platform
from optax_lsdp.noise import add_gaussian_noise

DEVICES = 8
SPLIT, WHOLE, COLUMNS = jax.P("shards"), jax.P(), jax.P(None, "shards")
Engine = Literal["bookkeeping", "vmap"]
ENGINES: tuple[Engine, ...] = ("bookkeeping", "vmap")
Case = tuple[PyTree, list[PyTree]]  # a batch, and the oracle's gradient of each example
Vectors = dict[str, np.ndarray]  # one flat float64 vector for each group
Gradient = Callable[..., optax.Updates]
_Errors = list[tuple[float, str]]  # error / limit, and a text about the error
_Collective = Callable[[jax.Array], jax.Array]
CLIP_NORM = 0.5
_SLACK = 16  # slack coordinates
_MICROBATCH = 5  # does not divide the 12 examples, so two microbatches overlap
UNCERTAIN = ("cancelling",)  # models whose norms Gram matrices overestimate greatly
EXACT = tuple(name for name in hard.ALL_MODELS if name not in UNCERTAIN)
ONE_GROUP = ("dense", "scanned", "small", "tied")
_PRECISION = 1e-4  # relative error of gradients in float32
_PRECISIONS = {"half": 3e-2, "cancelling": 1e-2}  # models with larger errors
_PRECISION_OF_ROUNDED = 3e-2  # relative error of gradients from operands in bfloat16
_STABILITY = 0.01  # the constant of automatic clipping; see `clipped_grad`
_ROUNDING = 1e-5  # error of one contribution in float32, relative to the clip norm
_SUM_ROUNDING = 1e-4  # error of the difference of two sums, relative to the clip norm
# Engines may clip harder than necessary, but an example must add at least this share of its clipped
# gradient:
_LEAST = 0.99  # in float32
_LEAST_OF_ROUNDED = 0.95  # if operands are rounded to bfloat16
_LEAST_OF_UNCERTAIN = 0.05  # for models in UNCERTAIN, whose examples usually add a sixth
_HUGE = 1e18  # clip norms; squares of longer gradients overflow, so examples may add nothing


class Group(NamedTuple):
    """Leaves that are clipped together."""

    clip_norm: float
    select: Callable[[PyTree], PyTree]  # returns the group's part of a tree
    precision: float = _PRECISION  # the relative error that gradients may have
    least: float = _LEAST  # the share of its clipped gradient that an example must add at least


ALL_LEAVES = {"all leaves": Group(CLIP_NORM, lambda tree: tree)}


def audit_clipping_by_search(engine: Engine, key: jax.Array) -> SensitivityReport:
    """Search for neighbours whose clipped sums, with slack, differ by more than the clip norm.

    The model is a dense layer.
    """
    keys = jax.random.split(key, 3)
    params = {"kernel": jax.random.normal(keys[0], (12, 8)), "bias": jnp.zeros(8)}

    def loss(params: optax.Params, example: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(example @ params["kernel"] + params["bias"]) ** 2)

    gradient = clipped_grad(loss, clip_norm=CLIP_NORM, engine=engine, slack=_SLACK)
    return audit_sensitivity(
        clipped_sum(gradient, params, CLIP_NORM, _SLACK),
        jax.random.normal(keys[1], (16, 12)),
        declared=CLIP_NORM,
        searches=12,
        ascents=2 if engine == "bookkeeping" else 0,  # gradients of "vmap" take long to compile
        ascent_steps=20,
        key=keys[2],
    )


def audit_hard_models(
    engine: Engine, key: jax.Array, models: Sequence[str] = EXACT, platform: str | None = None
) -> ClaimsReport:
    """Compare clipped sums of hard models with sums computed in float64.

    A hard model uses its parameters in ways that are hard to clip; see `_hard_models.py`. Each
    model has its own clip norm. If `platform` is set, the clipping engine rounds as that platform
    does; see `emulate_platform`.
    """
    loss, params, cases = hard_cases(key, models, hard.PLAIN_SCALES, hard.ODD_SCALES)
    groups, clip_norms = one_group_per_model(models)
    if platform is not None:
        groups = {
            name: group._replace(precision=_PRECISION_OF_ROUNDED, least=_LEAST_OF_ROUNDED)
            for name, group in groups.items()
        }
    size = _MICROBATCH if engine == "vmap" else None
    gradient = clipped_grad(loss, clip_norm=clip_norms, engine=engine, microbatch_size=size)
    with emulate_platform(platform) if platform else nullcontext():
        return compare_with_oracle(clipped_sum(gradient, params, clip_norms), cases, groups)


def audit_microbatches(key: jax.Array, models: Sequence[str] = ONE_GROUP) -> ClaimsReport:
    """Compare sums that are clipped in microbatches with sums computed in float64.

    The clip style is "automatic".
    """
    loss, params, cases = hard_cases(key, models, hard.PLAIN_SCALES, hard.ODD_SCALES)
    gradient = clipped_grad(
        loss,
        clip_norm=CLIP_NORM,
        engine="bookkeeping",
        clip_style="automatic",
        microbatch_size=_MICROBATCH,
    )
    release = clipped_sum(gradient, params, CLIP_NORM)
    return compare_with_oracle(release, cases, ALL_LEAVES, automatic=True)


def clipped_sum(
    gradient: Gradient, params: optax.Params, clip_norm: ClipNorm, slack: int | None = None
) -> Release:
    """Return `release(batch, mask)`, which passes the sum of `gradient` to `clip_per_example`."""
    clip = clip_per_example(clip_norm, slack=slack)

    @jax.jit
    def release(params: optax.Params, batch: PyTree, mask: jax.Array) -> optax.Updates:
        return clip.update(gradient(params, batch, mask), clip.init(params), params)[0]

    return partial(release, params)


def shard_map(function: Gradient, in_specs: PyTree, out_specs: PyTree) -> Gradient:
    """Return a compiled function that runs on each device, with its shards of the arguments."""
    automatic, devices = (jax.sharding.AxisType.Auto,), jax.devices()[:DEVICES]
    mesh = jax.make_mesh((DEVICES,), ("shards",), automatic, devices=devices)
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def audit_sharded_clipping(key: jax.Array) -> ClaimsReport:
    """Split a batch over devices, and compare its clipped sum with one computed in float64."""
    scales = [*hard.PLAIN_SCALES, *hard.ODD_SCALES]
    loss, params, cases = hard_cases(key, ONE_GROUP, scales)
    groups, clip_norms = one_group_per_model(ONE_GROUP)
    of_shard = clipped_grad(loss, clip_norm=clip_norms)

    def gradient(params: optax.Params, batch: PyTree, mask: jax.Array) -> optax.Updates:
        return jax.lax.psum(of_shard(params, batch, mask), "shards")

    whole = shard_map(gradient, (WHOLE, SPLIT, SPLIT), WHOLE)
    return compare_with_oracle(clipped_sum(whole, params, clip_norms), cases, groups)


def audit_split_parameters(key: jax.Array) -> ClaimsReport:
    """Split parameters over devices, and compare the clipped sum with one computed in float64."""
    keys = jax.random.split(key, 3)
    params = {
        "columns": jax.random.normal(keys[0], (6, 2 * DEVICES)),
        "rows": jax.random.normal(keys[1], (2 * DEVICES, 3)),
    }
    batch = jnp.geomspace(1e-3, 1e3, 12)[:, None] * jax.random.normal(keys[2], (12, 6))

    def whole(params: optax.Params, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jnp.tanh(x @ params["columns"]) @ params["rows"]))

    def part(params: optax.Params, x: jax.Array) -> jax.Array:
        hidden = jax.lax.psum(jnp.tanh(x @ params["columns"]) @ params["rows"], "shards")
        return jnp.sum(jnp.sin(hidden))

    gradient = clipped_grad(part, clip_norm=CLIP_NORM)

    def unmarked(params: optax.Params, batch: jax.Array, mask: jax.Array) -> optax.Updates:
        marked = gradient(params, batch, mask)
        return jax.tree.map(lambda x: x.value, marked, is_leaf=lambda x: isinstance(x, Clipped))

    specs = {"columns": COLUMNS, "rows": SPLIT}
    release = partial(shard_map(unmarked, (specs, WHOLE, WHOLE), specs), params)
    return compare_with_oracle(release, [oracle_case(whole, params, batch)], ALL_LEAVES)


def audit_collectives(key: jax.Array) -> ClaimsReport:
    """Check that the library refuses losses that read other shards, and noise that shards share."""
    batch, params = jax.random.normal(key, (DEVICES, 3)), jnp.ones(3)
    noise = add_gaussian_noise(1.0, key=key)

    def shared_noise(params: optax.Params, updates: optax.Updates) -> optax.Updates:
        return noise.update(updates, noise.init(params))[0]

    functions: dict[str, Gradient] = {}
    for (name, collective), engine in product(_COLLECTIVES.items(), ENGINES):
        loss = partial(loss_across_shards, collective)
        gradient = clipped_grad(loss, clip_norm=1.0, engine=engine)
        functions[f"{name} in a loss is refused, engine {engine!r}"] = gradient
    functions["the same noise on all shards is refused"] = shared_noise

    def check(function: Gradient) -> str:
        shards = shard_map(function, (WHOLE, SPLIT), SPLIT)
        return expect_refusal(lambda: jax.eval_shape(shards, params, batch), "it is accepted")

    return ClaimsReport({claim: check(function) for claim, function in functions.items()})


def loss_across_shards(collective: _Collective, w: jax.Array, x: jax.Array) -> jax.Array:
    """Return a loss that must be refused, because it uses examples of other shards."""
    return jnp.vdot(w, collective(x))


_COLLECTIVES: dict[str, _Collective] = {
    "psum": lambda x: jax.lax.psum(x, "shards"),
    "pmean": lambda x: jax.lax.pmean(x, "shards"),
    "all_gather": lambda x: jnp.sum(jax.lax.all_gather(x, "shards"), axis=0),
    "ppermute": lambda x: jax.lax.ppermute(x, "shards", [(0, 1), (1, 0)]),
}


def one_group_per_model(models: Sequence[str]) -> tuple[dict[str, Group], dict[str, float]]:
    """Return a group of leaves for each hard model, and a different clip norm for each group."""
    clip_norms = {name: CLIP_NORM + 0.1 * index for index, name in enumerate(models)}
    groups = {
        name: Group(
            clip_norm,
            itemgetter(name),
            _PRECISIONS.get(name, _PRECISION),
            _LEAST_OF_UNCERTAIN if name in UNCERTAIN else _LEAST,
        )
        for name, clip_norm in clip_norms.items()
    }
    return groups, clip_norms


def hard_cases(
    key: jax.Array, models: Sequence[str], *scales: Sequence[float]
) -> tuple[hard.Model, optax.Params, list[Case]]:
    """Return the summed loss of hard models, their parameters, and a `Case` per list of scales."""
    first, *others = jax.random.split(key, 1 + len(scales))
    drawn = hard.hard_params(first)
    params = {name: drawn[name] for name in models}
    batches = [hard.hard_batch(one, scale) for one, scale in zip(others, scales, strict=True)]
    loss = hard.hard_loss(tuple(models))
    return loss, params, [oracle_case(loss, params, batch) for batch in batches]


def oracle_case(loss: hard.Model, params: optax.Params, batch: PyTree) -> Case:
    """Return the batch and the gradient of each example, computed one by one in float64."""

    def widen(x: jax.Array) -> np.ndarray:
        return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)

    params, wide = jax.tree.map(widen, (params, batch))
    count = len(jax.tree.leaves(batch)[0])
    examples = [jax.tree.map(lambda x, i=i: x[i], wide) for i in range(count)]
    with jax.enable_x64(True):
        return batch, [jax.device_get(_gradient(loss, params, one)) for one in examples]


@partial(jax.jit, static_argnums=0)  # repeated audits of one loss compile it once
def _gradient(loss: hard.Model, params: optax.Params, example: PyTree) -> optax.Updates:
    return jax.grad(loss)(params, example)


def _worst(errors: _Errors) -> str:
    """Return the text of the error that exceeds its limit most, or "". NaN exceeds all limits."""
    ratio, text = max(errors, key=lambda error: np.inf if np.isnan(error[0]) else error[0])
    return "" if ratio <= 1 else text


@np.errstate(all="ignore")  # `_worst` handles numbers that are not finite
def compare_with_oracle(
    release: Release, cases: Iterable[Case], groups: Mapping[str, Group], *, automatic: bool = False
) -> ClaimsReport:
    """Compare each example's contribution to a clipped sum with the oracle's clipped gradient.

    `release(batch, mask)` returns the clipped sum. With the gradient g and the clip norm C, the
    clipped gradient is min(1, C/‖g‖)·g or, if `automatic`, C·g/(‖g‖ + 0.01).
    """
    errors: list[_Errors] = [[] for _ in range(5)]
    bound, right, difference, total, masked = errors
    largest, clipped, compared = 0.0, 0, 0
    for number, (batch, gradients) in enumerate(cases):
        indices = np.arange(len(gradients))
        flat = [_flatten(tree, groups) for tree in gradients]
        expected = [_clip(vectors, groups, automatic) for vectors in flat]
        released = partial(_released, release, batch, groups)
        everyone, nobody = released(indices >= 0), released(indices < 0)
        alone = [released(indices == i) for i in indices]
        others = [released(indices != i) for i in indices]
        for name, (clip_norm, _, precision, usual) in groups.items():
            for i in indices:
                where = f"by {name!r}, example {i} of batch {number}"
                one, wanted = alone[i][name], expected[i][name]
                length, target = _length(one), _length(wanted)
                least = usual if _length(flat[i][name]) < _HUGE * clip_norm else 0.0
                largest = max(largest, length / clip_norm)
                clipped += bool(length > usual * clip_norm)
                text = f"{length / clip_norm:.6g} clip norms {where}"
                bound.append(((length / clip_norm - 1) / _ROUNDING, text))
                share = float(one @ wanted / max(target**2, 1e-300))  # of the clipped gradient
                off = _length(one - min(max(share, least), 1.0) * wanted)
                text = f"{length:.6g} instead of {target:.6g} {where}, an error of {off:.3g}"
                right.append((off / (precision * target + _ROUNDING * 1e-3 * clip_norm), text))
                off = _length(everyone[name] - others[i][name] - one) / clip_norm
                text = f"an error of {off:.3g} clip norms {where}"
                difference.append((off / _SUM_ROUNDING, text))
            off = _length(sum(x[name] for x in alone) - everyone[name]) / clip_norm
            total.append((off / _SUM_ROUNDING, f"an error of {off:.3g} clip norms by {name!r}"))
            left = float(np.abs(nobody[name]).max(initial=0.0))
            masked.append((2.0 * (left != 0), f"{left:.3g} is added by {name!r}"))
        compared += len(indices) * len(groups)
    claims = {
        "no example adds more than its clip norm": _worst(bound),
        "each example adds its clipped gradient": _worst(right),
        "each example adds the same in a full batch": _worst(difference),
        "a batch is the sum of its examples": _worst(total),
        "masked-out examples add nothing": _worst(masked),
        "some examples are clipped": "" if clipped else f"none of {compared:,} is",
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
    """Return one float64 vector for each clipping group: the entries of all its leaves."""

    def vector(part: PyTree) -> np.ndarray:
        return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(part)])

    return {name: vector(group.select(tree)) for name, group in groups.items()}


def _clip(gradient: Vectors, groups: Mapping[str, Group], automatic: bool) -> Vectors:
    """Return the clipped gradient, or zeros if any entry of the gradient is not finite."""
    if not all(np.isfinite(x).all() for x in gradient.values()):
        return {name: np.zeros_like(x) for name, x in gradient.items()}

    def factor(length: float, clip_norm: float) -> float:
        return clip_norm / (length + _STABILITY if automatic else max(length, clip_norm))

    return {name: factor(_length(x), groups[name].clip_norm) * x for name, x in gradient.items()}
