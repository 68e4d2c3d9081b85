"""Explain to users how the norm of each parameter's gradient is computed, and what that costs."""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._checks import check_choice, check_function
from optax_lsdp._clipped import ClipGroup
from optax_lsdp._isolation import ValueAndAux, check_no_layer_state
from optax_lsdp._loss import call_loss, raise_explained, takes_key
from optax_lsdp._mesh import with_automatic_axes
from optax_lsdp._trees import check_floating, check_not_empty, path_name, wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._backward import round_recorded, run_backward
from optax_lsdp.clipping.bookkeeping._engine import leaf_gradients
from optax_lsdp.clipping.bookkeeping._platforms import (
    CPU,
    EMULATED,
    PLATFORMS,
    Platform,
    emulate_platform,
)
from optax_lsdp.clipping.bookkeeping._strategy import (
    Kind,
    analyse_batch,
    analyse_loss,
    choose,
)
from optax_lsdp.clipping.bookkeeping.strategies.bounds import NormBound, joint_bound

_COLUMNS = ("parameter", "shape", "used by", "strategy", "multiplications", "bytes")
_WORDS = 4  # the first four columns hold words, the others numbers
_EFFECTIVE = "effective clip norm"
_NEGLIGIBLE = 1e-15  # squares of shorter gradients may underflow
_Shares = tuple[float | None, list[float | None]]  # effective clip norms: joint, and of each leaf
_ROUNDED_TO = {23: "float32", 10: "TF32", 7: "bfloat16"}  # by `Platform.mantissa_bits`


@dataclass(frozen=True)
class LeafClipping:
    """How the gradient norm of one parameter is computed, and what that costs for one example.

    Attributes:
        path: the path of the parameter in the tree.
        shape: the shape of the parameter.
        primitives: the primitives that use the parameter.
        strategy: how the engine computes the norm; `explain_clipping` says what each name means.
        multiplications: how many multiplications the norm takes. If the gradient is materialised,
            these multiplications cost nothing extra, because the sum needs them as well.
        bytes: the memory that the norm takes in addition to ordinary training.
        effective_clip_norm: as in `ClippingExplanation`, but as if this parameter alone were
            clipped to C. It is *private* if the example is, because it depends on the gradient.
    """

    path: str
    shape: tuple[int, ...]
    primitives: tuple[str, ...]
    strategy: Kind
    multiplications: int
    bytes: int
    effective_clip_norm: float | None


