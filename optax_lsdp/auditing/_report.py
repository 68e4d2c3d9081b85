"""Define the reports that audits return: what was measured, and the verdict.

Every report implements the protocol `AuditReport`. A report is true in a condition if the audit
passed, and prints as a table whose first row is the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class AuditReport(Protocol):
    """The result of an audit; `bool(report)` equals `report.passed`, and `str(report)` explains."""

    @property
    def passed(self) -> bool:
        """Whether the audit found no evidence against the claim."""

    def __bool__(self) -> bool:
        """Return `passed`."""


def format_report(passed: bool, rows: Mapping[str, str]) -> str:
    """Return the verdict, followed by the rows, as lines with aligned colons."""
    rows = {"verdict": "passed" if passed else "REJECTED", **rows}
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}: {text}" for name, text in rows.items())


@dataclass(frozen=True)
class StatisticsReport:
    """The result of statistical tests of noise or of a sampler.

    Attributes:
        quantity: the name of the measured quantity.
        expected: the value that the claim implies.
        seen: the measured value.
        p_values: the p-value of each test.
        failure: an upper bound on the probability that the audit rejects a correct mechanism.
    """

    quantity: str
    expected: float
    seen: float
    p_values: Mapping[str, float]
    failure: float

    @property
    def passed(self) -> bool:
        """Whether every p-value reaches the threshold, `failure` / number of tests (Bonferroni)."""
        return min(self.p_values.values()) >= self._threshold

    @property
    def _threshold(self) -> float:
        return self.failure / len(self.p_values)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        rows = {self.quantity: f"{self.seen:.6g}, expected {self.expected:.6g}"}
        rows |= {name: f"p = {value:.2g}" for name, value in self.p_values.items()}
        rows["rejects if"] = f"any p is below {self._threshold:.2g}"
        rows["rejects by mistake"] = f"with probability at most {self.failure:g}"
        return format_report(self.passed, rows)


@dataclass(frozen=True)
class ClaimsReport:
    """The result of checks that need no statistics: each claim holds or does not.

    Attributes:
        claims: for each claim, a text that says what is wrong, or "" if the claim holds.
        measured: what else the audit measured, as text.
    """

    claims: Mapping[str, str]
    measured: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether all claims hold."""
        return not any(self.claims.values())

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        rows = {claim: f"NO: {wrong}" if wrong else "yes" for claim, wrong in self.claims.items()}
        return format_report(self.passed, {**self.measured, **rows})


def check_claims(checks: Mapping[str, Callable[[], str]]) -> ClaimsReport:
    """Run one check for each claim, and return a report.

    A check returns a text that says what is wrong, or "" if the claim holds. If a check raises, the
    error is what is wrong.
    """

    def run(check: Callable[[], str]) -> str:
        try:
            return check()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return ClaimsReport({claim: run(check) for claim, check in checks.items()})


def expect_refusal(call: Callable[[], object], otherwise: str) -> str:
    """Return "" if this library refuses a call, and a text that says what is wrong otherwise.

    The text is `otherwise` if the call succeeds. If the call raises an error that is not of this
    library, the text is that error. This library's messages start with an argument in backquotes.
    """
    try:
        call()
    except (TypeError, ValueError) as error:
        return "" if str(error).startswith("`") else f"{type(error).__name__}: {error}"
    return otherwise
