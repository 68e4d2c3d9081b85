"""check_model: a loss, parameters and a batch go in, what is in the way of privacy comes out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._jaxpr import constants
from optax_lsdp._trees import (
    check_floating,
    check_not_empty,
    count_examples,
    is_floating,
    path_name,
)
from optax_lsdp.clipping import clipped_grad
from optax_lsdp.model_check._mixing import mixing

_MOST_EXAMPLES = 8  # that are looked at


@dataclass(frozen=True)
class ModelReport:
    """What is wrong with a model. It was found on a batch, of which it tells: use public examples.

    Attributes:
        problems: a sentence each; none if all is well.
        notes: what may be meant so, such as parameters that are not trained.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        verdict = "fit for private training" if self.passed else "NOT fit for private training"
        lines = [f"{verdict}, but:" if self.passed and self.notes else verdict]
        return "\n".join([*lines, *(f"- {line}" for line in (*self.problems, *self.notes))])


def check_model(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    params: optax.Params,
    batch: Any,
    *,
    batched: bool = False,
) -> ModelReport:
    """Tell whether a model can be trained privately, and which layer is in the way if not.

    Looked for are: examples whose loss or gradient depends on another example (batch
    normalisation, batch statistics, auxiliary losses), losses and gradients that are not finite,
    and parameters that get no gradient. The first cannot happen with a loss for one example, unless
    it hands examples out; it is what a loss for a whole batch is searched for.

    Args:
        loss_fn: `loss_fn(params, example)`, a scalar for one example, as `clipped_grad` takes it;
            or with `batched`, `loss_fn(params, batch)` as ordinary training has it, which returns
            each example's loss, their mean or their sum.
        params: the parameters, as they are at the start.
        batch: examples with a leading axis, of which eight are looked at; public ones, as the
            report tells of them.
        batched: which of the two `loss_fn` is.

    >>> def normalised(w, batch):
    ...     centred = batch - batch.mean(axis=0)
    ...     return ((centred @ w) ** 2).mean()
    >>> batch = jax.random.normal(jax.random.key(0), (4, 3))
    >>> report = check_model(normalised, jnp.ones(3), batch, batched=True)
    >>> report.passed
    False
    """
    check_not_empty("params", params)
    check_floating("params", params)
    size = count_examples(batch, "move the axis with jnp.moveaxis if it is another one")
    batch = jax.tree.map(lambda x: jnp.asarray(x)[:_MOST_EXAMPLES], batch)
    size = min(size, _MOST_EXAMPLES)
    if batched and size < 2:
        raise ValueError("`batch` must hold two examples or more, got one.")
    try:
        if batched:
            _check_loss(jax.eval_shape(loss_fn, params, batch), ((), (size,)))
            value, grads = jax.value_and_grad(lambda p: jnp.mean(loss_fn(p, batch)))(params)
            values, grads = value[None], jax.tree.map(lambda x: x[None], grads)
        else:
            first = jax.tree.map(lambda x: x[0], batch)
            _check_loss(jax.eval_shape(loss_fn, params, first), ((),))
            jax.eval_shape(clipped_grad(loss_fn, clip_norm=1.0), params, batch)
            values, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0))(params, batch)
    except _Unfit as error:
        return ModelReport((str(error),))
    except (TypeError, ValueError) as error:  # JAX says why
        reason = str(error).splitlines()[0]
        remedy = (
            "a loss of whole batches needs batched=True, and keys for dropout are part of the "
            "batch: `lambda params, example: loss_fn(params, *example)` of (examples, keys)"
        )
        return ModelReport((f"The loss cannot be differentiated: {reason}; {remedy}.",))
    problems = list(_not_finite(values, grads))
    program = jax.make_jaxpr(loss_fn)(params, batch if batched else first)
    if any(_begins_with(constant, batch) for constant in constants(program)):
        problems.append(
            "The loss closes over the examples that it was given, which then count as public: it "
            "may use its own example alone."
        )
    if batched and not problems:
        problems += mixing(loss_fn, params, batch, size)
    silent, loud = _without_gradient(grads)
    if silent and not loud:
        problems.append(
            "No parameter gets a gradient: the loss does not depend on them, or only through steps "
            "that cannot be differentiated, such as argmax, round or stop_gradient."
        )
        silent = []
    notes = [f"{name} gets no gradient from these examples, only noise." for name in silent]
    return ModelReport(tuple(problems), tuple(notes))


def _begins_with(constant: Any, batch: Any) -> bool:
    """Tell whether what a loss closes over is the batch, or a dataset of which it is the first."""
    rows = jnp.shape(constant)[:1]
    return any(
        rows >= leaf.shape[:1]
        and constant.shape[1:] == leaf.shape[1:]
        and constant.dtype == leaf.dtype
        and (leaf.ndim > 1 or is_floating(leaf))  # a few labels may be equal by chance
        and bool(jnp.all(constant[: len(leaf)] == leaf))
        for leaf in jax.tree.leaves(batch)
    )


class _Unfit(Exception):
    """The loss is of no use; the message says why."""


def _check_loss(value: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise unless the loss is a real number, or one for each example."""
    if not hasattr(value, "shape"):
        raise _Unfit(f"The loss must be one array, got {type(value).__name__}; leave aux out.")
    if value.shape not in shapes:
        demand = " or ".join(str(shape) for shape in shapes)
        raise _Unfit(
            f"The loss must have shape {demand}, got {value.shape}; a loss for one example sees it "
            "without batch axis, and one for whole batches needs batched=True."
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise _Unfit(f"The loss must be a real number, got {value.dtype}, which has no gradient.")


def _not_finite(values: jax.Array, grads: Any) -> Iterator[str]:
    """Name what is infinite or not a number."""
    remedy = "such examples contribute nothing to private training: look at scales and logarithms"
    broken = int((~jnp.isfinite(values)).sum())
    if broken:
        yield f"The loss is not finite for {broken} of {len(values)}; {remedy}."
    for path, leaf in jax.tree.leaves_with_path(grads):
        if not broken and not jnp.isfinite(leaf).all():
            yield f"The gradient of {path_name(path)!r} is not finite; {remedy}."


def _without_gradient(grads: Any) -> tuple[list[str], list[str]]:
    """Return the parameters whose gradient is zero for all examples, and the others."""
    silent: list[str] = []
    loud: list[str] = []
    for path, leaf in jax.tree.leaves_with_path(grads):
        (loud if jnp.any(leaf != 0) else silent).append(path_name(path) or "The parameter")
    return silent, loud
