"""Groups that wait for the verdicts of their candidates."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from darts_server.exceptions import IllegalMove
from darts_server.group.candidate import State
from darts_server.group.events import (
    Complete,
    Cut,
    DeadlineSet,
    Decision,
    Event,
    Failed,
    Finished,
    GiveUp,
    Lost,
    Progress,
    Rewarded,
    Start,
    Started,
    Stop,
)
from darts_server.group.group import Group, advantages, selection_weights
from darts_server.group.informative import Informative
from darts_server.group.sampled_tail import CutTail
from darts_server.group.selection import DualEnd, InOrder, SelectionRule
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.group.world import Draws, running


def finish(*indices: int, tokens: int = 5) -> list[Event]:
    return [Finished(i, tokens, FinishReason.STOP) for i in indices]


def waiting(rule: SelectionRule, candidates: int) -> Group:
    """Return a group that waits for rewards, and whose candidates all run."""
    group = Group(rng=np.random.default_rng(0), waits_for_rewards=True)
    group.open(rule, candidates)
    group.handle(*(Started(i) for i in range(candidates)))
    return group


def test_a_group_completes_when_all_finished_candidates_have_their_verdicts() -> None:
    group = running(Informative(2), 4)
    assert group.handle(*finish(0, 1, 2)) == []
    assert group.handle(Rewarded(0, 1.0), Rewarded(2, None)) == []
    assert group.handle(*finish(3)) == []
    assert group.handle(Rewarded(1, 0.0)) == []
    [complete] = group.handle(Rewarded(3, 0.0))
    assert isinstance(complete, Complete)
    assert list(complete.selection.values()) == [SelectedAs.REWARD] * 2
    assert 0 in complete.selection, "the only right answer"
    assert 2 not in complete.selection, "it has no reward"
    reasons = {c.reason for c in group.candidates if c.index not in complete.selection}
    assert reasons == {DiscardReason.NOT_SAMPLED}
    assert advantages(group) == {i: 2 / 3 if i == 0 else -1 / 3 for i in complete.selection}
    assert selection_weights(group) == {i: 1.0 if i == 0 else 2.0 for i in complete.selection}


def test_verdicts_may_come_before_the_last_candidate_has_finished() -> None:
    group = running(Informative(1), 2)
    group.handle(*finish(0), Rewarded(0, 1.0))
    assert group.outcome is None
    group.handle(*finish(1), Rewarded(1, 0.0))
    assert group.outcome is Outcome.COMPLETED


def test_other_rules_ignore_verdicts_unless_the_group_waits_for_them() -> None:
    group = running(InOrder(2), 2)
    assert group.handle(*finish(0), Rewarded(0, 1.0)) == []
    assert group.handle(*finish(1)) == [Complete({0: SelectedAs.SHORT, 1: SelectedAs.SHORT})]
    assert group.handle(Rewarded(1, 1.0)) == []
    assert group.candidates[1].reward is None, "a late reward changes nothing"
    assert advantages(group) == {}

    group = waiting(InOrder(2), 2)
    assert group.handle(*finish(0, 1), Rewarded(0, 1.0)) == []
    assert group.handle(Rewarded(1, None)) == [Complete({0: SelectedAs.SHORT, 1: SelectedAs.SHORT})]


def test_verdicts_of_discarded_candidates_are_not_waited_for() -> None:
    group = waiting(DualEnd(1), 2)
    [stop] = group.handle(*finish(0), Progress(1, 6))
    assert stop == Stop(1, DiscardReason.LONGER_THAN_NEEDED)
    assert group.handle(Rewarded(1, 1.0)) == [], "late"
    assert group.handle(Rewarded(0, 0.0)) == [Complete({0: SelectedAs.SHORT})]


def test_a_reward_of_a_running_candidate_is_illegal() -> None:
    group = Group(rng=Draws())
    group.open(Informative(1), 2)
    with pytest.raises(IllegalMove):
        group.handle(Rewarded(0, 1.0))
    group.handle(Started(0))
    with pytest.raises(IllegalMove):
        group.handle(Rewarded(0, 1.0))


def test_the_verdict_on_a_candidate_that_was_cut_is_about_its_first_tokens() -> None:
    group = waiting(CutTail(1, 1), 2)
    assert group.handle(*finish(1, tokens=9)) == []
    # The verdict on all nine tokens does not count.
    group.handle(Rewarded(1, 1.0))
    assert group.handle(DeadlineSet(2), *finish(0, tokens=1)) == []
    group.handle(Rewarded(0, 1.0))
    assert group.outcome is Outcome.COMPLETED, "the second shortest decides the deadline"

    group = waiting(CutTail(1, 1, completion_rank=1), 2)
    group.handle(*finish(1, tokens=9), Rewarded(1, 1.0))
    assert group.handle(DeadlineSet(2), *finish(0, tokens=1)) == [Cut(1, 2)]
    assert group.handle(Rewarded(0, 1.0)) == []
    assert not group.candidates[1].has_verdict
    assert group.handle(Progress(1, 9)) == [], "the tokens of a cut candidate are final"
    [complete] = group.handle(Rewarded(1, 0.0))
    assert isinstance(complete, Complete)
    assert (group.candidates[1].tokens, group.candidates[1].reward) == (2, 0.0)


def test_a_restart_forgets_rewards() -> None:
    group = running(Informative(1), 2)
    group.handle(*finish(0), Rewarded(0, 1.0))
    assert group.restart() == [Stop(1, DiscardReason.RESTARTED)]
    assert not group.candidates[0].has_verdict
    assert group.handle(Rewarded(0, 1.0)) == []
    assert group.candidates[0].reward is None
    assert group.resume() == [Start((2, 3))]
    group.handle(Started(2), Started(3), *finish(2, 3), Rewarded(2, 0.0), Rewarded(3, 0.0))
    assert group.outcome is Outcome.COMPLETED
    assert set(advantages(group).values()) == {0.0}


def test_a_group_that_waits_for_verdicts_alone_is_not_restarted() -> None:
    group = running(Informative(1), 2)
    assert group.can_restart
    group.handle(*finish(0, 1))
    assert not group.can_restart
    with pytest.raises(IllegalMove, match="verdicts alone"):
        group.restart()


def test_a_cancelled_group_has_no_advantages() -> None:
    group = running(Informative(1), 2)
    group.handle(*finish(0, 1), Rewarded(0, 1.0))
    group.cancel()
    assert group.handle(Rewarded(1, 1.0)) == []
    assert (group.outcome, advantages(group)) == (Outcome.CANCELLED, {})


# --- stop_when: decided -----------------------------------------------------------


def deciding(size: int, candidates: int) -> Group:
    group = Group(rng=np.random.default_rng(0), stops_when_decided=True)
    group.open(Informative(size), candidates)
    group.handle(*(Started(i) for i in range(candidates)))
    return group


def test_a_group_ends_when_enough_candidates_have_unequal_rewards() -> None:
    group = deciding(2, 5)
    assert group.handle(*finish(0, 1, 2), Rewarded(0, 0.0), Rewarded(1, 0.0)) == []
    assert not group.decided_early
    # Candidate 2 has finished, but has no verdict yet.
    decisions = group.handle(*finish(3), Rewarded(3, 1.0))
    assert decisions[0] == Stop(4, DiscardReason.DECIDED)
    assert isinstance(decisions[1], Complete)
    assert 3 in decisions[1].selection
    assert group.decided_early
    assert group.candidates[2].reason is DiscardReason.DECIDED
    assert selection_weights(group) == {}
    assert advantages(group)[3] == pytest.approx(2 / 3)


def test_a_group_without_running_candidates_is_not_decided_early() -> None:
    group = deciding(2, 2)
    group.handle(*finish(0, 1), Rewarded(0, 0.0), Rewarded(1, 1.0))
    assert group.outcome is Outcome.COMPLETED
    assert not group.decided_early
    assert selection_weights(group) == {0: 1.0, 1: 1.0}


# --- any order ----------------------------------------------------------------


@dataclass
class Fate:
    """What happens to a candidate, and its reward if it finishes."""

    ending: str
    reward: float | None
    tokens: int


FATES = st.builds(
    Fate,
    st.sampled_from(["stop", "stop", "stop", "length", "failed", "lost"]),
    st.sampled_from([0.0, 1.0, 1.0, 0.5, None]),
    st.integers(1, 6),
)


@dataclass
class Play:
    """Reports the fates of candidates to a group, in a random order."""

    group: Group
    fates: list[Fate]
    order: Random
    queues: list[list[Event]] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    finished: dict[int, Fate] = field(default_factory=dict)
    verdicts: dict[int, float | None] = field(default_factory=dict)
    selection: dict[int, SelectedAs] | None = None
    gave_up: bool = False
    restart_at: int = -1

    def act(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            assert self.selection is None
            assert not self.gave_up
            match decision:
                case Start(indices):
                    for i in indices:
                        self.running.add(i)
                        self.queues.append(self.events_of(i))
                case Stop(i):
                    self.running.remove(i)
                case Complete(selection):
                    self.selection = dict(selection)
                    assert not self.running
                case GiveUp():
                    self.gave_up = True

    def events_of(self, i: int) -> list[Event]:
        fate = self.fates[i % len(self.fates)]
        if fate.ending == "failed":
            return [Failed(i, RuntimeError())]
        if fate.ending == "lost":
            return [Started(i), Lost(i)]
        reason = FinishReason.STOP if fate.ending == "stop" else FinishReason.LENGTH
        return [Started(i), Progress(i, 0), Finished(i, fate.tokens, reason), Rewarded(i, fate.reward)]

    def run(self, rule: SelectionRule, candidates: int) -> None:
        self.act(self.group.open(rule, candidates))
        steps = 0
        while any(self.queues):
            steps += 1
            if steps == self.restart_at and self.group.can_restart:
                self.act(self.group.restart())
                self.finished.clear()
                self.verdicts.clear()
                self.act(self.group.resume())
            queue = self.order.choice([queue for queue in self.queues if queue])
            happened = queue.pop(0)
            index = getattr(happened, "index", -1)
            if isinstance(happened, Finished) and index in self.running:
                self.finished[index] = self.fates[index % len(self.fates)]
            if isinstance(happened, Rewarded) and index in self.finished and self.group.outcome is None:
                self.verdicts[index] = happened.reward
            if isinstance(happened, Finished | Failed | Lost):
                self.running.discard(index)
            self.act(self.group.handle(happened))


@given(
    st.lists(FATES, min_size=1, max_size=12),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(0, 10_000),
    st.integers(0, 10_000),
    st.integers(-1, 20),
)
def test_with_rewards_in_any_order_every_group_ends_with_the_same_selection(
    fates: list[Fate], size: int, more: int, first: int, second: int, restart_at: int
) -> None:
    ends = []
    for order in (first, second):
        play = Play(Group(rng=np.random.default_rng(7)), fates, Random(order), restart_at=restart_at)
        play.run(Informative(size), size + more)
        group = play.group
        assert (play.selection is None) == play.gave_up
        assert group.outcome in (Outcome.COMPLETED, Outcome.FAILED)
        for candidate in group.candidates:
            assert candidate.state in (State.SELECTED, State.DISCARDED)
            assert (candidate.selected_as is None) != (candidate.reason is None)
        if play.selection is not None:
            assert len(play.selection) == size
            assert play.verdicts.keys() == play.finished.keys(), "completed before a verdict"
            rewarded = {i for i, reward in play.verdicts.items() if reward is not None}
            by_reward = {i for i, how in play.selection.items() if how is SelectedAs.REWARD}
            assert by_reward <= rewarded
            assert len(by_reward) == min(size, len(rewarded))
            weights = selection_weights(group)
            assert weights.keys() == play.selection.keys()
            assert min(weights.values()) >= 1
        ends.append((play.selection, selection_weights(group), advantages(group)))
    if restart_at < 0 and not any(fate.ending in ("failed", "lost") for fate in fates):
        assert ends[0] == ends[1], "the selection does not depend on timing"
        event("without failures")


@given(st.lists(FATES, min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 5), st.integers(0, 10_000))
def test_a_group_that_may_be_decided_early_returns_unequal_rewards_or_waits(
    fates: list[Fate], size: int, more: int, order: int
) -> None:
    play = Play(Group(rng=np.random.default_rng(7), stops_when_decided=True), fates, Random(order))
    play.run(Informative(size), size + more)
    event("decided" if play.group.decided_early else "not decided")
    assert (play.selection is None) == play.gave_up
    if play.selection is None:
        return
    rewards = [reward for reward in play.verdicts.values() if reward is not None]
    if play.group.decided_early:
        assert len(rewards) >= size
        assert len(set(rewards)) > 1
        assert any(c.reason is DiscardReason.DECIDED for c in play.group.candidates)
        assert selection_weights(play.group) == {}
    else:
        assert play.verdicts.keys() == play.finished.keys()
