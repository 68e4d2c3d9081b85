"""Correlations of noise between steps: matrix factorisation, also known as DP-FTRL.

Let row t of X be the clipped sum of step t. Correlated noise releases X + C⁻¹Z, where C is a
lower-triangular matrix and Z is independent Gaussian noise. This is C⁻¹(CX + Z), so it reveals as
much as CX + Z. If no column of C has a norm above 1, one use of an example moves CX by at most the
clip norm, as with independent noise. But the sum of the noise over many steps is smaller, because
C⁻¹ subtracts a part of the earlier noise from each step's noise. C is Toeplitz: its first column
determines all others. Either C is banded, or C⁻¹ is. `add_correlated_noise` draws the noise, and
`accounting.CorrelatedGaussian` computes ε. This module needs no JAX.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.linalg import svdvals, toeplitz
from scipy.optimize import minimize, minimize_scalar
from scipy.signal import fftconvolve, lfilter

import optax_lsdp._checks as checks

__all__ = ["Correlation", "Workload", "banded_inverse", "independent", "least_error"]
__all__ += ["optimize_banded", "square_root"]

_ROUNDING = 1e-9  # relative amount that covers rounding in norms and sensitivities
_NARROW = 1e-6  # relative amount that covers float32 rounding of the coefficients of a banded C
_MOST_STEPS, _LARGEST_MATRIX = 10**6, 5000  # most rows of C, and of a dense matrix (200 MB)
_LARGEST_ENTRY = 1e6  # of C⁻¹; with larger entries, noise would soon overflow


@dataclass(frozen=True)
class Workload:
    """How the optimizer sums the noisy gradients: SGD with momentum and learning rates.

    After step t, the noise in the parameters is Σ_{s ≤ t} ηₛ Σ_{r ≤ s} μˢ⁻ʳ·noiseᵣ.

    Attributes:
        momentum: μ, at least 0 and below 1, as in `optax.sgd`.
        learning_rates: η of each step, or None if all are 1.

    >>> decay = Workload(momentum=0.9, learning_rates=(1.0, 0.5, 0.25))
    """

    momentum: float = 0.0
    learning_rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not (checks.is_number(self.momentum) and 0 <= self.momentum < 1):
            raise checks.refusal("momentum", "at least 0 and below 1", self.momentum)
        if self.learning_rates is not None:
            demand = "finite numbers, none below 0 and one above 0"
            rates = checks.numbers("learning_rates", self.learning_rates, demand)
            if min(rates) < 0 or not any(rates):
                raise checks.refusal("learning_rates", demand, rates)
            object.__setattr__(self, "learning_rates", rates)

    def rates(self, steps: int) -> np.ndarray | None:
        """Return the learning rates, or None if all are 1. Raise unless there is one per step."""
        if (rates := self.learning_rates) is not None and len(rates) != steps:
            raise checks.refusal("learning_rates", f"as many as the steps, {steps}", len(rates))
        return None if rates is None else np.array(rates)

    def with_momentum(self, values: np.ndarray) -> np.ndarray:
        """Return the values after momentum: out[t] = values[t] + μ·out[t − 1]."""
        return lfilter([1.0], [1.0, -self.momentum], values) if self.momentum else values


_PREFIX_SUM = Workload()


@dataclass(frozen=True)
class Correlation:
    """A lower-triangular Toeplitz matrix C, in which no column has a norm above 1.

    Attributes:
        steps: T, the number of rows. There is no noise for later steps.
        coefficients: the first column of C or, with `is_inverse`, of C⁻¹, without final zeros: at
            most T numbers, the first of which is positive.
        is_inverse: whether C⁻¹ is banded instead of C. If so, C has T bands, past draws are drawn
            again instead of stored, and C is computed from coefficients rounded to float32.

    >>> Correlation(steps=4, coefficients=(0.8, 0.6)).column()
    array([0.8, 0.6, 0. , 0. ])
    """

    steps: int
    coefficients: tuple[float, ...]
    is_inverse: bool = False

    def __post_init__(self) -> None:
        checks.check_whole("steps", self.steps)
        checks.check_at_most("steps", self.steps, _MOST_STEPS)
        checks.check_bool("is_inverse", self.is_inverse)
        demand = "the first column of a lower-triangular matrix with a positive diagonal"
        if (found := np.array(checks.numbers("coefficients", self.coefficients, demand)))[0] <= 0:
            raise checks.refusal("coefficients", demand, self.coefficients)
        _check_bands(found.size, self.steps, "coefficients")
        plain = int(self.steps), tuple(found.tolist()), bool(self.is_inverse)
        vars(self).update(zip(("steps", "coefficients", "is_inverse"), plain, strict=True))
        if not (norm := np.linalg.norm(self.column()) * (1 + 1e-12)) <= 1 + _ROUNDING:
            remedy = f"{'multiply' if self.is_inverse else 'divide'} all by {norm:.17g} in float64"
            demand = "such that no column of the matrix C has a norm above 1"
            raise checks.refusal("coefficients", demand, self.coefficients, remedy)
        if self.is_inverse:
            self._round_inverse(found)
        if not np.abs(self.noise_column()).max() <= _LARGEST_ENTRY:
            demand = f"such that C's inverse has no entry above {_LARGEST_ENTRY:.0e}"
            raise checks.refusal("coefficients", demand, self.coefficients)

    def _round_inverse(self, found: np.ndarray) -> None:
        """Round coefficients c of C⁻¹ to float32, and scale C until no column has norm above 1."""
        ratios = (found / found[0]).astype(np.float32).astype(float)
        first, norm = np.float32(found[0]), math.inf
        while norm > 1:
            object.__setattr__(self, "coefficients", tuple((float(first) * ratios).tolist()))
            norm = float(np.linalg.norm(self.column()))
            first = np.nextafter(np.float32(first * norm), np.float32(np.inf))

    @property
    def bands(self) -> int:
        """The number of diagonals of C that are not zero."""
        count = len(self.coefficients)
        return self.steps if self.is_inverse and count > 1 else count

    def column(self) -> np.ndarray:
        """Return the first column of C, with `steps` entries."""
        return (_inverse if self.is_inverse else _padded)(self.coefficients, self.steps)

    def noise_column(self) -> np.ndarray:
        """Return the first column of C⁻¹. The noise of step t is Σₖ column[k]·Z[t − k]."""
        return (_padded if self.is_inverse else _inverse)(self.coefficients, self.steps)

    def squared_errors(self, workload: Workload = _PREFIX_SUM) -> np.ndarray:
        """Return the variance of the noise in a parameter after each step, for Z of variance 1."""
        checks.check_kind("workload", workload, Workload)
        summed = workload.with_momentum(self.noise_column())
        if (rates := workload.rates(self.steps)) is None:
            return np.cumsum(np.cumsum(summed) ** 2)
        errors = np.zeros(self.steps)
        for step in range(self.steps):  # the noise Z of this step, in all later parameters
            errors[step:] += np.cumsum(rates[step:] * summed[: self.steps - step]) ** 2
        return errors

    def sensitivity(self, min_separation: int, steps: int | None = None) -> float:
        """Return how far all uses of one example together can move CX, in units of the clip norm.

        The result is exact, up to 1e-9, in two cases: if C has at most `min_separation` bands, so
        that columns of two uses are orthogonal; and if C's first column is non-negative and does
        not increase (arXiv 2405.13763, Theorem 2). In all other cases, it is an upper bound from
        the rows of |CᵀC| (arXiv 2306.08153, Algorithm 3).

        Args:
            min_separation: the fewest steps between two uses; with a fixed order, an epoch.
            steps: how many steps are taken. None means all steps.

        >>> round(independent(100).sensitivity(min_separation=25), 6)  # 4 uses
        2.0
        """
        return float(np.r_[0.0, self.sensitivities(min_separation, steps)][-1])

    def sensitivities(self, min_separation: int, steps: int | None = None) -> np.ndarray:
        """Return upper bounds on the sensitivity after each step; see `sensitivity`."""
        checks.check_whole("min_separation", min_separation)
        taken = self.steps if steps is None else steps
        checks.check_whole("steps", taken, least=0)
        checks.check_at_most("steps", taken, self.steps, "the steps of the correlation")
        column, min_separation = self.column()[:taken], min(min_separation, max(taken, 1))
        if min(self.bands, taken) <= min_separation:  # early columns have larger norms
            squared = _repeated(np.cumsum(column**2), min_separation)
        elif column.min() >= 0 and (np.diff(column) <= 0).all():
            squared = np.cumsum(_repeated(column, min_separation) ** 2)
        else:
            limit = "the limit for columns of C that grow or change sign"
            checks.check_at_most("steps", taken, _LARGEST_MATRIX, limit)
            ends = np.unique(np.geomspace(1, taken, 16).round().astype(int))
            found = [_squared_bound(column[:end], min_separation) for end in ends]
            squared = np.array(found)[np.searchsorted(ends, np.arange(1, taken + 1))]
        return np.maximum.accumulate(np.sqrt(squared)) * (1 + _ROUNDING)


def independent(steps: int) -> Correlation:
    """Return the identity, for independent noise in every step, as in DP-SGD.

    >>> independent(3).squared_errors()
    array([1., 2., 3.])
    """
    return Correlation(steps, (1.0,))


def square_root(steps: int, bands: int, *, momentum: float = 0.0) -> Correlation:
    """Return the square root of the workload's matrix, cut off after `bands` diagonals.

    The first column of C has the first power-series coefficients of ((1 − x)(1 − μx))^(−½), where μ
    is the momentum (arXiv 2405.13763). With T bands and without momentum, no Toeplitz matrix has a
    smaller maximum error (arXiv 2404.16706).

    >>> np.array(square_root(4, 3).coefficients).round(3)  # proportional to 1, 1/2, 3/8
    array([0.848, 0.424, 0.318])
    """
    _check_bands(bands, steps)
    return _scaled(_power_series(-0.5, bands, Workload(momentum)), steps)


def banded_inverse(
    steps: int,
    bands: int,
    *,
    power: float | None = None,
    min_separation: int | None = None,
    workload: Workload = _PREFIX_SUM,
) -> Correlation:
    """Return a matrix C whose inverse has `bands` bands: the first coefficients of (1 − x)^γ.

    γ = ½ gives BISR (arXiv 2505.12128). Two bands give noise Zₜ − γZₜ₋₁, up to a factor: this is
    DP-λCGD (arXiv 2601.22334) without its scaling of single columns. Any γ gives γ-BIFR (arXiv
    2605.18379). With momentum μ, the coefficients are those of (1 − x)^γ (1 − μx)^γ. This C suits
    several epochs in one fixed order. `accounting` knows no amplification for this C.

    `power` is γ in [0, 1]. By default, γ minimizes the mean squared error for examples that are
    used every `min_separation` steps, or once if `min_separation` is None.

    >>> chosen = banded_inverse(100, bands=2, min_separation=25)
    >>> bool(chosen.squared_errors().mean() < independent(100).squared_errors().mean())
    True
    """
    _check_bands(bands, steps)
    checks.check_kind("workload", workload, Workload)
    separation = steps if min_separation is None else min_separation
    checks.check_whole("min_separation", separation)
    workload.rates(steps)  # raises unless there is one learning rate per step

    def made(power: float) -> Correlation:
        series = _power_series(power, bands, workload)
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.linalg.norm(_inverse(series, steps)) < _LARGEST_ENTRY:
                demand = f"small enough that no entry of C overflows in {steps} steps"
                raise checks.refusal("power", demand, power)
        return _scaled(series, steps, is_inverse=True)

    def error(power: float) -> float:
        try:
            error = (found := made(power)).squared_errors(workload).mean()
            return math.log(error) + 2 * math.log(found.sensitivity(separation))
        except ValueError:
            return 1e6 + power  # the search turns back

    if power is None:
        return made(float(minimize_scalar(error, bounds=(0.0, 1.0), method="bounded").x))
    checks.check_fraction("power", power)
    return made(power)


def optimize_banded(
    steps: int,
    bands: int,
    *,
    workload: Workload = _PREFIX_SUM,
    error: Literal["mean", "max"] = "mean",
) -> Correlation:
    """Return the banded Toeplitz matrix C with the smallest squared error, found by L-BFGS.

    `error` is the "mean" of the squared errors over all steps or, for a constant learning rate,
    their "max". A matrix that is not Toeplitz can have smaller errors. More bands cancel more
    noise, but raise ε if batches are sampled (BandMF, arXiv 2306.08153, 2405.15913).

    >>> best = optimize_banded(100, bands=8)
    >>> bool(best.squared_errors().mean() < square_root(100, 8).squared_errors().mean())
    True
    """
    checks.check_choice("error", error, ("mean", "max"))
    checks.check_kind("workload", workload, Workload)
    start = square_root(steps, bands, momentum=workload.momentum)
    error_of = _error_function(steps, workload, error)

    def objective(rest: np.ndarray) -> tuple[float, np.ndarray]:
        """Return log(error·norm²) and its gradient. The scale of C has no effect, so c₀ is 1."""
        column = np.r_[1.0, rest]
        with np.errstate(over="ignore", invalid="ignore"):
            noise = _inverse(column, steps)
            squared, slope = error_of(noise)
            product = fftconvolve(noise, noise)[:steps]  # the derivative of 1/c is −1/c²
            change = -fftconvolve(slope, product[::-1])[steps - 1 : steps - 1 + bands]
            square = column @ column
            total, largest = math.log(squared * square), np.abs(noise).max() * square**0.5
            gradient = change / squared + 2 * column / square
        if not (largest <= _LARGEST_ENTRY and np.isfinite([total, *gradient]).all()):
            return 1e6, np.zeros(bands - 1)  # the line search turns back
        return total, gradient[1:]

    found = np.array(start.coefficients) / start.coefficients[0]
    if bands > 1:
        found[1:] = minimize(objective, found[1:], jac=True, method="L-BFGS-B", tol=1e-12).x
    return _scaled(found, steps)


def least_error(steps: int, workload: Workload = _PREFIX_SUM) -> float:
    """Return a lower bound on the mean, and thus on the largest, squared error of any matrix C.

    Let A be the matrix that maps gradients to parameters, and B = AC⁻¹. With Frobenius norms, the
    mean squared error is ‖B‖²/T. The singular values of A = BC sum to at most ‖B‖·‖C‖ ≤ ‖B‖·√T.

    >>> best = optimize_banded(100, bands=100).squared_errors().mean()
    >>> float(round(best / least_error(100), 2))
    1.13
    """
    checks.check_whole("steps", steps)
    checks.check_kind("workload", workload, Workload)
    if workload == _PREFIX_SUM:
        values = 0.5 / np.sin(np.arange(1, 2 * steps, 2) * np.pi / (4 * steps + 2))
    else:
        checks.check_at_most("steps", steps, _LARGEST_MATRIX, "the limit of this workload")
        powers = workload.momentum ** np.arange(steps)
        rates = 1.0 if (found := workload.rates(steps)) is None else found[:, None]
        values = svdvals(np.cumsum(rates * toeplitz(powers, np.zeros(steps)), axis=0))
    return float(values.sum() / steps) ** 2


def _error_function(
    steps: int, workload: Workload, error: str
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Return a function from the first column of C⁻¹ to the squared error and its gradient."""
    if (rates := workload.rates(steps)) is None:
        weights = np.arange(steps, 0, -1) / steps if error == "mean" else np.ones(steps)

        def of_constant_rate(noise: np.ndarray) -> tuple[float, np.ndarray]:
            summed = np.cumsum(workload.with_momentum(noise))
            slope = np.cumsum((2 * weights * summed)[::-1])
            return float(weights @ summed**2), workload.with_momentum(slope)[::-1]

        return of_constant_rate
    if error == "max":
        demand = "None with error='max', because the last step need not have the largest error"
        raise checks.refusal("learning_rates", demand, workload.learning_rates)
    checks.check_at_most("steps", steps, _LARGEST_MATRIX, "the limit with learning rates")
    # The error is gᵀSg, where g is `summed`. S[a, a − d] = Σ_{i ≥ a} η[i]·η[i − d]·(T − i)/T.
    rates = rates / rates.max()  # so that squares neither overflow nor vanish
    form, weights = np.zeros((steps, steps)), rates * np.arange(steps, 0, -1) / steps
    for lag in range(steps):
        sums = np.cumsum((weights[lag:] * rates[: steps - lag])[::-1])[::-1]
        np.fill_diagonal(form[lag:], sums)
        np.fill_diagonal(form[:, lag:], sums)

    def of_scheduled_rate(noise: np.ndarray) -> tuple[float, np.ndarray]:
        slope = form @ (summed := workload.with_momentum(noise))
        return float(summed @ slope), workload.with_momentum(2 * slope[::-1])[::-1]

    return of_scheduled_rate


