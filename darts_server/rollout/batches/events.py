"""What a batch gives: groups, prompts that were not decided, and the events of its stream, created as it is read."""

import asyncio
import logging
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from darts_server.engine.port import TokenSlice
from darts_server.records import GroupRecord, VersionSpans
from darts_server.rollout.batches.carried import Carry
from darts_server.rollout.run import GroupRun
from darts_server.types import DiscardReason, Sample

logger = logging.getLogger(__name__)

MAX_POLL_SHARE = 0.1
"""Largest share of time spent on polling: for a very large batch one poll takes longer than the interval."""


CURSOR_BYTES = 350
"""Memory of a candidate's cursor and of its last event, without the tokens."""


@dataclass(frozen=True, slots=True)
class AbortedSample:
    """What a candidate had generated when its group was aborted; all of it, if it has a finish reason.

    ``version_spans``: of its tokens.
    """

    sample: Sample
    version_spans: VersionSpans


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The outcome of the group of prompt ``number``; as an event it follows the last one of each of its candidates.

    ``samples``: returned trajectories by candidate index; empty with an ``error``, which ends this group alone.
    ``aborted``: of a group that was aborted, all candidates by index that were not discarded. They are no group: some
    are not whole, and none was selected. ``None`` if it was not aborted.
    """

    number: int
    group_id: str
    prompt_key: str
    samples: Mapping[int, Sample]
    record: GroupRecord | None
    error: Exception | None = None
    metadata: bytes | None = None
    aborted: Mapping[int, AbortedSample] | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether its caller gets anything that was generated."""
        return bool(self.samples) or any(aborted.sample.token_ids for aborted in (self.aborted or {}).values())


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A prompt whose group was not decided.

    ``carry``: how it is kept. ``error``: why it was aborted; ``None`` if it was stopped because enough others were
    decided. ``group``: its group, with what its candidates had generated, if that is not kept; else ``None``.
    """

    number: int
    prompt_key: str
    metadata: bytes | None
    carry: Carry = Carry.DROP
    error: Exception | None = None
    group: GroupResult | None = None


@dataclass(frozen=True, slots=True)
class BatchStarted:
    """``groups``: number of prompts. ``survivors``: whether a group has all trajectories that were not pruned.

    ``sampling``: the sampling parameters in force.
    """

    batch_id: str
    policy: str
    groups: int
    survivors: bool
    sampling: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """Tokens of a candidate from position ``start`` on, which follow those of the previous delta.

    ``number``: of its prompt in the batch.
    """

    trajectory_id: str
    number: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class TrajectorySelected:
    """A candidate belongs to its group.

    ``sample`` has the tokens of its deltas. If it is ``cut``, more deltas may have been sent than it has tokens.
    """

    trajectory_id: str
    number: int
    sample: Sample
    cut: bool


@dataclass(frozen=True, slots=True)
class CandidateDiscarded:
    """A candidate does not belong to its group. ``length``: tokens that it has generated, as far as recorded."""

    trajectory_id: str
    number: int
    length: int
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The batch is complete.

    ``results``: in the order in which groups ended. ``seconds``: since it started. ``generated``: tokens, also of
    groups that failed or were stopped. ``carried``: number of prompts that are kept for later batches of its caller.
    """

    batch_id: str
    results: Sequence[GroupResult]
    unfinished: Sequence[Unfinished]
    seconds: float
    generated: int
    carried: int = 0


@dataclass(frozen=True, slots=True)
class BatchFailed:
    """The batch was cancelled, or failed as a whole."""

    error: Exception


Event = BatchStarted | TokenDelta | TrajectorySelected | CandidateDiscarded | GroupResult | BatchDone | BatchFailed
BatchEnd = BatchDone | BatchFailed


class TokenRange(NamedTuple):
    """A reference to a delta: tokens ``start`` to ``stop`` of a candidate."""

    candidate: "CandidateCursor"
    start: int
    stop: int


_Entry = TokenRange | Event


