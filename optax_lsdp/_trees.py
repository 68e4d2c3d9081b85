"""Name and check the leaves of trees; compute norms of rows, and bound the rounding of norms."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import is_number
from optax_lsdp._types import PyTree

_BLOCK = 128  # terms to add at a time; small blocks lower `norm_rounding`, large blocks are faster


def path_name(path: tuple[object, ...]) -> str:
    """Return a leaf's path in readable form, such as `params/Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_addresses(tree: PyTree, is_leaf: Callable[[PyTree], bool] | None = None) -> list[str]:
    """Return one address per leaf: a text that is unique within the tree.

    An address joins one text for each key on the leaf's path. For a plain key (of a dict, a list or
    an attribute), the text is the `keystr` of the key. The `keystr` of any other key may equal that
    of a sibling, or that of several keys joined. So the text of any other key also contains the
    length of its `keystr`, and the number of earlier siblings with the same `keystr`. Masking out
    other leaves changes no address.
    """

    def walk(node: PyTree, prefix: str) -> list[str]:
        if is_leaf is not None and is_leaf(node):
            return [prefix]
        children = jax.tree.leaves_with_path(node, is_leaf=lambda x: x is not node)
        if children and not children[0][0]:  # the node is an array, not a container
            return [prefix]
        seen: Counter[str] = Counter()
        found: list[str] = []
        for (entry,), child in children:
            text = jax.tree_util.keystr((entry,))
            count, seen[text] = seen[text], seen[text] + 1
            if count or not _is_plain(entry):
                text = f"\0{len(text)}:{text}#{count}"
            found += walk(child, prefix + text)
        return found

    return walk(tree, "")


def _is_plain(entry: object) -> bool:
    """Return whether a key on a leaf's path is plain; see `leaf_addresses`.

    The `keystr` of a plain key differs from those of its plain siblings, and never equals the
    joined `keystr` of several keys.
    """
    if isinstance(entry, jax.tree_util.DictKey):
        return type(entry.key) in (str, int)
    if isinstance(entry, jax.tree_util.GetAttrKey):
        return entry.name.isidentifier()
    return isinstance(entry, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey)


def zip_leaves(tree: PyTree, other: PyTree) -> Iterator[tuple[str, PyTree, PyTree]]:
    """Yield the name of each leaf of `tree`, the leaf, and the leaf of `other` at its place."""
    others = jax.tree.leaves(other)
    for (path, leaf), its_other in zip(jax.tree.leaves_with_path(tree), others, strict=True):
        yield path_name(path), leaf, its_other


def check_structure(updates: PyTree, params: PyTree) -> None:
    """Raise unless both trees have the same structure."""
    got: object = jax.tree.structure(updates)
    wanted = jax.tree.structure(params)
    if got != wanted:
        raise ValueError(f"`updates` must have the structure of `params`, got {got} for {wanted}.")


def check_shapes(updates: PyTree, params: PyTree, remedy: str) -> None:
    """Raise unless both trees have the same structure and each leaf has its parameter's shape."""
    check_structure(updates, params)
    for name, leaf, param in zip_leaves(updates, params):
        if jnp.shape(leaf) != jnp.shape(param):
            raise ValueError(
                f"`updates` must have the shapes of `params`, got {jnp.shape(leaf)} for "
                f"{jnp.shape(param)} at {name!r}; {remedy}."
            )


def dtype_name(leaf: object) -> str:
    """Return the name of an array's dtype or, if `leaf` is not an array, of its type."""
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def describe_arrays(tree: PyTree) -> PyTree:
    """Return the tree with each array replaced by a text, such as "float32[2, 3]"."""
    return jax.tree.map(lambda x: f"{dtype_name(x)}{list(jnp.shape(x))}", tree)


