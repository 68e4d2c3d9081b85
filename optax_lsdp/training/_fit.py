"""fit: a plan, a loss, parameters and data go in, trained parameters come out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import jax
import optax

from optax_lsdp._checks import check_choice, check_function, check_whole
from optax_lsdp._keys import check_key
from optax_lsdp._loss import LossFn
from optax_lsdp.clipping import ClipStyle
from optax_lsdp.optimizers import Smoothing
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._data import Examples
from optax_lsdp.training._hosts import agreed_key
from optax_lsdp.training._report import Report, Trained, check_callbacks
from optax_lsdp.training._run import Run
from optax_lsdp.training._step import Average


def fit(
    plan: PrivacyPlan,
    loss_fn: LossFn,
    params: optax.Params,
    data: Any,
    *,
    optimizer: optax.GradientTransformation,
    smoothing: Smoothing | None = None,
    average: Average = None,
    clip_style: ClipStyle = "threshold",
    microbatch_size: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    folder: Path | str | None = None,
    save_every: int = 100,
    callbacks: Sequence[Callable[[Report], object]] = (),
    progress: bool = True,
    key: jax.Array | None = None,
) -> Trained:
    """Train as planned, and go on where a run in the same folder was interrupted.

    Args:
        plan: what is to be spent, and how.
        loss_fn: `loss_fn(params, example)`, a scalar for one example without batch axis; or
            `loss_fn(params, example, key)`, with a key for each example, for dropout and
            `average_views`. See `mixed_precision` and `keep_batch_axis`. `check_model` tells
            what is wrong with it on public examples. `fit` refuses batch normalisation, and
            warns once if the loss of a batch is not finite, which depends on private data: release
            no log that holds the warning. Examples whose gradient is not finite contribute nothing.
        params: the first parameters. Placed on a mesh, they stay as they are placed.
        data: an array, or a dict or tuple of them, with a leading axis of examples, in memory or
            memory-mapped; or a list or source of examples with `len` and `[index]`, as Grain's.
        optimizer: any Optax optimizer, which the plan makes private.
        smoothing: a `laplacian_smooth(...)` transform in place of the plan's σ.
        average: "polyak" for the mean of the parameters of all steps, or a decay such as 0.999 for
            one that forgets exponentially; in float32.
        clip_style: as in `clipped_grad`; "automatic" leaves only the learning rate to tune.
        microbatch_size: how many examples are differentiated at a time, to bound memory; a multiple
            of the number of devices. What would hold padding alone is left out, which saves the
            time that the room for large Poisson batches costs; how long a step takes then tells
            how large its batch was.
        mesh: devices over which examples are spread.
        folder: where the run is kept: plan, journal and checkpoints, which hold the noise key
            and are as secret as the data. One that other users may enter is closed to them, with
            a warning, or refused. `export_params` writes what may be released.
        save_every: steps between checkpoints.
        callbacks: functions that are told of each step. One that raises `StopTraining` ends the
            run, which is saved and returned. If one raises anything else, the run ends as by a
            fall: it goes on from its last checkpoint, and tells of the steps since then again.
        progress: whether a bar is shown.
        key: the key of a new run; a run that goes on has its own. By default it is fresh.

    A killed run that is started again in the same folder, with nothing changed, takes the very same
    steps and ends with the same parameters to the bit. Whatever has changed (data, code,
    versions, devices), it then draws other noise, and steps that may have been seen are counted
    twice. SIGTERM and Ctrl-C finish the step and save; then the one returns, and the other raises
    KeyboardInterrupt. A second Ctrl-C stops at once.

    Raises:
        DataError: an example cannot be read; its index is named, and the run can go on.

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
    examples = Examples(data)
    if examples.size != plan.dataset_size:
        raise ValueError(
            f"`data` must have {plan.dataset_size} examples, as planned, got {examples.size}; "
            "dicts and tuples hold arrays, lists hold examples."
        )
    check_callbacks(callbacks)
    if not (mesh is None or isinstance(mesh, jax.sharding.Mesh)):
        raise TypeError(
            f"`mesh` must be a jax.sharding.Mesh, got {mesh!r}; make one of all devices with "
            'jax.make_mesh((jax.device_count(),), ("examples",)).'
        )
    check_function("loss_fn", loss_fn, "of parameters and one example")
    check_choice("clip_style", clip_style, get_args(ClipStyle))
    if key is not None:
        check_key("key", key)
    run = Run(plan, examples, optimizer, smoothing, average, microbatch_size, mesh, clip_style)
    try:
        with nullcontext() if mesh is None else jax.set_mesh(mesh):
            run.start(loss_fn, params, agreed_key() if key is None else key, folder)
            with _until_told_to_stop() as told:
                done = run.loop(save_every, callbacks, progress, told)
            if told.number == signal.SIGINT:
                raise KeyboardInterrupt
            return done
    finally:
        run.close()


class _Told(threading.Event):
    """Set by a signal, which it remembers."""

    number: int | None = None

    def handle(self, number: int, frame: Any) -> None:
        """Remember the first signal; a second one stops at once."""
        del frame
        if self.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = number
        self.set()


@contextmanager
def _until_told_to_stop() -> Iterator[_Told]:
    """Let SIGTERM and Ctrl-C set an event, if this is the main thread."""
    told = _Told()
    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    before = {n: signal.signal(n, told.handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
