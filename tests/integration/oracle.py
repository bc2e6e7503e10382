"""Which candidates of a prompt belong to the group, by brute force over all lengths."""

from collections.abc import Sequence
from itertools import combinations

from darts_server.types import CandidateRecord, FinishReason, GroupRecord

Truth = tuple[int, bool]
"""Length in tokens, and whether the candidate ended by itself before the length limit."""


def shortest(truths: Sequence[Truth], count: int) -> set[int]:
    """The ``count`` candidates, all valid, whose (length, index) pairs are the smallest, found by trying all sets."""
    valid = [i for i, (_, ok) in enumerate(truths) if ok]
    best = min(combinations(valid, count), key=lambda chosen: sorted((truths[i][0], i) for i in chosen))
    return set(best)


def expected(policy: str, truths: Sequence[Truth], size: int, lots: Sequence[float]) -> set[int]:
    """The group of ``size`` under a policy with one place for the tail, from all lengths."""
    valid = sum(ok for _, ok in truths)
    if policy == "shortest":
        assert valid >= size, "choose prompts that end by themselves"
        return shortest(truths, size)
    short = shortest(truths, size - 1)
    rest = [i for i in range(len(truths)) if i not in short]
    if policy == "longest":
        assert valid >= size, "choose prompts that end by themselves"
        return short | {max((i for i in rest if truths[i][1]), key=lambda i: (truths[i][0], i))}
    return short | {min(rest, key=lambda i: lots[i])}


def hopeless_when_stopped(record: GroupRecord, candidate: CandidateRecord, num_shortest: int) -> bool:
    """Whether a candidate that was stopped after ``candidate.tokens`` tokens had lost every place for the shortest.

    It had if K valid ones had by then finished that are shorter than it could have become, which is one token more.
    """
    earliest = (candidate.tokens + 1, candidate.index)
    assert candidate.ended_at is not None
    ahead = [
        c
        for c in record.candidates
        if c.finish_reason is FinishReason.STOP
        and c.ended_at is not None
        and c.ended_at <= candidate.ended_at
        and (c.tokens, c.index) < earliest
    ]
    return len(ahead) >= num_shortest
