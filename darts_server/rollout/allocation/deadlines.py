"""Deadlines of cohorts: learned from earlier groups, and stretched where they cost too many correct answers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from darts_server.policy.deadline import Answer, Deadline, DeadlineLosses, RecentCompletionLengths
from darts_server.policy.shaping import Shaping
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.documents import DocumentStore, Parse, StoredValues
from darts_server.types import Outcome

KEY = "all"


def _completion_lengths(value: Any) -> RecentCompletionLengths:
    if not isinstance(value, list):
        raise ValueError("lengths in tokens must be a list of whole numbers")
    return RecentCompletionLengths(value)


PARSERS: dict[str, Parse] = {
    "deadline": _completion_lengths,
    "losses": lambda value: DeadlineLosses(**value),
}
"""How values are parsed, by kind."""


class Deadlines:
    """Learn from groups what is needed for deadlines, by policy and group size, and keep it in ``documents``."""

    def __init__(self, documents: DocumentStore, rng: np.random.Generator) -> None:
        self._lengths = StoredValues(documents, "deadline", PARSERS["deadline"])
        self._losses = StoredValues(documents, "losses", PARSERS["losses"])
        self._rng = rng

    @property
    def losses(self) -> DeadlineLosses:
        """Correct answers that deadlines discard, as far as rewards were reported."""
        losses: DeadlineLosses | None = self._losses.load(KEY)
        return losses or DeadlineLosses()

    def lost_share(self, max_lost_share: float) -> float | None:
        """Share of correct answers that the deadline discards; ``None`` while too few are known."""
        losses = self.losses
        return losses.share(losses.stretch(max_lost_share))

    def current_rule(self, shaping: Shaping) -> Deadline | None:
        """The policy's deadline rule with the present stretch; ``None`` if the policy has no deadlines."""
        rule = shaping.deadline
        return None if rule is None else replace(rule, stretch=self.losses.stretch(rule.max_lost_share))

    def recent_deadline(self, rule: Deadline, name: str) -> int | None:
        """The deadline from recent groups, for a cohort of a few; ``None`` while there are too few of them."""
        return (self._lengths.load(name) or RecentCompletionLengths()).deadline(rule)

    def should_explore(self, rule: Deadline, groups: int) -> bool:
        """Decide whether a cohort of ``groups`` runs past its deadline: at random, and once rewards are reported.

        Whole cohorts explore, not single groups: one group past the deadline makes its whole cohort wait, so that the
        same share of single groups would delay nearly every cohort.
        """
        losses = self.losses
        if rule.exploration > 0 and losses.should_explore_first:
            self._save(losses, replace(losses, first_groups=losses.first_groups + groups))
            return True
        return self._rng.random() < rule.exploration

    def learn(self, record: GroupRecord, name: str) -> None:
        """Learn how many tokens the group needed, or that it was cut at the bound before that was known."""
        was_cut = any(c.cut for c in record.candidates)
        if record.outcome is Outcome.COMPLETED and (was_cut or record.tokens_needed is not None):
            lengths = self._lengths.load(name) or RecentCompletionLengths()
            lengths.add(record.tokens_needed or 0)
            self._lengths.save(name, lengths.state)

    def learn_rewards(self, record: GroupRecord, correct: Mapping[int, bool]) -> None:
        """Learn from a group which of its candidates, by index, were correct.

        From one that was not explored only if its trajectories have weights: else some candidates can never be
        returned, and what the deadline took away does not show.
        """
        before = losses = self.losses
        if not losses.is_rewarded and (record.explored or record.cohort_deadline is not None):
            losses = replace(losses, is_rewarded=True)
        has_weights = all(c.weight is not None for c in record.selected)
        if record.max_lost_share is not None and (record.explored or has_weights):
            answers = [
                Answer(_overrun(record, c), correct.get(c.index, False), c.cut, c.weight or 1.0)
                for c in record.selected
                if c.cut or c.index in correct
            ]
            losses = losses.with_answers(answers, record.explored, record.max_lost_share)
        self._save(before, losses)

    def _save(self, before: DeadlineLosses, losses: DeadlineLosses) -> None:
        if losses != before:
            # Not by `asdict`, which copies every number: this is done for each rewarded group.
            self._losses.save(KEY, {name: getattr(losses, name) for name in losses.__slots__})


def _overrun(record: GroupRecord, candidate: CandidateRecord) -> float:
    """Return the length of an answer relative to the deadline that discards it, without a stretch.

    That is the bound for an answer that its group would wait for, and 0 without a deadline. What was cut had become
    longer than its group would wait for, unless it was cut at the bound.
    """
    if record.cohort_deadline is None or record.bound is None:  # these two are known together
        return 0.0
    needed = record.completion_length
    is_needed = needed is None or (candidate.tokens <= needed and not candidate.cut)
    return candidate.tokens * record.stretch / (record.bound if is_needed else record.cohort_deadline)
