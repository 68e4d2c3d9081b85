"""Export: parameters go in, a file that may be released comes out, and the other way round."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from optax_lsdp._marked import is_marked
from optax_lsdp._trees import path_name


def export_params(path: Path | str, params: Any) -> None:
    """Write parameters that may be released, as an .npz file of arrays by path; no key, no state.

    What the guarantee covers is what a run returns: its parameters and their average. Half
    precision is written as float32, which NumPy can read. A clipped sum, a key, or anything but
    floating-point numbers raises a ValueError.

    Args:
        path: the file; ".npz" is added if it has no such end.
        params: a tree of arrays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_params(f"{folder}/model.npz", {"dense": {"kernel": jnp.ones((2, 3))}})
    ...     with np.load(f"{folder}/model.npz") as model:
    ...         print(model["dense/kernel"].shape)
    (2, 3)
    """
    whole: dict[str, np.ndarray] = {}
    for place, leaf in jax.tree.leaves_with_path(params, is_leaf=is_marked):
        name = _name(place)
        if is_marked(leaf):
            raise ValueError(
                f"`params` must be parameters, got a clipped sum at {name!r}, which has no noise "
                "and must not be released."
            )
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                "`params` must hold arrays of floating-point numbers and no key, got "
                f"{dtype or type(leaf).__name__} at {name!r}; pass the parameters alone."
            )
        if name in whole:
            raise ValueError(f"`params` must have different names, got two of {name!r}.")
        if not getattr(leaf, "is_fully_addressable", True):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        is_half = jnp.dtype(dtype).itemsize < 4
        whole[name] = np.asarray(leaf, np.float32 if is_half else None)
    if jax.process_index() == 0:
        with _with_suffix(path).open("wb") as file:
            _save(file, whole)


def load_params(path: Path | str, like: Any) -> Any:
    """Read what `export_params` has written, as a tree like the given one, and of its dtypes.

    Args:
        path: the file, as given to `export_params`.
        like: a tree of the same names and shapes, or a ValueError tells which differs. Shapes will
            do for it, such as `jax.eval_shape(model.init, key, x)`.

    >>> import tempfile
    >>> params = {"dense": {"kernel": jnp.ones((2, 3), jnp.bfloat16)}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_params(f"{folder}/model.npz", params)
    ...     print(load_params(f"{folder}/model.npz", params)["dense"]["kernel"].dtype)
    bfloat16
    """
    with np.load(_with_suffix(path)) as file:
        found = dict(file)
    wanted = {_name(place): leaf for place, leaf in jax.tree.leaves_with_path(like)}
    for name in sorted(found | wanted):
        here, there = (
            str(tree[name].shape) if name in tree else "nothing" for tree in (wanted, found)
        )
        if here != there:
            raise ValueError(
                f"`like` must be a tree of what is in {str(path)!r}, got {here} at {name!r} where "
                f"it has {there}."
            )
    return jax.tree.map_with_path(lambda place, x: jnp.asarray(found[_name(place)], x.dtype), like)


def _with_suffix(path: Path | str) -> Path:
    path = Path(path)
    return path.with_name(path.name.removesuffix(".npz") + ".npz")


def _name(place: Any) -> str:
    """Return the name of a leaf in the file."""
    return path_name(place) or "params"


def _save(file: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write what `numpy.savez` writes, whatever the names are."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
