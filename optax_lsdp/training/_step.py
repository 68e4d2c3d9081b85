"""One training step, compiled once per run: clip, add noise, smooth, update, average.

A batch is split into microbatches. `add_microbatch` adds the clipped sum of one microbatch to the
sum of the earlier microbatches. `take_step` adds the last microbatch and the noise, and updates the
parameters.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.stages import Compiled

from optax_lsdp._checks import is_number
from optax_lsdp._loss import LossFn, takes_key, with_key_in_example
from optax_lsdp._trees import widen
from optax_lsdp._types import PyTree
from optax_lsdp.clipping import AdaptiveClip, ClipStyle, current_clip_norm
from optax_lsdp.planning import Piecewise, PrivacyPlan
from optax_lsdp.training._users import UserBatch

Average = float | Literal["polyak"] | None

_IN_FLIGHT = 2  # unfinished microbatches that the devices may hold


class State(NamedTuple):
    """The arrays that a run carries from step to step. They include keys, so keep them secret."""

    params: optax.Params  # may be released
    optimizer: optax.OptState  # includes the noise key
    average: optax.Params  # the average of the parameters, or an empty tuple; may be released
    key: jax.Array  # the key of the run

    def __repr__(self) -> str:
        return f"State({self.params!r}, {self.optimizer!r}, {self.average!r}, key=<secret>)"


class Microbatch(NamedTuple):
    """A part of a batch, as an argument of the compiled functions."""

    examples: PyTree  # arrays with a leading axis of examples, or a `UserBatch`
    mask: jax.Array  # False where there is padding
    key: jax.Array  # one key per example or user is derived from this key
    step: np.int32  # the number of the step, from 0


class Sums(NamedTuple):
    """The clipped sum of gradients and the sum of losses so far, without noise: not for release."""

    gradient: optax.Updates
    loss: jax.Array


_Taken = tuple[State, jax.Array]
_Step = tuple[Callable[..., tuple[Sums, jax.Array]], Callable[..., _Taken]]


def make_step(
    plan: PrivacyPlan,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation,
    average: Average,
    clip_style: ClipStyle = "threshold",
) -> _Step:
    """Return `add_microbatch(state, sums, microbatch)` and `take_step(state, sums, microbatch)`.

    `sums` is None for the first microbatch. `add_microbatch` returns the new sums, and a copy of
    the sum of losses in them. `take_step` adds the last microbatch. It returns the new state, and
    the sum of the batch's losses, divided by the expected batch size. Losses have no noise, so they
    are not for release.
    """
    keyed, scheduled = takes_key(loss_fn), isinstance(plan.clip_norm, Piecewise)
    adapts = any(isinstance(norm, AdaptiveClip) for norm in jax.tree.leaves(plan.clip_norm))
    loss = with_key_in_example(loss_fn) if keyed else loss_fn
    gradient = plan.value_and_clipped_grad(loss, clip_style=clip_style)

    def add_microbatch(
        state: State, sums: Sums | None, microbatch: Microbatch
    ) -> tuple[Sums, jax.Array]:
        batch, mask, key, step = microbatch
        if keyed and isinstance(batch, UserBatch):
            batch = batch, jax.vmap(jax.random.fold_in, (None, 0))(key, batch.users)
        elif keyed:
            batch = batch, jax.random.split(key, len(mask))
        options: dict[str, PyTree] = {"step": step} if scheduled else {}
        if adapts:
            options["clip_norm"] = current_clip_norm(state.optimizer)
        per_example, total = gradient(state.params, batch, mask, **options)
        added = Sums(total, per_example.values.sum())
        if sums is not None:
            added = jax.tree.map(jnp.add, sums, added)
        return added, added.loss + 0  # a copy: the next call reuses the memory of `added`

    def take_step(state: State, sums: Sums | None, microbatch: Microbatch) -> _Taken:
        (total, loss_sum), _ = add_microbatch(state, sums, microbatch)
        updates, inner = optimizer.update(total, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        mean = _update_average(average, state.average, params, microbatch.step)
        return State(params, inner, mean, state.key), loss_sum / plan.expected_batch_size

    return add_microbatch, take_step


def initial_average(kind: Average, params: optax.Params) -> optax.Params:
    """Return the average before the first step, in float32 or wider."""
    if kind is None:
        return ()
    if kind != "polyak" and not (is_number(kind) and 0 < kind < 1):
        raise ValueError(
            f'`average` must be "polyak", a decay above 0 and below 1, or None, got {kind!r}.'
        )
    # In half precision, rounding would undo the small changes of an average.
    return jax.tree.map(lambda x: jnp.copy(widen(x)), params)


def _update_average(
    kind: Average, mean: optax.Params, params: optax.Params, step: np.int32
) -> optax.Params:
    """Return the average, updated with the parameters after this step."""
    if kind is None:
        return mean
    count = jnp.asarray(step, jnp.float32) + 1
    rate = 1 / count if kind == "polyak" else 1 - jnp.asarray(kind, jnp.float32)

    def mix(mean: jax.Array, new: jax.Array) -> jax.Array:
        return mean + rate.astype(mean.dtype) * (new.astype(mean.dtype) - mean)

    return jax.tree.map(mix, mean, params)


class CompiledStep:
    """The functions of `make_step`, compiled for the shapes of `state` and `microbatch`.

    A batch has at most `count` microbatches. `compile(function, *arguments)` compiles a jitted
    function. `replicated` is the sharding of replicated arrays on a mesh, or None without a mesh.
    To bound memory, each call waits until at most two microbatches are unfinished. Calls run inside
    the context `guard()`, which can replace an error of JAX by an explanation.
    """

    def __init__(
        self,
        step: _Step,
        state: State,
        microbatch: Microbatch,
        *,
        count: int,
        compile: Callable[..., Compiled],
        replicated: jax.sharding.NamedSharding | None,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        add_microbatch, take_step = step
        on_mesh = replicated is not None
        shapes, batch = describe(state, on_mesh), describe(microbatch, on_mesh)
        sums = None
        self._adders: tuple[Compiled, ...] = ()
        if count > 1:  # with one microbatch there is nothing to add
            first = compile(jax.jit(add_microbatch), shapes, None, batch)
            sums, _ = jax.eval_shape(add_microbatch, shapes, None, batch)
            if on_mesh:
                shardings, _ = first.output_shardings
                sums = jax.tree.map(lambda x, s: x.update(sharding=s), sums, shardings)
            donating = jax.jit(add_microbatch, donate_argnums=1)
            self._adders = first, compile(donating, shapes, sums, batch)
        outputs = (jax.tree.map(lambda x: x.sharding, state), replicated) if on_mesh else None
        whole = jax.jit(take_step, donate_argnums=0, out_shardings=outputs)
        self.compiled = compile(whole, shapes, sums, batch)
        self._in_flight: deque[jax.Array] = deque()
        self._guard = guard

    def needed_bytes(self) -> int:
        """Return how much memory a call needs on one device, or 0 if this is unknown."""
        needed = [0]
        for compiled in (*self._adders, self.compiled):
            if x := compiled.memory_analysis():
                total = x.argument_size_in_bytes + x.output_size_in_bytes + x.temp_size_in_bytes
                needed.append(total - x.alias_size_in_bytes)  # outputs that reuse arguments
        return max(needed)

    def add(self, state: State, sums: Sums | None, microbatch: Microbatch) -> Sums:
        """Return `sums` plus the clipped sum of a microbatch that is not the last of its batch."""
        add_first, add_next = self._adders
        return self._call(add_first if sums is None else add_next, state, sums, microbatch)[0]

    def take(self, state: State, sums: Sums | None, microbatch: Microbatch) -> _Taken:
        """Finish a step with its last microbatch. Return the new state and the loss of the batch.

        The loss is not for release. The step reuses the memory of `state`, so do not use `state`
        afterwards.
        """
        return self._call(self.compiled, state, sums, microbatch)

    def _call(self, compiled: Compiled, *arguments: PyTree) -> tuple[Any, jax.Array]:
        with self._guard():
            result, loss = compiled(*arguments)
            self._in_flight.append(loss)
            if len(self._in_flight) > _IN_FLIGHT:
                jax.block_until_ready(self._in_flight.popleft())
        return result, loss


@contextmanager
def explain_out_of_memory(
    size: int, devices: int, compile_step: Callable[[int], CompiledStep]
) -> Iterator[None]:
    """Turn XLA's error RESOURCE_EXHAUSTED into a MemoryError that names a size that fits.

    `size` is the number of examples in a microbatch, a multiple of the number of `devices`. To find
    a size that fits, `compile_step` compiles the step for half of `size`, a quarter, and so on.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        most = size // devices  # examples per device
        sizes = (devices * (most >> k) for k in range(1, most.bit_length()))
        fitting = next((size for size in sizes if _fits(compile_step, size)), None)
        remedy = "no smaller microbatch fits, so use a smaller model or larger devices"
        if fitting is not None:
            remedy = f"pass microbatch_size={fitting}, which fits"
        raise MemoryError(
            f"`microbatch_size` must be small enough for the memory of the devices, got {size}; "
            f"{remedy}."
        ) from error


def _fits(compile_step: Callable[[int], CompiledStep], size: int) -> bool:
    """Return whether microbatches of this size fit, or True if the devices report no limit."""
    try:
        needed = compile_step(size).needed_bytes()
    except jax.errors.JaxRuntimeError:
        return False
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in jax.local_devices()]
    return all(limit is None or needed <= limit for limit in limits)


def describe(tree: PyTree, with_sharding: bool) -> PyTree:
    """Replace arrays by their shapes and dtypes and, if `with_sharding`, their shardings."""

    def shape(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None) if with_sharding else None
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(shape, tree)
