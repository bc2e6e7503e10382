"""Routes of our own API, under ``/darts/v1``."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends

from darts_server.exceptions import NotFound
from darts_server.http.openapi import BEARER, FAILURES
from darts_server.http.resources import lora, monitor, policy, rewards, rollouts, state, vote, weights
from darts_server.http.resources.groups import GroupAnswer, GroupsAnswer, PromptAnswer, PromptRewardsAnswer
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.learned.prompts import Prompts
from darts_server.rollout.learned.rewards import Rewards, summary
from darts_server.rollout.observers.feedback import Feedback
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.voting.runner import VoteRunner
from darts_server.weights.updates import Updates


def router(
    provenance: Provenance,
    prompts: Prompts,
    learned: Rewards,
    store: state.State,
    control: policy.PolicyControl,
    batches: BatchRegistry[Any, Any],
    votes: VoteRunner[Any, Any],
    feedback: Feedback,
    updates: Updates,
    viewed: monitor.Viewed,
    guarded: bool,
) -> APIRouter:
    """The routes. ``guarded``: whether their description names a key; `SecurityMiddleware` checks it."""
    asking = [Depends(BEARER)] if guarded else []
    api = APIRouter(prefix="/darts/v1", tags=["darts"], dependencies=asking, responses=FAILURES)

    @api.get("/groups/{group_id}")
    async def groups(group_id: str) -> GroupsAnswer:
        """Provenance of a group, or of all groups of a response: every candidate's length and fate."""
        records = provenance.find(group_id)
        if not records:
            raise NotFound("group_id", f"no group {group_id!r} is kept; only the latest are, and only shaped ones")
        return GroupsAnswer(groups=[GroupAnswer.of(record, feedback.of(record)) for record in records])

    @api.get("/prompts/{prompt_key:path}")  # callers' own keys may have slashes
    async def prompt(prompt_key: str) -> PromptAnswer:
        """What is known of a prompt's lengths and rewards. Its key is told with its groups."""
        stats = prompts.stats(prompt_key)
        if stats is None:
            raise NotFound("prompt_key", f"no prompt {prompt_key!r} is known; GET /darts/v1/groups/ID tells keys")
        rewarded = summary(learned.of_prompt(prompt_key))
        told = None if rewarded is None else PromptRewardsAnswer(**asdict(rewarded))
        return PromptAnswer(prompt_key=prompt_key, **asdict(stats), rewards=told)

    api.include_router(rollouts.routes(batches))
    api.include_router(vote.routes(votes))
    api.include_router(rewards.routes(feedback))
    api.include_router(state.routes(store))
    api.include_router(policy.routes(control))
    api.include_router(weights.routes(updates))
    api.include_router(lora.routes(updates))
    api.include_router(monitor.routes(viewed))
    return api
