"""Trees of arrays: names of leaves, wide dtypes, and norms of rows that are never too small."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import is_number

_BLOCK = 128  # terms added at a time: fewer tighten `norm_rounding`, more are faster


def path_name(path: tuple[Any, ...]) -> str:
    """Return a leaf's path as a person would write it, such as `params/Dense_0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaf_addresses(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[str]:
    """Return a text for each leaf; two leaves of a tree never have the same.

    It is the leaf's `keystr`, in which plain keys of dicts, lists and attributes can be told apart.
    Any other key may be written like another one, or like two of them. Then its text has
    its length in front, and a number if the node has had that text before. Whether other leaves
    are there or masked out makes no difference.
    """

    def walk(node: Any, prefix: str) -> list[str]:
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


def _is_plain(entry: Any) -> bool:
    """Tell a key whose text no other key has, alone or together with those behind it."""
    if isinstance(entry, jax.tree_util.DictKey):
        return type(entry.key) in (str, int)
    if isinstance(entry, jax.tree_util.GetAttrKey):
        return entry.name.isidentifier()
    return isinstance(entry, jax.tree_util.SequenceKey | jax.tree_util.FlattenedIndexKey)


def check_not_empty(name: str, tree: Any) -> None:
    """Raise unless `tree` has leaves."""
    if not jax.tree.leaves(tree):
        raise ValueError(f"`{name}` must hold at least one array, got none.")


def dtype_name(leaf: Any) -> str:
    """Return the dtype of an array, or the type of anything else, for a sentence."""
    return str(getattr(leaf, "dtype", type(leaf).__name__))


def is_floating(leaf: Any) -> bool:
    """Tell a real floating-point array from one of whole numbers, a key, or no array."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_numeric(array: Any) -> bool:
    """Tell an array of numbers, of any kind that JAX has, from one of text, dates or objects."""
    return jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool


def zip_leaves(tree: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """Return the name of each leaf, the leaf, and that of another tree of the same structure."""
    others = jax.tree.leaves(other)
    for (path, leaf), its_other in zip(jax.tree.leaves_with_path(tree), others, strict=True):
        yield path_name(path), leaf, its_other


def check_floating(name: str, tree: Any) -> None:
    """Raise unless all leaves are real floating-point arrays."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if not is_floating(leaf):
            raise TypeError(
                f"`{name}` must hold real floating-point arrays, got {dtype_name(leaf)} at "
                f"{path_name(path)!r}; split off what is not trained, as nnx.split, "
                "eqx.partition or variables['params'] do."
            )


def check_mask(mask: Any, size: int) -> None:
    """Raise unless a mask, if there is one, says of each of so many examples whether it counts."""
    if mask is None:
        return
    dtype, shape = dtype_name(mask), getattr(mask, "shape", "none")
    if dtype != "bool" or shape != (size,):
        raise ValueError(
            f"`mask` must be a bool array of shape ({size},), True where an example counts, got "
            f"{dtype} of shape {shape}; several arrays are one batch, such as (images, labels)."
        )


def check_not_per_example(extra_args: dict[str, Any], height: int | None) -> None:
    """Raise if an argument of `update` looks like a mask or weights, which nobody would apply."""
    for name, value in extra_args.items():
        numbers = isinstance(value, list | tuple) and all(map(is_number, value))
        for leaf in [np.asarray(value)] if numbers else jax.tree.leaves(value):
            shape = jnp.shape(leaf)
            is_one_each = height is not None and shape[:1] == (height,) == (math.prod(shape),)
            if is_one_each or (shape and dtype_name(leaf) == "bool"):
                raise TypeError(
                    f"`{name}` must not hold a value for each example, got {dtype_name(leaf)} of "
                    f"shape {shape}; `mask` is the name for stacked gradients, and the function "
                    "that makes a clipped sum takes the mask of its batch."
                )


def count_examples(batch: Any, remedy: str = "") -> int:
    """Return the length of the leading axis, on which all leaves must agree."""
    lengths = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if len(lengths) != 1 or lengths & {(), (0,)}:
        raise ValueError(
            "`batch` must be arrays with one leading axis of examples, got lengths "
            f"{sorted(lengths)}{'; ' + remedy if remedy else ''}."
        )
    return lengths.pop()[0]


