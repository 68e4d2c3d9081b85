"""ε after every step: runs and δ go in, one number for each step comes out, at little more cost.

Steps are composed in blocks in which their number doubles: the Fourier coefficients of a block are
computed once, and raised to as many powers as it has steps.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optax_lsdp.accounting._bounds import epsilons_above
from optax_lsdp.accounting._dominate import has_group_analysis, reveal, steps_per_epoch
from optax_lsdp.accounting._gaussian import gaussian_epsilon
from optax_lsdp.accounting._mechanism import SampledGaussian
from optax_lsdp.accounting._queries import simplify_in_order

_RATIO = 5e-4  # between numbers of steps that are answered; what lies between counts as the next


def epsilon_curve(runs: Sequence[SampledGaussian], delta: float) -> np.ndarray:
    """Return ε after each step of runs that follow each other, from above."""
    total = sum(run.steps for run in runs)
    runs = [run for run in simplify_in_order(runs) if run.steps]
    kinds = list(dict.fromkeys(replace(run, steps=1) for run in runs if run.steps))
    if not total:
        return np.zeros(0)
    if kinds[0].group_size > 1 and not all(map(has_group_analysis, kinds)):
        raise ValueError(
            f"`group_size` must be 1 for a curve, got {kinds[0].group_size!r}: these groups have "
            "no analysis of their own; ask for ε at the steps of interest."
        )
    knots = _knots(total)
    counts = _counts(runs, kinds, knots)
    steps = [reveal(kind) for kind in kinds]
    if all(step.mu is not None for step in steps):
        squares = counts @ np.array([step.mu**2 for step in steps if step.mu is not None])
        mus = np.sqrt(squares) * (1 + 1e-15)
        at_knots = np.array([gaussian_epsilon(delta, float(mu)) for mu in mus])
    else:
        at_knots = np.zeros(len(knots))
        for side in range(max(len(step.above) for step in steps)):
            parts = [step.above[side % len(step.above)] for step in steps]
            for rows in _blocks(knots):
                used = counts[rows][-1] > 0
                pairs = [part for part, is_used in zip(parts, used, strict=True) if is_used]
                found = epsilons_above(pairs, counts[rows][:, used], delta)
                at_knots[rows] = np.maximum(at_knots[rows], found)
    return np.maximum.accumulate(at_knots)[np.searchsorted(knots, np.arange(1, total + 1))]


def _knots(total: int) -> np.ndarray:
    """Return numbers of steps from 1 to `total`, each larger than the last by one or a share."""
    knots = [1]
    while knots[-1] < total:
        knots.append(min(total, max(knots[-1] + 1, math.floor(knots[-1] * (1 + _RATIO)))))
    return np.array(knots)


def _blocks(knots: np.ndarray) -> list[slice]:
    """Cut the knots where they have doubled."""
    cuts, start = [], 0
    while start < len(knots):
        end = int(np.searchsorted(knots, 2 * knots[start]))
        cuts.append(slice(start, end))
        start = end
    return cuts


def _counts(
    runs: Sequence[SampledGaussian], kinds: list[SampledGaussian], knots: np.ndarray
) -> np.ndarray:
    """Return how many steps of each kind, epochs if shuffled, have been taken at each knot."""
    counts = np.zeros((len(knots), len(kinds)))
    before = 0
    for run in runs:
        taken = np.clip(knots - before, 0, run.steps)
        unit = steps_per_epoch(run) if run.sampling == "shuffled" else 1
        counts[:, kinds.index(replace(run, steps=1))] += np.ceil(taken / unit)
        before += run.steps
    return counts
