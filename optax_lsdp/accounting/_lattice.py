"""Proved bounds on δ(ε) of many steps, from privacy losses that are rounded to a lattice.

1. `pessimistic_lattice` and `optimistic_lattice` round one step's privacy loss to whole multiples
   of the mesh h.
2. `convolve` tilts each distribution of losses: it replaces the mass p of a loss ℓ by
   p·e^(θℓ − K(θ)), where K(θ) makes the sum of the new masses 1. Without the tilt, rounding errors
   of the FFT would swamp the tail that determines δ. With θ near the Chernoff optimum, this tail
   becomes the bulk of the distribution.
3. `convolve` adds the losses of all steps by FFT.
4. Upper bounds on δ add a bound on every error, and lower bounds subtract this bound.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.fft import next_fast_len, rfft
from scipy.optimize import isotonic_regression
from scipy.special import ndtr

from optax_lsdp.accounting._dominating_pairs import Pair, Step
from optax_lsdp.accounting._quadrature import LatticeSettings, cut_points

_EPS = 2.0**-52
_TANGENTS = (0.0, 0.03, 0.2, 0.5, 0.8, 0.97, 1.0)  # where tangents touch: 0 and 1 are a cell's ends
_NEGLIGIBLE = 42.0  # Fourier coefficients below e^(−42) are bounded, not summed


class Lattice(NamedTuple):
    """The distribution of a privacy loss log P/Q under P, on whole multiples of the mesh h."""

    positions: np.ndarray  # losses, as whole multiples of h
    masses: np.ndarray  # the mass of P at each position
    infinite: float  # the mass of P at an infinite loss
    slack: float  # a bound on how far rounding lets a true loss exceed its position


def pessimistic_lattice(step: Step, mesh: float, per_octave: int, tail: float) -> Lattice:
    """Return a lattice whose hockey-stick divergence is at least the step's, at every ε.

    For `mesh`, `per_octave` and `tail`, see `LatticeSettings`.
    """
    parts = [(w, _connect_dots(pair, mesh, per_octave, tail / w)) for w, pair in step if w]
    return Lattice(
        np.concatenate([part.positions for _, part in parts]),
        np.concatenate([w * part.masses for w, part in parts]),
        sum(w * part.infinite for w, part in parts),
        max(part.slack for _, part in parts),
    )


def _connect_dots(pair: Pair, mesh: float, per_octave: int, tail: float) -> Lattice:
    """Return a lattice with each cell's mass at the cell's ends, so that divergences only grow.

    A cell [ℓ, ℓ′] is an interval of losses. Let p and q be the masses of the cell under P and Q.

    1. Of the mass p, the upper end gets u = (p − e^ℓ q)/(1 − e^(ℓ − ℓ′)), and the lower end gets
       p − u. Then the two ends together have the masses p and q, as the cell had.
    2. This move spreads the ratio P/Q about its mean under Q. A divergence is convex in P/Q, so it
       grows at every ε, before and after composition (Doroshenko et al. 2022, Connect the Dots).
    3. Mass below the lattice moves to the lowest end, and mass above the lattice to infinity.
    4. Bounds on rounding errors are added to p and u.
    5. The losses at the ends of cells are known up to an error s. The proof therefore replaces q by
       e^(−s)q. Then no loss in a cell is below the cell's lower end, and no loss exceeds the cell's
       upper end by more than 2s. The lattice's slack is 3s: 2s for these losses, and s for the
       factor e^(−s).
    """
    low, high = pair.loss(np.array(cut_points(pair, tail)))
    index = _cell_ends(math.floor(low / mesh), math.ceil(high / mesh), per_octave)
    ends = index * mesh
    points = pair.point(ends)
    known = np.isfinite(points)
    off = float(np.max(np.abs(pair.loss(points[known]) - ends[known]), initial=0.0))
    off += 8 * _EPS * float(np.max(np.abs(ends)) + np.sum(np.abs(pair.change)))
    masses, errors = _cell_masses(points[:, None] - pair.centres)
    total = (masses + errors) @ pair.weights
    weights = pair.change - np.expm1(ends[:-1])[:, None] * pair.base
    excess = np.sum(weights * masses, axis=1) + off * np.exp(ends[:-1]) * (masses @ pair.base)
    excess += np.sum(np.abs(weights) * (errors + 4 * _EPS * masses), axis=1)
    upper = np.clip(excess / -np.expm1(-np.diff(ends)), 0.0, total)
    spread = np.zeros(len(index))
    spread[0] = float(ndtr(points[0] - pair.centres) @ pair.weights) * (1 + 1e-12)
    spread[:-1] += total - upper
    spread[1:] += upper
    infinite = float(ndtr(pair.centres - points[-1]) @ pair.weights) * (1 + 1e-12)
    lattice = Lattice(index, spread, infinite + pair.missing, 3 * off)
    return _fold(lattice, mesh) if pair.folded else lattice


def _fold(lattice: Lattice, mesh: float) -> Lattice:
    """Return a lattice of the positive losses and their mirror image. All other mass has loss 0.

    The mirror image stands for (Q, P): a mass p at loss ℓ has the image p·e^(−ℓ) at −ℓ.
    """
    positive = lattice.positions > 0
    index, masses = lattice.positions[positive], lattice.masses[positive]
    mirrored = masses * np.exp(-index * mesh)
    rest = max(0.0, 1.0 - float(masses.sum() + mirrored.sum())) + 16 * _EPS
    return lattice._replace(
        positions=np.concatenate([-index[::-1], [0], index]),
        masses=np.concatenate([mirrored[::-1], [rest], masses]),
    )


def optimistic_lattice(pair: Pair, mesh: float, per_octave: int, tail: float) -> Lattice:
    """Return a lattice whose hockey-stick divergence is at most the pair's, at every ε.

    1. A divergence is a convex function of α = e^ε. If all losses are on the lattice, this function
       is linear between lattice points, where α is e^loss.
    2. In each cell, a chord joins the pair's divergences at the cell's two ends. The chord is above
       the divergence by at most the chord's distance from any tangent.
    3. At each lattice point, the divergence is lowered by the larger distance of the two adjacent
       cells. Every chord of the lowered values is below the divergence.
    4. Take the largest convex function below the lowered values that is 1 at α = 0, and 0 at the
       last lattice point with a positive lowered value. This function is the divergence of a
       distribution on the lattice. The slopes of the function give the masses.
    """
    low, high = pair.loss(np.array(cut_points(pair, tail)))
    reach = math.floor(min(low, 0.0) / mesh), math.ceil(max(high, 0.0) / mesh)
    index = np.union1d(_cell_ends(*reach, per_octave), [0])
    ends = index * mesh
    left = ends[1:] <= 0
    lower, upper = (_surplus(pair, side, left)[0] for side in (ends[:-1], ends[1:]))
    excess = np.full(len(left), math.inf)
    for where in _TANGENTS:
        touching = ends[:-1] + where * np.diff(ends)
        value, slope = _surplus(pair, touching, left)
        at_lower = value + slope * np.exp(ends[:-1]) * -np.expm1(touching - ends[:-1])
        at_upper = value + slope * np.exp(ends[1:]) * -np.expm1(touching - ends[1:])
        excess = np.minimum(excess, np.maximum(lower - at_lower, upper - at_upper))
    excess = np.maximum(excess, 0.0) + np.where(left, 1e-15, 1e-11 * lower)
    lowered = np.maximum(np.append(0.0, excess), np.append(excess, 0.0))
    lower, upper = lower - lowered[:-1], upper - lowered[1:]
    last = int(np.argmax(np.append(~left & (upper <= 0), True)))  # the cell that reaches zero
    if last == 0 or left[last - 1]:
        return Lattice(np.zeros(1, int), np.ones(1), 0.0, 0.0)  # no loss: below every divergence
    upper[last - 1] = 0.0
    ratios = np.append(0.0, np.exp(ends[: last + 1]))
    slopes = (upper[:last] - lower[:last]) / np.diff(ratios)[1:] - left[:last]
    slopes = np.append(lower[0] / ratios[1] - 1, slopes)
    slopes = np.minimum(isotonic_regression(slopes, weights=np.diff(ratios)).x, 0.0)
    masses = np.diff(slopes, append=0.0) * ratios[1:]
    return Lattice(index[: last + 1], masses, 0.0, 0.0)


def _surplus(pair: Pair, losses: np.ndarray, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each loss, the hockey-stick divergence D(α) and its slope at α = e^loss.

    Where `left` is true, return D(α) − (1 − α) and its slope, which avoids cancellation.
    """
    gaps = pair.centres - pair.point(losses)[:, None]
    tails = ndtr(np.where(left[:, None], -gaps, gaps))
    weights = pair.change - np.expm1(losses)[:, None] * pair.base
    sign = np.where(left, -1.0, 1.0)
    return sign * np.sum(weights * tails, axis=1), -sign * (tails @ pair.base)


