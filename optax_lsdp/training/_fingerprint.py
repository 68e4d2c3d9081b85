"""Circumstances: all that decides what a step computes goes in, a hash of each comes out."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp._jaxpr import constants
from optax_lsdp._keys import is_key
from optax_lsdp.training._data import Examples, update_digest


class Program:
    """Functions that were compiled, and a hash of what they compute; none closes over `private`."""

    def __init__(self, private: Examples | None = None) -> None:
        self.digest, self.private = hashlib.blake2b(), private

    def compile(self, function: Any, *arguments: Any) -> Any:
        """Compile a function for such arguments, and remember its text and its constants."""
        traced = function.trace(*arguments)
        for constant in constants(traced.jaxpr):  # which JAX may leave out of the text
            constant = jnp.asarray(constant)
            if is_key(constant):
                constant = jax.random.key_data(constant)
            known = np.asarray(constant)
            if self.private is not None and self.private.holds(known):
                raise ValueError(
                    "`loss_fn` must depend on `data` by its example alone, got one that closes "
                    f"over an array of all examples, {known.dtype}{list(known.shape)}, which would "
                    "count as public; use what comes as `example`."
                )
            update_digest(self.digest, known)
        lowered = traced.lower()
        # JAX counts on from program to program.
        self.digest.update(re.sub(r"group_id=\d+", "", lowered.as_text()).encode())
        return lowered.compile()


def circumstances(
    program: Program, examples: Examples, mesh: jax.sharding.Mesh | None
) -> dict[str, str]:
    """Return a hash of everything that decides what a step computes, to the bit, by its name."""
    packages = [f"{name} {version(name)}" for name in ("jax", "jaxlib", "optax", "optax-lsdp")]
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
    return {
        "data": _hash(examples.fingerprint()),
        "code or settings": _hash(program.digest.hexdigest()),
        "versions of packages": _hash(*packages),
        "devices": _hash(*machine),
    }


def beginning(params: Any, optimizer_state: Any) -> dict[str, str]:
    """Return a hash of what a run began with, by its name; of several processes, none."""
    if jax.process_count() > 1:
        return {}
    found = {}
    for name, tree in (("params", params), ("optimizer", optimizer_state)):
        digest = hashlib.blake2b(digest_size=16)
        update_digest(digest, [leaf for leaf in jax.tree.leaves(tree) if not is_key(leaf)])
        found[name] = digest.hexdigest()
    return found


def _hash(*texts: str) -> str:
    return hashlib.blake2b("\n".join(texts).encode(), digest_size=16).hexdigest()


def _processor() -> str:
    """Return what Linux says of the first processor, for which programs are compiled."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    known = ("vendor_id", "model", "model name", "flags", "Features")
    return "\n".join(line for line in text.splitlines() if line.split("\t")[0] in known)
