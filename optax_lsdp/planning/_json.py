"""A plan as text: its settings go in, JSON comes out, and back; no key is ever in it."""

import json
from typing import Any

from optax_lsdp._checks import read_json
from optax_lsdp.planning._piecewise import Piecewise

_VERSION = 1


def write_plan(settings: dict[str, Any]) -> str:
    """Return settings as text."""
    written = {name: _write(name, value) for name, value in settings.items()}
    return json.dumps({"optax_lsdp_plan": _VERSION, **written}, indent=1)


def read_plan(text: str, known: set[str]) -> dict[str, Any]:
    """Return the settings that were written; whatever is not fully understood is refused."""
    try:
        found = read_json(text)
        version = found.pop("optax_lsdp_plan")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"`text` must be what to_json returned, got {str(text)[:40]!r} ({error}); "
            "pass it on unchanged."
        ) from error
    if version != _VERSION or set(found) != known:
        raise ValueError(
            f"`text` must be a plan of version {_VERSION} with the keys {sorted(known)}, got "
            f"version {str(version)[:40]} with {str(sorted(found))[:400]}."
        )
    return {name: _read(name, value) for name, value in found.items()}


def _write(name: str, value: Any) -> Any:
    """Return what JSON can hold, with a tag where it knows no such thing."""
    if isinstance(value, Piecewise):
        return {"$piecewise": [value.starts, value.values]}
    if isinstance(value, tuple):
        return {"$tuple": [_write(name, part) for part in value]}
    if isinstance(value, list):
        return [_write(name, part) for part in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(
                    f"`{name}` must have keys that are text and do not start with $, got {key!r}; "
                    "a plan is written as JSON."
                )
        return {key: _write(name, part) for key, part in value.items()}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(
        f"`{name}` must consist of numbers, dicts, lists and tuples, got {value!r}; a plan is "
        "written as JSON."
    )


def _read(name: str, value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"$piecewise"}:
        match value["$piecewise"]:
            case [list(starts), list(values)]:
                return Piecewise(tuple(starts), tuple(values))
        raise ValueError(
            f"`{name}` must be a Piecewise of starts and values, got {str(value)[:200]}."
        )
    if isinstance(value, dict) and set(value) == {"$tuple"}:
        if not isinstance(value["$tuple"], list):
            raise ValueError(f"`{name}` must be a tuple of parts, got {str(value)[:200]}.")
        return tuple(_read(name, part) for part in value["$tuple"])
    if isinstance(value, dict):
        return {key: _read(name, part) for key, part in value.items()}
    return [_read(name, part) for part in value] if isinstance(value, list) else value
