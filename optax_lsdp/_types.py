"""Type aliases that several folders share."""

from __future__ import annotations

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Nested containers with arrays as leaves. JAX has no narrower type for them."""

ClipNorm: TypeAlias = PyTree
"""A positive number, an `AdaptiveClip`, a prefix tree of numbers or `AdaptiveClip`s, or a function
of the step."""
