"""Ledger: steps that were taken go in, what they have cost comes out, at any time."""

import json
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Self

import numpy as np

from optax_lsdp._checks import MOST_STEPS, check_delta, check_positive, read_json
from optax_lsdp.accounting._calibrate import largest
from optax_lsdp.accounting._curve import epsilon_curve
from optax_lsdp.accounting._mechanism import SampledGaussian
from optax_lsdp.accounting._queries import Composition, Mechanism, simplify

_VERSION = 1
_LONGEST = 10**8  # steps of a curve


class Ledger(Mechanism):
    """What was really spent: steps are appended, never changed, and a question changes nothing.

    It answers what a `SampledGaussian` answers. Steps that equal the last ones are merged, so that
    a ledger of 10⁵ steps is as small as one of a single step. Parts of epochs of
    shuffled batches may be parts of different ones, and count as whole unless they `continue`.

    >>> ledger = Ledger()
    >>> step = SampledGaussian(noise_multiplier=1.1, sampling_rate=0.004, steps=1)
    >>> for _ in range(1000):
    ...     ledger.append(step)
    >>> round(ledger.epsilon(1e-5), 3)
    0.558
    >>> Ledger.from_json(ledger.to_json()) == ledger
    True
    """

    def __init__(self, runs: Iterable[SampledGaussian] = ()) -> None:
        self._kinds: list[SampledGaussian] = []  # with a single step
        self._steps: list[int] = []
        self._last: SampledGaussian | None = None
        for run in runs:
            self.append(run)

    def append(self, run: SampledGaussian, *, continues: bool = False) -> None:
        """Record that the steps of `run` were taken after all the others.

        Args:
            run: steps of one kind.
            continues: that shuffled batches go on in the order in which the last ones began.
        """
        is_shuffled = getattr(run, "sampling", None) == "shuffled"
        if run is self._last and (continues or not is_shuffled):  # the usual case, and a fast one
            self._steps[-1] += run.steps
            return
        if not isinstance(run, SampledGaussian):
            raise TypeError(
                f"`run` must be a SampledGaussian, got {run!r}; append parts one by one."
            )
        Composition((*self._kinds[:1], run))  # raises if they do not go together
        kind = replace(run, steps=1)
        if self._kinds and self._kinds[-1] == kind and (continues or not is_shuffled):
            self._steps[-1] += run.steps
        else:
            self._kinds.append(kind)
            self._steps.append(run.steps)
        self._last = run

    @property
    def phases(self) -> tuple[SampledGaussian, ...]:  # type: ignore[override]  # a property serves
        """All steps in the order in which they were taken."""
        pairs = zip(self._kinds, self._steps, strict=True)
        return tuple(replace(kind, steps=steps) for kind, steps in pairs)

    @property
    def steps(self) -> int:
        """How many steps were taken."""
        return sum(self._steps)

    def epsilons(self, delta: float) -> np.ndarray:
        """Return ε after each step, from above, computed at some steps and bounded between."""
        check_delta("delta", delta)
        if self.steps > _LONGEST:
            raise ValueError(
                f"`epsilons` must be asked of {_LONGEST:.0e} steps at most, got {self.steps}; ask "
                "for `epsilon` at the end."
            )
        return epsilon_curve(self.phases, delta)

    def remaining_steps(self, epsilon: float, delta: float) -> int:
        """Return how many more steps like the last one the budget (ε, δ) allows.

        A ledger without steps has none to repeat, and raises a ValueError.
        """
        check_positive("epsilon", epsilon)
        check_delta("delta", delta)
        if not self._kinds:
            raise ValueError("`remaining_steps` must follow a step that it can repeat; append one.")
        past, next_step = Composition(simplify(self.parts)), self._kinds[-1]

        def spent(steps: int) -> float:
            return (past + replace(next_step, steps=steps)).epsilon(delta)

        return largest(spent, epsilon, MOST_STEPS)

    def to_json(self) -> str:
        """Return the ledger as text."""
        runs = [asdict(run) for run in self.phases]
        return json.dumps({"optax_lsdp_ledger": _VERSION, "phases": runs}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the ledger that `to_json` wrote; whatever is not fully understood is refused."""
        try:
            found = read_json(text)
            version, runs = found["optax_lsdp_ledger"], found["phases"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`text` must be what to_json returned, got {str(text)[:40]!r} ({error}); "
                "pass it on unchanged."
            ) from error
        if type(version) is not int or version != _VERSION:
            raise ValueError(
                f"`text` must be a ledger of version {_VERSION}, got version {version!r}; "
                "read it with the optax_lsdp that wrote it, or a newer one."
            )
        if set(found) != {"optax_lsdp_ledger", "phases"}:
            raise ValueError(
                f"`text` must hold a version and runs alone, got {str(sorted(found))[:200]}."
            )
        known = {field.name for field in fields(SampledGaussian)}
        for run in runs if isinstance(runs, list) else [str(runs)]:
            if not isinstance(run, dict) or set(run) != known:
                raise ValueError(
                    f"`text` must hold runs with the keys {sorted(known)}, got {str(run)[:200]}."
                )
        return cls(SampledGaussian(**run) for run in runs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.phases == other.phases

    __hash__ = None  # type: ignore[assignment]  # mutable, hence in no set

    def __repr__(self) -> str:
        return f"Ledger({list(self.phases)!r})"
