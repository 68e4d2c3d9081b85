"""Canaries: a training function goes in, a lower bound on the ε that it really has comes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._checks import check_delta, check_positive, check_whole
from optax_lsdp.accounting import show_epsilon
from optax_lsdp.auditing._bounds import (
    Rates,
    epsilon_of_gaussian,
    epsilon_of_rates,
    one_run_epsilon,
    rates,
)
from optax_lsdp.auditing._report import Report

_AT_A_TIME = 4096  # trainings that are mapped together


@dataclass(frozen=True)
class EpsilonReport(Report):
    """How much privacy an attack has disproved.

    Attributes:
        claimed: the ε that is claimed, or None, which passes whatever is found.
        epsilon: no smaller ε can be true, but for `failure`.
        gaussian_epsilon: the same if the mechanism is Gaussian, as `add_gaussian_noise` is for
            full batches; None where it does not apply.
        delta: δ.
        trials: how many trainings, or canaries in one of them.
        failure: the probability that this audit is wrong.
    """

    claimed: float | None
    epsilon: float
    gaussian_epsilon: float | None
    delta: float
    trials: int
    failure: float

    @property
    def passed(self) -> bool:
        """Whether the claim stands."""
        return self.claimed is None or max(self.epsilon, self.gaussian_epsilon or 0) <= self.claimed

    def lines(self) -> dict[str, str]:
        """Return what is printed."""
        found = {"ε is at least": show_epsilon(self.epsilon, is_lower_bound=True)}
        if self.gaussian_epsilon is not None:
            bound = show_epsilon(self.gaussian_epsilon, is_lower_bound=True)
            found["if it is Gaussian"] = bound
        if self.claimed is not None:
            found["claimed"] = f"{self.claimed:g}"
        found["at δ"] = f"{self.delta:g}"
        found["trials"] = f"{self.trials:,}, wrong with probability {self.failure:g}"
        return found


def audit_epsilon(
    train: Callable[[jax.Array, jax.Array], jax.Array],
    *,
    delta: float,
    claimed: float | None = None,
    trials: int = 10_000,
    failure: float = 1e-5,
    gaussian: bool = False,
    key: jax.Array,
) -> EpsilonReport:
    """Train many times with and without a canary, and tell by how much the results differ.

    Args:
        train: `train(key, is_in)`: trains with fresh randomness, with the canary or without it
            (`is_in` is a traced bool; use a mask), and returns a score that tells whether the
            canary is in, such as the inner product of the update with its gradient. It is mapped
            and compiled; `audit_scores` takes the scores of trainings that cannot be.
        delta: δ.
        claimed: the ε that is to be disproved.
        trials: how many trainings with, and as many without. Half of them choose the threshold
            that would have proved most.
        failure: the probability that the bound is wrong.
        gaussian: whether a bound is also computed that holds for Gaussian mechanisms alone; it
            needs far fewer trials.
        key: of all trainings.

    >>> def train(key, is_in):  # a sum whose noise is twice what the canary adds
    ...     return is_in + 2.0 * jax.random.normal(key)
    >>> report = audit_epsilon(train, delta=1e-5, claimed=3.0, gaussian=True, key=jax.random.key(0))
    >>> bool(report), 1.0 < report.gaussian_epsilon < 3.0
    (True, True)
    """
    check_whole("trials", trials, 4)
    scores = []
    for is_in in (True, False):
        keys = jax.random.split(jax.random.fold_in(key, is_in), trials)
        parts = [
            np.asarray(_mapped(train, keys[i : i + _AT_A_TIME], jnp.asarray(is_in)), np.float64)
            for i in range(0, trials, _AT_A_TIME)
        ]
        scores.append(np.concatenate(parts))
    if scores[0].shape != (trials,):
        raise ValueError(f"`train` must return a number, got shape {scores[0].shape[1:]}.")
    options: Any = {"delta": delta, "claimed": claimed, "failure": failure, "gaussian": gaussian}
    return audit_scores(*scores, **options)


@partial(jax.jit, static_argnums=0)  # compiled once for a training, however often it is audited
def _mapped(train: Callable[[Any, Any], Any], keys: jax.Array, is_in: jax.Array) -> jax.Array:
    return jax.vmap(train, (0, None))(keys, is_in)


def audit_scores(
    inside: Any,
    outside: Any,
    *,
    delta: float,
    claimed: float | None = None,
    failure: float = 1e-5,
    gaussian: bool = False,
) -> EpsilonReport:
    """Bound ε by the scores of trainings with and without a canary, however they were made.

    Args:
        inside: (n,) scores of independent trainings with the canary. Larger or smaller ones may
            give it away; NaN counts as larger than any other.
        outside: (n,) scores of as many trainings without it.
        delta: as in `audit_epsilon`.
        claimed: as in `audit_epsilon`.
        failure: as in `audit_epsilon`.
        gaussian: as in `audit_epsilon`.

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
        shapes = [scores.shape for scores in both]
        raise ValueError(
            f"`inside` and `outside` must hold as many scores, 4 or more, got shapes {shapes}."
        )
    both = _ranked(both)
    half = trials // 2
    share = failure / (2 if gaussian else 1)
    chosen = np.concatenate([scores[:half] for scores in both])
    places = np.unique(np.quantile(chosen, np.linspace(0.001, 0.999, 333)))

    def bound(measure: Callable[[Rates, float], float]) -> float:
        def proved(sign: int, threshold: float, part: slice) -> float:
            counts = [int((sign * scores[part] > threshold).sum()) for scores in both]
            return measure(rates(counts[0], counts[1], len(both[0][part]), share), delta)

        tests = [(sign, float(sign * place)) for sign in (1, -1) for place in places]
        best = max(tests, key=lambda test: proved(test[0], test[1], slice(half)))
        return proved(best[0], best[1], slice(half, None))

    return EpsilonReport(
        claimed,
        bound(epsilon_of_rates),
        bound(epsilon_of_gaussian) if gaussian else None,
        delta,
        2 * trials,
        failure,
    )


