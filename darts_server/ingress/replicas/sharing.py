"""Replicas learn from each other's groups: the ingress carries what each of them has observed to the others."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from itertools import islice
from typing import Any

from darts_server.ingress.replicas.feed import Feed
from darts_server.ingress.replicas.member import Member, State
from darts_server.ingress.replicas.replica import Headers, Outgoing, ReplicaFailure
from darts_server.ingress.replicas.whole import WholeAnswer, fetch, opened

logger = logging.getLogger(__name__)

PATH = "/darts/v1/observations"
STATE = "/darts/v1/state"
TAKES_PART = (State.SERVING, State.JOINING, State.OUTDATED, State.UNHEALTHY)
MAX_SERVERS = 64
"""That learn from each other: each keeps a position for every other one."""
MAX_GONE = 8
"""Servers that are gone, of which observations are kept for the others."""
REQUEST_SECONDS = 30.0
STATE_SECONDS = 600.0
RETRY_SECONDS = 30.0
"""After a refusal: a key is missing, or the server is of another version."""
PER_REQUEST = 256
PER_TURN = 32
"""Observations that are read in one turn of the event loop, which takes one or two milliseconds."""
REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
"""Statuses with which the same observations would be refused again."""
MAX_SINGLE = 8
"""Observations of a request that are found out one by one to be refused: more are due to the replica, not to them."""
MAX_COPY_WAIT = 60.0
"""Seconds between two attempts to copy state to a replica that is new; the first ones follow in seconds."""
WARN_COPIES = 3
"""Attempts that fail before that is a warning: servers start and stop."""
KEY_REMEDY = "set DARTS_ADMIN_API_KEY for the ingress"


class Refused(Exception):
    """A replica does not take part."""


class NoState(Exception):
    """A replica does not return its state."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a replica says of itself: ``life``, ``learned`` and ``is_new`` as in `ObservationsAnswer`."""

    life: str
    learned: Mapping[str, int]
    is_new: bool


@dataclass(slots=True)
class Copies:
    """The attempts to copy state to a replica in its present life. ``is_settled``: it has it, or does not take it."""

    failed: int = 0
    retry_at: float = 0.0
    is_settled: bool = False

    def fail(self, now: float) -> None:
        """Count an attempt that failed; the next one is made later."""
        self.failed += 1
        self.retry_at = now + min(2.0 ** (self.failed - 1), MAX_COPY_WAIT)


@dataclass(slots=True)
class Participant:
    """What is known of a replica. ``no_state_until``: when its state is read again, after that failed."""

    status: Status | None = None
    copies: Copies = field(default_factory=Copies)
    no_state_until: float = 0.0
    retry_at: float = 0.0
    refusal: str = ""
    skipped: dict[str, int] = field(default_factory=dict)
    """Numbers of the last observations that it refused, by life."""
    refused: dict[str, int] = field(default_factory=dict)
    """How many it refused since it has learned from others of that life: it counts them as missing then."""


