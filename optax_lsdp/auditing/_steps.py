"""Which steps of a run an audit looks at."""

from __future__ import annotations

from collections.abc import Sequence

from optax_lsdp._checks import check_whole

LONGEST_PERIOD = 4096
_FINE = 32  # every step below it, and every multiple of it up to the longest period
_LAST = 2**31 - 2  # the last step that is noised
FAR_STEPS = tuple(
    sorted(
        {
            *range(_FINE),
            *range(0, LONGEST_PERIOD + 1, _FINE),
            *(2**power + more for power in range(5, 31) for more in (0, 1)),
            *(10**power + more for power in range(2, 10) for more in (0, 1)),
            *range(_LAST - 7, _LAST + 1),
        }
    )
)


def chosen_steps(steps: int | Sequence[int], least: int = 2) -> list[int]:
    """Return the numbers of the steps: so many, from the first on, or those that are listed.

    Raises:
        ValueError: if they are fewer than `least`, or one of them is listed twice.
    """
    if not isinstance(steps, Sequence):
        check_whole("steps", steps, least)
        return list(range(steps))
    for step in steps:
        check_whole("steps", step, 0)
    if len(steps) < least or len(set(steps)) < len(steps):
        raise ValueError(
            f"`steps` must list {least} or more steps, each once, got {len(steps)} of which "
            f"{len(set(steps))} differ."
        )
    return list(steps)