class CandidateCursor:
    """Create the events of one candidate from what it has generated when `advance` is called.

    The tokens of its deltas are kept, to be sent again, until it is discarded: 12 bytes each with log-probs. Once it is
    selected, they are those of its sample, of which there is no second copy.
    """

    __slots__ = ("_end", "_end_sent", "_index", "_logprobs", "_number", "_run", "_sent", "_token_ids", "trajectory_id")

    def __init__(self, run: GroupRun[Any, Any], trajectory_id: str, number: int, index: int) -> None:
        self.trajectory_id = trajectory_id
        self._number = number
        self._index = index
        self._run: GroupRun[Any, Any] | None = run
        self._end: TrajectorySelected | CandidateDiscarded | None = None
        self._end_sent = False
        self._sent = 0  # tokens of its deltas so far
        self._token_ids: Sequence[int] = array("i")
        self._logprobs: Sequence[float] | None = None

    def select(self, sample: Sample) -> None:
        """Record that the candidate belongs to its group."""
        assert self._run is not None
        cut = self._run.candidates[self._index].cut
        self._end = TrajectorySelected(self.trajectory_id, self._number, sample, cut)
        if self._sent <= len(sample.token_ids):
            self._token_ids, self._logprobs = sample.token_ids, sample.logprobs

    def close(self) -> None:
        """End the candidate: discard it unless it was selected. One that has no reason of its own was cancelled."""
        if self._end is None and self._run is not None:
            reason = self._run.candidates[self._index].reason or DiscardReason.CANCELLED
            length = self._run.runner.count_tokens(self._index)
            self._end = CandidateDiscarded(self.trajectory_id, self._number, length, reason)
            self._token_ids, self._logprobs = array("i"), None
        self._run = None

    def drop_run(self) -> None:
        """Let go of the run of a candidate that gets no more events."""
        self._run = None

    def advance(self, chunk: int) -> Iterator[_Entry]:
        """Yield the events since the last call.

        New tokens of a running candidate are held back until there are ``chunk`` of them.
        """
        if self._end_sent:
            return
        if self._end is None and self._run is not None:
            state = self._run.candidates[self._index]
            if state.reason is not None:
                self.close()
            elif self._run.runner.count_tokens(self._index) - self._sent >= (chunk if state.running else 1):
                yield from self._add_tokens(self._run.runner.read_tokens(self._index, self._sent))
        if self._end is None:  # it may have ended since these tokens were added
            return
        if isinstance(self._end, TrajectorySelected) and self._sent < len(self._token_ids):
            yield self._next_range(len(self._token_ids))
        self._end_sent = True
        yield self._end

    def _add_tokens(self, generated: TokenSlice | None) -> Iterator[TokenRange]:
        if generated is None or not generated.token_ids:
            return
        assert isinstance(self._token_ids, array)
        self._token_ids.extend(generated.token_ids)
        if generated.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = array("d")
            assert isinstance(self._logprobs, array)
            self._logprobs.extend(generated.logprobs)
        yield self._next_range(len(self._token_ids))

    def _next_range(self, stop: int) -> TokenRange:
        start = self._sent
        self._sent = stop
        return TokenRange(self, start, stop)

    def delta(self, start: int, stop: int) -> TokenDelta | None:
        """The delta with these tokens; ``None`` once the candidate was discarded."""
        if stop > len(self._token_ids):
            return None
        logprobs = None if self._logprobs is None else _listed(self._logprobs[start:stop])
        return TokenDelta(self.trajectory_id, self._number, start, _listed(self._token_ids[start:stop]), logprobs)

    @property
    def kept_bytes(self) -> int:
        """Memory that it takes, without its sample, which its group has too."""
        size = CURSOR_BYTES
        if isinstance(self._end, TrajectorySelected) and self._token_ids is self._end.sample.token_ids:
            return size
        return size + sys.getsizeof(self._token_ids) + sys.getsizeof(self._logprobs)


def _listed(values: Sequence[Any]) -> list[Any]:
    """Return the values as Python's own numbers."""
    return values.tolist() if isinstance(values, array | np.ndarray) else list(values)


@dataclass(slots=True)
class _GroupCursor:
    """The cursors of a group's candidates, and its result once it has ended."""

    number: int
    group_id: str
    run: GroupRun[Any, Any] | None
    result: GroupResult | None = None
    cursors: list[CandidateCursor] = field(default_factory=list)

    def candidates(self) -> Sequence[CandidateCursor]:
        """The cursors of all candidates started so far."""
        if (run := self.run) is not None:
            for index in range(len(self.cursors), len(run.candidates)):
                self.cursors.append(CandidateCursor(run, f"{self.group_id}:{index}", self.number, index))
        return self.cursors

    def close(self) -> None:
        """End all candidates."""
        for candidate in self.candidates():
            candidate.close()
        self.run = None


