"""Data: indices go in, the examples at these places come out, or an error that names one."""

from __future__ import annotations

import hashlib
from itertools import product
from typing import Any, Protocol

import jax
import numpy as np

from optax_lsdp.training._given import (
    DataError,
    as_arrays,
    at,
    check_example,
    check_kind,
    check_values,
)

_AT_A_TIME = 2**16  # examples that are looked at
_HASHED = 2**32  # bytes that are hashed in full; of more, only some examples
_LOOKED_AT = 256  # examples, if not all are hashed


class Source(Protocol):
    """Anything with a length that gives one example for an index, such as a Grain data source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class Examples:
    """Examples of one shape, from a tree of arrays with a leading axis, or from a `Source`.

    Attributes:
        size: how many there are.
        first: the first one.
        is_hashed: whether the fingerprint tells any change of the data.
    """

    def __init__(self, data: Any) -> None:
        self.source: Any = None
        self.arrays: Any = ()
        self.is_hashed = False
        if not isinstance(data, dict | tuple | np.ndarray | jax.Array):
            check_kind(data)
            self.source, self.size = data, len(data)
            self._check_size()
            first = self._read(0)
            check_example(first)
            self.first = as_arrays(first)
            return
        self.arrays = as_arrays(data)
        named = [(at(path), leaf) for path, leaf in jax.tree.leaves_with_path(self.arrays)]
        leaves = [leaf for _, leaf in named]
        for name, leaf in named:
            if leaf.ndim == 0:
                raise ValueError(
                    f"`data` must hold arrays with a leading axis of examples{name}, got single "
                    "numbers or a list of them; np.asarray makes an array of a list."
                )
        sizes = {len(leaf) for leaf in leaves} or {0}
        if len(sizes) != 1:
            lengths = ", ".join(f"{len(leaf)}{name}" for name, leaf in named)
            raise ValueError(
                f"`data` must hold arrays of one length, got {lengths}; every array has a leading "
                "axis of examples."
            )
        (self.size,) = sizes
        self._check_size()
        self.first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), self.arrays)
        self.is_hashed = sum(leaf.nbytes for leaf in leaves) <= _HASHED
        if self.is_hashed:  # else a step would tell that it uses the example
            for (name, leaf), start in product(named, range(0, self.size, _AT_A_TIME)):
                rows = leaf[start : start + _AT_A_TIME]
                check_values(name, rows, np.arange(start, start + len(rows)))

    def _check_size(self) -> None:
        if not self.size:
            raise ValueError("`data` must hold examples, got none.")

    def take(self, indices: np.ndarray, mask: np.ndarray) -> Any:
        """Return the examples at these places, zeros where masked."""
        if self.source is None:

            def cut(path: Any, leaf: Any) -> np.ndarray:
                rows = np.asarray(leaf[indices])
                rows[~mask] = 0
                check_values(at(path), rows, indices)
                return rows

            return jax.tree.map_with_path(cut, self.arrays)
        read = [self._checked(int(index)) for index in indices[mask]]

        def stack(path: Any, first: np.ndarray, *rows: np.ndarray) -> np.ndarray:
            room = np.zeros((len(indices), *first.shape), first.dtype)
            if rows:
                room[mask] = rows
            check_values(at(path), room, indices)
            return room

        return jax.tree.map_with_path(stack, self.first, *read)

    def holds(self, constant: np.ndarray) -> bool:
        """Tell whether an array is all of the data, or one of their arrays."""
        alike = (leaf for leaf in jax.tree.leaves(self.arrays) if leaf.shape == constant.shape)
        return any(np.array_equal(leaf.astype(constant.dtype), constant) for leaf in alike)

    def fingerprint(self) -> str:
        """Return a hash of the data: of all bytes if they are in memory, else of some examples."""
        digest = hashlib.blake2b(repr((self.size, jax.tree.structure(self.first))).encode())
        update_digest(digest, self.first)
        if self.is_hashed:
            for leaf in jax.tree.leaves(self.arrays):
                digest.update(repr((leaf.shape, str(leaf.dtype))).encode())
                for start in range(0, len(leaf), _AT_A_TIME):
                    update_digest(digest, leaf[start : start + _AT_A_TIME])
        elif jax.process_count() == 1:  # of several, each reads its own examples alone
            places = np.unique(np.linspace(0, self.size - 1, _LOOKED_AT).astype(int))
            update_digest(digest, self.take(places, np.ones(len(places), bool)))
        return digest.hexdigest()

    def _read(self, index: int) -> Any:
        try:
            return self.source[index]
        except Exception as error:
            raise DataError(f"`data` must give example {index}, but raised {error!r}.") from error

    def _checked(self, index: int) -> Any:
        example = as_arrays(self._read(index))

        def describe(tree: Any) -> Any:
            return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)

        if describe(example) != describe(self.first):
            raise DataError(
                f"`data` must give examples like the first, {describe(self.first)}, got "
                f"{describe(example)} at index {index}."
            )
        return example


def update_digest(digest: Any, tree: Any) -> None:
    """Add all arrays of a tree to a hash."""
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
