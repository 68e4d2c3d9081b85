"""Keep a run's folder closed to other users, because its checkpoints hold the noise key."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import warnings
from pathlib import Path

_OTHERS = 0o077  # what the group and everybody else may do
_OF_A_RUN = re.compile(
    r"plan\.(json|draft)|journal\.jsonl|examples-\d+\.jsonl|lock-\d+|checkpoints"
    r"|\d{4}-\d{9}\.(json|draft|damaged)"
)


def make_private_folder(path: Path) -> Path:
    """Return a folder that only this user can enter, without symbolic links in its path.

    A folder that does not exist is made so. One that others may enter is closed to them, with a
    warning, if nothing but a run is in it. A folder with anything else in it is refused: others may
    need what is there, as in a home directory. So is the folder of another user. Where the
    file system keeps no modes, a warning says that nothing protects the key.
    """
    path = path.resolve()
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.geteuid() and status.st_uid != _owner_of_new_files(path):
        raise ValueError(
            f"`folder` must be your own, got {str(path)!r} of user {status.st_uid}, who could read "
            "the noise key in its checkpoints; take a new folder, which may be inside of it."
        )
    if _mode(path) & _OTHERS:
        _close(path)
    above = path.parent.stat().st_mode
    if above & stat.S_IWOTH and not above & stat.S_ISVTX:
        warnings.warn(
            f"`folder` should be where nobody else can replace it, got {str(path)!r}: everybody "
            "may write to the folder above it.",
            stacklevel=5,
        )
    return path


def _close(path: Path) -> None:
    """Remove the permissions of other users on a folder, or raise."""
    before = _mode(path)
    strays = sorted(one.name for one in path.iterdir() if not _OF_A_RUN.fullmatch(one.name))
    if strays:
        raise ValueError(
            f"`folder` must be closed to other users, since checkpoints hold the noise key, got "
            f"{str(path)!r} with mode {before:04o} and {strays[0]!r} in it, which is not of a run; "
            "take a new folder, which may be inside of it, or change the mode to 0700."
        )
    try:
        path.chmod(before & ~_OTHERS)
    except OSError as error:
        raise ValueError(
            f"`folder` must be closed to other users, since checkpoints hold the noise key, got "
            f"{str(path)!r} with mode {before:04o}, which cannot be changed ({error.strerror}); "
            "take a new folder."
        ) from error
    if _mode(path) & _OTHERS:
        warnings.warn(
            f"`folder` should be closed to other users, got {str(path)!r} with mode "
            f"{_mode(path):04o} on a file system that keeps no modes: whoever can read it has the "
            "noise key.",
            stacklevel=6,
        )
        return
    seen = " Whoever has read its checkpoints may know the noise of the run."
    warnings.warn(
        f"`folder` should be closed to other users, got {str(path)!r} with mode {before:04o}; it "
        f"has mode {_mode(path):04o} now.{seen if (path / 'checkpoints').exists() else ''}",
        stacklevel=6,
    )


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _owner_of_new_files(path: Path) -> int | None:
    """Return the user that the file system gives to new files; some file systems have no users."""
    try:
        with tempfile.NamedTemporaryFile(dir=path) as file:
            return os.fstat(file.fileno()).st_uid
    except OSError:
        return None
