"""Audits of pipelines that are broken in one way each; every audit must reject.

`PLANTED` is the table of these audits. `_pipeline.py` has the correct pipelines.
"""

from collections.abc import Callable
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp as lsdp
from benchmarks._pipeline import (
    CLIP,
    COUNT,
    NOISE,
    PARAMS,
    RATE,
    SIZE,
    Audit,
    Loss,
    Noise,
    Tree,
    agreement,
    clipped,
    loss,
    noise_audit,
    norm,
    resumed,
    sampled,
    scaled,
    sensitivity,
    tied_loss,
    with_a_canary,
)
from optax_lsdp.sampling import Batch
from optax_lsdp.smoothing import ring_beta


def _summed(stacked: Tree, mask: jax.Array, norms: jax.Array | None = None) -> Tree:
    """Return a sum of per-example gradients, clipped if their norms are passed."""
    weights = mask.astype(jnp.float32)
    if norms is not None:
        weights *= jnp.minimum(1, CLIP / jnp.maximum(norms, 1e-12))
    return jax.tree.map(lambda x: jnp.einsum("n,n...->...", weights, x), stacked)


def _per_example(batch: Tree, loss_fn: Loss = loss) -> Tree:
    return jax.vmap(jax.grad(loss_fn), (None, 0))(PARAMS, batch)


