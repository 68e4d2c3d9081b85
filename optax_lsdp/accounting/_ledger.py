"""The ledger: a record of the steps that a run has taken, which computes the ε spent so far."""

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from typing import Self

import numpy as np

from optax_lsdp._checks import MOST_STEPS, check_delta, check_positive, read_json, refusal
from optax_lsdp._schemes import SCHEMES
from optax_lsdp.accounting._analysis import analyse, has_group_analysis, steps_per_epoch
from optax_lsdp.accounting._bounds import gaussian_epsilon, upper_epsilons
from optax_lsdp.accounting._calibrate import largest
from optax_lsdp.accounting._composition import Composition, Mechanism, merge, simplify
from optax_lsdp.accounting._mechanisms import CorrelatedGaussian, Phase, SampledGaussian
from optax_lsdp.correlation import Correlation

_VERSION = 1
_LONGEST = 10**8  # most steps for which `epsilons` returns an array
_PARTS = 4  # for groups with the generic bound, ε is computed after each quarter of the steps
_RATIO = 5e-4  # relative distance between numbers of steps at which `epsilons` computes ε

_KINDS: tuple[type[Phase], ...] = (SampledGaussian, CorrelatedGaussian)


class Ledger(Mechanism):
    """A record of the steps that a run has taken. Steps are appended and never changed.

    A ledger has the methods of a `SampledGaussian`, such as `epsilon`. Consecutive equal steps
    become one phase, so 10⁵ equal steps take no more memory than one step. For shuffled batches and
    correlated noise, call `append` with `continues=True`, except after a restart with new batches
    or noise.

    >>> ledger = Ledger()
    >>> step = SampledGaussian(noise_multiplier=1.1, sampling_rate=0.004, steps=1)
    >>> for _ in range(1000):
    ...     ledger.append(step)
    >>> round(ledger.epsilon(1e-5), 3)
    0.558
    >>> Ledger.from_json(ledger.to_json()) == ledger
    True
    """

    def __init__(self, phases: Iterable[Phase] = ()) -> None:
        self._kinds: list[Phase] = []  # one step of each phase
        self._steps: list[int] = []  # the number of steps of each phase
        self._last: Phase | None = None
        for phase in phases:
            self.append(phase, continues=False)

    def append(self, phase: Phase, *, continues: bool | None = None) -> None:
        """Record the steps of `phase`, taken after all steps so far.

        With `continues`, shuffled batches continue the epochs of the last phase, and correlated
        noise continues the noise of the last phase. Otherwise, shuffled batches start a new epoch,
        and correlated noise starts a new mechanism. If the ledger already has a phase with the same
        correlated noise, you must pass True or False, because a wrong guess could understate ε.
        Correlated noise can continue the last phase only.
        """
        if type(phase) not in _KINDS:
            raise TypeError(
                "`phase` must be a SampledGaussian or a CorrelatedGaussian, got "
                f"{repr(phase)[:200]}; append each phase separately, and for correlated noise the "
                "CorrelatedGaussian itself, not its `dominating` phase."
            )
        if isinstance(phase, CorrelatedGaussian):
            self._check_continues(phase, continues)
        can_merge = continues or not SCHEMES[phase.sampling].keeps_order
        if phase is not self._last or not can_merge:  # the same object needs no second check
            Composition((*self._kinds[:1], phase))  # raises if relations or group sizes differ
            kind = replace(phase, steps=1)
            if not (self._kinds and self._kinds[-1] == kind and can_merge):
                self._kinds.append(kind)
                self._steps.append(0)
        if isinstance(phase, CorrelatedGaussian):
            taken, most = self._steps[-1] + phase.steps, phase.correlation.steps
            if taken > most:
                demand = f"at most {most} in all, the steps of the correlation"
                remedy = "start again with new noise, and append its steps with continues=False"
                raise refusal("steps", demand, taken, remedy)
        self._steps[-1] += phase.steps
        self._last = phase

    def _check_continues(self, phase: CorrelatedGaussian, continues: bool | None) -> None:
        """Raise if it is unclear whether `phase` continues noise that the ledger already has."""
        kind = replace(phase, steps=1)
        if kind not in self._kinds:
            return
        if continues is None:
            demand = "True or False for correlated noise that the ledger already has"
            remedy = "pass True if the steps continue this noise, and False if they have new noise"
            raise refusal("continues", demand, continues, remedy)
        if continues and kind != self._kinds[-1]:
            demand = "False, unless the steps continue the last phase of the ledger"
            remedy = "record other mechanisms in a second ledger, and add up both ledgers"
            raise refusal("continues", demand, continues, remedy)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All phases, in order."""
        pairs = zip(self._kinds, self._steps, strict=True)
        return tuple(replace(kind, steps=steps) for kind, steps in pairs)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return sum(self._steps)

    def epsilons(self, delta: float) -> np.ndarray:
        """Return an upper bound on ε after each step: the ε of this or a slightly later step.

        For groups that have only the generic bound (see `group`), the bound is the ε at the end of
        the same quarter of the steps, which may be much later.
        """
        check_delta("delta", delta)
        if self.steps > _LONGEST:
            message = f"`epsilons` must be called on at most {_LONGEST:.0e} steps, got {self.steps}"
            raise ValueError(f"{message}; call `epsilon` for the ε after the last step.")
        return _epsilon_curve(self.phases, delta)

    def remaining_steps(self, epsilon: float, delta: float) -> int:
        """Return how many more steps the budget (ε, δ) allows, if each is like the last step."""
        check_positive("epsilon", epsilon)
        check_delta("delta", delta)
        if not self._kinds:
            raise ValueError(
                "`remaining_steps` must follow a step, got an empty ledger; append a step first."
            )
        past, last, before, most = self.parts, self._kinds[-1], 0, MOST_STEPS
        if isinstance(last, CorrelatedGaussian):  # further steps continue the last phase
            past, before = Ledger(self.phases[:-1]).parts, self._steps[-1]
            most = last.correlation.steps
        composed = Composition(merge(simplify(past)))

        def spent(more: int) -> float:
            return (composed + replace(last, steps=before + more)).epsilon(delta)

        return largest(spent, epsilon, most - before) if most > before else 0

    def to_json(self) -> str:
        """Return the ledger as JSON text."""
        phases = [asdict(phase) for phase in self.phases]
        return json.dumps({"optax_lsdp_ledger": _VERSION, "phases": phases}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the ledger that `to_json` wrote as `text`."""
        try:
            found = read_json(text)
            version, phases = found["optax_lsdp_ledger"], found["phases"]
        except (ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise _refusal("be what to_json returned", f"{str(text)[:40]!r} ({why})") from error
        if type(version) is not int or version != _VERSION:
            raise ValueError(
                f"`text` must be a ledger of version {_VERSION}, got version {version!r}; read it "
                "with the release of optax_lsdp that wrote it, or with a newer release."
            )
        if set(found) != {"optax_lsdp_ledger", "phases"} or not isinstance(phases, list):
            keys = "have only the keys 'optax_lsdp_ledger' and 'phases', a list"
            raise _refusal(keys, str(sorted(found))[:200])
        known = {frozenset(field.name for field in fields(kind)): kind for kind in _KINDS}
        ledger = cls()
        for number, phase in enumerate(phases, 1):
            where = f"phase {number} of {len(phases)}"
            names = frozenset(phase) if isinstance(phase, dict) else frozenset()
            if names not in known:
                keys = f"have phases with the keys {' or '.join(str(sorted(k)) for k in known)}"
                raise _refusal(keys, f"{str(phase)[:200]} as {where}")
            try:
                if isinstance(phase.get("correlation"), dict):
                    phase["correlation"] = Correlation(**phase["correlation"])
                ledger.append(known[names](**phase), continues=False)
            except (TypeError, ValueError) as error:
                why = f"an error in {where}: {str(error).rstrip('.')}"
                raise _refusal("have valid phases", why) from error
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.phases == other.phases

    def __repr__(self) -> str:
        return f"Ledger({list(self.phases)!r})"


def _refusal(demand: str, got: str) -> ValueError:
    remedy = "pass the return value of Ledger.to_json unchanged"
    return ValueError(f"`text` must {demand}, got {got}; {remedy}.")


def _epsilon_curve(phases: Sequence[Phase], delta: float) -> np.ndarray:
    """Return an upper bound on ε after each step of consecutive phases.

    ε is computed only at `_knots`. A step between two knots gets the ε of the later knot. Within a
    block of knots, the number of steps less than doubles, so one choice of lattice settings serves
    the whole block.
    """
    total = sum(phase.steps for phase in phases)
    if not total:
        return np.zeros(0)
    phases = [phase for phase in phases if phase.steps]
    kind_of_phase = simplify([_one_use(phase) for phase in phases])
    kinds = list(dict.fromkeys(kind_of_phase))
    if kinds[0].group_size > 1 and not all(map(has_group_analysis, kinds)):
        return _coarse_curve(phases, total, delta)
    knots = _knots(total)
    counts = _counts(phases, [kinds.index(kind) for kind in kind_of_phase], knots)
    analyses = [analyse(kind) for kind in kinds]
    if all(one.mu is not None for one in analyses):
        squares = counts @ np.array([one.mu**2 for one in analyses if one.mu is not None])
        mus = np.sqrt(squares) * (1 + 1e-15)
        at_knots = np.array([gaussian_epsilon(delta, mu) for mu in mus.tolist()])
    else:
        counts = np.ceil(counts)  # squared sensitivities need not be whole
        at_knots = np.zeros(len(knots))
        start = 0
        while start < len(knots):
            rows = slice(start, int(np.searchsorted(knots, 2 * knots[start])))
            used = counts[rows][-1] > 0
            for case in range(max(len(one.upper) for one in analyses)):
                steps = [one.upper[case % len(one.upper)] for one in analyses]
                taken = list(itertools.compress(steps, used))
                found = upper_epsilons(taken, counts[rows][:, used], delta)
                at_knots[rows] = np.maximum(at_knots[rows], found)
            start = rows.stop
    return np.maximum.accumulate(at_knots)[np.searchsorted(knots, np.arange(1, total + 1))]


def _coarse_curve(phases: Sequence[Phase], total: int, delta: float) -> np.ndarray:
    """Return upper bounds on ε for groups that have only the generic bound.

    The generic bound is slow to compute. So the steps are cut into `_PARTS` parts, and a step gets
    the ε at the end of its part.
    """
    curve, start = np.zeros(total), 0
    for end in sorted({-(-total * part // _PARTS) for part in range(1, _PARTS + 1)}):
        begun, left = list[Phase](), end
        for phase in phases:
            if left > 0:
                begun.append(replace(phase, steps=min(left, phase.steps)))
            left -= phase.steps
        curve[start:end] = Composition(tuple(begun)).epsilon(delta)
        start = end
    return np.maximum.accumulate(curve)


def _knots(total: int) -> np.ndarray:
    """Return increasing numbers of steps from 1 to `total`: all small numbers, fewer large ones."""
    knots = [1]
    while knots[-1] < total:
        knots.append(min(total, max(knots[-1] + 1, math.floor(knots[-1] * (1 + _RATIO)))))
    return np.array(knots)


def _one_use(phase: Phase) -> SampledGaussian:
    """Return one step of a phase. For correlated noise, return the phase's `use` instead."""
    return phase.use if isinstance(phase, CorrelatedGaussian) else replace(phase, steps=1)


def _counts(phases: Sequence[Phase], kinds: Sequence[int], knots: np.ndarray) -> np.ndarray:
    """Return, for each knot and kind, how many steps, shuffled epochs or uses were taken so far.

    Phases of one kind have equal steps. `kinds` has the index of each phase's kind.
    """
    counts = np.zeros((len(knots), max(kinds) + 1))
    before = 0
    for phase, kind in zip(phases, kinds, strict=True):
        taken = np.clip(knots - before, 0, phase.steps)
        if isinstance(phase, CorrelatedGaussian):
            counts[:, kind] += np.r_[0.0, phase.uses()][taken]
        else:
            unit = steps_per_epoch(phase) if SCHEMES[phase.sampling].once_per_epoch else 1
            counts[:, kind] += np.ceil(taken / unit)
        before += phase.steps
    return counts
