"""Checks of arguments and of JSON text, each with a one-sentence error message."""

import json
import math
from collections.abc import Collection
from numbers import Integral, Real
from typing import Any, TypeGuard

MOST_STEPS = 10**9  # that a run is planned for
MOST = 10**18  # of whatever is counted; floats know its neighbours, and int64 holds it
_SHOWN = 200  # characters of a value


def is_number(value: object) -> TypeGuard[float]:
    """Tell a plain number from an array, a schedule or a mistake."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: object, remedy: str = "", *, schedule: bool = False) -> None:
    """Raise unless a number is in (0, ∞); functions pass if a `schedule` will do.

    >>> check_positive("clip_norm", -1.0)
    Traceback (most recent call last):
    ValueError: `clip_norm` must be positive and finite, got -1.0.
    """
    known = _known_number(name, value, schedule)
    if known is not None and not 0 < known < math.inf:
        raise ValueError(_sentence(name, "positive and finite", value, remedy))


def check_non_negative(name: str, value: object, *, schedule: bool = False) -> None:
    """Raise unless a number is in [0, ∞); functions pass if a `schedule` will do."""
    known = _known_number(name, value, schedule)
    if known is not None and not 0 <= known < math.inf:
        raise ValueError(_sentence(name, "zero or positive, and finite", value))


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise unless `value` is an integer of at least `least`, and no larger than anything is."""
    if not (is_number(value) and isinstance(value, Integral) and value >= least):
        raise ValueError(_sentence(name, f"a whole number, {least} or more", value))
    if value > MOST:
        raise ValueError(_sentence(name, f"a whole number, {MOST:.0e} at most", value))


def check_rate(name: str, value: object) -> None:
    """Raise unless `value` is a share above 0, and 1 at most."""
    if not (is_number(value) and 0 < value <= 1):
        raise ValueError(_sentence(name, "above 0 and at most 1", value))


def check_delta(name: str, value: object) -> None:
    """Raise unless `value` is a probability strictly between 0 and 1."""
    if not (is_number(value) and 0 < value < 1):
        raise ValueError(_sentence(name, "above 0 and below 1", value))


def check_function(name: str, value: object, of_what: str) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise TypeError(_sentence(name, f"a function {of_what}", value))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not (isinstance(value, str) and value in choices):
        raise ValueError(_sentence(name, "one of " + ", ".join(map(repr, choices)), value))


def frozen_number(value: Any) -> Any:
    """Return a number in place of an array of one, whose owner may write another into it."""
    is_writable = hasattr(value, "flags") and getattr(value, "shape", None) == ()
    return value.item() if is_writable else value


def _known_number(name: str, value: object, schedule: bool) -> float | None:
    """Return the number if it is known: traced arrays and schedules have none yet."""
    if is_number(value):
        return _as_float(value)
    if callable(value) and schedule:
        return None
    if getattr(value, "shape", None) != ():
        kinds = "a number or a function of the step" if schedule else "a number"
        raise TypeError(_sentence(name, kinds, value))
    try:
        return float(value)  # type: ignore[arg-type]  # an array of no axes
    except TypeError:  # traced
        return None


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer
        return math.inf if value > 0 else -math.inf


def _sentence(name: str, demand: str, value: object, remedy: str = "") -> str:
    if isinstance(value, int) and abs(value) > 10**_SHOWN:  # Python refuses to write it
        got = f"an integer of {value.bit_length()} bits"
    else:
        got = repr(value)
    got = got if len(got) <= _SHOWN else got[:_SHOWN] + "…"
    return f"`{name}` must be {demand}, got {got}{'; ' + remedy if remedy else ''}."


_DEEPEST = 64  # lists and objects inside of each other


def read_json(text: str | bytes) -> Any:
    """Return what a text says, or raise a ValueError that says why it cannot be trusted.

    Refused are, besides what is no JSON: names that occur twice in an object, of which Python would
    keep the last, and lists in lists beyond any use.

    >>> read_json('{"steps": 1, "steps": 2}')
    Traceback (most recent call last):
    ValueError: the name 'steps' occurs twice
    """
    if not isinstance(text, str | bytes):
        raise ValueError(f"it is no text but of type {type(text).__name__}")
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(found)
    return found


def check_depth(value: Any) -> None:
    """Raise a ValueError if lists, tuples and dicts are in each other too deeply."""
    level, depth = [value], 0
    while level:
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")
        depth += 1
        level = [
            part
            for one in level
            if isinstance(one, dict | list | tuple)
            for part in (one.values() if isinstance(one, dict) else one)
        ]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name[:40]!r} occurs twice")
        found[name] = value
    return found
