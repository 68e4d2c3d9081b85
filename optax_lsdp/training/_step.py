"""One step of training: clip, add noise, smooth, update, average, compiled once per run.

A batch is split into microbatches. `add_microbatch` adds the clipped sum of one microbatch to those
before it; `take_step` handles the last microbatch, adds the noise and updates the parameters. Also
here: wrappers that change what a loss computes before it is clipped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Compiled
from jax.typing import DTypeLike

from optax_lsdp._checks import check_whole, is_number
from optax_lsdp._loss import LossFn, call_loss, takes_key, with_key_in_example
from optax_lsdp._trees import widen
from optax_lsdp._types import PyTree
from optax_lsdp.clipping import ClipStyle
from optax_lsdp.noise import is_noise_state
from optax_lsdp.planning import Piecewise, PrivacyPlan

Average = float | Literal["polyak"] | None

_IN_FLIGHT = 2  # microbatches that devices may still be computing when the next one is sent


class State(NamedTuple):
    """What a run carries from step to step. It holds keys and is a secret.

    Attributes:
        params: the parameters, which may be released.
        optimizer: the state of the optimizer, including the noise key.
        average: the average of the parameters, which may be released, or an empty tuple.
        key: the key of the run.
    """

    params: optax.Params
    optimizer: optax.OptState
    average: optax.Params
    key: jax.Array

    def __repr__(self) -> str:
        return f"State({self.params!r}, {self.optimizer!r}, {self.average!r}, key=<secret>)"


class Microbatch(NamedTuple):
    """Some examples of a batch, as the compiled functions take them.

    Attributes:
        examples: arrays with a leading axis of examples.
        mask: True where there is an example, False where there is padding.
        key: the key from which the keys of the examples are split.
        step: the number of the step, from 0.
    """

    examples: PyTree
    mask: jax.Array
    key: jax.Array
    step: np.int32


class Sums(NamedTuple):
    """The clipped sum of gradients, and the sum of losses, so far. Without noise: private."""

    gradient: optax.Updates
    loss: jax.Array


AddMicrobatch = Callable[[optax.Params, Sums | None, Microbatch], tuple[Sums, jax.Array]]
TakeStep = Callable[[State, Sums | None, Microbatch], tuple[State, jax.Array]]


def make_step(
    plan: PrivacyPlan,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    average: Average,
    clip_style: ClipStyle = "threshold",
) -> tuple[AddMicrobatch, TakeStep]:
    """Return `add_microbatch(params, sums, microbatch)` and `take_step(state, sums, microbatch)`.

    `sums` is None for the first microbatch. Beside its result, each function returns a private
    loss: `add_microbatch` the sum so far, `take_step` the mean over the expected batch size.
    """
    keyed, scheduled = takes_key(loss_fn), isinstance(plan.clip_norm, Piecewise)
    loss = with_key_in_example(loss_fn) if keyed else loss_fn
    gradient = plan.value_and_clipped_grad(loss, clip_style=clip_style)

    def add_microbatch(
        params: optax.Params, sums: Sums | None, microbatch: Microbatch
    ) -> tuple[Sums, jax.Array]:
        batch, mask = microbatch.examples, microbatch.mask
        if keyed:
            batch = batch, jax.random.split(microbatch.key, len(mask))
        options = {"step": microbatch.step} if scheduled else {}
        per_example, total = gradient(params, batch, mask, **options)
        added = Sums(total, per_example.values.sum())
        if sums is not None:
            added = jax.tree.map(jnp.add, sums, added)
        return added, added.loss + 0  # a copy: the next call takes the memory of the sums

    def take_step(
        state: State, sums: Sums | None, microbatch: Microbatch
    ) -> tuple[State, jax.Array]:
        (total, loss_sum), _ = add_microbatch(state.params, sums, microbatch)
        updates, inner = optimizer.update(total, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        mean = _update_average(average, state.average, params, microbatch.step)
        return State(params, inner, mean, state.key), loss_sum / plan.expected_batch_size

    return add_microbatch, take_step


def initial_average(kind: Average, params: optax.Params) -> optax.Params:
    """Return the average before the first step, in float32 or wider.

    In half precision an average would stop moving: the changes are smaller than its rounding.

    Raises:
        ValueError: if `kind` names no average.
    """
    if kind is None:
        return ()
    if kind != "polyak" and not (is_number(kind) and 0 < kind < 1):
        raise ValueError(
            f'`average` must be "polyak", a decay above 0 and below 1, or None, got {kind!r}.'
        )
    return jax.tree.map(lambda x: jnp.copy(widen(x)), params)


def _update_average(
    kind: Average, mean: optax.Params, params: optax.Params, step: np.int32
) -> optax.Params:
    """Return the mean of the parameters after all steps so far, or their exponential average."""
    if kind is None:
        return mean
    count = jnp.asarray(step, jnp.float32) + 1
    rate = 1 / count if kind == "polyak" else 1 - jnp.asarray(kind, jnp.float32)

    def mix(mean: jax.Array, new: jax.Array) -> jax.Array:
        return mean + rate.astype(mean.dtype) * (new.astype(mean.dtype) - mean)

    return jax.tree.map(mix, mean, params)


def with_noise_key(state: optax.OptState, key: jax.Array) -> optax.OptState:
    """Return an optimizer state whose first noise, the plan's, is drawn from another key."""
    keys = iter([key])
    return jax.tree.map(
        lambda x: x._replace(key=jnp.copy(next(keys, x.key))) if is_noise_state(x) else x,
        state,
        is_leaf=is_noise_state,
    )


