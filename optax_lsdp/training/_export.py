"""Export: parameters go in, a file that may be released comes out, and the other way round."""

from __future__ import annotations

import unicodedata
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from optax_lsdp._clipped import is_marked
from optax_lsdp._trees import path_name
from optax_lsdp.clipping import PerExample
from optax_lsdp.training._report import Report

_LONGEST = 1000  # characters of a name
# What NumPy and zipfile raise for a file of another kind: an odd header is a SyntaxError, and a
# compression that zipfile does not know a NotImplementedError.
_UNREADABLE = (ValueError, EOFError, SyntaxError, zipfile.BadZipFile, NotImplementedError)
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def export_params(path: Path | str, params: Any) -> None:
    """Write parameters that may be released, as an .npz file of arrays by path; no key, no state.

    What the guarantee covers is what a run returns: its parameters and their average. Half
    precision is written as float32, which NumPy can read. A clipped sum, what each example gave, a
    callback's report, a key, or anything but floating-point numbers raises a ValueError; so does a
    name that a program could take for a place outside of the file. An array that was taken out of
    such a thing cannot be told from a parameter.

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
    for place, leaf in jax.tree.leaves_with_path(
        params, is_leaf=lambda part: bool(_why_private(part))
    ):
        name = _name(place)
        if why := _why_private(leaf):
            raise ValueError(
                f"`params` must be parameters, got {why} at {name!r}, which has no noise and must "
                "not be released."
            )
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                "`params` must hold arrays of floating-point numbers and no key, got "
                f"{dtype or type(leaf).__name__} at {name!r}; pass the parameters alone."
            )
        _check_name(place, name)
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
    wanted = {_name(place): leaf for place, leaf in jax.tree.leaves_with_path(like)}
    try:
        found = _load(_with_suffix(path), {name: x.shape for name, x in wanted.items()})
    except _UNREADABLE as error:
        raise ValueError(
            f"`path` must be a file that `export_params` wrote, got {str(path)!r}: {error}."
        ) from error
    for name in sorted(found | wanted):
        here, there = (
            str(tuple(tree[name].shape)) if name in tree else "nothing" for tree in (wanted, found)
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
    return path_name(place) if place else "params"


def _why_private(leaf: Any) -> str:
    """Say what a part of a tree is that must not be released, or nothing."""
    if is_marked(leaf):
        return "a clipped sum"
    if isinstance(leaf, PerExample):
        return "losses and norms of single examples"
    return "a report with the batch's loss" if isinstance(leaf, Report) else ""


def _check_name(place: Any, name: str) -> None:
    """Raise if a name is unsafe in an archive: it could leave the folder, or collide.

    Names that differ in case alone pass: NumPy tells them apart, and models have W and w.
    """
    parts = name.split("/")
    is_odd = any(unicodedata.category(c).startswith("C") or c == "\\" for c in name)
    is_drive = name[1:2] == ":" and name[0].isalpha()
    if is_odd or is_drive or len(name) > _LONGEST or {"", ".", ".."} & set(parts):
        demand = "that are no paths to elsewhere"
    elif name.endswith(".npy"):
        demand = "without the end .npy, which NumPy adds"
    else:
        return
    raise ValueError(
        f"`params` must have names {demand}, got {name[:_LONGEST]!r}; rename that part of the tree."
    )


class _Shape(NamedTuple):
    """Stands for an array that was not read, since none of its shape is wanted."""

    shape: tuple[int, ...]


def _load(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the arrays of a file; of those of other names or shapes, the shape alone.

    Neither what a header says nor what was compressed can ask for more memory than is wanted.
    """
    found: dict[str, Any] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name == member or name in found:
                raise ValueError(f"{member[:_LONGEST]!r} is no array, or there are two of it")
            with archive.open(member) as content:
                version = np.lib.format.read_magic(content)
                if version not in _READ_HEADER:
                    raise ValueError(f"{name[:_LONGEST]!r} is of an unknown version")
                shape, _, dtype = _READ_HEADER[version](content)
            if dtype.kind not in "fc":
                raise ValueError(f"{name[:_LONGEST]!r} holds {dtype}, no floating-point numbers")
            found[name] = _Shape(shape)
            if shapes.get(name) == shape:
                with archive.open(member) as content:
                    found[name] = np.lib.format.read_array(content, allow_pickle=False)
    return found


def _save(file: Any, arrays: dict[str, np.ndarray]) -> None:
    """Write what `numpy.savez` writes, whatever the names are."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
