"""Record the operand and the cotangent of every use in one backward pass, and round both.

A use is an equation that combines a parameter with data; see `_uses`. A *tap* is an array of zeros
that is added to the output of a use. The gradient with respect to the tap is the cotangent of the
output. One backward pass with respect to all taps therefore gives all cotangents. This pass forms
a parameter's gradient only if automatic differentiation handles a use of the parameter.

All norms and sums use the rounded arrays of `round_recorded`. For each example, these arrays define
a gradient that depends on no other example. So clipping this gradient is as private as clipping the
exact gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from optax_lsdp._clipped import ClipGroup
from optax_lsdp._jaxpr import (
    Atom,
    ClosedJaxpr,
    Equation,
    body,
    dtype_of,
    evaluate,
    is_literal,
    shape_of,
)
from optax_lsdp._mesh import vary, varying_axes
from optax_lsdp._trees import compute_once, wide_dtype, widen
from optax_lsdp._types import PyTree
from optax_lsdp.clipping._clip_norm import STABILITY, ClipStyle
from optax_lsdp.clipping.bookkeeping._platforms import Platform
from optax_lsdp.clipping.bookkeeping._strategy import LossAnalysis
from optax_lsdp.clipping.bookkeeping._uses import (
    CALLS,
    REMATERIALISED,
    Path,
    Use,
    carried_unchanged,
    scan_parts,
)

Uses = Mapping[Path, Use]
Taps = Mapping[Path, jax.Array]  # zeros in the shape of a use's outputs, stacked over scans
Operands = dict[Path, jax.Array]  # the data operands of uses, indexed by `Use.operand`


class Recorded(NamedTuple):
    """The arrays that one backward pass recorded, with a leading axis of examples.

    Attributes:
        operands: the data operands, indexed by `Use.operand`. The other operand of a use is its
            weight.
        cotangents: the cotangent of the output of each use, indexed by `Use.path`.
        gradients: for each leaf with uses that automatic differentiation handles, the gradient from
            these uses.
    """

    operands: Operands
    cotangents: dict[Path, jax.Array]
    gradients: dict[int, jax.Array]


def run_backward(
    analysis: LossAnalysis, params: optax.Params, batch: PyTree
) -> tuple[tuple[jax.Array, PyTree], Recorded]:
    """Run the backward pass. Return each example's (value, aux), and the recorded arrays."""
    values = jax.tree.leaves(params)
    taps = dict[Path, jax.Array]()
    for path, use in analysis.uses.items():
        output, lengths = use.equation.outvars[0], (loop.length for loop in use.loops)
        taps[path] = jnp.zeros((*lengths, *shape_of(output)), dtype_of(output))
    taps = vary(taps, varying_axes(batch))
    differentiated = {
        i: values[i] for leaf in analysis.leaves if leaf.is_differentiated for i in leaf.indices
    }
    run = jax.value_and_grad(partial(_run_loss, analysis, values), argnums=(0, 1), has_aux=True)
    results = jax.vmap(run, in_axes=(None, None, 0))(taps, differentiated, batch)
    (value, (aux, operands)), (cotangents, gradients) = results
    return (value, aux), Recorded(operands, cotangents, gradients)


def _run_loss(
    analysis: LossAnalysis,
    values: Sequence[jax.Array],
    taps: Taps,
    differentiated: Mapping[int, jax.Array],
    example: PyTree,
) -> tuple[jax.Array, tuple[PyTree, Operands]]:
    """Return the loss of one example, its aux, and the operands of all uses."""
    inputs = [differentiated.get(i, x) for i, x in enumerate(values)] + jax.tree.leaves(example)
    results, operands = _run(analysis.program.closed, inputs, analysis.uses, taps, ())
    value, aux = jax.tree.unflatten(analysis.program.outputs, results)
    return value, (aux, operands)


Results = tuple[list[jax.Array], Operands]


