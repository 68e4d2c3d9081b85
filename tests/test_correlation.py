"""Correlations have the errors, norms and sensitivities of their dense matrices."""

import itertools
import math
import subprocess
import sys

import jax
import numpy as np
import pytest
from scipy.signal import lfilter

from benchmarks._banded import best
from optax_lsdp.correlation import (
    Correlation,
    Workload,
    banded_inverse,
    independent,
    least_error,
    optimize_banded,
    square_root,
)
from tests.oracles import largest_movement, toeplitz_dense, workload_dense

STEPS = 40
RATES = tuple(np.cos(np.linspace(0, np.pi / 2, STEPS)))
WORKLOADS = {
    "prefix sum": Workload(),
    "momentum": Workload(0.9),
    "decay": Workload(learning_rates=RATES),
    "momentum and decay": Workload(0.5, RATES),
}
MADE = {
    "independent": independent(STEPS),
    "square root": square_root(STEPS, 5),
    "square root with momentum": square_root(STEPS, STEPS, momentum=0.9),
    "optimized": optimize_banded(STEPS, 5),
    "optimized maximum": optimize_banded(STEPS, 5, error="max"),
    "optimized for decay": optimize_banded(STEPS, 5, workload=WORKLOADS["momentum and decay"]),
    "inverse": banded_inverse(STEPS, 4, power=0.5),
    "inverse of two bands": banded_inverse(STEPS, 2),
    "inverse with momentum": banded_inverse(STEPS, 3, min_separation=8, workload=Workload(0.9)),
    "signs": Correlation(STEPS, (0.5, -0.5, 0.3)),
}
ROUNDING = 1e-10  # sums of 40 terms in float64, of matrices with entries below 100


@pytest.mark.parametrize("correlation", MADE.values(), ids=list(MADE))
def test_errors_are_the_squared_norms_of_rows_of_a_dense_product(correlation):
    inverse = np.linalg.inv(toeplitz_dense(correlation.column()))
    np.testing.assert_allclose(inverse[:, 0], correlation.noise_column(), atol=ROUNDING)
    for workload in WORKLOADS.values():
        dense = workload_dense(STEPS, workload.momentum, workload.learning_rates)
        expected = np.square(dense @ inverse).sum(axis=1)
        np.testing.assert_allclose(correlation.squared_errors(workload), expected, rtol=1e-9)


@pytest.mark.parametrize("correlation", MADE.values(), ids=list(MADE))
def test_no_column_has_a_norm_above_one(correlation):
    norms = np.linalg.norm(toeplitz_dense(correlation.column()), axis=0)
    assert norms.max() <= 1 + 1e-15
    assert norms.argmax() == 0


@pytest.mark.parametrize(
    ("workload", "error"),
    [(name, "mean") for name in WORKLOADS] + [("prefix sum", "max"), ("momentum", "max")],
)
def test_no_small_change_of_an_optimized_correlation_has_a_smaller_error(workload, error):
    workload = WORKLOADS[workload]
    best = optimize_banded(STEPS, 5, workload=workload, error=error)
    draw = np.random.default_rng(0)

    def measured(coefficients):
        scaled = tuple(coefficients / np.linalg.norm(coefficients) * (1 - 1e-15))
        return getattr(Correlation(STEPS, scaled).squared_errors(workload), error)()

    least = measured(np.array(best.coefficients))
    for size in (1e-3, 1e-2, 0.1):
        for _ in range(20):
            changed = np.array(best.coefficients) + size * draw.normal(size=5)
            assert measured(changed) >= least * (1 - 1e-9)  # the search stops at 1e-12
    assert least >= least_error(STEPS, workload)


PEERS_VALUES = [  # `jax_privacy.matrix_factorization` 2.0, optimize_banded_toeplitz, in float64
    (2000, 8, "mean", 134.09541992819655),
    (2000, 8, "max", 261.3679453992285),
    (2000, 32, "mean", 42.02465456957093),
    (2000, 32, "max", 76.26741546179883),
]


