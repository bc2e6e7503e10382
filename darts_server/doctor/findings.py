"""What a check says."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    WARN = "warn"
    """The server starts, and may fall short later."""
    FAIL = "FAIL"
    """It would not start, or could not serve."""


@dataclass(frozen=True, slots=True)
class Finding:
    """``says`` has the remedy too, if one is needed."""

    verdict: Verdict
    what: str
    says: str

    def __str__(self) -> str:
        return f"{self.verdict:<5} {self.what:<10} {self.says}"


def ok(what: str, says: str) -> Finding:
    return Finding(Verdict.OK, what, says)


def warn(what: str, says: str) -> Finding:
    return Finding(Verdict.WARN, what, says)


def fail(what: str, says: str) -> Finding:
    return Finding(Verdict.FAIL, what, says)


def failing(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.verdict is Verdict.FAIL]
