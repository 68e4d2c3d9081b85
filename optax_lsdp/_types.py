"""Type aliases that several folders share."""

from __future__ import annotations

from typing import Any, TypeAlias

PyTree: TypeAlias = Any
"""Nested containers with arrays as leaves. JAX has no narrower type for them."""

ClipNorm: TypeAlias = PyTree
"""A positive number or `AdaptiveClip`, a prefix tree of them, or a function of the step."""
