"""Clip and quantize gradients, sum them in whole numbers, and add exact noise.

A quantum is the unit of quantized gradients. Gradients and sums are whole numbers of quanta, so the
machine computes exactly what the proof assumes, in any order of summation. An example whose norm
exceeds the sensitivity contributes nothing. A sum that leaves the range of 32 bits wraps around. It
is then useless, but the guarantee holds: wrapping is post-processing of the exact noisy sum.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp._trees as trees
from optax_lsdp._checks import check_positive, check_whole, frozen_number, is_number
from optax_lsdp._clipped import WithSlack, is_marked
from optax_lsdp._isolation import trace_loss, warn_of_batch_norms
from optax_lsdp._keys import check_threefry_key, fold_in_text, fold_in_texts
from optax_lsdp._loss import call_or_explain
from optax_lsdp._mesh import manual_axes
from optax_lsdp._trees import row_norms
from optax_lsdp._types import PyTree
from optax_lsdp.discrete._sampler import LARGEST_SCALE, Stream, discrete_gaussian

_LARGEST_SENSITIVITY = 46_340  # quanta; two of its squares fit into 32 bits
_LAST_STEP = 2**31 - 1  # the step counter stops here, so later steps would repeat the noise


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedSum:
    """One leaf of a sum of quantized gradients, for `add_discrete_gaussian_noise`.

    `jax.tree.map(jnp.add, a, b)` adds two sums over disjoint examples.

    Attributes:
        value: the sum in quanta, int32.
        quantum: the size of one quantum.
        sensitivity: the largest ℓ₂ norm, in quanta, of one example's contribution to all leaves.
        together: the number of leaves of the sum.
    """

    value: jax.Array
    quantum: float = field(metadata={"static": True})
    sensitivity: int = field(metadata={"static": True})
    together: int = field(metadata={"static": True})


def quantized_sensitivity(resolution: int, size: int) -> int:
    """Return the largest ℓ₂ norm, in quanta, of one example's quantized gradient of `size` entries.

    Clipping leaves a norm of at most `resolution` quanta. Rounding d = `size` entries to whole
    quanta adds at most √d/2. One more quantum covers the rounding of float32. The guarantee does
    not rely on this derivation: `quantized_grad` discards every example that exceeds the bound.

    >>> quantized_sensitivity(1000, size=400)
    1011
    """
    return resolution + math.ceil(math.sqrt(size) / 2) + 1


def quantized_grad(
    loss_fn: Callable[[optax.Params, PyTree], jax.Array],
    *,
    clip_norm: float,
    resolution: int = 2**14,
    microbatch_size: int = 1,
) -> Callable[..., optax.Updates]:
    """Return `f(params, batch, mask=None)`, which sums clipped and quantized gradients.

    For gradients gᵢ, f returns s = Σᵢ round(R · gᵢ / max(‖gᵢ‖, C)), in quanta of size C/R. One
    example more or less changes s by at most `quantized_sensitivity`. f checks this bound in
    integer arithmetic. f takes the time and memory of `clipped_grad` with `engine="vmap"`.

    Args:
        loss_fn: `loss_fn(params, example)`, a scalar for one example without batch axis.
        clip_norm: C.
        resolution: R, the number of quanta in C. It should be much larger than √d, where d is the
            number of parameters, because rounding adds √d/2 quanta to the sensitivity.
        microbatch_size: how many gradients to compute at a time. With 1, the bits of a gradient
            depend only on its example. With more, they may also depend on the example's place in
            the batch. The guarantee then covers neighbours with one example masked
            (`neighbouring="zero_out"`), but not neighbours with one example left out.

    Returns:
        f. Its `mask` is a bool array (n,), False for padding. Its result has the structure of
        `params`, and each leaf is a `QuantizedSum`.

    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.5]])  # the gradients themselves
    >>> total = quantized_grad(jnp.vdot, clip_norm=1.0, resolution=100)(jnp.zeros(2), batch)
    >>> print(total.value, total.quantum, total.sensitivity)
    [ 60 130] 0.01 102
    """
    if hasattr(clip_norm, "initial"):  # an `AdaptiveClip`
        raise TypeError(
            "`clip_norm` must be a number with discrete noise, which supports neither slack nor "
            f"adaptive clip norms, got {clip_norm!r}; pass its `initial`, {clip_norm.initial}."
        )
    check_positive("clip_norm", clip_norm)
    clip_norm = frozen_number(clip_norm)
    check_whole("resolution", resolution)
    check_whole("microbatch_size", microbatch_size)

    def grad(params: optax.Params, batch: PyTree, mask: jax.Array | None = None) -> optax.Updates:
        trees.check_not_empty("params", params)
        trees.check_floating("params", params)
        leaves = jax.tree.leaves(params)
        most = quantized_sensitivity(resolution, sum(leaf.size for leaf in leaves))
        if most > _LARGEST_SENSITIVITY:
            raise ValueError(
                f"`resolution` must give a sensitivity of at most {_LARGEST_SENSITIVITY} quanta, "
                f"got {resolution}, which gives {most} quanta; pass a smaller `resolution`."
            )
        _check_outside_shard_map("quantized_grad")
        count = trees.count_examples(batch)
        batch = jax.tree.map(jnp.asarray, batch)
        known = jnp.ones(count, bool) if mask is None else jnp.asarray(mask)
        trees.check_mask(known, count)
        places = jnp.arange(-(-count // microbatch_size) * microbatch_size, dtype=jnp.int32)
        places = places.reshape(-1, microbatch_size)

        def one_gradient(example: PyTree) -> optax.Updates:
            # `trace_loss` raises if the loss can mix examples.
            loss = trace_loss(lambda p, x: (call_or_explain(loss_fn, p, x), None), params, example)
            warn_of_batch_norms(loss.closed)
            return jax.grad(loss_fn)(params, example)

        def add(sums: list[jax.Array], place: jax.Array) -> tuple[list[jax.Array], None]:
            rows = jnp.minimum(place, count - 1)  # the last microbatch repeats the last example
            stacked = jax.vmap(one_gradient)(jax.tree.map(lambda x: x[rows], batch))
            counted = known[rows] & (place < count)
            quanta = _quantize(jax.tree.leaves(stacked), counted, clip_norm, resolution, most)
            both = zip(sums, quanta, strict=True)
            return [total + x.sum(axis=0, dtype=jnp.int32) for total, x in both], None

        zeros = [jnp.zeros(leaf.shape, jnp.int32) for leaf in leaves]
        sums, _ = jax.lax.scan(add, zeros, places)
        quantum = float(clip_norm) / resolution
        marked = [QuantizedSum(total, quantum, most, len(leaves)) for total in sums]
        return jax.tree.unflatten(jax.tree.structure(params), marked)

    return grad


def _quantize(
    rows: list[jax.Array], counted: jax.Array, clip_norm: float, resolution: int, most: int
) -> list[jax.Array]:
    """Return gradients in quanta, int32.

    A gradient becomes 0 if it is masked, not finite, or longer than `most` quanta.
    """
    rows = trees.compute_once(rows)  # so that norms and rounding use the same values
    norms = row_norms(rows)
    factors = resolution / jnp.maximum(norms, jnp.asarray(clip_norm, norms.dtype))
    is_good = counted & jnp.isfinite(norms)

    def along(x: jax.Array, row: jax.Array) -> jax.Array:
        return x.reshape(-1, *[1] * (row.ndim - 1))

    def round_row(row: jax.Array) -> jax.Array:
        scaled = jnp.rint(row.astype(norms.dtype) * along(factors, row))
        scaled = jnp.where(along(is_good, row), scaled, jnp.zeros_like(scaled))
        # Without this clip, the cast of larger numbers to int32 would be undefined.
        return jnp.clip(scaled, -most, most).astype(jnp.int32)

    quanta = trees.compute_once([round_row(row) for row in rows])  # check and sum the same values
    flat = jnp.concatenate([x.reshape(len(x), -1) for x in quanta], axis=1)
    is_within = has_norm_at_most(flat, most)
    return [jnp.where(along(is_within, x), x, jnp.zeros_like(x)) for x in quanta]


def has_norm_at_most(quanta: jax.Array, most: int) -> jax.Array:
    """Return for each row whether its sum of squares is at most most², exactly, in 32 bits.

    Squares and partial sums above most² are replaced by most² + 1, so they stay above the limit.
    The function adds only as many terms at a time as fit into 32 bits.
    """
    limit = most**2
    at_once = (2**32 - 1) // (limit + 1)
    magnitudes = jnp.minimum(jnp.abs(quanta), most + 1).astype(jnp.uint32)
    sums = jnp.minimum(magnitudes**2, jnp.uint32(limit + 1))
    while (width := min(at_once, sums.shape[1])) > 1:
        sums = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % width)))
        sums = sums.reshape(len(sums), -1, width).sum(axis=2, dtype=jnp.uint32)
        sums = jnp.minimum(sums, jnp.uint32(limit + 1))
    return (sums <= limit).all(axis=1)


class AddDiscreteNoiseState(NamedTuple):
    """The key of the noise, which is a secret, and the number of steps that used it."""

    key: jax.Array
    step: jax.Array

    def __repr__(self) -> str:  # users log states, and whoever has the key can subtract the noise
        return f"AddDiscreteNoiseState(key=<secret>, step={self.step!r})"


def add_discrete_gaussian_noise(
    noise_multiplier: float, *, key: jax.Array
) -> optax.GradientTransformationExtraArgs:
    """Add exact discrete Gaussian noise to the sum of `quantized_grad`; return a float32 sum.

    The noise of every entry is a whole number x of quanta with P[x] ∝ exp(−x²/2s²), where s is at
    least z times the sensitivity in quanta. All computation on secrets is exact integer arithmetic,
    so the guarantee of `accounting.DiscreteGaussian` holds for what the machine releases. This
    guarantee covers full batches only. NumPy draws the noise on the host, even under `jit`, so this
    transform is much slower than `add_gaussian_noise`. It raises inside `shard_map`.

    Args:
        noise_multiplier: z, the noise in units of the sensitivity.
        key: one typed key of JAX's default generator, such as `fresh_key()`, used for nothing else;
            see `add_gaussian_noise`. Under `jax.vmap`, map over keys.

    >>> gradient = quantized_grad(jnp.vdot, clip_norm=1.0, resolution=100)
    >>> tx = optax.chain(
    ...     add_discrete_gaussian_noise(2.0, key=jax.random.key(0)),
    ...     optax.scale(1 / 50),  # the number of examples
    ...     optax.sgd(0.1),
    ... )
    >>> params, batch = jnp.zeros(2), jnp.ones((50, 2))
    >>> updates, _ = tx.update(gradient(params, batch), tx.init(params), params)
    """
    if not is_number(noise_multiplier):
        raise TypeError(f"`noise_multiplier` must be a number, got {noise_multiplier!r}.")
    check_positive("noise_multiplier", noise_multiplier)
    check_threefry_key("key", key)

    def init(params: optax.Params) -> AddDiscreteNoiseState:
        del params
        # A copy: donating the optimizer's state must not delete the caller's key.
        return AddDiscreteNoiseState(key=jnp.copy(key), step=jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: AddDiscreteNoiseState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, AddDiscreteNoiseState]:
        del params
        trees.check_not_per_example(extra_args, None)  # this transform would ignore a mask
        _check_outside_shard_map("add_discrete_gaussian_noise")
        _check_no_slack(updates)
        paths, structure = jax.tree.flatten_with_path(updates, is_leaf=_is_quantized)
        trees.check_not_empty("updates", updates)
        _check_quantized(paths)
        leaves = [leaf for _, leaf in paths]
        scale = math.ceil(float(noise_multiplier) * leaves[0].sensitivity)
        if scale > LARGEST_SCALE:
            raise ValueError(
                f"`noise_multiplier` must give noise of at most {LARGEST_SCALE} quanta, got "
                f"{noise_multiplier} times a sensitivity of {leaves[0].sensitivity} quanta; pass a "
                "smaller `resolution` to `quantized_grad`."
            )
        step_key = jax.random.fold_in(fold_in_text(state.key, "discrete noise"), state.step)
        keys = fold_in_texts(step_key, trees.leaf_addresses(updates, _is_quantized))
        is_fresh = state.step < _LAST_STEP
        noisy = [
            jnp.where(is_fresh, _add_noise(leaf.value, key, scale) * leaf.quantum, jnp.nan)
            for leaf, key in zip(leaves, keys, strict=True)
        ]
        step = optax.safe_increment(state.step)
        return jax.tree.unflatten(structure, noisy), AddDiscreteNoiseState(state.key, step)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_quantized(node: object) -> bool:
    return isinstance(node, QuantizedSum)


def _check_no_slack(updates: optax.Updates) -> None:
    leaves = jax.tree.leaves(updates, is_leaf=is_marked)
    found = [leaf.slack for leaf in leaves if is_marked(leaf) and leaf.slack is not None]
    if isinstance(updates, WithSlack):  # from `clip_per_example`
        found = jax.tree.leaves(updates.slack)
    if found:
        raise ValueError(
            f"`slack` must be None with discrete noise, got {len(found[0])}; compute the gradient "
            "with `quantized_grad`, which has no slack."
        )


def _check_quantized(
    paths: Sequence[tuple[jax.tree_util.KeyPath, QuantizedSum | jax.Array]],
) -> None:
    first = paths[0][1]
    for path, leaf in paths:
        name = repr(trees.path_name(path))
        if not (isinstance(leaf, QuantizedSum) and isinstance(first, QuantizedSum)):
            raise ValueError(
                f"`updates` must be the sum of `quantized_grad`, got {type(leaf).__name__} at "
                f"{name}; compute the gradient with `quantized_grad`."
            )
        if leaf.value.dtype != jnp.int32:
            raise ValueError(
                f"`updates` must be in whole quanta, got {leaf.value.dtype} at {name}; make "
                "`add_discrete_gaussian_noise` the first transform of the chain."
            )
        is_alike = (leaf.quantum, leaf.sensitivity) == (first.quantum, first.sensitivity)
        if not is_alike or leaf.together != len(paths):
            raise ValueError(
                f"`updates` must come from one call of `quantized_grad`, got {len(paths)} leaves, "
                f"but {name} comes from a call with {leaf.together} leaves or with other settings; "
                "pass all leaves of one sum, and no others."
            )


def _check_outside_shard_map(name: str) -> None:
    """Raise inside `shard_map`, where the sum and its noise would cover one shard only."""
    if manual_axes():
        raise ValueError(
            f"`{name}` must be called outside shard_map, got the axes "
            f"{', '.join(sorted(map(str, manual_axes())))}; call it under jit on sharded arrays."
        )


def _add_noise(value: jax.Array, key: jax.Array, scale: int) -> jax.Array:
    """Return a leaf with noise, in quanta, as float32."""

    def on_host(value: jax.Array, key: jax.Array) -> np.ndarray:
        noise = discrete_gaussian(Stream(np.asarray(key)), scale, value.size)
        quanta = np.asarray(value).astype(np.int64) + noise.reshape(value.shape)
        return quanta.astype(np.int32)  # modulo 2³²

    like, data = jax.ShapeDtypeStruct(value.shape, jnp.int32), jax.random.key_data(key)
    noisy = jax.pure_callback(on_host, like, value, data, vmap_method="sequential")
    return noisy.astype(jnp.float32)
