"""A run: it starts, or goes on where it was, takes its steps, and can be stopped at any moment."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._keys import fold_in_text
from optax_lsdp._loss import LossFn
from optax_lsdp.accounting import Ledger
from optax_lsdp.clipping import ClipStyle
from optax_lsdp.optimizers import Smoothing
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._batches import Batches, Read, abstract, replicate
from optax_lsdp.training._circumstances import Program, beginning, circumstances
from optax_lsdp.training._data import Examples
from optax_lsdp.training._folder import RunFolder, Saved
from optax_lsdp.training._given import check_params
from optax_lsdp.training._hosts import holds_anywhere, joined_text, raise_together
from optax_lsdp.training._journal import FIRST
from optax_lsdp.training._preflight import check_loss, check_used
from optax_lsdp.training._report import (
    Report,
    Shown,
    Trained,
    WatchedLoss,
    tell_all,
    warn_of_beginning,
    warn_of_change,
)
from optax_lsdp.training._step import (
    Average,
    State,
    first_average,
    make_steps,
    with_noise_key,
)

_IN_FLIGHT = 2  # chunks that may be under way before the loop waits


class Run:
    """A run under way."""

    def __init__(
        self,
        plan: PrivacyPlan,
        examples: Examples,
        optimizer: optax.GradientTransformation,
        smoothing: Smoothing | None,
        average: Average,
        microbatch_size: int | None,
        mesh: jax.sharding.Mesh | None,
        clip_style: ClipStyle = "threshold",
    ) -> None:
        self.plan, self.examples, self.average = plan, examples, average
        self.clip_style: ClipStyle = clip_style
        self.microbatch_size, self.mesh = microbatch_size, mesh
        self.everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P())
        self.private = lambda key: plan.optimizer(optimizer, key, smoothing=smoothing)
        self.folder: RunFolder | None = None
        self.workers = ThreadPoolExecutor(1)
        self.under_way: deque[jax.Array] = deque()
        self.losses: deque[jax.Array] = deque(maxlen=2)
        self.curve: np.ndarray | None = None
        self.ledger, self.step, self.nonce = Ledger(), 0, FIRST
        self.begins = self.is_between = True
        self.is_wide = bool(jax.config.read("jax_enable_x64"))

    def start(
        self, loss_fn: LossFn, params: optax.Params, key: jax.Array, folder: Path | str | None
    ) -> None:
        """Make or restore the state, compile, and find out whether all is as it was."""
        self.state = self._first_state(params, key)
        shapes = abstract(self.state.params, False)  # engines let XLA place them, as here
        loss = check_loss(loss_fn, shapes, self.examples.first)
        self.began = beginning(self.state.params, self.state.optimizer)
        saved = None
        if folder is not None:
            self.folder = RunFolder(folder, self.plan)
            saved = self.folder.restore(self.state)
        if saved is not None:
            warn_of_beginning(self.began, saved.began)
            self.state, self.step, self.ledger, self.nonce, self.began = saved
        self._place(self.nonce)
        program = self._compile(loss_fn)
        check_used(loss, shapes)  # after the compiler's check for examples that it closes over
        here = circumstances(program, self.examples, self.mesh)
        self.circumstances = {name: joined_text(text) for name, text in here.items()}
        if self.folder is None:
            return self._look_ahead()
        journal = self.folder.journal
        if saved is None and journal.has_steps:
            raise ValueError(
                f"`folder` must hold the checkpoints of its journal, got none in {str(folder)!r}: "
                "what was spent is not known; take another folder."
            )
        self.begins = saved is None
        changed = journal.changed(self.circumstances)
        if saved is None or changed:
            return self._renew(changed, counted=saved is not None)
        if journal.nonce != self.nonce:  # the checkpoint is older than the journal's last lines
            return self._renew(["checkpoints"])
        self._look_ahead()

    def _first_state(self, params: optax.Params, key: jax.Array) -> State:
        def place(x: jax.Array) -> jax.Array:
            if self.mesh is None or getattr(x.sharding, "mesh", None) == self.mesh:
                return x
            return replicate(x, self.everywhere)

        check_params(params)
        params = jax.tree.map(lambda x: place(jnp.array(x)), params)
        inner = jax.tree.map(jnp.array, self.private(key).init(params))  # no array twice
        mean = first_average(self.average, params)
        return jax.tree.map(place, State(params, inner, mean, jnp.copy(key)))

    def _place(self, nonce: str) -> None:
        """Derive all keys of these circumstances."""
        key = fold_in_text(self.state.key, nonce)
        noise_key = replicate(self.plan.derive_key(key, "noise"), self.everywhere)
        self.state = self.state._replace(optimizer=with_noise_key(self.state.optimizer, noise_key))
        hashed = self.folder is not None
        self.batches = Batches(
            self.plan, self.examples, key, self.microbatch_size, self.mesh, hashed=hashed
        )

    def _compile(self, loss_fn: LossFn) -> Program:
        """Compile the step, and return the text of its program."""
        private = self.private(self.state.key)
        add, step = make_steps(self.plan, loss_fn, private, self.average, self.clip_style)
        on_mesh = self.mesh is not None
        state, chunk = abstract(self.state, on_mesh), abstract(self.batches.like(), on_mesh)
        program, sums = Program(self.examples), None
        if self.batches.count > 1:  # of one chunk there is nothing to add
            self.add_first = program.compile(jax.jit(add), state.params, None, chunk)
            sums, _ = jax.eval_shape(add, state.params, None, chunk)
            if on_mesh:
                placed, _ = self.add_first.output_shardings
                sums = jax.tree.map(lambda x, s: x.update(sharding=s), sums, placed)
            added = jax.jit(add, donate_argnums=1)
            self.add_next = program.compile(added, state.params, sums, chunk)
        results: Any = None
        if self.everywhere is not None:
            results = jax.tree.map(lambda x: x.sharding, self.state), self.everywhere
        whole = jax.jit(step, donate_argnums=0, out_shardings=results)
        self.take_step = program.compile(whole, state, sums, chunk)
        return program

    def _renew(self, changed: Sequence[str], *, counted: bool = True) -> None:
        """Go on under other circumstances: other keys, and what may have been seen counts again."""
        if self.folder is None:
            return
        journal = self.folder.journal
        if counted:
            for index, seen in enumerate(journal.seen_since(self.step, self.nonce)):
                self.begins = self.begins or index > 0
                for step in seen:
                    self._count(min(step, self.plan.steps - 1))
        journal.renew(self.circumstances, self.step)
        self.nonce, self.begins = journal.nonce, True
        self._place(self.nonce)
        self._look_ahead()
        self._save()
        if counted:
            again, steps = self.ledger.steps - self.step, self.plan.steps
            warn_of_change(changed, self.step, again, self.until, steps)

    def _count(self, step: int) -> None:
        """Record a step; where a shuffled order begins, all of its epoch counts as taken."""
        event = self.plan.event(step)
        if self.begins and event.sampling == "shuffled":
            place = step % (self.plan.dataset_size // self.plan.expected_batch_size)
            self.ledger.append(replace(event, steps=place + 1))
        else:
            self.ledger.append(event, continues=True)
        self.begins = False

    def _look_ahead(self) -> None:
        """Begin to read, and find out how far the budget reaches."""
        self.stream = self.batches.stream(self.step)
        self.upcoming = self.workers.submit(self._read)
        self.until = self.step + self.plan.remaining_steps(self.ledger, self.step)
        self.first, self.before, self.curve = self.step, Ledger(self.ledger.runs), None

    def epsilon(self) -> float:
        """Return ε so far; the first answer takes a second or two, the others nothing."""
        if self.step == self.first:
            return self.plan.spent(self.ledger)
        if self.curve is None:
            self.curve = self.plan.epsilons(self.before, self.first)
        return float(self.curve[self.step - self.first - 1])

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.save(Saved(self.state, self.step, self.ledger, self.nonce, self.began))

    def loop(
        self,
        save_every: int,
        callbacks: Sequence[Callable[[Report], object]],
        progress: bool,
        terminated: threading.Event,
    ) -> Trained:
        """Take all steps that are left and covered by the budget."""
        error: BaseException | None = None
        shown, watched = Shown(self.plan.steps, self.step, progress), WatchedLoss()
        is_enough = False
        try:
            with shown.bar:
                while self.step < self.until:
                    if holds_anywhere(terminated.is_set() or is_enough):
                        break
                    if not self._take():
                        continue
                    try:
                        last = self.step == self.until
                        shown.tell(self.step, self.epsilon, last=last)
                        if callbacks:
                            is_enough = tell_all(callbacks, self._report())
                    except Exception as found:
                        error = found
                    raise_together(error)
                    self.is_between = True
                    is_due = self.step % save_every == 0
                    if is_due or last or self.step == self.first + 1:
                        watched.look(self.losses[-1], self.step)
                    if is_due:
                        self._save()
        finally:
            if self.is_between:  # else parts differ in their step, or callbacks do not know it
                self._save()
        stopped = "done" if self.step == self.plan.steps else "budget"
        if self.step < self.until:
            stopped = "callback" if holds_anywhere(is_enough) else "signal"
        return Trained(self.state.params, self.state.average, self.step, self.ledger, stopped)

    def _take(self) -> bool:
        """Take a step, of which none is told yet; not if its examples have changed since."""
        sums = None
        while not (read := self._next_chunk()).is_last:
            add = self.add_first if sums is None else self.add_next
            sums, token = add(self.state.params, sums, read.chunk)
            self._wait(token)
        if self.folder is not None:
            journal = self.folder.journal
            if holds_anywhere(journal.differs(self.step, read.digest)):
                self._renew(["data"])
                return False
            journal.record(self.step, read.digest, safe=not self.examples.is_hashed)
        self.is_between = False
        self.state, loss = self.take_step(self.state, sums, read.chunk)
        self._count(self.step)
        self.step += 1
        self.losses.append(loss)
        self._wait(loss)
        return True

    def _read(self) -> Read | None:
        with jax.enable_x64(self.is_wide):  # which this thread would not know
            return next(self.stream, None)

    def _next_chunk(self) -> Read:
        error: BaseException | None = None
        read: Any = None
        try:
            read = self.upcoming.result()
        except Exception as found:
            error = found
        raise_together(error)
        self.upcoming = self.workers.submit(self._read)
        return read

    def _wait(self, token: jax.Array) -> None:
        """Let only a few chunks be under way, which bounds the memory that they take."""
        self.under_way.append(token)
        if len(self.under_way) > _IN_FLIGHT:
            jax.block_until_ready(self.under_way.popleft())

    def _report(self) -> Report:
        state = self.state
        return Report(self.step, state.params, state.average, self.epsilon(), self.losses[-1])

    def close(self) -> None:
        """Stop reading, and let others have the folder."""
        self.workers.shutdown(cancel_futures=True)
        if self.folder is not None:
            self.folder.close()
