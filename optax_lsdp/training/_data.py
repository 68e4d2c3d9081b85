"""Read the data of a run: examples by index, and the microbatches of each step.

Data are arrays with a leading axis of examples, a source that returns one example per index, or a
`UserData`, whose batches consist of users. The plan's sampler chooses the indices of a batch. In
each process, a thread reads the examples of the process's own devices, one microbatch ahead.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
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
from optax_lsdp.sampling import Batch
from optax_lsdp.training import _validation as validation
from optax_lsdp.training._multihost import Placement, raise_everywhere
from optax_lsdp.training._step import Microbatch
from optax_lsdp.training._users import UserBatch, UserData

_ROWS_AT_ONCE = 2**16  # examples to check or hash at a time
_HASHED_BYTES = 2**32  # if data are larger, only some examples are hashed
_HASHED_EXAMPLES = 256  # how many examples of larger data are hashed


class Source(Protocol):
    """A source of examples, such as a Grain data source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> PyTree: ...


@dataclass(frozen=True)
class Examples:
    """The size of a run's data, and how to read examples by their indices."""

    size: int  # the number of examples
    first: PyTree  # the first example
    read: Callable[[np.ndarray], PyTree]  # returns the examples at some indices
    arrays: Sequence[np.ndarray] = ()  # the arrays that hold all examples; a source has none
    is_hashed: bool = False  # whether `hash_data` covers every example
    users: UserData | None = None  # who has which example, if a batch consists of users

    @property
    def has_user_axis(self) -> bool:
        """Return whether a batch consists of users who may have several examples."""
        return self.users is not None and self.users.width > 1

    def take_batch(self, batch: Batch, step: int, key: jax.Array) -> PyTree:
        """Return the examples of a batch or, if it consists of users, some examples of each user.

        `step` and `key` determine which examples of a user are chosen.
        """
        if self.users is None:
            return self.take(*batch)
        found = self.users.batch(batch, step, key=key)
        # If every user has one example, the batch is the same as without users.
        return found if self.has_user_axis else jax.tree.map(lambda x: x[:, 0], found.examples)

    def take(self, indices: np.ndarray, mask: np.ndarray) -> PyTree:
        """Return the examples at `indices`, with zeros where the mask is False."""

        def pad(path: KeyPath, first: np.ndarray, rows: Sequence) -> np.ndarray:
            padded = np.zeros((len(indices), *first.shape), first.dtype)
            if len(rows):
                padded[mask] = rows
            validation.check_values(validation.describe_path(path), padded, indices)
            return padded

        return jax.tree.map_with_path(pad, self.first, self.read(indices[mask]))


def open_data(data: PyTree | Source | UserData) -> Examples:
    """Return the examples in `data`. Raise unless `data` are arrays, a source or a `UserData`."""
    if isinstance(data, UserData):
        return replace(_open_arrays(data.arrays), users=data)
    if isinstance(data, dict | tuple | np.ndarray | jax.Array):
        return _open_arrays(validation.as_arrays(data))
    validation.check_kind(data)
    return _open_source(data)


def _open_arrays(data: PyTree) -> Examples:
    """Return examples in arrays, which may be memory-mapped. The first axis counts the examples."""
    named = [
        (validation.describe_path(path), leaf) for path, leaf in jax.tree.leaves_with_path(data)
    ]
    for name, leaf in named:
        if leaf.ndim == 0:
            raise ValueError(
                f"`data` must hold arrays with a leading axis of examples{name}, got a single "
                "number or a list of numbers; pass one entry per example, and convert lists with "
                "np.asarray."
            )
    arrays = jax.tree.leaves(data)
    sizes = {len(leaf) for leaf in arrays} or {0}
    if len(sizes) != 1:
        lengths = ", ".join(f"{len(leaf)}{name}" for name, leaf in named)
        raise ValueError(
            f"`data` must hold arrays of equal length, got lengths {lengths}; pass arrays whose "
            "first axis counts the same examples."
        )
    (size,) = sizes
    _check_size(size)
    is_hashed = sum(leaf.nbytes for leaf in arrays) <= _HASHED_BYTES
    if is_hashed:  # check now: an error in a later step would reveal an example of its batch
        for (name, leaf), start in product(named, range(0, size, _ROWS_AT_ONCE)):
            rows = leaf[start : start + _ROWS_AT_ONCE]
            validation.check_values(name, rows, np.arange(start, start + len(rows)))

    def read(indices: np.ndarray) -> PyTree:
        return jax.tree.map(lambda leaf: leaf[indices], data)

    first = jax.tree.map(lambda leaf: np.asarray(leaf[0]), data)
    return Examples(size, first, read, arrays, is_hashed)