def _finite(stacked: Tree) -> tuple[Tree, jax.Array]:
    """Replace gradients that are not finite by zeros; return them, and which ones are finite."""
    fine = jax.vmap(lambda tree: jnp.isfinite(norm(tree)))(stacked)

    def select(x: jax.Array) -> jax.Array:
        return jnp.where(fine.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    return jax.tree.map(select, stacked), fine


def _clips_the_mean(batch: Tree, mask: jax.Array) -> Tree:
    stacked, fine = _finite(_per_example(batch))
    mean = jax.tree.map(lambda x: x / len(mask), _summed(stacked, mask & fine))
    return jax.tree.map(lambda x: x / jnp.maximum(1, norm(mean) / CLIP), mean)


def _norms_in_half_precision(batch: Tree, mask: jax.Array) -> Tree:
    stacked, fine = _finite(_per_example(batch))
    half = jax.tree.map(lambda x: x.astype(jnp.float16), stacked)
    return _summed(stacked, mask & fine, jax.vmap(norm)(half).astype(jnp.float32))


def _clips_at_the_median(batch: Tree, mask: jax.Array) -> Tree:
    """Clip each gradient to C and to the median of all norms."""
    stacked, fine = _finite(_per_example(batch))
    norms = jax.vmap(norm)(stacked)
    median = jnp.nanmedian(jnp.where(mask & fine, norms, jnp.nan))
    bound = jnp.minimum(jnp.nan_to_num(median), CLIP)
    weights = (mask & fine) * jnp.minimum(1, bound / jnp.maximum(norms, 1e-12))
    return jax.tree.map(lambda x: jnp.einsum("n,n...->...", weights, x), stacked)


def _looks_for_nan_in_the_first_number(batch: Tree, mask: jax.Array) -> Tree:
    fine = jnp.isfinite(batch["x"][:, 0]) & jnp.isfinite(batch["y"][:, 0])
    batch = jax.tree.map(lambda x: jnp.where(fine[:, None], x, 0), batch)
    stacked = _per_example(batch)
    return _summed(stacked, mask & fine, jax.vmap(norm)(stacked))


def _divides_by_the_realised_batch_size(batch: Tree, mask: jax.Array) -> Tree:
    count = jnp.maximum(mask.astype(jnp.float32).sum(), 1)
    return jax.tree.map(lambda x: x / count, clipped(batch, mask))


def _forgets_the_mask(batch: Tree, mask: jax.Array) -> Tree:
    return clipped(batch, jnp.ones_like(mask))


def _keeps_nan(batch: Tree, mask: jax.Array) -> Tree:
    stacked = _per_example(batch)
    return _summed(stacked, mask, jax.vmap(norm)(stacked))


def _counts_a_tied_weight_once(batch: Tree, mask: jax.Array) -> Tree:
    def last_use(params: Tree, example: Tree) -> jax.Array:
        hidden = jax.lax.stop_gradient(jnp.tanh(example["y"] @ params["second"]))
        return jnp.sum((hidden @ params["second"] - example["y"]) ** 2)

    stacked, fine = _finite(_per_example(batch, tied_loss))
    norms = jax.vmap(norm)(_per_example(batch, last_use))
    return _summed(stacked, mask & fine, jnp.where(fine, norms, CLIP))


def _normalises_by_the_batch(batch: Tree, mask: jax.Array) -> Tree:
    weights = mask.astype(jnp.float32)[:, None]
    x = jnp.where(mask[:, None], jnp.nan_to_num(batch["x"], posinf=0, neginf=0), 0)
    count = jnp.maximum(weights.sum(), 1)
    mean = (weights * x).sum(0) / count
    deviation = jnp.sqrt((weights * (x - mean) ** 2).sum(0) / count) + 1e-3
    return clipped({**batch, "x": (x - mean) / deviation}, mask)


def _clips_others_less_beside_an_odd_one(batch: Tree, mask: jax.Array) -> Tree:
    """Round norms up by 0.2 %, but not if a gradient of the batch is not finite."""
    stacked, fine = _finite(_per_example(batch))
    norms = jax.vmap(norm)(stacked)
    rounded = jnp.where((fine | ~mask).all(), 1.002 * norms, norms)
    return _summed(stacked, mask & fine, rounded)


def _one_key_for_all_leaves(seed: int) -> Noise:
    def release(step: int) -> Tree:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return jax.tree.map(lambda x: NOISE * jax.random.normal(key, x.shape), PARAMS)

    return jax.jit(release)


def _same_in_every_step(seed: int) -> Noise:
    noise = scaled(1.0, seed)
    return lambda step: noise(0)


def _hardly_any_in_one_step(seed: int) -> Noise:
    noise = scaled(1.0, seed)
    return lambda step: jax.tree.map(lambda x: x * (1e-3 if step == 7 else 1), noise(step))


def _less_in_one_row(seed: int) -> Noise:
    noise = scaled(1.0, seed)
    return lambda step: {"first": noise(step)["first"].at[3].multiply(0.5)}


def _same_on_every_device(seed: int) -> Noise:
    noise = scaled(1.0, seed)
    return lambda step: {"first": jnp.tile(noise(step)["first"][:4], (2, 1))}


def _same_by_columns(seed: int) -> Noise:
    noise = scaled(1.0, seed)
    return lambda step: {"second": jnp.tile(noise(step)["second"][:, :3], (1, 2))}


def _moved_on_by_a_step(seed: int) -> Noise:
    """Give one leaf the noise that another leaf had in the step before."""
    noise = scaled(1.0, seed)
    return lambda step: {"one": noise(step)["second"], "other": noise(step + 1)["second"]}


class _Couples:
    """Draw couples: an example never comes without the one that is half a dataset away."""

    def __init__(self, count: int, key: jax.Array) -> None:
        self.half = lsdp.FixedSizeSampler(count // 2, round(RATE * count) // 2, key=key)

    def batch(self, step: int) -> Batch:
        """Return both examples of each drawn couple."""
        indices, mask = self.half.batch(step)
        both = np.concatenate([indices, indices + self.half.dataset_size])
        return Batch(both, np.tile(mask, 2))


class _AllButOne:
    """Draw Poisson batches of all examples but the last, which never comes."""

    def __init__(self, count: int, key: jax.Array) -> None:
        self.most = lsdp.PoissonSampler(count - 1, RATE, key)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self.most.batch(step)


def _uniform(seed: int) -> Noise:
    def release(step: int) -> Tree:
        key = jax.random.fold_in(jax.random.key(seed), step)
        return {"first": NOISE * 12**0.5 * (jax.random.uniform(key, (8, 20)) - 0.5)}

    return jax.jit(release)


def _resumed_unnoticed(seed: int) -> Noise:
    """Hide from `fit` that the data have changed."""
    with (
        mock.patch("optax_lsdp.training._resume.compute_fingerprint", return_value={}),
        mock.patch("optax_lsdp.training._journal.Journal.differs", return_value=False),
    ):
        return resumed(seed)


def _noise_of_the_mean_on_the_sum(key: jax.Array) -> optax.GradientTransformation:
    """Add noise that fits the mean to the sum."""
    return optax.chain(
        lsdp.clip_per_example(CLIP), lsdp.add_gaussian_noise(NOISE * CLIP / SIZE, key=key)
    )


def _smoothed_before_the_noise(key: jax.Array) -> optax.GradientTransformation:
    """Smooth first, and add as little noise as smoothing would have left."""
    left = float(np.sqrt(ring_beta(1.0, 4)))
    return optax.chain(
        lsdp.clip_per_example(CLIP),
        lsdp.laplacian_smooth(1.0),
        lsdp.add_gaussian_noise(left * NOISE * CLIP, key=key),
    )


SHUFFLE = partial(lsdp.ShuffledSampler, batch_size=round(RATE * COUNT))
WRONG_SUMS = {
    "clipping the mean of a batch, as the paper's code does": (_clips_the_mean, CLIP / SIZE),
    "norms in float16": (_norms_in_half_precision, CLIP),
    "division by the number of examples that came": (
        _divides_by_the_realised_batch_size,
        CLIP / SIZE,
    ),
    "clipping at the median of a batch": (_clips_at_the_median, CLIP),
    "a search for NaN in the first number only": (_looks_for_nan_in_the_first_number, CLIP),
    "padding that is not masked": (_forgets_the_mask, CLIP),
    "a NaN example that is left in": (_keeps_nan, CLIP),
    "a tied weight that is counted once": (_counts_a_tied_weight_once, CLIP),
    "batch normalisation": (_normalises_by_the_batch, CLIP),
    "an odd example that changes how others are clipped": (
        _clips_others_less_beside_an_odd_one,
        CLIP,
    ),
}
WRONG_NOISE: dict[str, Callable[[int], Noise]] = {
    "nine tenths of the noise": partial(scaled, 0.9),
    "a step that has hardly any noise": _hardly_any_in_one_step,
    "a row that has half of it": _less_in_one_row,
    "one key for all leaves": _one_key_for_all_leaves,
    "the same noise in every step": _same_in_every_step,
    "the same noise on every device": _same_on_every_device,
    "the same, of a leaf that is split by columns": _same_by_columns,
    "noise that another leaf had a step before": _moved_on_by_a_step,
    "noise that a resumed run uses again": _resumed_unnoticed,
    "uniform noise": _uniform,
}
PLANTED: dict[str, Audit] = {
    **{
        name: Audit("sensitivity", partial(sensitivity, release, declared))
        for name, (release, declared) in WRONG_SUMS.items()
    },
    **{name: Audit("noise", partial(noise_audit, make)) for name, make in WRONG_NOISE.items()},
    "the noise of the mean on the sum": Audit(
        "canary", partial(with_a_canary, _noise_of_the_mean_on_the_sum)
    ),
    "smoothing before the noise, which is less then": Audit(
        "canary", partial(with_a_canary, _smoothed_before_the_noise)
    ),
    "a shuffler declared as Poisson": Audit("sampler", partial(sampled, SHUFFLE, "poisson")),
    "a shuffler declared as fresh subsets": Audit(
        "sampler", partial(sampled, SHUFFLE, "without_replacement")
    ),
    "examples that come in couples": Audit(
        "sampler", partial(sampled, _Couples, "without_replacement")
    ),
    "an example that never comes": Audit("sampler", partial(sampled, _AllButOne, "poisson")),
    "a microbatch that is dropped": Audit(
        "agreement of both engines", partial(agreement, SIZE - 4)
    ),
}
