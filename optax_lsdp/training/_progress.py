"""Reports: what callbacks, the progress bar and the caller are told of a run."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from optax_lsdp._trees import dtype_name, path_name
from optax_lsdp.accounting import Ledger, show_epsilon

_SHOWN = 6  # arrays of a tree that are named


class Report(NamedTuple):
    """What a callback is told after a step.

    Attributes:
        step: how many steps were taken.
        params: the parameters; the next step takes their memory, so copy what is to be kept.
        average: their average, or an empty tuple.
        epsilon: ε so far, at the plan's δ.
        private_loss: the sum of the batch's losses over the expected batch size. It has no noise:
            look at it if you may look at the data, and release nothing that depends on it.
    """

    step: int
    params: Any
    average: Any
    epsilon: float
    private_loss: jax.Array

    def __repr__(self) -> str:
        return (
            f"Report(step={self.step}, params=<{_in_short(self.params)}>, "
            f"average=<{_in_short(self.average)}>, epsilon={self.epsilon:.6g}, "
            "private_loss=<private>)"
        )


class Trained(NamedTuple):
    """The end of a run. The guarantee covers all of it.

    Attributes:
        params: the parameters.
        average: their average, or an empty tuple.
        steps: how many steps were taken.
        ledger: what was spent.
        stopped: why the run ended: "done", "budget", "callback" or "signal".
    """

    params: Any
    average: Any
    steps: int
    ledger: Ledger
    stopped: str

    def __repr__(self) -> str:
        return (
            f"Trained(params=<{_in_short(self.params)}>, average=<{_in_short(self.average)}>, "
            f"steps={self.steps}, ledger=<{self.ledger.steps} steps>, stopped={self.stopped!r})"
        )


class StopTraining(Exception):
    """Raised by a callback to end a run: `fit` saves, and returns what was trained.

    All callbacks are told of the step first. The run can go on in its folder. When a run stops is
    released with its result: let it depend on public data, and never on `private_loss`.

    >>> def enough(report):
    ...     if report.step == 100:
    ...         raise StopTraining
    """


def check_callbacks(callbacks: Any) -> None:
    """Raise unless these are functions of one report, before a step is spent to find out."""
    if not (isinstance(callbacks, Sequence) and all(map(callable, callbacks))):
        raise TypeError(f"`callbacks` must be a list of functions, got {callbacks!r}.")
    for callback in callbacks:
        try:
            signature = inspect.signature(callback)
        except (TypeError, ValueError):  # some functions that are not written in Python have none
            continue
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                "`callbacks` must be functions of one argument, the report, got a function of "
                f"{signature}; take what else it needs from around it."
            ) from error


def tell_all(callbacks: Sequence[Callable[[Report], object]], report: Report) -> bool:
    """Tell all callbacks of a step, and return whether one of them wants to stop."""
    stops = False
    for callback in callbacks:
        try:
            callback(report)
        except StopTraining:
            stops = True
    return stops


class WatchedLoss:
    """Warn once in a run if a batch's loss is not finite.

    That is a bit about private data, which ε does not cover: it is for whoever runs this and may
    look at the data, it says so, and it is written nowhere. Without it, a run with a wrong label
    would train on with a loss of NaN and nobody would know. The loop looks where it waits anyway:
    at its first step, at checkpoints and at its end.
    """

    def __init__(self) -> None:
        self.is_told = False

    def look(self, loss: jax.Array, step: int) -> None:
        """Warn if the loss of a step is not finite, unless that was said before."""
        if self.is_told or np.isfinite(np.asarray(loss)):
            return
        self.is_told = True
        warnings.warn(
            f"`loss_fn` should be finite for every example, got NaN or infinity in the batch of "
            f"step {step}; examples with a finite gradient train the model all the same, others "
            "contribute nothing, and `check_model(loss_fn, params, examples)` names them. This "
            "warning depends on private data: release no log that holds it.",
            stacklevel=4,
        )


class Shown:
    """A progress bar with ε; the loss is private, and what is shown ends up in logs."""

    def __init__(self, steps: int, step: int, progress: bool) -> None:
        self.bar = tqdm(total=steps, initial=step, desc="private training", disable=not progress)
        self.due = 0.0

    def tell(self, step: int, epsilon: Callable[[], float], *, last: bool) -> None:
        """Show where a run is, ten times a second, and at its end."""
        now = time.monotonic()
        if self.bar.disable or (now < self.due and not last):
            return
        self.due, self.bar.n = now + 0.1, step
        self.bar.set_postfix_str(f"ε = {show_epsilon(epsilon())}")


def _in_short(tree: Any) -> str:
    """Return the names, dtypes and shapes of a tree's arrays, of the first ones if it is large."""
    leaves = jax.tree.leaves_with_path(tree)
    known = [f"{path_name(path)} {dtype_name(x)}{list(jnp.shape(x))}".strip() for path, x in leaves]
    more = f", and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return (", ".join(known[:_SHOWN]) or "nothing") + more


def warn_of_beginning(given: dict[str, str], began: dict[str, str]) -> None:
    """Warn of parameters or an optimizer that a run which goes on has of its own, by their hash."""
    for name, found in given.items():
        if began.get(name, found) != found:
            what = "" if name == "params" else ", whose state holds its hyper-parameters,"
            warnings.warn(
                f"`{name}`{what} should be as when this folder's run began, got another, which is "
                "not used: the run goes on with its own; take another folder to train anew.",
                stacklevel=4,
            )


def warn_of_change(changed: Sequence[str], step: int, again: int, until: int, steps: int) -> None:
    """Warn of what it means for a run to go on from a step though something has changed.

    Args:
        changed: what has.
        step: where it goes on.
        again: how many steps it has to count more than it has taken.
        until: where it will end.
        steps: how many were planned.
    """
    begin = f"This folder's run was made with other {', '.join(changed)}: "
    if step == steps:
        text = f"{begin}it is finished, and returned as it was; take another folder to train."
    else:
        text = (
            f"{begin}it goes on from step {step} with other noise, has to count {again} steps more "
            f"than it has, and ends at step {until} of {steps}."
        )
    warnings.warn(text, stacklevel=3)
