"""Read JSON that somebody else may have written."""

import json
from typing import Any

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
