"""explain_clipping: a loss goes in, a table of how each parameter is clipped comes out."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_function
from optax_lsdp._isolation import check_no_layer_state
from optax_lsdp._loss import call_loss, raise_explained, takes_key
from optax_lsdp._trees import check_floating, check_not_empty, path_name, wide_dtype
from optax_lsdp.clipping.bookkeeping._book import make_scheme

_HEAD = ("parameter", "shape", "used by", "rule", "products", "bytes")


@dataclass(frozen=True)
class LeafClipping:
    """How the norm of one parameter's gradient is found, for one example.

    Attributes:
        path: the parameter's place in the tree.
        shape: its shape.
        primitives: what uses it.
        rule: "outer product" or "Gram" if its gradient is never formed; "materialised" if it
            is, because that is cheaper; "fallback" if it is, because some use has no rule;
            "unused" if the loss does not depend on it.
        products: multiplications for the norm. Of a gradient that is formed they are not
            extra: it serves the sum as well.
        bytes: memory for the norm, beyond what ordinary training holds.
    """

    path: str
    shape: tuple[int, ...]
    primitives: tuple[str, ...]
    rule: str
    products: int
    bytes: int


@dataclass(frozen=True)
class ClippingExplanation:
    """A row for each parameter, for one example; prints as a table, in notebooks too."""

    rows: tuple[LeafClipping, ...]

    def _cells(self) -> list[tuple[str, ...]]:
        cells = [
            (
                row.path or "(all)",
                "×".join(map(str, row.shape)) or "scalar",
                ", ".join(row.primitives) or "nothing",
                row.rule,
                f"{row.products:,}",
                f"{row.bytes:,}",
            )
            for row in self.rows
        ]
        sums = (sum(row.products for row in self.rows), sum(row.bytes for row in self.rows))
        return [*cells, ("total", "", "", "", *(f"{number:,}" for number in sums))]

    def __str__(self) -> str:
        table = [_HEAD, *self._cells()]
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEAD))]

        def line(cells: tuple[str, ...]) -> str:
            words = [cell.ljust(width) for cell, width in zip(cells[:4], widths, strict=False)]
            numbers = [cell.rjust(width) for cell, width in zip(cells[4:], widths[4:], strict=True)]
            return "  ".join([*words, *numbers]).rstrip()

        rule = "  ".join("─" * width for width in widths)
        first, *middle, last = map(line, table)
        return "\n".join([first, rule, *middle, rule, last])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def line(tag: str, cells: tuple[str, ...]) -> str:
            sides = ["left"] * 4 + ["right"] * 2
            shown = (
                f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>'
                for side, cell in zip(sides, cells, strict=True)
            )
            return f"<tr>{''.join(shown)}</tr>"

        body = "".join(line("td", cells) for cells in self._cells())
        return f"<table><thead>{line('th', _HEAD)}</thead><tbody>{body}</tbody></table>"


def explain_clipping(
    loss_fn: Callable[..., Any], params: optax.Params, example: Any
) -> ClippingExplanation:
    """Return which rule handles which parameter, and what it costs, without running the loss.

    A product x @ w of one row has the gradient a ⊗ g, whose norm is ‖a‖‖g‖. Of T rows its norm
    takes two Gram matrices of T × T, or the gradient itself, whichever is cheaper. Look for
    large numbers in the last columns, and for "fallback" on large parameters: there a use has no
    rule (the column names it), and every example's gradient is formed by differentiation.

    Args:
        loss_fn: as in `clipped_grad`, or with a key as a third argument, as `fit` takes it; it
            may return (value, aux).
        params: the parameters, or their shapes and dtypes (`jax.eval_shape`).
        example: one example, *without* a batch axis, or its shapes and dtypes.

    >>> import jax.numpy as jnp
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["w"] + params["b"]))
    >>> params = {"w": jnp.zeros((30, 20)), "b": jnp.zeros(20)}
    >>> explain_clipping(loss, params, jnp.zeros(30))
    parameter  shape  used by      rule           products  bytes
    ─────────  ─────  ───────────  ─────────────  ────────  ─────
    b          20     add          materialised         20     80
    w          30×20  dot_general  outer product        50      0
    ─────────  ─────  ───────────  ─────────────  ────────  ─────
    total                                               70     80
    """
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_not_empty("params", params)
    check_no_layer_state(params)
    check_floating("params", params)
    keyed = takes_key(loss_fn)

    def value_and_aux(params: optax.Params, example: Any) -> tuple[Any, Any]:
        try:
            output = call_loss(loss_fn, params, *(example if keyed else (example,)))
        except Exception as error:
            raise_explained(error, loss_fn, params, example[0] if keyed else example)
        value, aux = output if isinstance(output, tuple) else (output, None)
        if jnp.shape(value):
            raise ValueError(
                "`example` must be one example, without batch axis, for which the loss is a "
                f"scalar, got a loss of shape {jnp.shape(value)}."
            )
        return value, aux

    given = (example, jax.random.key(0)) if keyed else example
    _, scheme = make_scheme(value_and_aux, params, given)
    rows = []
    for (path, leaf), plan in zip(jax.tree.leaves_with_path(params), scheme.plans, strict=True):
        size = wide_dtype(leaf).itemsize
        cost = (plan.products, plan.floats * size)
        rows.append(LeafClipping(path_name(path), leaf.shape, plan.primitives, plan.kind, *cost))
    return ClippingExplanation(tuple(rows))