def _run(
    closed: ClosedJaxpr, inputs: Sequence[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Evaluate a jaxpr with taps. Return its outputs, and the data operand of each use."""
    jaxpr, operands = closed.jaxpr, Operands()
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs], strict=True))
    for number, equation in enumerate(jaxpr.eqns):
        place, arguments = (*path, number), [_read(atom, values) for atom in equation.invars]
        run = _RUN.get(equation.primitive.name)
        inside = {p: tap for p, tap in taps.items() if run and p[: len(place)] == place}
        if place in uses:
            outputs, more = _run_use(uses[place], arguments, taps[place])
        elif run and inside:
            outputs, more = run(equation, arguments, uses, inside, place)
        else:
            outputs, more = evaluate(equation, arguments), {}
        values |= zip(equation.outvars, outputs, strict=True)
        operands |= more
    return [_read(atom, values) for atom in jaxpr.outvars], operands


def _read(atom: Atom, values: Mapping[Atom, jax.Array]) -> jax.Array:
    return atom.val if is_literal(atom) else values[atom]


def _run_use(use: Use, arguments: list[jax.Array], tap: jax.Array) -> Results:
    """Evaluate one use with its weight held constant, so that the weight gets no gradient.

    Return the output plus `tap`, and the data operand. `tap` is an array of zeros: the gradient
    with respect to `tap` is the cotangent of the output.
    """
    data = arguments[1 - use.place]
    if use.is_mixed:  # otherwise JAX holds the weight constant, and scans store it once
        arguments[use.place] = lax.stop_gradient(arguments[use.place])
    (output,) = evaluate(use.equation, arguments)
    return [output + tap], {use.operand: data}  # uses that share an operand record it once


def _run_call(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Evaluate a call as if it were inlined."""
    return _run(body(equation), arguments, uses, taps, path)


def _run_checkpoint(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    def run(arguments: list[jax.Array], taps: Taps) -> Results:
        return _run(body(equation), arguments, uses, taps, path)

    policy, prevent_cse = equation.params["policy"], equation.params["prevent_cse"]
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)(arguments, taps)


def _run_scan(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Evaluate a scan. Slice the taps, and stack the operands, of the uses in its body."""
    consts, carry, slices = scan_parts(equation, arguments)
    unchanged = carried_unchanged(equation)

    def step(carried: Sequence[jax.Array], sliced: PyTree) -> tuple[Sequence[jax.Array], PyTree]:
        # JAX stores a carry once per iteration: turn unchanged carries into constants.
        fixed = [a if same else b for a, b, same in zip(carry, carried, unchanged, strict=True)]
        outputs, operands = _run(
            body(equation), [*consts, *fixed, *sliced[0]], uses, sliced[1], path
        )
        return outputs[: len(carry)], (outputs[len(carry) :], operands)

    params = equation.params
    last, (stacked, operands) = lax.scan(
        step,
        carry,
        (slices, taps),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*last, *stacked], operands


def _run_cond(
    equation: Equation, arguments: list[jax.Array], uses: Uses, taps: Taps, path: Path
) -> Results:
    """Evaluate a cond. Uses in branches that are not taken record zeros and add no gradient."""
    index, *rest = arguments

    def run(number: int, shapes: Operands, arguments: list[jax.Array], taps: Taps) -> Results:
        branch = equation.params["branches"][number]
        outputs, operands = _run(branch, arguments, uses, taps, (*path, number))
        zeros = {p: jnp.zeros(s.shape, s.dtype) for p, s in shapes.items() if p not in operands}
        return outputs, zeros | operands

    shapes = Operands()
    for number in range(len(equation.params["branches"])):
        shapes |= jax.eval_shape(partial(run, number, {}), rest, taps)[1]
    branches = [partial(run, number, shapes) for number in range(len(equation.params["branches"]))]
    return lax.switch(index, branches, rest, taps)


_RUN = {"scan": _run_scan, "cond": _run_cond}
_RUN |= dict.fromkeys(CALLS, _run_call) | dict.fromkeys(REMATERIALISED, _run_checkpoint)


class Rounded(NamedTuple):
    """The rounded operands and cotangents of all uses, with a leading axis of examples.

    Attributes:
        pairs: the factors a and g of each use. Each scan around the use adds an axis after the axis
            of examples. If a rule makes factors that are larger than the operand, such as patches,
            `pairs` holds the operand and the cotangent instead. Each g or cotangent has been
            multiplied by the scale of the first leaf of the weight.
        gradients: `Recorded.gradients`, each multiplied by the scale of the leaf.
        scales: for each leaf, the power of two nearest to 1/C, where C is its clip norm. C times
            the scale is near 1, so that squares of scaled norms neither overflow nor underflow.
            With automatic clipping, `STABILITY` takes the place of C, because norms need not be
            near C.
        leaves: the parameters themselves.
        platform: the kind of device that all arrays are rounded for.
    """

    pairs: dict[Path, tuple[jax.Array, jax.Array]]
    gradients: dict[int, jax.Array]
    scales: Sequence[ArrayLike]
    leaves: Sequence[jax.Array]
    platform: Platform


def round_recorded(
    recorded: Recorded,
    leaves: Sequence[jax.Array],
    uses: Mapping[Path, Use],
    groups: Sequence[ClipGroup],
    style: ClipStyle,
    platform: Platform,
) -> Rounded:
    """Round operands and cotangents, and multiply cotangents and gradients by their scales."""
    is_automatic = style == "automatic"
    by_group = {path: _scale(STABILITY if is_automatic else norm) for path, norm in groups}
    scales = [by_group[path] for path, _ in groups]
    pairs, known = {}, dict[object, jax.Array]()
    for path, use in uses.items():
        a, g = recorded.operands[use.operand], recorded.cotangents[path]
        g = _scaled(g, scales[min(use.weight.leaves)])
        if not use.rule.expands:
            a, g = apply_rule(use, a, g)
        if wide_dtype(a, g) == jnp.float64 and not use.rule.is_one_hot:
            a, g = a.astype(jnp.float64), g.astype(jnp.float64)  # bounds assume equal precision
        key = use.operand, use.rule.operand_key(use.equation, use.place), a.dtype
        if key not in known:  # uses of one operand share its rounded copy
            known[key] = _round_once(a, use, platform)
        pairs[path] = known[key], _round_once(g, use, platform)
    gradients = {
        i: compute_once(_scaled(widen(x), scales[i])) for i, x in recorded.gradients.items()
    }
    return Rounded(pairs, gradients, scales, leaves, platform)


def _round_once(x: jax.Array, use: Use, platform: Platform) -> jax.Array:
    """Round an array, and make XLA compute it only once, so that norms and sums use equal numbers.

    Axes of length 1 are removed before the rounding and restored after it. On a TPU, these axes
    would keep XLA from fusing the rounding with the product that computes x. If a use has a single
    row, XLA stores x unrounded, and each kernel that reads x rounds it. All these kernels round the
    same numbers, with equal results.
    """
    dense = x.reshape(x.shape[0], *(size for size in x.shape[1:] if size != 1))
    if use.size.rows == 1:
        return platform.rounded(compute_once(dense)).reshape(x.shape)
    return compute_once(platform.rounded(dense)).reshape(x.shape)


def _scale(clip_norm: ArrayLike) -> ArrayLike:
    """Return the power of two nearest to 1/`clip_norm`. The clip norm may be traced."""
    if isinstance(clip_norm, int | float):
        return 2.0 ** -round(math.log2(clip_norm))
    inverse = 1 / jnp.asarray(clip_norm)
    bits = 11 if inverse.dtype == jnp.float64 else 8
    return lax.reduce_precision(inverse, exponent_bits=bits, mantissa_bits=0)


def _scaled(x: jax.Array, scale: ArrayLike) -> jax.Array:
    """Return x times `scale`. Unless `scale` is 1, turn float16 into float32, to avoid overflow."""
    if isinstance(scale, float) and scale == 1:
        return x
    x = widen(x) if x.dtype == jnp.float16 else x
    return x * jnp.asarray(scale, x.dtype)


def apply_rule(use: Use, a: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the factors for operand a and cotangent g, of all examples and scan iterations."""
    factors = partial(use.rule.factors, use.equation, use.place)
    for _ in range(len(use.loops) + 1):
        factors = jax.vmap(factors)
    return factors(a, g)
