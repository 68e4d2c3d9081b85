"""Audits of the library's clipping: searches for neighbours, and comparison with an oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from optax_lsdp.auditing._hard_models import (
    MODELS,
    ODD,
    PLAIN,
    hard_batch,
    hard_loss,
    hard_params,
)
from optax_lsdp.auditing._oracle import (
    AgreementReport,
    Case,
    Group,
    audit_agreement,
    single_gradients,
)
from optax_lsdp.auditing._sensitivity import SensitivityReport, audit_sensitivity
from optax_lsdp.clipping import clip_per_example, clipped_grad

Engine = Literal["bookkeeping", "vmap"]
_CLIP_NORM, _SIZE = 0.5, 16
_SEARCHES, _ASCENT_STEPS = 12, 20
_ASCENTS = {"bookkeeping": 2, "vmap": 0}  # which take longest to compile
_MICROBATCH = 5  # which does not divide the twelve examples
_UNCERTAIN = ("cancelling",)  # models that let all others be clipped the careful way
EXACT = tuple(name for name in MODELS if name not in _UNCERTAIN)
_TOGETHER = ("dense", "scanned", "small", "tied")  # models that have one clip norm
_PRECISION = 1e-4  # of gradients in float32
_PRECISIONS = {"half": 3e-2, "cancelling": 3e-2}  # of the others


def audit_clipping(engine: Engine, key: jax.Array) -> SensitivityReport:
    """Search for neighbouring batches of one dense layer that are too far apart."""
    keys = jax.random.split(key, 3)
    params = {"kernel": jax.random.normal(keys[0], (12, 8)), "bias": jnp.zeros(8)}
    batch = jax.random.normal(keys[1], (_SIZE, 12))

    def loss(params: Any, example: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(example @ params["kernel"] + params["bias"]) ** 2)

    release = clipping(loss, _CLIP_NORM, engine=engine)
    return audit_sensitivity(
        partial(release, params),
        batch,
        declared=_CLIP_NORM,
        searches=_SEARCHES,
        ascents=_ASCENTS[engine],
        ascent_steps=_ASCENT_STEPS,
        key=keys[2],
    )


def audit_hard_models(
    engine: Engine, key: jax.Array, models: Sequence[str] = EXACT
) -> AgreementReport:
    """Compare the clipped sums of hard models with the oracle, each with a clip norm of its own."""
    hard = hard_cases(key, models, PLAIN, ODD)
    groups = hard_groups(models)
    clip_norms = {name: group.clip_norm for name, group in groups.items()}
    options: Any = {"microbatch_size": _MICROBATCH} if engine == "vmap" else {}
    release = partial(
        jax.jit(clipping(hard.loss, clip_norms, engine=engine, **options)), hard.params
    )
    return audit_agreement(release, hard.cases, groups)


def audit_cancelling_rows(key: jax.Array) -> AgreementReport:
    """Compare Gram norms with the oracle where rows nearly cancel, and rounding is worst."""
    return audit_hard_models("bookkeeping", key, _UNCERTAIN)


def audit_microbatches(key: jax.Array, models: Sequence[str] = _TOGETHER) -> AgreementReport:
    """Compare automatic clipping in microbatches with the oracle, with one norm for all leaves."""
    hard = hard_cases(key, models, PLAIN, ODD)
    clip = clipping(
        hard.loss,
        _CLIP_NORM,
        engine="bookkeeping",
        clip_style="automatic",
        microbatch_size=_MICROBATCH,
    )
    release = partial(jax.jit(clip), hard.params)
    together = {"all leaves": Group(_CLIP_NORM, lambda tree: tree, _PRECISION)}
    return audit_agreement(release, hard.cases, together, automatic=True)


def clipping(loss_fn: Any, clip_norm: Any, **options: Any) -> Callable[..., Any]:
    """Return `release(params, batch, mask)`, the library's clipped sum."""
    gradient = clipped_grad(loss_fn, clip_norm=clip_norm, **options)
    link = clip_per_example(clip_norm)

    def release(params: Any, batch: Any, mask: jax.Array) -> Any:
        return link.update(gradient(params, batch, mask), link.init(params), params)[0]

    return release


def hard_groups(models: Sequence[str]) -> dict[str, Group]:
    """Return a group for each hard model, with a clip norm of its own."""

    def group(place: int, name: str) -> Group:
        precision = _PRECISIONS.get(name, _PRECISION)
        return Group(_CLIP_NORM + 0.1 * place, lambda tree: tree[name], precision)

    return {name: group(place, name) for place, name in enumerate(models)}


class Hard(NamedTuple):
    """A set of hard models, with the oracle's gradient of each example."""

    loss: Callable[..., jax.Array]
    params: Any
    cases: list[Case]


def hard_cases(key: jax.Array, models: Sequence[str], *scales: Sequence[float]) -> Hard:
    """Return models with a batch of examples for each list of scales."""
    first, *others = jax.random.split(key, 1 + len(scales))
    drawn = hard_params(first)
    params = {name: drawn[name] for name in models}
    batches = [hard_batch(one, scale) for one, scale in zip(others, scales, strict=True)]
    loss = hard_loss(tuple(models))
    return Hard(loss, params, single_gradients(loss, params, *batches))
