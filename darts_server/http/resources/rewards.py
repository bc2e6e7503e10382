"""``POST /darts/v1/rewards``: rewards of returned trajectories."""

from dataclasses import asdict
from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, StrictInt, model_validator

from darts_server.http.body import Body, convert_body, parse_body, read_body
from darts_server.http.openapi import json_body
from darts_server.rollout.observers.reward_matching import Reward, RewardMatcher

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Enough for 1,024 trajectories named by 8,192 tokens each."""
MAX_REWARDS = 100_000
# vLLM's token ids are 32-bit integers.
MAX_TOKEN_ID = 2**31 - 1

TokenIds = Annotated[list[Annotated[StrictInt, Field(ge=0, le=MAX_TOKEN_ID)]], Field(fail_fast=True)]


class RewardIn(Body):
    """The reward of a trajectory, which is named by its id or by its tokens."""

    trajectory_id: str | None = Field(None, min_length=1, description="The group's id, a colon, the candidate's index.")
    prompt_token_ids: TokenIds | None = None
    completion_token_ids: TokenIds | None = Field(
        None, description="With prompt_token_ids: all returned trajectories with exactly these tokens."
    )
    reward: float = Field(allow_inf_nan=False)
    correct: bool | None = Field(
        None, description="Whether the trajectory is correct. By default, whether the reward is above 0."
    )

    @model_validator(mode="after")
    def _check_trajectory(self) -> Self:
        has_id = self.trajectory_id is not None
        has_prompt = self.prompt_token_ids is not None
        has_completion = self.completion_token_ids is not None
        if has_prompt != has_completion or has_id == has_prompt:
            raise ValueError("give either trajectory_id, or prompt_token_ids and completion_token_ids")
        return self

    def to_reward(self) -> Reward:
        correct = self.correct
        if correct is None:
            correct = self.reward > 0
        return Reward(
            reward=self.reward,
            correct=correct,
            trajectory_id=self.trajectory_id,
            prompt_token_ids=self.prompt_token_ids or (),
            completion_token_ids=self.completion_token_ids or (),
        )


class RewardsIn(Body):
    """Rewards of trajectories of any groups, in any order."""

    rewards: list[RewardIn] = Field(max_length=MAX_REWARDS, fail_fast=True)


class RewardsOut(BaseModel):
    """Numbers of rewards by result."""

    matched: int = Field(description="Rewards of trajectories without a reported reward.")
    repeated: int = Field(description="Rewards of trajectories that already have a reported reward, and keep it.")
    unknown: int = Field(description="Rewards of trajectories that are unshaped, too old, or were never returned.")
    unknown_indices: list[int] = Field(description="Indices of the first 100 unknown rewards in the request.")


EXAMPLE = {
    "rewards": [
        {"trajectory_id": "cmpl-8f3a-0:2", "reward": 1.0},
        {"prompt_token_ids": [5, 6, 7], "completion_token_ids": [8, 9], "reward": -0.5, "correct": False},
    ]
}


def add_routes(api: APIRouter, reward_matcher: RewardMatcher) -> None:
    @api.post("/rewards", openapi_extra=json_body(RewardsIn, EXAMPLE))
    async def rewards(request: Request) -> RewardsOut:
        """Record rewards of returned trajectories. A trajectory keeps its first reported reward, so sending twice is
        safe. A reported reward replaces that of a verifier.
        """
        raw = await read_body(request, MAX_BODY_BYTES)
        body = await parse_body(RewardsIn, raw, "rewards")

        def to_rewards(body: RewardsIn) -> list[Reward]:
            return [reward.to_reward() for reward in body.rewards]

        reported_rewards = await convert_body(to_rewards, body, num_bytes=len(raw))
        counts = await reward_matcher.report(reported_rewards)
        return RewardsOut(**asdict(counts))
