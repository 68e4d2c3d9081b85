"""The guarantee in plain words: who is protected from what, and what is assumed."""

import math
import textwrap
from dataclasses import replace
from typing import get_args

from optax_lsdp._checks import check_choice
from optax_lsdp._schemes import RELATIONS, SCHEMES, Unit
from optax_lsdp.accounting._analysis import steps_per_epoch
from optax_lsdp.accounting._composition import Mechanism

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
    one, several = ("example", "examples") if unit == "example" else ("person", "people")
    epsilon = mechanism.epsilon(delta - reserved)
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
    secret = relation.secret if unit == "example" else relation.secret_of_user
    if phase.group_size > 1:
        secret += f", or any {phase.group_size} {unit}s that change together"
    batches = scheme.describe(f"{phase.sampling_rate:.4g}", f"{steps_per_epoch(phase)}", one)
    if phase.max_batch_size is not None:
        batches += f"; of a larger batch, {phase.max_batch_size:,} {several} are kept at random"
    is_large = epsilon > _LARGE
    factor = "e^" + show_epsilon(epsilon) if is_large else show_epsilon(math.exp(epsilon))
    meaning = (
        "An attacker sees everything that training releases, the model after every step and all "
        f"settings, and tries to find out {secret}. Nothing that they could conclude becomes more "
        f"than {factor} times as probable, except with a probability of {delta:g}."
    )
    if is_large:
        meaning += " So large an ε promises little; more noise or fewer steps make it smaller."
    steps = sum(part.steps for part in mechanism.phases)
    assumed = [
        f"{steps:,} step{'s' if steps > 1 else ''}; {batches};",
        f"the contribution of each {one} to a step's sum is clipped to a norm of C;",
        f"Gaussian noise of standard deviation {noise} is added to the sum, fresh in every step;",
        "a mean divides by the expected batch size, not by the realised one;",
        "no setting was chosen by looking at these data;",
        "arithmetic is exact.",
    ]
    if unit == "user":
        ids = f"a person has at most {phase.group_size} user ids"
        ids = "a person has one user id" if phase.group_size == 1 else ids
        assumed.insert(2, f"{ids}, which all examples of this person carry;")
    is_tight = scheme.tight and phase.max_batch_size is None
    at_most = "" if is_tight else " at most (an upper bound; the exact value is not known)"
    title = f"ε = {show_epsilon(epsilon)} at δ = {delta:g}{at_most}."
    lines = [title, "", *textwrap.wrap(meaning, 88), "", "Assumed:"]
    for assumption in assumed:
        lines += textwrap.wrap(assumption, 88, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def show_epsilon(epsilon: float, digits: int = 4, *, is_lower_bound: bool = False) -> str:
    """Return ε with `digits` significant digits, rounded up, or down if `is_lower_bound`.

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
