"""Files: locks that die with their run, and writing that happens in full or not at all."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import IO, Any

_LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()


def lock(path: Path) -> IO[str]:
    """Return an open file that no other run can lock until it is closed."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(
            f"`folder` must belong to one run at a time, got {str(path.parent)!r}, in which "
            "another one is under way; wait for it or take another folder."
        ) from error
    _LOCKS.add(file)
    return file


def _close_locks() -> None:
    """Let a lock end with the run, though a worker that it forked lives on."""
    for file in _LOCKS:
        file.close()


os.register_at_fork(after_in_child=_close_locks)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all, also when the power fails."""
    draft = path.with_suffix(".draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
