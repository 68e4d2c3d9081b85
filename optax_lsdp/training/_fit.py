"""Train a model under a `PrivacyPlan`.

`fit` checks its arguments, compiles the step, and starts or resumes the run. `_train` is the loop:
read a batch, announce the step in the journal, take the step, record it in the ledger, report it,
save a checkpoint.
"""

import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import optax

from optax_lsdp._checks import check_choice, check_function, check_whole
from optax_lsdp._keys import check_key
from optax_lsdp._loss import LossFn, average_examples
from optax_lsdp._types import PyTree
from optax_lsdp.accounting import Ledger
from optax_lsdp.clipping import ClipStyle
from optax_lsdp.optimizers import Smoothing
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.smoothing import chosen_smoothing, find_auto_state
from optax_lsdp.training import _resume, _step
from optax_lsdp.training._checkpoint import Checkpoint, RunFolder
from optax_lsdp.training._data import (
    Source,
    check_unit,
    choose_microbatch_size,
    describe_microbatch,
    open_data,
)
from optax_lsdp.training._journal import FIRST_NONCE
from optax_lsdp.training._multihost import Placement, any_process, broadcast_fresh_key
from optax_lsdp.training._progress import (
    Callback,
    FitResult,
    Reporter,
    Stopped,
    check_callbacks,
    released_norms,
)
from optax_lsdp.training._users import UserData
from optax_lsdp.training._validation import check_loss, check_params, check_uses_params
from optax_lsdp.watching import find_watch_state, training_curve


