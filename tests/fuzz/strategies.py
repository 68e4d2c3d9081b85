"""Hypothesis strategies for parameter trees, masks, and batches of extreme numbers.

There are few shapes, so that compiled functions are reused. Numbers have any magnitude.
"""

from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

SHAPES = ((), (1,), (3,), (4, 2), (2, 1, 3), (130,))
SIZE = 6  # examples
DTYPES = ("float32", "bfloat16", "float16")
ODD = (0.0, -0.0, 1e-45, 1e-38, -1e-20, 1e19, -3.4e38, np.inf, -np.inf, np.nan)

trees = st.recursive(
    st.sampled_from(SHAPES),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=2).map(tuple)
        | st.dictionaries(
            st.sampled_from(["kernel", "bias", "scale"]), inner, min_size=1, max_size=2
        )
    ),
    max_leaves=5,
)
clip_norms = st.floats(-30, 30).map(lambda exponent: float(10.0**exponent))


class Numbers(NamedTuple):
    """How the entries of a batch are drawn."""

    seed: int
    exponents: list[int]
    odd: list[tuple[int, int, float]]
    dtype: str


numbers = st.builds(
    Numbers,
    seed=st.integers(0, 2**31),
    exponents=st.lists(st.integers(-44, 38), min_size=SIZE, max_size=SIZE),
    odd=st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(0, 1000), st.sampled_from(ODD)), max_size=3
    ),
    dtype=st.sampled_from(DTYPES),
)
masks = st.lists(st.booleans(), min_size=SIZE, max_size=SIZE)


def is_shape(x: Any) -> bool:
    """Tell a shape from a tuple of shapes."""
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def draw(numbers: Numbers, shape: tuple[int, ...], leaf: int, size: int = SIZE) -> jnp.ndarray:
    """Return (size, *shape): normal numbers of every magnitude, and some special values."""
    rng = np.random.default_rng([numbers.seed, leaf])
    entries = rng.normal(size=(size, *shape)) * rng.choice([1, 1e-3, 1e-6], (size, *shape))
    scales = 10.0 ** np.resize(np.array(numbers.exponents, np.float64), size)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        entries = (entries * scales.reshape(-1, *[1] * len(shape))).astype(np.float32)
        flat = entries.reshape(size, -1)
        for example, place, value in numbers.odd:
            flat[example, place % flat.shape[1]] = value
        return jnp.asarray(entries).astype(numbers.dtype)
