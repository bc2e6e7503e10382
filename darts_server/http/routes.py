"""All routes of our own API, under ``/darts/v1``."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Route

from darts_server.exceptions import InvalidRequest, NotFound
from darts_server.http.openapi import BEARER, FAILURES
from darts_server.http.resources import monitor, policy, rewards, rollouts, state, vote, weights
from darts_server.http.resources.groups import GroupAnswer, GroupsAnswer, PromptAnswer, PromptRewardsAnswer
from darts_server.identifiers import from_header
from darts_server.removed import PARAMETERS
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.learned.rewards import summarize
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.voting import VoteRunner
from darts_server.serving.admission import caller
from darts_server.weights.updates import Updates

METRICS = "/metrics"


def router(
    provenance: Provenance,
    statistics: Statistics,
    store: state.State,
    control: policy.PolicyControl,
    batches: BatchRegistry[Any, Any],
    votes: VoteRunner[Any, Any],
    reward_matcher: RewardMatcher,
    updates: Updates,
    monitored: monitor.MonitorSources,
    needs_key: bool,
) -> APIRouter:
    """Create the routes. ``needs_key``: whether their description names a key, which `SecurityMiddleware` checks."""
    dependencies = [Depends(refuse_removed_parameters), *([Depends(BEARER)] if needs_key else [])]
    api = APIRouter(prefix="/darts/v1", tags=["darts"], dependencies=dependencies, responses=FAILURES)

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
        stats = statistics.prompts.stats(prompt_key)
        if stats is None:
            raise NotFound(
                "prompt_key",
                f"there are no statistics of prompt {prompt_key!r}; GET /darts/v1/groups/ID returns its key",
            )
        reward_stats = summarize(statistics.rewards.of_prompt(prompt_key))
        answer = None if reward_stats is None else PromptRewardsAnswer(**reward_stats)
        return PromptAnswer(prompt_key=prompt_key, **asdict(stats), rewards=answer)

    api.include_router(rollouts.routes(batches))
    api.include_router(vote.routes(votes))
    api.include_router(rewards.routes(reward_matcher))
    api.include_router(state.routes(store, statistics))
    api.include_router(policy.routes(control))
    api.include_router(weights.routes(updates))
    api.include_router(monitor.routes(monitored))
    return api


async def refuse_removed_parameters(request: Request) -> None:
    """
    Raises:
        InvalidRequest: the query has a parameter that the route does not have any more.
    """
    route = f"{request.method} {request.scope['route'].path}"
    for name in request.query_params:
        if (remedy := PARAMETERS.get((route, name))) is not None:
            raise InvalidRequest(name, f"is gone; {remedy}")


def serve_metrics_in_the_loop(application: FastAPI) -> None:
    """Serve vLLM's ``/metrics`` in the event loop, not in a thread: our gauges read what the loop changes meanwhile."""
    found = [each.endpoint for each in application.routes if isinstance(each, APIRoute) and each.path == METRICS]

    async def metrics(request: Request) -> Response:
        answer: Response = found[0](request)
        return answer

    if found:
        application.routes.insert(0, Route(METRICS, metrics, include_in_schema=False))
