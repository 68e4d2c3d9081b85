"""Compute how much noise smoothing and `low_pass` leave, without JAX.

L is the second difference on a ring of d entries, with eigenvalues −4 sin²(πk/d). Smoothing
multiplies by (I − σL)⁻¹. On a long ring, entry (i, j) of this matrix is gain·ρ^|i − j|, with
gain = 1/√(1 + 4σ) and ρ from `ring_decay`. γ is each diagonal entry of the matrix. β is the
variance of independent unit noise after smoothing. The functions for rings accept a float, a
complex number or an array as σ. The functions for `low_pass`, which filters in time, are at the
end.

Reference: Wang et al. 2019, DP-LSSGD.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from optax_lsdp._checks import check_choice, check_non_negative, check_whole, numbers, refusal

Boundary = Literal["periodic", "neumann"]
BOUNDARIES = ("periodic", "neumann")
_Number = TypeVar("_Number", bound=Any)  # a float, a complex number, or an array of any library
_LONGEST_START = 10**6  # a filter's response is checked in about this many steps at most
_FOLLOWED = 4000  # steps of a filter that `check_followed` computes in float32
_NEGLIGIBLE = 1e-9  # the check ends in step t if the t-th powers of all poles are smaller


def ring_decay(smoothing: _Number) -> _Number:
    """Return ρ = 2σ / (1 + 2σ + √(1 + 4σ)), the decay of (I − σL)⁻¹ per entry.

    >>> ring_decay(2.0)  # √9 = 3, hence 4 / 8
    0.5
    """
    return 2 * smoothing / (1 + 2 * smoothing + (1 + 4 * smoothing) ** 0.5)


def ring_gamma(smoothing: _Number, size: int, xp: ModuleType = np) -> _Number:
    """Return γ = (1/d) Σₖ 1/λₖ, a diagonal entry of (I − σL)⁻¹ for a ring of d = `size` entries.

    Here λₖ = 1 + 4σ sin²(πk/d). The sum equals (1 + ρᵈ) / ((1 − ρᵈ) r) with r = √(1 + 4σ); see
    Proposition 2 of the DP-LSSGD paper. As d grows, γ tends to 1/r, not to 0. For a traced σ, pass
    jax.numpy as `xp`.

    >>> round(ring_gamma(1.0, 1000), 3)
    0.447
    """
    tail, rest = _tail(smoothing, size, xp)
    return (1 + tail) / (rest * (1 + 4 * smoothing) ** 0.5)


def ring_beta(smoothing: _Number, size: int, xp: ModuleType = np) -> _Number:
    """Return β = (1/d) Σₖ 1/λₖ², the variance of smoothed unit noise on a ring of d entries.

    For λₖ and r, see `ring_gamma`. The sum equals γ(1 + 2σ)/r² + 2dρᵈ / (r²(1 − ρᵈ)²). Proposition
    3 of the DP-LSSGD paper has another form, which is 0/0 at σ = 0.

    >>> round(ring_beta(1.0, 1000), 3)
    0.268
    """
    tail, rest = _tail(smoothing, size, xp)
    square = 1 + 4 * smoothing  # r²
    wrapped = 2 * size * tail / (square * rest * rest)
    return ring_gamma(smoothing, size, xp) * (1 + 2 * smoothing) / square + wrapped


def _tail(smoothing: Any, size: int, xp: ModuleType) -> tuple[Any, Any]:
    """Return ρᵈ and 1 − ρᵈ without cancellation, with ρ of `ring_decay` and d = `size`.

    Both follow from 1 − ρ = (1 + r) / (1 + 2σ + r), with r = √(1 + 4σ).
    """
    root = (1 + 4 * smoothing) ** 0.5
    gap = (1 + root) / (1 + 2 * smoothing + root)
    if isinstance(smoothing, float | int):
        power = size * math.log1p(-min(gap, 1 - 2**-53))  # at σ = 0, the gap is 1
        return math.exp(power), -math.expm1(power)
    power = size * xp.log1p(-gap)
    return xp.exp(power), -xp.expm1(power)


def line_kernel(smoothing: float, order: int, error: float) -> np.ndarray:
    """Return one half of the kernel of (I + (−1)ⁿ σ Lⁿ)⁻¹ on an infinite line, centre first.

    Here n is `order`. The result is the mean of n kernels of order 1, one for each root r of
    1 + σrⁿ = 0. The kernel of a root has σ = −1/r, and its entry at distance k is gain·ρᵏ. The
    absolute values of all entries that are cut off, on both sides, sum to at most `error`.

    >>> line_kernel(2.0, 1, 0.1)  # 1/√9, and ρ = ½
    array([0.33333333, 0.16666667, 0.08333333, 0.04166667])
    """
    complex_smoothing = -1 / _roots(smoothing, order)
    decay = ring_decay(complex_smoothing)
    gain = 1 / (1 + 4 * complex_smoothing) ** 0.5
    slowest = np.abs(decay).max()
    rest = 2 * np.abs(gain).max() / (1 - slowest)  # bounds the sum of all entries on both sides
    reach = max(0, int(np.ceil(np.log(error / rest) / np.log(slowest))) - 1)
    return (gain * decay ** np.arange(reach + 1)).mean(axis=0).real


def _roots(smoothing: float, order: int) -> np.ndarray:
    """Return the roots of 1 + σrⁿ = 0, as an array of shape (n, 1)."""
    turns = np.exp(1j * np.pi * (2 * np.arange(order) + 1) / order)[:, None]
    return turns * smoothing ** (-1 / order)


def grid_gamma(
    smoothing: float, sizes: Sequence[int], *, boundary: Boundary = "periodic", order: int = 1
) -> float:
    """Return γ, the mean of the eigenvalues 1/λ of smoothing on a grid.

    λ = 1 + σ(Σₐ Eₐ)ⁿ, where n is `order`, and Eₐ = 4 sin²(πk/d) for wave k along axis a of d
    entries. With boundary="neumann", Eₐ = 4 sin²(πk/2d). For the arguments, see `grid_beta`.

    >>> round(grid_gamma(1.0, (28, 28)), 3)
    0.254
    """
    return _grid_means(smoothing, sizes, boundary, order)[0]


def grid_beta(
    smoothing: float, sizes: Sequence[int], *, boundary: Boundary = "periodic", order: int = 1
) -> float:
    """Return β, the mean of 1/λ² over a grid: the variance of smoothed unit noise.

    For λ, see `grid_gamma`. The mean over the waves of the last axis has a closed form. The waves
    of the other axes are added up one by one.

    Args:
        smoothing: σ ≥ 0.
        sizes: the length d of each axis along which entries are neighbours; `(d,)` is a ring.
        boundary: see `laplacian_smooth`.
        order: n; see `laplacian_smooth`.

    >>> round(grid_beta(1.0, (28, 28)), 3)
    0.09
    """
    return _grid_means(smoothing, sizes, boundary, order)[1]


def _grid_means(
    smoothing: float, sizes: Sequence[int], boundary: str, order: int
) -> tuple[float, float]:
    """Return γ and β of a grid, the means of 1/λ and 1/λ² over all its waves.

    Each wave has an energy along each axis: the Eₐ of `grid_gamma`. Let s be its energy along the
    last axis, and E the sum of its energies along the other axes, so that λ = 1 + σ(s + E)ⁿ.

    1. Let r be one of the n roots of 1 + σrⁿ = 0, and u = r − E. By partial fractions, 1/λ is the
       mean over all r of r/(u − s) = (r/u) · 1/(1 − s/u).
    2. 1/(1 − s/u) is an eigenvalue of smoothing on a ring with the complex smoothing −1/u. So its
       mean over all s is γ of this ring.
    3. β follows from γ, because 1/λ² = 1/λ + σ ∂(1/λ)/∂σ and σ ∂r/∂σ = −r/n.
    """
    check_non_negative("smoothing", smoothing)
    check_whole("order", order)
    check_choice("boundary", boundary, BOUNDARIES)
    if not len(sizes):
        raise ValueError(
            "`sizes` must name the size of at least one axis, got none; for a ring, pass (d,)."
        )
    if smoothing == 0:
        return 1.0, 1.0
    *others, last = sizes
    around = 1 if boundary == "periodic" else 2
    waves = [4 * np.sin(np.pi * np.arange(size) / (around * size)) ** 2 for size in others]
    energy = np.array([sum(point) for point in product(*waves)])
    root = _roots(smoothing, order)
    rest = root - energy
    complex_smoothing = -1 / rest
    gamma, beta = (f(complex_smoothing, around * last) for f in (ring_gamma, ring_beta))
    if boundary == "neumann":
        # A line of d entries with reflecting ends is one half of a ring of 2d entries. The ring has
        # waves 0 and d once, and all other waves twice. The line has waves 0 to d − 1 once. So half
        # the ring lacks half of wave 0, whose eigenvalue is 1, and has half of wave d too much.
        fastest = 1 / (1 + 4 * complex_smoothing)
        gamma += (1 - fastest) / (2 * last)
        beta += (1 - fastest**2) / (2 * last)
    first = root * gamma / rest
    second = first - (first - root**2 * beta / rest**2) / order
    return float(first.mean().real), float(second.mean().real)


class Candidates(NamedTuple):
    """The candidates of "auto" for one leaf: arrays of shape (candidates,). The first has σ = 0."""

    layout: np.ndarray  # 0 for no smoothing, 1 for the first of the layouts, and so on
    smoothing: np.ndarray
    trace: np.ndarray  # tr A for A = (I − σL)⁻¹
    trace_square: np.ndarray  # tr A²


@lru_cache(maxsize=1024)
def list_candidates(
    size: int,
    grids: tuple[tuple[int, ...] | None, ...],
    smoothings: tuple[float, ...],
    boundary: Boundary,
    order: int,
) -> Candidates:
    """Return σ = 0, and each σ of `smoothings` on each of `grids`, for a leaf of `size` entries.

    `grids` has one grid per layout, or None if a layout does not apply to the leaf.
    """
    rows = [(0, 0.0, 1.0, 1.0)]
    for place, grid in enumerate(grids, 1):
        for now in smoothings:
            if grid is None:
                continue
            gamma = grid_gamma(now, grid, boundary=boundary, order=order)
            rows.append((place, now, gamma, grid_beta(now, grid, boundary=boundary, order=order)))
    layout, smoothing, gammas, betas = map(np.array, zip(*rows, strict=True))
    return Candidates(layout.astype(np.int32), smoothing, size * gammas, size * betas)


class TimeFilter(NamedTuple):
    """A recursive filter with input x, output y and N delays d: d' = A d + B x and y = d₀ + D x.

    Here d' is d in the next step. The filter's response to the constant signal 1 tends to 1.
    """

    matrix: np.ndarray  # A: (N, N)
    entry: np.ndarray  # B: (N,)
    direct: float  # D


def low_pass_gain(
    numerator: Sequence[float], denominator: Sequence[float] = (1.0,), *, step: int | None = None
) -> float:
    """Return the variance of independent unit noise after `low_pass`: Σₖ hₖ² / (Σₖ hₖ)².

    h is the impulse response of the filter. The sums run over h₀, …, h_t in step t, or over the
    whole response if `step` is None. Both sums follow from the delays of the filter, which start at
    zero. A and B are those of `TimeFilter`:

    - If the input is unit noise, the covariance of the delays before step t is P − AᵗP(Aᵗ)ᵀ. P
      solves P = APAᵀ + BBᵀ.
    - If the input is the constant 1, the delays before step t are (I − Aᵗ)(I − A)⁻¹B.

    For `optax.ema(ρ)`, the variance in step t is (1 − ρ)(1 + ρᵗ⁺¹) / ((1 + ρ)(1 − ρᵗ⁺¹)).

    Args:
        numerator: see `low_pass`.
        denominator: see `low_pass`.
        step: t, counted from 0. By default, the variance after many steps.

    >>> round(low_pass_gain([0.1], [1, -0.9]), 4)  # 0.1 / 1.9
    0.0526
    >>> low_pass_gain([0.1], [1, -0.9], step=0)  # the first update passes unchanged
    1.0
    """
    matrix, entry, direct = read_filter(numerator, denominator)
    if step is not None:
        check_whole("step", step, least=0)
    if not len(entry):
        return 1.0
    unknown = np.eye(matrix.size) - np.kron(matrix, matrix)
    spread = np.linalg.solve(unknown, np.outer(entry, entry).ravel()).reshape(matrix.shape)
    response = _final_delays(matrix, entry)
    if step is not None:
        power = np.linalg.matrix_power(matrix, step)
        spread = spread - power @ spread @ power.T
        response = response - power @ response
    return float((direct**2 + spread[0, 0]) / (direct + response[0]) ** 2)


def read_filter(numerator: Sequence[float], denominator: Sequence[float]) -> TimeFilter:
    """Return the filter, scaled so that its response to the constant signal 1 tends to 1.

    Raise if the filter is unstable or this response is not positive in all steps. The delays are
    those of the transposed direct form II, which needs the fewest delays.
    """
    demand = "a sequence of finite numbers"
    above = np.array(numbers("numerator", numerator, demand))
    below = np.array(numbers("denominator", denominator, demand))
    for name, given in (("numerator", above), ("denominator", below)):
        if given[0] == 0:
            raise refusal(name, "a sequence that starts with a number other than 0", [*given])
    below = below / below[0]
    radius = max(np.abs(np.roots(below.astype(np.float32))), default=0.0)
    if not radius < 1:
        remedy = f"the largest pole has the absolute value {radius:.7g}"
        stable = "such that all poles of the filter are inside the unit circle, in float32"
        raise refusal("denominator", stable, denominator, remedy)
    order = max(len(above), len(below)) - 1
    above = above * below.sum() / (above.sum() or math.inf)
    above, below = (np.pad(x, (0, order + 1 - len(x))) for x in (above, below))
    matrix = np.eye(order, k=1)
    matrix[:, :1] -= below[1:, None]
    entry = above[1:] - above[0] * below[1:]
    if not _least_response(matrix, entry, radius) > 0 or above.sum() == 0:
        remedy = "take a low-pass filter, such as scipy.signal.butter(1, 0.1)"
        positive = "such that the response to a constant signal is positive in all steps"
        raise refusal("numerator", positive, numerator, remedy)
    return TimeFilter(matrix, entry, float(above[0]))


def _final_delays(matrix: np.ndarray, entry: np.ndarray) -> np.ndarray:
    """Return (I − A)⁻¹B, the delays after many steps of the constant signal 1."""
    return np.linalg.solve(np.eye(len(entry)) - matrix, entry)


def _least_response(matrix: np.ndarray, entry: np.ndarray, radius: float) -> float:
    """Return the least response, over all steps, to the constant signal 1.

    The response in step t is 1 − cᵀAᵗ(I − A)⁻¹B, where c picks the first delay. It tends to 1.
    """
    if not len(entry):
        return 1.0
    length = len(entry) + math.log(_NEGLIGIBLE) / math.log(radius) if radius > 0 else len(entry)
    rows, power = np.eye(1, len(entry)), matrix
    while len(rows) < min(length, _LONGEST_START):
        rows, power = np.concatenate([rows, rows @ power]), power @ power
    return float(1 - (rows @ _final_delays(matrix, entry)).max())


def check_followed(numerator: Sequence[float], denominator: Sequence[float] = (1.0,)) -> None:
    """Raise unless float32 can compute the variance of noise after a filter to within 1 %.

    Rounding spoils the variance if a filter of high order has a low cut-off frequency. The computed
    variance may even be negative.
    """
    order = len(read_filter(numerator, denominator).entry)
    coefficients = tuple(map(float, numerator)), tuple(map(float, denominator))
    gain = low_pass_gain(*coefficients)
    if abs(_float32_gain(*coefficients) - gain) > 0.01 * gain:
        raise ValueError(
            "`smoothing` must hold a filter for which float32 can compute the noise variance that "
            f"debiasing needs, got order {order}; take order 2, or a higher cut-off frequency."
        )


@lru_cache(maxsize=64)
def _float32_gain(numerator: tuple[float, ...], denominator: tuple[float, ...]) -> float:
    """Return a filter's `low_pass_gain`, computed by many steps of a float32 recursion."""
    found = read_filter(numerator, denominator)
    if not len(found.entry):
        return low_pass_gain(numerator, denominator)
    a, b = (np.asarray(x, np.float32) for x in found[:2])
    covariance, response = np.zeros_like(a), np.zeros_like(b)
    for _ in range(_FOLLOWED):
        covariance[:], response[:] = a @ covariance @ a.T + np.outer(b, b), a @ response + b
    return float((found.direct**2 + covariance[0, 0]) / (found.direct + response[0]) ** 2)
