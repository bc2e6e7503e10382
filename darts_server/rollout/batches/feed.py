"""The events of one batch, made when somebody is ready to hear them."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from darts_server.rollout.batches.cursor import CandidateCursor, Passage
from darts_server.rollout.batches.events import (
    BatchBegan,
    Belongs,
    Broken,
    Discarded,
    Done,
    EndOfBatch,
    Event,
    GroupDecided,
)
from darts_server.rollout.batches.submission import GroupResult
from darts_server.rollout.run import GroupRun
from darts_server.types import DiscardReason, Sample

logger = logging.getLogger(__name__)

LARGEST_SHARE = 0.1
"""Of its listeners' time: looking at all candidates of a very large batch takes longer than the interval."""

_Entry = BatchBegan | Passage | Belongs | Discarded | GroupDecided | Done | Broken


class Feed:
    """Tells listeners of a batch, each from where it wants to begin.

    Nothing is made ahead: tokens are looked up when a listener has heard all that was told before. So one that stalls
    costs nothing, and what came meanwhile is told at once. What was told can be told again: of tokens there is only
    written down which they were. Implements :class:`darts_server.rollout.batches.submission.BatchObserver`.

    Args:
        began: the first event.
        chunk: tokens of a running candidate that are told together, at least; ``None``: groups alone are told.
        interval: seconds between two looks at what candidates have generated.
        repeats: whether what was told can be told again; if not there is one listener.
        clock: monotonic seconds, by which looking takes long. Not the loop's, which may stand still for a turn.
    """

    def __init__(
        self, began: BatchBegan, chunk: int | None, interval: float, repeats: bool, clock: Callable[[], float]
    ) -> None:
        self._batch_id = began.batch_id
        self._chunk = chunk
        self._interval = interval
        self._repeats = repeats
        self._log: list[_Entry] = [began]
        self._forgotten = 0
        self._groups: dict[int, _Group] = {}
        self._due: dict[int, None] = {}  # groups of which there may be news, in order
        self._end: EndOfBatch | None = None
        self._over = False
        self._coming = self._entries()
        self._clock = clock
        self._next_look = 0.0
        self._spent = 0.0
        self._changed = asyncio.Event()

    # --- for who runs the batch ---------------------------------------------

    def group_started(self, number: int, run: GroupRun[Any, Any]) -> None:
        self._groups[number] = _Group(number, f"{self._batch_id}-{number}", run)

    def trajectory_selected(self, number: int, index: int, sample: Sample) -> None:
        if group := self._groups.get(number):
            group.candidates()[index].belongs(sample)
            self._change(number)

    def decided(self, result: GroupResult) -> None:
        """A group's outcome. Nothing more is heard of it."""
        group = self._groups.setdefault(result.number, _Group(result.number, result.group_id, None))
        group.result = result
        # A candidate without an end of its own is one that a decided group still watches.
        group.close(DiscardReason.WATCHED if result.error is None else DiscardReason.CANCELLED)
        self._change(result.number)

    def ended(self, end: EndOfBatch) -> None:
        """The batch's end. Nothing more is heard."""
        self._end = end
        if isinstance(end, Broken):
            self._groups.clear()
        for group in self._groups.values():
            group.close(DiscardReason.CANCELLED)
        self._change(*self._groups)

    # --- for listeners ------------------------------------------------------

    @property
    def told(self) -> int:
        """Number of the latest event; the first is 1."""
        return self._forgotten + len(self._log)

    @property
    def kept(self) -> int:
        """Events that are written down."""
        return len(self._log)

    def next(self, after: int) -> tuple[int, Event] | None:
        """The event that follows number ``after``, with its own; ``None`` if there is none now."""
        while after < self.told or self._make():
            after += 1
            entry = self._log[after - self._forgotten - 1]
            if not self._repeats:
                self._forgotten += len(self._log)
                self._log.clear()
            event = entry.delta if isinstance(entry, Passage) else entry
            if event is not None:
                return after, event
        return None

    def over(self, after: int) -> bool:
        """Whether event number ``after`` was the last."""
        return self._over and after >= self.told

    async def news(self) -> None:
        """Return when there may be another event. To be called in the turn in which `next` gave none."""
        if self._chunk is None:
            await self._changed.wait()
            return
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._next_look):
                await self._changed.wait()
        now = asyncio.get_running_loop().time()
        if now >= self._next_look:
            self._due.update(dict.fromkeys(self._groups))
            self._next_look = now + max(self._interval, self._spent / LARGEST_SHARE)
            self._spent = 0.0

    # --- making -------------------------------------------------------------

    def _change(self, *numbers: int) -> None:
        self._due.update(dict.fromkeys(numbers))
        self._changed.set()
        self._changed = asyncio.Event()

    def _make(self) -> bool:
        began = self._clock()
        try:
            entry = next(self._coming, None)
        except Exception as error:  # a fault of ours; the listeners hear it, and the batch ends when they leave
            logger.exception("the events of batch %s failed", self._batch_id)
            entry = Broken(error)
        self._spent += self._clock() - began
        if entry is None:
            return False
        self._log.append(entry)
        self._over = isinstance(entry, Done | Broken)
        return True

    def _entries(self) -> Iterator[_Entry | None]:
        """All that is to be told, each made when it is asked for; ``None`` when there is nothing now."""
        while not isinstance(self._end, Broken):
            while self._due:
                number = next(iter(self._due))
                del self._due[number]
                yield from self._of(self._groups.get(number))
            if self._end is not None:
                break
            yield None
        if self._end is not None:
            yield self._end

    def _of(self, group: "_Group | None") -> Iterator[_Entry]:
        if group is None:
            return
        for candidate in group.candidates():
            yield from candidate.news(self._chunk or 1)
        if group.result is not None:
            for candidate in group.candidates():  # it may have been decided while these were told
                yield from candidate.news(self._chunk or 1)
            self._groups.pop(group.number, None)
            yield GroupDecided(group.result)


class _Group:
    """A group of which something is still to be told."""

    def __init__(self, number: int, group_id: str, run: GroupRun[Any, Any] | None) -> None:
        self.number = number
        self.result: GroupResult | None = None
        self._group_id = group_id
        self._run = run
        self._candidates: list[CandidateCursor] = []

    def candidates(self) -> Sequence[CandidateCursor]:
        """All that were started so far."""
        run = self._run
        if run is not None:
            for index in range(len(self._candidates), len(run.candidates)):
                self._candidates.append(CandidateCursor(run, f"{self._group_id}:{index}", self.number, index))
        return self._candidates

    def close(self, reason: DiscardReason) -> None:
        """Nothing more comes of it. ``reason``: of candidates that have none to be discarded."""
        for candidate in self.candidates():
            candidate.close(reason)
        self._run = None
