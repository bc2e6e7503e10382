"""What rewards say of deadlines."""

import json
from dataclasses import replace

import numpy as np
import pytest

from darts_server.estimates.deadline_losses import MIN_RIGHT, Answer, GroupLosses
from darts_server.policy.deadline import Deadline
from darts_server.policy.shaping import Shaping
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.types import FinishReason, MaxLost, Outcome, SelectedAs
from tests.rollout.helpers import Documents

SIZE = 8
POLICY = "darts_cut"
RULE = Deadline()
CUTTING = Shaping(deadline=RULE)


def explored(deadline: int | None, *lengths: int, factor: float = 1.0) -> GroupRecord:
    candidates = tuple(
        CandidateRecord(i, tokens, FinishReason.STOP, SelectedAs.SHORT, None, False, 0.0, 1.0, 0, 0)
        for i, tokens in enumerate(lengths)
    )
    record = GroupRecord("g", "p", POLICY, SIZE, Outcome.COMPLETED, candidates, 0.0, 1.0, None)
    cut_length = None if deadline is None else 2 * deadline
    record = replace(record, cohort_deadline=deadline, max_lost=MaxLost(), factor=factor, cut_length=cut_length)
    return replace(record, completion_length=45, explored=True)


def cut(deadline: int, *lengths: int, weight: float | None = 1.0, factor: float = 1.0) -> GroupRecord:
    """A group whose candidates were cut at its deadline; the others ended before."""
    record = explored(deadline, *lengths, factor=factor)
    candidates = [
        replace(
            c,
            tokens=min(c.tokens, deadline),
            cut=c.tokens > deadline,
            selected_as=SelectedAs.SHORT if c.tokens <= deadline else SelectedAs.LONG_TRUNCATED,
            weight=weight,
        )
        for c in record.candidates
    ]
    return replace(record, candidates=candidates, explored=False)


def fresh(documents: Documents | None = None) -> Deadlines:
    return Deadlines(documents or Documents(), np.random.default_rng(0))


def report(deadlines: Deadlines, record: GroupRecord, *, right: bool, times: int = MIN_RIGHT) -> None:
    for _ in range(times):
        deadlines.learn_rewards(record, dict.fromkeys(range(SIZE), right))


def test_correct_answers_beyond_the_deadline_move_it_and_the_factor_is_stored() -> None:
    documents = Documents()
    deadlines = fresh(documents)
    report(deadlines, explored(50, *[40] * 7, 90), right=True)
    assert deadlines.load_losses(POLICY).lost_share(1.0) == pytest.approx(1 / 8)
    assert deadlines.lost_share(POLICY, MaxLost()) == pytest.approx(0.02)
    rule = fresh(documents).current_rule(CUTTING, POLICY)
    assert rule is not None
    assert rule.factor == deadlines.load_losses(POLICY).smallest_factor(0.02) == pytest.approx(90 / 50, rel=0.05)
    assert rule.from_lengths([100] * 10, 10) == pytest.approx(100 * rule.factor, abs=1)


def test_losses_of_one_policy_do_not_move_deadlines_of_another() -> None:
    deadlines = fresh()
    report(deadlines, replace(explored(50, *[40] * 7, 90), policy="darts_cut"), right=True)
    assert deadlines.deadline_factor("darts_cut", MaxLost()) > 1.7
    assert deadlines.deadline_factor("cap", MaxLost()) == 1.0


def test_lengths_are_compared_with_the_deadline_without_its_factor() -> None:
    deadlines = fresh()
    report(deadlines, explored(100, *[40] * 7, 90, factor=2.0), right=True)
    assert deadlines.load_losses(POLICY).smallest_factor(0.02) == pytest.approx(90 / 50, rel=0.05)


def test_answers_that_a_group_waits_for_are_lost_beyond_the_cut_length_alone() -> None:
    deadlines = fresh()
    report(deadlines, replace(explored(100, *[40] * 7, 390, factor=2.0), completion_length=400), right=True)
    assert deadlines.load_losses(POLICY).smallest_factor(0.02) == pytest.approx(390 / 100, rel=0.05), (
        "half the deadline, twice the cut length"
    )
    waiting = fresh()
    report(waiting, replace(explored(100, *[40] * 7, 190), completion_length=None), right=True)
    assert waiting.load_losses(POLICY).smallest_factor(0.02) == 1


TAIL = cut(50, *[40] * 7, 90)
WAITED = replace(cut(80, *[40] * 6, 80, 200), cohort_deadline=50, cut_length=100, completion_length=80)
"""Its group needed 80 tokens and the deadline was at 50, so it is lost by factors below 80 / 50 at least."""


@pytest.mark.parametrize(
    ("record", "factor", "share"),
    [
        (replace(TAIL, candidates=[replace(c, weight=3.0 if c.cut else 1.0) for c in TAIL.candidates]), 1.0, 3 / 10),
        (WAITED, 1.5, 1 / 8),
    ],
)
def test_a_cut_answer_counts_by_its_weight_and_was_longer_than_its_group_waited(
    record: GroupRecord, factor: float, share: float
) -> None:
    deadlines = fresh()
    report(deadlines, explored(50, *[40] * 7, 90), right=True)
    for _ in range(500):
        deadlines.learn_rewards(record, {**dict.fromkeys(range(7), True), 7: False})
    assert deadlines.load_losses(POLICY).lost_share(factor) == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("record", [cut(50, *[40] * 7, 90, weight=None), replace(TAIL, max_lost=None)])
