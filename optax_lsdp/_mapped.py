"""Under vmap: a condition of each goes in, whether it holds of all comes out."""

from typing import Any

import jax
from jax.custom_batching import custom_vmap


@custom_vmap
def holds_for_all(condition: jax.Array) -> jax.Array:
    """Return the condition, a scalar; under `jax.vmap`, whether it holds of all that are mapped.

    So a `lax.cond` stays one branch under vmap, which would else take both.
    """
    return condition


@holds_for_all.def_vmap
def _mapped(size: int, mapped: list[bool], condition: jax.Array) -> tuple[Any, bool]:
    del size
    return holds_for_all(condition.all(axis=0) if mapped[0] else condition), False