def fit(
    plan: PrivacyPlan,
    loss_fn: LossFn,
    params: optax.Params,
    data: PyTree | Source | UserData,
    *,
    optimizer: optax.GradientTransformation,
    smoothing: Smoothing | None = None,
    average: _step.Average = None,
    clip_style: ClipStyle = "threshold",
    watch: bool = False,
    microbatch_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    folder: Path | str | None = None,
    save_every: int = 100,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    key: jax.Array | None = None,
) -> FitResult:
    """Train a model as planned. If `folder` holds an interrupted run, resume that run.

    Args:
        plan: the `PrivacyPlan`: the budget, batches, noise, clip norm and number of steps.
        loss_fn: `loss_fn(params, example)` returns the scalar loss of one example, which has no
            batch axis. For dropout or `average_views`, write a loss with a third argument, `key`.
            `fit` then passes a different key for each example. See also `check_model`,
            `mixed_precision` and `keep_batch_axis`. Batch normalisation is refused. Examples whose
            gradient is not finite contribute nothing. If the loss of a batch is not finite, `fit`
            warns once. The warning depends on private data, so release no log that contains it.
        params: the initial parameters. If they are on a mesh, they keep their sharding.
        data: an array, or a dict or tuple of arrays, which may be memory-mapped. The first axis of
            each array counts the examples. `data` can also be a list of examples, or a source of
            examples with `len(data)` and `data[index]`, such as a Grain data source. If the plan's
            unit is "user", pass a `UserData`.
        optimizer: an ordinary Optax optimizer. The plan makes it private.
        smoothing: replaces the plan's smoothing: σ as a number or schedule, "auto", or a
            `laplacian_smooth(...)` transform.
        average: "polyak" to compute the mean of the parameters over all steps, or a decay such as
            0.999 to compute an exponential average. The average is computed in float32.
        clip_style: see `clipped_grad`. With "automatic", only the learning rate needs tuning.
        watch: whether to estimate how far the clipped loss has come down, from the releases alone;
            see `watch`. The progress bar then shows the estimate with its standard error, and the
            result has a `curve`. Watching costs no privacy, but needs memory for a copy of the
            parameters. `fit` refuses it with "shuffled" batches and with a correlation.
        microbatch_size: how many examples or users to differentiate at a time, a multiple of the
            number of devices. A smaller number needs less memory. Microbatches of padding are
            skipped. This saves time, but the duration of a step then reveals the size of its batch.
        mesh: the devices over which the examples of a batch are split.
        folder: the folder for the run's plan, journal and checkpoints. Checkpoints hold the noise
            key, so keep the folder as secret as the data. If other users have permissions on it,
            `fit` removes these permissions and warns, or raises an error. To release parameters,
            write them with `export_params`.
        save_every: how many steps to take between two checkpoints.
        callbacks: functions that receive a `StepReport` after each step. If a callback raises
            `StopTraining`, `fit` saves the run and returns the result so far. After any other
            exception, the run stops as after a crash. When it resumes from its last checkpoint,
            callbacks receive the reports of all later steps again.
        progress: whether to show a progress bar.
        key: the random key of a new run. The default is a fresh key. A resumed run ignores `key`
            and keeps the key with which it began.

    If a run was killed, call `fit` again with the same folder. The run continues from its last
    checkpoint, and ends with exactly the same parameters as without the interruption. If data,
    code, package versions or devices have changed, the run draws new noise. Steps after the
    checkpoint then count twice if their results may have been seen.

    On SIGTERM or Ctrl-C, `fit` finishes the current step and saves a checkpoint. After SIGTERM it
    then returns, and after Ctrl-C it raises KeyboardInterrupt. A second Ctrl-C stops at once.

    Raises:
        DataError: if an example cannot be read or used. The message names the index of the example.
            The run can be resumed.
        MemoryError: if a step needs more memory than the devices have. The message names a
            `microbatch_size` that fits.

    >>> import jax.numpy as jnp
    >>> from optax_lsdp import PrivacyPlan
    >>> plan = PrivacyPlan(
    ...     dataset_size=100, expected_batch_size=20, steps=5, epsilon=3.0, delta=1e-5
    ... )
    >>> def loss_fn(params, x):
    ...     return (params - x) ** 2
    >>> data = jnp.linspace(-1, 1, 100)
    >>> done = fit(plan, loss_fn, jnp.zeros(()), data, optimizer=optax.sgd(0.1), progress=False)
    >>> done.steps, done.stopped, plan.spent(done.ledger) <= 3.0
    (5, 'done', True)
    """
    if not isinstance(plan, PrivacyPlan):
        raise TypeError(f"`plan` must be a PrivacyPlan, got {type(plan).__name__}.")
    arrays = data if isinstance(data, dict | tuple | jax.Array) else ()
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, arrays, key))):
        raise TypeError("`fit` must be called outside of jit, grad and vmap, got traced arrays.")
    check_whole("save_every", save_every)
    examples = open_data(data)
    check_unit(plan, data, examples)
    unchanged, loss_of_unit = plan, loss_fn
    if examples.has_user_axis:
        loss_of_unit = average_examples(loss_fn)
    elif plan.unit == "user":  # each user has one example: draw the same numbers as without users
        with warnings.catch_warnings(action="ignore"):  # the caller's plan has warned already
            plan = replace(plan, unit="example")
    check_callbacks(callbacks)
    if not (mesh is None or isinstance(mesh, jax.sharding.Mesh)):
        raise TypeError(
            f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}; make a mesh of all devices with "
            'jax.make_mesh((jax.device_count(),), ("examples",)).'
        )
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_choice("clip_style", clip_style, get_args(ClipStyle))
    if key is not None:
        check_key("key", key)
    placement = Placement(mesh)
    size = choose_microbatch_size(plan, microbatch_size, placement.devices)

    def make_private(key: jax.Array) -> optax.GradientTransformation:
        return plan.optimizer(optimizer, key, smoothing=smoothing, watch=watch)

    def initial_state(key: jax.Array) -> _step.State:
        # Copy all arrays: no array may be donated twice, and the caller's arrays must stay usable.
        copies = jax.tree.map(lambda x: placement.keep_or_replicate(jnp.array(x)), params)
        inner = jax.tree.map(jnp.array, make_private(key).init(copies))
        state = _step.State(copies, inner, _step.initial_average(average, copies), jnp.copy(key))
        return jax.tree.map(placement.keep_or_replicate, state)

    with nullcontext() if mesh is None else jax.set_mesh(mesh), ExitStack() as stack:
        check_params(params)
        state = initial_state(broadcast_fresh_key() if key is None else key)
        # Trace the loss without shardings, because XLA chooses them, as in the clipping engines.
        shapes = _step.describe(state.params, False)
        loss = check_loss(loss_fn, shapes, examples.first)
        kept, saved, initial = None, None, {}
        if folder is not None:
            kept = stack.enter_context(closing(RunFolder(folder, unchanged)))
            initial = _resume.hash_initial(state.params, state.optimizer)
            saved = kept.restore(state)
            if saved is not None:
                _resume.warn_if_ignored(initial, saved.initial)
                state = saved.state  # frees the memory of the initial state
        compiler = _resume.Compiler(examples)
        step = _step.make_step(plan, loss_of_unit, make_private(state.key), average, clip_style)
        shapes_of_state = _step.describe(state, mesh is not None)

        def compile_step(size: int) -> _step.CompiledStep:
            return _step.CompiledStep(
                step,
                shapes_of_state,
                describe_microbatch(examples, size, shapes_of_state.key, placement),
                count=-(-plan.room // size),
                compile=compiler.compile,
                replicated=placement.replicated,
                guard=guard,
            )

        guard = partial(_step.explain_out_of_memory, size, placement.devices, compile_step)
        with guard():
            program = compile_step(size)
        # Check this after compiling: `Compiler` has a better error if the loss closes over data.
        check_uses_params(loss, shapes)
        fingerprint = {} if kept is None else _resume.compute_fingerprint(compiler, examples, mesh)
        thread = stack.enter_context(ThreadPoolExecutor(1))
        run = _resume.Run(plan, examples, program, size, placement, thread, kept, fingerprint)
        start = run.start(Checkpoint(state, 0, Ledger(), FIRST_NONCE, initial), saved)
        reporter = Reporter(callbacks, plan.steps, start.checkpoint.step, progress)
        with _stop_signals() as received:
            result = _train(run, start, save_every, reporter, received)
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        return result


def _train(
    run: _resume.Run, start: _resume.Start, save_every: int, reporter: Reporter, signals: list[int]
) -> FitResult:
    """Take all steps that the budget covers. Stop early after a signal or `StopTraining`."""
    at, account, reader = start
    program, folder = run.program, run.folder
    wants_stop, is_between_steps = False, True
    try:
        with reporter.bar:
            while at.step < account.last_step:
                if any_process(bool(signals) or wants_stop):
                    break
                sums, batch = None, reader.next()
                while not batch.is_last:
                    sums = program.add(at.state, sums, batch.microbatch)
                    batch = reader.next()
                if folder is not None:
                    if any_process(folder.journal.differs(at.step, batch.digest)):
                        at, account, reader = run.restart(folder, at, ["data"])
                        continue
                    # Announce the step before taking it, so that it counts even after a crash.
                    folder.journal.record(at.step, batch.digest, sync=not run.examples.is_hashed)
                is_between_steps = False
                # Compiled: clip, add noise, smooth, update, average.
                state, loss = program.take(at.state, sums, batch.microbatch)
                account.record(at.step)
                at = at._replace(state=state, step=at.step + 1)
                wants_stop = reporter.report(at.step, state, loss, account.epsilon)
                is_between_steps = True
                is_due = at.step % save_every == 0
                if is_due or at.step in (account.first_step + 1, account.last_step):
                    reporter.check_loss(loss, at.step)
                if is_due:
                    run.save(at)
    finally:
        # After an interruption within a step, do not save: the ledger may not have the step yet, or
        # a callback may not have received its report.
        if is_between_steps:
            run.save(at)
    stopped: Stopped = "done" if at.step == run.plan.steps else "budget"
    if at.step < account.last_step:
        stopped = "callback" if any_process(wants_stop) else "signal"
    learned, norms = at.state.optimizer, released_norms(at.state)
    curve = None if find_watch_state(learned) is None else training_curve(learned)
    chosen = None if find_auto_state(learned) is None else chosen_smoothing(learned)
    params, average = at.state.params, at.state.average
    return FitResult(params, average, at.step, at.ledger, stopped, curve, norms, chosen)


@contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C in a list instead of stopping. A second Ctrl-C stops at once."""
    received: list[int] = []

    def handle(number: int, _frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)

    with ExitStack() as stack:
        # Python allows signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                stack.callback(signal.signal, number, signal.signal(number, handle))
        yield received