class CompiledStep:
    """The functions of `make_step`, compiled for arrays like those of `state` and `microbatch`.

    A batch has at most `count` microbatches. `compile` compiles a jitted function for some
    arguments. On a mesh, `replicated` is the sharding of replicated arrays. To bound memory, at
    most two microbatches are in flight.
    """

    def __init__(
        self,
        step: tuple[AddMicrobatch, TakeStep],
        state: State,
        microbatch: Microbatch,
        *,
        count: int,
        compile: Callable[..., Compiled],
        replicated: jax.sharding.NamedSharding | None,
    ) -> None:
        add_microbatch, take_step = step
        on_mesh = replicated is not None
        shapes, batch = describe(state, on_mesh), describe(microbatch, on_mesh)
        sums = None
        self._adders: tuple[Compiled, ...] = ()
        if count > 1:  # with one microbatch there is nothing to add
            first = compile(jax.jit(add_microbatch), shapes.params, None, batch)
            sums, _ = jax.eval_shape(add_microbatch, shapes.params, None, batch)
            if on_mesh:
                shardings, _ = first.output_shardings
                sums = jax.tree.map(lambda x, s: x.update(sharding=s), sums, shardings)
            donating = jax.jit(add_microbatch, donate_argnums=1)
            self._adders = first, compile(donating, shapes.params, sums, batch)
        outputs = (jax.tree.map(lambda x: x.sharding, state), replicated) if on_mesh else None
        whole = jax.jit(take_step, donate_argnums=0, out_shardings=outputs)
        self.compiled = compile(whole, shapes, sums, batch)
        self._in_flight: deque[jax.Array] = deque()

    def add(self, params: optax.Params, sums: Sums | None, microbatch: Microbatch) -> Sums:
        """Add the clipped sum of a microbatch, not the last one of its batch, to `sums`."""
        add_first, add_next = self._adders
        add = add_first if sums is None else add_next
        sums, loss = add(params, sums, microbatch)
        self._wait(loss)
        return sums

    def take(
        self, state: State, sums: Sums | None, microbatch: Microbatch
    ) -> tuple[State, jax.Array]:
        """Finish a step with its last microbatch; return the new state and the private loss.

        The step takes over the memory of `state`, which cannot be used afterwards.
        """
        state, loss = self.compiled(state, sums, microbatch)
        self._wait(loss)
        return state, loss

    def _wait(self, result: jax.Array) -> None:
        """Wait until only a few microbatches are in flight."""
        self._in_flight.append(result)
        if len(self._in_flight) > _IN_FLIGHT:
            jax.block_until_ready(self._in_flight.popleft())


def describe(tree: PyTree, with_sharding: bool) -> PyTree:
    """Return shapes and dtypes in place of arrays, with their shardings if wanted."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=getattr(x, "sharding", None) if with_sharding else None
        ),
        tree,
    )


def mixed_precision(loss_fn: LossFn, dtype: DTypeLike = jnp.bfloat16) -> LossFn:
    """Return a loss that computes with parameters and examples in half precision.

    The parameters themselves stay in float32, and so do norms, sums, noise and updates.

    >>> loss = mixed_precision(lambda w, x: jnp.vdot(w, x))
    >>> jax.grad(loss)(jnp.ones(2), jnp.ones(2)).dtype
    dtype('float32')
    """

    def cast(tree: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
        )

    def loss(params: optax.Params, example: PyTree, *key: jax.Array) -> jax.Array:
        return call_loss(loss_fn, cast(params), cast(example), *key).astype(jnp.float32)

    return _with_arguments_of(loss_fn, loss)


def keep_batch_axis(loss_fn: LossFn) -> LossFn:
    """Return a loss for `fit` that gives `loss_fn` each example with a leading axis of length 1.

    >>> loss = keep_batch_axis(lambda w, x: jnp.sum(x @ w))
    >>> print(loss(jnp.ones(3), jnp.ones(3)))
    3.0
    """

    def loss(params: optax.Params, example: PyTree, *key: jax.Array) -> jax.Array:
        return call_loss(loss_fn, params, jax.tree.map(lambda x: x[None], example), *key)

    return _with_arguments_of(loss_fn, loss)


def average_views(
    loss_fn: LossFn, augment: Callable[[jax.Array, PyTree], PyTree], views: int
) -> LossFn:
    """Return the mean loss over random views of an example (augmentation multiplicity).

    The views are averaged before the gradient is clipped, so that together they count as one
    example.

    Args:
        loss_fn: `loss_fn(params, example)`, or with a key for each view as a third argument.
        augment: `augment(key, example)`, which returns a view of the example.
        views: how many views to average.

    >>> def loss_fn(params, x):
    ...     return (params - x) ** 2
    >>> loss = average_views(loss_fn, lambda key, x: x + jax.random.normal(key), 10_000)
    >>> print(round(float(loss(0.0, 0.0, jax.random.key(0))), 1))  # the variance of the views
    1.0
    """
    check_whole("views", views)
    keyed = takes_key(loss_fn)

    def loss(params: optax.Params, example: PyTree, key: jax.Array) -> jax.Array:
        keys = jax.random.split(key, views)
        seen = jax.vmap(augment, (0, None))(keys, example)
        if keyed:
            others = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            return jax.vmap(partial(call_loss, loss_fn), (None, 0, 0))(params, seen, others).mean()
        return jax.vmap(loss_fn, (None, 0))(params, seen).mean()

    return loss


def _with_arguments_of(loss_fn: LossFn, loss: LossFn) -> LossFn:
    """Return `loss` with two or three arguments, as many as `loss_fn` takes."""
    if takes_key(loss_fn):
        return lambda params, example, key: loss(params, example, key)
    return lambda params, example: loss(params, example)
