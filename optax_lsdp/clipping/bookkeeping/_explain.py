"""Explain to users how the norm of each parameter's gradient is computed, and what that costs."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_choice, check_function
from optax_lsdp._layers import check_no_layer_state
from optax_lsdp._loss import call_loss, raise_explained, takes_key
from optax_lsdp._trees import check_floating, check_not_empty, path_name, wide_dtype
from optax_lsdp._types import PyTree
from optax_lsdp.clipping.bookkeeping._leaves import analyse_loss
from optax_lsdp.clipping.bookkeeping._platforms import CPU, PLATFORMS
from optax_lsdp.clipping.bookkeeping._strategy import Kind, choose

_COLUMNS = ("parameter", "shape", "used by", "strategy", "multiplications", "bytes")


@dataclass(frozen=True)
class LeafClipping:
    """How the gradient norm of one parameter is computed, and what that costs for one example.

    Attributes:
        path: the path of the parameter in the tree.
        shape: the shape of the parameter.
        primitives: the primitives that use the parameter.
        strategy: how the engine computes the norm; `explain_clipping` says what each name means.
        multiplications: how many multiplications the norm takes. If the gradient is materialised,
            they cost nothing extra, because the sum needs them as well.
        bytes: the memory that the norm takes in addition to ordinary training.
    """

    path: str
    shape: tuple[int, ...]
    primitives: tuple[str, ...]
    strategy: Kind
    multiplications: int
    bytes: int


@dataclass(frozen=True)
class ClippingExplanation:
    """A table of costs for one example. Print it to see the table.

    Attributes:
        rows: one row per parameter.
        platform: the kind of device for which the strategies were chosen.
    """

    rows: tuple[LeafClipping, ...]
    platform: str

    def _cells(self) -> list[tuple[str, ...]]:
        cells = [
            (
                row.path or "(all)",
                "×".join(map(str, row.shape)) or "scalar",
                ", ".join(row.primitives) or "nothing",
                row.strategy,
                f"{row.multiplications:,}",
                f"{row.bytes:,}",
            )
            for row in self.rows
        ]
        sums = sum(row.multiplications for row in self.rows), sum(row.bytes for row in self.rows)
        return [*cells, ("total", "", "", "", *(f"{number:,}" for number in sums))]

    def __str__(self) -> str:
        table = [_COLUMNS, *self._cells()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]

        def line(cells: tuple[str, ...]) -> str:
            words = [cell.ljust(width) for cell, width in zip(cells[:4], widths[:4], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(cells[4:], widths[4:], strict=True)]
            return "  ".join([*words, *numbers]).rstrip()

        ruler = "  ".join("─" * width for width in widths)
        first, *middle, last = map(line, table)
        return "\n".join([first, ruler, *middle, ruler, last])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            sides = ["left"] * 4 + ["right"] * 2
            columns = (
                f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(columns)}</tr>"

        body = "".join(line("td", cells) for cells in self._cells())
        return f"<table><thead>{line('th', _COLUMNS)}</thead><tbody>{body}</tbody></table>"


def explain_clipping(
    loss_fn: Callable[..., PyTree],
    params: optax.Params,
    example: PyTree,
    *,
    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None,
) -> ClippingExplanation:
    """Return the strategy of each parameter and its cost, without running the loss.

    The gradient of a matrix is Σ_t a_t ⊗ g_t, where a_t and g_t are rows of the operand and of the
    cotangent. A row belongs to a token or to a position of an image, for example. Every parameter
    gets the strategy that is cheapest on the platform:

    - "outer product": there is one row, and the norm is ‖a‖‖g‖.
    - "Gram matrices": the norm comes from the inner products ⟨a_t, a_s⟩ and ⟨g_t, g_s⟩.
    - "formed and forgotten", on accelerators only: every example's gradient is formed, and XLA adds
      up its squares without storing it.
    - "Gram matrices of patches", on accelerators only: Gram matrices for the kernel of a
      convolution, without storing patches.
    - "by offset", on accelerators only: the gradient of a convolution's kernel is formed and
      forgotten, one offset of the window after the other.
    - "materialised": every example's gradient is formed and stored, because that is cheapest.
    - "materialised, no rule": the same, because some use of the parameter has no rule.
    - "unused": the loss does not depend on the parameter.

    Look for large numbers in the last columns, and for "materialised, no rule" on large parameters.
    For such a parameter, a primitive in the column "used by" has no rule, so automatic
    differentiation forms every example's gradient.

    All strategies clip by an upper bound on the norm, so an example whose gradient is longer than
    the clip norm C contributes slightly less than C. A typical example contributes at least 0.99·C
    in float32 (on CPUs and AMD GPUs) and at least 0.95·C on TPUs and NVIDIA GPUs, whose matrix
    units round operands. If the rows of an example cancel almost entirely, it contributes less.

    Args:
        loss_fn: as in `clipped_grad`. It may take a key as a third argument, as in `fit`, and it
            may return (value, aux).
        params: the parameters, or their shapes and dtypes (`jax.eval_shape`).
        example: one example *without* batch axis, or its shapes and dtypes.
        platform: the kind of device for which to choose strategies; by default the kind that JAX
            uses here. The device need not be present.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
    >>> params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
    >>> explain_clipping(loss, params, jnp.zeros(30))
    parameter  shape  used by      strategy       multiplications  bytes
    ─────────  ─────  ───────────  ─────────────  ───────────────  ─────
    b          20     add          materialised                20     80
    w          30×20  dot_general  outer product               50      0
    ─────────  ─────  ───────────  ─────────────  ───────────────  ─────
    total                                                      70     80
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
    _, analysis = analyse_loss(value_and_aux, params, inputs)
    leaves = jax.tree.leaves_with_path(params)
    rows = []
    for (path, value), leaf in zip(leaves, analysis.leaves, strict=True):
        kind, multiplications, floats, _ = choose(leaf, device)
        size = floats * wide_dtype(value).itemsize
        primitives = leaf.primitives
        row = LeafClipping(path_name(path), leaf.shape, primitives, kind, multiplications, size)
        rows.append(row)
    return ClippingExplanation(tuple(rows), device.name)
