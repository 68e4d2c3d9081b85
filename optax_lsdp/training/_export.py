"""Files of parameters that may be released: `export_params` writes them, `load_params` reads them.

The format is NumPy's .npz, one array per leaf, named by its path in the tree.
"""

import unicodedata
import zipfile
from pathlib import Path

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

_LONGEST = 1000  # the largest number of characters in a name
# NumPy and zipfile raise these errors if they read a file that `export_params` did not write.
_UNREADABLE = (ValueError, EOFError, SyntaxError, zipfile.BadZipFile, NotImplementedError)
_READ_HEADER = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


def export_params(path: Path | str, params: optax.Params) -> None:
    """Write parameters to an .npz file for release, without random keys or optimizer state.

    The privacy guarantee covers the parameters that a run returns, and their average. Arrays in
    half precision are written as float32, which NumPy can read. Private objects are refused:
    clipped sums, per-example losses and norms, reports to callbacks, and keys. But an array that
    you take out of a private object is not recognised. Keys of the tree that look like paths
    to other folders, such as "../x", are refused too.

    Args:
        path: the file. If its name does not end in ".npz", this suffix is appended.
        params: a tree of floating-point arrays.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_params(f"{folder}/model.npz", {"dense": {"kernel": jnp.ones((2, 3))}})
    ...     with np.load(f"{folder}/model.npz") as model:
    ...         print(model["dense/kernel"].shape)
    (2, 3)
    """
    arrays: dict[str, np.ndarray] = {}
    leaves = jax.tree.leaves_with_path(params, is_leaf=lambda part: bool(_why_private(part)))
    for place, leaf in leaves:
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
                f"{dtype or type(leaf).__name__} at {name!r}; pass only the parameters."
            )
        _check_name(name)
        if name in arrays:
            raise ValueError(
                f"`params` must have a different name for each array, got {name!r} twice; rename "
                "one of these arrays."
            )
        if not getattr(leaf, "is_fully_addressable", True):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        is_half = jnp.dtype(dtype).itemsize < 4
        arrays[name] = np.asarray(leaf, np.float32 if is_half else None)
    if jax.process_index() == 0:
        with _with_suffix(path).open("wb") as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():  # not by np.savez, which refuses the name "file"
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)


def load_params(path: Path | str, like: optax.Params) -> optax.Params:
    """Read a file that `export_params` wrote. Return a tree with structure and dtypes of `like`.

    `like` is a tree of arrays, or of shapes such as `jax.eval_shape(model.init, key, x)`. Raise if
    the file has other names or shapes.

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
    """Return a description of a part that must not be released, or "" if it may be released."""
    if is_marked(part):
        return "a clipped sum"
    if isinstance(part, PerExample):
        return "losses and norms of single examples"
    return "a report with the loss of a batch" if isinstance(part, StepReport) else ""


def _check_name(name: str) -> None:
    """Raise if a name looks like a path to another folder, or ends in .npy."""
    # Names that differ only in case are safe: NumPy distinguishes W and w, and models use both.
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


def _load(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Return the arrays of a file. Read only arrays that have the shape in `shapes`.

    All other arrays are returned as zeros that take no memory. So a malicious file cannot make this
    function use more memory than the wanted arrays need.
    """
    found: dict[str, np.ndarray] = {}
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
            found[name] = np.broadcast_to(np.float32(0), shape)
            if shapes.get(name) == shape:
                with archive.open(member) as content:
                    found[name] = np.lib.format.read_array(content, allow_pickle=False)
    return found