class Sharing:
    """Carries observations between replicas, in the background.

    It keeps the newest ones of each replica. What a replica lacks is found by what it says it has learned, so it can be
    restarted, or lost for a while, and so can the ingress; several ingresses may do the same.

    Args:
        members: all replicas, as they come and go.
        key: API key that may read and send observations; empty if none is needed.
    """

    def __init__(self, members: Sequence[Member], key: str = "") -> None:
        self.report: Callable[[str, str, int], None] = lambda replica, outcome, count: None
        """Called with the name of a replica, and how many observations were ``learned``, ``repeated``, ``missed`` or
        ``refused`` by it."""
        self._members = members
        self._headers: Headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._feeds: dict[str, Feed] = {}
        self._participants: dict[str, Participant] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._has_warned = False

    async def run(self, interval: float) -> None:
        """Share until cancelled. ``interval``: seconds between two turns of a replica."""
        try:
            while True:
                self._start_turns()
                await asyncio.sleep(interval)
        finally:
            for name in list(self._running):
                await self.stop(name)

    async def stop(self, name: str) -> None:
        """End what is done with a replica, which leaves."""
        self._participants.pop(name, None)
        if (task := self._running.pop(name, None)) is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def _start_turns(self) -> None:
        if len(self._members) > MAX_SERVERS and not self._has_warned:
            self._has_warned = True
            logger.warning("only the first %d of %d replicas learn from each other", MAX_SERVERS, len(self._members))
        now = time.monotonic()
        for member in self._members[:MAX_SERVERS]:
            participant = self._participants.setdefault(member.name, Participant())
            is_free = member.name not in self._running and now >= participant.retry_at
            if is_free and member.state in TAKES_PART:
                task = self._running[member.name] = asyncio.create_task(self._turn(member, participant))
                task.add_done_callback(partial(self._end_turn, member.name))

    def _end_turn(self, name: str, task: asyncio.Task[None]) -> None:
        if self._running.get(name) is task:
            del self._running[name]

    async def _turn(self, member: Member, participant: Participant) -> None:
        """Read what a replica has observed, and send it what it lacks.

        One that is new gets nothing until it has another one's state: it takes none when it has learned anything.
        """
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._read(member, participant)
            participant.refusal = ""
            if (sources := self._sources_for(member, participant)) is not None:
                if not await self._copy_state(member, participant, sources):
                    return
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._read(member, participant)
            await self._send(member, participant)
        except (ReplicaFailure, TimeoutError) as error:
            logger.debug("observations were not exchanged with %s: %s", member.name, error)
        except Refused as error:
            participant.retry_at = time.monotonic() + RETRY_SECONDS
            if str(error) != participant.refusal:
                participant.refusal = str(error)
                logger.warning("replica %s does not learn from the others, nor they from it: %s", member.name, error)
        except Exception:  # without this a replica would be left out silently
            participant.retry_at = time.monotonic() + RETRY_SECONDS
            logger.exception("observations could not be exchanged with %s", member.name)

    # --- reading ------------------------------------------------------------

    async def _read(self, member: Member, participant: Participant) -> None:
        before = participant.status
        feed = None if before is None else self._feeds.get(before.life)
        while True:
            after = "" if feed is None else f"?after={feed.life}:{feed.last}"
            found = _json(await fetch(member.replica, Outgoing("GET", f"{PATH}{after}", self._headers)))
            status = _status(found)
            if before is not None and before.life != status.life:
                participant.copies = Copies()
            elif before is not None:  # a server that has learned from many drops those that it has for the longest time
                status = replace(status, learned={**before.learned, **status.learned})
            before = participant.status = status
            feed = self._feeds.setdefault(status.life, Feed(status.life))
            for place, each in enumerate(found["observations"]):
                if place % PER_TURN == PER_TURN - 1:
                    await asyncio.sleep(0)
                feed.add(each["number"], json.dumps(each, separators=(",", ":")))
            if len(found["observations"]) < PER_REQUEST:
                self._drop_gone()
                return

    def _drop_gone(self) -> None:
        """Drop the oldest observations of servers that are gone."""
        current = {each.status.life for each in self._participants.values() if each.status is not None}
        gone = [life for life in self._feeds if life not in current]
        for life in gone[: max(0, len(gone) - MAX_GONE)]:
            del self._feeds[life]

    # --- sending ------------------------------------------------------------

    async def _send(self, member: Member, participant: Participant) -> None:
        status = participant.status
        assert status is not None
        for feed in list(self._feeds.values()):
            if feed.life == status.life:
                continue
            known = max(status.learned.get(feed.life, 0), participant.skipped.get(feed.life, 0))
            lacking = feed.after(known)
            while some := list(islice(lacking, PER_REQUEST)):
                await self._send_some(member, participant, feed.life, some)

    async def _send_some(
        self, member: Member, participant: Participant, life: str, observations: Sequence[tuple[int, str]]
    ) -> None:
        """Send observations of a life in one request, and in smaller ones until only what is wrong is refused."""
        parts, refusals, last = [observations], 0, ""
        while parts:
            part = parts.pop()
            answer = await self._post(member, part)
            if answer.status not in REFUSALS:
                counts = _json(answer)
                missed = max(0, counts.get("missed", 0) - participant.refused.pop(life, 0))
                for outcome, count in {**counts, "missed": missed}.items():
                    self.report(member.name, outcome, count)
            elif len(part) > 1 and refusals < MAX_SINGLE:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]  # the first half next: they are learned from in order
            else:
                refusals += 1
                last = _message(answer)
                participant.skipped[life] = part[-1][0]
                participant.refused[life] = participant.refused.get(life, 0) + len(part)
                self.report(member.name, "refused", len(part))
        if refusals:
            logger.warning("replica %s refused observations: %s", member.name, last)

    async def _post(self, member: Member, observations: Sequence[tuple[int, str]]) -> WholeAnswer:
        body = '{"observations":[' + ",".join(text for _, text in observations) + "]}"
        headers = [*self._headers, (b"content-type", b"application/json")]
        async with asyncio.timeout(REQUEST_SECONDS):
            return await fetch(member.replica, Outgoing("POST", PATH, headers, body.encode()))

    # --- replicas that are new ----------------------------------------------

    def _sources_for(self, member: Member, participant: Participant) -> list[Member] | None:
        """Return the replicas whose state a new one should get; ``None`` if observations are enough for it."""
        assert participant.status is not None
        if not participant.status.is_new or participant.copies.is_settled:
            return None
        return [each for each in self._members if each is not member and self._has_more(each)] or None

    async def _copy_state(self, member: Member, participant: Participant, sources: Sequence[Member]) -> bool:
        """Copy what another replica has learned to one that has learned nothing.

        Returns whether this is settled. Otherwise it is tried again, with another source if that was the reason.
        """
        now, copies = time.monotonic(), participant.copies
        source = next((each for each in sources if now >= self._participants[each.name].no_state_until), None)
        if source is None or now < copies.retry_at:
            return False
        logger.info("replica %s gets what %s has learned", member.name, source.name)
        try:
            answer = await self._copy(source, member)
            if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise ReplicaFailure(_message(answer))
        except (ReplicaFailure, NoState, TimeoutError) as error:
            if isinstance(error, NoState) and (giver := self._participants.get(source.name)) is not None:
                giver.no_state_until = time.monotonic() + RETRY_SECONDS
            copies.fail(time.monotonic())
            level = logging.WARNING if copies.failed == WARN_COPIES else logging.DEBUG
            why = str(error) or f"it was not copied within {STATE_SECONDS:.0f} s"
            logger.log(
                level, "replica %s has not got what others have learned, and is tried again: %s", member.name, why
            )
            return False
        if answer.status not in (HTTPStatus.OK, HTTPStatus.CONFLICT):
            logger.warning("replica %s did not get what others have learned: %s", member.name, _message(answer))
        copies.is_settled = True
        return True

    async def _copy(self, source: Member, member: Member) -> WholeAnswer:
        """
        Raises:
            NoState: the source returns none.
            ReplicaFailure, TimeoutError
        """
        async with asyncio.timeout(STATE_SECONDS), AsyncExitStack() as stack:
            try:
                state = await stack.enter_async_context(opened(source.replica, Outgoing("GET", STATE, self._headers)))
            except ReplicaFailure as error:
                raise NoState(str(error)) from error
            if state.status != HTTPStatus.OK:
                raise NoState(f"{source.name} does not return its state: status {state.status}")
            request = Outgoing("PUT", f"{STATE}?if_new=true", self._headers, state.chunks())
            return await fetch(member.replica, request)

    def _has_more(self, member: Member) -> bool:
        """Whether a replica has learned from more than the observations that are here."""
        participant = self._participants.get(member.name)
        status = None if participant is None else participant.status
        if status is None or status.is_new or member.state not in TAKES_PART:
            return False
        return not status.learned or not all(
            life in self._feeds and self._feeds[life].is_whole for life in status.learned
        )


def _status(found: Mapping[str, Any]) -> Status:
    try:
        return Status(found["life"], dict(found["learned"]), found["is_new"])
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"its answer to GET {PATH} is not understood: is it of this version?") from error


def _json(answer: WholeAnswer) -> dict[str, Any]:
    """
    Raises:
        Refused: it is no answer with an object.
    """
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise Refused(f"{_message(answer)}; {KEY_REMEDY}")
    if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:  # as it stops, for example
        raise ReplicaFailure(_message(answer))
    if answer.status != HTTPStatus.OK:
        raise Refused(_message(answer))
    with suppress(ValueError):
        if isinstance(found := json.loads(answer.body), dict):
            return found
    raise Refused("it does not answer with JSON")


def _message(answer: WholeAnswer) -> str:
    with suppress(ValueError, KeyError, TypeError):
        return f"status {answer.status}: {json.loads(answer.body)['error']['message']}"
    return f"status {answer.status}"
