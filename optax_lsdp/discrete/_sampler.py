"""Draw integers x with exactly P[x] ∝ exp(−x²/2s²), for an integer scale s.

The sampler only compares uniform random integers. It does not round, and does not cut off the tail.
For s ≤ 2²⁰, all products stay below 2⁶⁴, except with a probability below exp(−1000). See Canonne,
Kamath, Steinke 2020, The Discrete Gaussian for Differential Privacy, Algorithms 1–3.
"""

import numpy as np

from optax_lsdp._keys import threefry

LARGEST_SCALE = 2**20
_LAST_WORD = np.uint64(2**64 - 1)


class Stream:
    """A stream of random integers: Threefry encrypts 0, 1, 2, … with a key."""

    def __init__(self, key: np.ndarray) -> None:
        self.key, self.drawn = np.asarray(key, np.uint32).reshape(2, 1), 0

    def words(self, size: int) -> np.ndarray:
        """Return the next `size` 64-bit words."""
        place = np.arange(self.drawn, self.drawn + size, dtype=np.uint64)
        self.drawn += size
        halves = (place >> np.uint64(32)).astype(np.uint32), place.astype(np.uint32)
        high, low = threefry((self.key[0], self.key[1]), halves)
        return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)

    def below(self, bounds: np.ndarray) -> np.ndarray:
        """Return a uniform integer in [0, bound) for each bound.

        The result is a word modulo the bound. If a word is among the largest (2⁶⁴ mod bound) ones,
        another word is drawn, because these words would make small results more likely.
        """
        excess = (np.uint64(0) - bounds) % bounds
        found, missing = np.empty_like(bounds), np.arange(len(bounds))
        while missing.size:
            drawn = self.words(missing.size)
            fits = drawn <= _LAST_WORD - excess[missing]
            found[missing[fits]] = drawn[fits] % bounds[missing[fits]]
            missing = missing[~fits]
        return found


def discrete_gaussian(stream: Stream, scale: int, size: int) -> np.ndarray:
    """Return `size` independent draws of the discrete Gaussian, int64. Let s be `scale`.

    Draw y from the discrete Laplace distribution, P[y] ∝ exp(−|y|/s), and keep y with probability
    exp(−(|y| − s)²/2s²). The product of the two probabilities is proportional to exp(−y²/2s²).
    """
    found, missing = np.empty(size, np.int64), np.arange(size)
    while missing.size:
        y = _discrete_laplace(stream, scale, missing.size)
        distance = np.abs(np.abs(y) - scale).astype(np.uint64)
        kept = _happens(stream, distance**2, np.full(len(y), 2 * scale**2, np.uint64))
        found[missing[kept]] = y[kept]
        missing = missing[~kept]
    return found


def _discrete_laplace(stream: Stream, scale: int, size: int) -> np.ndarray:
    """Return draws with P[y] ∝ exp(−|y|/s), s = `scale`: y = ±(u + s·v) with a random sign.

    u is a uniform integer in [0, s), kept with probability exp(−u/s), and `_successes` draws v.
    Draws of −0 are rejected: otherwise 0 would be twice as likely.
    """
    found, missing = np.empty(size, np.int64), np.arange(size)
    while missing.size:
        bounds = np.full(missing.size, scale, np.uint64)
        rest = stream.below(bounds)
        magnitude = rest.astype(np.int64) + scale * _successes(stream, missing.size)
        negative = stream.below(np.full(missing.size, 2, np.uint64)) == 1
        kept = _happens(stream, rest, bounds) & ~(negative & (magnitude == 0))
        found[missing[kept]] = np.where(negative, -magnitude, magnitude)[kept]
        missing = missing[~kept]
    return found


def _successes(stream: Stream, size: int) -> np.ndarray:
    """Return geometric draws: how many events of probability 1/e happen before one does not."""
    counts = np.zeros(size, np.int64)
    alive = np.arange(size)
    while alive.size:
        ones = np.ones(alive.size, np.uint64)
        alive = alive[_happens_below_one(stream, ones, ones)]
        counts[alive] += 1
    return counts


def _happens(stream: Stream, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return random bools that are true with probability exp(−above/below).

    Write above/below as k + r, with an integer k and 0 ≤ r < 1. The bool is true if k events of
    probability 1/e and one event of probability exp(−r) all happen.
    """
    whole, rest = np.divmod(above, below)
    alive = _happens_below_one(stream, rest, below)
    while (due := np.flatnonzero(alive & (whole > 0))).size:
        ones = np.ones(due.size, np.uint64)
        alive[due] = _happens_below_one(stream, ones, ones)
        whole[due] -= np.uint64(1)
    return alive


def _happens_below_one(stream: Stream, above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Return random bools that are true with probability exp(−p), where p = above/below ≤ 1.

    Try events of probabilities p/1, p/2, p/3, … until an event p/k does not happen. This k is odd
    with probability Σⱼ (−p)ʲ/j! = exp(−p).
    """
    happened = np.empty(len(above), bool)
    undecided, k = np.arange(len(above)), 1
    while undecided.size:
        continues = stream.below(below[undecided] * np.uint64(k)) < above[undecided]
        happened[undecided[~continues]] = k % 2 == 1
        undecided, k = undecided[continues], k + 1
    return happened
