"""Checks at the door: a Python value goes in, silence or one sentence comes out."""

import math
from collections.abc import Collection
from numbers import Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Tell a plain number from an array, a schedule or a mistake."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: object, remedy: str = "") -> None:
    """Raise unless a number is in (0, ∞).

    >>> check_positive("clip_norm", -1.0)
    Traceback (most recent call last):
    ValueError: `clip_norm` must be positive and finite, got -1.0.
    """
    holds = is_number(value) and 0 < value < math.inf
    _check_number(name, value, "positive and finite", holds, remedy)


def check_non_negative(name: str, value: object, remedy: str = "") -> None:
    """Raise unless a number is in [0, ∞)."""
    holds = is_number(value) and 0 <= value < math.inf
    _check_number(name, value, "zero or positive, and finite", holds, remedy)


def check_whole(name: str, value: object, remedy: str = "") -> None:
    """Raise unless `value` is an integer of at least 1."""
    holds = is_number(value) and value >= 1 and value == int(value)
    if not holds:
        raise ValueError(_sentence(name, "a whole number, 1 or more", value, remedy))


def check_delta(name: str, value: object) -> None:
    """Raise unless `value` is a probability strictly between 0 and 1."""
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(_sentence(name, "above 0 and below 1", value, ""))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(_sentence(name, "one of " + ", ".join(map(repr, choices)), value, ""))


def _check_number(name: str, value: object, demand: str, holds: bool, remedy: str) -> None:
    """Raise unless `holds`; arrays and schedules pass, since their values are not known yet."""
    if is_number(value) and not holds:
        raise ValueError(_sentence(name, demand, value, remedy))
    if not (is_number(value) or callable(value) or hasattr(value, "dtype")):
        raise TypeError(_sentence(name, demand, value, remedy))


def _sentence(name: str, demand: str, value: object, remedy: str) -> str:
    return f"`{name}` must be {demand}, got {value!r}{'; ' + remedy if remedy else ''}."
