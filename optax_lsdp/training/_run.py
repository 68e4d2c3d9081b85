"""A run: it starts, or goes on where it was, takes its steps, and can be stopped at any moment."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from tqdm import tqdm

from optax_lsdp._keys import fold_in_text
from optax_lsdp.accounting import Ledger, show_epsilon
from optax_lsdp.optimizers import Smoothing
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._batches import Batches, abstract, replicate
from optax_lsdp.training._data import Examples
from optax_lsdp.training._folder import RunFolder, Saved
from optax_lsdp.training._hosts import holds_anywhere
from optax_lsdp.training._journal import FIRST
from optax_lsdp.training._losses import Loss
from optax_lsdp.training._step import Average, State, make_steps, with_noise_key

_IN_FLIGHT = 2  # steps that may be under way before the loop waits


class Report(NamedTuple):
    """What a callback is told after a step.

    Attributes:
        step: how many steps were taken.
        params: the parameters; the next step takes their memory, so copy what is to be kept.
        average: their average, or an empty tuple.
        epsilon: ε so far, at the plan's δ.
        private_loss: the mean training loss. It is computed without noise: look at it
            if you may look at the data, and release nothing that depends on it.
    """

    step: int
    params: Any
    average: Any
    epsilon: float
    private_loss: jax.Array


class Trained(NamedTuple):
    """The end of a run. All but the ledger's purpose is covered by the guarantee.

    Attributes:
        params: the parameters.
        average: their average, or an empty tuple.
        steps: how many steps were taken.
        ledger: what was spent.
        stopped: why the run ended: "done", "budget" or "signal".
    """

    params: Any
    average: Any
    steps: int
    ledger: Ledger
    stopped: str


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
    ) -> None:
        self.plan, self.examples, self.average = plan, examples, average
        self.microbatch_size, self.mesh = microbatch_size, mesh
        self.everywhere = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.P())
        self.private = lambda key: plan.optimizer(optimizer, key, smoothing=smoothing)
        self.folder: RunFolder | None = None
        self.workers = ThreadPoolExecutor(1)
        self.ledger, self.step, self.nonce, self.is_between = Ledger(), 0, FIRST, True

    def start(
        self, loss_fn: Loss, params: optax.Params, key: jax.Array, folder: Path | str | None
    ) -> None:
        """Make or restore the state, compile, and find out whether all is as it was."""
        self.state = self._first_state(params, key)
        saved = None
        if folder is not None:
            self.folder = RunFolder(folder, self.plan)
            saved = self.folder.restore(self.state)
        if saved is not None:
            self.state, self.step, self.ledger, self.nonce = saved
        self._place(self.nonce)
        text = self._compile(loss_fn)
        self.fingerprint = _fingerprint(text, self.examples, self.mesh)
        if self.folder is None:
            return
        journal = self.folder.journal
        if saved is None and journal.has_steps:
            raise ValueError(
                f"`folder` must hold the checkpoints of its journal, got none in {str(folder)!r}: "
                "what was spent is not known; take another folder."
            )
        same = saved and journal.is_same(self.fingerprint) and journal.nonce == self.nonce
        if holds_anywhere(not same):
            self._renew(counted=saved is not None)

    def _first_state(self, params: optax.Params, key: jax.Array) -> State:
        def place(x: jax.Array) -> jax.Array:
            if self.mesh is None or getattr(x.sharding, "mesh", None) == self.mesh:
                return x
            return replicate(x, self.everywhere)

        params = jax.tree.map(lambda x: place(jnp.array(x)), params)
        inner = self.private(key).init(params)
        mean = () if self.average is None else jax.tree.map(jnp.copy, params)
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

    def _compile(self, loss_fn: Loss) -> str:
        """Compile the step, and return the text of its program."""
        add, step = make_steps(self.plan, loss_fn, self.private(self.state.key), self.average)
        on_mesh = self.mesh is not None
        state, chunk = abstract(self.state, on_mesh), abstract(self.batches.like(), on_mesh)
        texts, sums = [], None
        self.add_first = self.add_next = cast(Any, None)  # of one chunk there is nothing to add
        if self.batches.count > 1:
            first = jax.jit(add).lower(state.params, None, chunk)
            self.add_first = first.compile()
            sums = jax.eval_shape(add, state.params, None, chunk)
            if on_mesh:
                placed = self.add_first.output_shardings
                sums = jax.tree.map(lambda x, s: x.update(sharding=s), sums, placed)
            more = jax.jit(add, donate_argnums=1).lower(state.params, sums, chunk)
            self.add_next = more.compile()
            texts += [first.as_text(), more.as_text()]
        results: Any = None
        if self.everywhere is not None:
            results = jax.tree.map(lambda x: x.sharding, self.state), self.everywhere
        last = jax.jit(step, donate_argnums=0, out_shardings=results).lower(state, sums, chunk)
        self.take_step = last.compile()
        return "\n".join([*texts, last.as_text()])

    def _renew(self, *, counted: bool = True) -> None:
        """Go on under other circumstances: other keys, and what may have been seen counts again."""
        if self.folder is None:
            return
        if counted:
            for step in self.folder.journal.seen_since(self.step, self.nonce):
                self.ledger.append(self.plan.event(min(step, self.plan.steps - 1)))
        self.folder.journal.renew(self.fingerprint)
        self.nonce = self.folder.journal.nonce
        self._place(self.nonce)
        self._save()

    def _save(self) -> None:
        if self.folder is not None:
            self.folder.save(Saved(self.state, self.step, self.ledger, self.nonce))

    def loop(
        self,
        save_every: int,
        callbacks: Sequence[Callable[[Report], None]],
        progress: bool,
        terminated: threading.Event,
    ) -> Trained:
        """Take all steps that are left."""
        plan, stopped, losses = self.plan, "done", [jnp.zeros([])]
        shown = tqdm(
            total=plan.steps, initial=self.step, desc="private training", disable=not progress
        )
        upcoming = self.workers.submit(self.batches.read, self.step)
        try:
            with shown:
                while self.step < plan.steps:
                    if holds_anywhere(terminated.is_set()):
                        stopped = "signal"
                        break
                    if not plan.allows(self.ledger, self.step):
                        stopped = "budget"
                        break
                    batch = upcoming.result()
                    if self.folder is not None:
                        if holds_anywhere(self.folder.journal.differs(self.step, batch.digest)):
                            self._renew()
                            batch = self.batches.read(self.step)
                        self.folder.journal.record(self.step, batch.digest)
                    upcoming = self.workers.submit(self.batches.read, self.step + 1)
                    self.is_between = False
                    losses.append(self._take(batch.chunks))
                    self.ledger.append(plan.event(self.step))
                    self.step += 1
                    self.is_between = True
                    if len(losses) > _IN_FLIGHT:
                        jax.block_until_ready(losses.pop(0))
                    self._tell(callbacks, losses[-1], shown, losses[0])
                    if self.step % save_every == 0:
                        self._save()
        finally:
            if self.is_between:  # within a step its parts belong to different steps
                self._save()
        return Trained(self.state.params, self.state.average, self.step, self.ledger, stopped)

    def _take(self, chunks: list[Any]) -> jax.Array:
        sums = None
        for index, chunk in enumerate(chunks[:-1]):
            add = self.add_next if index else self.add_first
            sums = add(self.state.params, sums, chunk)
        self.state, loss = self.take_step(self.state, sums, chunks[-1])
        return loss

    def _tell(
        self, callbacks: Sequence[Callable[[Report], None]], loss: Any, shown: Any, ready: Any
    ) -> None:
        if shown.update():
            spent = show_epsilon(self.plan.spent(self.ledger))
            shown.set_postfix_str(f"ε = {spent}, private loss {float(ready):.3g}")
        for callback in callbacks:
            epsilon = self.plan.spent(self.ledger)
            callback(Report(self.step, self.state.params, self.state.average, epsilon, loss))

    def close(self) -> None:
        """Stop reading, and let others have the folder."""
        self.workers.shutdown(cancel_futures=True)
        if self.folder is not None:
            self.folder.close()


def _fingerprint(text: str, examples: Examples, mesh: jax.sharding.Mesh | None) -> str:
    """Return a hash of everything that decides what a step computes, to the bit."""
    packages = [f"{name} {version(name)}" for name in ("jax", "jaxlib", "optax", "optax-lsdp")]
    devices = jax.devices() if mesh is None else mesh.devices.flat
    parts = [
        re.sub(r"group_id=\d+", "", text),  # JAX counts on from program to program
        examples.fingerprint(),
        *packages,
        *(device.device_kind for device in devices),
        str(jax.process_count()),
        platform.machine(),
        str(os.cpu_count()),
        os.environ.get("XLA_FLAGS", ""),
    ]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()
