"""At the door: data and parameters go in as they were given, plain arrays or words come out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import is_number
from optax_lsdp._keys import is_key
from optax_lsdp._trees import check_floating, check_not_empty, is_numeric, path_name


class DataError(ValueError):
    """An example could not be read or used. The run stopped cleanly and can go on."""


def check_kind(data: Any) -> None:
    """Raise if data are neither arrays nor a source of which an index gives an example."""
    demand = (
        "`data` must be arrays with a leading axis of examples, or have a length and give an "
        f"example for an index, got {type(data).__name__}"
    )
    for method in ("to_numpy", "toarray"):  # of tables, df[0] may be a column; of sparse matrices
        if hasattr(data, method):
            raise TypeError(f"{demand}; its {method}() is an array, as are those of its columns.")
    if isinstance(data, str | bytes | Path):
        raise TypeError(f"{demand}; read the file first.")
    if not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise TypeError(f"{demand}.")


def check_example(example: Any) -> None:
    """Raise if numbers come in lists, which JAX takes for as many arrays."""
    for part in jax.tree.leaves(example, is_leaf=lambda x: isinstance(x, list)):
        if isinstance(part, list) and all(map(is_number, jax.tree.leaves(part))):
            raise TypeError(
                "`data` must give examples that are arrays, or dicts or tuples of them, got a "
                "list of numbers; np.asarray makes an array of it."
            )


def as_array(leaf: Any) -> np.ndarray:
    """Return an array of numbers, without a copy if it is one."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            "`data` must hold plain arrays, got a masked one, whose mask would be lost; fill in "
            "what is masked, and let the loss leave it out."
        )
    if isinstance(leaf, jax.Array) and is_key(leaf):
        raise TypeError(
            "`data` must hold numbers, got keys; `fit` makes one for each example of every step "
            "for a loss with a third argument, `loss_fn(params, example, key)`."
        )
    array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    if not is_numeric(array):
        raise TypeError(
            f"`data` must hold numbers, got {array.dtype}; encode text and dates, and let no "
            "column be of mixed kinds."
        )
    return array


def check_values(rows: np.ndarray, indices: np.ndarray) -> None:
    """Raise if an example is not finite, or not as it was in the 32 bits in which JAX holds it."""
    held = jax.dtypes.canonicalize_dtype(rows.dtype)
    is_inexact = jnp.issubdtype(rows.dtype, np.inexact)
    if not rows.size or (rows.dtype == held and not is_inexact):
        return
    flat = rows.reshape(len(rows), -1)
    if is_inexact:
        with np.errstate(over="ignore"):
            good = np.isfinite(flat.astype(held, copy=False))
        what = f"finite as {held}, got NaN or infinity"
    else:
        most = np.iinfo(held)
        good = (flat >= most.min) & (flat <= most.max)
        what = f"within {held}, got a number beyond it"
    if not good.all():
        index = int(indices[np.argmin(good.all(axis=1))])
        raise DataError(
            f"`data` must be {what} in example {index}; mend it, or plan for data without it."
        )


def check_params(params: Any) -> None:
    """Raise unless these are parameters with which training can begin."""
    if isinstance(params, Mapping) and "batch_stats" in params:
        raise ValueError(
            "`params` must be what is trained, got 'batch_stats' among it, which would get noise; "
            "pass variables['params'], and let the loss close over the rest."
        )
    arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), params)
    check_not_empty("params", arrays)
    check_floating("params", arrays)
    for path, leaf in jax.tree.leaves_with_path(arrays):
        if not (hasattr(leaf, "__array__") and jnp.isfinite(leaf).all()):
            raise ValueError(
                "`params` must hold arrays of finite numbers, got something else at "
                f"{path_name(path)!r}."
            )
