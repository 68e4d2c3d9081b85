"""The files of a run: a private folder, a lock on it, and atomic writes.

Checkpoints hold the noise key, and everybody who has the key can subtract the noise. So only the
user who owns the folder of a run can enter it.
"""

import errno
import fcntl
import os
import re
import stat
import tempfile
import weakref
from pathlib import Path
from typing import IO

from optax_lsdp.training._validation import warn_caller

_OTHERS = 0o077  # the permissions of all users except the owner
_FILES_OF_A_RUN = re.compile(
    r"plan\.(json|draft)|journal\.jsonl|examples-\d+\.jsonl|lock-\d+|checkpoints"
    r"|\d{4}-\d{9}\.(json|draft|damaged)"
)
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
START_AGAIN = "start again in another folder, and add the ε of the plan in this folder"
_LOCKS: weakref.WeakSet[IO[str]] = weakref.WeakSet()


def make_private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter. Return its path without symbolic links.

    If other users have permissions on an existing folder, remove them and warn. But raise if the
    folder also holds files that are not part of a run, because other users may need these files.
    Raise if the folder belongs to another user. Warn if the file system stores no permissions.
    """
    path = path.resolve()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_files(path):
        raise ValueError(
            f"`folder` must belong to you, got {str(path)!r} of user {status.st_uid}, who could "
            "read the noise key in its checkpoints; choose a new folder, perhaps inside this one."
        )
    if mode & _OTHERS:
        _close_to_others(path, mode)
    parent = path.parent.stat().st_mode
    if parent & stat.S_IWOTH and not parent & stat.S_ISVTX:
        warn_caller(
            f"`folder` should be where nobody else can replace it, got {str(path)!r}, whose parent "
            "folder everybody can write to; choose a folder whose parent only you can write to."
        )
    return path


def _close_to_others(path: Path, before: int) -> None:
    """Remove all permissions of other users on a folder with mode `before`, or raise."""
    got = f"got {str(path)!r} with mode {before:04o}"
    demand = "`folder` must be closed to other users because checkpoints hold the noise key"
    strays = sorted(x.name for x in path.iterdir() if not _FILES_OF_A_RUN.fullmatch(x.name))
    if strays:
        raise ValueError(
            f"{demand}, {got} and with the file {strays[0]!r}, which is not part of a run; choose "
            "a new folder, perhaps inside this folder, or change the mode to 0700."
        )
    try:
        path.chmod(before & ~_OTHERS)
    except OSError as error:
        raise ValueError(
            f"{demand}, {got}, which cannot be changed ({error.strerror}); choose a new folder."
        ) from error
    demand = "`folder` should be closed to other users"
    after = stat.S_IMODE(path.stat().st_mode)
    if after & _OTHERS:
        warn_caller(
            f"{demand}, {got} on a file system that stores no permissions; choose another file "
            "system, because everybody who can read the folder has the noise key."
        )
        return
    seen = " Everybody who has read its checkpoints may know the noise of the run."
    warn_caller(
        f"{demand}, {got}; `fit` has changed the mode to {after:04o}."
        f"{seen if (path / 'checkpoints').exists() else ''}"
    )


def _owner_of_new_files(path: Path) -> int | None:
    """Return the owner of new files in a folder. On some file systems, this is a fixed user."""
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None


def lock(path: Path) -> IO[str]:
    """Open a file and lock it until it is closed. Raise if another run has locked it."""
    file = path.open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(
            f"`folder` must be used by one run at a time, got {str(path.parent)!r}, which another "
            "run is using; wait until that run has ended, or choose another folder."
        ) from error
    _LOCKS.add(file)
    return file


# A forked child closes its copies of all locks, so that a lock ends with the process that took it.
os.register_at_fork(after_in_child=lambda: [file.close() for file in _LOCKS])


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is never incomplete, even if the power fails."""
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


def cannot_write(folder: Path, error: BaseException) -> OSError:
    """Return the error for a run that cannot write to its folder because of `error`."""
    demand, remedy = "accept journal and checkpoints", "correct this error"
    for number in _DISK_IS_FULL:
        # Orbax reports errors of the operating system only as text.
        if number == getattr(error, "errno", None) or os.strerror(number) in str(error):
            demand, remedy = "have room for journal and checkpoints", "free some space"
    return OSError(
        f"`folder` must {demand}, got {type(error).__name__} ({error}) in {str(folder)!r}; "
        f"{remedy} and call `fit` again: the run resumes from its last checkpoint."
    )
