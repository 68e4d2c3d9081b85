"""The reports that audits return. They print as a table whose first row is the verdict."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class AuditReport(Protocol):
    """The result of an audit. `bool(report)` is `report.passed`, and `str(report)` is a table."""

    @property
    def passed(self) -> bool:
        """Whether the audit found no evidence against the claim."""


def format_report(passed: bool, rows: Mapping[str, str]) -> str:
    """Return a table: the verdict, then one line "name: text" for each row."""
    rows = {"verdict": "passed" if passed else "REJECTED", **rows}
    width = max(map(len, rows))
    return "\n".join(f"{name:>{width}}: {text}" for name, text in rows.items())


@dataclass(frozen=True)
class StatisticsReport:
    """The result of statistical tests of noise or of a sampler.

    Attributes:
        quantity: the name of the measured quantity.
        expected: the claimed value.
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
        """Whether every p-value is at least `failure` / number of tests (Bonferroni)."""
        return min(self.p_values.values()) >= self.failure / len(self.p_values)

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        rows = {self.quantity: f"{self.seen:.6g}, expected {self.expected:.6g}"}
        rows |= {name: f"p = {value:.2g}" for name, value in self.p_values.items()}
        rows["rejects if"] = f"any p is below {self.failure / len(self.p_values):.2g}"
        rows["rejects by mistake"] = f"with probability at most {self.failure:g}"
        return format_report(self.passed, rows)


@dataclass(frozen=True)
class ClaimsReport:
    """The result of checks that need no statistics: each claim holds or does not."""

    claims: Mapping[str, str]  # what is wrong with each claim, or "" if the claim holds
    measured: Mapping[str, str] = field(default_factory=dict)  # shown above the claims

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
    """Run one check per claim, and report which claims hold.

    A check returns what is wrong with its claim, or "" if the claim holds. If a check raises an
    error, its claim does not hold.
    """
    claims = {}
    for claim, check in checks.items():
        try:
            claims[claim] = check()
        except Exception as error:
            claims[claim] = f"{type(error).__name__}: {error}"
    return ClaimsReport(claims)


def expect_refusal(call: Callable[[], object], otherwise: str) -> str:
    """Return "" if this library refuses a call. Return `otherwise` if the call succeeds.

    If another library raises a TypeError or ValueError, return the error as text.
    """
    try:
        call()
    except (TypeError, ValueError) as error:  # this library's messages start with a backquote
        return "" if str(error).startswith("`") else f"{type(error).__name__}: {error}"
    return otherwise
