"""The data of a run: examples by index, and the microbatches that each step reads.

Data are arrays with a leading axis of examples, or a source that returns one example per index. The
plan's sampler chooses the indices of a batch. In each process, a thread reads the examples of the
process's own devices, one microbatch ahead.
"""

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from optax_lsdp._checks import check_whole
from optax_lsdp._trees import describe_arrays
from optax_lsdp._types import PyTree
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._multihost import Placement, raise_everywhere
from optax_lsdp.training._step import Microbatch
from optax_lsdp.training._validation import (
    DataError,
    as_arrays,
    check_example,
    check_kind,
    check_values,
    describe_path,
)

_ROWS_AT_ONCE = 2**16  # examples that are checked or hashed at a time
_HASHED_BYTES = 2**32  # larger data are hashed in part
_HASHED_EXAMPLES = 256  # how many examples of such large data are hashed


class Source(Protocol):
    """A source of examples with `len` and `[index]`, such as a Grain data source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PyTree: ...


class ArrayExamples:
    """Examples in arrays whose first axis counts the examples. Arrays may be memory-mapped.

    `size` is the number of examples, and `first` is the first example. `is_hashed` says whether
    `digest` covers every example.
    """

    def __init__(self, data: PyTree) -> None:
        self._arrays = as_arrays(data)
        leaves = jax.tree.leaves_with_path(self._arrays)
        named = [(describe_path(path), leaf) for path, leaf in leaves]
        for name, leaf in named:
            if leaf.ndim == 0:
                raise ValueError(
                    f"`data` must hold arrays with a leading axis of examples{name}, got a single "
                    "number or a list of numbers; pass one entry per example, and convert lists "
                    "with np.asarray."
                )
        sizes = {len(leaf) for _, leaf in named} or {0}
        if len(sizes) != 1:
            lengths = ", ".join(f"{len(leaf)}{name}" for name, leaf in named)
            raise ValueError(
                f"`data` must hold arrays of equal length, got lengths {lengths}; pass arrays "
                "whose first axis counts the same examples."
            )
        (self.size,) = sizes
        _check_size(self.size)
        self.first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), self._arrays)
        self.is_hashed = sum(leaf.nbytes for _, leaf in named) <= _HASHED_BYTES
        if self.is_hashed:  # now: an error within a step would reveal an example of its batch
            for (name, leaf), start in product(named, range(0, self.size, _ROWS_AT_ONCE)):
                rows = leaf[start : start + _ROWS_AT_ONCE]
                check_values(name, rows, np.arange(start, start + len(rows)))

    def take(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """Return the examples at `indices`, with zeros where the mask is False."""
        rows = jax.tree.map(lambda leaf: leaf[indices[mask]], self._arrays)
        return jax.tree.map_with_path(partial(_pad, indices, mask), self.first, rows)

    def contains(self, array: np.ndarray) -> bool:
        """Return whether an array equals a whole array of the data, not only a part."""
        alike = (leaf for leaf in jax.tree.leaves(self._arrays) if leaf.shape == array.shape)
        return any(np.array_equal(leaf.astype(array.dtype), array) for leaf in alike)

    def digest(self) -> str:
        """Return a hash of the data. If the data are too large, it covers only some examples."""
        if not self.is_hashed:
            return _digest_of_some(self)
        digest = _header_digest(self)
        for leaf in jax.tree.leaves(self._arrays):
            digest.update(repr((leaf.shape, str(leaf.dtype))).encode())
            for start in range(0, len(leaf), _ROWS_AT_ONCE):
                update_digest(digest, leaf[start : start + _ROWS_AT_ONCE])
        return digest.hexdigest()


class SourceExamples:
    """Examples of a `Source`, read one by one, with the interface of `ArrayExamples`."""

    def __init__(self, source: Source) -> None:
        self._source, self.size, self.is_hashed = source, len(source), False
        _check_size(self.size)
        first = self._read(0)
        check_example(first)
        self.first = as_arrays(first)

    def take(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """Return the examples at `indices`, with zeros where the mask is False."""
        examples = [self._read_checked(int(index)) for index in indices[mask]]
        rows = jax.tree.map(lambda _, *leaves: leaves, self.first, *examples)
        return jax.tree.map_with_path(partial(_pad, indices, mask), self.first, rows)

    def contains(self, _: np.ndarray) -> bool:
        """Return False: a source has no array of all examples."""
        return False

    def digest(self) -> str:
        """Return a hash of some examples."""
        return _digest_of_some(self)

    def _read(self, index: int) -> PyTree:
        try:
            return self._source[index]
        except Exception as error:
            raise DataError(
                f"`data` must return example {index}, got {error!r}; repair the source and call "
                "`fit` again."
            ) from error

    def _read_checked(self, index: int) -> PyTree:
        """Return an example; raise if structure, shapes or dtypes differ from the first example."""
        example = as_arrays(self._read(index))
        got, wanted = describe_arrays(example), describe_arrays(self.first)
        if got != wanted:
            raise DataError(
                "`data` must return examples with the same structure, shapes and dtypes as the "
                f"first one, {wanted}, got {got} at index {index}; pad or convert the examples in "
                "the source."
            )
        return example


Examples = ArrayExamples | SourceExamples


def open_data(data: PyTree | Source) -> Examples:
    """Return the examples in `data`; raise unless `data` are arrays or a source."""
    if isinstance(data, dict | tuple | np.ndarray | jax.Array):
        return ArrayExamples(data)
    check_kind(data)
    return SourceExamples(data)


def _pad(
    indices: np.ndarray, mask: np.ndarray, path: KeyPath, first: np.ndarray, rows: Sequence
) -> np.ndarray:
    """Return an array with `rows` where the mask is True, and zeros elsewhere."""
    padded = np.zeros((len(indices), *first.shape), first.dtype)
    if len(rows):
        padded[mask] = rows
    check_values(describe_path(path), padded, indices)
    return padded


def _check_size(size: int) -> None:
    if not size:
        raise ValueError("`data` must hold at least one example, got none.")


def _header_digest(examples: Examples) -> hashlib.blake2b:
    """Return a hash of the number of examples, their structure, and the first example."""
    digest = hashlib.blake2b(repr((examples.size, jax.tree.structure(examples.first))).encode())
    update_digest(digest, examples.first)
    return digest


def _digest_of_some(examples: Examples) -> str:
    digest = _header_digest(examples)
    if jax.process_count() == 1:  # with several processes, each reads only its own examples
        indices = np.unique(np.linspace(0, examples.size - 1, _HASHED_EXAMPLES).astype(int))
        update_digest(digest, examples.take(indices, np.ones(len(indices), bool)))
    return digest.hexdigest()


def update_digest(digest: hashlib.blake2b, tree: PyTree) -> None:
    """Add the bytes of all arrays of a tree to a hash."""
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)


def choose_microbatch_size(plan: PrivacyPlan, size: int | None, devices: int) -> int:
    """Return the size of a microbatch. By default, it has room for a whole batch."""
    if size is None:
        return -(-plan.room // devices) * devices
    check_whole("microbatch_size", size)
    if size % devices:
        raise ValueError(
            f"`microbatch_size` must be a multiple of the number of devices, {devices}, got {size}."
        )
    return size


def describe_microbatch(
    examples: Examples, size: int, key: jax.Array, placement: Placement
) -> Microbatch:
    """Return a microbatch with shapes in place of its arrays, and with `key` as its key."""

    def rows(x: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jnp.asarray(x).dtype
        return jax.ShapeDtypeStruct((size, *x.shape), dtype, sharding=placement.split)

    mask: PyTree = rows(np.zeros((), bool))
    return Microbatch(jax.tree.map(rows, examples.first), mask, key, np.int32(0))


class Read(NamedTuple):
    """A microbatch that was read."""

    microbatch: Microbatch  # on the devices
    is_last: bool  # whether it is the last microbatch of its batch
    digest: str  # hash of what this process has read of the batch so far; "" without hashing


class BatchReader:
    """Reads the batches of all steps from `first_step` on, one microbatch after the other.

    A microbatch has `size` examples, including padding. `key` is derived from the run's key and its
    nonce. If `hashed`, each `Read` has a digest for the journal.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        examples: Examples,
        key: jax.Array,
        *,
        size: int,
        placement: Placement,
        thread: ThreadPoolExecutor,
        first_step: int = 0,
        hashed: bool = False,
    ) -> None:
        self.sampler = plan.sampler(key, multiple_of=size)
        self._key = plan.derive_key(key, "examples")
        self._examples, self._size, self._placement = examples, size, placement
        self._thread, self._hashed = thread, hashed
        self._local_rows = np.full(size, placement.split is None)  # those of this process's devices
        if placement.split is not None:
            for where in placement.split.addressable_devices_indices_map((size,)).values():
                self._local_rows[where] = True
        self._has_x64 = bool(jax.config.read("jax_enable_x64"))  # not inherited by threads
        self._reads = self._read_steps(range(first_step, plan.steps))
        self._upcoming = thread.submit(self._read_one)

    def next(self) -> Read:
        """Return the next microbatch, and start to read the microbatch after it."""
        with raise_everywhere():
            read = self._upcoming.result()
        self._upcoming = self._thread.submit(self._read_one)
        return read

    def _read_one(self) -> Read:
        with jax.enable_x64(self._has_x64):
            return next(self._reads)

    def _read_steps(self, steps: range) -> Iterator[Read]:
        for step in steps:
            indices, mask = self.sampler.batch(step)
            digest = hashlib.blake2b(digest_size=16) if self._hashed else None
            count = self._count(mask)
            for place in range(count):
                part = slice(place * self._size, (place + 1) * self._size)
                microbatch = self._read(step, place, indices[part], mask[part], digest)
                yield Read(microbatch, place == count - 1, digest.hexdigest() if digest else "")

    def _count(self, mask: np.ndarray) -> int:
        """Return how many microbatches of a batch to read: all that contain examples."""
        filled = -(-int(mask.sum()) // self._size)  # padding comes after all examples
        # If there can be several microbatches, the compiled step expects the sums of earlier ones.
        return max(filled, min(2, self.sampler.size // self._size))

    def _read(
        self,
        step: int,
        place: int,
        indices: np.ndarray,
        mask: np.ndarray,
        digest: hashlib.blake2b | None,
    ) -> Microbatch:
        """Read the rows of this process's devices."""
        indices, mask = indices[self._local_rows], mask[self._local_rows]
        found = self._examples.take(indices, mask)
        if digest:
            update_digest(digest, (indices, mask, found))
        examples, masks = jax.tree.map(self._put, (found, mask))
        key = jax.random.fold_in(jax.random.fold_in(self._key, step), place)
        return Microbatch(examples, masks, self._placement.replicate(key), np.int32(step))

    def _put(self, rows: np.ndarray) -> jax.Array:
        """Put rows on the devices of this process."""
        split = self._placement.split
        if split is None:
            return jnp.asarray(rows)
        dtype = jax.dtypes.canonicalize_dtype(rows.dtype)  # as jnp.asarray does, without a warning
        whole = np.zeros((self._size, *rows.shape[1:]), dtype)
        whole[self._local_rows] = rows
        return jax.make_array_from_callback(whole.shape, split, whole.__getitem__)
