"""Mixing: a loss of whole batches goes in, the layer that lets examples meet comes out."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._jaxpr import (
    ClosedJaxpr,
    Equation,
    body,
    describe_location,
    evaluate,
    is_call,
    is_literal,
)

_SPLITS = 4  # into halves, between which mixing is looked for
_ROUNDING = 1e-4  # of the largest term, which a difference must exceed to be one
_REMEDY = (
    "replace batch normalisation by GroupNorm or LayerNorm, and compute statistics and auxiliary "
    "losses within one example"
)


def mixing(loss_fn: Any, params: optax.Params, batch: Any, size: int) -> Iterator[str]:
    """Say which layer makes one example's loss or gradient depend on another.

    The examples are split into two halves, at random and several times; then each half is moved.
    """
    rng = np.random.default_rng(0)
    outcome = jax.jit(partial(_outcome, loss_fn, params))
    curvature = jax.jit(partial(_curvature, loss_fn, params))
    for _ in range(_SPLITS):
        half = np.zeros(size, bool)
        half[rng.permutation(size)[: size // 2]] = True
        corners = _corners(batch, half, rng)
        if _is_curved(curvature, batch, half) or _is_mixed(outcome, corners, half):
            layer = _first_mixing(loss_fn, params, corners, half) or "a place that was not found"
            yield f"The loss or gradient of one example depends on others, in {layer}; {_REMEDY}."
            return


def _corners(batch: Any, half: np.ndarray, rng: np.random.Generator) -> list[Any]:
    """Return the batch with none of its halves moved, the first, the second, and both.

    To be moved is to be another example, and a larger one where it is made of real numbers.
    """
    order = (np.arange(len(half)) + rng.integers(1, len(half))) % len(half)

    def moved(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x[order]
        return x[order] * jnp.asarray(rng.uniform(1.5, 3), x.dtype)

    other = jax.tree.map(moved, batch)

    def mixture(rows: np.ndarray) -> Any:
        def choose(x: jax.Array, y: jax.Array) -> jax.Array:
            return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), y, x)

        return jax.tree.map(choose, batch, other)

    return [mixture(rows) for rows in (half & ~half, half, ~half, half | ~half)]


def _outcome(loss_fn: Any, params: optax.Params, batch: Any) -> Any:
    """Return the loss of a batch, or all losses, and the gradient of their sum."""
    grads = jax.grad(lambda p: jnp.sum(loss_fn(p, batch)))(params)
    return loss_fn(params, batch), grads


def _curvature(loss_fn: Any, params: optax.Params, batch: Any, half: jax.Array) -> Any:
    """Return how losses and gradient change with one half, and how that changes with the other."""

    def push(rows: jax.Array, seed: int) -> Any:
        def one(x: jax.Array) -> Any:
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return np.zeros(x.shape, jax.dtypes.float0)
            noise = jax.random.normal(jax.random.key(seed), x.shape, x.dtype)
            return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)), noise, jnp.zeros_like(x))

        return jax.tree.map(one, batch)

    def slope(batch: Any) -> Any:
        return jax.jvp(partial(_outcome, loss_fn, params), (batch,), (push(half, 0),))[1]

    return jax.jvp(slope, (batch,), (push(~half, 1),))


def _is_curved(curvature: Any, batch: Any, half: np.ndarray) -> bool:
    """Tell whether a derivative by both halves is not zero, which in sums of terms it is, exactly.

    It sees what is too small for differences, but only through examples of real numbers, and
    functions that can be differentiated forward.
    """
    try:
        (losses, _), bent = curvature(batch, jnp.asarray(half))
    except TypeError:  # custom_vjp
        return False
    leaves = [*jax.tree.leaves(bent), *([losses[~half]] if jnp.ndim(losses) else [])]
    known = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    return any(bool(jnp.any((leaf != 0) & jnp.isfinite(leaf))) for leaf in known)


def _is_mixed(outcome: Any, corners: list[Any], half: np.ndarray) -> bool:
    """Tell by differences whether examples are mixed; rounding is that of the largest gradient."""
    losses, grads = zip(*map(outcome, corners), strict=True)
    flat = [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(g)]) for g in grads]
    return _shows_mixing(losses, half) or _shows_mixing(flat, half, rows=False)


def _shows_mixing(values: Sequence[Any], half: np.ndarray, *, rows: bool = True) -> bool:
    """Tell whether a value that was computed at four corners knows of both halves.

    A sum of terms of one example each has no mixed difference, f(x, y) − f(x′, y) − f(x, y′) +
    f(x′, y′); and where rows are examples, the second half does not know of the first.
    """
    a, b, c, d = (np.asarray(value, np.float64) for value in values)
    if _differs(a + d, b + c):
        return True
    if not (rows and a.ndim and len(a) and len(a) % len(half) == 0):
        return False
    others = np.repeat(~half, len(a) // len(half))
    return _differs(a[others], b[others])


def _differs(one: np.ndarray, other: np.ndarray) -> bool:
    scale = max(np.abs(one).max(initial=0), np.abs(other).max(initial=0))
    return bool(np.abs(one - other).max(initial=0) > _ROUNDING * scale)


def _first_mixing(
    loss_fn: Any, params: optax.Params, corners: list[Any], half: np.ndarray
) -> str | None:
    """Return the layer that shows mixing first; all corners go through it side by side."""
    closed = jax.make_jaxpr(loss_fn)(params, corners[0])
    inputs = [jax.tree.leaves((params, corner)) for corner in corners]
    for equation, outputs in _side_by_side(closed, inputs):
        for values in zip(*outputs, strict=True):
            if jnp.issubdtype(values[0].dtype, jnp.floating) and _shows_mixing(values, half):
                return describe_location(equation)
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
        if is_call(equation):
            outputs = yield from _side_by_side(body(equation), operands)
        else:
            outputs = [evaluate(equation, values) for values in operands]
            yield equation, outputs
        for side, values in zip(known, outputs, strict=True):
            side |= zip(equation.outvars, values, strict=True)
    return read(jaxpr.outvars)