def _inverse(column: Sequence[float] | np.ndarray, steps: int) -> np.ndarray:
    """Return the first column of the inverse of a lower-triangular Toeplitz matrix."""
    return lfilter([1.0], column, _padded([1.0], steps))


def _padded(column: Sequence[float] | np.ndarray, steps: int) -> np.ndarray:
    return np.r_[column, np.zeros(steps - len(column))]


def _power_series(power: float, size: int, workload: Workload) -> np.ndarray:
    """Return the first `size` coefficients of ((1 − x)(1 − μx))^power for the momentum μ."""
    series = np.r_[1.0, np.cumprod(1 - (1 + power) / np.arange(1, size))]
    return np.convolve(series, series * workload.momentum ** np.arange(size))[:size]


def _scaled(coefficients: np.ndarray, steps: int, *, is_inverse: bool = False) -> Correlation:
    """Return a correlation, scaled so that the first column of C has norm 1, rounded down."""
    norm = np.linalg.norm(_inverse(coefficients, steps) if is_inverse else coefficients)
    scaled = coefficients * (norm * (1 + 1e-15)) ** (1 if is_inverse else -1)
    return Correlation(steps, tuple(scaled.tolist()), is_inverse)


def _repeated(values: np.ndarray, separation: int) -> np.ndarray:
    """Return the sum of the values and of their shifts by one, two, three, … separations."""
    padded = _padded(values, values.size + -values.size % separation).reshape(-1, separation)
    return np.cumsum(padded, axis=0).ravel()[: values.size]


def _squared_bound(column: np.ndarray, separation: int) -> float:
    """Return an upper bound on the squared sensitivity from |CᵀC|, for any first column of C."""
    outer = np.outer(column, column)
    sums = np.stack([outer, np.abs(outer)])  # the latter bounds the rounding of sums that cancel
    for row in range(1, len(column)):  # sum along diagonals: CᵀC and |C|ᵀ|C|, in reverse order
        sums[:, row, 1:] += sums[:, row - 1, :-1]
    return float(_most(_most(np.abs(sums[0]) + _NARROW * sums[1], separation), separation))


def _most(values: np.ndarray, separation: int) -> np.ndarray:
    """Return, for each column, the largest sum of values ≥ 0 in rows `separation` or more apart."""
    best = np.zeros((len(values) + separation, *values.shape[1:]))
    for row in reversed(range(len(values))):
        best[row] = np.maximum(values[row] + best[row + separation], best[row + 1])
    return best[0]


def _check_bands(bands: int, steps: int, name: str = "bands") -> None:
    checks.check_whole("steps", steps)
    checks.check_whole(name, bands)
    checks.check_at_most(name, bands, steps, "the number of steps")
