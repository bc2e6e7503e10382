"""What rewards say of deadlines."""

import json
from dataclasses import replace

import numpy as np
import pytest

from darts_server.policy.deadline import MIN_RIGHT, Deadline
from darts_server.policy.shaping import Shaping
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.allocation.deadlines import Deadlines
from darts_server.types import FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents

SIZE = 8
RULE = Deadline(max_lost_share=0.02)
CUTTING = Shaping(deadline=RULE)


def explored(deadline: int | None, *lengths: int, stretch: float = 1.0) -> GroupRecord:
    candidates = tuple(
        CandidateRecord(i, tokens, FinishReason.STOP, SelectedAs.SHORT, None, False, 0.0, 1.0, 0, 0)
        for i, tokens in enumerate(lengths)
    )
    return GroupRecord(
        "g",
        "p",
        "darts_cut",
        SIZE,
        Outcome.COMPLETED,
        candidates,
        0.0,
        1.0,
        None,
        cohort_deadline=deadline,
        bound=None if deadline is None else 2 * deadline,
        stretch=stretch,
        completion_length=45,
        explored=True,
    )


def report(deadlines: Deadlines, record: GroupRecord, *, right: bool, times: int = MIN_RIGHT) -> None:
    for _ in range(times):
        deadlines.learn_rewards(record, dict.fromkeys(range(SIZE), right))


def test_correct_answers_beyond_the_deadline_stretch_it_and_the_stretch_is_stored() -> None:
    documents = Documents()
    deadlines = Deadlines(documents, np.random.default_rng(0))
    report(deadlines, explored(50, *[40] * 7, 90), right=True)
    assert deadlines.losses.share(1.0) == pytest.approx(1 / 8)
    assert deadlines.lost_share(0.02) == pytest.approx(0.02)
    rule = Deadlines(documents, np.random.default_rng(0)).current_rule(CUTTING)
    assert rule is not None
    assert rule.stretch == deadlines.losses.stretch(0.02) == pytest.approx(90 / 50, rel=0.05)
    assert rule.from_lengths([100] * 10, 10) == pytest.approx(100 * rule.stretch, abs=1)


def test_lengths_are_compared_with_the_deadline_without_its_stretch() -> None:
    deadlines = Deadlines(Documents(), np.random.default_rng(0))
    report(deadlines, explored(100, *[40] * 7, 90, stretch=2.0), right=True)
    assert deadlines.losses.stretch(0.02) == pytest.approx(90 / 50, rel=0.05)


def test_answers_that_a_group_waits_for_are_lost_beyond_the_bound_alone() -> None:
    deadlines = Deadlines(Documents(), np.random.default_rng(0))
    report(deadlines, replace(explored(100, *[40] * 7, 390, stretch=2.0), completion_length=400), right=True)
    assert deadlines.losses.stretch(0.02) == pytest.approx(390 / 100, rel=0.05), "half the deadline, twice the bound"
    waiting = Deadlines(Documents(), np.random.default_rng(0))
    report(waiting, replace(explored(100, *[40] * 7, 190), completion_length=None), right=True)
    assert waiting.losses.stretch(0.02) == 1


def learned(*, cut: bool, needed: int | None, outcome: Outcome = Outcome.COMPLETED) -> object:
    documents = Documents()
    record = explored(50, *[40] * 8)
    candidates = tuple(replace(c, cut=cut) for c in record.candidates)
    Deadlines(documents, np.random.default_rng(0)).learn(
        replace(record, candidates=candidates, tokens_needed=needed, outcome=outcome, explored=False), "darts_cut/8"
    )
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
        (explored(None, *[40] * 7, 90), True),
    ],
)
def test_wrong_answers_timely_answers_and_unexplored_groups_do_not_stretch_the_deadline(
    record: GroupRecord, right: bool
) -> None:
    deadlines = Deadlines(Documents(), np.random.default_rng(0))
    report(deadlines, record, right=right)
    assert deadlines.losses.stretch(0.02) == 1
    assert not deadlines.lost_share(0.02)


def test_the_configured_share_of_cohorts_explores() -> None:
    deadlines = Deadlines(Documents(), np.random.default_rng(0))
    assert np.mean([deadlines.should_explore(Deadline(exploration=0.05), 1) for _ in range(10_000)]) == pytest.approx(
        0.05, abs=0.01
    )
    assert not any(deadlines.should_explore(Deadline(exploration=0.0), 1) for _ in range(1000))


def test_the_first_cohort_after_rewards_were_reported_explores() -> None:
    documents = Documents()
    deadlines, unexplored = (
        Deadlines(documents, np.random.default_rng(0)),
        replace(explored(50, *[40] * 8), explored=False),
    )
    rule = Deadline(exploration=1e-12)
    report(deadlines, replace(unexplored, cohort_deadline=None), right=True)
    assert not deadlines.should_explore(rule, 16), "it had no deadline"
    report(deadlines, unexplored, right=True, times=16)
    assert Deadlines(documents, np.random.default_rng(0)).should_explore(rule, 16), "also after a restart"
    assert not deadlines.should_explore(Deadline(exploration=0.0), 1)
    assert deadlines.losses.stretch(0.02) == 1, "unexplored groups show nothing beyond their deadline"
    report(deadlines, explored(50, *[40] * 7, 90), right=True, times=8)
    assert not deadlines.should_explore(rule, 16)
    assert deadlines.losses.stretch(0.02) > 1


def test_where_few_groups_get_rewards_exploring_first_ends() -> None:
    """One group is rewarded and no other: what is counted is what explores, not what is reported."""
    documents = Documents()
    report(
        Deadlines(documents, np.random.default_rng(0)),
        replace(explored(50, *[40] * 8), explored=False),
        right=True,
        times=1,
    )
    rule = Deadline(exploration=1e-12)
    cohorts = [Deadlines(documents, np.random.default_rng(0)).should_explore(rule, 64) for _ in range(20)]
    assert cohorts == [True] * 4 + [False] * 16
