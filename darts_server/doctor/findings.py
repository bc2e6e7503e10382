"""The result of a check."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The server starts, but something may fail later."""
    FAIL = "FAIL"
    """The server would not start, or could not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. ``message`` includes the remedy where one is needed."""

    verdict: Verdict
    subject: str
    message: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.subject:<10} {self.message}"


def ok(subject: str, message: str) -> Finding:
    return Finding(Verdict.OK, subject, message)


def warn(subject: str, message: str) -> Finding:
    return Finding(Verdict.WARN, subject, message)


def fail(subject: str, message: str) -> Finding:
    return Finding(Verdict.FAIL, subject, message)


def failing(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.FAIL]
