"""Check arguments and parse JSON text.

An error is one sentence: the argument, what it must be, its value, and the remedy if one is known.
"""

import json
import math
from collections import Counter
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, cast

MOST_STEPS = 10**9  # most steps of a run
_LARGEST_COUNT = 10**18  # fits into int64
_LONGEST_VALUE = 200  # characters of a value that a message quotes
_DEEPEST_JSON = 64  # levels of lists and objects

_Value = TypeVar("_Value")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether `value` is a real number, and not a bool, an array or a schedule."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_positive(name: str, value: object, remedy: str = "", *, schedule: bool = False) -> None:
    """Raise unless `value` is in (0, ∞). Accept traced values and, with `schedule`, functions.

    >>> check_positive("clip_norm", -1.0)
    Traceback (most recent call last):
    ValueError: `clip_norm` must be positive and finite, got -1.0.
    """
    known = _known_number(name, value, schedule)
    if known is not None and not 0 < known < math.inf:
        raise refusal(name, "positive and finite", value, remedy)


def check_non_negative(name: str, value: object, *, schedule: bool = False) -> None:
    """Raise unless `value` is in [0, ∞). Accept traced values and, with `schedule`, functions."""
    known = _known_number(name, value, schedule)
    if known is not None and not 0 <= known < math.inf:
        raise refusal(name, "zero or positive, and finite", value)


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raise unless `value` is an integer from `least` to 10¹⁸."""
    if not (is_number(value) and isinstance(value, Integral) and value >= least):
        raise refusal(name, f"a whole number, {least} or more", value)
    if value > _LARGEST_COUNT:
        raise refusal(name, f"a whole number, {_LARGEST_COUNT:.0e} at most", value)


def check_at_most(name: str, value: float, most: float, what: str = "") -> None:
    """Raise if `value` is above `most`. The message describes this limit as `what`."""
    if value > most:
        raise refusal(name, f"at most {what + ', ' if what else ''}{most}", value)


def check_rate(name: str, value: object) -> None:
    """Raise unless `value` is a number in (0, 1]."""
    if not (is_number(value) and 0 < value <= 1):
        remedy = "divide the expected batch size by the number of examples"
        raise refusal(name, "above 0 and at most 1", value, remedy)


def check_fraction(name: str, value: object) -> None:
    """Raise unless `value` is a number in [0, 1]."""
    if not (is_number(value) and 0 <= value <= 1):
        raise refusal(name, "from 0 to 1", value)


def check_delta(name: str, value: object) -> None:
    """Raise unless `value` is a number in (0, 1)."""
    if not (is_number(value) and 0 < value < 1):
        raise refusal(name, "above 0 and below 1", value)


def check_function(name: str, value: object, of_what: str) -> None:
    """Raise unless `value` is callable. `of_what` describes the function's arguments."""
    if not callable(value):
        raise TypeError(_sentence(name, f"a function {of_what}", value))


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise unless `value` is one of `choices`."""
    if not (isinstance(value, str) and value in choices):
        raise refusal(name, "one of " + ", ".join(map(repr, choices)), value)


def check_bool(name: str, value: object) -> None:
    """Raise unless `value` is True or False. In a condition, the text "no" would count as True."""
    if type(value).__name__ not in ("bool", "bool_"):  # of Python or NumPy
        raise refusal(name, "True or False", value)


def check_kind(name: str, value: object, kind: type) -> None:
    """Raise unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        raise TypeError(_sentence(name, f"a {kind.__name__}", value))


def numbers(name: str, value: object, demand: str) -> tuple[float, ...]:
    """Return `value` as a tuple. Raise unless it is a non-empty sequence of finite numbers."""
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        value = value.tolist()
    found = list(value) if isinstance(value, Sequence) else []
    if not (found and all(is_number(one) and math.isfinite(one) for one in found)):
        raise refusal(name, demand, value)
    return tuple(map(float, found))


def frozen_number(value: _Value) -> _Value:
    """Return the number in a NumPy array of shape (), because the caller could change the array.

    Return any other value unchanged.
    """
    is_writable = hasattr(value, "flags") and getattr(value, "shape", None) == ()
    return cast(_Value, value.item()) if is_writable and hasattr(value, "item") else value


def plain_number(value: _Value) -> _Value:
    """Return a NumPy number as a Python number, which JSON can hold, and other values unchanged.

    >>> import numpy as np
    >>> plain_number(np.float32(0.5))
    0.5
    """
    item = getattr(value, "item", None)
    return cast(_Value, item()) if item and is_number(value) else frozen_number(value)


def read_json(text: str | bytes) -> Any:
    """Parse JSON. Raise a ValueError if the text is invalid, repeats a name or nests too deeply.

    >>> read_json('{"steps": 1, "steps": 2}')
    Traceback (most recent call last):
    ValueError: the name 'steps' occurs twice
    """
    if not isinstance(text, str | bytes):
        raise ValueError(f"the value is not text but of type {type(text).__name__}")
    try:
        value = json.loads(text, object_pairs_hook=_object_of_unique_names)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_depth(value)
    return value


def check_depth(value: object) -> None:
    """Raise a ValueError if lists, tuples and dicts are nested more than 64 levels deep."""
    level = [value]
    for _ in range(_DEEPEST_JSON + 1):
        nodes = [node for node in level if isinstance(node, dict | list | tuple)]
        level = [x for node in nodes for x in (node.values() if isinstance(node, dict) else node)]
    if level:
        raise ValueError("it is nested too deeply")


def _object_of_unique_names(pairs: list[tuple[str, object]]) -> dict[str, object]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the name {name[:40]!r} occurs twice")
    return dict(pairs)


def _known_number(name: str, value: object, schedule: bool) -> float | None:
    """Return `value` as a float, or None if it is traced or a schedule. Raise for anything else."""
    if callable(value) and schedule:
        return None
    if not is_number(value) and getattr(value, "shape", None) != ():
        kinds = "a number or a function of the step" if schedule else "a number"
        raise TypeError(_sentence(name, kinds, value))
    number = cast(float, value)  # or an array without axes
    try:
        return float(number)
    except OverflowError:  # a large integer
        return math.inf if number > 0 else -math.inf
    except TypeError:  # traced
        return None


def refusal(name: str, demand: str, value: object, remedy: str = "") -> ValueError:
    """Return the error for an argument that does not meet a demand."""
    return ValueError(_sentence(name, demand, value, remedy))


def _sentence(name: str, demand: str, value: object, remedy: str = "") -> str:
    if isinstance(value, int) and abs(value) > 10**_LONGEST_VALUE:
        got = f"an integer of {value.bit_length()} bits"  # repr raises above 4300 digits
    elif len(got := " ".join(map(str.strip, repr(value).splitlines()))) > _LONGEST_VALUE:
        got = got[:_LONGEST_VALUE] + "…"
    return f"`{name}` must be {demand}, got {got}{'; ' + remedy if remedy else ''}."
