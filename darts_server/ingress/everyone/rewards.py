"""``POST /darts/v1/rewards``: every reward goes to all replicas; the one that returned its trajectory keeps it."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

from starlette.responses import JSONResponse, Response

from darts_server.exceptions import ReplicaLost
from darts_server.http.body import parse_body
from darts_server.http.resources.rewards import RewardsIn
from darts_server.ingress.call import Call, to_response
from darts_server.ingress.everyone.broadcast import BroadcastResult, broadcast
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.whole import WholeAnswer
from darts_server.ingress.routing.router import no_replica

PER_REQUEST = 100
"""Servers name so many unknown rewards of a request, and which ones all of them call unknown must be exact."""
AT_ONCE = 4
REWARDS_SECONDS = 60.0


class Rewards:
    """Distributes rewards."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def report(self, call: Call) -> Response:
        """Report rewards to all replicas, and count them as one server would.

        Raises:
            InvalidRequest: nothing was reported.
            ReplicaLost: no other replica knows some rewards, and one could not be reached.
        """
        body = await parse_body(RewardsIn, call.body, "rewards")
        reachable = self._fleet.reachable
        if not reachable:
            raise no_replica(self._fleet)
        rewards = [each.model_dump(mode="json", exclude_unset=True) for each in body.rewards]
        parts = [rewards[start : start + PER_REQUEST] for start in range(0, len(rewards), PER_REQUEST)] or [[]]
        slots = asyncio.Semaphore(AT_ONCE)

        async def send(part: list[dict[str, object]]) -> BroadcastResult:
            async with slots:
                return await self._send(reachable, call, part)

        results = await asyncio.gather(*(send(part) for part in parts))
        refused = [answer for each in results for answer in each.refused.values()]
        if refused:
            return to_response(refused[0])
        self._check_complete(results)
        return JSONResponse(_counts(results))

    async def _send(self, members: Sequence[Member], call: Call, part: list[dict[str, object]]) -> BroadcastResult:
        headers = [(name, value) for name, value in call.outgoing.headers if name.lower() != b"content-length"]
        outgoing = replace(call.outgoing, body=json.dumps({"rewards": part}).encode(), headers=headers)
        return await broadcast(members, outgoing, REWARDS_SECONDS)

    def _check_complete(self, results: Sequence[BroadcastResult]) -> None:
        missing = {name for each in results for name in each.failures} | {m.name for m in self._fleet.unreachable}
        if missing and any(_unknown(list(each.answers.values())) for each in results):
            raise ReplicaLost(
                f"some rewards are of no server that answers, and {', '.join(sorted(missing))} could not be reached; "
                "send all again later: a trajectory keeps its first reward"
            )


def _counts(results: Sequence[BroadcastResult]) -> dict[str, object]:
    matched = repeated = 0
    unknown: list[int] = []
    for number, each in enumerate(results):
        bodies = [json.loads(answer.body) for answer in each.answers.values()]
        matched += sum(body["matched"] for body in bodies)
        repeated += sum(body["repeated"] for body in bodies)
        unknown += [number * PER_REQUEST + index for index in _unknown(list(each.answers.values()))]
    return {
        "matched": matched,
        "repeated": repeated,
        "unknown": len(unknown),
        "unknown_indices": unknown[:PER_REQUEST],
    }


def _unknown(answers: Sequence[WholeAnswer]) -> list[int]:
    """Return the indices of the rewards that every replica calls unknown."""
    found = [set(json.loads(answer.body)["unknown_indices"]) for answer in answers]
    return sorted(set.intersection(*found)) if found else []
