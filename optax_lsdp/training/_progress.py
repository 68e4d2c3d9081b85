"""The output of a run: reports to callbacks, the progress bar, warnings, and the result."""

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

_NAMED_ARRAYS = 6  # how many arrays of a tree a repr names
_REFRESH_SECONDS = 0.1  # between two updates of the progress bar


class StepReport(NamedTuple):
    """The argument that callbacks receive after each step.

    Attributes:
        step: how many steps were taken.
        params: the parameters. The next step reuses their memory, so copy parameters that you keep.
        average: the average of the parameters, or an empty tuple.
        epsilon: the ε spent so far, at the plan's δ.
        private_loss: the sum of the batch's losses, divided by the expected batch size. This loss
            has no noise: use it only if you may look at the data, and release nothing that depends
            on it.
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
    """The result of a run. The privacy guarantee covers all fields.

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
    """Raise this in a callback to end a run. `fit` saves the run and returns the result so far.

    The other callbacks still receive the report of this step. The run can be resumed from its
    folder. The result reveals at which step the run stopped. So decide when to stop from public
    data only, never from `private_loss`.

    >>> def stop_after_100(report):
    ...     if report.step == 100:
    ...         raise StopTraining
    """


Callback = Callable[[StepReport], object]


def check_callbacks(callbacks: object) -> None:
    """Raise, before any step is taken, unless all callbacks are functions of one argument."""
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
                "`callbacks` must be functions of one argument, the report, got a function with "
                f"the arguments {signature}; bind further arguments with functools.partial."
            ) from error


def call_all(callbacks: Sequence[Callback], report: StepReport) -> bool:
    """Pass a report to all callbacks; return whether a callback raised `StopTraining`."""
    stops = False
    for callback in callbacks:
        try:
            callback(report)
        except StopTraining:
            stops = True
    return stops


class LossMonitor:
    """Warns if the loss of a batch is not finite, at most once in a run.

    If a wrong label makes the loss NaN, the run goes on. Without this warning, nobody would notice.
    The warning reveals one bit about private data, which ε does not cover. So the warning is only
    for users who may look at the data, and its text says that it depends on private data. It is
    stored nowhere. The training loop calls `check` only where it waits for the devices anyway: at
    its first step, at checkpoints, and at its last step.
    """

    def __init__(self) -> None:
        self._has_warned = False

    def check(self, loss: jax.Array, step: int) -> None:
        """Warn if the loss of a step is not finite, unless this monitor has already warned."""
        if self._has_warned or np.isfinite(np.asarray(loss)):
            return
        self._has_warned = True
        warn_caller(
            f"`loss_fn` should be finite for every example, got NaN or infinity in the batch of "
            f"step {step}; find such examples with `check_model(loss_fn, params, examples)`. An "
            "example whose gradient is not finite contributes nothing to the training. This "
            "warning depends on private data: release no log that contains it."
        )


class ProgressBar:
    """A progress bar with ε. It omits the loss: the loss is private, and bars end up in logs."""

    def __init__(self, steps: int, step: int, *, visible: bool) -> None:
        self.bar = tqdm(total=steps, initial=step, desc="private training", disable=not visible)
        self._due = 0.0

    def show(self, step: int, epsilon: Callable[[int], float], *, last: bool) -> None:
        """Show the step and its ε, at most ten times a second, but always if `last`."""
        now = time.monotonic()
        if self.bar.disable or (now < self._due and not last):
            return
        self._due, self.bar.n = now + _REFRESH_SECONDS, step
        self.bar.set_postfix_str(f"ε = {show_epsilon(epsilon(step))}")


def _summary(tree: PyTree) -> str:
    """Return names, dtypes and shapes of a tree's arrays, for at most `_NAMED_ARRAYS` arrays."""
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
        initial: hashes of the arguments with which the run began, by name.
    """
    for name, digest in passed.items():
        if initial.get(name, digest) != digest:
            remark = (
                "" if name == "params" else " (its initial state, which may hold hyper-parameters)"
            )
            warn_caller(
                f"`{name}`{remark} should be the same as when the run in this folder began, got "
                "a different value, which the resumed run ignores; choose another folder to train "
                "with the new value."
            )


def warn_of_restart(
    changed: Sequence[str], step: int, *, repeated: int, last_step: int, steps: int
) -> None:
    """Warn that a run restarts because something has changed, and name the consequences.

    Args:
        changed: what has changed.
        step: the step at which the run restarts.
        repeated: how many steps count although the result does not contain them.
        last_step: the step at which the run will end.
        steps: how many steps were planned.
    """
    begin = f"The run in this folder was made with different {', '.join(changed)}: "
    if step == steps:
        warn_caller(
            f"{begin}it is finished and returned unchanged; choose another folder to train again."
        )
        return
    warn_caller(
        f"{begin}it restarts from step {step} with new noise, counts {repeated} more steps than "
        f"its result contains, and ends at step {last_step} of {steps}."
    )
