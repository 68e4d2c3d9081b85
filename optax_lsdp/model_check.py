"""check_model: a loss, parameters and a batch go in, what is in the way of privacy comes out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._jaxpr import ClosedJaxpr, Equation, body, calls, evaluate, is_literal, whereabouts
from optax_lsdp._trees import check_floating, check_not_empty, path_name
from optax_lsdp.clipping import clipped_grad

_MOST_EXAMPLES = 8  # that are looked at
_ROUNDING = 1e-4  # of the largest term, which a difference must exceed to be one
_REMEDY = (
    "replace batch normalisation by GroupNorm or LayerNorm, and compute statistics and auxiliary "
    "losses within one example"
)


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
        lines = ["fit for private training" if self.passed else "NOT fit for private training"]
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
    batch = jax.tree.map(lambda x: jnp.asarray(x)[:_MOST_EXAMPLES], batch)
    size = len(jax.tree.leaves(batch)[0])
    if batched:
        if size < 2:
            raise ValueError("`batch` must hold two examples or more, got one.")
        problems = list(_mixed(loss_fn, params, batch, size))
        value, grads = jax.value_and_grad(lambda p: jnp.mean(loss_fn(p, batch)))(params)
        values, grads = value[None], jax.tree.map(lambda x: x[None], grads)
    else:
        try:
            jax.eval_shape(clipped_grad(loss_fn, clip_norm=1.0), params, batch)
        except ValueError as error:
            return ModelReport((str(error),))
        problems = []
        values, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0))(params, batch)
    problems += _not_finite(values, grads)
    silent, loud = _without_gradient(grads)
    if silent and not loud:
        problems.append(
            "No parameter gets a gradient: the loss does not depend on them, or only through steps "
            "that cannot be differentiated, such as argmax, round or stop_gradient."
        )
        silent = []
    notes = [f"{name} gets no gradient from these examples, only noise." for name in silent]
    return ModelReport(tuple(problems), tuple(notes))


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


def _mixed(loss_fn: Any, params: optax.Params, batch: Any, size: int) -> Iterator[str]:
    """Say which layer makes one example's loss or gradient depend on another."""
    shape = jax.eval_shape(loss_fn, params, batch).shape
    if shape not in ((), (size,)):
        yield f"The loss must be a number, or one for each of {size} examples, got shape {shape}."
        return
    corners = _corners(batch, size)
    if _is_curved(loss_fn, params, batch, size) or _is_mixed(loss_fn, params, corners, size):
        layer = _first_mixing(loss_fn, params, corners, size) or "a place that was not found"
        yield f"The loss or gradient of one example depends on others, in {layer}; {_REMEDY}."


def _corners(batch: Any, size: int) -> list[Any]:
    """Return the batch, and the same with another first example, another second one, and both."""
    orders = np.tile(np.arange(size), (4, 1))
    orders[[1, 3], 0] = size - 1
    orders[[2, 3], 1] = 0 if size == 2 else size - 1
    return [jax.tree.map(lambda x, order=order: x[order], batch) for order in orders]


def _outcome(loss_fn: Any, params: optax.Params, batch: Any) -> Any:
    """Return the loss of a batch, or all losses, and the gradient of their sum."""
    grads = jax.grad(lambda p: jnp.sum(loss_fn(p, batch)))(params)
    return loss_fn(params, batch), grads


def _is_curved(loss_fn: Any, params: optax.Params, batch: Any, size: int) -> bool:
    """Tell whether a derivative by two examples is not zero, which in sums of terms it is, exactly.

    It sees what is too small for differences, but only through examples of real numbers, and
    functions that can be differentiated forward.
    """

    def push(place: int) -> Any:
        def one(x: jax.Array) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return np.zeros(x.shape, jax.dtypes.float0)
            noise = jax.random.normal(jax.random.key(place), x.shape[1:], x.dtype)
            return jnp.zeros_like(x).at[place].set(noise)

        return jax.tree.map(one, batch)

    def slope(batch: Any) -> Any:
        return jax.jvp(lambda b: _outcome(loss_fn, params, b), (batch,), (push(0),))[1]

    try:
        losses, _ = slope(batch)
        curvature = jax.jvp(slope, (batch,), (push(1),))[1]
    except TypeError:  # custom_vjp
        return False
    leaves = [*jax.tree.leaves(curvature), *([losses[1:]] if jnp.ndim(losses) else [])]
    return any(bool(jnp.any(leaf != 0)) for leaf in leaves if leaf.dtype != jax.dtypes.float0)


def _is_mixed(loss_fn: Any, params: optax.Params, corners: list[Any], size: int) -> bool:
    """Tell by differences whether examples are mixed."""
    found = [jax.tree.leaves(_outcome(loss_fn, params, corner)) for corner in corners]
    return any(
        _shows_mixing(values, size, rows=i == 0)
        for i, values in enumerate(zip(*found, strict=True))
    )


def _shows_mixing(values: Sequence[Any], size: int, *, rows: bool = True) -> bool:
    """Tell whether a value that was computed at four corners knows of two examples.

    A sum of terms of one example each has no mixed difference, f(x, y) − f(x′, y) − f(x, y′) +
    f(x′, y′); and where rows are examples, others do not know of the first.
    """
    a, b, c, d = (np.asarray(value, np.float64) for value in values)
    if _differs(a + d, b + c):
        return True
    if not (rows and a.ndim and len(a) and len(a) % size == 0):
        return False
    each = len(a) // size
    return _differs(a[each:], b[each:])


def _differs(one: np.ndarray, other: np.ndarray) -> bool:
    scale = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    return bool(np.abs(one - other).max(initial=0) > _ROUNDING * scale)


def _first_mixing(loss_fn: Any, params: optax.Params, corners: list[Any], size: int) -> str | None:
    """Return the layer that shows mixing first; all corners go through it side by side."""
    closed = jax.make_jaxpr(loss_fn)(params, corners[0])
    inputs = [jax.tree.leaves((params, corner)) for corner in corners]
    for equation, outputs in _side_by_side(closed, inputs):
        for values in zip(*outputs, strict=True):
            if jnp.issubdtype(values[0].dtype, jnp.floating) and _shows_mixing(values, size):
                return whereabouts(equation)
    return None


def _side_by_side(
    closed: ClosedJaxpr, inputs: list[list[Any]]
) -> Generator[tuple[Equation, list[list[Any]]], None, list[list[Any]]]:
    """Run a program on several inputs; yield its equations with what comes out of them."""
    jaxpr = closed.jaxpr
    known = [
        dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *values), strict=True))
        for values in inputs
    ]

    def read(atoms: Sequence[Any]) -> list[list[Any]]:
        return [[x.val if is_literal(x) else side[x] for x in atoms] for side in known]

    for equation in jaxpr.eqns:
        operands = read(equation.invars)
        if calls(equation):
            outputs = yield from _side_by_side(body(equation), operands)
        else:
            outputs = [evaluate(equation, values) for values in operands]
            yield equation, outputs
        for side, values in zip(known, outputs, strict=True):
            side |= zip(equation.outvars, values, strict=True)
    return read(jaxpr.outvars)