@pytest.mark.parametrize(("steps", "bands", "error", "expected"), PEERS_VALUES)
def test_an_optimized_correlation_is_as_good_as_the_best_known(steps, bands, error, expected):
    found = getattr(optimize_banded(steps, bands, error=error).squared_errors(), error)()
    assert found <= expected * (1 + 1e-9)


@pytest.mark.parametrize(("steps", "bands"), [(64, 1), (64, 4), (100, 8), (60, 60)])
def test_no_banded_matrix_is_much_better_than_the_optimized_one(steps, bands):
    """The certified optimum of BandMF (arXiv 2306.08153), over all banded matrices."""
    found = best(steps, bands)
    # The bound holds for every banded matrix, so the best one is found; both round sums of squares.
    assert found.bound * (1 - 1e-9) <= found.error <= found.bound * (1 + 1e-6)
    assert least_error(steps) <= found.bound * (1 + 1e-9)
    if (steps, bands) == (64, 4):  # `jax_privacy.matrix_factorization` 2.0, banded.optimize
        assert found.error == pytest.approx(10.318086758791239, rel=1e-9)
    ours = optimize_banded(steps, bands).squared_errors().mean()
    # A Toeplitz matrix loses a share of about bands/steps: its last columns are too short.
    assert found.bound * (1 - 1e-9) <= ours <= found.bound * (1 + bands / steps)


@pytest.mark.parametrize("steps", [16, 256])
def test_with_all_bands_the_largest_error_is_the_published_optimum(steps):
    """(Σₖ fₖ²)² with fₖ = C(2k, k)/4ᵏ: arXiv 2202.11205, optimal by arXiv 2404.16706."""
    roots = np.array([math.comb(2 * k, k) / 4**k for k in range(steps)])
    published = (roots @ roots) ** 2
    for found in (square_root(steps, steps), optimize_banded(steps, steps, error="max")):
        assert found.squared_errors().max() == pytest.approx(published, rel=1e-9)
    for bands in (1, 4, steps - 1):
        fewer = optimize_banded(steps, bands, error="max").squared_errors().max()
        assert fewer >= published * (1 - 1e-9)


def test_jax_privacy_finds_the_same_correlation():
    toeplitz = pytest.importorskip("jax_privacy.matrix_factorization.toeplitz")
    with jax.numpy_dtype_promotion("standard"):
        theirs = toeplitz.optimize_banded_toeplitz(64, 4)
        error = float(toeplitz.per_query_error(strategy_coef=theirs, n=64).mean())
    ours = optimize_banded(64, 4)
    np.testing.assert_allclose(ours.coefficients, theirs, atol=1e-3)  # they search in float32
    assert ours.squared_errors().mean() <= error * (1 + 1e-5)


def test_the_bound_on_all_errors_is_that_of_the_singular_values():
    for workload in WORKLOADS.values():
        dense = workload_dense(STEPS, workload.momentum, workload.learning_rates)
        expected = (np.linalg.norm(dense, "nuc") / STEPS) ** 2
        assert least_error(STEPS, workload) == pytest.approx(expected, rel=1e-9)


def test_the_whole_square_root_is_the_square_root_of_the_workload():
    for momentum in (0.0, 0.9):
        whole = toeplitz_dense(square_root(STEPS, STEPS, momentum=momentum).column())
        expected = workload_dense(STEPS, momentum)
        np.testing.assert_allclose(whole @ whole / whole[0, 0] ** 2, expected, rtol=1e-9)
        inverse = banded_inverse(STEPS, STEPS, power=0.5, workload=Workload(momentum))
        # The ratios of the inverse's coefficients are rounded to float32, by 6e-8.
        np.testing.assert_allclose(toeplitz_dense(inverse.column()), whole, atol=1e-6)


