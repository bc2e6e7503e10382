"""Replicas switch to the weights that they have staged; if one cannot, the others go back where that is possible."""

import asyncio
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from starlette.responses import Response

from darts_server.exceptions import ReplicasDiffer
from darts_server.ingress.everyone.broadcast import BroadcastResult, broadcast_each
from darts_server.ingress.everyone.controls import merge, message_of
from darts_server.ingress.replicas.fleet import Fleet
from darts_server.ingress.replicas.member import Member
from darts_server.ingress.replicas.replica import Outgoing
from darts_server.ingress.replicas.whole import WholeAnswer

logger = logging.getLogger(__name__)

MODEL = "/darts/v1/weights"
STAGED = f"{MODEL}/staged"
KEEP = "keep_previous"


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights that a replica has staged."""

    member: Member
    id: str
    version: int


class Switch:
    """Switches replicas to what they have staged.

    ``staged``: what they have staged still, and need no more after `run`. ``agreeing``: those that are certain to
    serve the same weights after it: the new ones, or the earlier ones if the update failed.
    """

    def __init__(self, fleet: Fleet, outgoing: Outgoing, staged: Sequence[Staged]) -> None:
        self.staged = list(staged)
        self.agreeing: list[Member] = []
        self._fleet = fleet
        self._outgoing = outgoing
        self._members = [each.member for each in staged]
        self._version = max(each.version for each in staged)
        self._before = {member.name: member.weights for member in self._members}

    async def run(self) -> Response:
        """
        Raises:
            ReplicasDiffer: some could not switch. The message says which replica serves what.
        """
        self._fleet.joining.switches += 1
        result = await self._forward()
        previous = staged_by(result, self._members)
        self.staged = [each for each in self.staged if each.member.name not in result.accepted]
        accepted = [member for member in self._members if member.name in result.accepted]
        members = await required(self._fleet, self._members, result)
        if accepted and len(members) == len(accepted):
            self.agreeing = accepted
            self.staged += previous
            return merge({name: _without_staged(answer) for name, answer in result.accepted.items()})
        return await self._undo(result, previous)

    async def _forward(self) -> BroadcastResult:
        """Switch all. The earlier weights are kept, to go back to them, where that is possible.

        It is not for LoRA adapters, and for weights that are in no file.
        """
        is_model = self._outgoing.target.partition("?")[0] == MODEL
        result = await self._switch(self.staged, keeps=is_model)
        cannot_keep = [each for each in self.staged if _cannot_keep(result.refused.get(each.member.name))]
        if not cannot_keep or len(result.accepted) + len(cannot_keep) < len(self.staged):
            return result
        again = await self._switch(cannot_keep, keeps=False)
        return BroadcastResult(result.answers | again.answers, again.failures)

    async def _switch(self, staged: Sequence[Staged], *, keeps: bool) -> BroadcastResult:
        query = f"version={self._version}" + (f"&{KEEP}=true" if keeps else "")
        return await broadcast_each(
            [(each.member, control(self._outgoing, "POST", f"{each.id}:switch?{query}")) for each in staged]
        )

    async def _undo(self, result: BroadcastResult, previous: Sequence[Staged]) -> Response:
        """Let replicas that have switched go back. If some cannot, and most have switched, the new weights count.

        Raises:
            ReplicasDiffer
        """
        switched = [member for member in self._members if member.name in result.accepted]
        unchanged = [m for m in self._members if m.name in result.refused and self._is_as_before(m)]
        refusals, lost = refusals_of(result), ", ".join(result.failures)
        if len(previous) < len(switched) and len(switched) >= len(unchanged):
            self.agreeing = switched
            self.staged += previous
            raise ReplicasDiffer(
                f"{_names(switched)} serve version {self._version}, and cannot go back; others did not switch: "
                f"{refusals}; send the weights again"
            )
        back = await broadcast_each(
            [(each.member, control(self._outgoing, "POST", f"{each.id}:switch")) for each in previous]
        )
        self.staged += staged_by(back, self._members)
        await asyncio.gather(*map(self._fleet.check, switched))
        returned = [m for m in switched if m.name in back.accepted and self._is_as_before(m)]
        self.agreeing = unchanged + returned
        stuck = [member.name for member in switched if member.name not in back.accepted]
        if not stuck and not lost:
            raise ReplicasDiffer(f"all servers serve the weights that they had, as some could not switch: {refusals}")
        found = [f"{', '.join(stuck)} serve version {self._version}, and could not go back"] if stuck else []
        found += [f"{lost} did not answer, and may serve either"] if lost else []
        logger.error("after an update that failed servers may serve different weights: %s", "; ".join(found))
        raise ReplicasDiffer(
            f"{'; '.join(found)}; the others serve the weights that they had, as some could not switch ({refusals}); "
            "send a full set of weights"
        )

    def _is_as_before(self, member: Member) -> bool:
        before, now = self._before[member.name], member.weights
        if before is None or now is None:
            return before is now
        return (before.start, before.version, before.loras) == (now.start, now.version, now.loras)


async def required(fleet: Fleet, members: Sequence[Member], result: BroadcastResult) -> list[Member]:
    """Return the replicas that must accept a step of an update: all but those that stop in order, and leave."""
    accepted = result.accepted
    await asyncio.gather(*(fleet.check(member) for member in members if member.name not in accepted))
    return [member for member in members if member.name in accepted or not member.is_stopping]


def control(outgoing: Outgoing, method: str, what: str) -> Outgoing:
    """Return a request about staged weights, with the headers of an update."""
    headers = [(name, value) for name, value in outgoing.headers if name.lower() != b"content-type"]
    return Outgoing(method, f"{STAGED}/{what}", headers)


def staged_by(result: BroadcastResult, members: Sequence[Member]) -> list[Staged]:
    """Return what the replicas that accepted a request have staged."""
    found = []
    for member in members:
        if (answer := result.accepted.get(member.name)) is not None:
            body = json.loads(answer.body)["staged"]
            if body is not None:
                found.append(Staged(member, body["id"], body["version"]))
    return found


def refusals_of(result: BroadcastResult, *, only_lost: bool = False) -> str:
    """Say which replicas did not accept a request, and why."""
    refused = result.failures | ({} if only_lost else {name: message_of(each) for name, each in result.refused.items()})
    return "; ".join(f"{name}: {why}" for name, why in refused.items())


def _cannot_keep(refused: WholeAnswer | None) -> bool:
    """Whether a replica refused to switch only because the weights that it serves are in no file."""
    with suppress(ValueError, KeyError, TypeError):
        return refused is not None and json.loads(refused.body)["error"]["param"] == KEEP
    return False


def _without_staged(answer: WholeAnswer) -> WholeAnswer:
    body = json.loads(answer.body)
    return replace(answer, body=json.dumps({**body, "staged": None}).encode())


def _names(members: Sequence[Member]) -> str:
    return ", ".join(member.name for member in members)
