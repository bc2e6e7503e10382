"""New weights for all replicas as one update: staged everywhere, then switched; if one refuses none switches."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import parse_qs

from starlette.requests import Request
from starlette.responses import Response

from darts_server.exceptions import InvalidRequest, ReplicaLost, ReplicasDiffer, UpdateRunning
from darts_server.http.body import chunks_of
from darts_server.ingress.call import to_response
from darts_server.ingress.everyone.broadcast import BroadcastResult, broadcast, broadcast_each
from darts_server.ingress.everyone.copies import Copies
from darts_server.ingress.everyone.hold import Hold
from darts_server.ingress.everyone.switch import MODEL, Staged, Switch, control, refusals_of, required, staged_by
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member, State
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.routing.router import no_replica

FALSE = ("false", "0", "no", "off", "f", "n")
"""As the servers read it."""
MAX_BYTES = 1 << 50
"""The servers limit what is pushed, by the size of their model."""
DROP_SECONDS = 60.0
JUDGE_SECONDS = 60.0
NEVER_STAGED = "of-no-server"
"""No id of staged weights. To remove them a caller needs the permission that an update needs."""


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
        result = await broadcast(members, control(outgoing, "DELETE", NEVER_STAGED), JUDGE_SECONDS)
        for answer in result.refused.values():
            if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                response = to_response(answer)
                response.headers["Connection"] = "close"  # otherwise the rest of the body would be read and discarded
                return response
        if result.failures:
            raise ReplicaLost(
                f"nothing was changed, as some servers do not answer: {refusals_of(result, only_lost=True)}"
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
                return await self._update_all(outgoing, pushed)
        finally:
            self._is_updating = False

    async def _update_all(self, outgoing: Outgoing, pushed: AsyncIterator[bytes] | None) -> Response:
        await asyncio.gather(*map(self._fleet.check, self._fleet.members))  # one may be stopping, or was lost just now
        members = self._members(outgoing)
        staged: list[Staged] = []
        switch: Switch | None = None
        try:
            result = await (self._stage(members, outgoing) if pushed is None else self._push(members, outgoing, pushed))
            staged += staged_by(result, members)
            members = await required(self._fleet, members, result)
            if not members or not result.accepted.keys() >= {member.name for member in members}:
                return _not_staged(result, members)
            async with self._hold.held():
                switch = Switch(self._fleet, outgoing, staged)
                return await switch.run()
        finally:
            await self._drop(outgoing, staged if switch is None else switch.staged)
            await asyncio.gather(*map(self._fleet.check, members))
            if switch is not None:
                self._fleet.joining.settle(members, switch.agreeing)

    def _members(self, outgoing: Outgoing) -> list[Member]:
        """All replicas: one that is left out would go on with other weights. Those that join get the weights then.

        Those that stop in order are left out: they refuse weights, and leave.
        """
        if not self._fleet.reachable:
            raise no_replica(self._fleet)
        if missing := [member for member in self._fleet.unreachable if not member.is_stopping]:
            raise ReplicaLost(
                f"the weights were not changed, because {', '.join(m.name for m in missing)} cannot be reached and "
                "would go on with the old ones; restart it, or the ingress without it in --server-list"
            )
        members = [
            member for member in self._fleet.members if member.state is not State.JOINING and not member.is_stopping
        ]
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

    async def _drop(self, outgoing: Outgoing, staged: Sequence[Staged]) -> None:
        """Remove staged weights. What cannot be removed expires."""
        await broadcast_each([(each.member, control(outgoing, "DELETE", each.id)) for each in staged], DROP_SECONDS)


def _not_staged(result: BroadcastResult, members: Sequence[Member]) -> Response:
    """Answer an update that was not staged everywhere."""
    if len(result.refused) == len(members):
        return to_response(next(iter(result.refused.values())))
    raise ReplicasDiffer(f"no server has switched, as some did not take the weights: {refusals_of(result)}")


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
