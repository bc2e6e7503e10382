"""The events of one batch: checks them, and joins the streams of several connections. No I/O.

The server numbers the events. A new connection continues after the last event that was received.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from httpx_sse import ServerSentEvent
from pydantic import FiniteFloat

from ._errors import ConnectionFailed, DartsError, ProtocolError, StatusError, error_from_object, was_never_sent
from ._models import (
    Delta,
    Discard,
    Done,
    Event,
    FinishReason,
    Group,
    GroupEvent,
    ModelT,
    TrajectoryEvent,
    Unfinished,
    Usage,
    WireModel,
    parse,
)
from ._requests import API, RetrySchedule, TimeLimit, batch_path
from ._rollouts import GroupPayload, RolloutsRequest, Tokens, TrajectoryPayload, build_group, tokens_in_payload

ROLLOUTS = f"{API}/rollouts"
_EVENT_STREAM = {"Accept": "text/event-stream", "Cache-Control": "no-store"}


class TrajectoryEnd(WireModel):
    """The `trajectory` event of a token stream."""

    trajectory_id: str
    number: int
    length: int
    finish_reason: FinishReason
    text: str
    cut: bool
    reward: FiniteFloat | None = None
    correct: bool | None = None


class _BatchStarted(WireModel):
    id: str
    policy: str
    groups: int
    survivors: bool = False
    sampling: dict[str, Any] | None = None


class _BatchDone(WireModel):
    id: str
    usage: Usage
    unfinished: tuple[Unfinished, ...]
    carried: int = 0
    shortfall: int = 0
    uninformative: tuple[int, ...] = ()


class _BatchError(WireModel):
    error: dict[str, Any]


@dataclass(slots=True)
class _Candidate:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    selected_length: int | None = None
    is_finished: bool = False


class CandidateAssembly:
    """Builds the candidates of running groups from deltas.

    The deltas of a candidate have no gaps, and end in exactly one trajectory or discard before the group ends.
    """

    def __init__(self, with_logprobs: bool) -> None:
        self._with_logprobs = with_logprobs
        self._groups: dict[int, dict[str, _Candidate]] = {}
        self._closed_groups: set[int] = set()

    def append(self, delta: Delta) -> Delta:
        """Append a delta, and return it. Raise ProtocolError unless it starts where the previous delta ended."""
        candidate = self._get_or_add_candidate(delta.number, delta.trajectory_id)
        received = len(candidate.token_ids)
        if delta.start != received:
            raise ProtocolError(f"a delta of {delta.trajectory_id} starts at {delta.start}, not at {received}")
        if self._with_logprobs:
            if delta.logprobs is None or len(delta.logprobs) != len(delta.token_ids):
                raise ProtocolError(f"a delta of {delta.trajectory_id} does not have one logprob for each token")
            candidate.logprobs.extend(delta.logprobs)
        candidate.token_ids.extend(delta.token_ids)
        return delta

    def select(self, end: TrajectoryEnd) -> TrajectoryEvent:
        candidate = self._get_or_add_candidate(end.number, end.trajectory_id)
        received = len(candidate.token_ids)
        # Deltas may go beyond the length at which the server cuts a candidate.
        has_all_tokens = end.length == received or (end.cut and end.length < received)
        if not has_all_tokens:
            raise ProtocolError(f"trajectory {end.trajectory_id} has {received} tokens, but its length is {end.length}")
        candidate.is_finished = True
        candidate.selected_length = end.length
        token_ids, logprobs = self._received_tokens(candidate)
        return TrajectoryEvent(token_ids=token_ids, logprobs=logprobs, **end.model_dump(exclude={"length"}))

    def discard(self, discard: Discard) -> Discard:
        candidate = self._get_or_add_candidate(discard.number, discard.trajectory_id)
        candidate.is_finished = True
        # The candidate itself stays until its group is complete, so that a later event is refused.
        candidate.token_ids.clear()
        candidate.logprobs.clear()
        return discard

    def selected_tokens(self, number: int, trajectory: TrajectoryPayload) -> Tokens:
        candidate = self._groups.get(number, {}).get(trajectory.trajectory_id)
        if candidate is None or candidate.selected_length is None:
            raise ProtocolError(f"trajectory {trajectory.trajectory_id} is in its group but was not streamed")
        return self._received_tokens(candidate)

    def close_group(self, number: int) -> None:
        for trajectory_id, candidate in self._groups.pop(number, {}).items():
            if not candidate.is_finished:
                raise ProtocolError(f"group {number} is complete, but {trajectory_id} has not finished")
        self._closed_groups.add(number)

    def _get_or_add_candidate(self, number: int, trajectory_id: str) -> _Candidate:
        candidate = self._groups.setdefault(number, {}).setdefault(trajectory_id, _Candidate())
        if candidate.is_finished or number in self._closed_groups:
            raise ProtocolError(f"an event of {trajectory_id} came after its end")
        return candidate

    def _received_tokens(self, candidate: _Candidate) -> Tokens:
        length = candidate.selected_length
        token_ids = tuple(candidate.token_ids[:length])
        if self._with_logprobs:
            return token_ids, tuple(candidate.logprobs[:length])
        return token_ids, None


class BatchReader:
    """The state of one batch: its results so far, the next request, and the meaning of each event."""

    def __init__(self, request: RolloutsRequest, retries: int, limit: TimeLimit) -> None:
        self.limit = limit
        self.id: str | None = None
        self.policy: str | None = None
        self.sampling: Mapping[str, Any] | None = None
        self.usage: Usage | None = None
        self.unfinished: tuple[Unfinished, ...] = ()
        self.carried: int | None = None
        self.shortfall: int | None = None
        self.uninformative: tuple[int, ...] = ()
        self.failed: list[Group] = []
        self.is_over = False

        self._request = request
        self._num_prompts = len(request.token_ids)
        self._may_be_running = False
        self._retries = retries
        self._schedule = self._new_schedule()
        self._last_event_number = 0
        self._returns_survivors = False
        self._finished_groups: set[int] = set()
        self._assembly = CandidateAssembly(request.logprobs)

    def next_request(self) -> tuple[str, str, Mapping[str, Any]]:
        """Return method, path and httpx's options of the request that begins or continues the stream."""
        self._may_be_running = True
        headers = dict(_EVENT_STREAM)
        if self.id is not None:
            headers["Last-Event-ID"] = str(self._last_event_number)
            return "GET", batch_path(self.id), {"headers": headers}
        headers["Content-Type"] = "application/json"
        if self._request.idempotency_key is not None:
            headers["Idempotency-Key"] = self._request.idempotency_key
        return "POST", ROLLOUTS, {"headers": headers, "content": self._request.content}

    def read(self, sse: ServerSentEvent) -> Event | None:
        """Return the event for the caller, or None if the caller does not need it.

        Raises:
            ProtocolError: the event is not allowed at this point of the stream.
            StatusError: the batch failed, or all its groups failed and nothing else can be returned.
        """
        # httpx-sse dispatches an event without data for some comments.
        if not sse.data:
            return None
        if not sse.id.isdecimal():
            raise ProtocolError(f"a {sse.event!r} event has no number")
        number = int(sse.id)
        # A new connection may repeat events.
        if number <= self._last_event_number:
            return None
        self._last_event_number = number
        # An event shows that the connection works, so the retries start again.
        self._schedule = self._new_schedule()

        if sse.event == "error":
            self.is_over = True
            raise error_from_object(_parse_event(_BatchError, sse).error)
        if sse.event == "batch":
            self._record_start(_parse_event(_BatchStarted, sse))
            return None
        if self.id is None:
            raise ProtocolError(f"the first event is {sse.event!r}, not batch")
        match sse.event:
            case "delta":
                return self._assembly.append(_parse_event(Delta, sse))
            case "trajectory":
                return self._assembly.select(_parse_event(TrajectoryEnd, sse))
            case "discard":
                return self._assembly.discard(_parse_event(Discard, sse))
            case "group":
                return self._read_group(_parse_event(GroupPayload, sse))
            case "done":
                return self._record_end(_parse_event(_BatchDone, sse))
        # The event belongs to a later version of the server.
        return None

    def delay_after(self, error: DartsError) -> float:
        """Return the seconds until the next connection. Raise `error` if another connection cannot help.

        Raises:
            TimedOut: the time of the batch is over.
        """
        # Without an id, an error status or a request that was never sent means that no batch has started.
        self._may_be_running = not (isinstance(error, StatusError) or was_never_sent(error))
        # The batch itself has ended with this error.
        if self.is_over:
            raise error
        delay = self._schedule.delay_after(error)
        self.limit.raise_if_over()
        return self.limit.shorten(delay)

    def connection_lost(self) -> ConnectionFailed:
        return ConnectionFailed(f"{ROLLOUTS}: the connection was closed before the end of the batch")

    @property
    def needs_id_to_cancel(self) -> bool:
        # The server itself cancels a batch that is not durable, because its connection closes.
        return self._may_be_running and self._is_durable and self.id is None and not self.is_over

    @property
    def cancel_path(self) -> str | None:
        """Path that cancels the batch, or None if it is over, not durable, or without an id."""
        if self.id is None or not self._is_durable or self.is_over:
            return None
        return batch_path(self.id)

    @property
    def _is_durable(self) -> bool:
        return self._request.idempotency_key is not None

    def _record_start(self, started: _BatchStarted) -> None:
        # With `carried`, the server may add prompts of earlier batches.
        if self._request.carried:
            self._num_prompts = max(self._num_prompts, started.groups)
        if started.groups != self._num_prompts:
            raise ProtocolError(f"{self._num_prompts} prompt(s) were sent, but the batch has {started.groups} groups")
        self.id = started.id
        self.policy = started.policy
        self.sampling = started.sampling
        self._returns_survivors = started.survivors

    def _read_group(self, payload: GroupPayload) -> GroupEvent:
        number = payload.number
        if not 0 <= number < self._num_prompts or number in self._finished_groups:
            raise ProtocolError(f"group {number} is not one of {self._num_prompts}, or came twice")
        self._finished_groups.add(number)
        tokens_of: Callable[[TrajectoryPayload], Tokens] = tokens_in_payload
        # In a token stream, the `group` event has no tokens, because deltas have sent them.
        if self._request.stream == "tokens":
            tokens_of = partial(self._assembly.selected_tokens, number)
        group = build_group(payload, self._request, tokens_of, self._returns_survivors)
        if self._request.stream == "tokens":
            self._assembly.close_group(number)
        if group.error is not None:
            self.failed.append(group)
        return GroupEvent(group)

    def _record_end(self, done: _BatchDone) -> Done:
        # Each prompt must have exactly one result.
        prompt_numbers = list(self._finished_groups) + [prompt.number for prompt in done.unfinished]
        # With `return_zero_variance` uninformative groups were sent, too.
        prompt_numbers += [number for number in done.uninformative if number not in self._finished_groups]
        prompt_numbers.sort()
        if prompt_numbers != list(range(self._num_prompts)):
            raise ProtocolError(f"the batch has {self._num_prompts} groups, but reported {prompt_numbers}")
        self.is_over = True
        self.usage = done.usage
        self.unfinished = done.unfinished
        self.carried = done.carried
        self.shortfall = done.shortfall
        self.uninformative = done.uninformative

        # The first error is raised only if the caller would get nothing else.
        has_whole_group = len(self.failed) < len(self._finished_groups)
        has_aborted_tokens = any(candidate.token_ids for group in self.failed for candidate in group.aborted)
        if self.failed and not (has_whole_group or has_aborted_tokens or self.unfinished):
            assert self.failed[0].error is not None
            raise self.failed[0].error
        return Done(done.usage, done.unfinished, done.shortfall, done.uninformative)

    def _new_schedule(self) -> RetrySchedule:
        return RetrySchedule(self._retries, idempotent=self._is_durable, retry_timeouts=True)


def _parse_event(model: type[ModelT], sse: ServerSentEvent) -> ModelT:
    return parse(model, sse.data, f"event {sse.id} ({sse.event})")


def completed_group(event: Event) -> Group | None:
    """Return the group that the event completes, unless it failed."""
    if isinstance(event, GroupEvent) and event.group.error is None:
        return event.group
    return None
