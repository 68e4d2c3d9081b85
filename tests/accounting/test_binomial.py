"""Tails of the binomial distribution are known as well as is claimed."""

import mpmath
import pytest

from optax_lsdp.accounting._binomial import lower_tail, tail_rounding, upper_tail
from optax_lsdp.accounting._pairs import group_members, remove_group


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


@pytest.mark.parametrize(
    ("size", "rate"), [(3, 0.2), (300, 0.5), (10**6, 1e-4), (10**9, 1e-8), (10**12, 1e-12)]
)
def test_the_members_of_a_group_are_counted_from_above_and_below(size, rate):
    shift = 0.05
    above, below = (remove_group(rate, shift, size, at_least=one) for one in (False, True))
    last, lost = group_members(rate, shift, size)
    assert len(above.centres) == len(below.centres) == last + 1
    with mpmath.workdps(40):
        q = mpmath.mpf(rate)
        for j in range(1, last + 1):
            exact = mpmath.binomial(size, j) * q**j * mpmath.exp((size - j) * mpmath.log1p(-q))
            assert exact * (1 - 2e-9) <= below.change[j] <= exact or exact < 1e-290
            assert exact <= above.change[j] <= exact * (1 + 2e-9) or exact < 1e-290
        if last < size:
            assert exact_upper_tail(last + 1, size, rate) <= lost < 1e-39
