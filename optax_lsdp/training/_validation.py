"""Checks of data, parameters and loss before a run begins; warnings that point to the caller."""

import sys
import warnings
from functools import partial
from numbers import Real
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from optax_lsdp._checks import is_number
from optax_lsdp._isolation import batch_norm_sentence, batch_norms, check_no_layer_state
from optax_lsdp._jaxpr import ClosedJaxpr, uses_inputs
from optax_lsdp._keys import is_key
from optax_lsdp._loss import LossFn, call_with_any_key, raise_explained
from optax_lsdp._trees import check_floating, check_not_empty, is_numeric, path_name
from optax_lsdp._types import PyTree

_INSPECTED = 10_000  # how many entries of an object array are searched for their types

# Attributes that identify data of other libraries, and instructions for users of such data.
_REMEDIES = {
    "to_numpy": "pass an array, such as `df.to_numpy(np.float32)`, or a dict of such arrays",
    "toarray": "pass an array, such as `data.toarray()`",
    "as_numpy_iterator": "read it into arrays, as with np.stack(list(data.as_numpy_iterator()))",
    "dataset": "pass the `dataset` of the loader, because `fit` must sample batches itself",
    "__next__": "pass a list or an array of its examples, because `fit` must read any index",
}


class DataError(ValueError):
    """Raised if an example cannot be read or used. The run stopped cleanly and can be resumed."""


def warn_caller(message: str) -> None:
    """Issue a warning that points to the first caller outside of this package."""
    package, level = __name__.partition(".")[0] + ".", 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


def describe_path(path: KeyPath) -> str:
    """Return " at 'path'" for an error message, or "" if the leaf is the whole tree."""
    return f" at {path_name(path)!r}" if path else ""


def check_kind(data: object) -> None:
    """Raise unless `data` is a source, which has a length and returns an example per index."""
    demand = (
        "`data` must be arrays with a leading axis of examples, or a source of examples with "
        f"`len(data)` and `data[index]`, got {type(data).__name__}"
    )
    is_source = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    for name, remedy in _REMEDIES.items():
        # torch's Subset has the attribute `dataset`, but it is a source.
        if hasattr(data, name) and not (is_source and name == "dataset"):
            raise TypeError(f"{demand}; {remedy}.")
    if isinstance(data, str | bytes | Path):
        raise TypeError(f"{demand}; read the file into arrays first.")
    if not is_source:
        raise TypeError(f"{demand}.")


def check_example(example: PyTree) -> None:
    """Raise if an example has a list of numbers, which JAX would treat as one array per number."""
    for path, part in jax.tree.leaves_with_path(example, is_leaf=lambda x: isinstance(x, list)):
        if isinstance(part, list) and all(map(is_number, jax.tree.leaves(part))):
            raise TypeError(
                "`data` must return examples that are arrays, or dicts or tuples of arrays, got a "
                f"list of numbers{describe_path(path)}; convert the list with np.asarray."
            )


def as_arrays(data: PyTree, name: str = "data") -> PyTree:
    """Convert the leaves of a tree to numeric NumPy arrays. NumPy arrays are not copied.

    Error messages call the tree `name`.
    """
    convert = partial(_as_array, name)
    return jax.tree.map_with_path(lambda path, leaf: convert(describe_path(path), leaf), data)


def _as_array(name: str, where: str, leaf: object) -> np.ndarray:
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(
            f"`{name}` must hold plain arrays, got a masked array{where}, whose mask would be "
            "lost; fill in the masked entries, and pass the mask as a separate array for the loss."
        )
    if isinstance(leaf, jax.Array) and is_key(leaf):
        raise TypeError(
            f"`{name}` must hold numbers{where}, got random keys; leave them out and write "
            "`loss_fn(params, example, key)`: `fit` passes a new key for every example and step."
        )
    try:
        array = leaf if isinstance(leaf, np.ndarray) else np.asarray(leaf)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TypeError(
            f"`{name}` must hold arrays, got {type(leaf).__name__}{where}, which NumPy cannot "
            f"convert: {reason}."
        ) from error
    if not is_numeric(array):
        raise TypeError(
            f"`{name}` must hold numbers, got {array.dtype}{where}; {_remedy_for(array)}."
        )
    return array