def _cell_ends(first: int, last: int, per_octave: int) -> np.ndarray:
    """Return whole numbers from `first` to `last`: every one near zero, and fewer further out."""
    ladder = [np.arange(2 * per_octave)]
    start = 2 * per_octave
    while start <= max(-first, last):
        ladder.append(np.arange(start, 2 * start, start // per_octave))
        start *= 2
    steps = np.concatenate(ladder)
    both = np.concatenate([-steps[:0:-1], steps])
    return np.concatenate([[first], both[(both > first) & (both < last)], [last]])


def _cell_masses(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return Φ(b) − Φ(a) for consecutive rows a and b, and a bound on each difference's error.

    Differences are taken in the nearer tail, where Φ is small. Compared with mpmath, the relative
    error of `ndtr` at x is at most 1.05·2⁻⁵²·(4 + x²). A difference has the errors of two values.
    """
    left, right = ends[:-1], ends[1:]
    far = np.where(left > 0, -left, right)
    high, low = ndtr(far), ndtr(np.where(left > 0, -right, left))
    errors = 4 * _EPS * high * (4 + np.clip(far, -40.0, 0.0) ** 2)
    return np.maximum(high - low, 0.0), errors


class TiltedSum(NamedTuple):
    """The distribution of the sum of all privacy losses as Fourier coefficients, and error bounds.

    Arrays have one row for each row of `counts` in `convolve`. The columns of `gaps` and `ends` are
    the frequencies j. The comments use these symbols:

    - h, θ and t are the mesh, the tilt and the extra tilt of the settings.
    - φⱼ is the j-th Fourier coefficient of the tilted masses of one step, which is taken T times.
      For the tilt, see the module's docstring.
    - Π and Σ run over the different steps.
    - r = e^(−θh + 2πij/N) and r′ = r·e^(−h), where i is the imaginary unit.
    """

    settings: LatticeSettings
    size: int  # N, the length of the FFT, which knows losses only modulo N·h
    log_scale: np.ndarray  # Σ T·K(θ): P(s) is the tilted mass times e^(log_scale − θs)
    frequencies: np.ndarray  # each j whose coefficients are not negligible
    gaps: np.ndarray  # Π φⱼ^T·(1/(1 − r) − 1/(1 − r′))/N, for δ(ε) at lattice points
    ends: np.ndarray  # Π φⱼ^T/((1 − r′)N), for δ(ε) between lattice points
    noise: np.ndarray  # a bound on the error of a sum over all frequencies
    growth: np.ndarray  # a bound on |log| of the factor by which rounding changes masses
    infinite: np.ndarray  # the mass of P at an infinite loss
    slack: np.ndarray  # a bound on how far the true sum of losses exceeds the lattice's sum
    log_moment: np.ndarray  # log E[e^(tS)] of the tilted sum S, to bound its upper tail

    def upper_delta(self, epsilon: np.ndarray) -> np.ndarray:
        """Return upper bounds on δ(ε) of the steps. `epsilon` has one ε for each row of sums."""
        value, weight, wrapped, growth = self._sums(epsilon - self.slack)
        with np.errstate(over="ignore", invalid="ignore"):
            bound = np.exp(growth) * weight * (value + self.noise + wrapped) + self.infinite
        return np.where(weight < math.inf, np.clip(bound, 1e-300, 1.0), 1.0)

    def lower_delta(self, epsilon: np.ndarray) -> np.ndarray:
        """Return lower bounds on δ(ε), one for each row, if all losses are on the lattice."""
        value, weight, wrapped, growth = self._sums(epsilon)
        above = epsilon + self.size * self.settings.mesh
        beyond = np.exp(np.minimum(0.0, self.log_moment - self.settings.extra_tilt * above))
        below = wrapped / (1 - wrapped)
        with np.errstate(over="ignore", invalid="ignore"):
            bound = np.exp(-growth) * weight * (value - self.noise - beyond) - below
        return np.where(weight < math.inf, np.maximum(bound, 0.0), 0.0)

    def _sums(self, epsilon: np.ndarray) -> tuple[np.ndarray, np.ndarray, float, np.ndarray]:
        """Return δ(ε)/weight, the weight, e^(−θNh), and the logarithm of a factor for rounding.

        δ(ε) is the sum of P(s)(1 − e^(ε − s)) over all losses s > ε. The FFT knows losses only
        modulo Nh, so it reads each loss as a loss s in the window (ε, ε + Nh]. Let s₀ be the
        smallest loss in the window. The weight is e^(log_scale − θs₀). δ(ε)/weight is a sum of the
        tilted masses, times the factors e^(−θ(s − s₀)) and e^(−(θ + 1)(s − s₀)). These factors are
        geometric sequences, so Parseval's theorem turns the sums over s into sums over j with
        1/(1 − r) and 1/(1 − r′).

        The FFT reads losses outside of the window wrongly:

        - Losses above the window are read too low. Their true contribution to δ is at most
          weight·e^(−θNh), which upper bounds add. Their contribution to the sum is at most the
          weight times their tilted mass. Lower bounds subtract a Chernoff bound on this product.
        - Losses below the window are read too high, by m ≥ 1 times Nh. They should contribute
          nothing. Their contribution to the sum is at most
          Σₘ Σₛ P(s)·e^(−θmNh) ≤ e^(−θNh)/(1 − e^(−θNh)), which lower bounds subtract.
        """
        mesh, tilt = self.settings.mesh, self.settings.tilt
        epsilon = np.minimum(epsilon, 1e15 * mesh)  # beyond this limit, δ only decreases
        first = np.floor(epsilon / mesh).astype(np.int64) + 1
        start, window = first * mesh, self.size * mesh
        wrapped = math.exp(-tilt * window)
        turns = self.frequencies * (first % self.size)[:, None] % self.size / self.size
        phases = np.exp(2j * math.pi * turns)
        gap = np.sum((phases * self.gaps).real, axis=1)
        end = np.sum((phases * self.ends).real, axis=1)
        rest = -np.expm1(epsilon - start) + wrapped * np.expm1(epsilon - start - window)
        value = (1 - wrapped) * gap + rest * end
        exponent = self.log_scale - tilt * start
        weight = np.exp(np.where(exponent < 600, exponent, math.inf))
        size = np.abs(self.log_scale) + np.abs(tilt * start)
        return value, weight, wrapped, self.growth + 4 * _EPS * (size + 8)


def convolve(
    lattices: Sequence[Lattice], counts: np.ndarray, settings: LatticeSettings
) -> TiltedSum:
    """Convolve the tilted losses of all steps, and bound the errors.

    Each row of `counts` says how often each step is taken, and gives one sum. u = 2⁻⁵² is the
    machine precision, and N the length of the FFT. The following errors are bounded:

    - FFT: an input reaches an output through log₂N additions and multiplications by numbers of
      modulus 1. The inputs sum to 1, so the error of an output φ is at most η = 8u·log₂N.
    - Powers: the error of φ^T is at most T·η·(|φ| + η)^(T − 1), plus a relative error of
      u·(T|log φ| + 16) from computing the power.
    - Tilt: a tilted mass is exact up to a factor e^(u·c), where c is the size of the exponents. A
      step that is taken T times has T of these factors.
    - Dropped coefficients: dropping all negligible Fourier coefficients changes the mean of the
      coefficients by at most e^(−42).
    """
    mesh, tilt = settings.mesh, settings.tilt
    size = next_fast_len(max(16, math.ceil(settings.window / mesh)), real=True)
    eta = 8 * math.log2(size) * _EPS
    parts = [_tilted_masses(lattice, mesh, tilt) for lattice in lattices]
    logs = np.array([log for _, log in parts])
    moved = np.array([_tilted_masses(one, mesh, tilt + settings.extra_tilt)[1] for one in lattices])
    reach = np.array([tilt * mesh * np.max(np.abs(lattice.positions)) for lattice in lattices])
    growth = counts @ (_EPS * (reach + np.abs(logs) + 750.0))
    spectra = [
        rfft(np.bincount(lattice.positions % size, masses, size))
        for lattice, (masses, _) in zip(lattices, parts, strict=True)
    ]
    pairs = zip(counts.min(axis=0), spectra, strict=True)
    decay = sum(fewest * np.log(np.abs(spectrum) + eta) for fewest, spectrum in pairs)
    kept = np.flatnonzero(decay > -_NEGLIGIBLE)
    spectrum = np.array([one[kept] for one in spectra])
    log_spectrum = np.log(np.where(spectrum == 0, 1e-300, spectrum))
    bounds = np.abs(spectrum) + eta
    sides = np.where((kept == 0) | (2 * kept == size), 1.0, 2.0) / size  # 2 counts j and −j
    angles = 2j * math.pi / size * kept
    end = 1 / -np.expm1(-(tilt + 1) * mesh + angles)
    gap = np.exp(-tilt * mesh + angles) * math.expm1(-mesh) / np.expm1(-tilt * mesh + angles) * end
    weights = np.abs(gap) + mesh * np.abs(end)
    errors = np.exp(counts @ np.log(bounds))
    errors = errors * (counts @ (eta / bounds) + _EPS * (counts @ np.abs(log_spectrum) + 16))
    powers = np.exp(counts @ log_spectrum) * sides
    return TiltedSum(
        settings=settings,
        size=size,
        log_scale=counts @ logs,
        frequencies=kept,
        gaps=powers * gap,
        ends=powers * end,
        noise=errors @ (sides * weights) + math.exp(-_NEGLIGIBLE) * weights[0],
        growth=growth,
        infinite=counts @ np.array([lattice.infinite for lattice in lattices]),
        slack=counts @ np.array([lattice.slack for lattice in lattices]),
        log_moment=counts @ (moved - logs) + growth,
    )


def _tilted_masses(lattice: Lattice, mesh: float, tilt: float) -> tuple[np.ndarray, float]:
    """Return p·e^(θℓ − K) for the masses p at losses ℓ, and the K that makes them sum to 1."""
    with np.errstate(divide="ignore"):
        logs = np.log(lattice.masses)
    logs += tilt * mesh * lattice.positions
    top = float(logs.max())
    weights = np.exp(logs - top)
    total = float(weights.sum())
    return weights / total, top + math.log(total)
