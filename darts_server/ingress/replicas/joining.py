"""Replicas that join others get their weights before they serve."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus

from darts_server.ingress.replicas.member import Member, ServedWeights, State
from darts_server.ingress.replicas.replica import Headers, Outgoing, ReplicaFailure, value_of
from darts_server.ingress.replicas.whole import WholeAnswer, fetch, opened

logger = logging.getLogger(__name__)

HEADER = b"x-darts-weights"
VERSION_HEADER = b"x-darts-weight-version"
WEIGHTS = "/darts/v1/weights"
TENSORS = f"{WEIGHTS}/tensors"
STAGED = f"{WEIGHTS}/staged"
RETRY_SECONDS = 30.0
"""Until weights are copied again to a replica that did not get them, at least; otherwise twice as long as that took: a
trainer that updates more often than they can be copied updates the replica meanwhile, with the others."""
STAGED_SECONDS = 60
"""That a copy stays staged at most: if neither switched nor removed, it would keep updates from the server."""
DROP_SECONDS = 5.0
FIRST_SECONDS = 30.0
"""After its start the ingress waits for servers that do not answer: they may have newer weights than the others."""
KEY_REMEDY = "set DARTS_ADMIN_API_KEY for the ingress, with which it copies them, or push a full set"


class CopyFailed(Exception):
    """A replica could not get the weights of another one."""


class Joining:
    """Admits replicas whose weights are those of the others, and copies these to the ones that serve others.

    Args:
        members: all replicas, as they come and go.
        check: polls a replica now.
        changing: held while the weights of replicas change, or are compared.
        key: API key that may update weights; empty if none is needed.
    """

    def __init__(
        self,
        members: Sequence[Member],
        check: Callable[[Member], Awaitable[None]],
        changing: asyncio.Lock,
        key: str = "",
    ) -> None:
        self.current: ServedWeights | None = None
        """What the admitted replicas were last seen to serve."""
        self.switches = 0
        """Updates that began to switch: a failed one may have changed what a version stands for."""
        self._members = members
        self._check = check
        self._changing = changing
        self._headers: Headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._retry_at: dict[str, float] = {}
        self._copies: dict[str, asyncio.Task[None]] = {}
        self._first_until: float | None = None

    def read(self, member: Member, health: WholeAnswer) -> None:
        """Note what a replica says of its weights. One that is stopping says nothing of them."""
        if health.status == HTTPStatus.OK:
            member.weights = read_weights(health.headers)
        if member.weights is not None and member.is_admitted:
            self.current = member.weights

    async def run(self, interval: float) -> None:
        """Admit replicas until cancelled. ``interval``: seconds between two attempts."""
        try:
            while True:
                try:
                    await self.admit()
                except Exception:  # without this no replica would join any more
                    logger.exception("replicas that join could not be compared with the others")
                await asyncio.sleep(interval)
        finally:
            for task in list(self._copies.values()):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def admit(self) -> None:
        """Admit the replicas that serve what the others do, and begin to copy weights to those that do not."""
        if not self._waiting():
            return
        async with self._changing:
            await asyncio.gather(*map(self._check, [*self._references(), *self._waiting()]))
            if not self._references():
                self._admit_first()
            for member in self._waiting():
                self._compare(member)

    def settle(self, members: Sequence[Member], agreeing: Sequence[Member]) -> None:
        """End an update of these members: the weights of those that agree count.

        The others are admitted again when theirs are the same, and only as long as they are. Where none agree, the
        newest weights count.
        """
        had_admitted = any(member.weights is not None and member.is_admitted for member in self._members)
        for member in self._members:
            if member not in agreeing:
                self._withdraw(member)
        known = [member for member in agreeing if member.weights is not None]
        for member in known:
            member.pinned = None
        if all(member in agreeing or member.is_stopping for member in members):
            if len({(member.weights.model, member.weights.loras) for member in known if member.weights}) == 1:
                for member in known:
                    if not member.is_admitted:
                        self._admit(member)
        elif admitted := [member for member in known if member.is_admitted]:
            self.current = admitted[0].weights
        elif had_admitted:
            self._forget()

    def misses_updates(self, member: Member) -> bool:
        """Whether a replica serves another version of the model than the others, so that only a full set helps."""
        served, current = member.weights, self.current
        if served is None or current is None:
            return False
        if served.is_initial != current.is_initial and member.is_admitted:
            return served.version != current.version  # one that went back to the weights of its start
        return served.model != current.model

    def _forget(self) -> None:
        self.current = self._first_until = None

    def _withdraw(self, member: Member) -> None:
        if member.weights is None or not member.is_admitted:
            return
        member.admitted, member.pinned = "", member.weights
        if member.serves:
            member.change(State.JOINING, "an update failed, and its weights are compared")

    def _waiting(self) -> list[Member]:
        return [member for member in self._members if member.state in (State.JOINING, State.OUTDATED)]

    def _references(self) -> list[Member]:
        """The replicas whose weights are the current ones; those that serve come first."""
        usable = [
            m for m in self._members if m.admitted and m.is_admitted and m.state in (State.SERVING, State.UNHEALTHY)
        ]
        return sorted(usable, key=lambda member: not member.serves)

    def _admit_first(self) -> None:
        """Choose the weights that count where nothing is known: the newest.

        So it is after the ingress's start, and if an update failed so that no server is certain to serve the earlier
        ones.
        """
        if self.current is not None and all(member.pinned is not None for member in self._members):
            self._forget()
        if self.current is not None or self._waits_for_others():
            return
        known = [(member, member.weights) for member in self._waiting() if member.weights is not None]
        if known:
            member, _ = max(known, key=lambda each: (*each[1].rank, each[1].version, each[1].loras != "none"))
            self._admit(member)

    def _waits_for_others(self) -> bool:
        """Whether others may still say that they have newer weights. One that refuses connections has none."""
        if any(member.state is State.UNKNOWN for member in self._members):
            return True
        if self._first_until is None:
            self._first_until = time.monotonic() + FIRST_SECONDS
        silent = any(member.state is State.LOST and member.missed for member in self._members)
        return silent and time.monotonic() < self._first_until

    def _compare(self, member: Member) -> None:
        """Admit a replica, or let it get the current weights."""
        served, current = member.weights, self.current
        if served is None or current is None or member.name in self._copies:
            return
        if (served.model, served.loras) == (current.model, current.loras):
            self._admit(member)
            return
        reference = next(iter(self._references()), None)
        others = f"it serves {served} of the weights, and the others {current}"
        if served.model == current.model:
            member.change(State.OUTDATED, "its LoRA adapters are not those of the others: push them again")
        elif reference is None:
            member.change(
                State.OUTDATED, f"it serves {served} of the weights, and {current} is on no server: push a full set"
            )
        elif served.rank > current.rank and member.pinned is None:  # never replaced unasked
            member.change(
                State.OUTDATED, f"{others}, which are older: push a full set, or restart the ingress to use the newer"
            )
        elif time.monotonic() >= self._retry_at.get(member.name, 0.0):
            member.change(State.JOINING, others)
            task = self._copies[member.name] = asyncio.create_task(self._copy(reference, member, others))
            task.add_done_callback(lambda _: self._copies.pop(member.name, None))

    def _admit(self, member: Member) -> None:
        assert member.weights is not None
        member.admitted, self.current = member.weights.start, member.weights
        if member.pinned is not None:
            is_same_start = member.pinned.start == member.weights.start
            member.pinned = member.weights if is_same_start else None
        self._retry_at.pop(member.name, None)
        member.change(State.SERVING)
        logger.info("replica %s serves, with %s of the weights", member.name, member.weights)

    async def _copy(self, source: Member, target: Member, others: str) -> None:
        """Copy the weights of a replica to another one, and admit that."""
        logger.info("replica %s gets the weights of %s: %s", target.name, source.name, others)
        began, switches = time.monotonic(), self.switches
        try:
            async with source.in_use(), target.in_use():
                staged, version = await self._stage(source, target)
            async with self._dropping(target, staged), self._changing:
                await self._check(source)
                current = source.weights
                is_settled = source.is_admitted and switches == self.switches
                if not is_settled or current is None or current.version != version:
                    raise CopyFailed("they were updated meanwhile")
                answer = await self._control(target, "POST", f"{staged}:switch")
                if answer.status != HTTPStatus.OK:
                    raise CopyFailed(_message(answer))
                await self._check(target)
        except (ReplicaFailure, CopyFailed) as error:
            now = time.monotonic()
            self._retry_at[target.name] = now + max(RETRY_SECONDS, 2 * (now - began))
            if target.state is State.JOINING:
                target.change(State.OUTDATED, f"{others}, which could not be copied to it: {error}")
            logger.warning("the weights of %s could not be copied to %s: %s", source.name, target.name, error)

    async def _stage(self, source: Member, target: Member) -> tuple[str, int]:
        """Send a replica's weights to another one, which does not serve them yet. Returns their id and version."""
        async with opened(source.replica, Outgoing("GET", TENSORS, self._headers)) as answer:
            version = value_of(answer.headers, VERSION_HEADER).decode()
            if answer.status != HTTPStatus.OK or not version.isdecimal():
                body = b"".join([chunk async for chunk in answer.chunks()])
                raise CopyFailed(_message(WholeAnswer(answer.status, answer.headers, body)))
            query = f"stage=true&version={version}&expires_after={STAGED_SECONDS}"
            request = Outgoing("PUT", f"{WEIGHTS}?{query}", self._headers, answer.chunks())
            taken = await fetch(target.replica, request)
        if taken.status != HTTPStatus.OK:
            raise CopyFailed(_message(taken))
        return str(json.loads(taken.body)["staged"]["id"]), int(version)

    @asynccontextmanager
    async def _dropping(self, target: Member, staged: str) -> AsyncIterator[None]:
        """Remove a copy that was not switched when this block ends: it would keep updates from the server.

        What cannot be removed expires.
        """
        try:
            yield
        except BaseException:
            with suppress(ReplicaFailure, TimeoutError):
                async with asyncio.timeout(DROP_SECONDS):
                    await self._control(target, "DELETE", staged)
            raise

    async def _control(self, target: Member, method: str, what: str) -> WholeAnswer:
        async with target.in_use():
            return await fetch(target.replica, Outgoing(method, f"{STAGED}/{what}", self._headers))


def read_weights(headers: Headers) -> ServedWeights | None:
    """Read what a server's health says of its weights; ``None`` if it says nothing that is understood."""
    text = value_of(headers, HEADER).decode("latin-1")
    fields = dict(part.strip().partition("=")[::2] for part in text.split(";"))
    if not fields.get("start") or not fields.get("version", "").isdecimal():
        return None
    return ServedWeights(
        fields["start"], int(fields["version"]), fields.get("source") == "start", fields.get("loras", "")
    )


def _message(answer: WholeAnswer) -> str:
    message = f"status {answer.status}"
    with suppress(ValueError, KeyError, TypeError):
        message = str(json.loads(answer.body)["error"]["message"])
    refused = answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
    return f"{message}; {KEY_REMEDY}" if refused else message
