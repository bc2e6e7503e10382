"""Deadlines of cohorts: learned from earlier groups, and stretched where they cost too many correct answers."""

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
    """Learn from groups what is needed for deadlines, by policy and group size, and keep it in ``documents``."""

    def __init__(self, documents: DocumentStore, rng: np.random.Generator) -> None:
        self._lengths = StoredValues(documents, "deadline", _completion_lengths)
        self._losses = StoredValues(documents, "losses", lambda value: DeadlineLosses(**value))
        self._rng = rng

    @property
    def losses(self) -> DeadlineLosses:
        """Share of correct answers lost to deadlines, as far as rewards were reported."""
        losses: DeadlineLosses | None = self._losses.load(KEY)
        return losses or DeadlineLosses()

    def current_rule(self, shaping: Shaping) -> Deadline | None:
        """The policy's deadline rule with the present stretch; ``None`` if the policy has no deadlines."""
        return None if shaping.deadline is None else replace(shaping.deadline, stretch=self.losses.stretch)

    def recent_deadline(self, rule: Deadline, name: str) -> int | None:
        """The deadline from recent groups, for a cohort of a few; ``None`` while there are too few of them."""
        return (self._lengths.load(name) or RecentCompletionLengths()).deadline(rule)

    def should_explore(self, rule: Deadline) -> bool:
        """Decide at random whether a cohort runs past its deadline.

        Whole cohorts explore, not single groups: one group past the deadline makes its whole cohort wait, so that the
        same share of single groups would delay nearly every cohort.
        """
        return self._rng.random() < rule.exploration

    def learn(self, record: GroupRecord, name: str) -> None:
        """Learn how many tokens the group needed."""
        if record.outcome is Outcome.COMPLETED and record.tokens_needed is not None:
            lengths = self._lengths.load(name) or RecentCompletionLengths()
            lengths.add(record.tokens_needed)
            self._lengths.save(name, lengths.state)

    def learn_rewards(self, record: GroupRecord, correct: Mapping[int, bool], rule: Deadline) -> None:
        """Learn from an explored group which of its candidates, by index, were correct. Other groups are ignored."""
        if not record.explored:
            return
        answers = [c for c in record.selected if correct.get(c.index)]
        # A group that was complete before its deadline was known loses nothing by it.
        lost = sum(record.deadline is not None and c.tokens > record.deadline for c in answers)
        self._losses.save(KEY, asdict(self.losses.with_group(len(answers), lost, rule.max_lost_share)))


def _completion_lengths(value: Any) -> RecentCompletionLengths:
    if not (isinstance(value, list) and all(isinstance(tokens, int) for tokens in value)):
        raise ValueError("lengths in tokens must be a list of whole numbers")
    return RecentCompletionLengths(value)
