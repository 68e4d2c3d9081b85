"""Bound ε from below by attacks that guess whether a canary was in the training data.

A canary is an example designed to leave a trace in the model. The attacker computes a score from
the trained model, and guesses "in" if the score exceeds a threshold. If the guesses are better than
(ε, δ)-differential privacy allows, the training is not (ε, δ)-private.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import beta, binom

from optax_lsdp._checks import check_delta, check_positive, check_whole, refusal
from optax_lsdp.accounting import SampledGaussian, show_epsilon
from optax_lsdp.auditing._report import format_report

_Train = Callable[[jax.Array, jax.Array], jax.Array]
_CHUNK = 4096  # the most trainings in one call of the compiled function
_THRESHOLDS = 333  # thresholds to try, between the smallest and the largest score


@dataclass(frozen=True)
class EpsilonReport:
    """A lower bound on ε, from an attack.

    Attributes:
        claimed: the claimed ε, or None. Without a claim, the audit passes.
        epsilon: a lower bound on ε.
        gaussian_epsilon: a lower bound on ε that assumes Gaussian noise on full batches, or None if
            it was not requested.
        delta: δ.
        trials: the number of trainings, or of canaries in a single training.
        failure: an upper bound on the probability that a lower bound is wrong.
    """

    claimed: float | None
    epsilon: float
    gaussian_epsilon: float | None
    delta: float
    trials: int
    failure: float

    @property
    def passed(self) -> bool:
        """Whether no bound exceeds the claim."""
        return self.claimed is None or max(self.epsilon, self.gaussian_epsilon or 0) <= self.claimed

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        show = partial(show_epsilon, is_lower_bound=True)
        rows = {"lower bound on ε": show(self.epsilon)}
        if self.gaussian_epsilon is not None:
            rows["assuming Gaussian noise"] = show(self.gaussian_epsilon)
        if self.claimed is not None:
            rows["claimed ε"] = f"{self.claimed:g}"
        wrong = f"with probability at most {self.failure:g}"
        rows |= {"δ": f"{self.delta:g}", "trials": f"{self.trials:,}", "a bound is wrong": wrong}
        return format_report(self.passed, rows)


def audit_epsilon(
    train: _Train,
    *,
    delta: float,
    claimed: float | None = None,
    trials: int = 10_000,
    failure: float = 1e-5,
    gaussian: bool = False,
    key: jax.Array,
) -> EpsilonReport:
    """Bound ε from below: train many times with and without a canary, and compare the scores.

    Args:
        train: `train(key, is_in)` trains with the randomness of `key` and returns a score. Use
            `is_in`, a traced bool, as the mask of the canary, an example designed to leave a trace
            in the model. A good score is the inner product of the update with the canary's
            gradient. The audit calls `train` under `vmap` and `jit`. If `train` cannot be traced,
            run the trainings yourself and pass their scores to `audit_scores`.
        delta: δ.
        claimed: the ε to refute.
        trials: the number of trainings with the canary, which is also the number without it. One
            half of the scores chooses the threshold, and the other half gives the bound on ε.
        failure: an upper bound on the probability that a lower bound on ε is wrong.
        gaussian: whether to compute a second lower bound, which assumes Gaussian noise on full
            batches and needs few trials.
        key: a key, which is split into one key for each training.

    >>> def train(key, is_in):  # the canary adds 1, and the noise multiplier is 2
    ...     return is_in + 2.0 * jax.random.normal(key)
    >>> report = audit_epsilon(train, delta=1e-5, claimed=3.0, gaussian=True, key=jax.random.key(0))
    >>> bool(report), 1.0 < report.gaussian_epsilon < 3.0
    (True, True)
    """
    check_whole("trials", trials, 4)
    chunks = -(-trials // _CHUNK)
    size = -(-trials // chunks)  # equal chunks need one compilation; surplus scores are dropped

    def scores(is_in: bool) -> np.ndarray:
        keys = jax.random.split(jax.random.fold_in(key, is_in), (chunks, size))
        return np.concatenate([_scores(train, part, jnp.asarray(is_in)) for part in keys])[:trials]

    inside, outside = scores(True), scores(False)
    if inside.shape != (trials,):
        raise ValueError(f"`train` must return a number, got shape {inside.shape[1:]}.")
    return audit_scores(
        inside, outside, delta=delta, claimed=claimed, failure=failure, gaussian=gaussian
    )


@partial(jax.jit, static_argnums=0)  # repeated audits of one function compile it once
def _scores(train: _Train, keys: jax.Array, is_in: jax.Array) -> jax.Array:
    return jax.vmap(train, (0, None))(keys, is_in)


def audit_scores(
    inside: ArrayLike,
    outside: ArrayLike,
    *,
    delta: float,
    claimed: float | None = None,
    failure: float = 1e-5,
    gaussian: bool = False,
) -> EpsilonReport:
    """Bound ε from below by the scores of independent trainings with and without a canary.

    `inside` holds the scores of n trainings with the canary, and `outside` holds the scores of n
    other trainings without it. Scores with the canary may be larger or smaller. NaN counts as
    larger than any number. The other arguments are those of `audit_epsilon`.

    >>> report = audit_scores(np.ones(2000), np.zeros(2000), delta=1e-5, claimed=1.0)
    >>> report.passed
    False
    """
    check_delta("delta", delta)
    check_delta("failure", failure)
    if claimed is not None:
        check_positive("claimed", claimed)
    both = [np.asarray(scores, np.float64) for scores in (inside, outside)]
    trials = len(both[0])
    if trials < 4 or any(scores.shape != (trials,) for scores in both):
        raise ValueError(
            "`inside` and `outside` must hold the same number of scores, 4 or more, got shapes "
            f"{[scores.shape for scores in both]}."
        )
    # A failed training may reveal the canary, so NaN and ±∞ count as the largest or least score.
    finite = np.concatenate([scores[np.isfinite(scores)] for scores in both])
    least, most = (finite.min() - 1, finite.max() + 1) if finite.size else (-1.0, 1.0)
    both = [np.nan_to_num(scores, nan=most, posinf=most, neginf=least) for scores in both]
    half = trials // 2
    share = failure / (2 if gaussian else 1)  # the two bounds share the probability of failure
    seen = np.concatenate([scores[:half] for scores in both])
    thresholds = np.unique(np.quantile(seen, np.linspace(0.001, 0.999, _THRESHOLDS)))
    tests = [(sign, float(sign * x)) for sign in (1, -1) for x in thresholds]

    def bound(epsilon_of: Callable[[Rates, float], float]) -> float:
        def proved(test: tuple[int, float], part: slice) -> float:
            sign, threshold = test
            counts = [int((sign * scores[part] > threshold).sum()) for scores in both]
            return epsilon_of(rates(counts[0], counts[1], len(both[0][part]), share), delta)

        best = max(tests, key=lambda test: proved(test, slice(half)))
        return proved(best, slice(half, None))

    epsilon = bound(epsilon_of_rates)
    gaussian_epsilon = bound(epsilon_of_gaussian) if gaussian else None
    return EpsilonReport(claimed, epsilon, gaussian_epsilon, delta, 2 * trials, failure)


def audit_one_run(
    train: Callable[[jax.Array], ArrayLike],
    *,
    canaries: int,
    delta: float,
    claimed: float | None = None,
    guesses: int | None = None,
    failure: float = 1e-5,
    key: jax.Array,
) -> EpsilonReport:
    """Bound ε from below: train once with a random half of many canaries, and guess which half.

    Args:
        train: `train(is_in)` trains once, with the canaries for which the bool array `is_in` is
            true. It returns a score for each canary, larger for canaries that were used.
        canaries: the number of canaries: examples designed to leave a trace in the model. A person
            must not own two canaries. If the unit of privacy is a user, a canary is one user.
        delta: δ. The bound weakens as δ times `canaries` grows.
        claimed: the ε to refute.
        guesses: the number of guesses. Half are "in", for the canaries with the largest scores, and
            half are "out", for those with the smallest. The default is a fifth of `canaries`.
        failure: an upper bound on the probability that the lower bound on ε is wrong.
        key: the key that chooses the random half.

    >>> def train(is_in):  # far too little noise
    ...     return is_in + 0.1 * jax.random.normal(jax.random.key(1), is_in.shape)
    >>> facts = {"canaries": 100, "delta": 1e-7, "claimed": 0.1, "failure": 0.01}
    >>> bool(audit_one_run(train, **facts, key=jax.random.key(0)))
    False
    """
    check_whole("canaries", canaries, 2)
    check_delta("delta", delta)
    check_delta("failure", failure)
    guesses = max(2, canaries // 5) if guesses is None else guesses
    check_whole("guesses", guesses, 2)
    if guesses > canaries:
        raise refusal("guesses", f"at most `canaries`, {canaries}", guesses)
    is_in = np.asarray(jax.random.bernoulli(key, 0.5, (canaries,)))
    scores = np.asarray(train(jnp.asarray(is_in)), np.float64)
    scores = np.where(np.isnan(scores), np.inf, scores)  # as in `audit_scores`
    if scores.shape != (canaries,):
        raise ValueError(f"`train` must return {canaries} scores, got shape {scores.shape}.")
    order = np.argsort(scores, kind="stable")
    high, low = order[len(order) - guesses // 2 :], order[: guesses - guesses // 2]
    right = int(is_in[high].sum() + (~is_in[low]).sum())
    epsilon = one_run_epsilon(delta, canaries, guesses, right, failure)
    return EpsilonReport(claimed, epsilon, None, delta, canaries, failure)


class Rates(NamedTuple):
    """A lower bound on the true-positive rate and an upper bound on the false-positive rate."""

    true_positive: float
    false_positive: float


def rates(true_positives: int, false_positives: int, trials: int, failure: float) -> Rates:
    """Return Clopper–Pearson bounds. With probability ≥ 1 − `failure`, both bounds are right."""

    def lower(count: int) -> float:
        return float(beta.ppf(failure / 2, count, trials - count + 1)) if count else 0.0

    return Rates(lower(true_positives), 1.0 - lower(trials - false_positives))


def epsilon_of_rates(found: Rates, delta: float) -> float:
    """Return the smallest ε ≥ 0 at which an attack can have these true- and false-positive rates.

    Let TPR be the true-positive rate and FPR the false-positive rate. With (ε, δ)-privacy, every
    attack obeys TPR ≤ e^ε FPR + δ and 1 − FPR ≤ e^ε (1 − TPR) + δ.

    >>> round(epsilon_of_rates(Rates(0.5, 0.1), 0.0), 3)  # log 5
    1.609
    """

    def log_ratio(high: float, low: float) -> float:
        if high <= 0:
            return 0.0
        return math.log(high / low) if low > 0 else math.inf

    tpr, fpr = found
    return max(0.0, log_ratio(tpr - delta, fpr), log_ratio(1 - fpr - delta, 1 - tpr))


def epsilon_of_gaussian(found: Rates, delta: float) -> float:
    """Return a lower bound on ε from the rates of an attack, assuming Gaussian noise.

    Let TPR and FPR be the rates of true and false positives, and Φ the standard Gaussian
    distribution function. If the sensitivity is μ standard deviations of the noise, every threshold
    obeys Φ⁻¹(TPR) − Φ⁻¹(FPR) ≤ μ. The left side is a lower bound on μ, and ε grows with μ. This
    bound needs few trials, because it is tight even if both rates are near ½. `epsilon_of_rates` is
    tight only at thresholds with few false positives, so it needs many trials.
    """
    mu = float(ndtri(found.true_positive) - ndtri(found.false_positive))
    if not 0 < mu < math.inf:
        return math.inf if mu == math.inf else 0.0
    return SampledGaussian(1 / mu, sampling_rate=1.0, steps=1, sampling="full").epsilon(delta)


def one_run_p_value(epsilon: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """Return an upper bound on the probability of `right` or more right guesses.

    The bound holds if the run is (ε, δ)-private, and if each canary is in the run with probability
    ½, independently of the others. See Theorem 5.2 of Steinke, Nasr, Jagielski 2023, Privacy
    Auditing with One (1) Training Run.
    """
    if not right:
        return 1.0
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    before = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    slope = float(np.max(before / np.arange(1, right + 1)))
    return min(1.0, tail + 2 * canaries * delta * slope)


def one_run_epsilon(delta: float, canaries: int, guesses: int, right: int, failure: float) -> float:
    """Return the largest ε that is rejected at level `failure`, given `right` correct guesses."""

    def is_refuted(epsilon: float) -> bool:
        return one_run_p_value(epsilon, delta, canaries, guesses, right) <= failure

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high) and high < 100:
        low, high = high, 2 * high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low
