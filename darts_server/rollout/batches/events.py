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
from darts_server.verify.types import NO_VERDICT, Verdict

logger = logging.getLogger(__name__)

MAX_POLL_SHARE = 0.1
"""Share of time. A poll of a very large batch takes longer than the polling interval."""
CURSOR_BYTES = 350
"""Memory of a candidate's cursor and last event, without tokens."""


@dataclass(frozen=True, slots=True)
class AbortedSample:
    """A candidate of an aborted group, complete if the sample has a finish reason."""

    sample: Sample
    version_spans: VersionSpans


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The outcome of a group. As an event it follows all events of the group's candidates.

    ``number``: number of the prompt in the batch, as in all events.
    ``samples``: returned trajectories by candidate index.
    ``aborted``: candidates of an aborted group that were not discarded, by index. Callers must not take them for a
    group.
    ``verdicts``: of finished candidates, by index. ``zero_variance``: see `GroupRun.zero_variance`.
    """

    number: int
    group_id: str
    prompt_key: str
    samples: Mapping[int, Sample]
    record: GroupRecord | None
    error: Exception | None = None
    metadata: bytes | None = None
    aborted: Mapping[int, AbortedSample] | None = None
    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    zero_variance: bool | None = None

    @property
    def has_tokens(self) -> bool:
        aborted = self.aborted or {}
        return bool(self.samples) or any(candidate.sample.token_ids for candidate in aborted.values())


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A prompt whose group was not decided.

    ``error``: None if enough other groups were complete.
    ``group``: the group with its tokens, if they are not kept.
    ``skipped``: whether the prompt did not run, because it was almost surely without signal.
    """

    number: int
    prompt_key: str
    metadata: bytes | None
    carry: Carry
    error: Exception | None
    group: GroupResult | None
    skipped: bool


@dataclass(frozen=True, slots=True)
class BatchStarted:
    """``survivors``: whether a group has all trajectories that were not pruned."""

    batch_id: str
    policy: str
    groups: int
    survivors: bool
    sampling: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """The next tokens of a candidate, from position ``start``."""

    trajectory_id: str
    number: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float] | None


@dataclass(frozen=True, slots=True)
class TrajectorySelected:
    """If the candidate was ``cut``, its deltas may have more tokens than ``sample``.

    ``verdict``: set if it is known now, as nothing waits for it. The group always has it.
    """

    trajectory_id: str
    number: int
    sample: Sample
    cut: bool
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class CandidateDiscarded:
    """``length``: number of tokens, as far as recorded."""

    trajectory_id: str
    number: int
    length: int
    reason: DiscardReason


@dataclass(frozen=True, slots=True)
class BatchDone:
    """The batch is complete.

    ``results``: groups in the order of their ends.
    ``generated``: number of tokens of all groups, also of failed and stopped groups.
    ``carried``: number of prompts that are kept for the caller.
    ``shortfall``: number of groups that are missing to the requested number.
    ``uninformative``: numbers of the groups that did not count, because their rewards are equal or missing.
    """

    batch_id: str
    results: Sequence[GroupResult]
    unfinished: Sequence[Unfinished]
    seconds: float
    generated: int
    carried: int
    shortfall: int
    uninformative: Sequence[int]

    @property
    def skipped(self) -> int:
        return sum(prompt.skipped for prompt in self.unfinished)


@dataclass(frozen=True, slots=True)
class BatchFailed:
    error: Exception


Event = BatchStarted | TokenDelta | TrajectorySelected | CandidateDiscarded | GroupResult | BatchDone | BatchFailed
BatchEnd = BatchDone | BatchFailed


class TokenRange(NamedTuple):
    """A delta by reference."""

    candidate: "CandidateCursor"
    start: int
    stop: int


_Entry = TokenRange | Event


