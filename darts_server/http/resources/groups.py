"""``/darts/v1/groups`` and ``/darts/v1/prompts``: how candidates ended, and statistics of prompts."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Self

from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.responses import Response

from darts_server.caller import caller
from darts_server.exceptions import NotFound
from darts_server.http.answers import JSON, SLICE_BYTES, ClosingResponse, Readers, run_in_encoder_thread
from darts_server.http.resources.trajectories import (
    Advantage,
    Cut,
    GroupFacts,
    Quality,
    Reason,
    SelectedAs,
    ToolSeconds,
    TrajectoryId,
    Turns,
    Weight,
    copy_shared_fields,
)
from darts_server.identifiers import decode_from_header
from darts_server.records import CandidateRecord, GroupRecord
from darts_server.rollout.learned.statistics import Statistics, summarize, summarize_lengths
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import GroupRewards, RewardMatcher
from darts_server.types import FinishReason, Outcome

LISTED_GROUPS = 100
"""Every kept group can be read by its id."""
INLINE_CANDIDATES = 256
"""Limit of candidates that are encoded in the event loop: they take 5 ms."""


class CandidateAnswer(BaseModel):
    """How one candidate ended."""

    trajectory_id: TrajectoryId
    index: int
    length: int = Field(description="Generated tokens. A stopped candidate has its tokens until the stop.")
    finish_reason: FinishReason | None = Field(description="Null for a candidate that was stopped or failed.")
    selected_as: SelectedAs
    reason: Reason
    rank: int | None = Field(
        description="Place among the selected candidates, 0 for the shortest: by tokens, or by seconds if the group "
        "compares sessions by seconds."
    )
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
    reward: float | None = Field(description="The reported reward, or else the verifier's; null without either.")
    correct: bool | None = Field(description="Whether the trajectory is correct, as reported or as the verifier says.")
    advantage: Advantage
    turns: Turns
    tool_seconds: ToolSeconds

    @classmethod
    def of(
        cls,
        group: GroupRecord,
        record: CandidateRecord,
        rank: int | None,
        rewards: GroupRewards,
    ) -> Self:
        # Reported rewards replace the verifier's rewards in the record.
        reward, correct = rewards.by_index.get(record.index, (record.reward, record.correct))
        other_fields = {
            "trajectory_id": f"{group.group_id}:{record.index}",
            "length": record.tokens,
            "rank": rank,
            "start": None if record.started_at is None else record.started_at - group.started_at,
            "stop": None if record.ended_at is None else record.ended_at - group.started_at,
            "reward": reward,
            "correct": correct,
        }
        return cls(**copy_shared_fields(cls, record) | other_fields)


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
    returned: int = Field(description="Tokens of the selected candidates.")
    cut_length: int | None = Field(
        description="Length in tokens at which every candidate was cut, or would have been cut if the group had not "
        "explored its deadline. Null without a deadline."
    )
    all_truncated: bool = Field(description="Whether every returned trajectory was truncated or cut.")
    explored: bool = Field(
        description="Whether the group ran past its deadline, to measure what the deadline discards."
    )
    members: list[str] = Field(
        description="For a group of single requests: the ids of the requests, and the caller's name of the group."
    )
    auto_choice: str | None = Field(
        description='Under auto, in a batch with `"carry": "resume"`: how many prompts of the batch have run, and why.'
    )
    zero_variance: bool | None = Field(
        description="Whether all rewards are equal; null until all returned trajectories have a reward."
    )
    candidates: list[CandidateAnswer]

    @classmethod
    def of(cls, record: GroupRecord, rewards: GroupRewards) -> Self:
        """Return the answer without its candidates, which `encode_group` adds."""
        other_fields = {
            "group_size": record.size,
            "duration": record.ended_at - record.started_at,
            "generated": record.generated_tokens,
            "returned": record.returned_tokens,
            "members": list(record.request_ids),
            "zero_variance": rewards.zero_variance,
            "candidates": [],
        }
        return cls(**copy_shared_fields(cls, record) | other_fields)


def encode_group(record: GroupRecord, rewards: GroupRewards) -> Iterator[bytes]:
    """Yield a group's JSON in parts of about `SLICE_BYTES`."""
    group_json = GroupAnswer.of(record, rewards).model_dump_json().encode()
    # Candidates go between the brackets of their empty list.
    before, start_of_list, after = group_json.rpartition(b'"candidates":[')
    by_length = sorted(record.selected, key=lambda candidate: candidate.length_order)
    ranks = {candidate.index: rank for rank, candidate in enumerate(by_length)}

    part = bytearray(before + start_of_list)
    for number, candidate in enumerate(record.candidates):
        answer = CandidateAnswer.of(record, candidate, ranks.get(candidate.index), rewards)
        if number:
            part += b","
        part += answer.model_dump_json().encode()
        if len(part) >= SLICE_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part + after)


class GroupsAnswer(BaseModel):
    """One group, or all groups of a response in prompt order."""

    groups: list[GroupAnswer]


class ListedGroup(BaseModel):
    """A summary of a group."""

    group_id: str
    prompt_key: str | None
    policy: str
    outcome: Outcome
    group_size: int
    candidates: int = Field(description="Number of candidates.")
    returned: int = Field(description="Number of returned trajectories.")
    duration: float = Field(description="Seconds.")
    ended_ago: float = Field(description="Seconds since it ended.")

    @classmethod
    def of(cls, record: GroupRecord, now: float) -> Self:
        other_fields = {
            "group_size": record.size,
            "candidates": len(record.candidates),
            "returned": len(record.selected),
            "duration": record.ended_at - record.started_at,
            "ended_ago": now - record.ended_at,
        }
        return cls(**copy_shared_fields(cls, record) | other_fields)