def is_floating(leaf: PyTree) -> bool:
    """Return whether a leaf is a real floating-point array."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_numeric(array: jax.Array | np.ndarray) -> bool:
    """Return whether an array holds numbers or bools."""
    return jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool


def check_not_empty(name: str, tree: PyTree) -> None:
    """Raise unless `tree` has leaves."""
    if not jax.tree.leaves(tree):
        raise ValueError(f"`{name}` must hold at least one array, got none.")


def check_floating(name: str, tree: PyTree) -> None:
    """Raise unless all leaves are real floating-point arrays."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_floating(leaf):
            raise TypeError(
                f"`{name}` must hold real floating-point arrays, got {dtype_name(leaf)} at "
                f"{path_name(path)!r}; split off arrays that are not trained with nnx.split, "
                "eqx.partition or variables['params']."
            )


def check_mask(mask: object, size: int) -> None:
    """Raise unless `mask` is None or a bool array with one entry for each of `size` examples."""
    if mask is None:
        return
    dtype, shape = dtype_name(mask), getattr(mask, "shape", "none")
    if dtype != "bool" or shape != (size,):
        remedy = "pass several arrays of data as one batch, such as (images, labels)"
        if dtype == "bool":
            remedy = "pass the mask of the sampler's batch, with the examples of the same batch"
        elif shape == (size,):
            remedy += ", and convert a mask with mask.astype(bool)"
        raise ValueError(
            f"`mask` must be a bool array of shape ({size},), True where there is an example, got "
            f"{dtype} of shape {shape}; {remedy}."
        )


def check_not_per_example(extra_args: Mapping[str, PyTree], height: int | None) -> None:
    """Raise if an extra argument of `update` holds bools, or one value for each example.

    `height` is the number of examples, or None if it is unknown.
    """
    for name, value in extra_args.items():
        numbers = isinstance(value, list | tuple) and all(map(is_number, value))
        for leaf in [np.asarray(value)] if numbers else jax.tree.leaves(value):
            shape = jnp.shape(leaf)
            is_one_each = height is not None and shape[:1] == (height,) == (math.prod(shape),)
            if is_one_each or (shape and dtype_name(leaf) == "bool"):
                raise TypeError(
                    f"`{name}` must not hold a value for each example, got {dtype_name(leaf)} of "
                    f"shape {shape}; pass the mask of stacked gradients to `update` as `mask`, and "
                    "the mask of a clipped sum to the function that computes the sum."
                )


def count_examples(batch: PyTree, remedy: str = "") -> int:
    """Return the length of the leading axis. Raise if it is 0, or differs between leaves."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            "`batch` must hold arrays with leading axes of the same length, above 0, got lengths "
            f"{sorted(lengths)}{'; ' + remedy if remedy else ''}."
        )
    return lengths.pop()[0]


def wide_dtype(*arrays: PyTree) -> jnp.dtype:
    """Return the dtype of norms, sums and noise: float64 if any array has it, else float32."""
    return jnp.dtype("float64" if any(x.dtype == "float64" for x in arrays) else "float32")


def widen(x: jax.Array) -> jax.Array:
    """Cast to float32, unless `x` is float64."""
    return x.astype(wide_dtype(x))


def compute_once(tree: PyTree) -> PyTree:
    """Return the tree unchanged, and keep XLA from computing it twice.

    Inside `shard_map`, call this for one leaf at a time. If one leaf of the tree varies over a mesh
    axis, JAX assumes that all leaves of the result do.
    """
    # Otherwise XLA could round a value to half precision for the sum, but not for the norm.
    return jax.lax.optimization_barrier(tree)


def with_row(array: jax.Array, index: jax.Array, row: jax.Array) -> jax.Array:
    """Set one row of an array, unless the array has no such row."""
    place = jnp.minimum(index, len(array) - 1)
    row = jnp.where(index < len(array), row, array[place])
    return jax.lax.dynamic_update_index_in_dim(array, row, place, axis=0)


def applied_change(params: PyTree, updates: PyTree) -> PyTree:
    """Return how updates change the parameters, in float32 or wider.

    Parameters in half precision are rounded, so they change by less or more than their updates.
    """

    def change(update: jax.Array, param: jax.Array) -> jax.Array:
        if param.dtype == wide_dtype(param):
            return widen(update)
        kind = jnp.finfo(param.dtype)
        # Round explicitly, because XLA may leave out a rounding that is only a cast.
        new = jax.lax.reduce_precision(widen(param + update), kind.nexp, kind.nmant)
        return new - widen(param)

    return jax.tree.map(widen, updates) if params is None else jax.tree.map(change, updates, params)


def row_norms(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return the ℓ₂ norm of each row, taken over all leaves together, in float32 or float64.

    The leaves have shape (n, …), and the result has shape (n,). Each row is first divided by its
    largest entry, so that squares neither overflow nor underflow. The true norm is at most (1 + r)
    times the result, where r is `norm_rounding(leaves)`. Subnormal entries may count as zero
    because XLA flushes them; their joint norm is far below any clip norm.
    """
    dtype = wide_dtype(*leaves)
    rows = [leaf.astype(dtype).reshape(leaf.shape[0], -1) for leaf in leaves if leaf.size]
    if not rows:
        return jnp.zeros(leaves[0].shape[:1], dtype)
    largest = jnp.stack([jnp.max(jnp.abs(row), axis=1) for row in rows]).max(axis=0)
    scale = usable_scale(largest)

    def scaled_square(x: jax.Array) -> jax.Array:
        return jnp.square(x / scale[:, None, None])

    squares = jnp.stack([_sum_in_blocks(row, scaled_square) for row in rows], axis=1)
    norms = scale * jnp.sqrt(_sum_in_blocks(squares))
    return jnp.where(largest > 0, norms, largest)