def test_the_search_for_a_power_does_not_overflow():
    workload = Workload(0.9)
    with pytest.raises(ValueError, match="`power` must be small enough"):
        banded_inverse(10**4, 3, power=0.8, workload=workload)
    with np.errstate(all="raise", under="ignore"):
        found = banded_inverse(10**4, 3, workload=workload)
    least, most = (x.squared_errors(workload).mean() for x in (found, independent(10**4)))
    assert least_error(100, workload) < least < most / 100


def test_more_bands_are_never_worse_even_if_learning_rates_fall_to_nearly_zero():
    falling = Workload(0.9, tuple(0.5 * 0.1 ** (np.arange(200) / 10)))
    found = [optimize_banded(200, bands, workload=falling) for bands in (1, 16, 64)]
    errors = [one.squared_errors(falling).mean() for one in found]
    assert errors[0] > errors[1] >= errors[2] * (1 - 1e-6)


@pytest.mark.parametrize("scale", [1e-170, 1e200])
def test_only_the_ratios_of_learning_rates_matter(scale):
    scaled = Workload(0.5, tuple(scale * rate for rate in RATES))
    expected = optimize_banded(STEPS, 5, workload=WORKLOADS["momentum and decay"])
    np.testing.assert_allclose(
        optimize_banded(STEPS, 5, workload=scaled).coefficients, expected.coefficients, rtol=1e-6
    )


@pytest.mark.parametrize("seed", range(20))
def test_who_follows_the_remedy_for_a_large_norm_is_not_refused_again(seed):
    large = np.random.default_rng(seed).uniform(0.5, 0.8, 9).astype(np.float32)
    with pytest.raises(ValueError, match="divide all by") as caught:
        Correlation(9, large)
    norm = float(str(caught.value).partition("divide all by ")[2].split()[0])
    assert np.linalg.norm(Correlation(9, np.float64(large) / norm).column()) == pytest.approx(1)


def test_an_inverse_of_two_bands_subtracts_a_part_of_the_last_draw():
    first, second = banded_inverse(STEPS, 2, power=0.7).coefficients
    assert second / first == pytest.approx(-0.7)


@pytest.mark.parametrize(
    "correlation",
    [
        banded_inverse(10**5, 2, power=0.99999),
        banded_inverse(10**5, 2),
        banded_inverse(10**4, 3, power=0.3, workload=Workload(0.9)),
        Correlation(10**4, (2e3, -2e3 * 1.00015501), is_inverse=True),
    ],
)
def test_a_banded_inverse_in_float32_has_no_column_above_norm_one(correlation):
    # The noise of a step is c₀·Σₖ (cₖ/c₀)·zₜ₋ₖ, with c₀ and the ratios in float32.
    coefficients = np.array(correlation.coefficients)
    first = float(np.float32(coefficients[0]))
    narrow = first * np.float64(np.float32(coefficients / coefficients[0]))
    drawn = lfilter([1.0], narrow, np.r_[1.0, np.zeros(correlation.steps - 1)])
    assert np.linalg.norm(drawn) <= 1
    np.testing.assert_allclose(drawn, correlation.column(), rtol=1e-9)
    again = Correlation(correlation.steps, correlation.coefficients, is_inverse=True)
    assert again == correlation


def test_a_rounded_banded_correlation_has_no_larger_sensitivity_than_claimed():
    exact = Correlation(9, (0.5, -0.4, -0.4, 0.5))  # uses three steps apart do not cancel
    changed = np.array(exact.coefficients) * (1 + 1.2e-7 * np.array([1, 1, -1, -1]))
    for separation in (1, 2, 3):
        worst = largest_movement(toeplitz_dense(np.r_[changed, np.zeros(5)]), separation)
        assert worst <= exact.sensitivity(separation)


@pytest.mark.parametrize("separation", [1, 2, 3, 5, 9])
def test_sensitivity_is_that_of_the_worst_pattern_of_uses(separation):
    exact = {
        "banded, with signs": Correlation(9, (0.5, -0.5, 0.3)) if separation >= 3 else None,
        "banded, increasing": Correlation(9, (0.3, 0.5)) if separation >= 2 else None,
        "decreasing": square_root(9, 4),
        "inverse": banded_inverse(9, 3),
    }
    for name, correlation in exact.items():
        if correlation is not None:
            worst = largest_movement(toeplitz_dense(correlation.column()), separation)
            assert correlation.sensitivity(separation) == pytest.approx(worst, rel=2e-9), name
            assert correlation.sensitivity(separation) >= worst, name


