"""New weights for all replicas as one update: staged everywhere, then switched; if one refuses none switches."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from darts_server.exceptions import InvalidRequest, ReplicaLost, ReplicasDiffer, UpdateRunning
from darts_server.http.body import chunks_of
from darts_server.ingress.call import to_response
from darts_server.ingress.everyone.broadcast import BroadcastResult, broadcast, broadcast_each
from darts_server.ingress.everyone.controls import merge, message_of
from darts_server.ingress.everyone.copies import Copies
from darts_server.ingress.everyone.hold import Hold
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member, State
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.routing.router import no_replica

logger = logging.getLogger(__name__)

MODEL = "/darts/v1/weights"
STAGED = f"{MODEL}/staged"
FALSE = ("false", "0", "no", "off", "f", "n")
"""As the servers read it."""
MAX_BYTES = 1 << 50
"""The servers limit what is pushed, by the size of their model."""
DROP_SECONDS = 60.0
JUDGE_SECONDS = 60.0
NEVER_STAGED = "of-no-server"
"""No id of staged weights. To remove them a caller needs the permission that an update needs."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that a replica has staged."""

    member: Member
    id: str
    version: int


class Weights:
    """Updates weights."""

    def __init__(self, fleet: Fleet, hold: Hold) -> None:
        self._fleet = fleet
        self._hold = hold
        self._is_updating = False

    async def push(self, request: Request, outgoing: Outgoing) -> Response:
        """Update to the weights in a body, which is sent to all replicas while it arrives."""
        return await self._update_whole(outgoing, chunks_of(request, MAX_BYTES))

    async def load(self, outgoing: Outgoing) -> Response:
        """Update to the weights that a body names."""
        return await self._update_whole(outgoing, None)

    async def _update_whole(self, outgoing: Outgoing, pushed: AsyncIterator[bytes] | None) -> Response:
        """Update, to the end also if the caller disconnects: servers go on with what they have begun."""
        members = self._members(outgoing)
        if (refusal := await self._refusal(members, outgoing)) is not None:
            return refusal
        return await self._fleet.finish(self._update(outgoing, pushed))

    async def _refusal(self, members: Sequence[Member], outgoing: Outgoing) -> Response | None:
        """Return the answer to a caller who may not update, before a body is read or other updates are kept out.

        Servers judge callers; what is sent to them here changes nothing.
        """
        result = await broadcast(members, _control(outgoing, "DELETE", NEVER_STAGED), JUDGE_SECONDS)
        for answer in result.refused.values():
            if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                response = to_response(answer)
                response.headers["Connection"] = "close"  # otherwise the rest of the body would be read and discarded
                return response
        if result.failures:
            raise ReplicaLost(
                f"nothing was changed, as some servers do not answer: {_refusals(result, only_lost=True)}"
            )
        return None

    async def _update(self, outgoing: Outgoing, pushed: AsyncIterator[bytes] | None) -> Response:
        """
        Raises:
            UpdateRunning: another update is in progress.
            ReplicasDiffer: the message says which replica serves what.
        """
        if self._is_updating:
            raise UpdateRunning("another update runs through this ingress; send this one when it has ended")
        self._is_updating = True
        try:
            async with self._fleet.changing:  # also a replica that joins may change its weights
                return await self._update_all(self._members(outgoing), outgoing, pushed)
        finally:
            self._is_updating = False

    async def _update_all(
        self, members: Sequence[Member], outgoing: Outgoing, pushed: AsyncIterator[bytes] | None
    ) -> Response:
        staged: list[Staged] = []
        is_switched = False
        try:
            result = await (self._stage(members, outgoing) if pushed is None else self._push(members, outgoing, pushed))
            staged += _staged(result, members)
            if len(staged) < len(members):
                return _not_staged(result, members)
            async with self._hold.held():
                response = await self._switch(outgoing, staged)
                is_switched = True
                return response
        finally:
            await self._drop(outgoing, staged)
            await asyncio.gather(*map(self._fleet.check, members))
            if is_switched:
                self._fleet.joining.updated(members)

    def _members(self, outgoing: Outgoing) -> list[Member]:
        """All replicas: one that is left out would go on with other weights. Those that join get the weights then."""
        if not self._fleet.reachable:
            raise no_replica(self._fleet)
        if missing := self._fleet.unreachable:
            raise ReplicaLost(
                f"the weights were not changed, because {', '.join(m.name for m in missing)} cannot be reached and "
                "would go on with the old ones; restart it, or the ingress without it in --server-list"
            )
        members = [member for member in self._fleet.members if member.state is not State.JOINING]
        if not members:
            raise no_replica(self._fleet)
        outdated = [member.name for member in members if self._fleet.joining.misses_updates(member)]
        if outdated and not _is_full_set(outgoing):
            raise ReplicaLost(
                f"the weights were not changed, because {', '.join(outdated)} has not those that these would be added "
                "to; push a full set"
            )
        return members

    async def _stage(self, members: Sequence[Member], outgoing: Outgoing) -> BroadcastResult:
        assert isinstance(outgoing.body, bytes)
        try:
            fields = json.loads(outgoing.body)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise InvalidRequest("body", "must be a JSON object; correct it")
        _check_unstaged(fields)
        return await broadcast(members, replace(outgoing, body=json.dumps({**fields, "stage": True}).encode()))

    async def _push(self, members: Sequence[Member], outgoing: Outgoing, body: AsyncIterator[bytes]) -> BroadcastResult:
        path, _, query = outgoing.target.partition("?")
        _check_unstaged({part.partition("=")[0]: part for part in query.split("&")})
        target = f"{path}?{query}&stage=true" if query else f"{path}?stage=true"
        copies = Copies(body, len(members))

        async def push(number: int, member: Member) -> BroadcastResult:
            try:
                return await broadcast([member], replace(outgoing, target=target, body=copies.copy(number)))
            finally:
                copies.drop(number)

        reading = asyncio.create_task(copies.run())
        try:
            each = await asyncio.gather(*(push(number, member) for number, member in enumerate(members)))
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading  # raises what was wrong with the body
        return BroadcastResult(
            {name: answer for one in each for name, answer in one.answers.items()},
            {name: why for one in each for name, why in one.failures.items()},
        )

    async def _switch(self, outgoing: Outgoing, staged: list[Staged]) -> Response:
        """Switch all replicas to what they have staged, or none.

        ``staged``: then has what they have staged still, and need no more.
        """
        version = max(each.version for each in staged)
        query = f"version={version}&keep_previous=true"
        result = await broadcast_each(
            [(each.member, _control(outgoing, "POST", f"{each.id}:switch?{query}")) for each in staged]
        )
        members = [each.member for each in staged]
        previous = _staged(result, members)
        if len(result.accepted) == len(staged):
            staged[:] = previous
            return merge({name: _without_staged(answer) for name, answer in result.accepted.items()})
        staged[:] = [each for each in staged if each.member.name not in result.accepted]
        back = await broadcast_each(
            [(each.member, _control(outgoing, "POST", f"{each.id}:switch")) for each in previous]
        )
        refusals = _refusals(result)
        stuck = [name for name in result.accepted if name not in back.accepted]
        staged += _staged(back, members)
        if stuck:
            logger.error("%s serve version %d of the weights, the other servers do not", ", ".join(stuck), version)
            raise ReplicasDiffer(
                f"{', '.join(stuck)} serve version {version}, and could not go back; the others kept theirs, as some "
                f"could not switch ({refusals}); send a full set of weights"
            )
        raise ReplicasDiffer(f"all servers serve the weights that they had, as some could not switch: {refusals}")

    async def _drop(self, outgoing: Outgoing, staged: Sequence[Staged]) -> None:
        """Remove staged weights. What cannot be removed expires."""
        await broadcast_each([(each.member, _control(outgoing, "DELETE", each.id)) for each in staged], DROP_SECONDS)


