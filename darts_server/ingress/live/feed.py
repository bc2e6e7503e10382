"""``GET /darts/v1/live`` of an ingress: the groups of all replicas, as one feed for the page."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from darts_server.http.sse import MEDIA_TYPE, EventStream, encode
from darts_server.ingress.batches.events import read_events
from darts_server.ingress.call import Call, to_response
from darts_server.ingress.everyone.broadcast import broadcast
from darts_server.ingress.live.merged import MergedFeeds, NotUnderstood
from darts_server.ingress.replicas.fleet import REACHABLE, Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing, ReplicaFailure
from darts_server.ingress.replicas.whole import opened
from darts_server.ingress.routing.router import no_replica
from darts_server.serving.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.25
"""Between two events, at least; this and the next two as servers have them."""
QUIET_SECONDS = 2.0
STALL_SECONDS = 60.0
SNAPSHOT_SECONDS = 5.0
"""Timeout of the first state of each replica. The feed begins without those that are later."""
SILENT_SECONDS = 15.0
"""A replica sends an event every two, unless it is very busy."""
RETRY_SECONDS = 1.0


class Live:
    """Merges what replicas show of their groups. Each shows a caller what it may see there."""

    def __init__(self, fleet: Fleet, lifecycle: Lifecycle) -> None:
        self._fleet = fleet
        self._lifecycle = lifecycle

    async def live(self, call: Call) -> Response:
        """Return the state of all replicas; with ``Accept: text/event-stream``, stream it and its changes.

        Raises:
            NoReplica
        """
        members = self._fleet.reachable
        if not members:
            raise no_replica(self._fleet)
        others = [(name, value) for name, value in call.outgoing.headers if name.lower() != b"accept"]
        result = await broadcast(members, replace(call.outgoing, headers=others), SNAPSHOT_SECONDS)
        if not result.accepted:
            if not result.answers:
                raise no_replica(self._fleet)
            return to_response(next(iter(result.answers.values())))
        if MEDIA_TYPE in call.headers.get("accept", ""):
            return EventStream(self._events(call.outgoing), nullcontext(), ping_seconds=0, send_timeout=STALL_SECONDS)
        feeds = MergedFeeds()
        for name, answer in result.accepted.items():
            with suppress(NotUnderstood, ValueError):
                feeds.add(name, json.loads(answer.body), is_whole=True)
        if not feeds.names:
            raise no_replica(self._fleet)
        return JSONResponse(feeds.take())

    async def _events(self, outgoing: Outgoing) -> AsyncGenerator[bytes, None]:
        """Yield a ``snapshot``, then an ``update`` for changes. Replicas may come and go meanwhile."""
        feeds = MergedFeeds()
        following: dict[str, asyncio.Task[None]] = {}
        name, sent_at, began = "snapshot", 0.0, time.monotonic()
        try:
            while self._lifecycle.stop_reason is None:
                self._follow_all(following, outgoing, feeds)
                now = time.monotonic()
                is_ready = name == "update" or feeds.names >= set(following) or now - began >= SNAPSHOT_SECONDS
                if is_ready and feeds.names and (feeds.has_news or now - sent_at >= QUIET_SECONDS):
                    yield encode(name, feeds.take())
                    name, sent_at = "update", now
                await asyncio.sleep(INTERVAL_SECONDS)
        finally:
            for task in following.values():
                task.cancel()
            if following:
                await asyncio.wait(following.values())

    def _follow_all(self, following: dict[str, asyncio.Task[None]], outgoing: Outgoing, feeds: MergedFeeds) -> None:
        """Follow each replica that answers, and no other one."""
        reachable = {member.name: member for member in self._fleet.reachable}
        for name in [name for name in following if name not in reachable]:
            following.pop(name).cancel()
            feeds.remove(name)
        for name, member in reachable.items():
            if name not in following or following[name].done():  # it was lost for a moment
                following[name] = asyncio.create_task(_follow(member, outgoing, feeds), name="darts-live")


async def _follow(member: Member, outgoing: Outgoing, feeds: MergedFeeds) -> None:
    """Read a replica's feed, again and again while the replica answers."""
    while member.state in REACHABLE:
        try:
            await _read(member, outgoing, feeds)
        except (ReplicaFailure, TimeoutError, ValueError) as error:
            logger.debug("the feed of %s ended: %r", member.name, error)
        feeds.remove(member.name)
        await asyncio.sleep(RETRY_SECONDS)


async def _read(member: Member, outgoing: Outgoing, feeds: MergedFeeds) -> None:
    """
    Raises:
        ReplicaFailure, TimeoutError
        ValueError: an event is no JSON.
    """
    loop = asyncio.get_running_loop()
    # Not `in_use`: a replica that leaves must not wait until its viewers have.
    async with asyncio.timeout(SILENT_SECONDS) as silent, opened(member.replica, outgoing) as answer:
        if answer.status != HTTPStatus.OK:
            return
        async for event in read_events(answer.chunks()):
            data: Mapping[str, Any] = event.json()
            feeds.add(member.name, data, is_whole=event.name == "snapshot")
            silent.reschedule(None)
            await feeds.wait_for_room()
            silent.reschedule(loop.time() + SILENT_SECONDS)
