"""Reports: what callbacks, the progress bar and the caller are told of a run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from tqdm import tqdm

from optax_lsdp.accounting import Ledger, show_epsilon


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


class Trained(NamedTuple):
    """The end of a run. The guarantee covers all of it.

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
