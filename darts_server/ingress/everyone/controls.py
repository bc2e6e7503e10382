"""Requests that concern all replicas: pause, resume, sleep, settings, and what describes them."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response

from darts_server.exceptions import ReplicasDiffer
from darts_server.ingress.call import Call, to_response
from darts_server.ingress.everyone.broadcast import broadcast
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.whole import WholeAnswer
from darts_server.ingress.routing.router import no_replica

logger = logging.getLogger(__name__)

UNREACHABLE = "X-Darts-Unreachable"
"""Header with the names of replicas that could not be reached."""


class Controls:
    """Carries requests out on all replicas."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def send_to_all(self, call: Call) -> Response:
        """Send a request to all replicas, and merge their answers.

        Raises:
            ReplicasDiffer: some have carried it out, and others not.
            NoReplica
        """
        reachable = self._fleet.reachable
        if not reachable:
            raise no_replica(self._fleet)
        result = await broadcast(reachable, call.outgoing)
        refusals = result.failures | {name: message_of(answer) for name, answer in result.refused.items()}
        if result.accepted and refusals:
            raise ReplicasDiffer(
                f"{', '.join(result.accepted)} carried it out, others did not: "
                + "; ".join(f"{name}: {why}" for name, why in refusals.items())
            )
        if not result.answers:
            raise no_replica(self._fleet)
        response = merge(result.answers)
        if missed := [member.name for member in self._fleet.unreachable]:
            logger.warning("%s %s was not sent to %s", call.outgoing.method, call.path, ", ".join(missed))
            response.headers[UNREACHABLE] = ", ".join(missed)
        return response


def merge(answers: Mapping[str, WholeAnswer]) -> Response:
    """Return one answer for all: the first, if they are alike; otherwise an object with that of each replica.

    Objects keep the fields in which they are alike, beside ``replicas``; of ``version`` the lowest.
    """
    first = next(iter(answers.values()))
    if all(answer.body == first.body for answer in answers.values()) or first.status >= 400:
        return to_response(first)
    bodies = {name: _json(answer.body) for name, answer in answers.items()}
    merged: dict[str, Any] = {"replicas": bodies}
    if all(isinstance(body, dict) for body in bodies.values()):
        head, *others = bodies.values()
        merged |= {name: value for name, value in head.items() if all(o.get(name) == value for o in others)}
        versions = [body.get("version") for body in bodies.values()]
        if all(isinstance(version, int) for version in versions):
            merged["version"] = min(versions)
    return JSONResponse(merged, first.status)


def message_of(answer: WholeAnswer) -> str:
    """Return the message of an error."""
    with suppress(ValueError, KeyError, TypeError):
        return f"{answer.status} {json.loads(answer.body)['error']['message']}"
    return f"status {answer.status}"


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
