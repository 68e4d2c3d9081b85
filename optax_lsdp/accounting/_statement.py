"""The guarantee in plain words: who is protected from what, and what is assumed."""

import math
import textwrap
from dataclasses import replace
from typing import NamedTuple

from optax_lsdp._schemes import RELATIONS, SCHEMES
from optax_lsdp.accounting._analysis import steps_per_epoch
from optax_lsdp.accounting._composition import Mechanism
from optax_lsdp.accounting._mechanisms import CorrelatedGaussian

_LARGE = 8.0  # above this ε, the statement says that ε promises little


def statement(
    mechanism: Mechanism | CorrelatedGaussian, delta: float, *, reserved: float = 0.0
) -> str:
    """Return in plain words what a mechanism guarantees at δ, and every assumption.

    Its phases may differ only in noise and length. `reserved` is a part of δ that covers events
    outside of the mechanism; the noise must achieve ε at δ − `reserved`.

    >>> from optax_lsdp.accounting import SampledGaussian
    >>> print(statement(SampledGaussian(1.1, 256 / 60_000, 14_100), 1e-5).splitlines()[0])
    ε = 2.386 at δ = 1e-05.
    """
    epsilon = mechanism.epsilon(delta - reserved)
    if isinstance(mechanism, CorrelatedGaussian):
        facts = _correlated_facts(mechanism)
    else:
        facts = _facts(mechanism)
    is_large = epsilon > _LARGE
    factor = "e^" + show_epsilon(epsilon) if is_large else show_epsilon(math.exp(epsilon))
    meaning = (
        "An attacker sees everything that training releases, the model after every step and all "
        f"settings, and tries to find out {facts.secret}. Nothing that they could conclude becomes "
        f"more than {factor} times as probable, except with a probability of {delta:g}."
    )
    if is_large:
        meaning += " So large an ε promises little; more noise or fewer steps make it smaller."
    assumed = [
        f"{facts.steps:,} step{'s' if facts.steps > 1 else ''}; {facts.batches};",
        "the contribution of each example to a step's sum is clipped to a norm of C;",
        f"{facts.noise};",
        "a mean divides by the expected batch size, not by the realised one;",
        "no setting was chosen by looking at these data;",
        "arithmetic is exact.",
    ]
    at_most = "" if facts.is_tight else " at most (an upper bound; the exact value is not known)"
    title = f"ε = {show_epsilon(epsilon)} at δ = {delta:g}{at_most}."
    lines = [title, "", *textwrap.wrap(meaning, 88), "", "Assumed:"]
    for one in assumed:
        lines += textwrap.wrap(one, 88, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


class _Facts(NamedTuple):
    """What a statement says about a mechanism, in words."""

    steps: int
    secret: str
    batches: str
    noise: str
    is_tight: bool


def _facts(mechanism: Mechanism) -> _Facts:
    phase, noises = mechanism.phases[0], [one.noise_multiplier for one in mechanism.phases]
    alike = {replace(one, steps=1, noise_multiplier=1.0) for one in mechanism.phases}
    if len(alike) > 1:
        raise ValueError(
            "`mechanism` must sample in the same way in all its phases, got phases that differ in "
            "more than noise and length; call `epsilon` for the total, and `statement` per phase."
        )
    scheme = SCHEMES[phase.sampling]
    least, most = (f"{float(show_epsilon(z, 6)):g}·C" for z in (min(noises), max(noises)))
    noise = least if least == most else f"{least} to {most}, as scheduled,"
    secret = RELATIONS[phase.neighbouring].secret
    if phase.group_size > 1:
        secret += f", or any {phase.group_size} examples that change together"
    batches = scheme.describe(f"{phase.sampling_rate:.4g}", f"{steps_per_epoch(phase)}")
    if phase.max_batch_size is not None:
        batches += f"; of a larger batch, {phase.max_batch_size:,} examples are kept at random"
    return _Facts(
        steps=sum(one.steps for one in mechanism.phases),
        secret=secret,
        batches=batches,
        noise=f"Gaussian noise of standard deviation {noise} is added to the sum, fresh in every "
        "step",
        is_tight=scheme.tight and phase.max_batch_size is None,
    )


def _correlated_facts(mechanism: CorrelatedGaussian) -> _Facts:
    rate, cycle = mechanism.sampling_rate, mechanism.cycle
    is_independent = mechanism.neighbouring == "add_remove"
    chosen = "at random, independently of all else," if is_independent else "beforehand"
    batches = (
        f"two uses of an example are at least {mechanism.min_separation} steps apart, in an order "
        "that may be known"
        if rate is None or cycle is None
        else f"each example is assigned {chosen} to one of {cycle} parts of the data; step t draws "
        f"each example of part t mod {cycle} with probability {min(1.0, rate * cycle):.4g}, "
        "independently of all else"
    )
    return _Facts(
        steps=mechanism.steps,
        secret=RELATIONS[mechanism.neighbouring].secret,
        batches=batches,
        noise=f"Gaussian noise of standard deviation {mechanism.noise_multiplier:g}·C is "
        "multiplied by the inverse of a lower-triangular matrix with "
        f"{mechanism.correlation.bands} bands and no column of norm above 1, and added to the sums",
        is_tight=False,
    )


def show_epsilon(epsilon: float, digits: int = 4, *, is_lower_bound: bool = False) -> str:
    """Return the first `digits` digits of ε, rounded up. With `is_lower_bound`, round down.

    >>> show_epsilon(2.38512), show_epsilon(0.00777461), show_epsilon(0.0)
    ('2.386', '0.007775', '0')
    >>> show_epsilon(2.38587, is_lower_bound=True)
    '2.385'
    """
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    decimals = digits - 1 - math.floor(math.log10(epsilon))
    scaled = epsilon * 10.0**decimals
    whole = math.floor(scaled * (1 + 1e-12)) if is_lower_bound else math.ceil(scaled * (1 - 1e-12))
    return f"{whole / 10.0**decimals:.{max(decimals, 0)}f}"