def usable_scale(largest: jax.Array) -> jax.Array:
    """Return `largest` as a divisor that XLA can invert, or 1 where `largest` is zero.

    The divisor is at most an eighth of the largest finite number of the dtype, so largest/divisor
    is at most 8. XLA multiplies by the reciprocal of the divisor, and could flush the reciprocal of
    a larger number to zero.
    """
    most = jnp.asarray(jnp.finfo(largest.dtype).max / 8, largest.dtype)
    return jnp.where(largest > 0, jnp.minimum(largest, most), jnp.ones_like(largest))


def norm_rounding(leaves: Sequence[jax.Array]) -> float:
    """Return r such that the true norm of a row is at most 1 + r times the result of `row_norms`.

    Let u be half the machine epsilon. A sum of B non-negative numbers, added in any order, has a
    relative error of at most (B − 1)u. The block size bounds B, and the errors of nested blocks add
    up. The square root halves the relative error. Another 4u cover the roundings of the root, the
    scaling and the squares.
    """
    sizes = [math.prod(leaf.shape[1:]) for leaf in leaves if leaf.size]
    roundings = max(map(_roundings, sizes), default=0) + _roundings(len(sizes))
    return (roundings / 2 + 4) * float(jnp.finfo(wide_dtype(*leaves)).eps) / 2


def _block_size(size: int) -> int:
    """Return how many of `size` terms to add at a time: at most 128, if possible a divisor."""
    if size <= _BLOCK:
        return max(size, 1)
    return next((b for b in range(_BLOCK, _BLOCK // 4, -1) if size % b == 0), _BLOCK)


def _roundings(size: int) -> int:
    """Return how often `_sum_in_blocks` rounds between a term and the sum of `size` terms."""
    block = _block_size(size)
    return block - 1 + (_roundings(-(-size // block)) if size > block else 0)


def _sum_in_blocks(
    rows: jax.Array, term: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """Return the sum of term(x) over each row, added in blocks; `term` must map 0 to 0."""
    n, size = rows.shape
    if size == 0:
        return jnp.zeros(n, rows.dtype)
    block = _block_size(size)
    blocks = jnp.pad(rows, ((0, 0), (0, -size % block)))
    blocks = blocks.reshape(n, -(-size // block), block)
    # Without the barrier, XLA could merge nested blocks into one reduction of unknown order.
    sums = jnp.sum(term(jax.lax.optimization_barrier(blocks)), axis=2)
    return sums[:, 0] if sums.shape[1] == 1 else _sum_in_blocks(sums)
