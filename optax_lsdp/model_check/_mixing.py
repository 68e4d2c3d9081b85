"""Find the layer that mixes examples, in a loss that takes a whole batch.

1. Split the examples into two halves, x and y. Change each half, to obtain x′ and y′.
2. Let f be the loss or its gradient. Without mixing, f is a sum of terms that each depend on one
   example. Then the derivative ∂²f/∂x∂y is zero, and the *mixed difference* f(x, y) − f(x′, y) −
   f(x, y′) + f(x′, y′) is zero. If either is not zero, the loss mixes examples.
3. To find the layer, evaluate every equation of the program on the four batches of the mixed
   difference, the *corners*. Report the first equation whose output has a mixed difference that is
   not zero.
"""

from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_lsdp._jaxpr as jaxprs
from optax_lsdp._keys import is_key
from optax_lsdp._loss import LossFn
from optax_lsdp._trees import is_floating
from optax_lsdp._types import PyTree

Rows: TypeAlias = np.ndarray | jax.Array
"""One array of a batch: typed keys, or numbers in NumPy, which computes without compilation."""

_SPLITS = 4  # random splits into halves to try
_ROUNDING = 1e-4  # differences below this share of the largest entry count as rounding
_REMEDY = (
    "replace batch normalisation by GroupNorm or LayerNorm, and compute statistics and auxiliary "
    "losses within one example"
)