@pytest.mark.parametrize("separation", [1, 2])
def test_sensitivity_without_an_exact_answer_is_an_upper_bound(separation):
    # Uses of the last one are worst three steps apart, not two.
    for coefficients in ((0.5, -0.5, 0.3), (0.3, 0.5, 0.6), (0.6, 0.0, 0.0, 0.6)):
        correlation = Correlation(9, coefficients)
        worst = largest_movement(toeplitz_dense(correlation.column()), separation)
        assert worst <= correlation.sensitivity(separation) <= 1.5 * worst


@pytest.mark.parametrize("separation", [1, 2, 3])
def test_the_bound_without_an_exact_answer_is_that_of_all_sets_of_uses(separation):
    """The bound is the largest sum of |CᵀC| in which uses are so many steps apart, row by row."""
    for coefficients in ((0.5, -0.5, 0.3, 0.1), (0.6, 0.0, 0.0, 0.6)):
        correlation = Correlation(7, coefficients)
        dense = toeplitz_dense(correlation.column())
        gram = np.abs(dense.T @ dense) + 1e-6 * np.abs(dense).T @ np.abs(dense)
        sets = [s for n in (1, 2, 3, 4, 5, 6, 7) for s in itertools.combinations(range(7), n)]
        sets = [np.array(s) for s in sets if (np.diff(s) >= separation).all()]
        worst_of_row = np.max([gram[:, s].sum(axis=1) for s in sets], axis=0)
        expected = np.sqrt(max(worst_of_row[s].sum() for s in sets))
        found, curve = correlation.sensitivity(separation), correlation.sensitivities(separation)
        assert expected <= found <= expected * (1 + 3e-9)
        assert curve[-1] == found and (np.diff(curve) >= 0).all()


def test_the_sensitivity_of_fewer_steps_is_that_of_a_shorter_run():
    for correlation in (square_root(9, 4), banded_inverse(9, 3), Correlation(9, (0.5, -0.5, 0.3))):
        dense = toeplitz_dense(correlation.column())[:6, :6]
        for separation in (3, 6):
            worst = largest_movement(dense, separation)
            assert worst <= correlation.sensitivity(separation, steps=6) <= worst * (1 + 1e-3)
    assert independent(9).sensitivity(3, steps=0) == 0


def test_the_chosen_power_is_the_best():
    for separation in (None, 10):

        def error(correlation, separation=separation):
            uses = correlation.sensitivity(separation or STEPS)
            return correlation.squared_errors().mean() * uses**2

        best = error(banded_inverse(STEPS, 3, min_separation=separation))
        for power in np.linspace(0, 1, 21):
            assert best <= error(banded_inverse(STEPS, 3, power=float(power))) * (1 + 1e-6)


