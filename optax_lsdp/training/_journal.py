"""The journal of a run: it announces each step in advance, so that every step counts after a crash.

A repeated step with the same key and the same clipped sum has the same result, and costs no
privacy. With a different sum, the two results would reveal the difference of the sums. So the
journal stores the fingerprint of the run, and a hash of the examples that each step has read. If
one of them has changed, the run restarts with a new nonce. The nonce gives new noise and new
batches, and the steps that the run repeats count twice.

The files hold one JSON object per line:

- `journal.jsonl`, of the first process: `nonce`, `fingerprint` and `start` for each start or
  restart, and `announced`, a number. The run may have taken all steps below this number.
- `examples-<process>.jsonl`: `nonce`, `step` and `examples` for each step. `examples` is the hash
  of the examples that the process has read for this step.
"""

import json
import os
import secrets
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import jax

from optax_lsdp.training._files import START_AGAIN, cannot_write
from optax_lsdp.training._multihost import broadcast_text

_MOST_AHEAD = 64  # the largest number of steps that one line announces
FIRST_NONCE = "first"  # the nonce until the first restart: only the run's key determines the noise


class Journal:
    """The journal in a folder. The first process reads it and sends its lines to all processes."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        # One line announces a hundredth of all steps, because writing it waits for the disk.
        self._ahead = min(max(steps // 100, 1), _MOST_AHEAD)
        self._fingerprint: dict[str, str] = {}
        self._seen: dict[str, range] = {}  # nonce → steps whose results may have been seen
        self._digests: dict[int, str] = {}  # step → hash, for steps that may be repeated
        self._shared = _Lines(folder / "journal.jsonl", writable=jax.process_index() == 0)
        self._own = _Lines(folder / f"examples-{jax.process_index()}.jsonl")
        shared = json.loads(broadcast_text(json.dumps(self._shared.read())))
        self._shared.apply(self._read_shared, shared)
        self._own.apply(self._read_own, self._own.read())

    def _read_shared(self, line: dict[str, Any]) -> None:
        if "nonce" in line:
            self._seen[line["nonce"]] = range(line["start"], line["start"])
            self._fingerprint = dict(line.get("fingerprint", {}))
        elif not self._seen:
            raise KeyError("nonce")
        else:
            start = self._seen[self.nonce].start
            self._seen[self.nonce] = range(start, line["announced"])

    def _read_own(self, line: dict[str, Any]) -> None:
        if line["nonce"] == self.nonce:
            self._digests[line["step"]] = line["examples"]

    @property
    def nonce(self) -> str:
        """The nonce of the last start or restart, or an empty text before the first start."""
        return next(reversed(self._seen), "")

    @property
    def starts(self) -> int:
        """The number of different nonces with which the run has started or restarted."""
        return len(self._seen)

    @property
    def has_steps(self) -> bool:
        """Whether any step was announced."""
        return any(map(len, self._seen.values()))

    def first_step(self, nonce: str) -> int:
        """Return the step at which the run started or restarted with this nonce."""
        return self._seen_with(nonce).start

    def changed(self, fingerprint: dict[str, str]) -> list[str]:
        """Return the names of the hashes that have changed since the last start or restart."""
        before = self._fingerprint
        return [n for n in before | fingerprint if before.get(n) != fingerprint.get(n)]

    def restart(self, fingerprint: dict[str, str], step: int) -> None:
        """Draw a new nonce for a run that starts or restarts at `step`, and record it."""
        # Before the first step, nobody has seen any noise, so a fixed nonce is safe. Later, a
        # nonce must be random, so that nobody can predict the new noise.
        nonce = broadcast_text(secrets.token_hex(8)) if self.has_steps else FIRST_NONCE
        self._seen[nonce], self._digests = range(step, step), {}
        self._fingerprint = fingerprint
        line = {"nonce": nonce, "fingerprint": fingerprint, "start": step}
        self._shared.write(line, sync=True)

    def differs(self, step: int, digest: str) -> bool:
        """Return whether an earlier attempt at this step read different examples (same nonce)."""
        return self._digests.get(step, digest) != digest

    def record(self, step: int, digest: str, *, sync: bool) -> None:
        """Announce a step, with a hash of the examples that this process has read for it.

        This must happen before the result of the step can be seen. With `sync`, wait until the hash
        is on the disk. This is necessary if the fingerprint does not cover all examples.
        """
        seen = self._seen[self.nonce]
        if step >= seen.stop:
            self._seen[self.nonce] = range(seen.start, step + self._ahead)
            self._shared.write({"announced": step + self._ahead}, sync=True)
        if self._digests.pop(step, None) is None:  # otherwise the file has this line already
            self._own.write({"nonce": self.nonce, "step": step, "examples": digest}, sync=sync)

    def seen_since(self, step: int, nonce: str) -> list[range]:
        """Return the steps that may have been seen since a checkpoint, one range per nonce.

        `step` and `nonce` are those of the checkpoint. The first range has the later steps with
        this nonce. The other ranges have the steps with later nonces.
        """
        first = self._seen_with(nonce)
        nonces = list(self._seen)
        later = nonces[nonces.index(nonce) + 1 :]
        return [range(step, first.stop), *(self._seen[one] for one in later)]

    def _seen_with(self, nonce: str) -> range:
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
    """A file with one JSON object per line. If not `writable`, it is neither written nor read."""

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

    def read(self) -> list[dict[str, Any]]:
        """Return all lines. If a crash has cut the last line short, remove this line."""
        if not (self._writable and self._path.exists()):
            return []
        *whole, last = self._path.read_bytes().split(b"\n")
        lines = [self._parse(text, number) for number, text in enumerate(whole, 1)]
        if last:  # the process was killed while it wrote this line, before it took the step
            with self._path.open("rb+") as file:
                try:
                    lines.append(self._parse(last, len(whole) + 1))
                    file.seek(0, os.SEEK_END)
                    file.write(b"\n")
                except ValueError:
                    file.truncate(self._path.stat().st_size - len(last))
        return lines

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("not an object")
        except ValueError as error:  # from JSON or Unicode
            raise self._damaged(repr(text[:40]), number) from error
        return line

    def apply(self, read: Callable[[dict[str, Any]], None], lines: list[dict[str, Any]]) -> None:
        """Call `read` on each line. Raise if a key is missing, or if a value has a wrong type."""
        for number, line in enumerate(lines, 1):
            try:
                read(line)
            except KeyError as error:
                raise self._damaged(f"no {error}", number) from error
            except (TypeError, ValueError) as error:
                raise self._damaged(str(line)[:40], number) from error

    def _damaged(self, got: str, number: int) -> ValueError:
        return ValueError(
            f"`folder` must hold an intact journal, got {got} in line {number} of {self._path}; "
            f"{START_AGAIN}."
        )

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
