"""Reports: what an audit has found, with a verdict; they print as a few lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass


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


@dataclass(frozen=True)
class StatisticsReport(Report):
    """Whether what was drawn is what it should be.

    Attributes:
        quantity: what was measured.
        expected: what it should be.
        seen: what it was.
        p_values: how likely what each test saw is, if all is well.
        failure: the probability that what is well is rejected.
    """

    quantity: str
    expected: float
    seen: float
    p_values: Mapping[str, float]
    failure: float

    @property
    def passed(self) -> bool:
        """Whether chance explains what every test saw."""
        return min(self.p_values.values()) >= self.failure / len(self.p_values)

    def lines(self) -> dict[str, str]:
        """Return what is printed."""
        measured = {self.quantity: f"{self.seen:.6g}, should be {self.expected:.6g}"}
        tests = {name: f"p = {value:.2g}" for name, value in self.p_values.items()}
        return measured | tests | {"if all is well": f"rejected with probability {self.failure:g}"}


@dataclass(frozen=True)
class ClaimsReport(Report):
    """Whether claims hold that need no statistics.

    Attributes:
        claims: what is wrong with each claim; empty where nothing is.
    """

    claims: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether all claims hold."""
        return not any(self.claims.values())

    def lines(self) -> dict[str, str]:
        """Return what is printed."""
        return {claim: f"NO: {wrong}" if wrong else "yes" for claim, wrong in self.claims.items()}


def unless_refused(call: Callable[[], object], otherwise: str) -> str:
    """Return nothing if a call is refused in a sentence of this library, else what is wrong."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return "" if str(error).startswith("`") else f"{type(error).__name__}: {error}"
    return otherwise


def checked(checks: Mapping[str, Callable[[], str]]) -> ClaimsReport:
    """Return what checks find, by their claims; one that breaks off speaks against its claim."""

    def found(check: Callable[[], str]) -> str:
        try:
            return check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return ClaimsReport({claim: found(check) for claim, check in checks.items()})
