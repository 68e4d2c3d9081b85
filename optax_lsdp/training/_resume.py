"""Decide whether a run resumes or restarts, and count the steps that it has spent.

The fingerprint of a run holds hashes of everything that affects the exact result of a step. If it
is unchanged, a run resumes: it repeats the steps after the last checkpoint with the same noise, so
these steps count once. Otherwise the run restarts: a new nonce, a random label, gives new noise and
new batches. Steps after the checkpoint then count twice if someone may have seen their results.
"""

import hashlib
import os
import platform
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._jaxpr import constants
from optax_lsdp._keys import fold_in_text, is_key
from optax_lsdp._schemes import SCHEMES
from optax_lsdp._types import PyTree
from optax_lsdp.accounting import CorrelatedGaussian, Ledger
from optax_lsdp.correlated_noise import restart_noise, with_noise_key
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._checkpoint import Checkpoint, RunFolder
from optax_lsdp.training._data import BatchReader, Examples, hash_data, update_digest
from optax_lsdp.training._journal import START_AGAIN
from optax_lsdp.training._multihost import Placement, gather_text
from optax_lsdp.training._step import CompiledStep
from optax_lsdp.training._validation import warn_caller

_PACKAGES = ("jax", "jaxlib", "optax", "optax-lsdp")


class Compiler:
    """Compiles the functions of a run. `digest` is a hash of all programs and their constants."""

    def __init__(self, examples: Examples | None = None) -> None:
        self.digest = hashlib.blake2b()
        self._arrays = () if examples is None else examples.arrays

    def compile(self, function: jax.stages.Wrapped, *arguments: PyTree) -> jax.stages.Compiled:
        """Compile and hash a jitted function. Raise if it closes over an array of the data."""
        traced = function.trace(*arguments)
        for constant in constants(traced.jaxpr):  # JAX may omit constants from the program's text
            constant = jnp.asarray(constant)
            values = np.asarray(jax.random.key_data(constant) if is_key(constant) else constant)
            alike = [array for array in self._arrays if array.shape == values.shape]
            if any(np.array_equal(array.astype(values.dtype), values) for array in alike):
                raise ValueError(
                    "`loss_fn` must use the data only through its argument `example`, got a "
                    f"function that closes over an array of all examples, {values.dtype}"
                    f"{list(values.shape)}, which ε does not cover; use `example` instead."
                )
            update_digest(self.digest, values)
        lowered = traced.lower()
        # JAX counts `group_id` over all programs of a process, so it may differ in equal programs.
        self.digest.update(re.sub(r"group_id=\d+", "", lowered.as_text()).encode())
        return lowered.compile()


def compute_fingerprint(
    compiler: Compiler, examples: Examples, mesh: jax.sharding.Mesh | None
) -> dict[str, str]:
    """Return hashes of data, code, package versions and devices, equal in all processes."""

    def version_of(package: str) -> str:
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:  # a checkout on the Python path
            return f"{package} not installed"

    devices = jax.devices() if mesh is None else mesh.devices.flat
    machine = [
        "no mesh" if mesh is None else str(mesh.shape),
        *(device.device_kind for device in devices),
        str(jax.process_count()),
        platform.machine(),
        _processor(),
        str(os.cpu_count()),
        os.environ.get("XLA_FLAGS", ""),
    ]
    texts: dict[str, Iterable[str]] = {
        "data": [hash_data(examples)],
        "code or settings": [compiler.digest.hexdigest()],
        "versions of packages": map(version_of, _PACKAGES),
        "devices": machine,
    }
    joined = {name: "\n".join(lines).encode() for name, lines in texts.items()}
    hashes = {name: hashlib.blake2b(text, digest_size=16) for name, text in joined.items()}
    return {name: gather_text(found.hexdigest()) for name, found in hashes.items()}


