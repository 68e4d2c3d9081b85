"""check_model: a loss, parameters and a batch go in, what is in the way of privacy comes out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_function
from optax_lsdp._isolation import batch_norm_sentence, batch_norms, check_no_layer_state
from optax_lsdp._jaxpr import constants
from optax_lsdp._keys import is_key
from optax_lsdp._loss import LossFn, call_loss, explain_failure, takes_key
from optax_lsdp._trees import (
    check_floating,
    check_not_empty,
    count_examples,
    dtype_name,
    is_floating,
    is_numeric,
    path_name,
)
from optax_lsdp.clipping import clipped_grad
from optax_lsdp.model_check._finite import (
    MOST_AT_ONCE,
    another_point,
    look_at_all,
    make_look,
    not_finite,
)
from optax_lsdp.model_check._mixing import mixing


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
    loss_fn: LossFn,
    params: optax.Params,
    batch: Any,
    *,
    batched: bool = False,
) -> ModelReport:
    """Tell whether a model can be trained privately, and which layer is in the way if not.

    Looked for are: examples whose loss or gradient depends on another example (batch
    normalisation, batch statistics, auxiliary losses), layers of batch normalisation in a loss of
    one example, losses and gradients that are not finite, and parameters that get no gradient,
    neither at `params` nor at a point near by. Mixing cannot happen with a loss for one example,
    unless it hands examples out; it is what a loss for a whole batch is searched for.

    Args:
        loss_fn: `loss_fn(params, example)`, a scalar for one example, as `clipped_grad` takes it;
            or with `batched`, `loss_fn(params, batch)` as ordinary training has it, which returns
            each example's loss, their mean or their sum. Either may take a key as a third
            argument, as for `fit`.
        params: the parameters, as they are at the start.
        batch: examples with a leading axis; public ones, as the report tells of them. All are
            searched for what is not finite, and eight for mixing.
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
    try:
        check_no_layer_state(params)
        loss = _without_key(loss_fn, batched)
    except (TypeError, ValueError) as error:
        return ModelReport((str(error),))
    check_floating("params", params)
    for path, leaf in jax.tree.leaves_with_path(batch):
        if hasattr(leaf, "dtype") and not (is_numeric(leaf) or is_key(leaf)):
            raise TypeError(
                f"`batch` must hold numbers or keys, got {dtype_name(leaf)} at "
                f"{path_name(path)!r}; encode text and dates first."
            )
    size = count_examples(batch, "move the axis with jnp.moveaxis if it is another one")
    batch = jax.tree.map(jnp.asarray, batch)
    if batched and size < 2:
        raise ValueError("`batch` must hold two examples or more, got one.")
    count = min(size, MOST_AT_ONCE)
    few = jax.tree.map(lambda x: x[:count], batch)
    given = few if batched else jax.tree.map(lambda x: x[0], batch)
    try:
        program = _program(loss, params, given, ((), (count,)) if batched else ((),))
        layers = [] if batched else batch_norms(program)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are among the problems
            if not batched:
                jax.eval_shape(clipped_grad(loss, clip_norm=1.0), params, few)
        look = make_look(
            _of_batch(loss) if batched else jax.vmap(jax.value_and_grad(loss), (None, 0))
        )
        seen = look_at_all(look, params, batch, size)
    except _Unfit as error:
        return ModelReport((str(error),))
    except Exception as error:
        sentence = explain_failure(error, loss_fn, params, given, batched=batched)
        if sentence is None and not isinstance(error, TypeError | ValueError):
            raise
        return ModelReport((sentence or _cannot(error),))
    problems = [batch_norm_sentence(layers)] if layers else []
    problems += not_finite(seen, params, "batches" if batched else "examples")
    if any(_begins_with(constant, few) for constant in constants(program)):
        problems.append(
            "The loss closes over the examples that it was given, which then count as public: it "
            "may use its own example alone."
        )
    if batched and not problems:
        problems += mixing(loss, params, few, count)
    reached = seen.reached
    if not reached.all():
        reached = reached | look_at_all(look, another_point(params), few, count).reached
    paths = [path_name(path) or "The parameter" for path, _ in jax.tree.leaves_with_path(params)]
    silent = [path for path, is_reached in zip(paths, reached, strict=True) if not is_reached]
    if len(silent) == len(paths):
        problems.append(
            "No parameter gets a gradient: the loss does not depend on them, or only through steps "
            "that cannot be differentiated, such as argmax, round or stop_gradient."
        )
        silent = []
    notes = [f"{name} gets no gradient from these examples, only noise." for name in silent]
    return ModelReport(tuple(problems), tuple(notes))


def _without_key(loss_fn: LossFn, batched: bool) -> LossFn:
    """Return a loss of parameters and an example, or a batch; one that takes a key gets it here.

    All examples have the same key. That is as good as any: what is looked for is not random.
    """
    check_function(
        "loss_fn",
        loss_fn,
        "of parameters and a batch" if batched else "of parameters and one example",
    )
    if not takes_key(loss_fn):
        return loss_fn
    return lambda params, example: call_loss(loss_fn, params, example, jax.random.key(0))


def _program(
    loss: LossFn, params: optax.Params, given: Any, shapes: tuple[tuple[int, ...], ...]
) -> Any:
    """Return the loss as equations, or raise if it gives something else than a loss."""
    program, value = jax.make_jaxpr(loss, return_shape=True)(params, given)
    _check_loss(value, shapes)
    return program


def _of_batch(loss: LossFn) -> Callable[..., tuple[jax.Array, Any]]:
    """Return the mean loss of a batch and its gradient, both as of one example."""

    def value_and_grads(params: optax.Params, batch: Any) -> tuple[jax.Array, Any]:
        found = jax.value_and_grad(lambda p: jnp.mean(loss(p, batch)))(params)
        return jax.tree.map(lambda x: x[None], found)

    return value_and_grads


def _cannot(error: Exception) -> str:
    reason = str(error).splitlines()[0]
    if reason.startswith("`loss_fn` must"):  # in our own words
        return reason
    return (
        f"The loss cannot be differentiated: {reason}; a loss of whole batches needs batched=True, "
        "and one for which keys are part of the batch, (examples, keys), takes them as its example."
    )


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
