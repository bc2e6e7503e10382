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


def _parse_lengths(value: Any) -> RecentCompletionLengths:
    if not isinstance(value, list):
        raise ValueError("lengths in tokens must be a list of whole numbers")
    return RecentCompletionLengths(value)


LENGTHS = json_kind("deadline", _parse_lengths)
LOSSES = json_kind("losses", DeadlineLosses)
LOST_GROUPS = json_kind("lost_groups", GroupLosses)
KINDS: Sequence[Kind[Any]] = (LENGTHS, LOSSES, LOST_GROUPS)


class Deadlines:
    """Learns deadlines from earlier groups, and moves them later if they cost too many correct answers.

    Losses are learned by policy, because each policy has its deadline at another length of the same answers.
    """

    def __init__(self, documents: DocumentStore, rng: np.random.Generator) -> None:
        self._lengths = StoredValues(documents, LENGTHS)
        self._losses = StoredValues(documents, LOSSES)
        self._lost_groups = StoredValues(documents, LOST_GROUPS)
        self._rng = rng

    def load_losses(self, policy: str) -> DeadlineLosses:
        return self._losses.load(policy) or DeadlineLosses()

    def load_lost_groups(self, policy: str) -> GroupLosses:
        return self._lost_groups.load(policy) or GroupLosses()

    def lost_share(self, policy: str, max_lost: MaxLost) -> float | None:
        """Return the lost share of correct answers, or None if too few are known."""
        return self.load_losses(policy).lost_share(self.deadline_factor(policy, max_lost))

    def lost_group_share(self, policy: str, max_lost: MaxLost) -> float | None:
        """Return the share of groups that lose all correct answers, or None if too few groups are known."""
        return self.load_lost_groups(policy).lost_share(self.deadline_factor(policy, max_lost))

    def deadline_factor(self, policy: str, max_lost: MaxLost) -> float:
        """Return the factor on the policy's deadlines, at least 1."""
        factor_for_answers = self.load_losses(policy).smallest_factor(max_lost.answers)
        factor_for_groups = self.load_lost_groups(policy).smallest_factor(max_lost.groups)
        return max(factor_for_answers, factor_for_groups)

    def current_rule(self, shaping: Shaping, policy: str) -> Deadline | None:
        rule = shaping.deadline
        if rule is None:
            return None
        return replace(rule, factor=self.deadline_factor(policy, rule.max_lost))

    def load_recent_lengths(self, policy_and_size: str) -> RecentCompletionLengths:
        return self._lengths.load(policy_and_size) or RecentCompletionLengths()

    def choose_exploration(self, rule: Deadline, policy: str, num_groups: int) -> bool:
        """Choose whether a cohort runs past its deadline: at random, and after the first rewards.

        Single groups that explored would delay nearly every cohort, as a cohort waits for its last group.
        """
        losses = self.load_losses(policy)
        if rule.exploration > 0 and losses.should_explore_first:
            # A restored count may be the largest that can be saved.
            losses = replace(losses, first_groups=min(losses.first_groups + num_groups, LARGEST))
            self._losses.save(policy, _fields(losses))
            return True
        return self._rng.random() < rule.exploration

    def group_ended(self, record: GroupRecord) -> None:
        # Only policies with deadlines have `max_lost`.
        if record.max_lost is None or record.outcome is not Outcome.COMPLETED:
            return
        was_cut = any(c.cut for c in record.candidates)
        if record.tokens_needed is not None or was_cut:
            policy_and_size = f"{record.policy}/{record.size}"
            lengths = self.load_recent_lengths(policy_and_size)
            # 0 stands for a group that was cut.
            lengths.add(record.tokens_needed or 0)
            self._lengths.save(policy_and_size, lengths.state)

    def learn_rewards(self, record: GroupRecord, correct: Mapping[int, bool]) -> None:
        max_lost = record.max_lost
        if max_lost is None:
            return
        policy = record.policy
        earlier_losses = self.load_losses(policy)
        losses = earlier_losses
        if not losses.is_rewarded and (record.explored or record.cohort_deadline is not None):
            losses = replace(losses, is_rewarded=True)
        # Without weights some candidates can never be returned, so losses at the deadline are not seen.
        shows_losses = record.explored or all(c.weight is not None for c in record.selected)
        if shows_losses:
            losses = losses.with_answers(_relative_answers(record, correct), record.explored, max_lost.answers)
            deciding_answer = _deciding_answer(record, correct)
            if deciding_answer is not None:
                lost_groups = self.load_lost_groups(policy).with_group(deciding_answer)
                self._lost_groups.save(policy, _fields(lost_groups))
        if losses != earlier_losses:
            self._losses.save(policy, _fields(losses))


def _relative_answers(record: GroupRecord, correct: Mapping[int, bool]) -> list[Answer]:
    answers = []
    for c in record.selected:
        if not c.cut and c.index not in correct:
            continue
        relative_length = 0.0
        # Cut length and deadline are known together.
        if record.cohort_deadline is not None and record.cut_length is not None:
            # Without a completion length, the group waits for every candidate.
            completion_length = record.completion_length
            is_waited_for = completion_length is None or (c.tokens <= completion_length and not c.cut)
            # The cut length discards an answer that the group waits for, and the deadline others.
            limit = record.cut_length if is_waited_for else record.cohort_deadline
            # The limit contains the factor. Losses are learned without it.
            relative_length = c.tokens * record.factor / limit
        answers.append(Answer(relative_length, correct.get(c.index, False), c.cut, c.weight or 1.0))
    return answers


def _deciding_answer(record: GroupRecord, correct: Mapping[int, bool]) -> Answer | None:
    """Return the shortest correct answer, or the longest if all are known to be wrong."""
    selected = record.selected
    correct_lengths = [c.tokens for c in selected if correct.get(c.index, False)]
    if correct_lengths:
        # A group loses all correct answers when it loses the shortest.
        tokens = min(correct_lengths)
    elif selected and all(c.cut or c.index in correct for c in selected):
        # No answer was correct up to this length. A cut answer might have become correct.
        tokens = max(c.tokens for c in selected)
    else:
        return None
    relative_length = 0.0
    if record.cut_length is not None:
        # Without the factor, as in `_relative_answers`.
        relative_length = tokens * record.factor / record.cut_length
    return Answer(relative_length, is_right=bool(correct_lengths), cut=any(c.cut for c in selected))


def _fields(losses: DeadlineLosses | GroupLosses) -> dict[str, Any]:
    # `asdict` would copy every number for each rewarded group.
    return {name: getattr(losses, name) for name in losses.__slots__}
