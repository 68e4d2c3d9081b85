"""Schedules that a plan can hold: steps and values go in, a function of the step comes out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_lsdp._checks import check_positive, check_whole


@dataclass(frozen=True)
class Piecewise:
    """A schedule of constant pieces: `values[i]` from step `starts[i]` on.

    Args:
        starts: the step at which each piece begins; the first is 0, and they rise.
        values: a positive number for each of them.

    >>> halved = Piecewise(starts=(0, 100), values=(1.0, 0.5))
    >>> float(halved(99)), float(halved(100))
    (1.0, 0.5)
    """

    starts: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        starts, values = tuple(self.starts), tuple(self.values)
        for start, value in itertools.zip_longest(starts, values, fillvalue=1):
            check_whole("starts", start, least=0)
            check_positive("values", value)
        values = tuple(map(float, values))
        if len(starts) != len(values) or starts[:1] != (0,) or list(starts) != sorted(set(starts)):
            raise ValueError(
                "`starts` must begin at 0 and rise, with a value for each of them, got "
                f"starts={str(starts)[:200]} and values={str(values)[:200]}."
            )
        object.__setattr__(self, "starts", tuple(map(int, starts)))
        object.__setattr__(self, "values", values)

    @classmethod
    def sample(cls, schedule: optax.Schedule, steps: int, pieces: int = 16) -> Piecewise:
        """Return a schedule of so many pieces that follows another, such as one of Optax.

        Each piece has the other's value at its first step. There are `pieces` of equal length up to
        `steps`, or fewer if there are not so many steps.
        """
        check_whole("steps", steps)
        starts = np.unique(np.linspace(0, steps, pieces, endpoint=False).astype(int))
        return cls(tuple(starts.tolist()), tuple(float(schedule(int(s))) for s in starts))

    def __call__(self, step: Any) -> jax.Array:
        """Return the value at a step, which may be traced."""
        place = jnp.searchsorted(jnp.asarray(self.starts), step, side="right") - 1
        return jnp.asarray(self.values, jnp.float32)[place]
