"""What a run tells its user: reports to callbacks, the progress bar, warnings, and the result."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

from optax_lsdp._trees import dtype_name, path_name
from optax_lsdp._types import PyTree
from optax_lsdp.accounting import Ledger, show_epsilon
from optax_lsdp.training._validation import warn_caller

Stopped = Literal["done", "budget", "callback", "signal"]

_NAMED_ARRAYS = 6  # arrays of a tree that a repr names
_REFRESH_SECONDS = 0.1  # between two updates of the progress bar


class StepReport(NamedTuple):
    """The argument of a callback, after each step.

    Attributes:
        step: how many steps were taken.
        params: the parameters. The next step takes over their memory, so copy them to keep them.
        average: the average of the parameters, or an empty tuple.
        epsilon: the ε spent so far, at the plan's δ.
        private_loss: the sum of the batch's losses over the expected batch size. It has no noise:
            use it only if you may look at the data, and release nothing that depends on it.
    """

    step: int
    params: optax.Params
    average: optax.Params
    epsilon: float
    private_loss: jax.Array

    def __repr__(self) -> str:
        return (
            f"StepReport(step={self.step}, params=<{_summary(self.params)}>, "
            f"average=<{_summary(self.average)}>, epsilon={self.epsilon:.6g}, "
            "private_loss=<private>)"
        )


class FitResult(NamedTuple):
    """The result of a run. The privacy guarantee covers all of it.

    Attributes:
        params: the parameters.
        average: the average of the parameters, or an empty tuple.
        steps: how many steps were taken.
        ledger: the privacy spent.
        stopped: why the run ended: "done" (all steps are taken), "budget" (the budget covers no
            further step), "callback" or "signal".
    """

    params: optax.Params
    average: optax.Params
    steps: int
    ledger: Ledger
    stopped: Stopped

    def __repr__(self) -> str:
        return (
            f"FitResult(params=<{_summary(self.params)}>, average=<{_summary(self.average)}>, "
            f"steps={self.steps}, ledger=<{self.ledger.steps} steps>, stopped={self.stopped!r})"
        )


class StopTraining(Exception):
    """Raise this in a callback to end a run: `fit` saves it and returns the result so far.

    The other callbacks still get the report of this step. The run can be resumed from its folder.
    The step at which a run stops is released with its result, so let it depend on public data,
    never on `private_loss`.

    >>> def stop_after_100(report):
    ...     if report.step == 100:
    ...         raise StopTraining
    """


Callback = Callable[[StepReport], object]


def check_callbacks(callbacks: object) -> None:
    """Raise unless callbacks are functions of one argument, before any step is spent."""
    if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):
        raise TypeError(f"`callbacks` must be a list of functions, got {callbacks!r}.")
    for callback in callbacks:
        try:
            signature = inspect.signature(callback)
        except (TypeError, ValueError):  # some functions in C have no signature
            continue
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                "`callbacks` must be functions of one argument, the report, got a function of "
                f"{signature}; bind further arguments with functools.partial."
            ) from error


def call_all(callbacks: Sequence[Callback], report: StepReport) -> bool:
    """Give a report to all callbacks; return whether one of them has raised `StopTraining`."""
    stops = False
    for callback in callbacks:
        try:
            callback(report)
        except StopTraining:
            stops = True
    return stops


class LossMonitor:
    """Warns once in a run if the loss of a batch is not finite.

    Without this warning, nobody would notice that a wrong label makes the loss NaN, as the run
    goes on. The warning reveals a bit about private data that ε does not cover. It is meant for
    whoever runs the training and may look at the data. It says so, and it is stored nowhere. The
    loop asks only where it waits for the devices anyway: at its first step, at checkpoints, and at
    its end.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def check(self, loss: jax.Array, step: int) -> None:
        """Warn if the loss of a step is not finite, unless a warning was given before."""
        if self._has_warned or np.isfinite(np.asarray(loss)):
            return
        self._has_warned = True
        warn_caller(
            f"`loss_fn` should be finite for every example, got NaN or infinity in the batch of "
            f"step {step}; examples with a finite gradient still train the model, the others "
            "contribute nothing, and `check_model(loss_fn, params, examples)` names them. This "
            "warning depends on private data: release no log that contains it."
        )


class ProgressBar:
    """A progress bar with ε. It does not show the loss, which is private, as bars end in logs."""

    def __init__(self, steps: int, step: int, *, visible: bool) -> None:
        self.bar = tqdm(total=steps, initial=step, desc="private training", disable=not visible)
        self._due = 0.0

    def show(self, step: int, epsilon: Callable[[int], float], *, last: bool) -> None:
        """Show the step and its ε, ten times a second at most, and at the end."""
        now = time.monotonic()
        if self.bar.disable or (now < self._due and not last):
            return
        self._due, self.bar.n = now + _REFRESH_SECONDS, step
        self.bar.set_postfix_str(f"ε = {show_epsilon(epsilon(step))}")


def _summary(tree: PyTree) -> str:
    """Return names, dtypes and shapes of a tree's arrays; only the first ones of a large tree."""
    leaves = jax.tree.leaves_with_path(tree)
    arrays = [
        f"{path_name(path)} {dtype_name(x)}{list(jnp.shape(x))}".strip() for path, x in leaves
    ]
    more = f", and {len(arrays) - _NAMED_ARRAYS} more" if len(arrays) > _NAMED_ARRAYS else ""
    return (", ".join(arrays[:_NAMED_ARRAYS]) or "nothing") + more


def warn_if_ignored(passed: dict[str, str], initial: dict[str, str]) -> None:
    """Warn that a resumed run ignores changed initial `params` or optimizer state.

    Args:
        passed: hashes of the arguments of this call, by name.
        initial: hashes of the arguments with which the run began.
    """
    for name, digest in passed.items():
        if initial.get(name, digest) != digest:
            remark = "" if name == "params" else ", whose state holds its hyper-parameters,"
            warn_caller(
                f"`{name}`{remark} should be the same as when the run in this folder began, got "
                "another value, which is ignored: the run resumes with its own; choose another "
                "folder to train anew."
            )


def warn_of_restart(
    changed: Sequence[str], step: int, *, repeated: int, last_step: int, steps: int
) -> None:
    """Warn what it means for a run to restart because something has changed.

    Args:
        changed: what has changed.
        step: the step at which the run restarts.
        repeated: how many steps count although the result does not contain them.
        last_step: the step at which the budget will be spent.
        steps: how many steps were planned.
    """
    begin = f"The run in this folder was made with other {', '.join(changed)}: "
    if step == steps:
        warn_caller(
            f"{begin}it is finished and returned unchanged; choose another folder to train."
        )
        return
    warn_caller(
        f"{begin}it restarts from step {step} with new noise, must count {repeated} more steps "
        f"than it has taken, and ends at step {last_step} of {steps}."
    )
