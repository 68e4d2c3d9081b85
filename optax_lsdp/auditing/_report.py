"""Reports: what an audit has found, with a verdict; they print as a few lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple


class Test(NamedTuple):
    """A statistical test, and the p-value that it gave."""

    name: str
    p_value: float

    def passes(self, failure: float) -> bool:
        """Tell whether chance explains what was seen."""
        return self.p_value >= failure

    def line(self) -> str:
        """Return what is printed."""
        return f"p = {self.p_value:.2g}"


class Report(ABC):
    """What an audit found. It is true in a condition if nothing speaks against the claim."""

    @property
    @abstractmethod
    def passed(self) -> bool:
        """Whether nothing was found that speaks against the claim."""

    @abstractmethod
    def lines(self) -> dict[str, str]:
        """Return what is printed, by name."""

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        found = {"verdict": "passed" if self.passed else "REJECTED", **self.lines()}
        width = max(map(len, found))
        return "\n".join(f"{name:>{width}}: {text}" for name, text in found.items())
