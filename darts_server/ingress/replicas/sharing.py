"""Replicas learn from each other's groups: the ingress carries what each of them has observed to the others."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
MAX_COPIES = 3
"""Attempts to copy state to a replica that is new."""
KEY_REMEDY = "set DARTS_ADMIN_API_KEY for the ingress"


class Refused(Exception):
    """A replica does not take part."""


@dataclass(frozen=True, slots=True)
class Status:
    """What a replica says of itself: ``life``, ``learned`` and ``is_new`` as in `ObservationsAnswer`."""

    life: str
    learned: Mapping[str, int]
    is_new: bool


@dataclass(slots=True)
class Participant:
    """What is known of a replica. ``copies``: attempts to copy state to it in this life."""

    status: Status | None = None
    copies: int = 0
    retry_at: float = 0.0
    refusal: str = ""
    skipped: dict[str, int] = field(default_factory=dict)
    """Numbers of observations that it refused, by life."""


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
        """Read what a replica has observed, and send it what it lacks."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._read(member, participant)
            if await self._copy_state(member, participant):
                async with asyncio.timeout(REQUEST_SECONDS):
                    await self._read(member, participant)
            await self._send(member, participant)
            participant.refusal = ""
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
            status = participant.status = _status(found)
            if before is not None and before.life != status.life:
                participant.copies = 0
            before = status
            feed = self._feeds.setdefault(status.life, Feed(status.life))
            for each in found["observations"]:
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
                await self._post(member, participant, feed.life, some)

    async def _post(
        self, member: Member, participant: Participant, life: str, observations: Sequence[tuple[int, str]]
    ) -> None:
        body = '{"observations":[' + ",".join(text for _, text in observations) + "]}"
        headers = [*self._headers, (b"content-type", b"application/json")]
        async with asyncio.timeout(REQUEST_SECONDS):
            answer = await fetch(member.replica, Outgoing("POST", PATH, headers, body.encode()))
        if answer.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE):  # and so it would be again
            logger.warning("replica %s refused observations: %s", member.name, _message(answer))
            participant.skipped[life] = observations[-1][0]
            self.report(member.name, "refused", len(observations))
            return
        for outcome, count in _json(answer).items():
            self.report(member.name, outcome, count)

    # --- replicas that are new ----------------------------------------------

    async def _copy_state(self, member: Member, participant: Participant) -> bool:
        """Copy what another replica has learned to one that has learned nothing, where observations are not enough.

        Returns whether it was copied.
        """
        assert participant.status is not None
        if not participant.status.is_new or participant.copies >= MAX_COPIES:
            return False
        source = next((each for each in self._members if each is not member and self._has_more(each)), None)
        if source is None:
            return False
        participant.copies += 1
        logger.info("replica %s gets what %s has learned", member.name, source.name)
        async with (
            asyncio.timeout(STATE_SECONDS),
            opened(source.replica, Outgoing("GET", STATE, self._headers)) as state,
        ):
            if state.status != HTTPStatus.OK:
                raise Refused(f"{source.name} does not return its state: status {state.status}")
            request = Outgoing("PUT", f"{STATE}?if_new=true", self._headers, state.chunks())
            answer = await fetch(member.replica, request)
        if answer.status not in (HTTPStatus.OK, HTTPStatus.CONFLICT):
            logger.warning("replica %s did not get what others have learned: %s", member.name, _message(answer))
        return answer.status == HTTPStatus.OK

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
