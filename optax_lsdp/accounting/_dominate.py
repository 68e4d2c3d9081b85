"""Which pairs dominate a run: sampling and neighbouring relation go in, pairs come out."""

import dataclasses
import math
from typing import TYPE_CHECKING, NamedTuple

from optax_lsdp._checks import MOST_STEPS
from optax_lsdp.accounting._binomial import lower_tail, tail_rounding, upper_tail
from optax_lsdp.accounting._loss import Step
from optax_lsdp.accounting._pairs import (
    Pair,
    add,
    add_group,
    fixed_size,
    group_members,
    remove,
    remove_group,
    replace,
)

if TYPE_CHECKING:
    from optax_lsdp.accounting._mechanism import SampledGaussian as Run

_LARGEST_SHIFT = 12.0  # in standard deviations of the noise; beyond it sampling is not counted
_LEAST_CUT = 1e-300  # a probability that is as good as none, and counted all the same
_LARGEST_DATASET = 10**12  # beyond it, what is known of a cut is lost to rounding
_MOST_NOISE, _LEAST_RATE = 1e7, 1e-12  # beyond them nothing is gained
_MOST_RATE = 1 - 1e-9  # beyond it sampling is not counted
_MOST_MEMBERS = 500  # of a group, in one batch; beyond them sampling is not counted
_MOST_LOST = 1e-3  # the probability of more members than are told apart
SENSITIVITY = {"add_remove": 1.0, "zero_out": 1.0, "replace_one": 2.0}  # in clip norms
ANALYSED = {
    "poisson": ("add_remove", "replace_one", "zero_out"),
    "without_replacement": ("replace_one",),
    "full": ("add_remove", "replace_one", "zero_out"),
    "shuffled": ("zero_out", "replace_one"),
}


class Revealed(NamedTuple):
    """What a run reveals.

    Attributes:
        mu: the ratio of shift and noise, if the run is one Gaussian mechanism; else None.
        above: one step, in each direction (one if they are alike), as pairs that dominate it.
        below: pairs that are reached by some datasets, in each direction; empty if none is known.
        times: how many such steps there are.
    """

    mu: float | None
    above: tuple[Step, ...]
    below: tuple[Pair, ...]
    times: int


def has_group_analysis(run: "Run") -> bool:
    """Tell whether `reveal` knows what a group of examples reveals, beyond a single one."""
    if run.sampling == "poisson" and run.max_batch_size is None:
        return run.neighbouring != "replace_one" or run.sampling_rate == 1
    return is_gaussian(run)


def is_gaussian(run: "Run") -> bool:
    """Tell whether the run is one Gaussian mechanism, whatever its noise."""
    whole = run.sampling_rate == 1 and run.max_batch_size is None
    return whole or run.sampling in ("full", "shuffled")


def at_worst(run: "Run") -> float:
    """Return μ if the example were in every batch, at its largest, which is no better."""
    most = 2.0 if run.max_batch_size is not None else SENSITIVITY[run.neighbouring]
    times = epochs(run) if run.sampling == "shuffled" else run.steps
    return math.sqrt(times) * most * run.group_size / run.noise_multiplier


def reveal(run: "Run") -> Revealed:
    """Return the pairs that dominate one step of a run, and how many such steps there are."""
    if run.noise_multiplier > _MOST_NOISE or run.sampling_rate < _LEAST_RATE:
        noise, rate = min(run.noise_multiplier, _MOST_NOISE), max(run.sampling_rate, _LEAST_RATE)
        less = dataclasses.replace(run, noise_multiplier=noise, sampling_rate=rate)
        if run.max_batch_size is not None and rate > run.sampling_rate:
            size = _LARGEST_DATASET + 1  # a higher rate is not always worse where batches are cut
            less = dataclasses.replace(less, dataset_size=size)
        return reveal(less)._replace(below=())
    shift = run.group_size / run.noise_multiplier
    moved = SENSITIVITY[run.neighbouring] * shift
    if run.sampling == "shuffled":
        return _gaussian(math.sqrt(epochs(run)) * moved)._replace(below=())
    if is_gaussian(run):
        return _gaussian(math.sqrt(run.steps) * moved)
    most = 2 * shift if run.max_batch_size is not None else moved
    if _is_beyond(run, most):
        return _gaussian(at_worst(run))._replace(below=())
    if run.sampling == "without_replacement":
        worst: Step = ((1.0, fixed_size(run.sampling_rate, moved)),)
        reached = remove(run.sampling_rate, moved), add(run.sampling_rate, moved)
        return Revealed(None, (worst,), reached, run.steps)
    pairs = _poisson(run, run.sampling_rate)
    if run.max_batch_size is None:
        below = _poisson(run, run.sampling_rate, at_least=True)
        return Revealed(None, tuple(((1.0, pair),) for pair in pairs), below, run.steps)
    if (run.dataset_size or 0) > _LARGEST_DATASET:
        worst = ((1.0, fixed_size(run.sampling_rate, most)),)
        return Revealed(None, (worst,), (), run.steps)
    return _truncated(run, pairs, run.max_batch_size)


