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


def _clear_caches():
    """Forget what earlier tests have traced: a function that is not called would not count."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "optax_lsdp":
            for value in vars(module).values():
                for clear in ("cache_clear", "clear_cache"):  # of functools and of jax.jit
                    getattr(value, clear, lambda: None)()


def follow(function, *args):
    """Return the counts for one traced call; the reader reads each function once."""
    called = {}
    _clear_caches()

    def record(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name[0] != "<":
            called.setdefault((code.co_filename, code.co_qualname))

    sys.setprofile(record)
    try:
        jax.eval_shape(lambda *args: function(*args), *args)  # not cached, unlike `function`
    finally:
        sys.setprofile(None)
    files = [file for file, _ in called]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    return Reading(len(called), len(set(files)), changes)
