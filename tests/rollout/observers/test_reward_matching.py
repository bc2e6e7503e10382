"""Rewards for groups that were made by hand."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from darts_server.caller import Caller, caller
from darts_server.estimates.reward_stats import RewardStats, single_length
from darts_server.records import CandidateRecord, GroupRecord, TrajectoryRecord
from darts_server.rollout.learned.statistics import DATASET_REWARDS, Rewards
from darts_server.rollout.observers.reward_matching import (
    MAX_UNKNOWN_INDICES,
    REWARDS_PER_TURN,
    Reward,
    RewardMatcher,
    RewardReport,
)
from darts_server.store import Store
from darts_server.types import DiscardReason, FinishReason, Outcome, SelectedAs
from tests.rollout.helpers import Documents


class Trainer:
    """A reward matcher, with a record of what it reports."""

    def __init__(self, store: Documents | Store | None = None, kept: int = 100) -> None:
        self.store = store or Documents()
        self.rewards = Rewards(self.store)
        self.rewarded_groups: list[tuple[str, dict[int, bool]]] = []
        self.counted: list[tuple[int, int]] = []
        """Rewards of known trajectories and of unknown ones, of each chunk."""
        self.reward_matcher = RewardMatcher(
            self.rewards,
            lambda record, right, _: self.rewarded_groups.append((record.group_id, dict(right))),
            lambda matched, unknown: self.counted.append((matched, unknown)),
            kept,
        )

    def report(self, *rewards: Reward) -> RewardReport:
        return asyncio.run(self.reward_matcher.report(rewards))

    def prompt(self, key: str) -> RewardStats:
        return self.rewards.prompts.load(key) or RewardStats()


def by_id(trajectory_id: str, reward: float) -> Reward:
    return Reward(reward, reward > 0, trajectory_id)


def by_tokens(prompt: Sequence[int], tokens: Sequence[int], reward: float) -> Reward:
    return Reward(reward, reward > 0, None, prompt, tokens)


@dataclass(frozen=True)
class Made:
    """A group of ``prompt`` that returned trajectories of these token ids. ``late``: as they were when it had ended."""

    group_id: str
    prompt: str
    trajectories: tuple[tuple[int, ...], ...]
    outcome: Outcome = Outcome.COMPLETED
    late: bool = True
    owner: str | None = None

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(map(ord, self.prompt))

    def record(self, started_at: float = 0.0) -> GroupRecord:
        candidates = [
            CandidateRecord(i, len(tokens), FinishReason.STOP, SelectedAs.SHORT, None, False, 0.0, 1.0, 0, 0)
            for i, tokens in enumerate(self.trajectories)
        ]
        size = len(candidates)
        return GroupRecord(
            *(self.group_id, self.prompt, "off", size, self.outcome, candidates, started_at, 1.0, None),
            owner=self.owner,
        )

    def returned(self, started_at: float = 0.0) -> list[TrajectoryRecord]:
        return [
            TrajectoryRecord(self.group_id, self.prompt, started_at, i, self.prompt_token_ids, tokens, self.owner)
            for i, tokens in enumerate(self.trajectories)
        ]

    def happens(self, reward_matcher: RewardMatcher, started_at: float = 0.0) -> None:
        reward_matcher.group_ended(self.record(started_at))
        for trajectory in self.returned(started_at):
            reward_matcher.trajectory_returned(trajectory)


TWO = Made("g", "p", ((1, 2), (3, 4, 5)))


@pytest.mark.parametrize(
    "unknown",
    [
        *(
            by_id(name, 1.0)
            for name in ("g:2", "g:00", "g:-1", "g: 0", "g:", "g", ":0", "", "h:0", "g:0:0", "g:" + "9" * 5000)
        ),
        by_tokens([112], [1], 1.0),
        by_tokens([], [112, 1, 2], 1.0),
        by_tokens([112, 1], [2], 1.0),
        by_tokens([113], [1, 2], 1.0),
    ],
    ids=lambda reward: str(reward.trajectory_id)[:9],
)
def test_a_reward_for_an_unknown_trajectory_changes_nothing(unknown: Reward) -> None:
    trainer = Trainer()
    TWO.happens(trainer.reward_matcher)
    assert trainer.report(unknown, by_id("g:1", 0.0), unknown) == RewardReport(1, 0, 2, [0, 2])
    assert trainer.rewards.dataset.rewarded == 1
    assert trainer.counted == [(1, 2)]


def test_only_the_first_hundred_unknown_indices_are_reported() -> None:
    report = Trainer().report(*[by_id("g:0", 1.0)] * 150)
    assert (report.unknown, report.unknown_indices) == (150, list(range(MAX_UNKNOWN_INDICES)))


def test_only_the_newest_groups_are_kept_and_others_are_dropped_completely() -> None:
    trainer = Trainer(kept=2)
    groups = [replace(TWO, group_id=name) for name in "abc"]
    for group in groups:
        group.happens(trainer.reward_matcher)
    assert trainer.report(by_id("a:0", 1.0), by_id("b:0", 1.0), by_id("c:0", 1.0)) == RewardReport(2, 0, 1, [0])
    assert trainer.reward_matcher.group_rewards(groups[0].record()).by_index == {}
    for name in "de":
        replace(TWO, group_id=name, prompt="q").happens(trainer.reward_matcher)
    assert trainer.report(by_tokens([112], [1, 2], 1.0)) == RewardReport(0, 0, 1, [0])
    assert len(trainer.reward_matcher._by_fingerprint) == trainer.reward_matcher._groups.size == 2


def test_a_reused_group_id_finds_the_newer_group() -> None:
    trainer = Trainer()
    TWO.happens(trainer.reward_matcher)
    trainer.report(by_id("g:0", 1.0), by_id("g:1", 1.0))
    TWO.happens(trainer.reward_matcher, started_at=5.0)
    assert trainer.reward_matcher.group_rewards(TWO.record(0.0)).by_index == {}
    assert trainer.reward_matcher.group_rewards(TWO.record(5.0)).by_index == {}
    assert trainer.report(by_id("g:0", 0.0), by_tokens([112], [3, 4, 5], 0.0)) == RewardReport(matched=2)
    assert trainer.reward_matcher.group_rewards(TWO.record(5.0)).by_index == {0: (0.0, False), 1: (0.0, False)}


# --- groups of several callers ------------------------------------------------

ONE, OTHER = (replace(TWO, owner=owner) for owner in ("one", "other"))


def report_as(name: str, trainer: Trainer, *rewards: Reward, is_admin: bool = False) -> RewardReport:
    token = caller.set(Caller(name, is_admin))
    try:
        return trainer.report(*rewards)
    finally:
        caller.reset(token)


@pytest.mark.parametrize("reward", [by_id("g:0", 1.0), by_tokens([112], [1, 2], 1.0)])
@pytest.mark.parametrize(("first", "second"), [(ONE, OTHER), (OTHER, ONE)])
def test_two_callers_with_the_same_id_or_tokens_reward_their_own_trajectories(
    first: Made, second: Made, reward: Reward
) -> None:
    trainer = Trainer()
    first.happens(trainer.reward_matcher)
    second.happens(trainer.reward_matcher, started_at=5.0)
    assert report_as("one", trainer, reward) == RewardReport(matched=1)
    assert report_as("one", trainer, reward) == RewardReport(repeated=1)
    rewards = {
        made.owner: trainer.reward_matcher.group_rewards(made.record(at)) for made, at in ((first, 0.0), (second, 5.0))
    }
    assert {owner: each.by_index for owner, each in rewards.items()} == {"one": {0: (1.0, True)}, "other": {}}
    assert report_as("other", trainer, reward) == RewardReport(matched=1)


def test_other_callers_trajectories_are_rewarded_by_tokens_or_by_admins_with_an_unambiguous_id() -> None:
    trainer = Trainer()
    ONE.happens(trainer.reward_matcher)
    assert report_as("judge", trainer, by_id("g:0", 1.0)) == RewardReport(0, 0, 1, [0])
    assert report_as("judge", trainer, by_id("g:0", 1.0), is_admin=True) == RewardReport(matched=1)
    OTHER.happens(trainer.reward_matcher)
    assert report_as("judge", trainer, by_id("g:1", 1.0), is_admin=True) == RewardReport(0, 0, 1, [0])
    assert report_as("judge", trainer, by_tokens([112], [3, 4, 5], 1.0)) == RewardReport(matched=1)
    assert trainer.rewards.dataset.rewarded == 3


def test_an_id_of_several_callers_is_forgotten_with_their_groups() -> None:
    trainer = Trainer(kept=2)
    for made in (ONE, OTHER, replace(ONE, group_id="h"), replace(OTHER, group_id="i")):
        made.happens(trainer.reward_matcher)
    assert report_as("one", trainer, by_id("g:0", 1.0)) == RewardReport(0, 0, 1, [0])
    assert len(trainer.reward_matcher._owners) == trainer.reward_matcher._groups.size == 2


def test_groups_of_one_caller_push_out_none_of_another() -> None:
    trainer = Trainer(kept=10)
    ONE.happens(trainer.reward_matcher)
    for number in range(30):
        replace(OTHER, group_id=f"flood-{number}").happens(trainer.reward_matcher)
    assert report_as("one", trainer, by_id("g:0", 1.0)) == RewardReport(matched=1)
    newest = [by_id(f"flood-{number}:0", 1.0) for number in range(30)]
    assert report_as("other", trainer, *newest) == RewardReport(9, 0, 21, list(range(21)))


# --- any order, repetition and mixture of names -------------------------------

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)
GROUPS = st.lists(
    st.tuples(
        st.sampled_from("pq"),
        st.lists(TOKENS, min_size=1, max_size=4).map(tuple),
        st.sampled_from([*Outcome]),
        st.booleans(),
    ),
    max_size=5,
).map(lambda made: [Made(f"g{number}", *each) for number, each in enumerate(made)])
Step = Made | TrajectoryRecord | Reward


class BruteForce:
    """The same by looking at everything each time."""

    def __init__(self) -> None:
        self.returned: list[TrajectoryRecord] = []
        self.rewards: dict[tuple[str, int], Reward] = {}

    def report(self, reward: Reward) -> RewardReport:
        named = [
            (r.group_id, r.index)
            for r in self.returned
            if f"{r.group_id}:{r.index}" == reward.trajectory_id
            or (
                reward.trajectory_id is None
                and (list(r.prompt_token_ids), list(r.token_ids))
                == (list(reward.prompt_token_ids), list(reward.completion_token_ids))
            )
        ]
        if not named:
            return RewardReport(unknown=1, unknown_indices=[0])
        fresh = [name for name in named if name not in self.rewards]
        self.rewards |= dict.fromkeys(fresh, reward)
        return RewardReport(matched=1) if fresh else RewardReport(repeated=1)

    def whole(self, groups: Sequence[Made]) -> dict[str, list[Reward]]:
        """Completed groups all of whose trajectories have rewards."""
        names = {g.group_id: [(g.group_id, i) for i in range(len(g.trajectories))] for g in groups}
        return {
            g.group_id: [self.rewards[name] for name in names[g.group_id]]
            for g in groups
            if g.outcome is Outcome.COMPLETED and all(name in self.rewards for name in names[g.group_id])
        }


@given(
    groups=GROUPS,
    seed=st.integers(0, 10**6),
    values=st.lists(st.sampled_from([-1.0, 0.0, 1.0, 0.5]), min_size=12, max_size=12),
)
def test_any_order_and_repetition_of_rewards_gives_the_brute_force_result(
    groups: list[Made], seed: int, values: list[float]
) -> None:
    rng = np.random.default_rng(seed)
    trainer, brute = Trainer(), BruteForce()
    for step in mixed(groups, rng, values):
        match step:
            case Made():
                trainer.reward_matcher.group_ended(step.record())
            case TrajectoryRecord():
                trainer.reward_matcher.trajectory_returned(step)
                brute.returned.append(step)
            case Reward():
                assert trainer.report(step) == brute.report(step)
    for prompt in "pq":
        assert_same(trainer.prompt(prompt), [g for g in groups if g.prompt == prompt], brute)
    assert_same(trainer.rewards.dataset, groups, brute)
    whole = brute.whole(groups)
    assert sorted(trainer.rewarded_groups) == [
        (name, {i: reward.correct for i, reward in enumerate(whole[name])}) for name in sorted(whole)
    ]


def mixed(groups: Sequence[Made], rng: np.random.Generator, values: Sequence[float]) -> list[Step]:
    """What happens to groups, each in its own order, and rewards for some of their trajectories at any time."""
    queues: list[list[Step]] = []
    rewards: list[Step] = [by_id("none:0", 1.0), by_tokens([7], [7], 1.0)]
    for group in groups:
        returned = group.returned()
        for index, tokens in enumerate(group.trajectories):
            reward = values[hash((group.prompt == "p", tokens)) % len(values)]  # equal ones have equal rewards
            rewards += [by_id(f"{group.group_id}:{index}", reward)] * int(rng.integers(0, 4))
            rewards += [by_tokens(group.prompt_token_ids, tokens, reward)] * int(rng.integers(0, 3))
        queues.append([group, *returned] if group.late else [*returned, group])
    queues += [[reward] for reward in rewards]
    steps: list[Step] = []
    while queues := [queue for queue in queues if queue]:
        steps.append(queues[rng.integers(len(queues))].pop(0))
    return steps


def assert_same(stats: RewardStats, groups: Sequence[Made], brute: BruteForce) -> None:
    known = [
        (len(tokens), brute.rewards[group.group_id, i].correct)
        for group in groups
        for i, tokens in enumerate(group.trajectories)
        if (group.group_id, i) in brute.rewards
    ]
    for lengths, right in ((stats.right, True), (stats.wrong, False)):
        of = [length for length, correct in known if correct is right]
        assert lengths.count == len(of)
        if of:
            assert lengths.mean == pytest.approx(float(np.mean(of)))
    whole = brute.whole(groups)
    assert stats.groups == len(whole)
    assert stats.zero_variance == sum(len({reward.reward for reward in rewards}) == 1 for rewards in whole.values())


def test_one_large_report_equals_many_small_ones() -> None:
    together, singly, number = Trainer(), Trainer(), REWARDS_PER_TURN // 2
    for n in range(number):
        for trainer in (together, singly):
            Made(f"g{n}", "pq"[n % 2], tuple((n, i) for i in range(5))).happens(trainer.reward_matcher)
    rewards = [by_id(f"g{n}:{i}", float((n + i) % 2)) for n in range(number + 3) for i in range(5)]
    assert together.report(*rewards) == RewardReport(5 * number, 0, 15, list(range(5 * number, 5 * number + 15)))
    for reward in rewards:
        singly.report(reward)
    assert together.rewarded_groups == singly.rewarded_groups
    assert len(together.rewarded_groups) == number
    assert together.rewards.dataset.difference == pytest.approx(singly.rewards.dataset.difference)


# --- what is kept of it -------------------------------------------------------


def test_statistics_are_stored_and_shared_between_processes(tmp_path: Any) -> None:
    with Store(tmp_path) as store:
        first = Trainer(store)
        TWO.happens(first.reward_matcher)
        first.report(by_id("g:0", 1.0), by_id("g:1", 0.0))
        saved = store.export()
    with Store(tmp_path) as store:
        second = Trainer(store)
        assert second.prompt("p") == second.rewards.dataset == RewardStats(single_length(2), single_length(3), 1, 0)
        assert second.report(by_id("g:0", 1.0)).unknown == 1
        TWO.happens(second.reward_matcher)
        second.report(by_id("g:0", 1.0))
        assert second.prompt("p").rewarded == 3
        store.restore(saved)
        assert second.prompt("p").rewarded == 2


def test_a_prompt_without_a_key_counts_in_the_data_set_alone() -> None:
    trainer = Trainer()
    record = replace(TWO.record(), prompt_key=None)
    trainer.reward_matcher.group_ended(record)
    trainer.reward_matcher.trajectory_returned(TrajectoryRecord("g", None, 0.0, 0, [112], [1, 2]))
    trainer.report(by_id("g:0", 1.0))
    assert trainer.rewards.dataset.rewarded == 1
    assert isinstance(trainer.store, Documents)
    assert {kind for kind, _ in trainer.store.kept} == {DATASET_REWARDS.name}


# --- rewards of verifiers -------------------------------------------------------


def test_a_reported_reward_replaces_the_reward_of_a_verifier() -> None:
    trainer = Trainer()
    matcher = trainer.reward_matcher
    TWO.happens(matcher)
    matcher.trajectory_verified((None, "g"), 0, 1.0, True)
    assert trainer.prompt("p") == RewardStats(right=single_length(2))
    # The first reward completes the group, and the second replaces a reward in the same chunk.
    assert trainer.report(by_id("g:1", 1.0), by_id("g:0", 0.0)) == RewardReport(2, 0, 0)
    stats = RewardStats(single_length(3), single_length(2), 1, 0)
    assert trainer.prompt("p") == trainer.rewards.dataset == stats
    assert len(trainer.rewarded_groups) == 1, "a replaced reward does not complete the group again"
    assert trainer.report(by_id("g:0", 1.0)) == RewardReport(0, 1, 0)
    assert trainer.prompt("p") == stats


def test_a_verifier_does_not_replace_a_reward() -> None:
    trainer = Trainer()
    matcher = trainer.reward_matcher
    TWO.happens(matcher)
    trainer.report(by_id("g:0", 0.0))
    matcher.trajectory_verified((None, "g"), 0, 1.0, True)
    matcher.trajectory_verified((None, "g"), 1, 1.0, True)
    matcher.trajectory_verified((None, "g"), 1, 0.0, False)
    for unknown in ((None, "h"), ("me", "g")):
        matcher.trajectory_verified(unknown, 0, 1.0, True)
    matcher.trajectory_verified((None, "g"), 7, 1.0, True)
    assert trainer.prompt("p") == RewardStats(single_length(3), single_length(2), 1, 0)


def test_rewards_by_a_verifier_before_the_end_of_the_group_are_learned_at_its_end() -> None:
    trainer = Trainer()
    matcher = trainer.reward_matcher
    for trajectory in TWO.returned():
        matcher.trajectory_returned(trajectory)
    matcher.trajectory_verified((None, "g"), 0, 1.0, True)
    assert trainer.report(by_id("g:0", 0.0), by_id("g:1", 0.0)) == RewardReport(2, 0, 0)
    assert trainer.rewards.dataset == RewardStats()
    matcher.group_ended(TWO.record())
    assert trainer.prompt("p") == RewardStats(wrong=single_length(2) + single_length(3), groups=1, zero_variance=1)


def test_all_candidates_of_a_group_that_was_selected_by_rewards_count_once() -> None:
    trainer = Trainer()
    matcher = trainer.reward_matcher
    record = TWO.record()
    selected = [replace(c, weight=1.5, reward=float(c.index), correct=bool(c.index)) for c in record.candidates]
    discarded = replace(
        selected[0], index=2, tokens=9, selected_as=None, reason=DiscardReason.NOT_SAMPLED, reward=1.0, correct=True
    )
    unknown = replace(discarded, index=3, reward=None, correct=None)
    for trajectory in TWO.returned():
        matcher.trajectory_returned(trajectory)
    matcher.group_ended(replace(record, candidates=[*selected, discarded, unknown], num_rewarded=3))
    for c in selected:
        matcher.trajectory_verified((None, "g"), c.index, c.reward or 0.0, bool(c.correct))
    right = single_length(9) + single_length(3)
    assert trainer.prompt("p") == RewardStats(right, single_length(2), 1, 0)
    assert trainer.rewarded_groups == [("g", {0: False, 1: True, 2: True})]
