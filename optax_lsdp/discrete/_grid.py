"""The grid: a loss goes in, a function to the clipped sum in whole cells comes out.

What holds on paper holds here on the machine: each example's cells are whole numbers whose squares
are added up exactly, and whoever has too many contributes nothing. Sums of whole numbers know no
rounding and no order. (Should a sum leave the range of 32 bits it wraps around, which costs its
use, not its privacy: that is post-processing of a sum that did not.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_positive, check_whole, frozen_number
from optax_lsdp._isolation import trace_loss, warn_of_batch_norms
from optax_lsdp._loss import call_or_explain
from optax_lsdp._mesh import manual_axes
from optax_lsdp._trees import (
    check_floating,
    check_not_empty,
    compute_once,
    count_examples,
    row_norms,
)

_MOST_CELLS = 46_340  # two squares of it fit into 32 bits


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["value"],
    meta_fields=["cell", "sensitivity", "together"],
)
@dataclass(frozen=True)
class OnGrid:
    """One leaf of a sum in whole cells, to which `add_discrete_gaussian_noise` adds its noise.

    `jax.tree.map(jnp.add, a, b)` adds two sums over disjoint examples.

    Attributes:
        value: int32.
        cell: the side of a cell.
        sensitivity: by how many cells one example moves all leaves together at most.
        together: how many leaves that holds for.
    """

    value: jax.Array
    cell: float
    sensitivity: int
    together: int


def sensitivity_in_cells(resolution: int, size: int) -> int:
    """Return by how many cells one example moves a sum of `size` entries at most.

    Clipped to `resolution` cells, then rounded by half a cell in every entry: R + √d/2; one
    more is for what float32 adds to that, which is checked and not believed.

    >>> sensitivity_in_cells(1000, size=400)
    1011
    """
    return resolution + math.ceil(math.sqrt(size) / 2) + 1


def grid_grad(
    loss_fn: Callable[[optax.Params, Any], jax.Array],
    *,
    clip_norm: float,
    resolution: int = 2**14,
    microbatch_size: int = 1,
) -> Callable[..., optax.Updates]:
    """Return `f(params, batch, mask=None)`, the sum of clipped gradients in whole cells.

    s = Σᵢ round(R · gᵢ / max(‖gᵢ‖, C)), with cells of side C/R. Adding or removing one example
    moves s by at most `sensitivity_in_cells`, a statement about whole numbers that is checked
    for every example. The gradient of every example is formed: this takes the time
    and memory of `engine="vmap"`.

    Args:
        loss_fn: `loss_fn(params, example)`, a scalar for one example without batch axis.
        clip_norm: C.
        resolution: R, the number of cells in C. Rounding costs √d/2 cells of sensitivity, so that
            it should be large compared with √d.
        microbatch_size: how many gradients are formed at a time. By default each is computed by
            itself, so that it depends on its example alone, to the bit. With more, its rounding may
            depend on its place: then the guarantee is about examples that are masked,
            `neighbouring="zero_out"`, and not about those that are left out.

    Returns:
        f. `mask` is (n,), bool, False for padding. The result has the structure of `params`,
        each leaf an `OnGrid`.

    >>> import numpy as np
    >>> batch = jnp.array([[3.0, 4.0], [0.0, 0.5]])  # the gradients themselves
    >>> total = grid_grad(jnp.vdot, clip_norm=1.0, resolution=100)(jnp.zeros(2), batch)
    >>> print(total.value, total.cell, total.sensitivity)
    [ 60 130] 0.01 102
    """
    check_positive("clip_norm", clip_norm)
    clip_norm = frozen_number(clip_norm)
    check_whole("resolution", resolution)
    check_whole("microbatch_size", microbatch_size)

    def grad(params: optax.Params, batch: Any, mask: jax.Array | None = None) -> optax.Updates:
        check_not_empty("params", params)
        check_floating("params", params)
        leaves = jax.tree.leaves(params)
        most = sensitivity_in_cells(resolution, sum(leaf.size for leaf in leaves))
        if most > _MOST_CELLS:
            raise ValueError(
                f"`resolution` must leave the sensitivity, here {most} cells, at {_MOST_CELLS} at "
                f"most, got {resolution}; take a coarser one."
            )
        check_outside_shard_map("grid_grad")
        count = count_examples(batch)
        batch = jax.tree.map(jnp.asarray, batch)
        known = jnp.ones(count, bool) if mask is None else jnp.asarray(mask)
        if known.shape != (count,) or known.dtype != bool:
            raise ValueError(f"`mask` must be a bool array of shape ({count},), got {known!r}.")
        places = jnp.arange(-(-count // microbatch_size) * microbatch_size, dtype=jnp.int32)
        places = places.reshape(-1, microbatch_size)

        def one_gradient(example: Any) -> Any:
            loss = trace_loss(
                lambda p, x: (call_or_explain(loss_fn, p, x), None), params, example
            )  # and check
            warn_of_batch_norms(loss.closed)
            return jax.grad(loss_fn)(params, example)

        def add(sums: list[jax.Array], place: jax.Array) -> tuple[list[jax.Array], None]:
            rows = jnp.minimum(place, count - 1)  # the last microbatch repeats the last example
            stacked = jax.vmap(one_gradient)(jax.tree.map(lambda x: x[rows], batch))
            counted = known[rows] & (place < count)
            cells = _to_cells(jax.tree.leaves(stacked), counted, clip_norm, resolution, most)
            added = [x.sum(axis=0, dtype=jnp.int32) for x in cells]
            return [total + x for total, x in zip(sums, added, strict=True)], None

        zeros = [jnp.zeros(leaf.shape, jnp.int32) for leaf in leaves]
        sums, _ = jax.lax.scan(add, zeros, places)
        cell = float(clip_norm) / resolution
        marked = [OnGrid(total, cell, most, len(leaves)) for total in sums]
        return jax.tree.unflatten(jax.tree.structure(params), marked)

    return grad


def check_outside_shard_map(name: str) -> None:
    """Raise inside of `shard_map`, where sums and noise would be those of a shard."""
    if manual_axes():
        raise ValueError(
            f"`{name}` must be called outside shard_map, got the axes "
            f"{', '.join(sorted(map(str, manual_axes())))}; under jit, sharded arrays are fine."
        )


def _to_cells(
    rows: list[jax.Array], counted: jax.Array, clip_norm: float, resolution: int, most: int
) -> list[jax.Array]:
    """Return the cells of each example, int32, and zeros for those that do not count."""
    rows = compute_once(rows)  # whose norms are those of what is rounded
    norms = row_norms(rows)
    factors = resolution / jnp.maximum(norms, jnp.asarray(clip_norm, norms.dtype))
    fine = counted & jnp.isfinite(norms)

    def along(x: jax.Array, row: jax.Array) -> jax.Array:
        return x.reshape(-1, *[1] * (row.ndim - 1))

    def round_row(row: jax.Array) -> jax.Array:
        scaled = jnp.rint(row.astype(norms.dtype) * along(factors, row))
        scaled = jnp.where(along(fine, row), scaled, jnp.zeros_like(scaled))
        return jnp.clip(scaled, -most, most).astype(jnp.int32)  # else the cast is undefined

    cells = compute_once([round_row(row) for row in rows])  # those that are checked are summed
    flat = jnp.concatenate([x.reshape(len(x), -1) for x in cells], axis=1)
    few = has_at_most(flat, most)
    return [jnp.where(along(few, x), x, jnp.zeros_like(x)) for x in cells]


def has_at_most(cells: jax.Array, most: int) -> jax.Array:
    """Tell for each row of (n, d) whether Σ cells² ≤ most², exactly, in 32 bits.

    What exceeds most² is cut to most² + 1, which exceeds it too, whatever is added to it; so many
    of these are added at a time as fit.
    """
    limit = most**2
    at_once = (2**32 - 1) // (limit + 1)
    magnitudes = jnp.minimum(jnp.abs(cells), most + 1).astype(jnp.uint32)
    sums = jnp.minimum(magnitudes**2, jnp.uint32(limit + 1))
    while (width := min(at_once, sums.shape[1])) > 1:
        sums = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % width)))
        sums = sums.reshape(len(sums), -1, width).sum(axis=2, dtype=jnp.uint32)
        sums = jnp.minimum(sums, jnp.uint32(limit + 1))
    return (sums <= limit).all(axis=1)
