"""Composition: losses of single steps go in, bounds on δ(ε) of many steps together come out.

The masses p at losses ℓ of every step are tilted to p·e^(θℓ − K(θ)), convolved by FFT, and tilted
back. Rounding errors of the FFT are as large in the tail as in the middle; tilting with θ near the
Chernoff optimum makes a middle of the tail that δ is made of.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.fft import next_fast_len, rfft

from optax_lsdp.accounting._loss import Lattice
from optax_lsdp.accounting._plan import Plan

_EPS = 2.0**-52
_NEGLIGIBLE = 42.0  # Fourier coefficients below e^(−42) are bounded, not summed


class _Sums(NamedTuple):
    """δ(ε)/weight, a bound on its error, weight, e^(−θNh), and the log of a factor of safety."""

    value: np.ndarray
    error: np.ndarray
    weight: np.ndarray
    wrapped: float
    growth: np.ndarray


class Tilted(NamedTuple):
    """Tilted sums of losses, by their Fourier coefficients, and all that is lost on the way.

    There is one sum for each row of counts; arrays have a row for each, and a column for each
    frequency where they depend on it.

    Attributes:
        mesh: h, the step of the lattice.
        tilt: θ.
        size: N, the number of residues; losses that differ by N·h are not told apart.
        log_scale: Σ T·K(θ): the mass of P at s is the tilted one times e^(log_scale − θs).
        frequencies: the whole numbers j of the coefficients that matter.
        gaps: Π φⱼ^T·(1/(1 − r) − 1/(1 − r′))/N, with r = e^(−θh + 2πij/N), r′ = r·e^(−h).
        ends: Π φⱼ^T/((1 − r′)N).
        noise: a bound on the error of a sum over all frequencies.
        growth: bounds the logarithm of the factor by which rounding may have changed masses.
        infinite: the mass of P at an infinite loss.
        slack: what all true losses together may exceed those on the lattice by.
        further, log_moment: t and log E[e^(tS)], S the tilted sum, which bound its upper tail.
    """

    mesh: float
    tilt: float
    size: int
    log_scale: np.ndarray
    frequencies: np.ndarray
    gaps: np.ndarray
    ends: np.ndarray
    noise: np.ndarray
    growth: np.ndarray
    infinite: np.ndarray
    slack: np.ndarray
    further: float
    log_moment: np.ndarray

    def above(self, epsilon: np.ndarray) -> np.ndarray:
        """Return upper bounds on δ(ε) of the steps, one ε for each row."""
        value, error, weight, wrapped, growth = self._sums(epsilon - self.slack)
        with np.errstate(over="ignore", invalid="ignore"):
            bound = np.exp(growth) * weight * (value + error + wrapped) + self.infinite
        return np.where(weight < math.inf, np.clip(bound, 1e-300, 1.0), 1.0)

    def below(self, epsilon: np.ndarray) -> np.ndarray:
        """Return lower bounds on δ(ε) of the losses on the lattice, one ε for each row."""
        value, error, weight, wrapped, growth = self._sums(epsilon)
        window = self.size * self.mesh
        beyond = np.exp(np.minimum(0.0, self.log_moment - self.further * (epsilon + window)))
        with np.errstate(over="ignore", invalid="ignore"):
            bound = np.exp(-growth) * weight * (value - error - beyond) - wrapped / (1 - wrapped)
        return np.where(weight < math.inf, np.maximum(bound, 0.0), 0.0)

    def _sums(self, epsilon: np.ndarray) -> _Sums:
        """Sum over all frequencies.

        δ(ε) = Σ P(s)(1 − e^(ε − s)) over s > ε. The residues are read as losses s in (ε, ε + Nh],
        and the first of them, s₀, takes out the weight e^(log_scale − θs₀). What remains, e^(−θs)
        and e^(−(θ + 1)s), are geometric series, whose Fourier sums are 1/(1 − r) and 1/(1 − r′),
        so that no inverse FFT is needed (Parseval).

        Losses above the window, read too low, would have added no more than weight·e^(−θNh), and
        add weight times their tilted mass at most, which Chernoff bounds. Losses below it, read
        too high, add Σₘ Σₛ P(s)·e^(−θmNh) ≤ e^(−θNh)/(1 − e^(−θNh)).
        """
        epsilon = np.minimum(epsilon, 1e15 * self.mesh)  # δ only falls beyond
        first = np.floor(epsilon / self.mesh).astype(np.int64) + 1
        start = first * self.mesh
        window = self.size * self.mesh
        wrapped = math.exp(-self.tilt * window)
        turns = self.frequencies * (first % self.size)[:, None] % self.size / self.size
        phases = np.exp(2j * math.pi * turns)
        gap = np.sum((phases * self.gaps).real, axis=1)
        end = np.sum((phases * self.ends).real, axis=1)
        rest = -np.expm1(epsilon - start) + wrapped * np.expm1(epsilon - start - window)
        value = (1 - wrapped) * gap + rest * end
        exponent = self.log_scale - self.tilt * start
        weight = np.exp(np.where(exponent < 600, exponent, math.inf))
        size = np.abs(self.log_scale) + np.abs(self.tilt * start)
        return _Sums(value, self.noise, weight, wrapped, self.growth + 4 * _EPS * (size + 8))


def convolve(lattices: Sequence[Lattice], counts: np.ndarray, plan: Plan) -> Tilted:
    """Convolve tilted losses, each as many times as a row of counts says.

    Errors. Every input of an FFT reaches every output through log₂N additions and products by
    numbers of modulus 1, so that an output errs by at most η = 8·log₂N·ε for inputs of sum 1. A
    T-th power then errs by T·η·(|φ| + η)^(T − 1), and by ε·(T|log φ| + 16) relative for its own
    arithmetic. A tilted mass is exact but for a factor e^(ε·c), c the size of its exponents; T of
    them multiply. The coefficients that are left out add e^(−42) at most to the mean of all.
    """
    mesh, tilt = plan.mesh, plan.tilt
    size = next_fast_len(max(16, math.ceil(plan.window / mesh)), real=True)
    eta = 8 * math.log2(size) * _EPS
    parts = [_tilted_masses(lattice, mesh, tilt) for lattice in lattices]
    logs = np.array([log for _, log in parts])
    moved = np.array([_tilted_masses(one, mesh, tilt + plan.further)[1] for one in lattices])
    reach = np.array([tilt * mesh * np.max(np.abs(lattice.positions)) for lattice in lattices])
    growth = counts @ (_EPS * (reach + np.abs(logs) + 750.0))
    spectra = [
        rfft(np.bincount(lattice.positions % size, masses, size))
        for lattice, (masses, _) in zip(lattices, parts, strict=True)
    ]
    fewest = counts.min(axis=0)
    decay = sum(
        fewer * np.log(np.abs(spectrum) + eta)
        for fewer, spectrum in zip(fewest, spectra, strict=True)
    )
    kept = np.flatnonzero(decay > -_NEGLIGIBLE)
    spectrum = np.array([one[kept] for one in spectra])
    log_spectrum = np.log(np.where(spectrum == 0, 1e-300, spectrum))
    bounds = np.abs(spectrum) + eta
    sides = np.where((kept == 0) | (2 * kept == size), 1.0, 2.0) / size  # with the conjugates
    angles = 2j * math.pi / size * kept
    end = 1 / -np.expm1(-(tilt + 1) * mesh + angles)
    gap = np.exp(-tilt * mesh + angles) * math.expm1(-mesh) / np.expm1(-tilt * mesh + angles) * end
    weights = np.abs(gap) + mesh * np.abs(end)
    errors = np.exp(counts @ np.log(bounds))
    errors = errors * (counts @ (eta / bounds) + _EPS * (counts @ np.abs(log_spectrum) + 16))
    powers = np.exp(counts @ log_spectrum) * sides
    return Tilted(
        mesh=mesh,
        tilt=tilt,
        size=size,
        log_scale=counts @ logs,
        frequencies=kept,
        gaps=powers * gap,
        ends=powers * end,
        noise=errors @ (sides * weights) + math.exp(-_NEGLIGIBLE) * weights[0],
        growth=growth,
        infinite=counts @ np.array([lattice.infinite for lattice in lattices]),
        slack=counts @ np.array([lattice.slack for lattice in lattices]),
        further=plan.further,
        log_moment=counts @ (moved - logs) + growth,
    )


def _tilted_masses(lattice: Lattice, mesh: float, tilt: float) -> tuple[np.ndarray, float]:
    """Return the masses p·e^(θℓ − K) of one step, and K."""
    with np.errstate(divide="ignore"):
        logs = np.log(lattice.masses)
    logs += tilt * mesh * lattice.positions
    top = float(logs.max())
    weights = np.exp(logs - top)
    total = float(weights.sum())
    return weights / total, top + math.log(total)
