"""Run one compilation in its own process, so that a crash or a timeout loses nothing else."""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECONDS = 3_600  # other work on the machine slows a compilation down


def in_process(module: str, words: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """Return the JSON that `python -m module WORDS` prints last, or why there is none."""
    command = [sys.executable, "-m", module, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"did not compile in {seconds} seconds"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": f"the process ended with exit code {done.returncode}"}
    return json.loads(lines[-1])