@dataclass(frozen=True)
class ClippingExplanation:
    """A table of costs for one example. Print it to see the table.

    Attributes:
        rows: one row per parameter.
        platform: the kind of device that the table describes.
        rounded_to: the precision of operands on this platform: "float32", "TF32" or "bfloat16".
        effective_clip_norm: the norm of the example's contribution to the clipped sum, divided by
            the clip norm C, assuming that the gradient is longer than C. None if only shapes were
            passed, if the example is traced, or if its gradient is shorter than 1e-15. Zero if the
            example contributes nothing, because its gradient is not finite or squares overflow.
            It is *private* if the example is, because it depends on the gradient.
    """

    rows: tuple[LeafClipping, ...]
    platform: str
    rounded_to: str
    effective_clip_norm: float | None

    def _cells(self) -> list[tuple[str, ...]]:
        """Return the lines of the table as texts: names of columns first, totals last."""
        cells = [
            (
                row.path or "(all)",
                "×".join(map(str, row.shape)) or "scalar",
                ", ".join(row.primitives) or "nothing",
                row.strategy,
                f"{row.multiplications:,}",
                f"{row.bytes:,}",
                _in_clip_norms(row.effective_clip_norm),
            )
            for row in self.rows
        ]
        sums = sum(row.multiplications for row in self.rows), sum(row.bytes for row in self.rows)
        joint = _in_clip_norms(self.effective_clip_norm)
        total = ("total", "", "", "", *(f"{number:,}" for number in sums), joint)
        table = [(*_COLUMNS, _EFFECTIVE), *cells, total]
        is_known = self.effective_clip_norm is not None
        return table if is_known else [line[: len(_COLUMNS)] for line in table]

    def _sentences(self) -> list[str]:
        """Return the sentences below the table."""
        does = "are multiplied in" if self.rounded_to == "float32" else "are rounded to"
        sentences = [
            f"This table is for the platform {self.platform}: operands {does} {self.rounded_to}."
        ]
        if self.effective_clip_norm is not None:
            sentences.append("Effective clip norms are private if the example is private.")
        return sentences

    def __str__(self) -> str:
        table = self._cells()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        def line(cells: tuple[str, ...]) -> str:
            sized = list(zip(cells, widths, strict=True))
            words = [cell.ljust(width) for cell, width in sized[:_WORDS]]
            numbers = [cell.rjust(width) for cell, width in sized[_WORDS:]]
            return "  ".join([*words, *numbers]).rstrip()

        ruler = "  ".join("─" * width for width in widths)
        first, *middle, last = map(line, table)
        return "\n".join([first, ruler, *middle, ruler, last, *self._sentences()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            columns = (
                f'<{tag} style="text-align:{"left" if place < _WORDS else "right"}">'
                f"{html.escape(cell)}</{tag}>"
                for place, cell in enumerate(cells)
            )
            return f"<tr>{''.join(columns)}</tr>"

        head, *cells = self._cells()
        body = "".join(line("td", each) for each in cells)
        caption = f'<caption style="caption-side:bottom">{" ".join(self._sentences())}</caption>'
        return f"<table>{caption}<thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def _in_clip_norms(share: float | None) -> str:
    """Return an effective clip norm as text, rounded down, in units of C."""
    return "–" if share is None else f"{math.floor(1e4 * share) / 1e4:.4f}·C"


def explain_clipping(
    loss_fn: Callable[..., PyTree],
    params: optax.Params,
    example: PyTree,
    *,
    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None,
) -> ClippingExplanation:
    """Return the strategy of each parameter, its cost, and the effective clip norm of one example.

    The gradient of a matrix is Σ_t a_t ⊗ g_t, where a_t and g_t are rows of the operand and of the
    cotangent. A row belongs to a token or to a position of an image, for example. Every parameter
    gets the strategy that is cheapest on the platform:

    - "outer product": there is one row t, and the norm is ‖a_t‖‖g_t‖.
    - "Gram matrices": the norm comes from the inner products ⟨a_t, a_s⟩ and ⟨g_t, g_s⟩ of all pairs
      of rows.
    - "Gram matrices of patches", on accelerators only: Gram matrices for the kernel of a
      convolution, whose rows a_t are patches of the image.
    - "by offset", on accelerators only: the gradient of a convolution's kernel is formed, squared
      and forgotten, one offset of the window after the other.
    - "by patches", on a TPU only: the gradient of a convolution's kernel is formed in one product
      with the patches of the image, squared and forgotten.
    - "materialised": every example's gradient is formed and stored, because that is cheapest.
    - "materialised, no rule": every example's gradient is formed and stored, because a use of the
      parameter has no rule.
    - "unused": the loss does not depend on the parameter.

    The table assumes one clip norm for all parameters. If the loss concatenates parameters with
    different clip norms, `clipped_grad` materialises them. To avoid this, multiply by each
    parameter, and concatenate the results.

    Look for large numbers of multiplications or bytes, and for "materialised, no rule" on large
    parameters. For such a parameter, a primitive in the column "used by" has no rule, so automatic
    differentiation forms every example's gradient.

    All strategies clip by an upper bound on the norm, so an example whose gradient is longer than
    the clip norm C contributes a vector slightly shorter than C. The length of this vector is the
    *effective clip norm*. The table shows the estimate C·‖G‖/(M + E). Here ‖G‖ is the computed
    norm, M is the upper bound on the norm, and E bounds the rounding error of the weighted
    gradient. For typical examples the estimate is at least 0.99·C in float32 (on CPUs and AMD GPUs)
    and at least 0.95·C on TPUs and NVIDIA GPUs, whose matrix units round operands. The estimate may
    be smaller if Gram matrices have a hundred rows or more, or if the terms of an example's
    gradient cancel. `benchmarks/README.md` has measurements.

    To show the effective clip norm, this function compiles and runs one backward pass on the
    example, and rounds operands as the platform does. The result depends on the example. If the
    example is *private*, so is the table: do not publish it, or pass shapes and dtypes instead.
    With shapes and dtypes, the loss is only traced, and the table has no effective clip norms.

    Args:
        loss_fn: as in `clipped_grad`. It may take a key as a third argument, as in `fit`, and it
            may return (value, aux).
        params: the parameters, or their shapes and dtypes (`jax.eval_shape`).
        example: one example *without* batch axis, or its shapes and dtypes. Take a public example.
        platform: the kind of device that the table describes; by default the kind that JAX uses
            now. The device need not be present.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
    >>> params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
    >>> explain_clipping(loss, params, jax.ShapeDtypeStruct((30,), "float32"), platform="cpu")
    parameter  shape  used by      strategy       multiplications  bytes
    ─────────  ─────  ───────────  ─────────────  ───────────────  ─────
    b          20     add          materialised                20     80
    w          30×20  dot_general  outer product               50      0
    ─────────  ─────  ───────────  ─────────────  ───────────────  ─────
    total                                                      70     80
    This table is for the platform cpu: operands are multiplied in float32.
    >>> explain_clipping(loss, params, jnp.ones(30), platform="tpu").effective_clip_norm > 0.95
    True
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")
    if platform is not None:
        check_choice("platform", platform, tuple(PLATFORMS))
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    device = PLATFORMS.get(platform or here, CPU)
    check_not_empty("params", params)
    check_no_layer_state(params)
    check_floating("params", params)
    keyed = takes_key(loss_fn)

    def value_and_aux(params: optax.Params, example: PyTree) -> tuple[jax.Array, PyTree]:
        try:
            output = call_loss(loss_fn, params, *(example if keyed else (example,)))
        except Exception as error:
            raise_explained(error, loss_fn, params, example[0] if keyed else example)
        value, aux = output if isinstance(output, tuple) else (output, None)
        if jnp.shape(value):
            raise ValueError(
                "`example` must be one example without batch axis, so that the loss is a scalar, "
                f"got a loss of shape {jnp.shape(value)}; pass one row of the batch."
            )
        return value, aux

    inputs = (example, jax.random.key(0)) if keyed else example
    values = jax.tree.leaves_with_path(params)
    groups = [ClipGroup("", 1.0)] * len(values)
    analysis = analyse_loss(value_and_aux, params, inputs, groups)
    joint, shares = _shares(value_and_aux, params, inputs, groups, device)
    rows = {}
    for leaf, share in zip(analysis.leaves, shares, strict=True):
        strategy = choose(leaf, device)
        for index in leaf.indices:  # concatenated leaves share the cost in proportion to size
            path, value = values[index]
            part = value.size / leaf.entries if len(leaf.indices) > 1 else 1
            cost = round(part * strategy.multiplications)
            size = round(part * strategy.floats) * wide_dtype(value).itemsize
            place = path_name(path), value.shape, leaf.primitives
            rows[index] = LeafClipping(*place, strategy.kind, cost, size, share)
    in_order = tuple(rows[index] for index in sorted(rows))
    return ClippingExplanation(in_order, device.name, _ROUNDED_TO[device.mantissa_bits], joint)


def _shares(
    loss_fn: ValueAndAux,
    params: optax.Params,
    example: PyTree,
    groups: list[ClipGroup],
    device: Platform,
) -> _Shares:
    """Return the effective clip norms, divided by C: of all leaves together, and of each leaf.

    This function bounds each leaf on its own. On accelerators, `clipped_grad` bounds small leaves
    together, so its joint effective clip norm may be slightly smaller than the joint value here.
    """
    unknown: _Shares = None, [None] * len(groups)
    if not all(map(_is_known, jax.tree.leaves((params, example)))):
        return unknown
    with emulate_platform(device.name):
        platform = (EMULATED.get() or PLATFORMS)[CPU.name]

    def bounds(params: optax.Params, batch: PyTree) -> tuple[NormBound, list[NormBound | None]]:
        analysis = analyse_batch(loss_fn, params, batch, groups)
        _, recorded = run_backward(analysis, params, batch)
        leaves = jax.tree.leaves(params)
        rounded = round_recorded(recorded, leaves, analysis.uses, groups, "threshold", platform)
        found = [
            [bound for gradient in leaf_gradients([leaf], rounded) for bound in gradient.bounds()]
            for leaf in analysis.leaves
        ]
        each = [joint_bound(bounds, platform) if bounds else None for bounds in found]
        return joint_bound([bound for bounds in found for bound in bounds], platform), each

    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], example)
    joint, each = jax.jit(with_automatic_axes(bounds, jax.P()))(params, batch)
    if isinstance(joint.norm, jax.core.Tracer):  # if the loss closes over traced arrays
        return unknown
    return _share(joint), [_share(bound) for bound in each]


def _is_known(leaf: object) -> bool:
    """Return whether a leaf holds numbers that this process can read."""
    if isinstance(leaf, jax.Array):
        is_traced = isinstance(leaf, jax.core.Tracer)
        return not is_traced and leaf.is_fully_addressable and not leaf.is_deleted()
    return isinstance(leaf, np.ndarray | np.generic | bool | int | float)


def _share(bound: NormBound | None) -> float | None:
    """Return the effective clip norm divided by C, or None if the gradient is negligible."""
    if bound is None or bound.norm[0] < _NEGLIGIBLE:
        return None
    share = float(bound.norm[0]) / float(bound.upper[0] + bound.rounding[0])
    return share if math.isfinite(share) else 0.0
