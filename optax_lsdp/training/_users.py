"""Data in which a user has several examples, so that a batch consists of users.

`UserData` chooses some examples of each user of a batch. `average_examples` turns the loss of one
example into the loss of one user. A user's gradient is then clipped as a whole.
"""

from numbers import Integral

import jax
import numpy as np
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from optax_lsdp._checks import check_at_most, check_whole
from optax_lsdp._keys import check_key, fold_in_text
from optax_lsdp._types import PyTree, UserBatch
from optax_lsdp.sampling import Batch, choose_within
from optax_lsdp.training import _validation as validation

_MOST_EXAMPLES = 10**6  # the largest number of examples of one user in a batch


class UserData:
    """Examples that belong to users, for plans with `unit="user"`.

    Each time that a user is in a batch, at most `max_examples` of their examples are chosen afresh,
    uniformly and without replacement. The gradients of these examples are averaged, and the average
    is clipped. So adding or removing a user with all their examples moves the sum by at most the
    clip norm. With neighbouring="replace_one", all examples of a user may change, and their number
    as well.

    `len(data)` is the number of users, the plan's `dataset_size`. Users are numbered in the order
    of their first example. If every user has one example, `fit` computes the same bits as with
    ordinary data.

    Args:
        arrays: an array, or a dict or tuple of arrays, which may be memory-mapped. The first axis
            of each array counts the examples.
        users: an id for each example, all integers or all strings, in any order. Nobody may have
            several ids, unless the plan's `group_size` says how many.
        max_examples: m, the largest number of examples of one user in a batch, at most 10⁶. If
            anyone has two examples, each user of a batch takes memory for m examples, even if
            nobody has m. Otherwise shapes would reveal the largest number of examples.

    Attributes:
        arrays: the arrays, in NumPy.
        owners: (n,) for each example, the index of its user.
        width: the number of examples per user for which a batch has room: 1 if no user has two
            examples, otherwise `max_examples`.

    >>> data = UserData(
    ...     np.array([1.0, 2.0, 3.0, 4.0]), ["ann", "bob", "ann", "ann"], max_examples=2
    ... )
    >>> len(data)
    2
    >>> everyone = Batch(np.array([0, 1]), np.array([True, True]))
    >>> batch = data.batch(everyone, step=0, key=jax.random.key(0))
    >>> batch.examples[1], batch.mask[1]
    (array([2., 2.]), array([ True, False]))
    """

    def __init__(self, arrays: PyTree, users: ArrayLike, *, max_examples: int) -> None:
        check_whole("max_examples", max_examples)
        what = "the number for which each user of a batch may take memory"
        check_at_most("max_examples", max_examples, _MOST_EXAMPLES, what)
        if not isinstance(arrays, dict | tuple | np.ndarray | jax.Array):
            raise TypeError(
                "`arrays` must be an array, or a dict or tuple of arrays, got "
                f"{type(arrays).__name__}; convert it with np.asarray."
            )
        self.arrays = validation.as_arrays(arrays, "arrays")
        ids = _as_ids(users)
        lengths = {leaf.shape[:1] for leaf in jax.tree.leaves(self.arrays)}
        if lengths != {ids.shape}:
            remedy = "flatten them with users.ravel()" if ids.ndim > 1 else "pass one id per row"
            raise ValueError(
                f"`users` must have one id per example, got ids of shape {ids.shape} for arrays of "
                f"shapes {[leaf.shape for leaf in jax.tree.leaves(self.arrays)]}; {remedy}."
            )
        if not len(ids):
            raise ValueError("`arrays` must hold at least one example, got none.")
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        numbers = np.argsort(np.argsort(first))  # users are numbered by their first examples
        self.owners = numbers[inverse]
        self._counts = np.bincount(self.owners)
        # The examples of user u are `_order[_starts[u] : _starts[u] + _counts[u]]`.
        self._order = np.argsort(self.owners, kind="stable")
        self._starts = np.cumsum(self._counts) - self._counts
        # Shapes must not tell how many examples a user has, beyond whether anyone has two.
        self.width = max_examples if self._counts.max() > 1 else 1

    def __len__(self) -> int:
        """Return the number of users."""
        return len(self._counts)

    def batch(self, batch: Batch, step: int, *, key: jax.Array) -> UserBatch:
        """Return up to `width` random examples of each user of a batch, stacked user by user.

        Args:
            batch: the indices of the users and their mask, from the plan's sampler. A batch with
                the same user twice is refused. Padding gets no examples.
            step: the number of the step.
            key: one typed key, secret. You may pass the same key to the plan's sampler, because
                this method and the sampler derive different keys from it.
        """
        check_key("key", key)
        users, is_user = self._check_batch(batch)
        counts = np.where(is_user, self._counts[users], 0)
        key = fold_in_text(key, "examples of users")
        places, mask = choose_within(key, step, users, counts, self.width)
        rows = self._order[self._starts[users][:, None] + places]
        is_filled = np.broadcast_to(mask[:, :1], mask.shape)

        def take(path: KeyPath, leaf: np.ndarray) -> np.ndarray:
            slots = np.zeros((*mask.shape, *leaf.shape[1:]), leaf.dtype)
            slots[is_filled] = leaf[rows[is_filled]]
            flat = slots.reshape(-1, *leaf.shape[1:])
            validation.check_values(validation.describe_path(path), flat, rows.reshape(-1))
            return slots

        examples = jax.tree.map_with_path(take, self.arrays)
        return UserBatch(examples, mask, users.astype(np.int32))

    def _check_batch(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of users, and the mask. Raise unless they are valid.

        Padding gets the index zero. The same user may not be in a batch twice, because this user
        would contribute twice the clip norm.
        """
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        users, is_user = (np.asarray(x) for x in (batch if is_pair else ((), ())))
        if not is_pair:
            got = type(batch).__name__
        elif users.ndim != 1 or users.dtype.kind not in "iu":
            got = f"indices of type {users.dtype} and shape {users.shape}"
        elif is_user.dtype != bool or is_user.shape != users.shape:
            got = f"a mask of type {is_user.dtype} and shape {is_user.shape} for {len(users)} users"
        elif (outside := users[is_user & ((users < 0) | (users >= len(self)))]).size:
            got = f"user {outside[0]}"
        elif len(twice := np.flatnonzero(np.bincount(users[is_user].astype(int)) > 1)):
            got = f"user {twice[0]} more than once"
        else:
            return np.where(is_user, users, 0), is_user
        raise ValueError(
            f"`batch` must hold different indices of users from 0 to {len(self) - 1} and a bool "
            f"mask of the same length, got {got}; pass a batch of the plan's sampler."
        )


def _as_ids(users: ArrayLike) -> np.ndarray:
    """Return ids as an array. Raise unless all are integers, or all are strings."""
    try:
        ids = np.asarray(users)
    except Exception as error:
        reason = f"{type(users).__name__}, which NumPy cannot convert to an array"
        raise TypeError(
            f"`users` must have one id per example, got {reason}; pass a list or an array of ids."
        ) from error
    if isinstance(users, np.ma.MaskedArray):
        raise _refused_ids("a masked array")
    if not ids.size:
        return ids  # without ids, any type will do
    # NumPy turns NaN in a list of strings into "nan", an id that all unknown users would share.
    is_list = not hasattr(users, "__array__") or ids.dtype == object
    items = np.asarray(users, object).ravel().tolist() if is_list else []
    types = set(map(type, items))
    kinds = set(map(_kind_of_id, types))
    if ids.dtype == object and len(kinds) == 1:
        ids = np.array(ids.tolist())
    if kinds <= {str, bytes} and any(one[-1:] in ("\0", b"\0") for one in items):
        raise _refused_ids("an id that ends with the character NUL, which NumPy would drop")
    if kinds == {int} and ids.dtype.kind not in "iu":
        raise ValueError(
            "`users` must hold integers from −2⁶³ to 2⁶³ − 1, or strings, got integers outside of "
            "this range; convert all ids to strings."
        )
    if ids.dtype.kind not in "iuSU":
        raise _refused_ids(f"{ids.dtype}")
    if len(kinds) > 1 or None in kinds:
        raise _refused_ids(" and ".join(sorted(one.__name__ for one in types)))
    return ids


def _refused_ids(got: str) -> TypeError:
    return TypeError(
        f"`users` must hold integers or strings, got {got}; leave out examples whose user is "
        "unknown, and convert ids with users.astype(np.int64) or users.astype(str)."
    )


def _kind_of_id(of: type) -> type | None:
    """Return int, str or bytes for the type of an id, and None for a type that ids cannot have."""
    if issubclass(of, Integral) and of is not bool:
        return int
    return next((kind for kind in (str, bytes) if issubclass(of, kind)), None)
