"""The folder of a run, and the format of its checkpoints.

A run's folder holds:

- `plan.json`: the `PrivacyPlan`. A run with a different plan is refused.
- `journal.jsonl`, `examples-<process>.jsonl`: see `_journal.py`.
- `checkpoints/<name>/`: the arrays of a `State`, written by Orbax. Keys are stored as integers.
- `<name>.json`: the manifest, written last. A checkpoint without a manifest is incomplete. If a
  hash in the manifest does not match, the run uses the previous checkpoint.
- `lock-<process>`: locked while a run uses the folder.

The name of a checkpoint has two numbers: how many nonces the run has had (see `_journal.py`), and
the step. So later checkpoints have later names. Only the last two checkpoints are kept.

Checkpoints hold the noise key, and everybody who has the key can subtract the noise. So only the
user who owns the folder can enter it.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import tempfile
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import sync_global_devices

from optax_lsdp._keys import is_key
from optax_lsdp._trees import describe_arrays, path_name
from optax_lsdp._types import PyTree
from optax_lsdp.accounting import Ledger
from optax_lsdp.planning import PrivacyPlan
from optax_lsdp.training._journal import START_AGAIN, Journal, cannot_write
from optax_lsdp.training._multihost import any_process
from optax_lsdp.training._step import State, describe
from optax_lsdp.training._validation import warn_caller

FORMAT = 2  # the version of the manifest and of the files that it lists
_KEPT = 2  # checkpoints: if the newer one is damaged, the older one is used
_MANIFEST = re.compile(r"\d{4}-\d{9}\.json")
_OTHERS = 0o077  # the permissions of all users except the owner
_FILES_OF_A_RUN = re.compile(
    r"plan\.(json|draft)|journal\.jsonl|examples-\d+\.jsonl|lock-\d+|checkpoints"
    r"|\d{4}-\d{9}\.(json|draft|damaged)"
)
_LOCKS: weakref.WeakSet[IO[str]] = weakref.WeakSet()


class Checkpoint(NamedTuple):
    """Everything a run needs to resume. It holds the noise key: keep it as secret as the data."""

    state: State
    step: int  # how many steps were taken
    ledger: Ledger  # the privacy spent; repeated steps may count twice
    nonce: str  # the nonce of the run's last start or restart
    initial: dict[str, str]  # see `hash_initial`


@contextmanager
def _quiet_orbax() -> Iterator[None]:
    """Hide Orbax's log messages, except errors."""

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or "orbax" not in record.pathname

    logger = logging.getLogger("absl")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


