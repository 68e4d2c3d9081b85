"""Every test runs on eight CPU devices, and no dtype is promoted by accident.

Most of a test's time is compiling, so LLVM optimizes nothing (XLA's own passes all run). With
FULL=1 it does, as for users, and each law is tried on fifty times the examples; FUZZ=1 is the same
for tests/fuzz.
"""

import os

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "" if {"FULL", "FUZZ"} & set(os.environ) else "--xla_backend_optimization_level=0",
    ]
)

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("laws", derandomize=True, deadline=None, max_examples=10)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500)
hypothesis.settings.load_profile("full" if {"FULL", "FUZZ"} & set(os.environ) else "laws")


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
