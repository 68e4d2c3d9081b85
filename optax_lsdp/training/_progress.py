"""The output of a run: reports to callbacks, the progress bar, a warning, and the result."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import numpy as np
import optax
from tqdm import tqdm

from optax_lsdp._trees import describe_arrays, path_name
from optax_lsdp._types import PyTree
from optax_lsdp.accounting import Ledger, show_epsilon
from optax_lsdp.clipping import NormEstimates, has_estimates, norm_estimates
from optax_lsdp.training._multihost import raise_everywhere
from optax_lsdp.training._step import State
from optax_lsdp.training._validation import warn_caller
from optax_lsdp.watching import TrainingCurve, describe_work, find_watch_state

Stopped = Literal["done", "budget", "callback", "signal"]

_SECONDS = 0.5  # least time between two reads of the estimates: a read waits for the step to end
_NAMED_ARRAYS = 6  # how many arrays of a tree a repr names


class StepReport(NamedTuple):
    """The argument that callbacks receive after each step.

    Attributes:
        step: how many steps were taken.
        params: the parameters. The next step reuses their memory, so copy them to keep them.
        average: the average of the parameters, or an empty tuple if `fit` computes none.
        epsilon: the ε spent so far, at the plan's δ.
        private_loss: the sum of the batch's losses, divided by the expected batch size. It has no
            noise, so use it only if you may see the data. Release nothing that depends on it.
        work: the estimated change of the clipped loss over all steps except the last, and its
            standard error, as an array of two numbers; None if the run is not watched. It may be
            released. The next step reuses its memory.
        norms: the clip norm, the share of gradients that are clipped, and the distribution of
            norms, if the plan's clip norm is an `AdaptiveClip`, else None. These estimates contain
            noise, so they may be released. The next step reuses their memory.
    """

    step: int
    params: optax.Params
    average: optax.Params
    epsilon: float
    private_loss: jax.Array
    work: jax.Array | None = None
    norms: NormEstimates | None = None

    def __repr__(self) -> str:
        params, average = _summary(self.params), _summary(self.average)
        text = f"step={self.step}, params=<{params}>, average=<{average}>"
        return f"StepReport({text}, epsilon={self.epsilon:.6g}, private_loss=<private>)"


class FitResult(NamedTuple):
    """The result of a run. The privacy guarantee covers all fields.

    Attributes:
        params: the parameters.
        average: the average of the parameters, or an empty tuple if `fit` computes none.
        steps: how many steps were taken.
        ledger: the privacy spent.
        stopped: why the run ended: "done" after all steps, "budget" if the budget covers no
            further step, "callback" or "signal".
        curve: how far the clipped loss has come down, or None if the run was not watched.
        norms: the estimated distribution of norms and the clip norm, if the plan's clip norm is an
            `AdaptiveClip`, else None.
        smoothing: the result of `chosen_smoothing` after the last step, if the run was made with
            smoothing="auto", else None.
    """

    params: optax.Params
    average: optax.Params
    steps: int
    ledger: Ledger
    stopped: Stopped
    curve: TrainingCurve | None = None
    norms: NormEstimates | None = None
    smoothing: PyTree = None

    def __repr__(self) -> str:
        params, average = _summary(self.params), _summary(self.average)
        text = f"params=<{params}>, average=<{average}>, steps={self.steps}"
        text += f", ledger=<{self.ledger.steps} steps>, stopped={self.stopped!r}"
        return f"FitResult({text}, curve={self.curve!r})"


class StopTraining(Exception):
    """Raise this in a callback to end a run. `fit` saves the run and returns the result so far.

    The other callbacks still receive the report of this step, and the run can be resumed. The
    result reveals when the run stopped, so decide from public data, never from `private_loss`.

    >>> def stop_after_100(report):
    ...     if report.step == 100:
    ...         raise StopTraining
    """


Callback = Callable[[StepReport], object]


def check_callbacks(callbacks: object) -> None:
    """Raise unless all callbacks are functions of one argument."""
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


class Reporter:
    """Reports each step to callbacks and the progress bar, and warns of NaN or infinite losses."""

    def __init__(self, callbacks: Sequence[Callback], steps: int, first: int, bar: bool) -> None:
        self.bar = tqdm(total=steps, initial=first, desc="private training", disable=not bar)
        self._callbacks, self._has_warned = callbacks, False
        self._text, self._read_at = "", -math.inf  # what the bar shows besides ε, and since when

    def report(
        self, step: int, state: State, loss: jax.Array, epsilon: Callable[[int], float]
    ) -> bool:
        """Report a step, and return whether a callback raised `StopTraining`."""
        wants_stop = False
        watched = find_watch_state(state.optimizer)
        work = None if watched is None else watched.last
        with raise_everywhere():
            if not self.bar.disable:
                # The bar does not show the loss: bars end up in logs, and the loss is private.
                text = f"ε = {show_epsilon(epsilon(step))}{self._released(step, state, work)}"
                self.bar.set_postfix_str(text, refresh=False)
                self.bar.update(step - self.bar.n)
            for callback in self._callbacks:
                norms = released_norms(state)
                report = StepReport(
                    step, state.params, state.average, epsilon(step), loss, work, norms
                )
                try:
                    callback(report)
                except StopTraining:
                    wants_stop = True
        return wants_stop

    def _released(self, step: int, state: State, work: jax.Array | None) -> str:
        """Return the estimates that the bar shows. Read them at most twice per second."""
        if time.monotonic() >= self._read_at + _SECONDS or step == self.bar.total:
            self._text, self._read_at = "", time.monotonic()
            if work is not None:
                self._text += f", {describe_work(*np.asarray(work).tolist())}"
            if (norms := released_norms(state)) is not None:
                clip, share = jax.device_get((norms.clip_norm, norms.clipped))
                clips = "/".join(f"{float(x):.3g}" for x in jax.tree.leaves(clip))
                shares = "/".join(f"{float(x):.0%}" for x in jax.tree.leaves(share))
                self._text += f", released with noise: clip norm {clips}, {shares} clipped"
        return self._text

    def check_loss(self, loss: jax.Array, step: int) -> None:
        """Warn once per run if the loss of a step is not finite. A wrong label can cause this."""
        if self._has_warned or np.isfinite(np.asarray(loss)):
            return
        self._has_warned = True
        warn_caller(
            f"`loss_fn` should be finite for every example, got NaN or infinity in the batch of "
            f"step {step}; find such examples with `check_model(loss_fn, params, examples)`. An "
            "example whose gradient is not finite contributes nothing to the training. This "
            "warning depends on private data: release no log that contains it."
        )


def released_norms(state: State) -> NormEstimates | None:
    """Return the estimated norms in the optimizer's state, or None if there are none."""
    return norm_estimates(state.optimizer) if has_estimates(state.optimizer) else None


def _summary(tree: PyTree) -> str:
    """Return the names, dtypes and shapes of a tree's first arrays."""
    leaves = jax.tree.leaves_with_path(describe_arrays(tree))
    arrays = [f"{path_name(path)} {text}".strip() for path, text in leaves]
    more = f", and {len(arrays) - _NAMED_ARRAYS} more" if len(arrays) > _NAMED_ARRAYS else ""
    return (", ".join(arrays[:_NAMED_ARRAYS]) or "nothing") + more