@dataclass(slots=True, eq=False)
class CandidateCursor:
    """Creates the events of one candidate.

    Tokens of deltas are kept for replays until the candidate is discarded: 12 bytes per token with log-probs. A
    selected candidate shares the tokens of its sample.

    ``run``: None after the candidate's end, and if the batch has failed.
    """

    run: GroupRun[Any, Any] | None
    trajectory_id: str
    number: int
    index: int
    _end: TrajectorySelected | CandidateDiscarded | None = None
    _is_end_sent: bool = False
    _num_sent: int = 0
    """Number of tokens in all deltas."""
    _token_ids: Sequence[int] = field(default_factory=lambda: array("i"))
    _logprobs: Sequence[float] | None = None

    def select(self, sample: Sample) -> None:
        assert self.run is not None
        cut = self.run.candidates[self.index].cut
        verdict = self.run.verification.verdicts.get(self.index, NO_VERDICT)
        self._end = TrajectorySelected(self.trajectory_id, self.number, sample, cut, verdict)
        # A cut sample may be shorter than the deltas that were sent.
        if self._num_sent <= len(sample.token_ids):
            self._token_ids = sample.token_ids
            self._logprobs = sample.logprobs

    def close(self, reason_if_none: DiscardReason = DiscardReason.CANCELLED) -> None:
        """End the candidate's events, with a discard unless it was selected."""
        if self._end is None and self.run is not None:
            # A selected candidate of a failed or dropped group has no reason.
            reason = self.run.candidates[self.index].reason or reason_if_none
            length = self.run.runner.count_tokens(self.index)
            self._end = CandidateDiscarded(self.trajectory_id, self.number, length, reason)
            self._token_ids = array("i")
            self._logprobs = None
        self.run = None

    def new_entries(self, chunk: int) -> Iterator[_Entry]:
        """Yield new events. A delta of a running candidate has at least ``chunk`` tokens."""
        if self._is_end_sent:
            return
        if self._end is None and self.run is not None:
            state = self.run.candidates[self.index]
            runner = self.run.runner
            min_new_tokens = chunk if state.is_running else 1
            if state.reason is not None:
                self.close()
            elif runner.count_tokens(self.index) - self._num_sent >= min_new_tokens:
                generated = runner.read_tokens(self.index, self._num_sent)
                if generated is not None and generated.token_ids:
                    self._keep_tokens(generated)
                    yield self._take_range(len(self._token_ids))

        # The candidate may have ended while a listener took the delta.
        if self._end is None:
            return
        if isinstance(self._end, TrajectorySelected) and self._num_sent < len(self._token_ids):
            yield self._take_range(len(self._token_ids))
        self._is_end_sent = True
        yield self._end

    def _keep_tokens(self, generated: TokenSlice) -> None:
        assert isinstance(self._token_ids, array)
        self._token_ids.extend(generated.token_ids)
        if generated.logprobs is not None:
            if self._logprobs is None:
                self._logprobs = array("d")
            assert isinstance(self._logprobs, array)
            self._logprobs.extend(generated.logprobs)

    def _take_range(self, stop: int) -> TokenRange:
        start = self._num_sent
        self._num_sent = stop
        return TokenRange(self, start, stop)

    def make_delta(self, start: int, stop: int) -> TokenDelta | None:
        # The tokens of a discarded candidate are not kept.
        if stop > len(self._token_ids):
            return None
        token_ids = _to_list(self._token_ids[start:stop])
        logprobs = None
        if self._logprobs is not None:
            logprobs = _to_list(self._logprobs[start:stop])
        return TokenDelta(self.trajectory_id, self.number, start, token_ids, logprobs)

    @property
    def kept_bytes(self) -> int:
        """Memory without the sample, which the group's result shares."""
        size = CURSOR_BYTES
        if isinstance(self._end, TrajectorySelected) and self._token_ids is self._end.sample.token_ids:
            return size
        return size + sys.getsizeof(self._token_ids) + sys.getsizeof(self._logprobs)


def _to_list(values: Sequence[Any]) -> list[Any]:
    if isinstance(values, array | np.ndarray):
        return values.tolist()
    return list(values)


@dataclass(slots=True)
class _GroupCursor:
    number: int
    group_id: str
    run: GroupRun[Any, Any] | None
    result: GroupResult | None = None
    cursors: list[CandidateCursor] = field(default_factory=list)

    def add_new_cursors(self) -> Sequence[CandidateCursor]:
        if self.run is not None:
            for index in range(len(self.cursors), len(self.run.candidates)):
                self.cursors.append(CandidateCursor(self.run, f"{self.group_id}:{index}", self.number, index))
        return self.cursors

    def close(self, reason_if_none: DiscardReason = DiscardReason.CANCELLED) -> None:
        for cursor in self.add_new_cursors():
            cursor.close(reason_if_none)
        self.run = None