BAD = {
    "norm": (
        lambda: Correlation(4, (1.0, 0.5)),
        r"norm above 1, got \(1.0, 0.5\); divide all by 1.118",
    ),
    "norm of the inverse": (
        lambda: Correlation(4, (1.0, -0.5), is_inverse=True),
        "norm above 1, got .*; multiply all by 1.15",
    ),
    "matrix": (
        lambda: Correlation(2, np.array([[0.8, 0.6], [0.1, 0.8]])),  # not lower-triangular
        r"`coefficients` must be .* lower-triangular .* got array\(\[\[0.8, 0.6\], \[0.1",
    ),
    "diagonal": (lambda: Correlation(4, (0.0, 0.5)), "`coefficients` .* positive diagonal, got"),
    "no coefficients": (lambda: Correlation(4, ()), r"`coefficients` .* got \(\)"),
    "NaN": (lambda: Correlation(4, (float("nan"),)), "`coefficients` .* got"),
    "explosive": (lambda: Correlation(1000, (0.6, 0.8)), "inverse has no entry above 1e.06, got"),
    "text": (lambda: Correlation(4, "abc"), "`coefficients` .* got 'abc'"),
    "numbers as text": (lambda: Correlation(4, ("1",)), "`coefficients` .* got"),
    "complex": (lambda: Correlation(4, (1j,)), "`coefficients` .* got"),
    "ragged": (lambda: Correlation(4, (1, (2, 3))), "`coefficients` .* got"),
    "dict": (lambda: Correlation(4, {1: 2}), "`coefficients` .* got"),
    "text for a bool": (lambda: Correlation(4, (1,), "no"), "`is_inverse` must be True or False"),
    "rate of NaN": (lambda: Workload(0, (1.0, float("nan"))), "`learning_rates` .* finite"),
    "no rates": (lambda: Workload(0, ()), r"`learning_rates` .* got \(\)"),
    "one rate": (lambda: Workload(0, 0.1), "`learning_rates` .* got 0.1"),
    "rates as text": (lambda: Workload(0, ("a",)), "`learning_rates` .* got"),
    "no workload": (lambda: optimize_banded(4, 2, workload=None), "a Workload, got None"),
    "a workload of a number": (lambda: banded_inverse(4, 2, workload=0.9), "a Workload, got 0.9"),
    "errors of no workload": (lambda: independent(4).squared_errors(None), "a Workload, got None"),
    "least error of no workload": (lambda: least_error(4, None), "a Workload, got None"),
    "no exact sensitivity": (
        lambda: Correlation(6000, (0.6, -0.5)).sensitivity(1),
        "`steps` .* at most the limit for columns of C that grow or change sign, 5000, got 6000",
    ),
    "more coefficients than steps": (lambda: Correlation(1, (0.8, 0.6)), "at most .* 1, got 2"),
    "more bands than steps": (lambda: square_root(4, 5), "`bands` .* number of steps, 4, got 5"),
    "no bands": (lambda: optimize_banded(4, 0), "`bands` .* 1 or more, got 0"),
    "power": (lambda: banded_inverse(4, 2, power=2.0), "`power` must be from 0 to 1, got 2.0"),
    "momentum": (lambda: Workload(1.0), "`momentum` .* below 1, got 1.0"),
    "rates": (lambda: Workload(learning_rates=(1.0, -1.0)), "`learning_rates` .* none below 0"),
    "number of rates": (
        lambda: optimize_banded(4, 2, workload=Workload(learning_rates=(1.0,))),
        "`learning_rates` .* steps, 4, got 1",
    ),
    "largest error with rates": (
        lambda: optimize_banded(2, 2, workload=Workload(0, (1.0, 0.5)), error="max"),
        "`learning_rates` must be None with error='max'",
    ),
    "separation": (lambda: independent(4).sensitivity(0), "`min_separation` .* got 0"),
    "beyond the end": (lambda: independent(4).sensitivity(1, steps=5), "`steps` .* 4, got 5"),
}


@pytest.mark.parametrize(("call", "sentence"), BAD.values(), ids=list(BAD))
def test_bad_input_is_answered_in_one_sentence(call, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        call()
    assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_correlations_need_no_jax():
    script = (
        "import sys; sys.modules.update(jax=None, jaxlib=None, optax=None)\n"
        "from optax_lsdp.correlation import optimize_banded; optimize_banded(10, 2)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_banded_inverse_is_found_for_many_steps_with_momentum():
    """The search meets matrices whose sensitivity has no analysis for so many steps."""
    found = banded_inverse(6000, 4, min_separation=100, workload=Workload(0.9))
    assert found.sensitivity(100) > 1


def test_a_flag_of_numpy_is_a_flag():
    one, other = (Correlation(10, (1.3, -0.3), flag) for flag in (np.bool_(True), True))
    assert repr(one) == repr(other)
