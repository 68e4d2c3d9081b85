"""Run every test on eight CPU devices, and let no dtype be promoted by accident.

Most of a test's time is compiling. LLVM therefore optimizes nothing here (XLA's own passes all
run), and programs that one process has compiled are kept in a folder, where the other workers of
the session and the processes that tests start find them. JAX looks them up by the whole program
and its options. The folder is removed at the end, unless `JAX_COMPILATION_CACHE_DIR` names one, as
`make test` does: its next run compiles only what has changed.

With FULL=1, LLVM optimizes as it does for users, and each law is tried on fifty times the examples;
FUZZ=1 is the same for tests/fuzz.
"""

import atexit
import gc
import os
import shutil
import tempfile

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "" if {"FULL", "FUZZ"} & set(os.environ) else "--xla_backend_optimization_level=0",
    ]
)
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers find the folder of their controller
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="optax-lsdp-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Threads of BLAS wait for each other by spinning. Workers and subprocesses, which start after this
# line, share the cores, and the matrices of the tests are small.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("laws", derandomize=True, deadline=None, max_examples=10)
hypothesis.settings.register_profile("full", deadline=None, max_examples=500)
hypothesis.settings.load_profile("full" if {"FULL", "FUZZ"} & set(os.environ) else "laws")


def pytest_configure(config):
    # Another process may still be writing a program: JAX then warns, and compiles it itself.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache")


def pytest_collection_finish(session):
    # Modules stay, and tracing makes many objects without cycles: collect garbage less often.
    gc.freeze()
    gc.set_threshold(100_000, 10, 10)


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