def _open_source(source: Source) -> Examples:
    """Return examples that a source reads one by one."""

    def read_one(index: int) -> PyTree:
        try:
            return source[index]
        except Exception as error:
            raise validation.DataError(
                f"`data[{index}]` must return example {index}, got {error!r}; repair the source, "
                "or check the order of arguments, `fit(plan, loss_fn, params, data)`."
            ) from error

    def read(indices: np.ndarray) -> PyTree:
        examples = []
        for index in indices.tolist():
            examples.append(validation.as_arrays(read_one(index)))
            got = describe_arrays(examples[-1])
            if got != wanted:
                raise validation.DataError(
                    "`data` must return examples with the same structure, shapes and dtypes as "
                    f"the first one, {wanted}, got {got} at index {index}; pad or convert the "
                    "examples in the source."
                )
        return jax.tree.map(lambda _, *leaves: leaves, first, *examples)

    _check_size(len(source))
    example = read_one(0)
    validation.check_example(example)
    first = validation.as_arrays(example)
    wanted = describe_arrays(first)
    return Examples(len(source), first, read)


def check_unit(plan: PrivacyPlan, data: object, examples: Examples) -> None:
    """Raise unless the data have the plan's unit of privacy, and `dataset_size` units."""
    if plan.unit == "user" and examples.users is None:
        raise TypeError(
            "`data` must be a UserData if the plan's unit is 'user', got "
            f"{type(data).__name__}; pass training.UserData(data, users, max_examples=...), or "
            'make a plan with unit="example".'
        )
    if plan.unit == "example" and examples.users is not None:
        raise ValueError(
            '`plan` must have unit="user" if `data` is a UserData, got unit="example"; make a plan '
            "that counts users in `dataset_size` and `expected_batch_size`."
        )
    if examples.users is not None and len(examples.users) != plan.dataset_size:
        raise ValueError(
            f"`data` must have {plan.dataset_size} users, the plan's `dataset_size`, got "
            f"{len(examples.users)} different ids; make a plan for this number of users, because "
            "every user must have an example."
        )
    if examples.users is None and examples.size != plan.dataset_size:
        several = "several arrays as a dict or tuple (a list holds one example per entry), or "
        hint = "" if examples.arrays else several
        raise ValueError(
            f"`data` must have {plan.dataset_size} examples, the plan's `dataset_size`, got "
            f"{examples.size}; pass {hint}all examples, or make a plan for this number of examples."
        )


def _check_size(size: int) -> None:
    if not size:
        raise ValueError("`data` must hold at least one example, got none.")


def hash_data(examples: Examples) -> str:
    """Return a hash of all examples, or of some examples if `is_hashed` is false."""
    digest = hashlib.blake2b(repr((examples.size, jax.tree.structure(examples.first))).encode())
    update_digest(digest, examples.first)
    if examples.users is not None:
        digest.update(repr(examples.users.width).encode())
        update_digest(digest, examples.users.owners)
    if examples.is_hashed:
        for leaf in examples.arrays:
            digest.update(repr((leaf.shape, str(leaf.dtype))).encode())
            for start in range(0, len(leaf), _ROWS_AT_ONCE):
                update_digest(digest, leaf[start : start + _ROWS_AT_ONCE])
    elif jax.process_count() == 1:  # with several processes, each reads only its own examples
        indices = np.unique(np.linspace(0, examples.size - 1, _HASHED_EXAMPLES).astype(int))
        update_digest(digest, examples.take(indices, np.ones(len(indices), bool)))
    return digest.hexdigest()


