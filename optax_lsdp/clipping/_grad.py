"""clipped_grad: a loss for one example goes in, a function to the clipped sum comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_choice, check_function, check_whole
from optax_lsdp._clipped import mark
from optax_lsdp._isolation import ValueAndAux, check_no_layer_state, is_example_split
from optax_lsdp._keys import is_key
from optax_lsdp._loss import call_or_explain, check_loss_signature
from optax_lsdp._mesh import (
    axis_names,
    check_replicated_axes,
    explicit_spec,
    manual_axes,
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
    leaf_addresses,
    path_name,
)
from optax_lsdp.clipping._factors import (
    STYLES,
    ClipNorm,
    ClipStyle,
    clip_groups,
    frozen_clip_norm,
    is_schedule,
)
from optax_lsdp.clipping._microbatch import in_microbatches
from optax_lsdp.clipping._vmap import clip_by_vmap
from optax_lsdp.clipping.bookkeeping import clip_by_bookkeeping

Engine = Callable[..., tuple[tuple[jax.Array, Any], dict[str, jax.Array], optax.Updates]]
_ENGINES: dict[str, Engine] = {"bookkeeping": clip_by_bookkeeping, "vmap": clip_by_vmap}
_DEFAULT_ENGINE = "bookkeeping"


class PerExample(NamedTuple):
    """What each example gave. Private: one entry per example, never to be released.

    Attributes:
        values: (n,) losses; zero where masked.
        norms: (n,) gradient norms before clipping, zero where masked; with a prefix tree of
            clip norms, a tree of the same structure. Those far below the clip norm, which
            decide nothing, may be coarse.
        aux: what `loss_fn` returned beside its value, with a leading axis of examples;
            meaningless where masked.
    """

    values: jax.Array
    norms: Any
    aux: Any = None


def clipped_grad(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    *,
    clip_norm: ClipNorm,
    clip_style: ClipStyle = "threshold",
    engine: Literal["auto", "bookkeeping", "vmap"] = "auto",
    microbatch_size: int | None = None,
    keep_batch_axis: bool = False,
    replicated_axes: str | Sequence[str] = (),
) -> Callable[..., optax.Updates]:
    """Return `f(params, batch, mask=None)`, the sum of clipped per-example gradients.

    s = Σᵢ maskᵢ · cᵢ · ∇loss_fn(params, exampleᵢ), with cᵢ as `clip_style` says, so that adding
    or removing one example moves s by at most C. It is a sum, not a mean: the optimizers
    of this package divide it by the expected batch size, a public number, after the noise.

    Args:
        loss_fn: `loss_fn(params, example)`, a scalar for one example without batch axis. A key
            for dropout is part of the example: `f(params, (batch, jax.random.split(key, n)))`.
        clip_norm: C, as in `clip_per_example`. Under a schedule, call `f(..., step=step)`.
        clip_style: "threshold" scales down gradients longer than C; "automatic" scales every
            gradient to C·‖g‖/(‖g‖ + 0.01), so that only the learning rate is left to tune.
        engine: how norms and sums are computed. "bookkeeping", which "auto" is, takes one backward
            pass and forms no gradient of a single example where there is a cheaper way
            (`explain_clipping` tells); "vmap" forms all of them, and is the reference.
        microbatch_size: how many examples are differentiated at a time, to bound memory.
        keep_batch_axis: give `loss_fn` its example with a leading axis of length 1.
        replicated_axes: inside `shard_map` or `pmap`, the mesh axes over which all parameters are
            replicated: your word for it. It is needed where JAX does not tell (check_vma=False,
            `pmap`), and for axes over which parameters and batch both vary, or neither.

    Inside `shard_map`, parameters that vary over a mesh axis over which the batch does not are
    parts of one model. An example's norm is that of its whole gradient, and the vmap engine
    computes it; do not add the parts up. Outside, with arrays that `jit` shards, nothing needs to
    be said.

    Returns:
        f. `batch` is a tree of arrays with a leading axis of examples, typed keys (for dropout)
        included; `mask` is (n,), bool, False for padding, which contributes zero. The
        result has the structure of `params`, each leaf a `Clipped`. Examples whose gradient is
        not finite contribute zero. Arrays that `loss_fn` closes over count as public.

    >>> import numpy as np
    >>> def loss(w, x):
    ...     return jnp.vdot(w, x)
    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.5]])  # the gradients themselves
    >>> total = clipped_grad(loss, clip_norm=1.0)(jnp.zeros(2), batch)
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
    )

    def grad(
        params: optax.Params, batch: Any, mask: jax.Array | None = None, *, step: Any = None
    ) -> optax.Updates:
        return value_and_grad(params, batch, mask, step=step)[1]

    return grad


