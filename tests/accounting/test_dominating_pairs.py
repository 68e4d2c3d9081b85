"""Dominating pairs reveal at least as much as every small dataset, and binomial tails are right."""

import itertools

import mpmath
import numpy as np
import pytest

from optax_lsdp.accounting import SampledGaussian
from optax_lsdp.accounting._dominating_pairs import (
    addition_pair,
    binomial_lower_tail,
    binomial_rounding,
    binomial_upper_tail,
    group_addition_pair,
    group_members,
    group_removal_pair,
    removal_pair,
    replacement_pair,
)
from tests.oracles import batches, hockey_stick, noisy_sums

WIDTH = 0.005
X = np.arange(-14, 14, WIDTH)
VALUES = (-1.0, 0.0, 1.0)
PAIRS = {
    "remove": removal_pair(0.2, 0.7),
    "add": addition_pair(0.2, 0.7),
    "replace": replacement_pair(0.2, 0.7),
    "remove, rarely": removal_pair(1e-6, 2.0),
    "add, rarely": addition_pair(1e-6, 2.0),
    "replace, rarely": replacement_pair(1e-6, 2.0),
    "remove, always": removal_pair(1.0, 1.5),
    "add, always": addition_pair(1.0, 1.5),
    "replace, always": replacement_pair(1.0, 1.5),
    "remove three": group_removal_pair(0.2, 0.7, 3),
    "add three": group_addition_pair(0.2, 0.7, 3),
}


def neighbours(size, relation):
    """Yield all pairs of datasets with contributions in VALUES that differ in the last example."""
    for others in itertools.product(VALUES, repeat=size - 1):
        for one, other in itertools.product(VALUES, repeat=2):
            if relation == "add_remove":
                yield (*others, one), others
                yield others, (*others, one)
            elif relation == "zero_out":
                yield (*others, one), (*others, 0.0)
                yield (*others, 0.0), (*others, one)
            else:
                yield (*others, one), (*others, other)


@pytest.mark.parametrize(
    ("sampling", "relation", "drawn", "most"),
    [
        ("poisson", "add_remove", 0.3, None),
        ("poisson", "zero_out", 0.3, None),
        ("poisson", "replace_one", 0.3, None),
        ("poisson", "add_remove", 0.6, 1),
        ("poisson", "zero_out", 0.6, 1),
        ("poisson", "replace_one", 0.6, 1),
        ("poisson", "add_remove", 0.6, 2),
        ("poisson", "add_remove", 1.0, 2),
        ("poisson", "zero_out", 1.0, 2),
        ("poisson", "replace_one", 1.0, 2),
        ("poisson", "zero_out", 0.6, 2),
        ("without_replacement", "replace_one", 1, None),
        ("without_replacement", "replace_one", 2, None),
    ],
)
@pytest.mark.parametrize("noise", [0.8, 2.0])
def test_no_small_dataset_reveals_more_than_is_reported(sampling, relation, drawn, most, noise):
    size = 3
    rate = drawn if sampling == "poisson" else drawn / size
    run = SampledGaussian(
        noise,
        rate,
        1,
        sampling=sampling,
        neighbouring=relation,
        max_batch_size=most,
        dataset_size=size,
    )
    for epsilon in (0.0, 0.1, 0.5, 1.0):
        worst = 0.0
        for pair in neighbours(size, relation):
            p, q = (
                noisy_sums(
                    tuple(value / noise for value in data),
                    batches(len(data), sampling, drawn, most),
                    X,
                )
                for data in pair
            )
            worst = max(worst, hockey_stick(p, q, WIDTH, epsilon))
        bound = run.delta(epsilon)
        assert worst <= bound + 1e-6
        if most is None:
            assert bound <= worst * 1.002 + 1e-6 or sampling == "without_replacement"


