"""Slow, obvious answers in float64 NumPy, to which the library is held."""

import numpy as np


def ring_matrix(size: int) -> np.ndarray:
    """Return L, the second difference on a ring: every entry looks at both its neighbours."""
    matrix = np.zeros((size, size))
    for i in range(size):
        for neighbour in (i - 1, i + 1):
            matrix[i, neighbour % size] += 1
            matrix[i, i] -= 1
    return matrix


def smooth_dense(v: np.ndarray, smoothing: float) -> np.ndarray:
    """Solve (I − σL) u = v for a vector by Gaussian elimination."""
    v = np.asarray(v, np.float64)
    return np.linalg.solve(np.eye(v.size) - smoothing * ring_matrix(v.size), v)


def smooth_grid(x: np.ndarray, smoothing: float, axes: tuple[int, ...]) -> np.ndarray:
    """Solve (I − σ Σₐ Lₐ) u = x over the given axes by Gaussian elimination."""
    x = np.asarray(x, np.float64)
    total = np.eye(x.size)
    for axis in axes:
        factors = [np.eye(n) for n in x.shape]
        factors[axis] = ring_matrix(x.shape[axis])
        product = np.ones((1, 1))
        for factor in factors:
            product = np.kron(product, factor)
        total -= smoothing * product
    return np.linalg.solve(total, x.reshape(-1)).reshape(x.shape)


def flatten_rows(leaves: list[np.ndarray]) -> np.ndarray:
    """Return one row per example: all of its entries in all leaves, in float64."""
    n = len(leaves[0])
    return np.concatenate([np.asarray(x, np.float64).reshape(n, -1) for x in leaves], axis=1)


def clip_rows(rows: np.ndarray, clip_norm: float) -> np.ndarray:
    """Scale each row to norm at most C; rows that float32 cannot scale become zero."""
    clipped = np.zeros_like(rows, dtype=np.float64)
    for i, row in enumerate(np.asarray(rows, np.float64)):
        norm = np.linalg.norm(row)
        limits = np.finfo(np.float32)
        if 0 < norm <= min(float(limits.max), clip_norm / float(limits.tiny)):
            clipped[i] = row * min(1.0, clip_norm / norm)
    return clipped


def walk_like_pytorch(kernel: np.ndarray) -> np.ndarray:
    """Flatten a Flax kernel in the order in which `weight.view(-1)` walks PyTorch's copy of it."""
    if kernel.ndim == 2:  # Linear stores (out, in)
        return np.array([kernel[i, o] for o in range(kernel.shape[1]) for i in range(len(kernel))])
    height, width, inputs, outputs = kernel.shape  # Conv2d stores (out, in, height, width)
    return np.array(
        [
            kernel[h, w, i, o]
            for o in range(outputs)
            for i in range(inputs)
            for h in range(height)
            for w in range(width)
        ]
    )
