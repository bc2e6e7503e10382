"""What is certain about candidates that nobody has followed: an assessment of all that is known of them, at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from darts_server.policy.candidate import Candidate
from darts_server.policy.selection.rules import SelectionRule
from darts_server.types import DiscardReason


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is certain now, whatever the running candidates do, as long as they do not fail.

    ``settled``: finished candidates that belong to the group. ``hopeless``: running candidates that cannot belong to it
    any more, and why. ``cuts``: candidates, running or finished, of which only the first tokens belong to it, and how
    many. ``check_at``: running candidate -> token count at which this verdict may change; progress before that changes
    nothing.
    """

    settled: frozenset[int]
    hopeless: Mapping[int, DiscardReason] = field(default_factory=dict)
    cuts: Mapping[int, int] = field(default_factory=dict)
    check_at: Mapping[int, int] = field(default_factory=dict)


def assess(
    rule: SelectionRule,
    running: Sequence[Candidate],
    finished: Sequence[Candidate],
    deliver_early: bool,
    deadline: int | None = None,
    bound: int | None = None,
) -> Verdict:
    assessment = rule.begin(deliver_early)
    assessment.deadline, assessment.bound = deadline, bound
    for candidate in (*running, *finished):
        assessment.add(candidate)
    hopeless = assessment.hopeless()
    for index in hopeless:
        assessment.remove(index)
    waits = len(hopeless) < len(running)
    return Verdict(
        settled=frozenset(assessment.newly_settled() if waits else rule.select(finished, deadline)),
        hopeless=hopeless,
        cuts=assessment.cuts(),
        check_at=assessment.check_at(),
    )
