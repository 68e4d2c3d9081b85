"""Files of parameters that may be released: `export_params` writes them, `load_params` reads them.

The format is NumPy's .npz, one array per leaf, named by its path in the tree.
"""

from __future__ import annotations

import unicodedata
import zipfile
from pathlib import Path
from typing import IO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.tree_util import KeyPath

from optax_lsdp._clipped import is_marked
from optax_lsdp._trees import path_name
from optax_lsdp.clipping import PerExample
from optax_lsdp.training._progress import StepReport

_LONGEST = 1000  # characters of a name
# What NumPy and zipfile raise for other files. A malformed header raises SyntaxError, an unknown
# compression NotImplementedError.
_UNREADABLE = (ValueError, EOFError, SyntaxError, zipfile.BadZipFile, NotImplementedError)
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def export_params(path: Path | str, params: optax.Params) -> None:
    """Write parameters that may be released to an .npz file, without keys or optimizer state.

    The guarantee covers what a run returns: its parameters and their average. Half precision is
    written as float32, which NumPy can read. A clipped sum, per-example losses and norms, a
    callback's report, a key, or anything but floating-point arrays raises a ValueError. So does a
    name that a program could read as a path outside of the file. An array that was taken out of one
    of these objects looks like a parameter, and cannot be refused.

    Args:
        path: the file; ".npz" is appended unless it ends so.
        params: a tree of arrays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_params(f"{folder}/model.npz", {"dense": {"kernel": jnp.ones((2, 3))}})
    ...     with np.load(f"{folder}/model.npz") as model:
    ...         print(model["dense/kernel"].shape)
    (2, 3)
    """
    arrays: dict[str, np.ndarray] = {}
    for place, leaf in jax.tree.leaves_with_path(
        params, is_leaf=lambda part: bool(_why_private(part))
    ):
        name = _name(place)
        if why := _why_private(leaf):
            raise ValueError(
                f"`params` must hold parameters only, got {why} at {name!r}, which has no noise "
                "and must not be released; leave it out."
            )
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
            raise ValueError(
                "`params` must hold floating-point arrays and no key, got "
                f"{dtype or type(leaf).__name__} at {name!r}; pass the parameters alone."
            )
        _check_name(name)
        if name in arrays:
            raise ValueError(
                f"`params` must have a different name for each array, got {name!r} twice; rename "
                "one of them."
            )
        if not getattr(leaf, "is_fully_addressable", True):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        is_half = jnp.dtype(dtype).itemsize < 4
        arrays[name] = np.asarray(leaf, np.float32 if is_half else None)
    if jax.process_index() == 0:
        with _with_suffix(path).open("wb") as file:
            _save(file, arrays)


def load_params(path: Path | str, like: optax.Params) -> optax.Params:
    """Read a file of `export_params` into a tree like the given one, with its dtypes.

    Args:
        path: the file, the same as for `export_params`.
        like: a tree of arrays or of their shapes, such as `jax.eval_shape(model.init, key, x)`.

    Raises:
        ValueError: if names or shapes in the file differ from those of `like`, or if
            `export_params` did not write the file.

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
                f"`like` must have the names and shapes of {str(path)!r}, got {here} at {name!r}, "
                f"where the file has {there}; pass the parameters of the same model."
            )
    return jax.tree.map_with_path(lambda place, x: jnp.asarray(found[_name(place)], x.dtype), like)


def _with_suffix(path: Path | str) -> Path:
    path = Path(path)
    return path.with_name(path.name.removesuffix(".npz") + ".npz")


def _name(place: KeyPath) -> str:
    """Return the name of a leaf in the file."""
    return path_name(place) if place else "params"


def _why_private(part: object) -> str:
    """Return what a part of a tree is if it must not be released; otherwise an empty text."""
    if is_marked(part):
        return "a clipped sum"
    if isinstance(part, PerExample):
        return "losses and norms of single examples"
    return "a report with the loss of a batch" if isinstance(part, StepReport) else ""


def _check_name(name: str) -> None:
    """Raise if a name is unsafe in an archive: it could leave the folder, or collide.

    Names that differ only in case pass: NumPy distinguishes them, and models have W and w.
    """
    has_odd_character = any(unicodedata.category(c).startswith("C") or c == "\\" for c in name)
    has_drive = name[1:2] == ":" and name[0].isalpha()
    has_odd_part = not {"", ".", ".."}.isdisjoint(name.split("/"))
    if has_odd_character or has_drive or has_odd_part or len(name) > _LONGEST:
        demand = "that cannot be read as paths to other places"
    elif name.endswith(".npy"):
        demand = "without the suffix .npy, which NumPy appends"
    else:
        return
    raise ValueError(
        f"`params` must have names {demand}, got {name[:_LONGEST]!r}; rename that part of the tree."
    )


class _Unread(NamedTuple):
    """Stands for an array in the file that was not read, because its shape is not wanted."""

    shape: tuple[int, ...]


def _load(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray | _Unread]:
    """Return the arrays of a file; where name or shape are not as wanted, only the shape.

    So neither a header nor compressed content can ask for more memory than the wanted arrays take.
    """
    found: dict[str, np.ndarray | _Unread] = {}
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            if name == member or name in found:
                raise ValueError(f"{member[:_LONGEST]!r} is not an array, or occurs twice")
            with archive.open(member) as content:
                version = np.lib.format.read_magic(content)
                if version not in _READ_HEADER:
                    raise ValueError(f"{name[:_LONGEST]!r} has an unknown version")
                shape, _, dtype = _READ_HEADER[version](content)
            if dtype.kind not in "fc":
                raise ValueError(f"{name[:_LONGEST]!r} holds {dtype}, not floating-point numbers")
            found[name] = _Unread(shape)
            if shapes.get(name) == shape:
                with archive.open(member) as content:
                    found[name] = np.lib.format.read_array(content, allow_pickle=False)
    return found


def _save(file: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """Write what `numpy.savez` writes, but with any names, such as "file"."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