def value_and_clipped_grad(
    loss_fn: Callable[[optax.Params, Any], Any],
    *,
    clip_norm: ClipNorm,
    clip_style: ClipStyle = "threshold",
    engine: Literal["auto", "bookkeeping", "vmap"] = "auto",
    microbatch_size: int | None = None,
    keep_batch_axis: bool = False,
    replicated_axes: str | Sequence[str] = (),
    has_aux: bool = False,
) -> Callable[..., tuple[PerExample, optax.Updates]]:
    """Return `f(params, batch, mask=None)`, giving `(PerExample, clipped sum)`.

    As `clipped_grad`, with each example's loss, norm and aux beside the sum. Those are
    private: they may steer nothing that is released unless noise is added to them as well.

    Args:
        loss_fn: as in `clipped_grad`; with `has_aux`, it returns `(value, aux)`.
        clip_norm: as in `clipped_grad`.
        clip_style: as in `clipped_grad`.
        engine: as in `clipped_grad`.
        microbatch_size: as in `clipped_grad`.
        keep_batch_axis: as in `clipped_grad`; aux comes back as `loss_fn` made it.
        replicated_axes: as in `clipped_grad`.
        has_aux: whether `loss_fn` returns a pair.

    >>> def loss(w, x):
    ...     return jnp.vdot(w, x)
    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.5]])
    >>> private, total = value_and_clipped_grad(loss, clip_norm=1.0)(jnp.ones(2), batch)
    >>> print(private.values, private.norms)
    [7.  0.5] [5.  0.5]
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_loss_signature(loss_fn)
    clip_norm = frozen_clip_norm(clip_norm)
    check_choice("clip_style", clip_style, STYLES)
    check_choice("engine", engine, ("auto", *_ENGINES))
    if microbatch_size is not None:
        check_whole("microbatch_size", microbatch_size)
    named_axes = axis_names(replicated_axes)

    def value_and_aux(params: optax.Params, example: Any) -> tuple[jax.Array, Any]:
        if keep_batch_axis:
            example = jax.tree.map(lambda x: x[None], example)
        output = call_or_explain(loss_fn, params, example)
        _check_output(output, has_aux)
        return output if has_aux else (output, None)

    def value_and_grad(
        params: optax.Params, batch: Any, mask: jax.Array | None = None, *, step: Any = None
    ) -> tuple[PerExample, optax.Updates]:
        check_not_empty("params", params)
        check_no_layer_state(params)
        check_floating("params", params)
        size = _batch_size(batch)
        check_mask(mask, size)
        check_replicated_axes(named_axes, params, (batch, mask))
        params = vary(params, varying_axes((batch, mask)))
        now = _clip_norm_at(clip_norm, step)
        clip = _choose_engine(engine, value_and_aux, params, batch)

        def run(params: optax.Params, batch: Any, mask: Any, now: ClipNorm) -> Any:
            groups = clip_groups(now, params)
            clip_some = partial(clip, value_and_aux, params, groups=groups, style=clip_style)
            return in_microbatches(clip_some, batch, mask, microbatch_size or size)

        by_example = explicit_spec(jax.tree.leaves(batch)[0], 1)
        shardings = (by_example, by_example, jax.tree.map(explicit_spec, params))
        run = with_automatic_axes(run, shardings)
        (values, aux), norms, total = run(params, batch, mask, now)
        if is_schedule(clip_norm):
            total = jax.tree.map(lambda x: x / jnp.asarray(now, x.dtype), total)
        if mask is not None:
            values, norms = jax.tree.map(lambda x: jnp.where(mask, x, 0), (values, norms))
        by_group = [norms[address] for address in leaf_addresses(clip_norm)]
        norms = jax.tree.unflatten(jax.tree.structure(clip_norm), by_group)
        marked = mark(total, clip_groups(clip_norm, params), mask is not None)
        return PerExample(values, norms, aux), marked

    return value_and_grad


def _choose_engine(engine: str, loss_fn: ValueAndAux, params: optax.Params, batch: Any) -> Engine:
    """Return the engine that was asked for, or vmap where shards split the work on an example."""
    name = _DEFAULT_ENGINE if engine == "auto" else engine
    if name == "vmap" or not manual_axes():
        return _ENGINES[name]
    if not is_example_split(loss_fn, params, jax.tree.map(lambda x: x[0], batch)):
        return _ENGINES[name]
    if engine == "auto":
        return _ENGINES["vmap"]
    raise ValueError(
        f"`engine` must be 'auto' or 'vmap' where shards of a shard_map split the work on an "
        f"example, got {engine!r}; outside of shard_map, with arrays that `jit` shards, it works."
    )


def _clip_norm_at(clip_norm: ClipNorm, step: Any) -> ClipNorm:
    """Return the clip norm of this step: its schedule's value, or itself."""
    if is_schedule(clip_norm) != (step is not None):
        raise ValueError(
            "`step` must be given with a schedule of clip norms and only then, got "
            f"step={step!r} with clip_norm={clip_norm!r}."
        )
    return clip_norm(step) if is_schedule(clip_norm) else clip_norm


