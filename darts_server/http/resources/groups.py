"""Wire models of our own API."""

from dataclasses import asdict
from typing import Literal, Self

from pydantic import BaseModel, Field

from darts_server.rollout.observers.feedback import GroupRewards
from darts_server.types import CandidateRecord, DiscardReason, FinishReason, GroupRecord, Outcome, SelectedAs


class CandidateAnswer(BaseModel):
    """One candidate's fate."""

    trajectory_id: str = Field(description="The group's id, a colon, and its index.")
    index: int
    length: int = Field(description="Generated tokens; of a stopped candidate, as many as it had then.")
    finish_reason: FinishReason | None = Field(description="None for a candidate that was stopped or failed.")
    selected_as: SelectedAs | None = Field(
        description="From which end of the length order it was selected; None if it was not."
    )
    reason: DiscardReason | None = Field(description="Why it was discarded; None if it was selected.")
    rank: int | None = Field(description="Place among the selected ones by length, 0 for the shortest.")
    cut: bool = Field(description="Whether it was cut at the group's token limit.")
    quality: float | None = Field(description="Its chance to end correct by its latest score; None if it has none.")
    survival: float = Field(
        description="Probability with which it was to be kept; 1 if it was not scored or could not be spared."
    )
    start: float | None = Field(description="Seconds from the group's beginning to its start on the engine.")
    stop: float | None = Field(description="Seconds from the group's beginning to its end.")
    weight_version_start: int | None
    weight_version_end: int | None
    reward: float | None = Field(description="As reported; None while it was not.")
    correct: bool | None = Field(description="Whether it is right, as reported.")


class ShadowAnswer(BaseModel):
    """What a policy would have made of the group's candidates, had they run side by side."""

    policy: str
    selection: list[int] = Field(description="Indices of the candidates it would have returned.")
    generated: int = Field(description="Tokens it would have generated.")
    returned: int = Field(description="Tokens it would have returned.")
    steps: int = Field(description="Decode steps until its group would have been complete.")


class GroupAnswer(BaseModel):
    """Provenance of one group."""

    group_id: str
    prompt_key: str | None
    policy: str
    group_size: int
    outcome: Outcome
    error: str | None
    duration: float = Field(description="Seconds.")
    tail_wait: float | None = Field(description="Seconds from the K-th shortest trajectory's finish to the end.")
    mixed_versions: bool = Field(description="Whether the returned trajectories come from several weight versions.")
    generated: int = Field(description="Tokens of all candidates.")
    returned: int = Field(description="Tokens of the selected ones.")
    deadline: int | None = Field(
        description="Tokens at which its tail was cut or, if explored, would have been; None without a deadline."
    )
    explored: bool = Field(description="Whether it was let run past its deadline, to see what that takes away.")
    members: list[str] = Field(
        description="For a group of single requests: their ids, and the name the caller gave the group."
    )
    shadow: ShadowAnswer | None = Field(description="Under a shadow policy, what shaping would have done.")
    zero_variance: bool | None = Field(
        description="Whether all its rewards are equal; None until all returned trajectories have one."
    )
    candidates: list[CandidateAnswer]

    @classmethod
    def of(cls, record: GroupRecord, rewards: GroupRewards) -> Self:
        ranked = sorted(record.selected, key=lambda c: (c.tokens, c.index))
        ranks = {c.index: rank for rank, c in enumerate(ranked)}
        return cls(
            group_id=record.group_id,
            prompt_key=record.prompt_key,
            policy=record.policy,
            group_size=record.size,
            outcome=record.outcome,
            error=record.error,
            duration=record.ended_at - record.started_at,
            tail_wait=record.tail_wait,
            mixed_versions=record.mixed_versions,
            generated=record.generated_tokens,
            returned=record.returned_tokens,
            deadline=record.deadline,
            explored=record.explored,
            members=list(record.request_ids),
            shadow=None if record.shadow is None else ShadowAnswer(**asdict(record.shadow)),
            zero_variance=rewards.zero_variance,
            candidates=[_candidate(record, c, ranks.get(c.index), rewards) for c in record.candidates],
        )


class GroupsAnswer(BaseModel):
    """One group, or all groups of a response in prompt order."""

    groups: list[GroupAnswer]


class MeanAnswer(BaseModel):
    """A mean length in tokens."""

    mean: float
    se: float | None = Field(description="Its standard error; None for a single trajectory.")
    count: int


class PromptRewardsAnswer(BaseModel):
    """What rewards said of a prompt's returned trajectories."""

    rewarded: int = Field(description="Trajectories with a reward.")
    right: int
    pass_rate: float
    zero_variance_groups: int = Field(description="Groups whose rewards are all equal.")
    rewarded_groups: int = Field(description="Groups of which all returned trajectories have rewards.")
    length_right: MeanAnswer | None
    length_wrong: MeanAnswer | None
    pattern: Literal["I", "II", "unclear"] | None = Field(
        description="I: right ones are shorter than wrong ones. II: they are longer. None while one side has none."
    )
    difference: float | None = Field(description="Mean length of right minus wrong ones, in tokens.")
    difference_se: float | None


class PromptAnswer(BaseModel):
    """What is known of a prompt's lengths, in tokens; stopped candidates count as the longer ones they are."""

    prompt_key: str
    mean_ema: float
    std_ema: float | None = Field(description="None while no group had two candidates.")
    groups: int
    candidates: int
    weight_version: int | None = Field(description="Of the last group.")
    rewards: PromptRewardsAnswer | None = Field(description="None while no trajectory got a reward.")


class StateAnswer(BaseModel):
    """What is known after a restore."""

    prompts: int = Field(description="Prompts with statistics.")


def _candidate(group: GroupRecord, record: CandidateRecord, rank: int | None, rewards: GroupRewards) -> CandidateAnswer:
    began = group.started_at
    reward, correct = rewards.by_index.get(record.index, (None, None))
    return CandidateAnswer(
        trajectory_id=f"{group.group_id}:{record.index}",
        index=record.index,
        length=record.tokens,
        finish_reason=record.finish_reason,
        selected_as=record.selected_as,
        reason=record.reason,
        rank=rank,
        cut=record.cut,
        quality=record.quality,
        survival=record.survival,
        start=None if record.started_at is None else record.started_at - began,
        stop=None if record.ended_at is None else record.ended_at - began,
        weight_version_start=record.weight_version_start,
        weight_version_end=record.weight_version_end,
        reward=reward,
        correct=correct,
    )
