"""A process beside this one that runs audits on simulated devices."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from optax_lsdp.auditing._report import ClaimsReport, Report

_SCRIPT = (
    "from optax_lsdp.auditing._child import serve; "
    "from optax_lsdp.auditing._self import run_audit; serve(run_audit)"
)


class Child:
    """Audits that run in a process of their own, one after another, from the start on.

    Args:
        names: of the audits; if there are none, there is no process.
        key: of the audits.
        devices: how many CPU devices the process simulates.
    """

    def __init__(self, names: Sequence[str], key: jax.Array, devices: int) -> None:
        self.names = list(names)
        self.process: subprocess.Popen[bytes] | None = None
        if not names:
            return
        words = np.asarray(jax.random.key_data(key)).ravel().tolist()
        flags = f"--xla_force_host_platform_device_count={devices}"
        changes = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, json.dumps([words, self.names])],
            env=os.environ | changes,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )

    def __enter__(self) -> Self:
        return self

    def report(self, name: str) -> Report:
        """Return the report of the next audit, which is `name`, when it is there."""
        if self.process is None or self.process.stdout is None:
            raise LookupError(name)
        try:
            return pickle.load(self.process.stdout)  # which this package wrote
        except (EOFError, pickle.UnpicklingError):
            code = self.process.wait()
            return ClaimsReport({"it can be audited": f"its process ended with code {code}"})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


def serve(run_audit: Callable[[str, jax.Array], Report]) -> None:
    """Run the audits that the command line names, and write their reports."""
    words, names = json.loads(sys.argv[1])
    reports = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints elsewhere
    key = jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32), impl="threefry2x32")
    for name in names:
        pickle.dump(run_audit(name, key), reports)
        reports.flush()