def _check_output(output: Any, has_aux: bool) -> None:
    """Raise unless a loss, alone or with its aux, came out of `loss_fn`."""
    if isinstance(output, tuple) != has_aux or (has_aux and len(output) != 2):
        demand = "a pair (value, aux) with" if has_aux else "one value without"
        raise ValueError(
            f"`loss_fn` must return {demand} has_aux=True, got {type(output).__name__}; aux comes "
            "back from `value_and_clipped_grad(..., has_aux=True)`."
        )
    value = output[0] if has_aux else output
    if not (is_floating(value) or isinstance(value, float)):
        raise TypeError(
            f"`loss_fn` must return the loss, a real floating-point scalar, got "
            f"{dtype_name(value)}; what else it computes comes back from "
            "`value_and_clipped_grad(..., has_aux=True)`."
        )
    if jnp.shape(value) != ():
        raise ValueError(
            f"`loss_fn` must return a scalar for one example, got shape {jnp.shape(value)}; it "
            "sees one example without batch axis, or with one of length 1 (keep_batch_axis=True; "
            "for `fit`, `training.keep_batch_axis(loss_fn)`)."
        )


def _batch_size(batch: Any) -> int:
    """Return the number of examples, on which all leaves must agree."""
    leaves = jax.tree.leaves_with_path(batch)
    if not leaves:
        raise ValueError("`batch` must hold at least one array, got none.")
    for path, leaf in leaves:
        if hasattr(leaf, "dtype") and not (is_numeric(leaf) or is_key(leaf)):
            raise TypeError(
                f"`batch` must hold numbers or keys, got {dtype_name(leaf)} at "
                f"{path_name(path)!r}; encode text and dates first."
            )
        if getattr(leaf, "shape", ()) == ():
            raise ValueError(
                "`batch` must be a tree of arrays with a leading axis of examples, got one "
                f"{dtype_name(leaf)} at {path_name(path)!r}; split a key with "
                "jax.random.split(key, n), and let `loss_fn` close over what all examples share."
            )
        if len(leaf) != len(leaves[0][1]):
            raise ValueError(
                f"`batch` must have one length in all leaves, got {len(leaves[0][1])} at "
                f"{path_name(leaves[0][0])!r} and {len(leaf)} at {path_name(path)!r}."
            )
    return len(leaves[0][1])
