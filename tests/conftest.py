"""Every test runs on eight CPU devices, and no dtype is promoted by accident."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("laws", derandomize=True, deadline=None, max_examples=50)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500)
hypothesis.settings.load_profile("laws")


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
