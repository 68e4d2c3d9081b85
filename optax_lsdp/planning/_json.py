"""A plan as text: its settings go in, JSON comes out, and back; no key is ever in it."""

import json
from typing import Any

from optax_lsdp.planning._piecewise import Piecewise

_VERSION = 1


def write_plan(settings: dict[str, Any]) -> str:
    """Return settings as text."""
    return json.dumps({"optax_lsdp_plan": _VERSION, **settings}, indent=1)


def read_plan(text: str, known: set[str]) -> dict[str, Any]:
    """Return the settings that were written; whatever is not fully understood is refused."""
    try:
        found = json.loads(text)
        version = found.pop("optax_lsdp_plan")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`text` must be what to_json wrote, got {str(text)[:40]!r}.") from error
    if version != _VERSION or set(found) != known:
        raise ValueError(
            f"`text` must be a plan of version {_VERSION} with the keys {sorted(known)}, got "
            f"version {version!r} with {sorted(found)}."
        )
    return {name: _read(value) for name, value in found.items()}


def _read(value: Any) -> Any:
    """Return a Piecewise where one was written."""
    if isinstance(value, dict) and set(value) == {"starts", "values"}:
        return Piecewise(tuple(value["starts"]), tuple(value["values"]))
    return value