def _ranked(both: list[np.ndarray]) -> list[np.ndarray]:
    """Return scores with finite ones in place of others: a training that breaks tells something."""
    finite = np.concatenate(both)
    finite = finite[np.isfinite(finite)]
    least, most = (finite.min() - 1, finite.max() + 1) if finite.size else (-1.0, 1.0)
    return [np.nan_to_num(part, nan=most, posinf=most, neginf=least) for part in both]


def audit_one_run(
    train: Callable[[jax.Array], Any],
    *,
    canaries: int,
    delta: float,
    claimed: float | None = None,
    guesses: int | None = None,
    failure: float = 1e-5,
    key: jax.Array,
) -> EpsilonReport:
    """Train once with about half of many canaries, guess which were in, and bound ε by the score.

    Args:
        train: `train(is_in)`: trains once, with those canaries for which the array says so, and
            returns a score for each of them, larger when it is in.
        canaries: how many there are. They must be examples of their own, at most one per person.
        delta: δ. The larger δ times `canaries` is, the less is proved.
        claimed: the ε that is to be disproved.
        guesses: how many are made, of the largest and the smallest scores; by default a fifth.
        failure: the probability that the bound is wrong.
        key: of the choice who is in.

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
        raise ValueError(f"`guesses` must be at most the {canaries} canaries, got {guesses}.")
    is_in = np.asarray(jax.random.bernoulli(key, 0.5, (canaries,)))
    scores = np.asarray(train(jnp.asarray(is_in)), np.float64)
    scores = np.where(np.isnan(scores), np.inf, scores)  # a training that breaks tells something
    if scores.shape != (canaries,):
        raise ValueError(f"`train` must return {canaries} scores, got shape {scores.shape}.")
    order = np.argsort(scores, kind="stable")
    high, low = order[len(order) - guesses // 2 :], order[: guesses - guesses // 2]
    right = int(is_in[high].sum() + (~is_in[low]).sum())
    epsilon = one_run_epsilon(delta, canaries, guesses, right, failure)
    return EpsilonReport(claimed, epsilon, None, delta, canaries, failure)