def mixing(loss_fn: LossFn, params: optax.Params, batch: PyTree, size: int) -> Iterator[str]:
    """Yield a sentence if the loss mixes examples. Try several random splits of the batch."""
    rng = np.random.default_rng(0)
    outcome = jax.jit(partial(_outcome, loss_fn, params))
    curvature = jax.jit(partial(_curvature, loss_fn, params))
    for _ in range(_SPLITS):
        half = np.zeros(size, bool)
        half[rng.permutation(size)[: size // 2]] = True
        corners = _corners(batch, half, rng)
        if _is_curved(curvature, batch, half) or _is_mixed(outcome, corners, half):
            layer = _first_mixing(loss_fn, params, corners, half) or "a layer that was not found"
            problem = "The loss or gradient of one example depends on other examples"
            yield f"{problem}, in {layer}; {_REMEDY}."
            return


def _corners(batch: PyTree, half: np.ndarray, rng: np.random.Generator) -> list[PyTree]:
    """Return four batches: unchanged, first half changed, second half changed, both changed.

    `half` is True for the first half. To change an example, replace it by another example of the
    batch, and scale up all floats.
    """
    order = (np.arange(len(half)) + rng.integers(1, len(half))) % len(half)

    def change(x: Rows) -> Rows:
        if not is_floating(x):
            return x[order]
        return x[order] * x.dtype.type(rng.uniform(1.5, 3))

    other = jax.tree.map(change, batch)

    def corner(rows: np.ndarray) -> PyTree:
        def choose(x: Rows, y: Rows) -> Rows:
            where = jnp.where if is_key(x) else np.where
            return where(rows.reshape(-1, *[1] * (x.ndim - 1)), y, x)

        return jax.tree.map(choose, batch, other)

    return [corner(rows) for rows in (half & ~half, half, ~half, half | ~half)]


def _outcome(loss_fn: LossFn, params: optax.Params, batch: PyTree) -> tuple[jax.Array, PyTree]:
    """Return the loss, which is a scalar or one number per example, and the gradient of its sum."""
    grads = jax.grad(lambda p: jnp.sum(loss_fn(p, batch)))(params)
    return loss_fn(params, batch), grads


def _curvature(
    loss_fn: LossFn, params: optax.Params, batch: PyTree, along: Sequence[list[Rows]]
) -> tuple[PyTree, PyTree]:
    """Return the first and the mixed second derivative of losses and gradient.

    `along` holds two directions. Each direction has one array for each floating-point leaf of the
    batch. The first derivative is along the first direction. The second derivative is along both.
    """

    def tangent(direction: list[Rows]) -> PyTree:
        floating = iter(direction)
        return jax.tree.map(
            lambda x: next(floating) if is_floating(x) else np.zeros(x.shape, jax.dtypes.float0),
            batch,
        )

    def slope(batch: PyTree) -> PyTree:
        return jax.jvp(partial(_outcome, loss_fn, params), (batch,), (tangent(along[0]),))[1]

    return jax.jvp(slope, (batch,), (tangent(along[1]),))


def _direction(batch: PyTree, rows: np.ndarray) -> list[Rows]:
    """Return a random direction in the floating-point leaves, which is zero outside `rows`."""
    rng = np.random.default_rng(int(rows[0]))
    return [
        (rng.normal(size=x.shape) * rows.reshape(-1, *[1] * (x.ndim - 1))).astype(x.dtype)
        for x in jax.tree.leaves(batch)
        if is_floating(x)
    ]


def _is_curved(curvature: LossFn, batch: PyTree, half: np.ndarray) -> bool:
    """Return whether derivatives along the two halves of the batch show mixing.

    Without mixing, the second derivative along both halves is exactly zero. If there is a loss per
    example, the derivative of the second half's losses along the first half is also exactly zero.
    These derivatives show even mixing that is too small for `_is_mixed`. But they need examples of
    floating-point numbers, and a loss whose functions all allow forward differentiation.
    """
    try:
        along = [_direction(batch, rows) for rows in (half, ~half)]
        (losses, _), bent = jax.device_get(curvature(batch, along))
    except TypeError:  # custom_vjp does not allow forward differentiation
        return False
    leaves = [*jax.tree.leaves(bent), *([losses[~half]] if np.ndim(losses) else [])]
    known = [leaf for leaf in leaves if leaf.dtype != jax.dtypes.float0]
    return any(bool(np.any((leaf != 0) & np.isfinite(leaf))) for leaf in known)


def _is_mixed(outcome: LossFn, corners: list[PyTree], half: np.ndarray) -> bool:
    """Return whether the losses or gradients of the four batches `corners` show mixing.

    All leaves of the gradient are compared as one vector. So rounding errors in a leaf that should
    be zero are small relative to the largest entry, and do not count as mixing.
    """
    losses, grads = zip(*(jax.device_get(outcome(corner)) for corner in corners), strict=True)
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in grads]
    return _shows_mixing(losses, half) or _shows_mixing(flat, half, rows=False)


def _shows_mixing(
    values: Sequence[jax.typing.ArrayLike], half: np.ndarray, *, rows: bool = True
) -> bool:
    """Return whether the values at the four corners show mixing.

    The corners are the batches of `_corners`, with values a, b, c and d. The values show mixing if
    a − b − c + d is not zero. Values may have one or more rows for each example. If `rows` is true,
    these values also show mixing if a change of only the first half changes a row of the second.
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
    loss_fn: LossFn, params: optax.Params, corners: list[PyTree], half: np.ndarray
) -> str | None:
    """Return the layer of the first equation whose outputs mix examples, or None if none does."""
    closed = jax.make_jaxpr(loss_fn)(params, corners[0])
    inputs = [jax.tree.leaves((params, corner)) for corner in corners]
    for equation, outputs in _evaluate_corners(closed, inputs):
        for values in zip(*outputs, strict=True):
            if jnp.issubdtype(values[0].dtype, jnp.floating) and _shows_mixing(values, half):
                return jaxprs.describe_location(equation)
    return None


def _evaluate_corners(
    closed: jaxprs.ClosedJaxpr, inputs: list[list[jax.Array]]
) -> Generator[tuple[jaxprs.Equation, list[list[jax.Array]]], None, list[list[jax.Array]]]:
    """Evaluate a program on each list of inputs. Yield each equation, and its outputs per list."""
    jaxpr = closed.jaxpr
    known = [
        dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *values), strict=True))
        for values in inputs
    ]

    def read(atoms: Sequence[jaxprs.Atom]) -> list[list[jax.Array]]:
        return [[x.val if jaxprs.is_literal(x) else corner[x] for x in atoms] for corner in known]

    for equation in jaxpr.eqns:
        operands = read(equation.invars)
        if jaxprs.is_call(equation):
            outputs = yield from _evaluate_corners(jaxprs.body(equation), operands)
        else:
            outputs = [jaxprs.evaluate(equation, values) for values in operands]
            yield equation, outputs
        for corner, values in zip(known, outputs, strict=True):
            corner |= zip(equation.outvars, values, strict=True)
    return read(jaxpr.outvars)
