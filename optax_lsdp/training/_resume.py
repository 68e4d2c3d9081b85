"""How a run starts, resumes and restarts, and what it has spent.

A run resumes if its fingerprint is unchanged: it repeats its steps from the last checkpoint on,
with the same noise, so that they count once. Otherwise it restarts: a new nonce gives it new noise
and new batches, and steps count twice if their results may have been seen since the checkpoint.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from optax_lsdp._keys import fold_in_text
from optax_lsdp._schemes import SCHEMES
from optax_lsdp.accounting import Ledger
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._checkpoint import Checkpoint, RunFolder
from optax_lsdp.training._data import BatchReader, Examples
from optax_lsdp.training._multihost import Placement
from optax_lsdp.training._progress import warn_of_restart
from optax_lsdp.training._step import CompiledStep, with_noise_key


class Account:
    """What a run has spent, and how far its budget reaches.

    The run draws its present batches since the step `order_start`, its last start or restart.

    Attributes:
        ledger: every step that counts, some of them twice; `record` appends to it.
        first_step: the step from which the run goes on.
        last_step: the step at which the run must end, by its plan or by its budget.
    """

    def __init__(
        self, plan: PrivacyPlan, ledger: Ledger, first_step: int, order_start: int
    ) -> None:
        self.ledger, self.first_step = ledger, first_step
        self.last_step = first_step + plan.remaining_steps(ledger, first_step)
        self._plan, self._order_start = plan, order_start
        self._before = deepcopy(ledger)

    def record(self, step: int) -> None:
        """Count a step."""
        count_steps(self._plan, self.ledger, range(step, step + 1), self._order_start)

    def epsilon(self, step: int) -> float:
        """Return ε after `step` steps, one or more of them taken since the start.

        The first call takes a second or two, and computes the answers of all others.
        """
        return float(self._curve[step - self.first_step - 1])

    @cached_property
    def _curve(self) -> np.ndarray:
        return self._plan.epsilons(self._before, self.first_step)


def count_steps(plan: PrivacyPlan, ledger: Ledger, steps: range, order_start: int) -> None:
    """Append steps to a ledger; what was announced beyond the plan counts like its last step.

    If a scheme uses each example once per epoch, a new order may repeat examples that the old
    order has used in the same epoch. So at `order_start`, where an order starts, the epoch counts
    from its beginning.
    """
    for step in steps:
        event = plan.event(min(step, plan.steps - 1))
        scheme = SCHEMES[event.sampling]
        if step == order_start and scheme.once_per_epoch:
            epoch = int(scheme.steps_per_epoch(plan.dataset_size, plan.expected_batch_size))
            ledger.append(replace(event, steps=step % epoch + 1))
        else:
            ledger.append(event, continues=True)


class Start(NamedTuple):
    """A start, resumption or restart of a run: everything that its nonce decides.

    Attributes:
        checkpoint: where the run goes on; the noise key in its state belongs to the nonce.
        account: what was spent, and how far the budget reaches.
        reader: reads the batches of the steps to come.
    """

    checkpoint: Checkpoint
    account: Account
    reader: BatchReader


@dataclass(frozen=True)
class Run:
    """What stays the same during a run, however often it restarts.

    Attributes:
        plan: the plan.
        examples: the data.
        program: the compiled step.
        microbatch_size: how many examples a microbatch has.
        placement: the devices.
        thread: where batches are read.
        folder: where the run is kept, or None.
        fingerprint: hashes of everything that decides the steps; empty without a folder.
    """

    plan: PrivacyPlan
    examples: Examples
    program: CompiledStep
    microbatch_size: int
    placement: Placement
    thread: ThreadPoolExecutor
    folder: RunFolder | None
    fingerprint: dict[str, str]

    def start(self, new: Checkpoint, saved: Checkpoint | None) -> Start:
        """Start a run at `new`, before its first step, or resume it at a saved checkpoint."""
        if self.folder is None:
            return self._start_at(self._with_keys(new, new.nonce), order_start=0)
        journal = self.folder.journal
        if saved is None:
            if journal.has_steps:
                raise ValueError(
                    "`folder` must hold checkpoints if its journal has steps, got none in "
                    f"{str(self.folder.path)!r}, so that the privacy spent is unknown; choose "
                    "another folder."
                )
            return self._start_at(self._draw_nonce(self.folder, new), order_start=0)
        changed = journal.changed(self.fingerprint)
        if not changed and journal.nonce != saved.nonce:
            changed = ["checkpoints"]  # the run has restarted since, and those checkpoints are lost
        if changed:
            return self.restart(self.folder, saved, changed)
        order_start = journal.first_step(saved.nonce)
        return self._start_at(self._with_keys(saved, saved.nonce), order_start)

    def restart(self, folder: RunFolder, at: Checkpoint, changed: list[str]) -> Start:
        """Restart from `at` with a new nonce, and count all steps that may have been seen since.

        The warning says what has `changed`.
        """
        plan, journal = self.plan, folder.journal
        first, *later = journal.seen_since(at.step, at.nonce)
        count_steps(plan, at.ledger, first, order_start=journal.first_step(at.nonce))
        for seen in later:
            count_steps(plan, at.ledger, seen, order_start=seen.start)
        start = self._start_at(self._draw_nonce(folder, at), order_start=at.step)
        warn_of_restart(
            changed,
            at.step,
            repeated=at.ledger.steps - at.step,
            last_step=start.account.last_step,
            steps=plan.steps,
        )
        return start

    def save(self, at: Checkpoint) -> None:
        """Write a checkpoint, if the run has a folder."""
        if self.folder is not None:
            self.folder.save(at)

    def _draw_nonce(self, folder: RunFolder, at: Checkpoint) -> Checkpoint:
        """Return a checkpoint with a new nonce and its keys, written to journal and folder."""
        folder.journal.restart(self.fingerprint, at.step)
        checkpoint = self._with_keys(at, folder.journal.nonce)
        folder.save(checkpoint)
        return checkpoint

    def _with_keys(self, at: Checkpoint, nonce: str) -> Checkpoint:
        """Return a checkpoint whose noise key is derived from the run's key and a nonce."""
        key = self.plan.derive_key(fold_in_text(at.state.key, nonce), "noise")
        optimizer = with_noise_key(at.state.optimizer, self.placement.replicate(key))
        return at._replace(state=at.state._replace(optimizer=optimizer), nonce=nonce)

    def _start_at(self, at: Checkpoint, order_start: int) -> Start:
        reader = BatchReader(
            self.plan,
            self.examples,
            fold_in_text(at.state.key, at.nonce),
            size=self.microbatch_size,
            placement=self.placement,
            thread=self.thread,
            first_step=at.step,
            hashed=self.folder is not None,
        )
        return Start(at, Account(self.plan, at.ledger, at.step, order_start), reader)