class RunFolder:
    """The folder of a run: its plan, journal and checkpoints. It is locked until `close`."""

    @_quiet_orbax()
    def __init__(self, path: Path | str, plan: PrivacyPlan) -> None:
        if not (isinstance(path, str | Path) and str(path)):
            raise ValueError(f"`folder` must be the path of a folder, got {path!r}.")
        self._plan = plan
        try:
            self.path = make_private_folder(Path(path))
        except OSError as error:
            raise ValueError(
                f"`folder` must be a folder that exists or can be made, got {str(path)!r}, which "
                f"cannot be made ({error.strerror}); choose another path."
            ) from error
        with ExitStack() as stack:  # unlocks the folder after an error
            stack.enter_context(lock(self.path / f"lock-{jax.process_index()}"))
            self._check_plan()
            self.journal = stack.enter_context(closing(Journal(self.path, plan.steps)))
            self._checkpointer = stack.enter_context(closing(ocp.StandardCheckpointer()))
            self._open = stack.pop_all()

    def _check_plan(self) -> None:
        """Write the plan into a new folder. Raise if the folder belongs to a different plan."""
        path = self.path / "plan.json"
        if path.exists():
            try:
                with warnings.catch_warnings(action="ignore"):  # the caller's plan has warned
                    same = PrivacyPlan.from_json(path.read_text()) == self._plan
            except ValueError as error:
                raise ValueError(
                    f"`folder` must hold a valid plan in plan.json, got {str(path)!r}: {error}"
                ) from error
            if not same:
                raise ValueError(
                    f"`plan` must be the plan of the run in {str(self.path)!r}, got a different "
                    "plan; load its plan with PrivacyPlan.from_json, or choose another folder."
                )
            return
        if self._manifests() or (self.path / "journal.jsonl").exists():
            raise ValueError(
                f"`folder` must hold the plan.json of its run, got none in {str(self.path)!r}, so "
                "the privacy spent is unknown; restore plan.json, or start again in another folder "
                "and add the ε of the lost plan to the ε of the new run."
            )
        sync_global_devices("plan")
        if jax.process_index() == 0:
            write_atomically(path, self._plan.to_json())

    def _manifests(self) -> list[Path]:
        """Return the paths of all manifests, the newest last."""
        return sorted(path for path in self.path.iterdir() if _MANIFEST.fullmatch(path.name))

    def _arrays_of(self, name: str) -> Path:
        return self.path / "checkpoints" / name

    @_quiet_orbax()
    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and then its manifest, unless they exist already."""
        target = self._arrays_of(f"{self.journal.starts:04d}-{checkpoint.step:09d}")
        if (self.path / f"{target.name}.json").exists():
            return
        if jax.process_index() == 0 and target.exists():  # incomplete because of a crash
            shutil.rmtree(target)
        sync_global_devices("clean")
        try:
            self._checkpointer.save(target, _without_keys(checkpoint.state))
            self._checkpointer.wait_until_finished()
            if jax.process_index() == 0:
                self._write_manifest(target, checkpoint)
        except Exception as error:  # Orbax raises errors of many types
            raise cannot_write(self.path, error) from error
        sync_global_devices("saved")

    def _write_manifest(self, target: Path, checkpoint: Checkpoint) -> None:
        manifest = {
            "format": FORMAT,
            "plan": self._plan.digest,
            "step": checkpoint.step,
            "nonce": checkpoint.nonce,
            "initial": checkpoint.initial,
            "ledger": json.loads(checkpoint.ledger.to_json()),
            "arrays": _describe(checkpoint.state),
            "files": _hash_files(target),
        }
        manifest["digest"] = _hash_json(manifest)
        write_atomically(self.path / f"{target.name}.json", json.dumps(manifest))
        for old in self._manifests()[:-_KEPT]:
            old.unlink()
        kept = {path.stem for path in self._manifests()}
        for folder in target.parent.iterdir():  # old checkpoints hold keys too
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def restore(self, template: State) -> Checkpoint | None:
        """Return the last intact checkpoint, or None if the folder has no checkpoints.

        Raise if all checkpoints are damaged, if the last one has another format, or if its arrays
        differ from `template` in structure, shapes or dtypes. The restored arrays get the shardings
        of `template`.
        """
        damaged: list[Path] = []
        for path in reversed(self._manifests()):
            manifest = self._read_manifest(path)
            if any_process(not manifest):
                damaged.append(path)
                continue
            state = self._read_state(path.stem, manifest["arrays"], template)
            if jax.process_index() == 0:
                for one in damaged:
                    one.rename(one.with_suffix(".damaged"))
            ledger = Ledger.from_json(json.dumps(manifest["ledger"]))
            step, nonce, initial = (manifest[name] for name in ("step", "nonce", "initial"))
            return Checkpoint(state, step, ledger, nonce, initial)
        if damaged:
            raise ValueError(
                f"`folder` must hold an intact checkpoint, got none in {str(self.path)!r}; "
                f"{START_AGAIN}."
            )
        return None

    def _read_manifest(self, path: Path) -> dict[str, Any]:
        """Return a manifest. If its checkpoint is damaged, warn and return an empty dict."""
        damage = ""
        try:
            manifest = json.loads(path.read_text())
            version = manifest.get("format")
            if version == FORMAT:
                if manifest.pop("digest", None) != _hash_json(manifest):
                    damage = "its manifest was changed"
                elif _hash_files(self._arrays_of(path.stem)) != manifest["files"]:
                    damage = "its files were changed"
                elif manifest["plan"] != self._plan.digest:
                    damage = "it belongs to another plan"
        except Exception as error:  # no error may stop the search for an intact checkpoint
            version, damage = FORMAT, repr(error)[:200]
        if version != FORMAT:
            got = "no format" if version is None else f"format {version!r}"
            raise ValueError(
                f"`folder` must hold checkpoints of format {FORMAT}, got {got} in {str(path)!r}; "
                f"resume with the version of optax_lsdp that wrote it, or {START_AGAIN}."
            )
        if damage:
            warn_caller(
                f"checkpoint {path.stem} in {str(self.path)!r} is damaged ({damage}); `fit` "
                "uses the checkpoint before it."
            )
            return {}
        return manifest

    @_quiet_orbax()
    def _read_state(self, name: str, stored: dict[str, str], template: State) -> State:
        """Return the arrays of a checkpoint. Raise if they do not match `template`."""
        wanted = _describe(template)
        for place in sorted(wanted | stored):
            if wanted.get(place) != stored.get(place):
                got, like = (found.get(place, "nothing") for found in (stored, wanted))
                raise ValueError(
                    "`folder` must hold parameters and optimizer state like those of this run, got "
                    f"{got} at {place!r} in {str(self.path)!r} instead of {like}; resume with the "
                    "same model, optimizer, average and `watch`, or choose another folder."
                )
        like = describe(_without_keys(template), with_sharding=True)
        found = self._checkpointer.restore(self._arrays_of(name), like)

        def with_key(stored: jax.Array, like: jax.Array) -> jax.Array:
            impl = jax.random.key_impl(like) if is_key(like) else None
            return stored if impl is None else jax.random.wrap_key_data(stored, impl=impl)

        return jax.tree.map(with_key, found, template)

    @_quiet_orbax()
    def close(self) -> None:
        """Close the files and unlock the folder."""
        self._open.close()


def _without_keys(state: State) -> PyTree:
    """Return a state with integers in place of typed keys, which Orbax cannot store."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, state)


def _describe(state: State) -> dict[str, str]:
    """Return the dtype and shape of each array, by its path."""
    leaves = jax.tree.leaves_with_path(describe_arrays(state))
    return {path_name(path): text for path, text in leaves}


def _hash_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _hash_json(manifest: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def make_private_folder(path: Path) -> Path:
    """Make a folder that only this user can enter. Return its path without symbolic links.

    If other users have permissions on an existing folder, take these permissions away and warn. But
    raise if the folder also holds files that no run has written: other users may need these files.
    Raise if the folder belongs to another user. Warn if the file system stores no permissions, or
    if everybody can write to the parent folder, and so could replace the folder.
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
    """Return the owner of new files in a folder, or None if no file can be written.

    On some file systems, the owner is a fixed user.
    """
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
