"""Deadlines of cohorts: learned from earlier groups, and stretched where they cost too many correct answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from darts_server.estimates.checks import LARGEST
from darts_server.estimates.deadline_losses import Answer, DeadlineLosses, GroupLosses
from darts_server.policy.deadline import Deadline, RecentCompletionLengths
from darts_server.policy.shaping import Shaping
from darts_server.records import GroupRecord
from darts_server.rollout.learned.documents import DocumentStore, Kind, StoredValues, json_kind
from darts_server.types import MaxLost, Outcome


def _completion_lengths(value: Any) -> RecentCompletionLengths:
    if not isinstance(value, list):
        raise ValueError("lengths in tokens must be a list of whole numbers")
    return RecentCompletionLengths(value)


LENGTHS = json_kind("deadline", _completion_lengths)
LOSSES = json_kind("losses", DeadlineLosses)
LOST_GROUPS = json_kind("lost_groups", GroupLosses)
KINDS: Sequence[Kind[Any]] = (LENGTHS, LOSSES, LOST_GROUPS)


class Deadlines:
    """Learn from groups what is needed for deadlines, and keep it in ``documents``.

    Completion lengths are learned by policy and group size. What deadlines take away is learned by policy: lengths are
    compared with a deadline, and each policy's is at another length of the same answers.
    """

    def __init__(self, documents: DocumentStore, rng: np.random.Generator) -> None:
        self._lengths = StoredValues(documents, LENGTHS)
        self._losses = StoredValues(documents, LOSSES)
        self._lost_groups = StoredValues(documents, LOST_GROUPS)
        self._rng = rng

    def losses(self, policy: str) -> DeadlineLosses:
        """Return what the policy's deadlines take away, as far as rewards were reported."""
        return self._losses.load(policy) or DeadlineLosses()

    def lost_groups(self, policy: str) -> GroupLosses:
        """Return how many groups the policy's deadlines take all right answers from."""
        return self._lost_groups.load(policy) or GroupLosses()

    def lost_share(self, policy: str, max_lost: MaxLost) -> float | None:
        """Share of correct answers that the deadline discards; ``None`` while too few are known."""
        return self.losses(policy).share(self.stretch(policy, max_lost))

    def lost_group_share(self, policy: str, max_lost: MaxLost) -> float | None:
        """Share of the groups with correct answers that lose all of them; ``None`` while too few are known."""
        return self.lost_groups(policy).share(self.stretch(policy, max_lost))

    def stretch(self, policy: str, max_lost: MaxLost) -> float:
        """Factor on the policy's deadlines, at least 1."""
        return max(self.losses(policy).stretch(max_lost.answers), self.lost_groups(policy).stretch(max_lost.groups))

    def current_rule(self, shaping: Shaping, policy: str) -> Deadline | None:
        """The policy's deadline rule with the present stretch; ``None`` if the policy has no deadlines."""
        rule = shaping.deadline
        return None if rule is None else replace(rule, stretch=self.stretch(policy, rule.max_lost))

    def recent_lengths(self, name: str) -> RecentCompletionLengths:
        """Completion lengths of recent groups, by policy and group size."""
        return self._lengths.load(name) or RecentCompletionLengths()

    def should_explore(self, rule: Deadline, policy: str, groups: int) -> bool:
        """Decide whether a cohort of ``groups`` runs past its deadline: at random, and once rewards are reported.

        Whole cohorts explore, not single groups: one group past the deadline makes its whole cohort wait, so that the
        same share of single groups would delay nearly every cohort.
        """
        losses = self.losses(policy)
        if rule.exploration > 0 and losses.should_explore_first:
            losses = replace(losses, first_groups=min(losses.first_groups + groups, LARGEST))
            self._losses.save(policy, _values(losses))
            return True
        return self._rng.random() < rule.exploration

    def group_ended(self, record: GroupRecord) -> None:
        """Learn how many tokens the group needed, or that it was cut at the bound before that was known.

        Only if its policy has deadlines.
        """
        if record.max_lost is None:
            return
        was_cut = any(c.cut for c in record.candidates)
        if record.outcome is Outcome.COMPLETED and (was_cut or record.tokens_needed is not None):
            name = f"{record.policy}/{record.size}"
            lengths = self.recent_lengths(name)
            lengths.add(record.tokens_needed or 0)
            self._lengths.save(name, lengths.state)

    def learn_rewards(self, record: GroupRecord, correct: Mapping[int, bool]) -> None:
        """Learn from a group which of its candidates, by index, were correct.

        From one that was not explored only if its trajectories have weights: else some candidates can never be
        returned, and what the deadline took away does not show.
        """
        if (max_lost := record.max_lost) is None:
            return
        policy, bound, deadline = record.policy, record.bound, record.cohort_deadline
        before = losses = self.losses(policy)
        if not losses.is_rewarded and (record.explored or deadline is not None):
            losses = replace(losses, is_rewarded=True)
        if record.explored or all(c.weight is not None for c in record.selected):
            answers = []
            for c in record.selected:
                if not c.cut and c.index not in correct:
                    continue
                # Its length relative to what discards it without a stretch: the bound for an answer that its group
                # would wait for, and 0 without a deadline. What was cut had become longer than its group would wait
                # for, unless it was cut at the bound.
                relative_length = 0.0
                if deadline is not None and bound is not None:  # these two are known together
                    needed = record.completion_length
                    is_needed = needed is None or (c.tokens <= needed and not c.cut)
                    relative_length = c.tokens * record.stretch / (bound if is_needed else deadline)
                answers.append(Answer(relative_length, correct.get(c.index, False), c.cut, c.weight or 1.0))
            losses = losses.with_answers(answers, record.explored, max_lost.answers)
            # Of a group its shortest right answer counts or, without one, its longest once all rewards are there:
            # relative to the bound, which no candidate may exceed whatever its group waits for.
            right = [c.tokens for c in record.selected if correct.get(c.index, False)]
            is_known = record.selected and all(c.cut or c.index in correct for c in record.selected)
            if right or is_known:
                tokens = min(right) if right else max(c.tokens for c in record.selected)
                relative_length = 0.0 if bound is None else tokens * record.stretch / bound
                group = Answer(relative_length, is_right=bool(right), cut=any(c.cut for c in record.selected))
                self._lost_groups.save(policy, _values(self.lost_groups(policy).with_group(group)))
        if losses != before:
            self._losses.save(policy, _values(losses))


def _values(losses: DeadlineLosses | GroupLosses) -> dict[str, Any]:
    # Not by `asdict`, which copies every number: this is done for each rewarded group.
    return {name: getattr(losses, name) for name in losses.__slots__}
