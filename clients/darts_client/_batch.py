"""One batch as its caller reads it, across as many connections as that takes. No I/O.

The events are numbered. What a lost connection has told is not told again: the next one goes on after the last event.
"""

from collections.abc import Mapping
from typing import Any

from httpx_sse import ServerSentEvent

from . import _calls
from ._assembly import Assembly, ToldEnd
from ._calls import Call
from ._errors import ConnectionFailed, DartsError, ProtocolError, StatusError
from ._events import Delta, Discard, Done, Event, GroupEvent
from ._group_wire import ToldGroup, made_group, own_tokens
from ._models import Group, Unfinished, Usage
from ._retries import Retrying
from ._rollouts_request import RolloutsRequest
from ._time_limit import TimeLimit
from ._translation import never_sent, told_error
from ._wire import Wire, WireT, parsed

_EVENTS = {"Accept": "text/event-stream", "Cache-Control": "no-store"}


class _Began(Wire):
    id: str
    policy: str
    groups: int


class _Ended(Wire):
    id: str
    usage: Usage
    unfinished: tuple[Unfinished, ...]


class _Failed(Wire):
    error: dict[str, Any]


class Batch:
    """What is known of a batch, what to send next, and what an event means."""

    def __init__(self, request: RolloutsRequest, retries: int, limit: TimeLimit) -> None:
        self.limit = limit
        self.id: str | None = None
        self.policy: str | None = None
        self.usage: Usage | None = None
        self.unfinished: tuple[Unfinished, ...] = ()
        self.failed: list[Group] = []
        self.over = False
        self.total = len(request.token_ids)
        self._request = request
        self._asked = False
        self._retries = retries
        self._retrying = self._fresh()
        self._last = 0
        self._decided: set[int] = set()
        self._assembly = Assembly(request.logprobs)

    def connect(self) -> tuple[str, str, Mapping[str, Any]]:
        """Method, path and httpx's options of the request that the next events come from."""
        self._asked = True
        if self.id is not None:
            headers = {**_EVENTS, "Last-Event-ID": str(self._last)}
            return "GET", _calls.batch_path(self.id), {"headers": headers}
        headers = {**_EVENTS, "Content-Type": "application/json"}
        if self._request.key is not None:
            headers["Idempotency-Key"] = self._request.key
        return "POST", _calls.ROLLOUTS, {"headers": headers, "content": self._request.content}

    def take(self, sse: ServerSentEvent) -> Event | None:
        """What an event tells the caller; None if nothing, or nothing new.

        Raises:
            ProtocolError: it is not what can come at this place.
            StatusError: the batch, or every group of it, failed.
        """
        if not sse.data:  # a comment is dispatched like an event by some
            return None
        if not sse.id.isdecimal():
            raise ProtocolError(f"a {sse.event!r} event has no number")
        if int(sse.id) <= self._last:
            return None
        self._last = int(sse.id)
        self._retrying = self._fresh()
        return self._told(sse)

    def delay_after(self, error: DartsError) -> float:
        """Seconds until to connect again; raises `error` if that cannot help, TimedOut if there is no time for it."""
        self._asked = not (isinstance(error, StatusError) or never_sent(error))
        if self.over:
            raise error
        delay = self._retrying.delay_after(error)
        self.limit.check()
        return self.limit.at_most(delay)

    def lost(self) -> ConnectionFailed:
        """The connection ended in order, but before the batch did."""
        return ConnectionFailed(f"{_calls.ROLLOUTS}: the connection ended before the batch did")

    @property
    def unnamed(self) -> bool:
        """Whether it may run on the server without its caller, under an id that has not been told yet."""
        return self._asked and self._request.key is not None and self.id is None and not self.over

    def leave(self) -> Call[bool] | None:
        """What stops a batch that would go on without its caller."""
        if self.over or self._request.key is None or self.id is None:
            return None
        return _calls.cancel(self.id)

    def _told(self, sse: ServerSentEvent) -> Event | None:
        if sse.event == "error":
            self.over = True
            raise told_error(_read(_Failed, sse).error)
        if sse.event == "batch":
            self._begin(_read(_Began, sse))
            return None
        if self.id is None:
            raise ProtocolError(f"the events begin with {sse.event!r}, not with batch")
        match sse.event:
            case "delta":
                return self._assembly.grow(_read(Delta, sse))
            case "trajectory":
                return self._assembly.keep(_read(ToldEnd, sse))
            case "discard":
                return self._assembly.discard(_read(Discard, sse))
            case "group":
                return self._group(_read(ToldGroup, sse))
            case "done":
                return self._end(_read(_Ended, sse))
        return None  # of a later version of the server

    def _begin(self, began: _Began) -> None:
        if began.groups != self.total:
            raise ProtocolError(f"{self.total} prompt(s) were asked for, but the batch has {began.groups} groups")
        self.id, self.policy = began.id, began.policy

    def _group(self, told: ToldGroup) -> GroupEvent:
        if not 0 <= told.number < self.total or told.number in self._decided:
            raise ProtocolError(f"group {told.number} is not one of {self.total}, or came twice")
        self._decided.add(told.number)
        if self._request.stream == "tokens":
            group = made_group(told, self._request, lambda t: self._assembly.tokens(told.number, t))
            self._assembly.close(told.number)
        else:
            group = made_group(told, self._request, own_tokens)
        if group.error is not None:
            self.failed.append(group)
        return GroupEvent(group)

    def _end(self, ended: _Ended) -> Done:
        numbers = [*self._decided, *(prompt.number for prompt in ended.unfinished)]
        if sorted(numbers) != list(range(self.total)):
            raise ProtocolError(f"of {self.total} groups these were told of: {sorted(numbers)}")
        self.over = True
        self.usage, self.unfinished = ended.usage, ended.unfinished
        if self.failed and len(self.failed) == len(self._decided):
            [first, *_] = self.failed
            assert first.error is not None
            raise first.error
        return Done(ended.usage, ended.unfinished)

    def _fresh(self) -> Retrying:
        return Retrying(self._retries, idempotent=self._request.key is not None, stalls=True)


def _read(kind: type[WireT], sse: ServerSentEvent) -> WireT:
    return parsed(kind, sse.data, f"event {sse.id} ({sse.event})")
