"""Choose test cases: all of them with FULL=1, and the quick ones otherwise.

Programs that must agree to the bit are compiled with `AS_FOR_USERS`: the emitters that the other
tests use (see tests/conftest.py) may round the same operations differently in different programs.
"""

import os

import pytest

FULL = bool(os.environ.get("FULL"))
AS_FOR_USERS = {"xla_cpu_use_fusion_emitters": True}  # for `jax.jit(..., compiler_options=...)`


def slow(*values):
    """Mark values of a parameter as cases that run only in `make test-full`."""
    return [pytest.param(value, marks=pytest.mark.full) for value in values]
