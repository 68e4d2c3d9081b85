"""The step: parameters and a batch go in, new parameters come out, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import is_number
from optax_lsdp._loss import LossFn, takes_key, with_key_in_example
from optax_lsdp._trees import widen
from optax_lsdp.clipping import ClipStyle
from optax_lsdp.noise import is_noise_state
from optax_lsdp.planning import Piecewise, PrivacyPlan

Average = float | str | None


class State(NamedTuple):
    """What a run carries from step to step; it holds keys and is a secret.

    Attributes:
        params: the parameters, which may be released.
        optimizer: the state of the optimizer, the noise key in it.
        average: the average of the parameters, which may be released, or an empty tuple.
        key: the key of the run.
    """

    params: Any
    optimizer: Any
    average: Any
    key: jax.Array

    def __repr__(self) -> str:
        return f"State({self.params!r}, {self.optimizer!r}, {self.average!r}, key=<secret>)"


class Chunk(NamedTuple):
    """Some examples of a batch, and what else a step needs to know of them."""

    examples: Any
    mask: Any
    key: jax.Array
    step: Any


def make_steps(
    plan: PrivacyPlan,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    average: Average,
    clip_style: ClipStyle = "threshold",
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `add(params, sums, chunk)` and `step(state, sums, chunk)`.

    A batch is cut into chunks. `add` adds the clipped gradients of one to `sums`, which are None
    at first; `step` takes the last chunk, adds the noise and updates. Both return a loss as well,
    which is private: the sum so far, and at last the mean.
    """
    keyed, scheduled = takes_key(loss_fn), isinstance(plan.clip_norm, Piecewise)
    loss = with_key_in_example(loss_fn) if keyed else loss_fn
    gradient = plan.value_and_clipped_grad(loss, clip_style=clip_style)

    def add(params: Any, sums: Any, chunk: Chunk) -> Any:
        batch = chunk.examples
        if keyed:
            batch = batch, jax.random.split(chunk.key, len(chunk.mask))
        options = {"step": chunk.step} if scheduled else {}
        private, total = gradient(params, batch, chunk.mask, **options)
        sums_of_all = total, private.values.sum()
        if sums is not None:
            sums_of_all = jax.tree.map(jnp.add, sums, sums_of_all)
        return sums_of_all, sums_of_all[1] + 0  # the former are given to the next call

    def step(state: State, sums: Any, chunk: Chunk) -> tuple[State, jax.Array]:
        (total, losses), _ = add(state.params, sums, chunk)
        updates, inner = optimizer.update(total, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        mean = _average(average, state.average, params, chunk.step)
        return State(params, inner, mean, state.key), losses / plan.expected_batch_size

    return add, step


def _average(kind: Average, mean: Any, params: Any, step: Any) -> Any:
    """Return the mean of all parameters so far, or one that forgets exponentially."""
    if kind is None:
        return mean
    count = jnp.asarray(step, jnp.float32) + 1
    rate = 1 / count if kind == "polyak" else 1 - jnp.asarray(kind, jnp.float32)

    def mix(mean: jax.Array, new: jax.Array) -> jax.Array:
        return mean + rate.astype(mean.dtype) * (new.astype(mean.dtype) - mean)

    return jax.tree.map(mix, mean, params)


def first_average(kind: Average, params: Any) -> Any:
    """Return where an average begins, in float32 at least: in half precision it would stand still.

    Raises:
        ValueError: if there is no such average.
    """
    if kind is None:
        return ()
    if kind != "polyak" and not (is_number(kind) and 0 < kind < 1):
        raise ValueError(
            f'`average` must be "polyak", a decay above 0 and below 1, or None, got {kind!r}.'
        )
    return jax.tree.map(lambda x: jnp.copy(widen(x)), params)


def with_noise_key(state: Any, key: jax.Array) -> Any:
    """Return an optimizer's state that draws the plan's noise, its first, from another key."""
    given = iter([key])
    return jax.tree.map(
        lambda x: x._replace(key=jnp.copy(next(given, x.key))) if is_noise_state(x) else x,
        state,
        is_leaf=is_noise_state,
    )