def _processor() -> str:
    """Return a description of the first processor, because XLA compiles for its features."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    fields = ("vendor_id", "model", "model name", "flags", "Features")
    return "\n".join(line for line in text.splitlines() if line.split("\t")[0] in fields)


def hash_initial(params: PyTree, optimizer_state: PyTree) -> dict[str, str]:
    """Return hashes of the initial parameters and optimizer state, except random keys.

    With several processes, return no hashes, because each process holds only a part of the arrays.
    """
    hashes: dict[str, str] = {}
    if jax.process_count() == 1:
        for name, tree in (("params", params), ("optimizer", optimizer_state)):
            digest = hashlib.blake2b(digest_size=16)
            update_digest(digest, [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)])
            hashes[name] = digest.hexdigest()
    return hashes


def warn_if_ignored(passed: dict[str, str], initial: dict[str, str]) -> None:
    """Warn that a resumed run ignores parameters or optimizer state, if they have changed.

    `passed` are the hashes of `hash_initial` for this call of `fit`, and `initial` are the hashes
    for the call with which the run began.
    """
    remark = {"optimizer": " (its initial state, which may hold hyper-parameters)"}
    for name, digest in passed.items():
        if initial.get(name, digest) != digest:
            warn_caller(
                f"`{name}`{remark.get(name, '')} should be the same as when the run in this folder "
                "began, got a different value, which the resumed run ignores; choose another "
                "folder to train with the new value."
            )


class Account:
    """The steps that a run has spent, and the step at which its budget or its plan ends.

    Each start or restart draws new batches, and so a new order of the examples. `order_start` is
    the first step with this order. A run that resumes keeps the order, so its `first_step` may be
    later than `order_start`.

    Attributes:
        ledger: the steps taken so far. A restart makes steps count twice if it takes them again
            with new noise, or if their examples may be used again; see `count_steps`.
        first_step: the step at which the run started, resumed or restarted.
        last_step: the number of steps after which the plan or the budget ends.
    """

    def __init__(
        self, plan: PrivacyPlan, ledger: Ledger, first_step: int, order_start: int
    ) -> None:
        self.ledger, self.first_step = ledger, first_step
        self._plan, self._order_start = plan, order_start
        self._before, self._continues = deepcopy(ledger), first_step > order_start
        repeated = _repeated_steps(plan, first_step) if not self._continues else 0
        if repeated:  # a new order: the epoch's earlier steps count again
            self._before.append(replace(plan.event(first_step), steps=repeated))
            self._continues = True
        left = plan.remaining_steps(self._before, first_step, continues=self._continues)
        self.last_step = first_step + left

    def record(self, step: int) -> None:
        """Append a step to the ledger."""
        count_steps(self._plan, self.ledger, range(step, step + 1), self._order_start)

    def epsilon(self, step: int) -> float:
        """Return ε after `step` steps, for a `step` above `first_step`."""
        return float(self._curve[step - self.first_step - 1])

    @cached_property
    def _curve(self) -> np.ndarray:
        """Return ε after each step from `first_step` on. This takes a second or two."""
        return self._plan.epsilons(self._before, self.first_step, continues=self._continues)


def count_steps(plan: PrivacyPlan, ledger: Ledger, steps: range, order_start: int) -> None:
    """Append steps to a ledger. Steps beyond the plan count like its last step.

    Some schemes use each example at most once per epoch, in a random order. A restart within an
    epoch draws a new order, which may repeat examples that this epoch has already used. So at
    `order_start`, the first step of a new order, all earlier steps of the epoch count again.

    Correlated noise also starts again at `order_start`, so a new phase of the ledger begins there.
    """
    for step in steps:
        event = plan.event(min(step, plan.steps - 1))
        if isinstance(event, CorrelatedGaussian):
            ledger.append(event, continues=order_start < step < plan.steps)
        elif step == order_start and SCHEMES[event.sampling].once_per_epoch:
            ledger.append(replace(event, steps=_repeated_steps(plan, step) + 1))
        else:
            ledger.append(event, continues=True)


def _repeated_steps(plan: PrivacyPlan, step: int) -> int:
    """Return how many earlier steps count again if a new order starts at `step`."""
    scheme = SCHEMES[plan.sampling]
    if scheme.correlated or not scheme.once_per_epoch:
        return 0
    return step % int(scheme.steps_per_epoch(plan.dataset_size, plan.expected_batch_size))


class Start(NamedTuple):
    """The parts of a run that a restart replaces."""

    checkpoint: Checkpoint  # where the run continues
    account: Account
    reader: BatchReader


@dataclass(frozen=True)
class Run:
    """The parts of a run that a restart does not change."""

    plan: PrivacyPlan
    examples: Examples
    program: CompiledStep
    microbatch_size: int
    placement: Placement
    thread: ThreadPoolExecutor  # reads batches
    folder: RunFolder | None
    fingerprint: dict[str, str]  # see `compute_fingerprint`; empty without a folder

    def start(self, new: Checkpoint, saved: Checkpoint | None) -> Start:
        """Start a new run at `new`. If there is a checkpoint `saved`, resume or restart at it."""
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
        order_start = journal.seen_with(saved.nonce).start
        return self._start_at(self._with_keys(saved, saved.nonce), order_start)

    def restart(self, folder: RunFolder, at: Checkpoint, changed: list[str]) -> Start:
        """Restart from the checkpoint `at` with new noise, and warn what has `changed`.

        Add the steps after `at` whose results may have been seen to the ledger of `at`.
        """
        plan, journal = self.plan, folder.journal
        first, *later = journal.seen_since(at.step, at.nonce)
        count_steps(plan, at.ledger, first, order_start=journal.seen_with(at.nonce).start)
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
        names = ", ".join(changed)
        warn_caller(f"The run in this folder was made with different {names}: it {outcome}.")
        return start

    def save(self, at: Checkpoint) -> None:
        """Write a checkpoint, if the run has a folder."""
        if self.folder is not None:
            self.folder.save(at)

    def _draw_nonce(self, folder: RunFolder, at: Checkpoint) -> Checkpoint:
        """Draw a new nonce and write it to the journal. Save and return `at` with the new nonce."""
        folder.journal.restart(self.fingerprint, at.step)
        checkpoint = self._with_keys(at, folder.journal.nonce, restarts=True)
        folder.save(checkpoint)
        return checkpoint

    def _with_keys(self, at: Checkpoint, nonce: str, *, restarts: bool = False) -> Checkpoint:
        """Return the checkpoint with this nonce, and with a noise key for this run and nonce.

        With `restarts`, correlated noise begins again.
        """
        key = self.plan.derive_key(fold_in_text(at.state.key, nonce), "noise")
        change = restart_noise if restarts else with_noise_key
        optimizer = change(at.state.optimizer, self.placement.replicate(key))
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
