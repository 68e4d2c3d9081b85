"""The sampler of discrete noise has exactly the defined distributions, and nothing repeats."""

import numpy as np
import pytest
from scipy.stats import chisquare

from optax_lsdp.discrete import _sampler
from optax_lsdp.discrete._sampler import Stream, discrete_gaussian

KEY = np.array([3, 9], np.uint32)
RARE = 1e-6  # the probability that a test rejects correct noise, over all seeds


def p_value(draws, weights):
    """Compare counts of 0, 1, 2, … with their probabilities; rare values are counted together."""
    shares = weights / weights.sum()
    counts = np.bincount(draws, minlength=len(shares))
    common = shares * len(draws) > 20
    seen, expected = counts[: len(shares)][common], shares[common] * len(draws)
    if not common.all():
        seen = np.append(seen, len(draws) - seen.sum())
        expected = np.append(expected, len(draws) - expected.sum())
    return chisquare(seen, expected).pvalue if len(seen) > 1 else 1.0


@pytest.mark.parametrize("scale", [1, 2, 7, 60])
def test_the_discrete_gaussian_has_its_probabilities(scale):
    draws = discrete_gaussian(Stream(KEY), scale, 200_000)
    places = np.arange(-12 * scale, 12 * scale + 1)
    assert p_value(draws + 12 * scale, np.exp(-(places**2) / (2 * scale**2))) > RARE


def test_large_scales_have_the_moments_of_a_gaussian():
    scale, size = 2**20, 200_000
    draws = discrete_gaussian(Stream(KEY), scale, size) / scale
    deviations = np.array([1.0, 2, 15, 96]) ** 0.5 / size**0.5  # of the first four powers
    for power, deviation in enumerate(deviations, start=1):
        expected = {1: 0, 2: 1, 3: 0, 4: 3}[power]
        assert abs((draws**power).mean() - expected) < 5 * deviation


@pytest.mark.parametrize("ratio", [(0, 7), (1, 7), (7, 7), (5, 2), (9, 2)])
def test_events_happen_with_their_probability(ratio):
    size = 200_000
    above, below = (np.full(size, x, np.uint64) for x in ratio)
    share = np.exp(-ratio[0] / ratio[1])
    seen = _sampler._happens(Stream(KEY), above, below).mean()
    assert abs(seen - share) <= 5 * np.sqrt(share * (1 - share) / size)


@pytest.mark.parametrize("bound", [1, 3, 2**32 + 1, 2**63 + 1, 2**64 - 1])
def test_uniform_numbers_are_uniform(bound):
    """For the bound 2⁶³ + 1, nearly half of all words have to be drawn again."""
    size = 40_000
    stream = Stream(KEY)
    draws = stream.below(np.full(size, bound, np.uint64))
    assert draws.max() < bound
    places = (
        (draws.astype(np.float64) / bound * 16).astype(int) if bound > 16 else draws.astype(int)
    )
    assert p_value(places, np.ones(min(bound, 16))) > RARE
    assert (stream.drawn > 1.9 * size) == (bound == 2**63 + 1)


def test_words_that_do_not_fit_are_drawn_again(monkeypatch):
    """Without the last words, each remainder is equally likely."""
    last = 2**64 - 1
    words = iter([last, last - 1, 5, last - 2])
    monkeypatch.setattr(
        Stream, "words", lambda self, size: np.array([next(words) for _ in range(size)], np.uint64)
    )
    # 2⁶⁴ = 6 (mod 10): the last six words are refused.
    assert Stream(KEY).below(np.array([10], np.uint64)).tolist() == [5]


def test_streams_of_different_keys_and_places_differ():
    one, other = Stream(KEY), Stream(KEY + 1)
    words = np.concatenate([one.words(1000), one.words(1000), other.words(2000)])
    assert len(set(words.tolist())) == 4000
    assert Stream(KEY).words(2000).tolist() == words[:2000].tolist()
