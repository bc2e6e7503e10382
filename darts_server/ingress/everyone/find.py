"""Find what one replica has, by its id: any ingress can, as it sends the request to all replicas."""

import json
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse, Response

from darts_server.exceptions import ReplicaLost
from darts_server.ingress.call import Call, to_response
from darts_server.ingress.everyone.broadcast import BroadcastResult, broadcast
from darts_server.ingress.everyone.search import Search
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.whole import WholeAnswer
from darts_server.ingress.routing.router import no_replica

FIND_SECONDS = 60.0


class Finder:
    """Answers requests that name something of one replica."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def find(self, call: Call) -> Response | None:
        """Pass on the answer of the replica that has it, while it arrives.

        Raises:
            NoReplica, ReplicaLost
        """
        result = await Search(call.outgoing, call.reply).run(self._reachable(), FIND_SECONDS)
        return None if result is None else to_response(self._one(result))

    async def find_groups(self, call: Call) -> Response:
        """Return the groups of an id. With a caller's own name they may be on several replicas."""
        result = await self._broadcast(call)
        if len(result.accepted) < 2:
            return to_response(self._one(result))
        found: list[Any] = []
        for answer in result.accepted.values():
            found += json.loads(answer.body)["groups"]
        return JSONResponse({"groups": found})

    async def find_prompt(self, call: Call) -> Response:
        """Return the statistics of a prompt, of the replica that has seen the most groups of it."""
        result = await self._broadcast(call)
        if not result.accepted:
            return to_response(self._one(result))
        return to_response(max(result.accepted.values(), key=lambda answer: int(json.loads(answer.body)["groups"])))

    async def _broadcast(self, call: Call) -> BroadcastResult:
        return await broadcast(self._reachable(), call.outgoing, FIND_SECONDS)

    def _reachable(self) -> list[Member]:
        reachable = self._fleet.reachable
        if not reachable:
            raise no_replica(self._fleet)
        return reachable

    def _one(self, result: BroadcastResult) -> WholeAnswer:
        """Return the answer of the replica that knows the id; else what one of those says that do not."""
        known = [answer for answer in result.answers.values() if answer.status != HTTPStatus.NOT_FOUND]
        if known:
            return min(known, key=lambda answer: answer.status)
        missing = result.failures | {member.name: member.detail for member in self._fleet.unreachable}
        if missing:
            raise ReplicaLost(
                f"no server that answers knows this id, and {', '.join(missing)} could not be reached; retry later: "
                "what a server knew is gone only if it was restarted"
            )
        return next(iter(result.answers.values()))