def _remedy_for(array: np.ndarray) -> str:
    """Return an instruction for the user whose array is not numeric."""
    if array.dtype != object:
        return "encode text and dates as numbers"
    types = {type(x) for x in array.reshape(-1)[:_INSPECTED]}
    names = ", ".join(sorted(one.__name__ for one in types))
    if all(issubclass(one, bool | np.bool_ | Real) for one in types):
        return (
            f"convert the array, which holds {names}, with `astype(np.float32)`, or its table with "
            "`df.to_numpy(np.float32)`"
        )
    if types & {list, tuple} or any(issubclass(one, np.ndarray) for one in types):
        return "pad its rows to equal length, and let the loss ignore the padding"
    return (
        f"convert the array, which holds {names}, to numbers: encode text and dates, fill in "
        "missing values, and pass columns of different types as separate arrays"
    )


def check_values(name: str, rows: np.ndarray, indices: np.ndarray) -> None:
    """Raise if a number is not finite, or out of range for the dtype to which JAX converts it.

    `rows` are the entries of one leaf for some examples, and `indices` are the indices of these
    examples. `name` says which leaf;
    see `describe_path`.
    """
    held = jax.dtypes.canonicalize_dtype(rows.dtype)
    is_inexact = jnp.issubdtype(rows.dtype, np.inexact)
    if not rows.size or (rows.dtype == held and not is_inexact):
        return
    flat = rows.reshape(len(rows), -1)
    if is_inexact:
        with np.errstate(over="ignore"):
            good = np.isfinite(flat.astype(held, copy=False))
        problem = f"finite as {held}, got NaN or infinity"
    else:
        limits = np.iinfo(held)
        good = (flat >= limits.min) & (flat <= limits.max)
        problem = f"within the range of {held}, got a number outside of this range"
    if not good.all():
        index = int(indices[np.argmin(good.all(axis=1))])
        raise DataError(
            f"`data` must be {problem} in example {index}{name}; correct the example, or remove it "
            "and make a plan for the smaller dataset."
        )


def check_params(params: optax.Params) -> None:
    """Raise unless `params` can be trained: all leaves must be finite floating-point arrays."""
    if hasattr(params, "params") and hasattr(params, "opt_state"):
        raise TypeError(
            f"`params` must be a tree of arrays, got {type(params).__name__}, a training state; "
            "pass the `.params` of this state."
        )
    check_no_layer_state(params)
    arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), params)
    check_not_empty("params", arrays)
    check_floating("params", arrays)
    for path, leaf in jax.tree.leaves_with_path(arrays):
        if not (hasattr(leaf, "__array__") and jnp.isfinite(leaf).all()):
            raise ValueError(
                "`params` must hold arrays of finite numbers, got NaN, infinity or an object that "
                f"is not an array at {path_name(path)!r}."
            )


def check_loss(loss_fn: LossFn, params: optax.Params, example: PyTree) -> ClosedJaxpr:
    """Return the jaxpr of a loss, which may take a key. Raise if `fit` cannot train with it."""
    example = jax.tree.map(jnp.asarray, example)
    try:
        trace = jax.make_jaxpr(partial(call_with_any_key, loss_fn), return_shape=True)
        program, output = trace(params, example)
    except Exception as error:
        raise_explained(error, loss_fn, params, example)
    if isinstance(output, tuple):
        raise ValueError(
            f"`loss_fn` must return only the loss, got a tuple of {len(output)}; drop auxiliary "
            "values, or write your own loop with `value_and_clipped_grad(..., has_aux=True)`."
        )
    layers = batch_norms(program)
    if layers:
        raise ValueError(batch_norm_sentence(layers))
    return program


def check_uses_params(loss: ClosedJaxpr, params: optax.Params) -> None:
    """Raise if a traced loss uses no parameter, so that training would only add noise."""
    if not uses_inputs(loss, len(jax.tree.leaves(params))):
        raise ValueError(
            "`loss_fn` must depend on `params`, got a function that uses none of them; compute the "
            "loss from its first argument, not from a model that it closes over."
        )