def test_a_shuffled_epoch_reveals_no_more_than_is_reported():
    width, noise = 0.05, 1.0
    x = np.arange(-8, 8, width)

    def density(data):  # two batches of one example, in either order
        bumps = [np.exp(-((x - value / noise) ** 2) / 2) / np.sqrt(2 * np.pi) for value in data]
        return (np.outer(*bumps) + np.outer(*bumps[::-1])) / 2

    for relation in ("zero_out", "replace_one"):
        run = SampledGaussian(noise, 0.5, 2, sampling="shuffled", neighbouring=relation)
        for epsilon in (0.0, 0.5, 1.0):
            worst = max(
                hockey_stick(density(one), density(other), width**2, epsilon)
                for one, other in neighbours(2, relation)
            )
            assert 0 < worst <= run.delta(epsilon) + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_no_replacement_is_worse_than_one_in_the_opposite_direction(seed):
    # In the plane, a contribution u is replaced by v; their norms are at most μ.
    rng = np.random.default_rng(seed)
    rate, shift, width = rng.uniform(0.05, 0.95), rng.uniform(0.3, 2.0), 0.05
    x = np.arange(-8, 8, width)
    plane = np.stack(np.meshgrid(x, x), axis=-1)
    u, v = rng.normal(size=(2, 2))
    u, v = (w / np.linalg.norm(w) * shift * rng.uniform(0.3, 1) ** 0.1 for w in (u, v))

    def bump(centre):
        return np.exp(-np.sum((plane - centre) ** 2, axis=-1) / 2) / (2 * np.pi)

    p, q = ((1 - rate) * bump(np.zeros(2)) + rate * bump(w) for w in (u, v))
    run = SampledGaussian(1 / shift, rate, 1, neighbouring="replace_one")
    for epsilon in (0.0, 0.2, 1.0):
        assert hockey_stick(p, q, width**2, epsilon) <= run.delta(epsilon) + 1e-6


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_point_is_the_inverse_of_loss(pair):
    x = np.linspace(-6, 8, 400)
    losses = pair.loss(x)
    assert np.all(np.diff(losses) >= -1e-15 * np.abs(losses[1:]))
    found = pair.loss(pair.point(losses))
    np.testing.assert_allclose(found, losses, rtol=1e-9, atol=1e-15)


def test_losses_that_do_not_occur_are_at_infinity():
    rate = 0.2
    least = np.log1p(-rate)
    assert removal_pair(rate, 1.0).point(np.array([least - 0.01]))[0] == -np.inf
    assert group_removal_pair(rate, 1.0, 2).point(np.array([2 * least - 0.01]))[0] == -np.inf
    assert addition_pair(rate, 1.0).point(np.array([-least + 0.01]))[0] == np.inf


@pytest.mark.parametrize("name", PAIRS)
def test_weights_of_p_and_q_are_probabilities(name):
    pair, rounding = (
        PAIRS[name],
        1e-9 if "three" in name else 4e-16,
    )  # weights of groups are rounded up
    np.testing.assert_allclose(pair.base.sum(), 1, rtol=rounding)
    np.testing.assert_allclose(pair.change.sum(), 0, atol=rounding)
    assert np.all(pair.weights >= -1e-16)


def exact_upper_tail(least, trials, rate):
    """Return P(X ≥ least) by summing all terms."""
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
        (8_556_628, 0.52068441456799, 4_455_220),  # scipy's bdtrc errs by 2e-4 here
        (108_317_111, 0.0074987, 812_214),
    ],
)
def test_binomial_tails_err_by_at_most_their_rounding(trials, rate, least):
    with mpmath.workdps(40):
        upper, rounding = exact_upper_tail(least, trials, rate), binomial_rounding(trials)
        assert abs(binomial_upper_tail(least, trials, rate) - upper) <= rounding * upper
        assert abs(binomial_lower_tail(least, trials, rate) - (1 - upper)) <= rounding * (1 - upper)


@pytest.mark.parametrize(
    ("size", "rate"), [(3, 0.2), (300, 0.5), (10**6, 1e-4), (10**9, 1e-8), (10**12, 1e-12)]
)
def test_weights_of_a_group_are_rounded_to_the_safe_side(size, rate):
    shift = 0.05
    pessimistic, optimistic = (
        group_removal_pair(rate, shift, size, optimistic=one) for one in (False, True)
    )
    added = group_addition_pair(rate, shift, size)
    last, missing = group_members(rate, shift, size)
    assert len(pessimistic.centres) == len(optimistic.centres) == last + 1
    with mpmath.workdps(40):
        q = mpmath.mpf(rate)
        for j in range(1, last + 1):
            exact = mpmath.binomial(size, j) * q**j * mpmath.exp((size - j) * mpmath.log1p(-q))
            assert exact * (1 - 2e-9) <= optimistic.change[j] <= exact or exact < 1e-290
            assert exact <= pessimistic.change[j] <= exact * (1 + 2e-9) or exact < 1e-290
            assert exact * (1 - 2e-9) <= added.base[j] <= exact or exact < 1e-290
        if last < size:
            assert exact_upper_tail(last + 1, size, rate) <= missing < 1e-39