def update_digest(digest: hashlib.blake2b, tree: PyTree) -> None:
    """Add the bytes of all arrays of a tree to a hash."""
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)


def choose_microbatch_size(plan: PrivacyPlan, size: int | None, devices: int) -> int:
    """Return the size of a microbatch: `size` or, if it is None, the room for a whole batch."""
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
    """Return the shapes, dtypes and shardings of a microbatch."""

    def rows(x: np.ndarray) -> jax.ShapeDtypeStruct:
        dtype = jnp.asarray(x).dtype
        return jax.ShapeDtypeStruct((size, *x.shape), dtype, sharding=placement.split)

    first, mask = examples.first, np.zeros((), bool)
    if examples.users is not None and examples.has_user_axis:
        width = examples.users.width
        slots = jax.tree.map(lambda x: np.broadcast_to(x, (width, *x.shape)), first)
        first = UserBatch(slots, np.zeros(width, bool), np.zeros((), np.int32))
    first, mask = jax.tree.map(rows, (first, mask))
    return Microbatch(first, mask, key, np.int32(0))


class Read(NamedTuple):
    """The next microbatch of a run, from `BatchReader.next`."""

    microbatch: Microbatch  # on the devices
    is_last: bool  # whether it is the last microbatch of its batch
    digest: str  # hash of the batch's examples that this process has read, if `hashed`


class BatchReader:
    """Reads the batches of all steps from `first_step` on, one microbatch after the other.

    A microbatch has `size` examples, including padding. `key` is derived from the key and the nonce
    of the run. If `hashed`, each `Read` has a digest for the journal.
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
        self._choice_key = plan.derive_key(key, "users")
        self._examples, self._size, self._placement = examples, size, placement
        self._thread, self._hashed = thread, hashed
        self._local_rows = np.full(size, placement.split is None)  # True for this process's rows
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
        """Yield the microbatches of `steps`. Leave out those that hold only padding.

        But if a batch can have several microbatches, yield at least two. Each process reads the
        rows of its own devices.
        """
        # If a batch can have several microbatches, the compiled step needs at least two.
        least = min(2, self.sampler.size // self._size)
        for step in steps:
            indices, mask = self.sampler.batch(step)
            digest = hashlib.blake2b(digest_size=16)
            count = max(-(-int(mask.sum()) // self._size), least)  # padding comes last
            for place in range(count):
                rows = np.arange(place * self._size, (place + 1) * self._size)[self._local_rows]
                batch = Batch(indices[rows], mask[rows])
                found = self._examples.take_batch(batch, step, self._choice_key)
                if self._hashed:
                    update_digest(digest, (indices[rows], mask[rows], found))
                examples, masks = jax.tree.map(self._put, (found, mask[rows]))
                # With users, the keys of a loss depend on step and user, not on the microbatch.
                part = 0 if self._examples.has_user_axis else place
                key = jax.random.fold_in(jax.random.fold_in(self._key, step), part)
                key = self._placement.replicate(key)
                microbatch = Microbatch(examples, masks, key, np.int32(step))
                yield Read(microbatch, place == count - 1, digest.hexdigest())

    def _put(self, rows: np.ndarray) -> jax.Array:
        """Put rows on the devices of this process."""
        split = self._placement.split
        if split is None:
            return jnp.asarray(rows)
        dtype = jax.dtypes.canonicalize_dtype(rows.dtype)  # as jnp.asarray does, without a warning
        whole = np.zeros((self._size, *rows.shape[1:]), dtype)
        whole[self._local_rows] = rows
        return jax.make_array_from_callback(whole.shape, split, whole.__getitem__)
