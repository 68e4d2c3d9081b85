"""Theorem 1 of the DP-LSSGD paper (Wang et al. 2019): conditions, noise, and the noise's true ε.

There are n examples, T steps and batches of b examples. G bounds the norm of one example's
gradient. For any μ in (0, 1), the theorem demands noise of variance ν² = 20TαG²/(μn²ε) on the mean
gradient, where α = log(1/δ)/((1 − μ)ε) + 1. With S = 5b²Tα/(μn²ε), its conditions are
α ≤ log(n/(b(1 + S))) and S ≥ 1.5.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from optax_lsdp._checks import check_delta, check_positive, check_whole
from optax_lsdp.accounting._bounds import narrow
from optax_lsdp.accounting._calibrate import check_batch_size
from optax_lsdp.accounting._mechanisms import SampledGaussian

_SPLITS = np.linspace(0, 1, 4001)[1:-1]  # values of μ to try


class PaperNoise(NamedTuple):
    """The noise of Theorem 1, the terms of its conditions, and the true ε.

    Attributes:
        noise_stddev: ν, the standard deviation of the noise on each entry of the *mean* gradient.
        noise_multiplier: z = νb/G, the same noise on the sum, in units of G.
        alpha: α, the order of the Rényi divergence.
        mu: μ in (0, 1), the share of ε that bounds the Rényi divergence. The conversion from Rényi
            divergence to (ε, δ) takes the rest of ε.
        largest_alpha: log(n/(b(1 + S))). The first condition is α ≤ largest_alpha.
        spread: S = 5b²Tα/(μn²ε). The second condition is S ≥ 1.5.
        holds: whether both conditions hold.
        poisson_epsilon: the true ε of this noise with sampling="poisson" and
            neighbouring="add_remove".
        fixed_size_epsilon: an upper bound on the true ε of this noise with
            sampling="without_replacement" and neighbouring="replace_one".
    """

    noise_stddev: float
    noise_multiplier: float
    alpha: float
    mu: float
    largest_alpha: float
    spread: float
    holds: bool
    poisson_epsilon: float
    fixed_size_epsilon: float


def paper_noise(
    *,
    epsilon: float,
    delta: float,
    dataset_size: int,
    batch_size: int,
    steps: int,
    lipschitz: float,
    mu: float | None = None,
    number_alone: bool = False,
) -> PaperNoise:
    """Return the noise of the paper's Theorem 1. Raise a ValueError if its conditions fail.

    `lipschitz` is G, a bound on the norm of each example's gradient, such as the clip norm. If `mu`
    is None, try a grid of μ, and use the μ that satisfies the conditions with the least noise. With
    `number_alone`, return the noise even if the conditions fail. The theorem then guarantees
    nothing, but the result still contains the true ε.

    >>> noise = paper_noise(
    ...     epsilon=0.1,
    ...     delta=1e-5,
    ...     dataset_size=60_000,
    ...     batch_size=128,
    ...     steps=23_450,
    ...     lipschitz=1.0,
    ...     number_alone=True,
    ... )
    >>> round(noise.noise_multiplier, 2), noise.holds, round(noise.poisson_epsilon, 4)
    (99.36, False, 0.0078)
    """
    check_positive("epsilon", epsilon)
    check_delta("delta", delta)
    check_positive("lipschitz", lipschitz)
    check_whole("steps", steps)
    check_batch_size(batch_size, dataset_size)
    if mu is not None:
        check_delta("mu", mu)
    splits = _SPLITS if mu is None else np.array([mu])
    terms_at = partial(
        _terms, mu=splits, delta=delta, size=dataset_size, batch=batch_size, steps=steps
    )
    noise, terms = terms_at(epsilon)
    if not (terms["holds"].any() or number_alone):
        raise ValueError(_refusal(terms_at, epsilon))
    allowed = terms["holds"] if terms["holds"].any() else True
    best = int(np.argmin(np.where(allowed, noise, math.inf)))
    noise_multiplier = float(noise[best]) * batch_size
    poisson = SampledGaussian(noise_multiplier, batch_size / dataset_size, steps)
    fixed_size = replace(poisson, sampling="without_replacement", neighbouring="replace_one")
    return PaperNoise(
        noise_stddev=float(noise[best]) * lipschitz,
        noise_multiplier=noise_multiplier,
        poisson_epsilon=poisson.epsilon(delta),
        fixed_size_epsilon=fixed_size.epsilon(delta),
        **{name: values[best].item() for name, values in terms.items()},
    )


_Terms = tuple[np.ndarray, dict[str, np.ndarray]]


def _terms(
    epsilon: float, mu: np.ndarray, delta: float, size: int, batch: int, steps: int
) -> _Terms:
    """Return, at each μ, the noise ν for G = 1 and the terms of both conditions."""
    with np.errstate(over="ignore", divide="ignore"):  # ∞ fails the first condition
        alpha = -math.log(delta) / ((1 - mu) * epsilon) + 1
        share = steps * alpha / (mu * size**2 * epsilon)
        spread = 5 * batch**2 * share
        largest = np.log(size / (batch * (1 + spread)))
    holds = (alpha <= largest) & (spread >= 1.5)
    terms = dict(alpha=alpha, mu=mu, largest_alpha=largest, spread=spread, holds=holds)
    return np.sqrt(20 * share), terms


def _refusal(terms_at: Callable[[float], _Terms], epsilon: float) -> str:
    """Return a message that says how far the conditions fail, and at which ε they first hold."""

    def holds(epsilon: float) -> bool:
        return bool(terms_at(epsilon)[1]["holds"].any())

    alpha, mu, largest, spread, _ = terms_at(epsilon)[1].values()
    best = int(np.argmin(np.maximum(alpha - largest, 1.5 - spread)))
    rising, remedy = np.geomspace(epsilon, 1e4 * epsilon, 2000), ""
    if (high := next(filter(holds, rising), None)) is not None:
        first = narrow(high * rising[0] / rising[1], high, holds, 1e-4)
        remedy = f"raise `epsilon` to {first:.2f}, where both first hold, or "
    return (
        f"`epsilon` must satisfy both conditions of Theorem 1, got {epsilon!r}: at the best μ, "
        f"{mu[best]:.3f}, α = {alpha[best]:.2f} must be at most {largest[best]:.2f}, and "
        f"S = {spread[best]:.3g} at least 1.5; {remedy}use calibrate_noise_multiplier, which has "
        "no such conditions."
    )
