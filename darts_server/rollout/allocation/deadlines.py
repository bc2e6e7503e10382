"""The deadlines of batches: from the groups before them, held back where they cost too much."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from darts_server.policy.deadline import Deadline, DeadlineLosses, RecentCompletionLengths
from darts_server.policy.shaping import Shaping
from darts_server.rollout.learned.documents import DocumentStore, StoredValues
from darts_server.types import GroupRecord, Outcome

KEY = "all"


class Deadlines:
    """What is learned of deadlines is in ``documents``, by policy and group size."""

    def __init__(self, documents: DocumentStore, rng: np.random.Generator) -> None:
        self._needs = StoredValues(documents, "deadline", _needs)
        self._losses = StoredValues(documents, "losses", lambda value: DeadlineLosses(**value))
        self._rng = rng

    @property
    def losses(self) -> DeadlineLosses:
        """What deadlines take away, as far as rewards were reported."""
        known: DeadlineLosses | None = self._losses.load(KEY)
        return known or DeadlineLosses()

    def rule(self, shaping: Shaping) -> Deadline | None:
        """How a batch's deadline is made now."""
        return None if shaping.deadline is None else replace(shaping.deadline, stretch=self.losses.stretch)

    def recent(self, rule: Deadline, name: str) -> int | None:
        """The deadline over the last groups, for one of few that come together; ``None`` while too few are known."""
        return (self._needs.load(name) or RecentCompletionLengths()).deadline(rule)

    def explores(self, rule: Deadline) -> bool:
        """Whether a batch is let run past its deadline.

        Whole batches are: one group that runs on makes all of its batch wait, so of the same share of single groups
        nearly every batch would have one.
        """
        return self._rng.random() < rule.exploration

    def learn(self, record: GroupRecord, name: str) -> None:
        """Take in how long the group needed."""
        if record.outcome is Outcome.COMPLETED and record.tokens_needed is not None:
            needs = self._needs.load(name) or RecentCompletionLengths()
            needs.add(record.tokens_needed)
            self._needs.save(name, needs.state)

    def rewarded(self, record: GroupRecord, right: Mapping[int, bool], rule: Deadline) -> None:
        """Take in which of a group's candidates, by index, gave the right answer. Only explored groups tell."""
        if not record.explored:
            return
        answers = [c for c in record.selected if right.get(c.index)]
        # A group that was complete before its deadline was known loses nothing by it.
        lost = sum(record.deadline is not None and c.tokens > record.deadline for c in answers)
        self._losses.save(KEY, asdict(self.losses.with_group(len(answers), lost, rule.max_lost_share)))


def _needs(value: Any) -> RecentCompletionLengths:
    if not (isinstance(value, list) and all(isinstance(tokens, int) for tokens in value)):
        raise ValueError("lengths in tokens must be a list of whole numbers")
    return RecentCompletionLengths(value)
