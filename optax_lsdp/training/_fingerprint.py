"""The fingerprint of a run: hashes of everything that affects the exact result of a step.

If the fingerprint is unchanged, a resumed run repeats its steps exactly. If any hash differs, the
run must restart with new noise; see `_resume.py`.
"""

import hashlib
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._jaxpr import constants
from optax_lsdp._keys import is_key
from optax_lsdp._types import PyTree
from optax_lsdp.training._data import Examples, update_digest
from optax_lsdp.training._multihost import gather_text
from optax_lsdp.training._validation import warn_caller

_PACKAGES = ("jax", "jaxlib", "optax", "optax-lsdp")


class Compiler:
    """Compiles the functions of a run. `digest` is a hash of everything that they compute."""

    def __init__(self, examples: Examples | None = None) -> None:
        self.digest, self._examples = hashlib.blake2b(), examples

    def compile(self, function: jax.stages.Wrapped, *arguments: PyTree) -> jax.stages.Compiled:
        """Compile and hash a jitted function. Raise if it closes over an array of all examples."""
        traced = function.trace(*arguments)
        for constant in constants(traced.jaxpr):  # JAX may omit constants from the program's text
            constant = jnp.asarray(constant)
            if is_key(constant):
                constant = jax.random.key_data(constant)
            values = np.asarray(constant)
            if self._examples is not None and self._examples.contains(values):
                raise ValueError(
                    "`loss_fn` must use the data only through its argument `example`, got a "
                    f"function that closes over an array of all examples, {values.dtype}"
                    f"{list(values.shape)}, which ε does not cover; use `example` instead."
                )
            update_digest(self.digest, values)
        lowered = traced.lower()
        # JAX counts `group_id` on from program to program, so equal programs have different ids.
        self.digest.update(re.sub(r"group_id=\d+", "", lowered.as_text()).encode())
        return lowered.compile()


def compute_fingerprint(
    compiler: Compiler, examples: Examples, mesh: jax.sharding.Mesh | None
) -> dict[str, str]:
    """Return hashes of data, code, package versions and devices, equal in all processes."""
    devices = jax.devices() if mesh is None else mesh.devices.flat
    machine = [
        "no mesh" if mesh is None else str(mesh.shape),
        *(device.device_kind for device in devices),
        str(jax.process_count()),
        platform.machine(),
        _processor(),
        str(os.cpu_count()),
        os.environ.get("XLA_FLAGS", ""),
    ]
    hashes = {
        "data": _hash(examples.digest()),
        "code or settings": _hash(compiler.digest.hexdigest()),
        "versions of packages": _hash(*(f"{name} {_version(name)}" for name in _PACKAGES)),
        "devices": _hash(*machine),
    }
    return {name: gather_text(text) for name, text in hashes.items()}


def hash_initial(params: PyTree, optimizer_state: PyTree) -> dict[str, str]:
    """Return hashes of a run's initial parameters and optimizer state, without its keys."""

    def hash_arrays(tree: PyTree) -> str:
        digest = hashlib.blake2b(digest_size=16)
        update_digest(digest, [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)])
        return digest.hexdigest()

    if jax.process_count() > 1:
        return {}  # each process holds only a part of the arrays
    return {"params": hash_arrays(params), "optimizer": hash_arrays(optimizer_state)}


def warn_if_ignored(passed: dict[str, str], initial: dict[str, str]) -> None:
    """Warn if hashes of `hash_initial` differ: a resumed run ignores what was `passed` to it."""
    remark = {"optimizer": " (its initial state, which may hold hyper-parameters)"}
    for name, digest in passed.items():
        if initial.get(name, digest) != digest:
            warn_caller(
                f"`{name}`{remark.get(name, '')} should be the same as when the run in this folder "
                "began, got a different value, which the resumed run ignores; choose another "
                "folder to train with the new value."
            )


def _hash(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def _version(package: str) -> str:
    """Return the version of a package, or "not installed" for a checkout on the Python path."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    """Return a description of the first processor, because XLA compiles for its features."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    fields = ("vendor_id", "model", "model name", "flags", "Features")
    return "\n".join(line for line in text.splitlines() if line.split("\t")[0] in fields)
