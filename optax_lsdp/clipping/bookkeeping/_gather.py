"""The rule for embeddings: a gather of whole rows of a table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.lax import GatherScatterMode

from optax_lsdp._jaxpr import Equation, shape_of
from optax_lsdp.clipping.bookkeeping._rules import Matrix, Rule, other_place


def _table_axis(equation: Equation) -> int | None:
    """Return the axis of which whole slices are taken, by one index each, or None otherwise."""
    numbers = equation.params["dimension_numbers"]
    shape, sizes = shape_of(equation.invars[0]), equation.params["slice_sizes"]
    if len(numbers.start_index_map) != 1 or numbers.operand_batching_dims:
        return None
    axis = numbers.start_index_map[0]
    wanted = tuple(1 if i == axis else size for i, size in enumerate(shape))
    if tuple(sizes) != wanted or tuple(numbers.collapsed_slice_dims) != (axis,):
        return None
    return axis


def _matrix(equation: Equation, place: int) -> Matrix | None:
    axis = _table_axis(equation) if place == 0 else None
    if axis is None:
        return None
    shape = shape_of(equation.invars[0])
    rest = [i for i in range(len(shape)) if i != axis]
    return Matrix(shape, (axis, *rest), (0, 1, len(rest)))


def _rows(
    equation: Equation, place: int, indices: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the index of each row, (1, rows), and g: (1, rows, outputs)."""
    size = shape_of(equation.invars[place])[_table_axis(equation) or 0]
    offsets = equation.params["dimension_numbers"].offset_dims
    kept = [i for i in range(cotangent.ndim) if i not in offsets]
    g = cotangent.transpose([*kept, *offsets])
    ids = indices.reshape(1, -1)
    last = jnp.asarray(size - 1, ids.dtype) if size - 1 <= jnp.iinfo(ids.dtype).max else None
    inside = ids >= 0 if last is None else (ids >= 0) & (ids <= last)
    if equation.params["mode"] == GatherScatterMode.CLIP:
        ids = jnp.maximum(ids if last is None else jnp.minimum(ids, last), 0).astype(jnp.int32)
    else:  # what lies outside of the table was filled in, and moves nothing
        ids = jnp.where(inside, jnp.where(inside, ids, 0).astype(jnp.int32), -1)
    return ids, g.reshape(1, ids.shape[1], -1)


gather = Rule(_matrix, other_place, _rows, units=True)
