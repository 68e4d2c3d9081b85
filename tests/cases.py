"""Choose test cases: all of them with FULL=1, and the quick ones otherwise."""

import os

import pytest

FULL = bool(os.environ.get("FULL"))


def slow(*values):
    """Mark values of a parameter as cases that run only in `make test-full`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]
