"""Truncated Poisson batches reveal no more than reported, by brute force in 40 digits."""

import mpmath
import pytest

from optax_lsdp.accounting import SampledGaussian
from tests.cases import FULL, slow
from tests.oracles import delta_of_sums, delta_of_two_steps, truncated_sum

CASES = [  # rate, dataset size, largest batch, noise multiplier
    (0.62, 12, 1, 3.0),  # almost every batch is truncated
    (0.9, 6, 2, 1.0),
    (0.999999, 5, 2, 0.8),
    (0.3, 5, 5, 1.0),  # truncated only if an example is added
    (0.05, 9, 1, 0.5),
    (0.5, 2, 1, 40.0),
    *slow(
        (1.0, 4, 2, 2.0),
        (0.4, 20, 8, 1.5),
        (0.01, 30, 1, 1.0),
        (0.97, 8, 7, 0.3),
        (0.2, 3, 2, 1e3),
        (1e-5, 6, 1, 0.25),
        (0.75, 16, 3, 10.0),
        (0.5, 1, 1, 1.0),
    ),
]
CASES = [case if hasattr(case, "marks") else pytest.param(case) for case in CASES]
RELATIONS = ("add_remove", "zero_out", "replace_one")
VALUES = (-1, 0, 1) if FULL else (-1, 0)  # contributions of the other examples
case = pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{x:g}" for x in case))
relation = pytest.mark.parametrize("relation", RELATIONS)


@pytest.fixture(autouse=True)
def forty_digits():
    with mpmath.workdps(70):  # digits; cancellation may lose 30 of them
        yield


def make_phase(case, relation, steps=1, **options):
    rate, size, most, noise = case
    return SampledGaussian(
        noise,
        rate,
        steps,
        neighbouring=relation,
        max_batch_size=most,
        dataset_size=size,
        **options,
    )


def neighbours(case, relation, values=VALUES, group=1):
    """Yield pairs of sums, in both directions; all other examples contribute the same value."""
    rate, size, most, _ = case
    for value in values:
        if relation == "add_remove":
            sizes = [(size - group, group, 0), (size, group, 0)]
        else:
            sizes = [(size - group, group, group)]
        for others, here, there in sizes:
            worth = -1 if relation == "replace_one" else 0
            one = truncated_sum(others, value, here, 1, rate, most)
            other = truncated_sum(others, value, there, worth, rate, most)
            yield one, other
            yield other, one


def worst_delta(case, relation, epsilon, values=VALUES, group=1):
    return max(
        delta_of_sums(one, other, case[-1], epsilon)
        for one, other in neighbours(case, relation, values, group)
    )


def analysed_delta(case, relation, epsilon):
    """Return δ(ε) of the analysis in exact arithmetic: the step is truncated, or it is not."""
    rate, size, most, noise = case
    rate, worst = mpmath.mpf(rate), mpmath.mpf(0)
    for others in (size - 1, size) if relation == "add_remove" else (size - 1,):
        drawn = [
            mpmath.binomial(others, n) * rate**n * (1 - rate) ** (others - n)
            for n in range(others + 1)
        ]
        truncated = sum(drawn[most:], mpmath.mpf(0))
        taken = sum(drawn[n] * rate * most / (n + 1) for n in range(most, others + 1))
        present = taken / truncated if truncated else mpmath.mpf(0)
        here, there = {0: 1 - rate, 1: rate}, {0: mpmath.mpf(1)}
        if relation == "replace_one":
            there = {0: 1 - rate, -1: rate}
        replaced = delta_of_sums({0: 1 - present, 2: present}, {0: mpmath.mpf(1)}, noise, epsilon)
        for p, q in ((here, there), (there, here)):
            ordinary = delta_of_sums(p, q, noise, epsilon)
            worst = max(worst, (1 - truncated) * ordinary + truncated * replaced)
    return worst


@relation
@case
def test_no_truncated_batch_reveals_more_than_reported(case, relation):
    phase, noise = make_phase(case, relation), case[-1]
    for scale in (0.0, 0.3, 3.0, 30.0):  # in units of the loss; the last one has a tiny δ
        epsilon = scale * min(1.0, 1 / noise)
        bound, analysed = phase.delta(epsilon), analysed_delta(case, relation, epsilon)
        assert worst_delta(case, relation, epsilon) <= bound
        assert analysed <= bound
        assert bound <= analysed * (1 + 1e-6) or analysed < 1e-12


@relation
@case
def test_lower_bounds_are_attained_if_the_others_contribute_zero(case, relation):
    phase = make_phase(case, relation)
    for delta in (1e-3, 1e-9, 1e-40):
        lower, upper = phase.epsilon_bounds(delta)
        assert lower <= upper
        assert lower == 0 or worst_delta(case, relation, lower, values=(0,)) >= delta


@relation
@pytest.mark.parametrize(
    "case", [(0.6, 5, 1, 1.0), *slow((0.9, 4, 2, 2.0), (0.999, 6, 3, 1.5), (0.2, 3, 1, 0.7))]
)
def test_no_group_in_truncated_batches_reveals_more_than_reported(case, relation):
    phase = make_phase(case, relation).group(2)
    for epsilon in (0.0, 0.7, 3.0):
        assert worst_delta(case, relation, epsilon, group=2) <= phase.delta(epsilon)


@relation
@pytest.mark.parametrize("case", [(0.62, 6, 1, 3.0), *slow((0.9, 5, 2, 2.0), (0.3, 5, 3, 1.0))])
def test_two_truncated_steps_reveal_no_more_than_reported(case, relation):
    phase, epsilon = make_phase(case, relation, steps=2), 0.1
    with mpmath.workdps(20):
        one, other = next(iter(neighbours(case, relation, values=(-1,))))
        worst = delta_of_two_steps(one, other, case[-1], epsilon)
    assert worst <= phase.delta(epsilon) * (1 + 1e-9)  # the error of the trapezoidal rule
    assert phase.delta(epsilon) <= 5 * worst  # `worst` is the δ of few datasets
