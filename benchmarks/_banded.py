"""Find the best banded matrix, Toeplitz or not, and prove by a lower bound that none is better."""

from typing import NamedTuple

import numpy as np
from scipy.linalg import eigvalsh, solve_banded
from scipy.optimize import minimize

from optax_lsdp.correlation import optimize_banded


class Best(NamedTuple):
    """The mean squared error of the best matrix found, and a lower bound on that of any matrix.

    Both are for prefix sums and for matrices C with so many bands and no column of norm above 1.
    """

    error: float
    bound: float


def best(steps: int, bands: int) -> Best:
    """Return the error of the best banded matrix, found by L-BFGS from the best Toeplitz matrix.

    This is the problem of BandMF (arXiv 2306.08153): min ‖A C⁻¹‖² / T for the matrix A of prefix
    sums. It is convex in CᵀC, so L-BFGS finds the minimum, and `bound` shows that it did.
    """
    column = np.array(optimize_banded(steps, bands).coefficients)[:, None]
    is_inside = np.add.outer(np.arange(bands), np.arange(steps)) < steps  # [k, j] is C[j + k, j]

    def scaled(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the diagonals of a matrix with columns of norm 1, and the norms before."""
        diagonals = np.where(is_inside, flat.reshape(bands, steps), 0)
        norms = np.linalg.norm(diagonals, axis=0)
        return diagonals / norms, norms

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the logarithm of the error, and its gradient."""
        lower, norms = scaled(flat)
        noise = _inverse(lower)
        sums = np.cumsum(noise, axis=0)  # A C⁻¹
        error = np.square(sums).mean(axis=0).sum()
        back = np.cumsum(sums[::-1], axis=0)[::-1]  # Aᵀ A C⁻¹
        upper = np.zeros_like(lower)
        for k in range(bands):
            upper[bands - 1 - k, k:] = lower[k, : steps - k]
        right = solve_banded((bands - 1, 0), lower, back.T).T
        slope = solve_banded((0, bands - 1), upper, right)  # C⁻ᵀ Aᵀ A C⁻¹ C⁻ᵀ
        change = np.zeros_like(lower)
        for k in range(bands):
            change[k, : steps - k] = -2 / steps * np.diag(slope, -k)
        change = (change - lower * (lower * change).sum(axis=0)) / norms
        return float(np.log(error)), np.where(is_inside, change / error, 0).ravel()

    start = np.where(is_inside, column, 0).ravel()
    options = {"maxiter": 500, "maxcor": 20, "ftol": 1e-13, "gtol": 1e-10}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    return Best(float(np.exp(found.fun)), _bound(_inverse(scaled(found.x)[0]), bands))


def _inverse(diagonals: np.ndarray) -> np.ndarray:
    return solve_banded((len(diagonals) - 1, 0), diagonals, np.eye(diagonals.shape[1]))


def _bound(noise: np.ndarray, bands: int) -> float:
    """Return a lower bound on the mean squared error of any banded matrix C, from a good C⁻¹.

    Let Y ⪰ 0 be zero inside the band of CᵀC, except on its diagonal. Since no column of C is longer
    than 1, ‖C Y^½‖² = tr(CᵀC Y) ≤ tr Y. So the nuclear norm of A Y^½ = A C⁻¹ · C Y^½ is at most
    ‖A C⁻¹‖·√(tr Y), and ‖A C⁻¹‖² ≥ ‖A Y^½‖ₙ² / tr Y. Y = I gives `least_error`. The best matrix
    gives the best Y, (CᵀC)⁻¹ AᵀA (CᵀC)⁻¹. Any matrix gives a bound, after Y is made to fit.
    """
    steps = len(noise)
    gram = np.cumsum(noise @ noise.T, axis=0)  # A (CᵀC)⁻¹
    weights = gram.T @ gram
    lags = np.abs(np.subtract.outer(np.arange(steps), np.arange(steps)))
    weights[(lags > 0) & (lags < bands)] = 0
    lift = max(0.0, -eigvalsh(weights, subset_by_index=[0, 0])[0]) * (1 + 1e-9)
    weights[np.diag_indices(steps)] += lift
    squares = eigvalsh(np.cumsum(np.cumsum(weights, axis=0), axis=1))  # of A Y Aᵀ
    nuclear = np.sqrt(np.maximum(squares, 0)).sum()
    return float(nuclear**2 / np.trace(weights) / steps)