class EventFeed:
    """Gives the events of a batch to listeners, each from its own event number.

    Tokens are read when a listener has taken all events so far. So a stalled listener costs nothing, and later gets few
    large deltas. The log refers to tokens and does not copy them: a delta takes 16 bytes.

    Args:
        chunk: least number of tokens in a delta of a running candidate, or None for no deltas.
        interval: seconds between two polls.
        replayable: whether events are kept, for several listeners.
        clock: measures polls. The event loop's clock may be virtual, and stand still in a turn.
    """

    def __init__(
        self,
        first: BatchStarted,
        chunk: int | None,
        interval: float,
        replayable: bool,
        clock: Callable[[], float],
    ) -> None:
        self._batch_id = first.batch_id
        self._chunk = chunk
        self._interval = interval
        self._replayable = replayable
        # The entry of a delta is its candidate, because an object of its own would take 90 bytes. `_ranges` has two
        # numbers for each entry: the token range of a delta, or zeros.
        self._log: list[CandidateCursor | Event] = [first]
        self._ranges = array("i", (0, 0))
        # Events that were removed from the front of the log.
        self._num_dropped = 0
        self._groups: dict[int, _GroupCursor] = {}
        # By group, if events are kept.
        self._cursors: list[list[CandidateCursor]] = []
        # Numbers of groups that may have new events, in order.
        self._due_numbers: dict[int, None] = {}
        self._end: BatchEnd | None = None
        self._is_complete = False
        self._new_entries = self._generate_entries()
        self._clock = clock
        self._next_poll = 0.0
        # Reading time since the latest poll.
        self._seconds_spent = 0.0
        # Set at the next change. Each change makes a new event.
        self._changed = asyncio.Event()

    # --- called by the batch ------------------------------------------------

    def group_started(self, number: int, run: GroupRun[Any, Any]) -> None:
        group = _GroupCursor(number, run.spec.group_id, run)
        self._groups[number] = group
        if self._replayable:
            self._cursors.append(group.cursors)

    def trajectory_selected(self, number: int, index: int, sample: Sample) -> None:
        group = self._groups.get(number)
        # The groups of a failed batch are gone.
        if group is not None:
            group.add_new_cursors()[index].select(sample)
            self._notify(number)

    def group_ended(self, result: GroupResult) -> None:
        # The group may have failed before its start.
        group = self._groups.setdefault(result.number, _GroupCursor(result.number, result.group_id, None))
        group.result = result
        group.close()
        self._notify(result.number)

    def group_dropped(self, number: int) -> None:
        """Discard a complete group that is not returned, because its rewards are equal."""
        group = self._groups.get(number)
        if group is not None:
            group.close(DiscardReason.ZERO_VARIANCE)
            self._notify(number)

    def batch_ended(self, end: BatchEnd) -> None:
        self._end = end
        if isinstance(end, BatchFailed):
            for group in self._groups.values():
                for cursor in group.cursors:
                    cursor.run = None
            self._groups.clear()
        for group in self._groups.values():
            group.close()
        self._notify(*self._groups)

    def _notify(self, *numbers: int) -> None:
        self._due_numbers.update(dict.fromkeys(numbers))
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def kept_bytes(self) -> int:
        """Memory after the end, without samples, which the batch's results share."""
        log = sys.getsizeof(self._log) + sys.getsizeof(self._ranges)
        return log + sum(cursor.kept_bytes for cursors in self._cursors for cursor in cursors)

    # --- called by listeners ------------------------------------------------

    @property
    def last_number(self) -> int:
        """The first event is 1."""
        return self._num_dropped + len(self._log)

    def next_after(self, number: int) -> tuple[int, Event] | None:
        """Return the event after event ``number``, with its number; None if there is no such event yet."""
        while number < self.last_number or self._append_next_entry():
            number += 1
            log_index = number - self._num_dropped - 1
            entry = self._log[log_index]
            event: Event | None
            if isinstance(entry, CandidateCursor):
                event = entry.make_delta(self._ranges[2 * log_index], self._ranges[2 * log_index + 1])
            else:
                event = entry
            # Without replays, the only listener takes each event once.
            if not self._replayable:
                self._num_dropped += len(self._log)
                self._log.clear()
                del self._ranges[:]
            # The delta of a discarded candidate is skipped.
            if event is not None:
                return number, event
        return None

    async def next(self, number: int) -> tuple[int, Event] | None:
        """Wait for `next_after`; None after the last event. Safe to cancel."""
        while (numbered_event := self.next_after(number)) is None:
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
                # Every running group may have new tokens.
                self._due_numbers.update(dict.fromkeys(self._groups))
                self._next_poll = now + max(self._interval, self._seconds_spent / MAX_POLL_SHARE)
                self._seconds_spent = 0.0
        return numbered_event

    def _append_next_entry(self) -> bool:
        started_at = self._clock()
        try:
            entry = next(self._new_entries, None)
        except Exception as error:
            # A bug of ours, which listeners get as the last event.
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

    def _generate_entries(self) -> Iterator[_Entry | None]:
        """Yield None while there is no new entry."""
        while not isinstance(self._end, BatchFailed):
            while self._due_numbers:
                number = next(iter(self._due_numbers))
                del self._due_numbers[number]
                group = self._groups.get(number)
                if group is None:
                    continue
                for cursor in group.add_new_cursors():
                    yield from cursor.new_entries(self._chunk or 1)
                if group.result is not None:
                    # The group may have ended while a listener took these entries.
                    for cursor in group.add_new_cursors():
                        yield from cursor.new_entries(self._chunk or 1)
                    self._groups.pop(number, None)
                    yield group.result
            if self._end is not None:
                break
            yield None
        yield self._end