def wide_dtype(*arrays: Any) -> Any:
    """Return float64 if any array has it, else float32: what norms, sums and noise are made in."""
    return jnp.dtype("float64" if any(x.dtype == "float64" for x in arrays) else "float32")


def widen(x: jax.Array) -> jax.Array:
    """Cast to float32 at least."""
    return x.astype(wide_dtype(x))


def compute_once(tree: Any) -> Any:
    """Return the tree as it is, and let no compiler compute it twice.

    XLA may skip a rounding to half precision where it feeds a norm, and not where it feeds a sum;
    then the norm is not that of what is summed.
    """
    return jax.lax.optimization_barrier(tree)


def row_norms(leaves: Sequence[jax.Array]) -> jax.Array:
    """Return ‖row i of all leaves‖₂ for leaves of shape (n, …): (n,), float32 at least.

    Rows are first divided by their largest entry, so that squares neither overflow nor vanish.
    The true norm is at most 1 + `norm_rounding(leaves)` times the result. Subnormal entries may
    count as zero: XLA flushes them, and all of them together are far below any clip norm.
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
    """Return what to divide by so that nothing exceeds 8: 1 for zeros, and no more than max/8.

    XLA multiplies by the reciprocal, which must not be so small that it is flushed to zero.
    """
    most = jnp.asarray(jnp.finfo(largest.dtype).max / 8, largest.dtype)
    return jnp.where(largest > 0, jnp.minimum(largest, most), jnp.ones_like(largest))


def sums_of_squares(rows: jax.Array) -> tuple[jax.Array, int]:
    """Return ‖row i‖² for rows (n, …), and how often it is rounded; squares may overflow."""
    flat = rows.astype(wide_dtype(rows)).reshape(rows.shape[0], math.prod(rows.shape[1:]))
    return _sum_in_blocks(flat, jnp.square), _roundings(flat.shape[1]) + 1


def norm_rounding(leaves: Sequence[jax.Array]) -> float:
    """Return r such that the true norm of a row is at most 1 + r times its `row_norms`.

    To add B non-negative numbers, in any order, is to lose at most B − 1 roundings of u = ε/2
    relative. Blocks bound B, and their levels add up; the root halves all that came before it;
    4 u more cover its own rounding and those of the scaling and the squares.
    """
    sizes = [math.prod(leaf.shape[1:]) for leaf in leaves if leaf.size]
    roundings = max(map(_roundings, sizes), default=0) + _roundings(len(sizes))
    return (roundings / 2 + 4) * float(jnp.finfo(wide_dtype(*leaves)).eps) / 2


def _block_size(size: int) -> int:
    """Return how many terms to add at a time: a divisor of `size` if there is a good one."""
    if size <= _BLOCK:
        return max(size, 1)
    return next((b for b in range(_BLOCK, _BLOCK // 4, -1) if size % b == 0), _BLOCK)


def _roundings(size: int) -> int:
    """Return how often `_sum_in_blocks` rounds on the way from a term to the sum."""
    block = _block_size(size)
    return block - 1 + (_roundings(-(-size // block)) if size > block else 0)


def _sum_in_blocks(
    rows: jax.Array, term: Callable[[jax.Array], jax.Array] = lambda x: x
) -> jax.Array:
    """Return Σⱼ term(rowsᵢⱼ) for rows: (n, d), block by block; term must map 0 to 0."""
    n, size = rows.shape
    if size == 0:
        return jnp.zeros(n, rows.dtype)
    block = _block_size(size)
    blocks = jnp.pad(rows, ((0, 0), (0, -size % block)))
    blocks = blocks.reshape(n, -(-size // block), block)
    # The barrier keeps XLA from merging the levels into one reduction of unknown order.
    sums = jnp.sum(term(jax.lax.optimization_barrier(blocks)), axis=2)
    return sums[:, 0] if sums.shape[1] == 1 else _sum_in_blocks(sums)
