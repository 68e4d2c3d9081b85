"""The choice of a method: a layout, an operator and σ go in, the name of a method comes out.

The limits come from `benchmarks/smoothing.py`, whose results say how far each choice is from the
best one.
"""

from __future__ import annotations

from typing import Any

import jax

from optax_lsdp._checks import is_number
from optax_lsdp.smoothing._banded import reach, smooth_banded
from optax_lsdp.smoothing._fft import smooth_fft
from optax_lsdp.smoothing._layout import Walk
from optax_lsdp.smoothing._matrix import smooth_matrix
from optax_lsdp.smoothing._operator import Operator

ARRAY_METHODS = {"fft": smooth_fft, "matrix": smooth_matrix, "banded": smooth_banded}
METHODS = ("auto", "recursive", "halo", *ARRAY_METHODS)
_LARGEST_MATRIX = 256  # along an axis, where products still beat Fourier's transform
_LARGEST_POSSIBLE_MATRIX = 300  # whose products are still as precise as they should be


def choose_method(
    method: str, walk: Walk, operator: Operator, smoothing: Any, dtype: Any, is_split: bool
) -> str:
    """Return the method for one leaf; raise if the one that was asked for cannot do it.

    `is_split` tells whether the leaf may be spread over devices.
    """
    if method == "auto":
        order = ["halo"] if is_split else []
        order += ["recursive", *["matrix"] * (max(walk.grid) <= _LARGEST_MATRIX), "banded", "fft"]
        return next(m for m in order if not _obstacle(m, walk, operator, smoothing, dtype))
    obstacle = _obstacle(method, walk, operator, smoothing, dtype)
    if obstacle:
        raise ValueError(f"`method` must fit the task, got {method!r}, which {obstacle}.")
    return method


def _obstacle(
    method: str, walk: Walk, operator: Operator, smoothing: Any, dtype: Any
) -> str | None:
    """Return what keeps a method from smoothing along this walk."""
    grid = walk.grid
    if method in ("recursive", "halo", "banded") and len(grid) > 1:
        return f"smooths along one axis, not along a grid of {grid}; use 'auto'"
    if method == "halo" and walk.reshapes:
        return f"does not cover a Grid that is seen as {walk.shape}; use 'auto', or its own shape"
    if method in ("recursive", "halo") and operator.order > 1:
        return f"has order 1 alone, not {operator.order}; use 'auto'"
    if method == "matrix" and max(grid) > _LARGEST_POSSIBLE_MATRIX:
        return f"takes at most {_LARGEST_POSSIBLE_MATRIX} entries an axis, not {max(grid)}"
    if method == "banded":
        if isinstance(smoothing, jax.core.Tracer) or not is_number(smoothing):
            return "needs σ as a number, not a schedule or an injected value; use 'recursive'"
        least = 2 * reach(float(smoothing), operator, dtype) + 1
        if least > grid[0]:
            return f"needs {least} entries for this σ, not {grid[0]}; use 'auto'"
    return None