class ListedGroups(BaseModel):
    """The groups that ended last, the newest first."""

    groups: list[ListedGroup]


class PromptRewardsAnswer(BaseModel):
    """Statistics of the rewards of a prompt's returned trajectories."""

    rewarded: int = Field(description="Trajectories with a reward.")
    right: int = Field(description="Correct trajectories among them.")
    pass_rate: float
    zero_variance_groups: int = Field(description="Groups whose rewards are all equal.")
    rewarded_groups: int = Field(description="Groups whose returned trajectories all have rewards.")
    difference: float | None = Field(
        description="Mean length of correct trajectories minus that of incorrect trajectories, in tokens. Above 0, "
        "long answers are worth their tokens. Null until there are ten of each kind."
    )


class PromptAnswer(BaseModel):
    """Statistics of a prompt's lengths in tokens: estimates over its groups, and counts of the last group.

    The counts of the last group are null after a restore of the state of an earlier version.
    """

    prompt_key: str
    estimated_mean_tokens: float = Field(
        description="Estimated mean length if no candidate was stopped or truncated, so it may be above max_tokens. "
        "A moving average over groups."
    )
    estimated_std_tokens: float | None = Field(
        description="Estimated standard deviation of these lengths. Null while no group had two candidates."
    )
    groups: int
    candidates: int = Field(description="Candidates of all groups.")
    weight_version: int | None = Field(description="Weight version of the last group.")
    mean_generated_tokens: float | None = Field(
        description="Mean number of tokens that the last group's candidates have generated. Null if it is not known."
    )
    finished: int | None = Field(description="Candidates of the last group that ended by themselves.")
    truncated: int | None = Field(description="Candidates of the last group that ended at max_tokens.")
    stopped: int | None = Field(description="Candidates of the last group that were stopped or cut before their end.")
    max_tokens: int | None = Field(
        description="Limit of a candidate's tokens in the last group. Null if it is not known."
    )
    prompt_tokens: int | None = Field(description="Tokens of the prompt. Null if they are not known.")
    rewards: PromptRewardsAnswer | None = Field(description="Null while no trajectory has a reward.")


def add_routes(
    api: APIRouter,
    provenance: Provenance,
    statistics: Statistics,
    reward_matcher: RewardMatcher,
) -> None:
    readers = Readers("provenance of many candidates")

    async def encode_groups(records: Sequence[GroupRecord]) -> AsyncIterator[bytes]:
        yield b'{"groups":['
        for number, record in enumerate(records):
            if number:
                yield b","
            # The rewards are read here, because they change in the event loop.
            parts = encode_group(record, reward_matcher.group_rewards(record))
            # The thread encodes the next part when the earlier parts were sent.
            while (part := await run_in_encoder_thread(partial(next, parts, None))) is not None:
                yield part
        yield b"]}"

    @api.get("/groups")
    async def newest() -> ListedGroups:
        """List your newest 100 groups that have ended, the newest first. Admins get the groups of all callers."""
        # Records have times of this clock.
        now = time.monotonic()
        records = provenance.newest(caller.get().may_see, LISTED_GROUPS)
        return ListedGroups(groups=[ListedGroup.of(record, now) for record in records])

    # Callers' own request ids may have slashes.
    @api.get("/groups/{group_id:path}", response_model=GroupsAnswer)
    async def groups(group_id: str) -> Response:
        """Return the provenance of a group, or of all groups of a response: how every candidate ended."""
        may_see = caller.get().may_see
        # The id may be the percent-encoded id of the header `X-Darts-Group-Id`.
        records = provenance.find(group_id, may_see) or provenance.find(decode_from_header(group_id), may_see)
        if not records:
            raise NotFound("group_id", f"there is no group {group_id!r} of yours; only the latest groups are kept")

        if sum(len(record.candidates) for record in records) > INLINE_CANDIDATES:
            with ExitStack() as cleanup:
                cleanup.enter_context(readers.count_connection())
                return ClosingResponse(encode_groups(records), JSON, None, cleanup.pop_all())
        encoded = [b"".join(encode_group(record, reward_matcher.group_rewards(record))) for record in records]
        return Response(b'{"groups":[' + b",".join(encoded) + b"]}", media_type=JSON)

    # Callers' own keys may have slashes.
    @api.get("/prompts/{prompt_key:path}")
    async def prompt(prompt_key: str) -> PromptAnswer:
        """Return statistics of a prompt's lengths and rewards. `GET /darts/v1/groups/ID` returns a group's key."""
        lengths = statistics.prompts.load(prompt_key)
        if lengths is None:
            raise NotFound(
                "prompt_key",
                f"there are no statistics of prompt {prompt_key!r}; GET /darts/v1/groups/ID returns its key",
            )
        rewards = None
        reward_summary = summarize(statistics.rewards.prompts.load(prompt_key))
        if reward_summary is not None:
            rewards = PromptRewardsAnswer(**reward_summary)
        return PromptAnswer(prompt_key=prompt_key, **summarize_lengths(lengths), rewards=rewards)
