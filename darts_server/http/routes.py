"""All routes of our own API, under ``/darts/v1``."""

from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Route

from darts_server.http.openapi import BEARER, FAILURES
from darts_server.http.resources import groups, monitor, policy, rewards, rollouts, state, vote, weights
from darts_server.rollout.batches.registry import BatchRegistry
from darts_server.rollout.learned.statistics import Statistics
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.rollout.voting import VoteRunner
from darts_server.store import Store
from darts_server.weights.updates import Updates

METRICS = "/metrics"


def router(
    provenance: Provenance,
    statistics: Statistics,
    store: Store,
    control: policy.PolicyControl,
    batches: BatchRegistry[Any, Any],
    votes: VoteRunner[Any, Any],
    reward_matcher: RewardMatcher,
    updates: Updates,
    monitored: monitor.MonitorSources,
    needs_key: bool,
) -> APIRouter:
    """Create the routes. ``needs_key``: whether their description names a key, which `SecurityMiddleware` checks."""
    dependencies = [Depends(BEARER)] if needs_key else []
    api = APIRouter(prefix="/darts/v1", tags=["darts"], dependencies=dependencies, responses=FAILURES)

    groups.add_routes(api, provenance, statistics, reward_matcher)
    rollouts.add_routes(api, batches)
    vote.add_routes(api, votes)
    rewards.add_routes(api, reward_matcher)
    state.add_routes(api, store, statistics)
    policy.add_routes(api, control)
    weights.add_routes(api, updates)
    monitor.add_routes(api, monitored)
    return api


def serve_metrics_in_the_loop(application: FastAPI) -> None:
    """Serve vLLM's ``/metrics`` in the event loop, not in a thread: our gauges read what the loop changes meanwhile."""
    found = [each.endpoint for each in application.routes if isinstance(each, APIRoute) and each.path == METRICS]

    async def metrics(request: Request) -> Response:
        answer: Response = found[0](request)
        return answer

    if found:
        application.routes.insert(0, Route(METRICS, metrics, include_in_schema=False))
