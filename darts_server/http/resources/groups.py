"""``/darts/v1/groups`` and ``/darts/v1/prompts``: how candidates ended, and what prompts were like."""

from dataclasses import asdict
from typing import Literal, Self

from fastapi import APIRouter
from pydantic import BaseModel, Field

from darts_server.exceptions import NotFound
from darts_server.http.resources.trajectories import (
    Cut,
    GroupFacts,
    Quality,
    Reason,
    SelectedAs,
    TrajectoryId,
    Weight,
    shared_fields,
)
from darts_server.identifiers import from_header
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import Statistics, summarize
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import GroupRewards, RewardMatcher
from darts_server.serving.admission import caller
from darts_server.types import FinishReason, Outcome


class CandidateAnswer(BaseModel):
    """How one candidate ended."""

    trajectory_id: TrajectoryId
    index: int
    length: int = Field(description="Generated tokens; of a stopped candidate, until it was stopped.")
    finish_reason: FinishReason | None = Field(description="Null for a candidate that was stopped or failed.")
    selected_as: SelectedAs
    reason: Reason
    rank: int | None = Field(description="Place by length among the selected ones, 0 for the shortest.")
    cut: Cut
    quality: Quality
    survival: float = Field(
        description="Probability with which it was kept; 1 if it was not scored or could not be pruned."
    )
    weight: Weight
    start: float | None = Field(description="Seconds from the group's start to the candidate's start on the engine.")
    stop: float | None = Field(description="Seconds from the group's start to the candidate's end.")
    weight_version_start: int | None
    weight_version_end: int | None
    reward: float | None = Field(description="As reported; null until then.")
    correct: bool | None = Field(description="Whether it is correct, as reported.")

    @classmethod
    def of(cls, group: GroupRecord, record: CandidateRecord, rank: int | None, rewards: GroupRewards) -> Self:
        reward, correct = rewards.by_index.get(record.index, (None, None))
        others = {
            "trajectory_id": f"{group.group_id}:{record.index}",
            "length": record.tokens,
            "rank": rank,
            "start": None if record.started_at is None else record.started_at - group.started_at,
            "stop": None if record.ended_at is None else record.ended_at - group.started_at,
            "reward": reward,
            "correct": correct,
        }
        return cls(**shared_fields(cls, record) | others)


class GroupAnswer(GroupFacts):
    """Provenance of one group."""

    group_id: str
    prompt_key: str | None
    policy: str
    group_size: int
    outcome: Outcome
    error: str | None
    duration: float = Field(description="Seconds.")
    tail_wait: float | None = Field(
        description="Seconds from the finish of the K-th shortest trajectory to the group's end."
    )
    generated: int = Field(description="Tokens of all candidates.")
    returned: int = Field(description="Tokens of the selected ones.")
    bound: int | None = Field(
        description="Tokens at which every candidate was cut or, if explored, would have been; null without a deadline."
    )
    all_truncated: bool = Field(description="Whether no returned trajectory has an end of its own.")
    explored: bool = Field(description="Whether it ran past its deadline, to measure what that discards.")
    members: list[str] = Field(
        description="For a group of single requests: their ids, and the caller's name of the group."
    )
    chosen: str | None = Field(
        description='Under auto, in a batch with `"carry": "resume"`: how many prompts of the batch have run, and why.'
    )
    zero_variance: bool | None = Field(
        description="Whether all its rewards are equal; null until all returned trajectories have one."
    )
    candidates: list[CandidateAnswer]

    @classmethod
    def of(cls, record: GroupRecord, rewards: GroupRewards) -> Self:
        ranked = sorted(record.selected, key=lambda c: (c.tokens, c.index))
        ranks = {c.index: rank for rank, c in enumerate(ranked)}
        others = {
            "group_size": record.size,
            "duration": record.ended_at - record.started_at,
            "generated": record.generated_tokens,
            "returned": record.returned_tokens,
            "members": list(record.request_ids),
            "zero_variance": rewards.zero_variance,
            "candidates": [CandidateAnswer.of(record, c, ranks.get(c.index), rewards) for c in record.candidates],
        }
        return cls(**shared_fields(cls, record) | others)


class GroupsAnswer(BaseModel):
    """One group, or all groups of a response in prompt order."""

    groups: list[GroupAnswer]


class MeanAnswer(BaseModel):
    """A mean length in tokens."""

    mean: float
    se: float | None = Field(description="Its standard error; null for a single trajectory.")
    count: int


class PromptRewardsAnswer(BaseModel):
    """Statistics of the rewards of a prompt's returned trajectories."""

    rewarded: int = Field(description="Trajectories with a reward.")
    right: int = Field(description="Correct trajectories among them.")
    pass_rate: float
    zero_variance_groups: int = Field(description="Groups whose rewards are all equal.")
    rewarded_groups: int = Field(description="Groups whose returned trajectories all have rewards.")
    length_right: MeanAnswer | None
    length_wrong: MeanAnswer | None
    pattern: Literal["I", "II", "unclear"] | None = Field(
        description="I: correct ones are shorter than incorrect ones. II: longer. Null while there are none of a kind."
    )
    difference: float | None = Field(description="Mean length of correct minus incorrect ones, in tokens.")
    difference_se: float | None


class PromptAnswer(BaseModel):
    """Statistics of a prompt's lengths, in tokens. Stopped candidates count as at least as long as they were."""

    prompt_key: str
    mean_ema: float
    std_ema: float | None = Field(description="Null while no group had two candidates.")
    groups: int
    candidates: int
    weight_version: int | None = Field(description="Weight version of the last group.")
    rewards: PromptRewardsAnswer | None = Field(description="Null while no trajectory has a reward.")


def add_routes(api: APIRouter, provenance: Provenance, statistics: Statistics, reward_matcher: RewardMatcher) -> None:
    @api.get("/groups/{group_id:path}")  # callers' own request ids may have slashes
    async def groups(group_id: str) -> GroupsAnswer:
        """Return the provenance of a group, or of all groups of a response: how every candidate ended."""
        may_see = caller.get().may_see
        records = provenance.find(group_id, may_see) or provenance.find(from_header(group_id), may_see)
        if not records:
            raise NotFound(
                "group_id", f"there is no group {group_id!r} of yours; only the latest shaped groups are kept"
            )
        return GroupsAnswer(groups=[GroupAnswer.of(record, reward_matcher.group_rewards(record)) for record in records])

    @api.get("/prompts/{prompt_key:path}")  # callers' own keys may have slashes
    async def prompt(prompt_key: str) -> PromptAnswer:
        """Return statistics of a prompt's lengths and rewards. Its groups have its key."""
        stats = statistics.prompts.load(prompt_key)
        if stats is None:
            raise NotFound(
                "prompt_key",
                f"there are no statistics of prompt {prompt_key!r}; GET /darts/v1/groups/ID returns its key",
            )
        reward_stats = summarize(statistics.rewards.prompts.load(prompt_key))
        answer = None if reward_stats is None else PromptRewardsAnswer(**reward_stats)
        return PromptAnswer(prompt_key=prompt_key, **asdict(stats), rewards=answer)
