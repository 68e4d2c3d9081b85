"""Count what a reader meets who follows one call through the package."""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

import jax

import optax_lsdp

PACKAGE = str(Path(optax_lsdp.__file__).parent)


class Reading(NamedTuple):
    """How many functions and files one call passes through, and how often the file changes."""

    functions: int
    files: int
    changes: int


def follow(function, *args):
    """Return the counts for one traced call; the reader reads each function once."""
    called = {}

    def record(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            called.setdefault((code.co_filename, code.co_qualname))

    sys.setprofile(record)
    try:
        jax.eval_shape(function, *args)
    finally:
        sys.setprofile(None)
    files = [file for file, _ in called]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    return Reading(len(called), len(set(files)), changes)
