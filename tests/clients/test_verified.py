"""Rewards and advantages of the server's verifier: through the client, and as tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from darts_client import (
    BadRequest,
    Client,
    Done,
    Group,
    GroupEvent,
    PromptSpec,
    Trajectory,
    TrajectoryEvent,
    to_rows,
)
from darts_client.advantages import server_advantages, unbiased_advantages
from darts_client.tensors import to_tensors
from darts_server.engine.scripted import Script
from darts_server.verify.types import NO_VERDICT, Answer, Verdict

from .servers import RunningServer, serving

SIZES: dict[str, Any] = {"group_size": 4, "max_tokens": 100}
INFORMATIVE = SIZES | {"policy": "informative"}


class Judge:
    """Rewards answers of odd prompts whose length is a multiple of three."""

    names = ("length",)

    async def verify(self, answer: Answer, names: Sequence[str] = ()) -> Verdict:
        if answer.prompt.metadata == b'{"fails":true}':
            return NO_VERDICT
        length = len(answer.token_ids)
        assert answer.text == f"{length} tokens"
        right = int(answer.prompt.text or "0") % 2 == 1 and length % 3 == 0
        return Verdict(float(right), right)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(lambda prompt, index: Script(int(prompt) + index), verifier=Judge()) as served:
        yield served


def test_an_informative_group_has_weights_and_advantages(server: RunningServer) -> None:
    with Client(server.url) as client:
        with client.rollouts(["21"], **INFORMATIVE) as rollouts:
            [group] = list(rollouts)
        [record] = client.groups.get(group.group_id or "")
    # Lengths 21 to 28: 21, 24 and 27 are right.
    assert (group.num_rewarded, group.zero_variance, group.decided_early) == (8, False, False)
    assert sorted(t.reward or 0 for t in group.trajectories) == [0, 0, 1, 1]
    assert {(t.reward, t.advantage) for t in group.trajectories} == {(1.0, 0.625), (0.0, -0.375)}
    assert all(t.selected_as == "reward" and t.correct == bool(t.reward) for t in group.trajectories)
    assert {d.reason for d in group.discarded} == {"not_sampled"}
    assert {d.reward for d in group.discarded} <= {0.0, 1.0}
    assert [c.advantage for c in record.selected] == [t.advantage for t in group.trajectories]
    assert (record.num_rewarded, record.decided_early) == (8, False)
    assert [c.reward for c in record.candidates] == [float((21 + i) % 3 == 0) for i in range(8)]


def test_no_baseline_is_computed_from_a_group_that_was_selected_by_rewards(server: RunningServer) -> None:
    with Client(server.url) as client, client.rollouts(["21"], **INFORMATIVE) as rollouts:
        [group] = list(rollouts)
    rewards = [t.reward or 0.0 for t in group.trajectories]
    with pytest.raises(ValueError, match="server_advantages"):
        unbiased_advantages(group, rewards)
    weights = [t.weight or 0.0 for t in group.trajectories]
    expected = [4 / 8 * w * (r - 0.25) for w, r in zip(weights, rewards, strict=True)]
    assert unbiased_advantages(group, rewards, 0.25) == pytest.approx(expected)


def test_the_tensors_estimate_the_gradient_of_all_candidates(server: RunningServer) -> None:
    with Client(server.url) as client:
        batch = client.batch(["21", "22"], **INFORMATIVE)
    tensors = to_tensors(batch.groups, advantages="server")
    assert tensors.advantages is not None
    first, second = tensors.advantages.split(4)
    weights = [3 / 2 if t.correct else 5 / 2 for t in batch.groups[0].trajectories]
    by_hand = [w * (t.advantage or 0) / 2 for w, t in zip(weights, batch.groups[0].trajectories, strict=True)]
    torch.testing.assert_close(first, torch.tensor(by_hand))
    assert second.tolist() == [0.0] * 4, "all are wrong"
    assert tensors.rewards is not None
    assert tensors.rewards.sum() == 2
    assert to_tensors(batch.groups).advantages is None, "the rewards of the selected are no sample"


def test_the_rewards_of_the_verifier_are_the_default(server: RunningServer) -> None:
    with Client(server.url) as client:
        # Lengths 21 to 24 and 22 to 25.
        groups = client.batch(["21", "22"], policy="off", **SIZES).groups
        uniform = client.batch(["21"], policy="uniform", **SIZES).groups
        [record] = client.groups.get(groups[0].group_id or "")
    assert record.run_probability == 1.0
    rewards = [[1.0, 0.0, 0.0, 1.0], [0.0] * 4]
    assert [row["reward"] for row in to_rows(groups)] == [*rewards[0], *rewards[1]]
    torch.testing.assert_close(to_tensors(groups).advantages, to_tensors(groups, rewards).advantages)
    tensors = to_tensors(uniform, advantages="unbiased")
    assert tensors.rewards is not None
    expected = unbiased_advantages(uniform[0], tensors.rewards.tolist())
    torch.testing.assert_close(tensors.advantages, torch.tensor(expected))


def test_dynamic_sampling_returns_informative_groups_and_says_what_is_missing(server: RunningServer) -> None:
    prompts = ["22", "24", "23", "26"]
    with Client(server.url) as client:
        with client.rollouts(prompts, only="informative", num_groups=2, **INFORMATIVE) as rollouts:
            assert [group.number for group in rollouts] == [2]
        assert (rollouts.shortfall, rollouts.uninformative, rollouts.unfinished) == (1, (0, 1, 3), ())

        options: dict[str, Any] = {
            "only": "informative",
            "num_groups": 1,
            "max_prompts": 3,
            "return_zero_variance": True,
        }
        batch = client.batch(prompts, **options, **SIZES, policy="off")
        assert (batch.shortfall, batch.uninformative) == (0, tuple(n for n in (0, 1, 3) if n in batch.uninformative))
        assert {group.number for group in batch.groups} == {2, *batch.uninformative}
        assert {group.number for group in batch.groups if group.zero_variance} == set(batch.uninformative)

        with client.stream_tokens(["22", "23"], only="informative", num_groups=1, **INFORMATIVE) as events:
            found = list(events)
    [group] = [event.group for event in found if isinstance(event, GroupEvent)]
    assert group.number == 1
    # The server selects by rewards, so it has them when it selects.
    selected = [event for event in found if isinstance(event, TrajectoryEvent)]
    expected = {each.trajectory_id: (each.reward, each.correct) for each in group.trajectories}
    assert {event.trajectory_id: (event.reward, event.correct) for event in selected} == expected
    assert {reward for reward, _ in expected.values()} == {0.0, 1.0}
    done = found[-1]
    assert isinstance(done, Done)
    assert done.shortfall == 0


def test_a_group_is_decided_early(server: RunningServer) -> None:
    with Client(server.url) as client:
        [group] = client.batch("21", stop_when="decided", **INFORMATIVE).groups
    assert group.decided_early
    assert {t.weight for t in group.trajectories} == {None}
    assert server_advantages(group) == [t.advantage for t in group.trajectories]


def test_prompts_choose_their_verifiers(server: RunningServer) -> None:
    prompts = [PromptSpec("3", verifier=False), PromptSpec("3", verifier=["length"]), PromptSpec("3")]
    with Client(server.url) as client:
        batch = client.batch(prompts, policy="off", verifier=False, **SIZES)
        assert [group.zero_variance for group in batch.groups] == [None, False, None]
        with pytest.raises(BadRequest, match=r"prompts\[0\].verifier.*'what'.*choose from length"):
            client.batch(PromptSpec("3", verifier=["what"]), **SIZES)
        with pytest.raises(BadRequest, match='only valid with "only"'):
            client.batch("3", max_prompts=3, **SIZES)


def test_answers_without_a_verdict_fill_up(server: RunningServer) -> None:
    with Client(server.url) as client:
        batch = client.batch(PromptSpec("3", metadata={"fails": True}), **INFORMATIVE)
    tensors = to_tensors(batch.groups, advantages="server")
    assert tensors.advantages is not None
    assert tensors.advantages.tolist() == [0.0] * 4
    assert tensors.rewards is None
    assert batch.groups[0].zero_variance is None


def test_groups_without_advantages_are_refused() -> None:
    trajectory = Trajectory(0, "", (1,), None, "stop", advantage=1.0, weight=2.0)
    group = Group("g", None, (trajectory,), num_rewarded=4)
    assert server_advantages(group) == [0.5]
    for bad in (replace(group, num_rewarded=None), replace(group, trajectories=(replace(trajectory, advantage=None),))):
        with pytest.raises(ValueError, match="no advantages from the server"):
            server_advantages(bad)
