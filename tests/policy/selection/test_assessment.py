"""What a group keeps of its candidates from event to event is what its rule says of them afresh."""

import numpy as np
import pytest
from hypothesis import given, settings

from darts_server.policy.events import Deliver, Finished, Lost, Progress, Start, Started
from darts_server.policy.group import Group
from darts_server.policy.selection.tail_rules import CutTail, SampledTail
from darts_server.types import FinishReason, Outcome
from tests.policy.cases import WITH_FAILURES, Case, cases
from tests.policy.scored import ScoredCase, scored
from tests.policy.selection.certain import assess
from tests.policy.world import World

thoroughly = settings(max_examples=3 * settings().max_examples)


@thoroughly
@given(cases(WITH_FAILURES, most=40, max_length=20, max_spare=6, cut=True))
def test_an_assessment_kept_up_to_date_equals_a_new_one(case: Case) -> None:
    assert_kept(case.world(), case.early)


@given(scored(cases(WITH_FAILURES, most=20, max_length=12, max_spare=3), refill=True))
def test_also_of_candidates_that_are_pruned_and_replaced(case: ScoredCase) -> None:
    assert_kept(case.world(), case.case.early)


def assert_kept(world: World, early: bool) -> None:
    group = world.group
    for _ in world.moments():
        if not group.is_open or group.outcome is not None:
            continue
        alive = [c for c in group.candidates if c.alive]
        running, finished = [c for c in alive if c.running], [c for c in alive if not c.running]
        verdict = assess(world.rule, running, finished, early, group.deadline, group.bound)
        assert not verdict.hopeless, "not stopped yet"
        assert group.check_at == verdict.check_at
        assert not early or verdict.settled <= world.delivered.keys(), "not delivered yet"


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("rule", [SampledTail(1, 2), CutTail(1, 2)], ids=lambda rule: type(rule).__name__)
def test_a_certain_candidate_is_not_settled_again_when_new_ones_can_come_before_it(
    rule: SampledTail | CutTail, early: bool
) -> None:
    group = Group(rng=np.random.default_rng(0), max_replacements=2, deliver_early=early)
    group.open(rule, 3)
    group.handle(*(Started(i) for i in range(3)), Progress(1, 5), Progress(2, 5))
    assert group.handle(Finished(0, 3, FinishReason.STOP)) == [Deliver(0)] * early
    assert group.handle(Lost(1)) == [Start((3,))]
    assert group.handle(Started(3), Finished(3, 2, FinishReason.STOP)) == [Deliver(3)] * early
    group.handle(Finished(2, 7, FinishReason.STOP))
    assert group.outcome is Outcome.COMPLETED
    assert [c.selected_as is not None for c in group.candidates] == [True, False, True, True]
