"""Training tests compile each program once: later compilations are read from a cache on disk."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

SETTINGS = {
    # Threads share small programs, and JAX does not write its files atomically.
    "jax_persistent_cache_min_compile_time_secs": 0.1,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module", autouse=True)
def _cached_compilations(cache_folder):
    settings = {**SETTINGS, "jax_compilation_cache_dir": str(cache_folder)}
    before = {name: getattr(jax.config, name) for name in settings}
    for values in (settings, before):
        for name, value in values.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # JAX looks at the folder only once
        if values is settings:
            yield