class EventFeed:
    """Give listeners the events of a batch, each from the event number where it wants to start.

    Events are created lazily: tokens are read when a listener has taken all events so far. So a stalled listener costs
    nothing, and then gets everything since in a few large deltas. The log holds references to tokens, not copies of
    them, so that events can be replayed. A delta takes 16 bytes of it.

    Args:
        first: the first event.
        chunk: least number of tokens in a delta of a running candidate; ``None`` for no deltas, but groups only.
        interval: seconds between two polls of what candidates have generated.
        replayable: whether events are kept, for several listeners; otherwise there is one listener.
        clock: monotonic seconds, to measure how long polls take. Not the event loop's clock: a virtual one may stand
            still during a turn.
    """

    def __init__(
        self, first: BatchStarted, chunk: int | None, interval: float, replayable: bool, clock: Callable[[], float]
    ) -> None:
        self._batch_id = first.batch_id
        self._chunk = chunk
        self._interval = interval
        self._replayable = replayable
        # A delta is in the log as its candidate, with its first token and the one after its last in `_ranges`; an
        # object for each delta would take 90 bytes, and a delta may be a single token.
        self._log: list[CandidateCursor | Event] = [first]
        self._ranges = array("i", (0, 0))
        self._dropped = 0  # events that were removed from the front of the log
        self._groups: dict[int, _GroupCursor] = {}
        self._cursors: list[list[CandidateCursor]] = []  # of each group that has run, if events are kept
        self._due: dict[int, None] = {}  # numbers of groups that may have new events, in order
        self._end: BatchEnd | None = None
        self._is_complete = False
        self._new_entries = self._entries()
        self._clock = clock
        self._next_poll = 0.0
        self._seconds_spent = 0.0
        self._changed = asyncio.Event()

    # --- called by the batch ------------------------------------------------

    def group_started(self, number: int, run: GroupRun[Any, Any]) -> None:
        """Follow the group of prompt ``number``."""
        group = self._groups[number] = _GroupCursor(number, f"{self._batch_id}-{number}", run)
        if self._replayable:
            self._cursors.append(group.cursors)

    def trajectory_selected(self, number: int, index: int, sample: Sample) -> None:
        """Record that candidate ``index`` is known to belong to its group."""
        if group := self._groups.get(number):
            group.candidates()[index].select(sample)
            self._notify(number)

    def group_ended(self, result: GroupResult) -> None:
        """Record a group's outcome. Its run may be dropped afterwards."""
        group = self._groups.setdefault(result.number, _GroupCursor(result.number, result.group_id, None))
        group.result = result
        group.close()
        self._notify(result.number)

    def batch_ended(self, end: BatchEnd) -> None:
        """Record the batch's end, after which nothing more is recorded."""
        self._end = end
        if isinstance(end, BatchFailed):
            for group in self._groups.values():
                for candidate in group.cursors:
                    candidate.drop_run()
            self._groups.clear()
        for group in self._groups.values():
            group.close()
        self._notify(*self._groups)

    def _notify(self, *numbers: int) -> None:
        """Mark these groups as changed and wake all listeners."""
        self._due.update(dict.fromkeys(numbers))
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def kept_bytes(self) -> int:
        """About how much memory it takes after the end of its batch, without what the batch's results have too."""
        log = sys.getsizeof(self._log) + sys.getsizeof(self._ranges)
        return log + sum(cursor.kept_bytes for cursors in self._cursors for cursor in cursors)

    # --- called by listeners ------------------------------------------------

    @property
    def last_number(self) -> int:
        """Number of the latest event; the first is 1."""
        return self._dropped + len(self._log)

    def next_after(self, number: int) -> tuple[int, Event] | None:
        """The event that follows event ``number``, with its own number; ``None`` if there is none yet."""
        while number < self.last_number or self._create_entry():
            number += 1
            place = number - self._dropped - 1
            entry = self._log[place]
            start, stop = self._ranges[2 * place : 2 * place + 2]
            event = entry.delta(start, stop) if isinstance(entry, CandidateCursor) else entry
            if not self._replayable:
                self._dropped += len(self._log)
                self._log.clear()
                del self._ranges[:]
            if event is not None:
                return number, event
        return None

    async def next(self, number: int) -> tuple[int, Event] | None:
        """Wait for the event that follows event ``number``; ``None`` after the last. Safe to cancel: none is lost."""
        while (found := self.next_after(number)) is None:
            if self._is_complete and number >= self.last_number:
                return None
            if self._chunk is None:
                await self._changed.wait()
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_poll):
                    await self._changed.wait()
            now = asyncio.get_running_loop().time()
            if now >= self._next_poll:
                self._due.update(dict.fromkeys(self._groups))
                self._next_poll = now + max(self._interval, self._seconds_spent / MAX_POLL_SHARE)
                self._seconds_spent = 0.0
        return found

    def _create_entry(self) -> bool:
        """Append the next entry to the log; whether there was one."""
        started_at = self._clock()
        try:
            entry = next(self._new_entries, None)
        except Exception as error:  # a bug of ours: listeners get it as the last event, and the batch ends with them
            logger.exception("the events of batch %s failed", self._batch_id)
            entry = BatchFailed(error)
        self._seconds_spent += self._clock() - started_at
        if entry is None:
            return False
        if isinstance(entry, TokenRange):
            self._log.append(entry.candidate)
            self._ranges.extend((entry.start, entry.stop))
        else:
            self._log.append(entry)
            self._ranges.extend((0, 0))
        self._is_complete = isinstance(entry, BatchDone | BatchFailed)
        return True

    def _entries(self) -> Iterator[_Entry | None]:
        """Yield all entries after the first, each created when it is requested; ``None`` when there is none yet."""
        while not isinstance(self._end, BatchFailed):
            while self._due:
                number = next(iter(self._due))
                del self._due[number]
                if (group := self._groups.get(number)) is None:
                    continue
                for candidate in group.candidates():
                    yield from candidate.advance(self._chunk or 1)
                if group.result is not None:
                    for candidate in group.candidates():  # the group may have ended while these entries were read
                        yield from candidate.advance(self._chunk or 1)
                    self._groups.pop(number, None)
                    yield group.result
            if self._end is not None:
                break
            yield None
        yield self._end
