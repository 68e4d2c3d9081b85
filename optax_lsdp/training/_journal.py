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
    """What was announced, in the file `path`.

    A hundredth of all `steps` is announced together, and waits for the disk: lines may be lost with
    the power, announcements are not.

    Attributes:
        nonce: of the circumstances that hold now.
    """

    def __init__(self, path: Path, steps: int) -> None:
        self.path = path
        self._ahead = min(max(steps // 100, 1), _MOST_AHEAD)
        self.nonce = self._fingerprint = ""
        self._announced: dict[str, int] = {}  # steps that may have been seen, for each nonce
        self._digests: dict[int, str] = {}
        if path.exists():
            self._read()
        self._file: Any = None

    @property
    def era(self) -> int:
        """How often circumstances have changed."""
        return len(self._announced)

    @property
    def has_steps(self) -> bool:
        """Tell whether any step was announced."""
        return any(self._announced.values())

    def is_same(self, fingerprint: str) -> bool:
        """Tell whether circumstances are those of the last lines."""
        return bool(self.nonce) and fingerprint == self._fingerprint

    def renew(self, fingerprint: str) -> None:
        """Begin with other circumstances."""
        # What is seen first is a function of the key; whatever follows is one of nothing known.
        self.nonce = agreed_text(secrets.token_hex(8)) if self.has_steps else FIRST
        self._fingerprint = fingerprint
        self._announced[self.nonce], self._digests = 0, {}
        self._write({"nonce": self.nonce, "fingerprint": fingerprint}, safe=True)

    def differs(self, step: int, digest: str) -> bool:
        """Tell whether this step was taken on other examples before."""
        return self._digests.get(step, digest) != digest

    def record(self, step: int, digest: str) -> None:
        """Announce a step, before its result can be seen."""
        if step >= self._announced[self.nonce]:
            self._announced[self.nonce] = step + self._ahead
            self._write({"announced": step + self._ahead}, safe=True)
        if step not in self._digests:
            self._digests[step] = digest
            self._write({"step": step, "examples": digest})

    def seen_since(self, step: int, nonce: str) -> list[int]:
        """Return all steps that may have been seen and are not in a checkpoint of that nonce."""
        if nonce not in self._announced:
            raise ValueError(
                f"`folder` must hold the journal of its checkpoints, got another in {self.path}: "
                "what they have spent is not known; start again in an empty folder."
            )
        nonces = list(self._announced)
        later = nonces[nonces.index(nonce) :]
        return [seen for one in later for seen in range(step, self._announced[one])]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any], *, safe: bool = False) -> None:
        if self._file is None:
            self._file = self.path.open("ab", buffering=0)
        try:
            text = (json.dumps(line) + "\n").encode()
            if self._file.write(text) < len(text):
                raise OSError("the line was cut")
            if safe:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise no_room(self.path.parent, error) from error

    def _read(self) -> None:
        lines = self.path.read_text(encoding="utf-8").split("\n")
        for number, text in enumerate(lines):
            try:
                line = json.loads(text) if text else {}
            except ValueError as error:
                if number == len(lines) - 1:  # killed while it was written, before the step
                    self._cut(text)
                    break
                raise ValueError(
                    f"`folder` must hold a whole journal, got {text[:40]!r} in line {number + 1} "
                    f"of {self.path}; start again in an empty folder."
                ) from error
            if "nonce" in line:
                self.nonce, self._fingerprint = line["nonce"], line["fingerprint"]
                self._announced[self.nonce], self._digests = 0, {}
            elif "announced" in line:
                self._announced[self.nonce] = line["announced"]
            elif "step" in line:
                self._digests[line["step"]] = line["examples"]

    def _cut(self, text: str) -> None:
        """Remove a last line that was not written to its end."""
        with self.path.open("rb+") as file:
            file.truncate(self.path.stat().st_size - len(text.encode()))
