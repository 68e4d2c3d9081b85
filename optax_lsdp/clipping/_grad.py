"""Provide `clipped_grad` and `value_and_clipped_grad`, which add clipping to `jax.grad`.

This module checks the arguments, chooses the engine, and marks the clipped sum. The engines are in
`_engines` and `bookkeeping`. Each index of the batch's leading axis is one example, the unit of
privacy. To clip per user, let one example hold all examples of one user; see
`training.average_examples`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from optax_lsdp._checks import check_choice, check_function, check_whole
from optax_lsdp._clipped import divide_by_clip_norm, mark
from optax_lsdp._isolation import check_no_layer_state
from optax_lsdp._keys import is_key
from optax_lsdp._loss import call_or_explain, check_loss_signature
from optax_lsdp._mesh import (
    axis_names,
    check_replicated_axes,
    explicit_spec,
    vary,
    varying_axes,
    with_automatic_axes,
)
from optax_lsdp._trees import (
    check_floating,
    check_mask,
    check_not_empty,
    dtype_name,
    is_floating,
    is_numeric,
    path_name,
)
from optax_lsdp._types import ClipNorm, PyTree
from optax_lsdp.clipping._clip_norm import (
    CLIP_STYLES,
    CheckedClipNorm,
    ClipStyle,
    checked_clip_norm,
)
from optax_lsdp.clipping._engines import ENGINES, ClippedSum, choose_engine, in_microbatches
from optax_lsdp.clipping._slack import count_slack


class PerExample(NamedTuple):
    """Each example's loss, gradient norm and aux. All three are private: never release them.

    Attributes:
        values: losses of shape (n,); zero where the mask is False.
        norms: gradient norms before clipping, of shape (n,); zero where the mask is False. If the
            clip norm is a prefix tree, `norms` is a tree of the same structure with the norms of
            each group. The bookkeeping engine returns inaccurate norms if they are far below the
            clip norm, or if a gradient is a sum of terms that cancel almost entirely. It returns ∞
            if squares overflow. Clip factors do not depend on this accuracy: they come from upper
            bounds on the norms.
        aux: the second output of `loss_fn`, with a leading axis of examples; meaningless where the
            mask is False.
    """

    values: jax.Array
    norms: PyTree
    aux: PyTree = None


def clipped_grad(
    loss_fn: Callable[[optax.Params, PyTree], jax.Array],
    *,
    clip_norm: ClipNorm,
    clip_style: ClipStyle = "threshold",
    engine: Literal["auto", "bookkeeping", "vmap"] = "auto",
    microbatch_size: int | None = None,
    keep_batch_axis: bool = False,
    replicated_axes: str | Sequence[str] = (),
    slack: int | None = None,
) -> Callable[..., optax.Updates]:
    """Return a function `f(params, batch, mask=None)` that sums clipped per-example gradients.

    s = Σᵢ maskᵢ · cᵢ · ∇loss_fn(params, exampleᵢ). The clip factors cᵢ, which `clip_style` defines,
    ensure that adding or removing one example moves s by at most the clip norm C, or, with groups
    of clip norms, by at most `sensitivity(clip_norm)`. The result is a sum, not a mean: the
    optimizers of this package add noise to the sum, and then divide it by the public expected batch
    size.

    Clip factors come from upper bounds on the norms, which allow for rounding errors. So an example
    whose gradient is longer than C contributes a vector slightly shorter than C; `explain_clipping`
    returns the length of this vector. The time of a call does not depend on the examples, unless
    loops or branches of the loss depend on them.

    Inside `shard_map`, a mesh axis splits the model if parameters vary over the axis and the batch
    does not. The norm of an example is then the norm of its whole gradient, over all shards, and
    each shard returns its part of the sum. Do not add up these parts. Arrays that `jit` shards need
    no special treatment.

    Args:
        loss_fn: `loss_fn(params, example)` returns a scalar for one example without batch axis. Put
            keys for dropout into the batch: `f(params, (batch, jax.random.split(key, n)))`.
        clip_norm: C, as in `clip_per_example`. With a schedule, call `f(..., step=step)`. With an
            `AdaptiveClip`, call `f(..., clip_norm=current_clip_norm(state))`.
        clip_style: "threshold" scales gradients longer than C down to C. "automatic" scales every
            gradient to the norm C·‖g‖/(‖g‖ + 0.01), so C only scales updates and needs no tuning.
        engine: how norms and sums are computed. "bookkeeping" runs one backward pass. It forms
            per-example gradients of a parameter only if that is cheapest on the platform for which
            XLA compiles the program, or if no rule applies to the parameter; see
            `explain_clipping`. It first rounds operands and cotangents to the precision of the
            platform's matrix unit: TF32 on NVIDIA GPUs, bfloat16 on TPUs, and float32 elsewhere.
            Norms and sums are those of the rounded numbers. "vmap" forms all per-example gradients;
            it is the reference. "auto" means "vmap" if shards of a `shard_map` split the work on
            one example, which "bookkeeping" does not support. Otherwise, it means "bookkeeping".
        microbatch_size: how many examples to differentiate at a time, to bound memory.
        keep_batch_axis: whether `loss_fn` gets its example with a leading axis of length 1.
        replicated_axes: inside `shard_map` or `pmap`, the mesh axes over which all parameters are
            replicated. The library cannot check that they are. You must name such an axis if JAX
            does not track it (check_vma=False, `pmap`), if parameters and batch both vary over it,
            or if neither varies over it.
        slack: K, the number of slack coordinates, up to 1,024, or None for no slack. From the
            slack, the optimizer estimates the distribution of gradient norms at no cost in ε. Each
            example adds K coordinates to the sum: the first ⌊K(1 − r²/C²)⌋ are C/√K, and the others
            are 0, where r is an upper bound on the norm of the example's clipped gradient. So the
            sum and its slack together have the same sensitivity as the sum alone. Pass the same K
            to the optimizer, which adds noise to the sum and to its slack; see `norm_estimates`.
            With groups of clip norms, each group has its own K coordinates.

    Returns:
        The function f. `batch` is a tree of arrays with a leading axis of examples; typed keys are
        allowed. `mask` is a bool array of shape (n,), False for padding. Padding contributes zero,
        and so do examples whose gradient is not finite. With the bookkeeping engine, an example
        also contributes zero if squares overflow, which may happen if its operands exceed about
        10¹⁹, or if its cotangents or gradients exceed about 10¹⁹ clip norms. The result of f has
        the structure of `params`; each leaf is a `Clipped`. Arrays that `loss_fn` closes over count
        as public.

    >>> import numpy as np
    >>> def loss(w, x):
    ...     return jnp.vdot(w, x)
    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.5]])  # the gradients themselves
    >>> total = jax.jit(clipped_grad(loss, clip_norm=1.0))(jnp.zeros(2), batch)
    >>> print(np.asarray(total.value).round(3), total.clip_norm)
    [0.6 1.3] 1.0
    """
    value_and_grad = value_and_clipped_grad(
        loss_fn,
        clip_norm=clip_norm,
        clip_style=clip_style,
        engine=engine,
        microbatch_size=microbatch_size,
        keep_batch_axis=keep_batch_axis,
        replicated_axes=replicated_axes,
        slack=slack,
    )

    def grad(
        params: optax.Params,
        batch: PyTree,
        mask: jax.Array | None = None,
        *,
        step: ArrayLike | None = None,
        clip_norm: ClipNorm = None,
    ) -> optax.Updates:
        return value_and_grad(params, batch, mask, step=step, clip_norm=clip_norm)[1]

    return grad


def value_and_clipped_grad(
    loss_fn: Callable[[optax.Params, PyTree], PyTree],
    *,
    clip_norm: ClipNorm,
    clip_style: ClipStyle = "threshold",
    engine: Literal["auto", "bookkeeping", "vmap"] = "auto",
    microbatch_size: int | None = None,
    keep_batch_axis: bool = False,
    replicated_axes: str | Sequence[str] = (),
    slack: int | None = None,
    has_aux: bool = False,
) -> Callable[..., tuple[PerExample, optax.Updates]]:
    """Return a function `f(params, batch, mask=None)` that returns `(PerExample, clipped sum)`.

    The clipped sum is the result of `clipped_grad`. `PerExample` holds each example's loss, norm
    and aux, which are private: never release them, or anything that depends on them, without noise.
    All arguments except `has_aux` are those of `clipped_grad`. With `has_aux`, `loss_fn` returns a
    pair `(value, aux)`. With `keep_batch_axis`, the aux of each example keeps its batch axis of
    length 1.

    >>> def loss(w, x):
    ...     return jnp.vdot(w, x)
    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> f = jax.jit(value_and_clipped_grad(loss, clip_norm=1.0))
    >>> private, total = f(jnp.ones(2), batch)
    >>> print(private.values, private.norms)
    [7.  0.5] [5.  0.5]
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_loss_signature(loss_fn)
    norm = checked_clip_norm(clip_norm, slack)
    check_choice("clip_style", clip_style, CLIP_STYLES)
    if norm.adaptive is not None and clip_style != "threshold":
        raise ValueError(
            f"`clip_style` must be 'threshold' with an AdaptiveClip, got {clip_style!r}; with "
            "automatic clipping the clip norm only scales updates, so pass a number."
        )
    check_choice("engine", engine, ("auto", *ENGINES))
    if microbatch_size is not None:
        check_whole("microbatch_size", microbatch_size)
    named_axes = axis_names(replicated_axes)

    def value_and_aux(params: optax.Params, example: PyTree) -> tuple[jax.Array, PyTree]:
        if keep_batch_axis:
            example = jax.tree.map(lambda x: x[None], example)
        output = call_or_explain(loss_fn, params, example)
        _check_output(output, has_aux)
        return output if has_aux else (output, None)

    def value_and_grad(
        params: optax.Params,
        batch: PyTree,
        mask: jax.Array | None = None,
        *,
        step: ArrayLike | None = None,
        clip_norm: ClipNorm = None,
    ) -> tuple[PerExample, optax.Updates]:
        check_not_empty("params", params)
        check_no_layer_state(params)
        check_floating("params", params)
        size = _batch_size(batch)
        check_mask(mask, size)
        check_replicated_axes(named_axes, params, (batch, mask))
        params = vary(params, varying_axes((batch, mask)))
        _check_step(norm, step, clip_norm)
        now = norm.at(step, clip_norm)
        clip = choose_engine(engine, value_and_aux, params, batch)

        def run(
            params: optax.Params, batch: PyTree, mask: jax.Array | None, now: ClipNorm
        ) -> tuple[ClippedSum, dict[str, jax.Array]]:
            groups = norm.groups(params, now)
            clip_some = partial(clip, value_and_aux, params, groups=groups, style=clip_style)
            found = in_microbatches(clip_some, batch, mask, microbatch_size or size)
            return found, count_slack(found[1], groups, norm) if norm.slack else {}

        by_example = explicit_spec(jax.tree.leaves(batch)[0], 1)
        shardings = (by_example, by_example, jax.tree.map(explicit_spec, params))
        run = with_automatic_axes(run, (shardings, jax.P()))
        ((values, aux), (norms, _), total), counts = run(params, batch, mask, now)
        if norm.is_relative:
            total = divide_by_clip_norm(total, norm.groups(params, now))
        if mask is not None:
            values, norms = jax.tree.map(lambda x: jnp.where(mask, x, 0), (values, norms))
        marked = mark(total, norm.groups(params), mask is not None, counts)
        return PerExample(values, norm.in_tree(norms), aux), marked

    return value_and_grad


