"""A guarantee in plain words: a run and its ε go in, who is protected from what comes out."""

import math
import textwrap
from dataclasses import replace

from optax_lsdp.accounting._dominate import steps_per_epoch
from optax_lsdp.accounting._queries import Mechanism

_LITTLE = 8.0  # ε from which on the words say that it promises little
_DIFFERENCE = {
    "add_remove": "whether any one example was in the data",
    "zero_out": "whether any one example was used or a blank in its place",
    "replace_one": "which of two values any one example had",
}
_BATCHES = {
    "poisson": "every example is in every batch with probability {rate}, independently of all "
    "else (Poisson sampling; a shuffled data loader does not do this)",
    "without_replacement": "every batch is a fresh uniform subset of a {rate} share of the data, "
    "of fixed size, independent of the other batches (a shuffled data loader does not do this)",
    "full": "every batch is the whole dataset, whose size is public",
    "shuffled": "every example is used at most once in each epoch of {epoch} batches, in any "
    "order; no benefit of a random order is claimed, as no tight analysis is known",
}


def statement(mechanism: Mechanism, delta: float, *, reserved: float = 0.0) -> str:
    """Return what a run guarantees at δ, and everything that was assumed.

    Args:
        mechanism: a `SampledGaussian`, a sum of them or a `Ledger`. Runs that follow each other,
            such as those of a schedule, must sample alike, or a ValueError is raised.
        delta: δ.
        reserved: the part of δ that is kept for what the mechanism does not describe.

    >>> from optax_lsdp.accounting import SampledGaussian
    >>> run = SampledGaussian(1.1, 256 / 60_000, 14_100)
    >>> print(statement(run, 1e-5).splitlines()[0])
    ε = 2.386 at δ = 1e-05.
    """
    epsilon = mechanism.epsilon(delta - reserved)
    run, noises = mechanism.phases[0], [run.noise_multiplier for run in mechanism.phases]
    alike = {replace(one, steps=1, noise_multiplier=1.0) for one in mechanism.phases}
    if len(alike) > 1:
        raise ValueError(f"`mechanism` must sample alike in all its runs, got {alike!r}.")
    least, most = (f"{float(show_epsilon(z, 6)):g}·C" for z in (min(noises), max(noises)))
    noise = least if least == most else f"{least} to {most}, as scheduled,"
    difference = _DIFFERENCE[run.neighbouring]
    if run.group_size > 1:
        difference += f", or any {run.group_size} examples that change together"
    batches = _BATCHES[run.sampling].format(
        rate=f"{run.sampling_rate:.4g}", epoch=steps_per_epoch(run)
    )
    bounded = run.sampling in ("without_replacement", "shuffled") or run.max_batch_size is not None
    if run.max_batch_size is not None:
        batches += f"; of more than {run.max_batch_size:,} that many are kept at random"
    is_large = epsilon > _LITTLE
    grows = "e^" + show_epsilon(epsilon) if is_large else show_epsilon(math.exp(epsilon))
    meaning = (
        "Whoever sees all that training releases, the model after every step and all settings, "
        f"can tell only so far {difference}: nothing that they could conclude becomes more than "
        f"{grows} times as probable, but for a probability of {delta:g}."
    )
    if is_large:
        meaning += " So large an ε promises little; more noise or fewer steps make it less."
    steps = sum(one.steps for one in mechanism.phases)
    assumed = [
        f"{steps:,} step{'s' if steps > 1 else ''}; {batches};",
        "the contribution of each example to a step's sum is clipped to a norm of C;",
        f"Gaussian noise of standard deviation {noise} is added to the sum, fresh in every step;",
        "a mean divides by the expected batch size, not by the realised one;",
        "no setting was chosen by looking at these data;",
        "arithmetic is exact.",
    ]
    at_most = " at most (an upper bound; the exact value is not known)" if bounded else ""
    lines = [
        f"ε = {show_epsilon(epsilon)} at δ = {delta:g}{at_most}.",
        "",
        *textwrap.wrap(meaning, 88),
    ]
    lines += ["", "Assumed:"]
    for one in assumed:
        lines += textwrap.wrap(one, 88, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines)


def show_epsilon(epsilon: float, digits: int = 4, *, is_lower_bound: bool = False) -> str:
    """Return a few digits of a number, rounded up, or down if it bounds ε from below.

    >>> show_epsilon(2.38512), show_epsilon(0.00777461), show_epsilon(0.0)
    ('2.386', '0.007775', '0')
    >>> show_epsilon(2.38587, is_lower_bound=True)
    '2.385'
    """
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    digits = digits - 1 - math.floor(math.log10(epsilon))
    scaled = epsilon * 10.0**digits
    whole = math.floor(scaled * (1 + 1e-12)) if is_lower_bound else math.ceil(scaled * (1 - 1e-12))
    rounded = whole / 10.0**digits
    return f"{rounded:.{max(digits, 0)}f}"