def _control(outgoing: Outgoing, method: str, what: str) -> Outgoing:
    headers = [(name, value) for name, value in outgoing.headers if name.lower() != b"content-type"]
    return Outgoing(method, f"{STAGED}/{what}", headers)


def _staged(result: BroadcastResult, members: Sequence[Member]) -> list[Staged]:
    """What the replicas that accepted a request have staged."""
    found = []
    for member in members:
        if (answer := result.accepted.get(member.name)) is not None:
            body = json.loads(answer.body)["staged"]
            if body is not None:
                found.append(Staged(member, body["id"], body["version"]))
    return found


def _without_staged(answer: Any) -> Any:
    body = json.loads(answer.body)
    return replace(answer, body=json.dumps({**body, "staged": None}).encode())


def _not_staged(result: BroadcastResult, members: Sequence[Member]) -> Response:
    """Answer an update that was not staged everywhere."""
    if len(result.refused) == len(members):
        return to_response(next(iter(result.refused.values())))
    raise ReplicasDiffer(f"no server has switched, as some did not take the weights: {_refusals(result)}")


def _refusals(result: BroadcastResult, *, only_lost: bool = False) -> str:
    refused = result.failures | ({} if only_lost else {name: message_of(each) for name, each in result.refused.items()})
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def _is_full_set(outgoing: Outgoing) -> bool:
    """Whether an update replaces all of the model's weights."""
    path, _, query = outgoing.target.partition("?")
    if path != MODEL:
        return False
    if isinstance(outgoing.body, bytes) and outgoing.body:
        with suppress(ValueError, RecursionError, AttributeError):
            return not json.loads(outgoing.body).get("partial")
    return all(value.lower() in FALSE for value in parse_qs(query).get("partial", []))


def _check_unstaged(fields: Mapping[str, object]) -> None:
    for name in ("stage", "expires_after"):
        if name in fields:
            raise InvalidRequest(name, "is for one server: an ingress stages weights on all servers itself; omit it")