def _check_step(norm: CheckedClipNorm, step: ArrayLike | None, clip_norm: ClipNorm) -> None:
    """Raise if a schedule lacks a `step`, or if `step` or `clip_norm` is passed but not needed."""
    if norm.is_schedule != (step is not None):
        raise ValueError(
            "`step` must be passed if and only if `clip_norm` is a schedule, got "
            f"step={step!r} with clip_norm={norm.value!r}."
        )
    if norm.adaptive is None and clip_norm is not None:
        raise ValueError(
            "`clip_norm` must be passed to the gradient function only if `clipped_grad` got an "
            f"AdaptiveClip, got {clip_norm!r} although `clipped_grad` got {norm.value!r}; leave "
            "`clip_norm` out."
        )


def _check_output(output: PyTree, has_aux: bool) -> None:
    """Raise unless `loss_fn` returned a loss or, with `has_aux`, a pair (loss, aux)."""
    if isinstance(output, tuple) != has_aux or (has_aux and len(output) != 2):
        demand = "a pair (value, aux) with" if has_aux else "one value without"
        raise ValueError(
            f"`loss_fn` must return {demand} has_aux=True, got {type(output).__name__}; to "
            "return aux, use `value_and_clipped_grad(..., has_aux=True)`."
        )
    value = output[0] if has_aux else output
    if not (is_floating(value) or isinstance(value, float)):
        raise TypeError(
            "`loss_fn` must return the loss, a real floating-point scalar, got "
            f"{dtype_name(value)}; to return other values as well, use "
            "`value_and_clipped_grad(..., has_aux=True)`."
        )
    if jnp.shape(value) != ():
        raise ValueError(
            f"`loss_fn` must return a scalar for one example, got shape {jnp.shape(value)}; reduce "
            "the loss to a scalar; the example has no batch axis, or a batch axis of length 1 with "
            "keep_batch_axis=True (with `fit`, pass `training.keep_batch_axis(loss_fn)`)."
        )


def _batch_size(batch: PyTree) -> int:
    """Return the number of examples. Raise unless it is the same in all leaves."""
    check_not_empty("batch", batch)
    leaves = jax.tree.leaves_with_path(batch)
    for path, leaf in leaves:
        if hasattr(leaf, "dtype") and not (is_numeric(leaf) or is_key(leaf)):
            raise TypeError(
                f"`batch` must hold numbers or keys, got {dtype_name(leaf)} at "
                f"{path_name(path)!r}; encode text and dates as numbers first."
            )
        if getattr(leaf, "shape", ()) == ():
            raise ValueError(
                "`batch` must be a tree of arrays with a leading axis of examples, got one "
                f"{dtype_name(leaf)} at {path_name(path)!r}; split a key with "
                "jax.random.split(key, n), and let `loss_fn` close over values that all examples "
                "share."
            )
        if len(leaf) != len(leaves[0][1]):
            raise ValueError(
                "`batch` must have the same number of examples in all leaves, got "
                f"{len(leaves[0][1])} at {path_name(leaves[0][0])!r} and {len(leaf)} at "
                f"{path_name(path)!r}."
            )
    return len(leaves[0][1])
