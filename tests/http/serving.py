"""An app with our routes, for tests."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

from fastapi import APIRouter, FastAPI
from starlette.testclient import TestClient

from darts_server.control import Control
from darts_server.estimates.lengths import estimate_lengths, update_stats
from darts_server.http import errors
from darts_server.http.body import BodyLimits
from darts_server.http.routes import create_router
from darts_server.http.security.access import Access
from darts_server.http.security.middleware import SecurityMiddleware
from darts_server.records import GroupRecord, TrajectoryRecord
from darts_server.rollout.learned.statistics import KIND, Statistics, length_limit, observations
from darts_server.rollout.observers.provenance import Provenance
from darts_server.rollout.observers.reward_matching import RewardMatcher
from darts_server.settings import load
from darts_server.store import Store
from darts_server.weights.updates import Updates
from tests.rollout.learned.test_prompts import FINISHED, record

HERE = "127.0.0.1"
URL = "http://127.0.0.1:8000"
LARGEST = 2**30
"""Limit of a body in bytes."""


def our_routes(
    store: Store, statistics: Statistics, provenance: Provenance, reward_matcher: RewardMatcher, **more: Any
) -> APIRouter:
    """Create our routes on the given objects, and on mocks of all others."""
    parts: dict[str, Any] = {
        name: Mock() for name in ("batches", "votes", "session_registry", "updates", "monitor_sources")
    }
    parts |= {"control": Control(load({}, None)), "needs_key": False} | more
    return create_router(provenance, statistics, store, reward_matcher=reward_matcher, **parts)


@contextmanager
def client(
    updates: Updates | None = None, known: Mapping[str, GroupRecord | None] = MappingProxyType({})
) -> Iterator[TestClient]:
    """Open a client on this machine.

    The server has the prompts ``p`` and ``gsm8k/7``, and two groups ``cmpl-a-…`` of ``p``. Each group has returned
    candidate 0 (tokens 0 to 9) and candidate 1 (tokens 0 to 19), and the prompt's only token is the group's number.

    Args:
        updates: behind the routes of weights.
        known: groups of further prompts by key; ``None`` for a prompt with statistics of an earlier version.
    """
    with Store() as store:
        statistics = Statistics(store)
        provenance = Provenance()
        prompts = statistics.prompts
        reward_matcher = RewardMatcher(statistics.rewards, Mock(), Mock())

        def learn(key: str, ended: GroupRecord) -> None:
            observed = observations(ended)
            seen = length_limit(ended), ended.prompt_tokens
            stats = update_stats(prompts.load(key), observed, estimate_lengths(observed), 4, *seen)
            store.put(KIND, key, asdict(stats))

        for key, group in known.items():
            if group is None:
                old = {"mean_ema": 20.0, "std_ema": 10.0, "groups": 1, "candidates": 3, "weight_version": 4}
                store.put(KIND, key, old)
            else:
                learn(key, group)
        for group_id in ("cmpl-a-0", "cmpl-a-1"):
            ended = replace(record(*FINISHED), group_id=group_id)
            learn("p", ended)
            provenance.group_ended(ended)
            reward_matcher.group_ended(ended)
        for number, index in ((0, 0), (0, 1), (1, 0), (1, 1)):
            tokens = list(range(FINISHED[index].tokens))
            reward_matcher.trajectory_returned(TrajectoryRecord(f"cmpl-a-{number}", "p", 0.0, index, [number], tokens))
        learn("gsm8k/7", record(*FINISHED))
        app = FastAPI()
        errors.install_handlers(app)
        updates = updates or Mock(spec=Updates)
        app.include_router(our_routes(store, statistics, provenance, reward_matcher, updates=updates))
        limits = BodyLimits(LARGEST)
        app.add_middleware(SecurityMiddleware, access=Access(), limits=limits, on_refusal=Mock())
        yield TestClient(app, URL, client=(HERE, 1))
