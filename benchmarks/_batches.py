"""Search the largest batch that a chip accepts, in few trials, because each is a compilation."""

from typing import NamedTuple


class Trial(NamedTuple):
    """Whether a batch fits, and the bytes that its program needs, if the compiler tells."""

    fits: bool
    needed: int | None


def bounds(trials: dict[int, Trial]) -> tuple[int, int | None]:
    """Return the largest batch that fits, or 0, and the smallest that was refused, or None."""
    low = max((size for size, trial in trials.items() if trial.fits), default=0)
    refused = [size for size, trial in trials.items() if not trial.fits and size > low]
    return low, min(refused, default=None)


def is_found(low: int, high: int | None) -> bool:
    """Return whether the bounds are within 1/32 of each other.

    >>> is_found(64, 66), is_found(64, 67), is_found(64, None)
    (True, False, False)
    """
    return high is not None and high - low <= max(1, low // 32)


def next_size(trials: dict[int, Trial], start: int, capacity: int) -> int | None:
    """Return the next batch size to try, or None if the bounds are close.

    A line through known trials says where the capacity is reached. Near the capacity, XLA computes
    values twice to save memory, so a batch above the line may fit. So a search without a refused
    batch grows by at least a half. With both bounds, the middle is tried if the line is outside.
    """
    if not trials:
        return start
    low, high = bounds(trials)
    if is_found(low, high):
        return None
    reached = _reached(capacity, trials)
    if high is None:
        return min(max(reached, 3 * low // 2, low + 1), 16 * low)
    margin = max(1, low // 64)
    return reached if low + margin <= reached <= high - margin else (low + high) // 2


def _reached(capacity: int, trials: dict[int, Trial]) -> int:
    """Return the size at which the line through two trials reaches the capacity, or 0 if none.

    The trials are the two largest that fit. If none fits, the smallest that was refused counts. A
    batch of no examples needs no bytes, where there is only one trial.
    """
    needed = {size: trial.needed for size, trial in trials.items() if trial.needed is not None}
    fitting = sorted(size for size in needed if trials[size].fits)
    last = fitting[-1] if fitting else min(needed, default=0)
    first = fitting[-2] if len(fitting) > 1 else 0
    rise = needed.get(last, 0) - (needed[first] if first else 0)
    return last + int((capacity - needed[last]) * (last - first) / rise) if rise > 0 else 0
