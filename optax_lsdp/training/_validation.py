"""At the door: data and parameters go in as they were given, plain arrays or words come out."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import is_number
from optax_lsdp._isolation import check_no_layer_state
from optax_lsdp._keys import is_key
from optax_lsdp._trees import check_floating, check_not_empty, is_numeric, path_name

_LOOKED_AT = 10_000  # entries of an array of objects


class DataError(ValueError):
    """An example could not be read or used. The run stopped cleanly and can go on."""


_REMEDIES = {  # methods and attributes by which data of other libraries are known
    "to_numpy": "its to_numpy() is an array, as are those of its columns",  # df[0] may be a column
    "toarray": "its toarray() is an array, as are those of its columns",  # of sparse matrices
    "as_numpy_iterator": "read it into arrays, such as np.stack(list(data.as_numpy_iterator()))",
    "dataset": "a loader makes batches of its own, and `fit` samples them: give its `dataset`",
    "__next__": "what is read once cannot be sampled: make a list or an array of it",
}


def at(path: tuple[Any, ...]) -> str:
    """Return where a leaf is, for a sentence: nothing if it is all there is."""
    return f" at {path_name(path)!r}" if path else ""


def check_kind(data: Any) -> None:
    """Raise if data are neither arrays nor a source of which an index gives an example."""
    demand = (
        "`data` must be arrays with a leading axis of examples, or have a length and give an "
        f"example for an index, got {type(data).__name__}"
    )
    is_source = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    for name, remedy in _REMEDIES.items():
        if hasattr(data, name) and not (is_source and name == "dataset"):  # a subset has one too
            raise TypeError(f"{demand}; {remedy}.")
    if isinstance(data, str | bytes | Path):
        raise TypeError(f"{demand}; read the file first.")
    if not is_source:
        raise TypeError(f"{demand}.")


def check_example(example: Any) -> None:
    """Raise if numbers come in lists, which JAX takes for as many arrays."""
    leaves = jax.tree.leaves_with_path(example, is_leaf=lambda x: isinstance(x, list))
    for path, part in leaves:
        if isinstance(part, list) and all(map(is_number, jax.tree.leaves(part))):
            raise TypeError(
                "`data` must give examples that are arrays, or dicts or tuples of them, got a "
                f"list of numbers{at(path)}; np.asarray makes an array of it."
            )


def as_arrays(data: Any) -> Any:
    """Return a tree of arrays of numbers, without a copy of those that are."""
    return jax.tree.map_with_path(_as_array, data)


def _as_array(path: tuple[Any, ...], leaf: Any) -> np.ndarray:
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"`data` must hold plain arrays, got a masked one{at(path)}, whose mask would be lost; "
            "fill in what is masked, and let the loss leave it out."
        )
    if isinstance(leaf, jax.Array) and is_key(leaf):
        raise TypeError(
            f"`data` must hold numbers{at(path)}, got random keys; `fit` makes one for each "
            "example of every step, for a loss of three arguments, `loss_fn(params, example, key)`."
        )
    try:
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    except Exception as error:
        raise TypeError(
            f"`data` must hold arrays, got {type(leaf).__name__}{at(path)}, of which NumPy makes "
            f"none: {str(error).splitlines()[0] if str(error) else type(error).__name__}."
        ) from error
    if not is_numeric(array):
        raise TypeError(
            f"`data` must hold numbers, got {array.dtype}{at(path)}; {_remedy_for(array)}."
        )
    return array


def _remedy_for(array: np.ndarray) -> str:
    """Return the advice for an array of a dtype that is not numeric."""
    if array.dtype != object:
        return "encode text and dates as numbers"
    kinds = {type(x) for x in array.reshape(-1)[:_LOOKED_AT]}
    names = ", ".join(sorted(kind.__name__ for kind in kinds))
    if all(issubclass(kind, bool | np.bool_ | Real) for kind in kinds):
        return (
            f"it holds {names}, as a table of mixed columns gives them: astype(np.float32), of a "
            "table to_numpy(np.float32), makes numbers of them"
        )
    if kinds & {list, tuple} or any(issubclass(kind, np.ndarray) for kind in kinds):
        return "its rows have several lengths: pad them to one, and let the loss leave out the rest"
    return (
        f"it holds {names}: encode text and dates, fill in what is missing, and give columns of "
        "different kinds as arrays of their own"
    )


def check_values(name: str, rows: np.ndarray, indices: np.ndarray) -> None:
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
            f"`data` must be {what} in example {index}{name}; mend it, or plan for data without it."
        )


def check_params(params: Any) -> None:
    """Raise unless these are parameters with which training can begin."""
    if hasattr(params, "params") and hasattr(params, "opt_state"):
        raise TypeError(
            f"`params` must be a tree of arrays, got {type(params).__name__}, a state of training; "
            "pass its `.params`."
        )
    if isinstance(params, Mapping) and "batch_stats" in params:
        raise ValueError(
            "`params` must be what is trained, got 'batch_stats' among it, which would get noise; "
            "pass variables['params'], and let the loss close over the rest."
        )
    check_no_layer_state(params)
    arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), params)
    check_not_empty("params", arrays)
    check_floating("params", arrays)
    for path, leaf in jax.tree.leaves_with_path(arrays):
        if not (hasattr(leaf, "__array__") and jnp.isfinite(leaf).all()):
            raise ValueError(
                "`params` must hold arrays of finite numbers, got something else at "
                f"{path_name(path)!r}."
            )