def test_groups_without_deadlines_or_weights_do_not_count_in_losses(record: GroupRecord) -> None:
    deadlines = fresh()
    report(deadlines, explored(50, *[40] * 7, 90), right=True)
    before = deadlines.load_losses(POLICY)
    report(deadlines, record, right=True)
    assert deadlines.load_losses(POLICY) == before


def learned(*, cut: bool, needed: int | None, outcome: Outcome = Outcome.COMPLETED) -> object:
    documents = Documents()
    record = replace(explored(50, *[40] * 8), tokens_needed=needed, outcome=outcome, explored=False)
    candidates = [replace(c, cut=cut) for c in record.candidates]
    fresh(documents).group_ended(replace(record, candidates=candidates))
    return json.loads(str(documents.kept["deadline", "darts_cut/8"]["value"])) if documents.kept else None


def test_groups_that_were_cut_before_they_had_a_completion_length_are_counted() -> None:
    assert learned(cut=True, needed=None) == [0]
    assert learned(cut=True, needed=30) == learned(cut=False, needed=30) == [30]
    assert learned(cut=False, needed=None) is None, "it ended without one on its own"
    assert learned(cut=True, needed=30, outcome=Outcome.FAILED) is None


@pytest.mark.parametrize(
    ("record", "right"),
    [
        (explored(50, *[40] * 7, 90), False),
        (explored(90, *[40] * 7, 90), True),
        (explored(30, *[40] * 7, 45), True),
        (replace(explored(50, *[40] * 7, 90), explored=False), True),
        (cut(50, *[40] * 7, 90), False),
        (explored(None, *[40] * 7, 90), True),
    ],
)
def test_wrong_answers_timely_answers_and_unexplored_groups_do_not_move_the_deadline(
    record: GroupRecord, right: bool
) -> None:
    deadlines = fresh()
    report(deadlines, record, right=right)
    assert deadlines.load_losses(POLICY).smallest_factor(0.02) == 1
    assert not deadlines.lost_share(POLICY, MaxLost())


def test_the_first_cohort_after_rewards_were_reported_explores() -> None:
    documents = Documents()
    deadlines, unexplored = fresh(documents), replace(explored(50, *[40] * 8), explored=False)
    rule = Deadline(exploration=1e-12)
    report(deadlines, replace(unexplored, cohort_deadline=None), right=True)
    assert not deadlines.choose_exploration(rule, POLICY, 16), "it had no deadline"
    report(deadlines, unexplored, right=True, times=16)
    assert fresh(documents).choose_exploration(rule, POLICY, 16), "also after a restart"
    assert not deadlines.choose_exploration(Deadline(exploration=0.0), POLICY, 1)
    report(deadlines, explored(50, *[40] * 7, 90), right=True, times=8)
    assert not deadlines.choose_exploration(rule, POLICY, 16)
    assert deadlines.load_losses(POLICY).smallest_factor(0.02) > 1


def lost_groups(*records: GroupRecord, right: bool | None) -> GroupLosses:
    """What a usual group and some others say, of which all answers are right, wrong or not rewarded."""
    deadlines = fresh()
    report(deadlines, explored(50, *[40] * 8), right=True, times=1)
    for record in records:
        deadlines.learn_rewards(record, {} if right is None else dict.fromkeys(range(SIZE), right))
    losses = deadlines.load_lost_groups(POLICY)
    return GroupLosses(tuple(losses.right), tuple(losses.wrong), tuple(losses.cut))


def cut_whole(tokens: int) -> GroupRecord:
    record = explored(tokens // 2, *[tokens] * 8)
    candidates = [replace(c, cut=True, selected_as=SelectedAs.LONG_TRUNCATED, weight=1.0) for c in record.candidates]
    return replace(record, candidates=candidates, completion_length=None, explored=False)


def test_a_group_counts_by_its_shortest_correct_or_its_longest_answer() -> None:
    usual = lost_groups(right=True)
    assert lost_groups(cut_whole(100), right=None) == usual.with_group(Answer(1.0, is_right=False, cut=True))
    moved = replace(cut_whole(200), factor=2.0)
    assert lost_groups(moved, right=None) == usual.with_group(Answer(2.0, is_right=False, cut=True))
    wrong = explored(50, *[40] * 7, 350)
    assert lost_groups(wrong, right=False) == usual.with_group(Answer(3.5, is_right=False))
    assert lost_groups(wrong, right=True) == usual.with_group(Answer(0.4, is_right=True))


@pytest.mark.parametrize("record", [explored(50, *[40] * 8), replace(explored(50, *[40] * 8), candidates=())])
def test_a_group_without_rewards_says_nothing(record: GroupRecord) -> None:
    assert lost_groups(record, right=None) == lost_groups(right=True)
