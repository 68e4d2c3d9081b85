"""Types that several folders share."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

PyTree: TypeAlias = Any
"""Nested containers with arrays as leaves. JAX has no narrower type for them."""

ClipNorm: TypeAlias = PyTree
"""A positive number, an `AdaptiveClip`, a prefix tree of numbers or `AdaptiveClip`s, or a function
of the step."""


class UserBatch(NamedTuple):
    """The users of a batch, with some examples of each. `UserData` makes it.

    Attributes:
        examples: arrays of shape (n, m, …) for n users with m examples each. A user's padding
            repeats the first example, or is zero if the user has none.
        mask: (n, m) bool, False for padding. It reveals how many examples a user has, so do not
            release it.
        users: (n,) int32, the index of each user; zero for padding.
    """

    examples: PyTree
    mask: np.ndarray
    users: np.ndarray
