"""Tails of the binomial distribution are known as well as is claimed."""

import mpmath
import pytest

from optax_lsdp.accounting._binomial import lower_tail, tail_rounding, upper_tail


def exact_upper_tail(least, trials, rate):
    """Return P(X ≥ least), term after term."""
    rate = mpmath.mpf(rate)
    term = mpmath.binomial(trials, least) * rate**least * (1 - rate) ** (trials - least)
    total = mpmath.mpf(0)
    while term > total * mpmath.mpf("1e-25"):
        total += term
        term *= rate / (1 - rate) * (trials - least) / (least + 1)
        least += 1
    return total


@pytest.mark.parametrize(
    ("trials", "rate", "least"),
    [
        (1, 0.3, 1),
        (56, 7.4e-6, 7),
        (10_614, 0.37, 5119),
        (381_015, 6.2e-6, 2),
        (8_556_628, 0.52068441456799, 4_455_220),  # where scipy's bdtrc is off by 2e-4
        (108_317_111, 0.0074987, 812_214),
    ],
)
def test_tails_are_within_their_rounding(trials, rate, least):
    with mpmath.workdps(40):
        upper, rounding = exact_upper_tail(least, trials, rate), tail_rounding(trials)
        assert abs(upper_tail(least, trials, rate) - upper) <= rounding * upper
        assert abs(lower_tail(least, trials, rate) - (1 - upper)) <= rounding * (1 - upper)
