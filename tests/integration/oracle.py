"""Which candidates of a prompt belong to the group, by brute force over all lengths."""

from collections.abc import Sequence
from itertools import combinations

from darts_server.records import CandidateRecord, GroupRecord
from darts_server.types import FinishReason

Outcome = tuple[int, bool]
"""Length in tokens, and whether the candidate finished before the length limit."""


def shortest(outcomes: Sequence[Outcome], count: int) -> set[int]:
    """Return the ``count`` finished candidates with the smallest (length, index) pairs, found by trying all sets."""
    finished = [i for i, (_, ok) in enumerate(outcomes) if ok]
    best = min(combinations(finished, count), key=lambda chosen: sorted((outcomes[i][0], i) for i in chosen))
    return set(best)


def expected(policy: str, outcomes: Sequence[Outcome], size: int, draws: Sequence[float]) -> set[int]:
    """Return the group of ``size`` under a policy with one place for the tail, from all lengths.

    Of sampled tails the candidate with the smallest of the ``draws`` is selected.
    """
    finished = sum(ok for _, ok in outcomes)
    if policy == "shortest":
        assert finished >= size, "choose prompts whose candidates finish"
        return shortest(outcomes, size)
    short = shortest(outcomes, size - 1)
    rest = [i for i in range(len(outcomes)) if i not in short]
    if policy == "longest":
        assert finished >= size, "choose prompts whose candidates finish"
        return short | {max((i for i in rest if outcomes[i][1]), key=lambda i: (outcomes[i][0], i))}
    return short | {min(rest, key=lambda i: draws[i])}


def was_hopeless(record: GroupRecord, candidate: CandidateRecord, num_shortest: int) -> bool:
    """Check that a candidate could not be among the shortest any more when it was stopped.

    By then K others must have finished that are shorter than one token more than it had.
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
