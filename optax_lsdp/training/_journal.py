"""The journal of a run: it announces each step in advance, so that every step counts after a crash.

A repeated step with the same key and the same clipped sum has the same result, and costs no
privacy. With a different sum, the two results would reveal the difference of the sums. So the
journal stores the run's fingerprint and, for each step, a hash of the examples that the step has
read. If the fingerprint or the hash of a step has changed, the run restarts with a new nonce: a
random label that gives new noise and new batches. The repeated steps then count twice.

The files hold one JSON object per line:

- `journal.jsonl`, written by the first process: `nonce`, `fingerprint` and `start` for each start
  or restart, and `announced`, a number. The run may have taken all steps below this number.
- `examples-<process>.jsonl`: `nonce`, `step` and `examples` for each step. `examples` is the hash
  of the examples that the process has read for this step.
"""

import errno
import json
import os
import secrets
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import jax

from optax_lsdp.training._multihost import broadcast_text

START_AGAIN = "start again in another folder, and add the ε of this plan to the ε of the new run"
_DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_MOST_AHEAD = 64  # the largest number of steps that one line announces
FIRST_NONCE = "first"  # the nonce until the first restart: only the run's key determines the noise


class Journal:
    """The journal in a folder, for a plan of `steps` steps.

    The first process reads `journal.jsonl` and sends its lines to all processes.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self._steps = folder, steps
        # Each line waits for the disk, so one line announces a hundredth of all steps.
        self._ahead = min(max(steps // 100, 1), _MOST_AHEAD)
        self._fingerprint: dict[str, str] = {}
        self._seen: dict[str, range] = {}  # nonce → steps whose results may have been seen
        self._digests: dict[int, str] = {}  # step → hash, for steps that may be repeated
        self._shared = _Lines(folder / "journal.jsonl", writable=jax.process_index() == 0)
        self._own = _Lines(folder / f"examples-{jax.process_index()}.jsonl")
        self._shared.parse(broadcast_text(self._shared.read()), self._read_shared)
        self._own.parse(self._own.read(), self._read_own)

    def _read_shared(self, line: dict[str, Any]) -> None:
        if "nonce" in line:
            self._seen[line["nonce"]] = range(line["start"], line["start"])
            self._fingerprint = dict(line.get("fingerprint", {}))
        elif not self._seen:
            raise KeyError("nonce")
        else:
            self._seen[self.nonce] = range(self._seen[self.nonce].start, line["announced"])

    def _read_own(self, line: dict[str, Any]) -> None:
        if line["nonce"] == self.nonce:
            self._digests[line["step"]] = line["examples"]

    @property
    def nonce(self) -> str:
        """The nonce of the last start or restart, or "" before the first start."""
        return next(reversed(self._seen), "")

    @property
    def starts(self) -> int:
        """How many nonces the run has had."""
        return len(self._seen)

    @property
    def has_steps(self) -> bool:
        """Whether the journal has announced a step."""
        return any(map(len, self._seen.values()))

    def changed(self, fingerprint: dict[str, str]) -> list[str]:
        """Return which hashes of the fingerprint have changed since the last start or restart."""
        before = self._fingerprint
        return [n for n in before | fingerprint if before.get(n) != fingerprint.get(n)]

    def restart(self, fingerprint: dict[str, str], step: int) -> None:
        """Draw a new nonce for a run that starts or restarts at `step`, and record it."""
        # Before the first step, nobody has seen any noise, so a fixed nonce is safe. Later, a
        # nonce must be random, so that nobody can predict the new noise.
        nonce = broadcast_text(secrets.token_hex(8)) if self.has_steps else FIRST_NONCE
        self._seen[nonce], self._digests = range(step, step), {}
        self._fingerprint = fingerprint
        self._shared.write({"nonce": nonce, "fingerprint": fingerprint, "start": step}, sync=True)

    def differs(self, step: int, digest: str) -> bool:
        """Return whether this step read other examples when it was taken before.

        `digest` is the hash of the examples that it has read now. Steps with earlier nonces are not
        compared, because a new nonce draws new batches.
        """
        return self._digests.get(step, digest) != digest

    def record(self, step: int, digest: str, *, sync: bool) -> None:
        """Announce a step before it is taken, with a hash of the examples that it has read.

        With `sync`, wait until the hash is on the disk. This is needed if the fingerprint does not
        cover all examples.
        """
        seen = self._seen[self.nonce]
        if step >= seen.stop:
            announced = max(step + 1, min(step + self._ahead, self._steps))
            self._seen[self.nonce] = range(seen.start, announced)
            self._shared.write({"announced": announced}, sync=True)
        if self._digests.pop(step, None) is None:  # otherwise the file has this line already
            self._own.write({"nonce": self.nonce, "step": step, "examples": digest}, sync=sync)

    def seen_since(self, step: int, nonce: str) -> list[range]:
        """Return the steps after a checkpoint whose results may have been seen: a range per nonce.

        `step` and `nonce` belong to the checkpoint. The first range has the steps with this nonce.
        Each later nonce adds one range.
        """
        first = self.seen_with(nonce)
        later = list(self._seen.values())[list(self._seen).index(nonce) + 1 :]
        return [range(step, first.stop), *later]

    def seen_with(self, nonce: str) -> range:
        """Return the steps with this nonce whose results may have been seen."""
        if nonce not in self._seen:
            raise ValueError(
                f"`folder` must hold the journal that belongs to its checkpoints, got a different "
                f"journal in {str(self.folder)!r}, so the privacy spent is unknown; {START_AGAIN}."
            )
        return self._seen[nonce]

    def close(self) -> None:
        """Close the files."""
        self._shared.close()
        self._own.close()


class _Lines:
    """A file with one JSON object per line.

    If it is not `writable`, `write` does nothing, and `read` returns an empty text.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self._path, self._writable = path, writable
        self._file: FileIO | None = None  # opened when the first line is written

    def write(self, line: dict[str, object], *, sync: bool) -> None:
        """Append a line; with `sync`, wait until it is on the disk."""
        if not self._writable:
            return
        try:
            if self._file is None:
                self._file = self._path.open("ab", buffering=0)
            text = (json.dumps(line) + "\n").encode()
            if self._file.write(text) < len(text):
                raise OSError("only a part of the line was written")
            if sync:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self._path.parent, error) from error

    def read(self) -> str:
        """Return the text of the file. If a crash has cut the last line short, repair the file."""
        if not (self._writable and self._path.exists()):
            return ""
        text = self._path.read_bytes()
        *_, last = text.split(b"\n")
        if last:  # the process was killed while it wrote this line, before it took the step
            try:
                json.loads(last)
            except ValueError:
                text = text[: -len(last)]
                os.truncate(self._path, len(text))
            else:
                text += b"\n"
                with self._path.open("ab") as file:
                    file.write(b"\n")
        return text.decode(errors="replace")

    def parse(self, text: str, use: Callable[[dict[str, Any]], None]) -> None:
        """Call `use` on each line. Raise if a line is not a JSON object, or if `use` fails."""
        for number, line in enumerate(text.split("\n")[:-1], 1):
            got = repr(line[:40])
            try:
                found = json.loads(line)
                got = str(found)[:40]
                use(found)
            except (KeyError, TypeError, ValueError) as error:
                got = f"no {error}" if isinstance(error, KeyError) else got
                raise ValueError(
                    f"`folder` must hold an intact journal, got {got} in line {number} of "
                    f"{self._path}; {START_AGAIN}."
                ) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


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
