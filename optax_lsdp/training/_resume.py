"""How a run starts, resumes and restarts, and how much of its budget it has spent.

If its fingerprint is unchanged, a run resumes: it repeats the steps after the last checkpoint with
the same noise, so these steps count once. Otherwise the run restarts: a new nonce gives new noise
and new batches. Steps after the checkpoint whose results may have been seen then count twice.
"""

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
from optax_lsdp.training._files import START_AGAIN
from optax_lsdp.training._multihost import Placement
from optax_lsdp.training._step import CompiledStep, with_noise_key
from optax_lsdp.training._validation import warn_caller


class Account:
    """The steps that a run has spent, and the step until which its budget lasts.

    `ledger` has all steps that count, some of them twice. The run starts, resumes or restarts at
    `first_step`. It must end at `last_step`, where the plan or the budget ends. `order_start` is
    the step at which the run last started or restarted, and drew new batches.
    """

    def __init__(
        self, plan: PrivacyPlan, ledger: Ledger, first_step: int, order_start: int
    ) -> None:
        self.ledger, self.first_step = ledger, first_step
        self.last_step = first_step + plan.remaining_steps(ledger, first_step)
        self._plan, self._order_start = plan, order_start
        self._before = deepcopy(ledger)

    def record(self, step: int) -> None:
        """Append a step to the ledger."""
        count_steps(self._plan, self.ledger, range(step, step + 1), self._order_start)

    def epsilon(self, step: int) -> float:
        """Return ε after `step` steps. `step` must be larger than `first_step`."""
        return float(self._curve[step - self.first_step - 1])

    @cached_property
    def _curve(self) -> np.ndarray:
        """Return ε after every step. This takes a second or two."""
        return self._plan.epsilons(self._before, self.first_step)


def count_steps(plan: PrivacyPlan, ledger: Ledger, steps: range, order_start: int) -> None:
    """Append steps to a ledger. Announced steps beyond the plan count like its last step.

    Some schemes use each example once per epoch. A restart within an epoch draws a new order, which
    may repeat examples that the old order has used in this epoch. So at `order_start`, where an
    order starts, all steps since the beginning of the epoch count again.
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
    """Everything that depends on the nonce, after a run was started, resumed or restarted."""

    checkpoint: Checkpoint  # where the run continues; its nonce determines its noise key
    account: Account  # the steps spent, and the step until which the budget lasts
    reader: BatchReader  # reads the batches of the steps to come


@dataclass(frozen=True)
class Run:
    """Everything that stays the same when a run restarts."""

    plan: PrivacyPlan
    examples: Examples
    program: CompiledStep
    microbatch_size: int
    placement: Placement
    thread: ThreadPoolExecutor  # reads batches
    folder: RunFolder | None
    fingerprint: dict[str, str]  # see `compute_fingerprint`; empty without a folder

    def start(self, new: Checkpoint, saved: Checkpoint | None) -> Start:
        """Start a run at `new`, or resume or restart it at `saved`, its last checkpoint."""
        if self.folder is None:
            return self._start_at(self._with_keys(new, new.nonce), order_start=0)
        journal = self.folder.journal
        if saved is None:
            if journal.has_steps:
                raise ValueError(
                    "`folder` must hold a checkpoint if its journal has steps, got none in "
                    f"{str(self.folder.path)!r}, so the privacy spent is unknown; {START_AGAIN}."
                )
            return self._start_at(self._draw_nonce(self.folder, new), order_start=0)
        changed = journal.changed(self.fingerprint)
        if not changed and journal.nonce != saved.nonce:
            # The run has restarted after `saved`, but its later checkpoints are lost.
            changed = ["checkpoints"]
        if changed:
            return self.restart(self.folder, saved, changed)
        order_start = journal.first_step(saved.nonce)
        return self._start_at(self._with_keys(saved, saved.nonce), order_start)

    def restart(self, folder: RunFolder, at: Checkpoint, changed: list[str]) -> Start:
        """Restart from `at` with a new nonce, count all later steps that may be known, and warn."""
        plan, journal = self.plan, folder.journal
        first, *later = journal.seen_since(at.step, at.nonce)
        count_steps(plan, at.ledger, first, order_start=journal.first_step(at.nonce))
        for seen in later:
            count_steps(plan, at.ledger, seen, order_start=seen.start)
        start = self._start_at(self._draw_nonce(folder, at), order_start=at.step)
        outcome = "is finished and returned unchanged; choose another folder to train again"
        if at.step < plan.steps:
            outcome = (
                f"restarts from step {at.step} with new noise, counts {at.ledger.steps - at.step} "
                f"more steps than its result contains, and ends at step {start.account.last_step} "
                f"of {plan.steps}"
            )
        made = f"The run in this folder was made with different {', '.join(changed)}"
        warn_caller(f"{made}: it {outcome}.")
        return start

    def save(self, at: Checkpoint) -> None:
        """Write a checkpoint, if the run has a folder."""
        if self.folder is not None:
            self.folder.save(at)

    def _draw_nonce(self, folder: RunFolder, at: Checkpoint) -> Checkpoint:
        """Draw a new nonce, write it to the journal, and save and return `at` with this nonce."""
        folder.journal.restart(self.fingerprint, at.step)
        checkpoint = self._with_keys(at, folder.journal.nonce)
        folder.save(checkpoint)
        return checkpoint

    def _with_keys(self, at: Checkpoint, nonce: str) -> Checkpoint:
        """Return `at` with this nonce and a noise key derived from the run's key and the nonce."""
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
