"""Exact noise: a key and a whole scale s go in, whole numbers x with P[x] ∝ exp(−x²/2s²) come out.

Nothing but comparisons of whole numbers that are exactly uniform: no logarithm, no rounding, no
tail that is cut off. Every product below stays under 2⁶⁴, as s is at most 2²⁰ and what would
exceed it has a probability below exp(−1000).

References:
    Canonne, Kamath, Steinke 2020, The Discrete Gaussian for Differential Privacy, Algorithms 1–3.
"""

from __future__ import annotations

import numpy as np

from optax_lsdp._keys import threefry

LARGEST_SCALE = 2**20
_LAST_WORD = np.uint64(2**64 - 1)


class Stream:
    """Random whole numbers: Threefry of 0, 1, 2, … under a key, as many as are asked for."""

    def __init__(self, key: np.ndarray) -> None:
        self.key, self.drawn = np.asarray(key, np.uint32).reshape(2, 1), 0

    def words(self, size: int) -> np.ndarray:
        """Return the next words of 64 bits."""
        place = np.arange(self.drawn, self.drawn + size, dtype=np.uint64)
        self.drawn += size
        halves = (place >> np.uint64(32)).astype(np.uint32), place.astype(np.uint32)
        high, low = threefry((self.key[0], self.key[1]), halves)
        return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)

    def below(self, bounds: np.ndarray) -> np.ndarray:
        """Return uniform numbers in [0, bound): the 2⁶⁴ mod bound last words are drawn again."""
        excess = (np.uint64(0) - bounds) % bounds
        found = np.empty_like(bounds)
        missing = np.arange(len(bounds))
        while missing.size:
            drawn = self.words(missing.size)
            fits = drawn <= _LAST_WORD - excess[missing]
            found[missing[fits]] = drawn[fits] % bounds[missing[fits]]
            missing = missing[~fits]
        return found


def discrete_gaussian(stream: Stream, scale: int, size: int) -> np.ndarray:
    """Return independent draws of the discrete Gaussian, int64.

    A draw y of the discrete Laplace distribution, P[y] ∝ exp(−|y|/s), is kept with probability
    exp(−(|y| − s)²/2s²); the product of both is proportional to exp(−y²/2s²).
    """
    found = np.empty(size, np.int64)
    missing = np.arange(size)
    twice = np.uint64(2 * scale**2)
    while missing.size:
        y = _discrete_laplace(stream, scale, missing.size)
        distance = np.abs(np.abs(y) - scale).astype(np.uint64)
        kept = _happens(stream, distance * distance, np.full(len(y), twice))
        found[missing[kept]] = y[kept]
        missing = missing[~kept]
    return found


def _discrete_laplace(stream: Stream, scale: int, size: int) -> np.ndarray:
    """Return draws with P[y] ∝ exp(−|y|/s): |y| = u + s·v, with a random sign; −0 is no draw."""
    found = np.empty(size, np.int64)
    missing = np.arange(size)
    while missing.size:
        bounds = np.full(missing.size, scale, np.uint64)
        rest = stream.below(bounds)
        whole = _successes(stream, missing.size)
        magnitude = rest.astype(np.int64) + scale * whole
        negative = stream.below(np.full(missing.size, 2, np.uint64)) == 1
        kept = _happens(stream, rest, bounds) & ~(negative & (magnitude == 0))
        found[missing[kept]] = np.where(negative, -magnitude, magnitude)[kept]
        missing = missing[~kept]
    return found


def _successes(stream: Stream, size: int) -> np.ndarray:
    """Return how often in a row an event of probability 1/e happens."""
    counts = np.zeros(size, np.int64)
    going = np.arange(size)
    while going.size:
        ones = np.ones(going.size, np.uint64)
        going = going[_happens_soon(stream, ones, ones)]
        counts[going] += 1
    return counts


def _happens(stream: Stream, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return events of probability exp(−above/below): one of 1/e for each whole, and the rest."""
    whole, rest = np.divmod(above, below)
    alive = _happens_soon(stream, rest, below)
    while (due := np.flatnonzero(alive & (whole > 0))).size:
        ones = np.ones(due.size, np.uint64)
        alive[due] = _happens_soon(stream, ones, ones)
        whole[due] -= np.uint64(1)
    return alive


def _happens_soon(stream: Stream, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return events of probability exp(−p), p = above/below ≤ 1.

    Of events with probabilities p/1, p/2, p/3, … the first that does not happen is the k-th with
    k odd: Σ (−p)ᵏ/k! is its probability.
    """
    happened = np.empty(len(above), bool)
    going, k = np.arange(len(above)), 1
    while going.size:
        goes_on = stream.below(below[going] * np.uint64(k)) < above[going]
        happened[going[~goes_on]] = k % 2 == 1
        going, k = going[goes_on], k + 1
    return happened