def _is_beyond(run: "Run", moved: float) -> bool:
    """Tell whether sampling is not counted, as a step tells too much or there are too many."""
    if run.steps > MOST_STEPS or (run.sampling_rate > _MOST_RATE and run.max_batch_size is None):
        return True
    if run.group_size == 1 or run.sampling != "poisson":
        return moved > _LARGEST_SHIFT
    if run.group_size > _LARGEST_DATASET or run.noise_multiplier * _LARGEST_SHIFT < 1:
        return True
    last, lost = group_members(run.sampling_rate, 1 / run.noise_multiplier, run.group_size)
    return last > _MOST_MEMBERS or lost > _MOST_LOST


def epochs(run: "Run") -> int:
    """Return how often an example is used at most, if an epoch is ⌊1/q⌋ steps."""
    return math.ceil(run.steps / steps_per_epoch(run))


def steps_per_epoch(run: "Run") -> int:
    """Return ⌊1/q⌋, but 235 for q = 1/235 as a float."""
    return math.floor(1 / run.sampling_rate * (1 + 1e-12))


def _gaussian(mu: float) -> Revealed:
    pair = remove(1.0, mu)
    return Revealed(mu, (((1.0, pair),),), (pair,), 1)


def _poisson(run: "Run", rate: float, *, at_least: bool = False) -> tuple[Pair, ...]:
    shift = 1 / run.noise_multiplier
    if run.neighbouring == "replace_one":
        return (replace(rate, shift),)
    if run.group_size > 1:
        return tuple(
            pair(rate, shift, run.group_size, at_least=at_least)
            for pair in (remove_group, add_group)
        )
    return remove(rate, shift), add(rate, shift)


def _truncated(run: "Run", pairs: tuple[Pair, ...], most: int) -> Revealed:
    """Return what Poisson batches reveal that are cut to `most` examples.

    Let N be the number of others that were drawn, which does not depend on the example. If N < B,
    the step is as without a cut. Otherwise the batch has B examples, a uniform subset of the
    others, or, with probability q·B/(N + 1), one of which the example has taken the place; it is
    then no more than replaced, as in a batch of fixed size. To tell which of the two happened
    reveals more than the step does. With nothing but zeros for others, the example is simply in
    the batch less often. A dataset of n examples has n − 1 others, or n if one is added to it.

    The probabilities of both are known up to rounding, and what lies between is given to a pair
    that dominates either of them: an example of a batch of fixed size, at the rate q, is replaced.
    It reveals more than `replace` does, whose centres are no further apart.
    """
    rate, noise = run.sampling_rate, run.noise_multiplier
    size = run.dataset_size or 0
    dominating = fixed_size(rate, 2 / noise)
    above: list[Step] = []
    below: list[Pair] = []
    for others in (size - 1, size) if run.neighbouring == "add_remove" else (size - 1,):
        if most > others:
            above += [((1.0, pair),) for pair in pairs]
            below += pairs
            continue
        rounding = tail_rounding(others)
        cut = max(upper_tail(most, others, rate), _LEAST_CUT)
        kept = lower_tail(most, others, rate)
        taken = most * upper_tail(most + 1, others + 1, rate) / (others + 1)
        worst = fixed_size(min(rate, (taken + _LEAST_CUT) / cut * (1 + 3 * rounding)), 2 / noise)
        unknown = 2 * rounding * min(cut, kept)
        is_cut = 1 - kept * (1 + rounding) if kept < cut else cut * (1 - rounding)
        is_kept = kept * (1 - rounding) if kept < cut else 1 - cut * (1 + rounding)
        above += [((is_kept, pair), (is_cut, worst), (unknown, dominating)) for pair in pairs]
        if (least := (rate * is_kept + taken) * (1 - 2 * rounding)) >= _LEAST_RATE:
            below += _poisson(run, least)
    return Revealed(None, tuple(above), tuple(below), run.steps)
