"""Which cases run: all of them with FULL=1, and the quick ones otherwise."""

import os

import pytest

FULL = bool(os.environ.get("FULL"))


def slow(*values):
    """Return cases of a parameter that run in `make test-full` alone."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]
