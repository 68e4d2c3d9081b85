"""Journal: a line before every step, so that after a fall all that may have been seen is counted.

A step that is taken again with the same key on the same sum gives the same result, and costs
nothing. With the same key on another sum it would betray the difference of both. So the
journal remembers under which circumstances steps were taken, and on which examples; what is taken
again under others gets another nonce, hence other noise and other batches, and is counted again.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

import jax

from optax_lsdp.training._hosts import agreed_text

_MOST_AHEAD = 64
FIRST = "first"  # the nonce of a run to which nothing has happened


def no_room(folder: Path, error: BaseException) -> OSError:
    """Return what to say if something cannot be written."""
    return OSError(
        f"`folder` must have room for journal and checkpoints, got {error} in {str(folder)!r}; the "
        "run goes on from the last checkpoint, once there is room."
    )


class Journal:
    """What was announced, in a `folder`: by the first process, for all of them.

    A hundredth of all `steps` is announced together, and waits for the disk. Which examples a step
    has read is written by each process for itself.

    Attributes:
        nonce: of the circumstances that hold now.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self._ahead = min(max(steps // 100, 1), _MOST_AHEAD)
        self.nonce = ""
        self._circumstances: dict[str, str] = {}
        self._eras: dict[str, range] = {}  # steps that may have been seen under each nonce
        self._digests: dict[int, str] = {}  # of steps that were taken before, and may be again
        self._shared = _Lines(folder / "journal.jsonl", is_mine=jax.process_index() == 0)
        self._own = _Lines(folder / f"examples-{jax.process_index()}.jsonl")
        for line in json.loads(agreed_text(json.dumps(self._shared.read()))):
            if "nonce" in line:
                self.nonce, self._circumstances = line["nonce"], line.get("circumstances", {})
                self._eras[self.nonce] = range(line["start"], line["start"])
            else:
                self._eras[self.nonce] = range(self._eras[self.nonce].start, line["announced"])
        for line in self._own.read():
            if line["nonce"] == self.nonce:
                self._digests[line["step"]] = line["examples"]

    @property
    def era(self) -> int:
        """How often circumstances have changed."""
        return len(self._eras)

    @property
    def has_steps(self) -> bool:
        """Tell whether any step was announced."""
        return any(map(len, self._eras.values()))

    def changed(self, circumstances: dict[str, str]) -> list[str]:
        """Return the names of circumstances that are not those of the last lines."""
        before = self._circumstances
        return [n for n in before | circumstances if before.get(n) != circumstances.get(n)]

    def renew(self, circumstances: dict[str, str], step: int) -> None:
        """Begin with other circumstances, from a step on."""
        # What is seen first is a function of the key; whatever follows is one of nothing known.
        self.nonce = agreed_text(secrets.token_hex(8)) if self.has_steps else FIRST
        self._circumstances = circumstances
        self._eras[self.nonce], self._digests = range(step, step), {}
        line = {"nonce": self.nonce, "circumstances": circumstances, "start": step}
        self._shared.write(line, safe=True)

    def differs(self, step: int, digest: str) -> bool:
        """Tell whether this step was taken on other examples before."""
        return self._digests.get(step, digest) != digest

    def record(self, step: int, digest: str, *, safe: bool) -> None:
        """Announce a step, before its result can be seen.

        Args:
            step: its number.
            digest: a hash of the examples that this process has read for it.
            safe: whether to wait until that is on the disk, since nothing else tells it.
        """
        era = self._eras[self.nonce]
        if step >= era.stop:
            self._eras[self.nonce] = range(era.start, step + self._ahead)
            self._shared.write({"announced": step + self._ahead}, safe=True)
        if self._digests.pop(step, None) is None:  # which no later step will ask for
            self._own.write({"nonce": self.nonce, "step": step, "examples": digest}, safe=safe)

    def seen_since(self, step: int, nonce: str) -> list[range]:
        """Return all steps that may have been seen and are not in a checkpoint of that nonce.

        First those that follow the checkpoint, then those of each of the later nonces.
        """
        if nonce not in self._eras:
            raise ValueError(
                f"`folder` must hold the journal of its checkpoints, got another in {self.folder}: "
                "what they have spent is not known; start again in an empty folder."
            )
        nonces = list(self._eras)
        first, *later = (self._eras[one] for one in nonces[nonces.index(nonce) :])
        return [range(step, first.stop), *later]

    def close(self) -> None:
        """Close the files."""
        self._shared.close()
        self._own.close()


class _Lines:
    """A file of JSON objects, one a line; it is left as it is unless it is `is_mine`."""

    def __init__(self, path: Path, *, is_mine: bool = True) -> None:
        self.path, self.is_mine = path, is_mine
        self._file: Any = None

    def write(self, line: dict[str, Any], *, safe: bool) -> None:
        """Add a line; one that is to be safe waits for the disk."""
        if not self.is_mine:
            return
        try:
            if self._file is None:
                self._file = self.path.open("ab", buffering=0)
            text = (json.dumps(line) + "\n").encode()
            if self._file.write(text) < len(text):
                raise OSError("the line was cut")
            if safe:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise no_room(self.path.parent, error) from error

    def read(self) -> list[dict[str, Any]]:
        """Return all lines; one that was not written to its end is removed."""
        if not (self.is_mine and self.path.exists()):
            return []
        *whole, last = self.path.read_bytes().split(b"\n")
        lines = [self._parse(text, number) for number, text in enumerate(whole, 1)]
        if last:  # killed while it was written, before the step
            with self.path.open("rb+") as file:
                try:
                    lines.append(self._parse(last, len(whole) + 1))
                    file.seek(0, os.SEEK_END)
                    file.write(b"\n")
                except ValueError:
                    file.truncate(self.path.stat().st_size - len(last))
        return lines

    def _parse(self, text: bytes, number: int) -> dict[str, Any]:
        try:
            line = json.loads(text)
            if not isinstance(line, dict):
                raise ValueError("not an object")
        except ValueError as error:  # of JSON or Unicode
            raise ValueError(
                f"`folder` must hold a whole journal, got {text[:40]!r} in line {number} of "
                f"{self.path}; start again in an empty folder."
            ) from error
        return line

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
