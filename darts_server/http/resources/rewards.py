"""``POST /darts/v1/rewards``: what trainers found of the trajectories that they got."""

from dataclasses import asdict
from typing import Annotated, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from darts_server.http.body import parsed, read_body
from darts_server.http.openapi import json_body
from darts_server.rollout.observers.feedback import Feedback, Reward

LARGEST_BODY = 256 * 1024 * 1024
"""Bytes: 4,096 trajectories named by 8,192 tokens have less."""
MOST_REWARDS = 100_000
LARGEST_TOKEN = 2**31 - 1

TokenIds = list[Annotated[StrictInt, Field(ge=0, le=LARGEST_TOKEN)]]


class RewardIn(BaseModel):
    """The reward of a trajectory, named by its id or by its tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)

    trajectory_id: str | None = Field(None, min_length=1, description="The group's id, a colon, the candidate's index.")
    prompt_token_ids: TokenIds | None = None
    completion_token_ids: TokenIds | None = Field(
        None, description="With the prompt's: names all returned trajectories that have just these tokens."
    )
    reward: float = Field(allow_inf_nan=False)
    correct: bool | None = Field(None, description="Whether it is right; left out, it is if the reward is above 0.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        named = tuple(
            part is not None for part in (self.trajectory_id, self.prompt_token_ids, self.completion_token_ids)
        )
        if named not in ((True, False, False), (False, True, True)):
            raise ValueError("give either trajectory_id, or prompt_token_ids and completion_token_ids")
        return self

    @property
    def asked(self) -> Reward:
        correct = self.reward > 0 if self.correct is None else self.correct
        if self.trajectory_id is not None:
            return Reward(self.reward, correct, self.trajectory_id)
        return Reward(self.reward, correct, None, self.prompt_token_ids or (), self.completion_token_ids or ())


class RewardsIn(BaseModel):
    """Rewards of trajectories of any groups, in any order."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rewards: list[RewardIn] = Field(max_length=MOST_REWARDS)


class RewardsOut(BaseModel):
    """What became of them; each counts in one of three."""

    matched: int = Field(description="For a trajectory that had no reward.")
    repeated: int = Field(description="For one that has a reward already. It keeps that.")
    unknown: int = Field(description="For one that is not kept: unshaped, too old, or never returned.")
    unknown_indices: list[int] = Field(description="Places of these in the request, the first 100.")


EXAMPLE = {
    "rewards": [
        {"trajectory_id": "cmpl-8f3a-0:2", "reward": 1.0},
        {"prompt_token_ids": [5, 6, 7], "completion_token_ids": [8, 9], "reward": -0.5, "correct": False},
    ]
}


def routes(feedback: Feedback) -> APIRouter:
    api = APIRouter()

    @api.post("/rewards", openapi_extra=json_body(RewardsIn, EXAMPLE))
    async def rewards(request: Request) -> RewardsOut:
        """Takes in the rewards of returned trajectories. One that has a reward keeps it, so sending twice is safe."""
        body = parsed(RewardsIn, await read_body(request, LARGEST_BODY))
        return RewardsOut(**asdict(await feedback.report([each.asked for each in body.rewards])))

    return api
