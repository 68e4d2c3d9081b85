"""The guarantee in plain words: who is protected from what, and what is assumed."""

import math
import textwrap
from dataclasses import replace
from typing import NamedTuple, get_args

from optax_lsdp._checks import check_choice
from optax_lsdp._schemes import RELATIONS, SCHEMES, Unit
from optax_lsdp.accounting._analysis import steps_per_epoch
from optax_lsdp.accounting._composition import Mechanism
from optax_lsdp.accounting._mechanisms import CorrelatedGaussian

_LARGE = 8.0  # above this ε, the statement says that ε promises little


def statement(
    mechanism: Mechanism, delta: float, *, reserved: float = 0.0, unit: Unit = "example"
) -> str:
    """Return a mechanism's guarantee at δ and all its assumptions, in plain words.

    The phases of the mechanism may differ only in noise and in their number of steps. `reserved` is
    the part of δ that covers events outside of the mechanism, so ε is computed at δ − `reserved`.
    With `unit="user"`, the mechanism samples and clips users, and the statement speaks of people.

    >>> from optax_lsdp.accounting import SampledGaussian
    >>> print(statement(SampledGaussian(1.1, 256 / 60_000, 14_100), 1e-5).splitlines()[0])
    ε = 2.386 at δ = 1e-05.
    """
    check_choice("unit", unit, get_args(Unit))
    if not mechanism.phases:
        raise ValueError("`mechanism` must have at least one step, got none; append steps first.")
    words = _WORDS[unit]
    epsilon = mechanism.epsilon(delta - reserved)
    if unit == "user" and mechanism.phases[0].group_size > 1:
        words = _WORDS_OF_IDS
    facts = _facts(mechanism, words)
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
        f"the contribution of each {words.one} to a step's sum is clipped to a norm of C;",
        f"{facts.noise};",
        "a mean divides by the expected batch size, not by the realised one;",
        "no setting was chosen by looking at these data;",
        "arithmetic is exact.",
    ]
    if unit == "user":
        ids = f"a person has at most {facts.group_size} user ids, of which each example carries one"
        alone = "a person has one user id, which all examples of this person carry"
        assumed.insert(2, f"{alone if facts.group_size == 1 else ids};")
    at_most = "" if facts.is_tight else " at most (an upper bound; the exact value is not known)"
    title = f"ε = {show_epsilon(epsilon)} at δ = {delta:g}{at_most}."
    lines = [title, "", *textwrap.wrap(meaning, 88), "", "Assumed:"]
    for assumption in assumed:
        lines += textwrap.wrap(assumption, 88, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


class _Words(NamedTuple):
    """Words for the unit of privacy, and for what is sampled and clipped."""

    unit: str  # the unit of privacy
    one: str  # what is sampled and clipped
    several: str  # the plural of `one`


_WORDS: dict[Unit, _Words] = {
    "example": _Words("example", "example", "examples"),
    "user": _Words("user", "person", "people"),
}
# If a person has several user ids, each id is sampled and clipped by itself.
_WORDS_OF_IDS = _Words("user", "user id", "user ids")


class _Facts(NamedTuple):
    """What a statement says about a mechanism, in words."""

    steps: int
    secret: str
    batches: str
    noise: str
    is_tight: bool
    group_size: int


def _facts(mechanism: Mechanism, words: _Words) -> _Facts:
    phase, noises = mechanism.phases[0], [part.noise_multiplier for part in mechanism.phases]
    alike = {replace(part, steps=1, noise_multiplier=1.0) for part in mechanism.phases}
    if len(alike) > 1:
        raise ValueError(
            "`mechanism` must sample in the same way in all its phases, got phases that differ in "
            "more than noise and length; call `epsilon` for the total, and `statement` per phase."
        )
    scheme = SCHEMES[phase.sampling]
    least, most = (f"{float(show_epsilon(z, 6)):g}·C" for z in (min(noises), max(noises)))
    noise = least if least == most else f"{least} to {most}, as scheduled,"
    relation = RELATIONS[phase.neighbouring]
    secret = relation.secret_of_user if words.unit == "user" else relation.secret
    if phase.group_size > 1:
        secret += f", or any {phase.group_size} {words.unit}s that change together"
    added = f"Gaussian noise of standard deviation {noise} is added to the sum, fresh in every step"
    is_tight = scheme.tight
    if isinstance(phase, CorrelatedGaussian):
        batches, added = _describe_correlated(phase, words, noise, len(noises))
    else:
        rate, epoch = f"{phase.sampling_rate:.4g}", f"{steps_per_epoch(phase)}"
        batches = scheme.describe(rate, epoch, words.one)
        if phase.max_batch_size is not None:
            is_tight = False
            kept = f"{phase.max_batch_size:,} {words.several} are kept at random"
            batches += f"; of a larger batch, {kept}"
    steps = sum(part.steps for part in mechanism.phases)
    return _Facts(steps, secret, batches, added, is_tight, phase.group_size)


def _describe_correlated(
    phase: CorrelatedGaussian, words: _Words, noise: str, runs: int
) -> tuple[str, str]:
    """Return how a phase with correlated noise draws batches and adds noise, in words.

    The mechanism has `runs` phases like this one, each with new noise and new batches.
    """
    scheme, cycle = SCHEMES[phase.sampling], phase.cycle
    rate = min(1.0, (phase.sampling_rate or 0.0) * (cycle or 0))
    is_independent = phase.neighbouring == "add_remove"
    chosen = "at random, independently of all else," if is_independent else "beforehand"
    batches = scheme.describe(f"{rate:.4g}", f"{cycle or phase.min_separation}", words.one, chosen)
    added = (
        f"Gaussian noise of standard deviation {noise} is multiplied by the inverse of a "
        f"lower-triangular matrix with {phase.correlation.bands} bands and no column of norm above "
        "1, and added to the sums"
    )
    if runs > 1:
        added += f"; this noise, and the batches, start again {runs - 1} times"
    return batches, added


def show_epsilon(epsilon: float, digits: int = 4, *, is_lower_bound: bool = False) -> str:
    """Return ε as text with `digits` significant digits.

    Round up or, with `is_lower_bound`, down.

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
