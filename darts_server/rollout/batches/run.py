"""Run a submitted batch in a task of its own, for any number of listeners."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self

from darts_server.exceptions import DartsError, GroupAborted
from darts_server.rollout.batches.events import BatchDone, BatchEnd, BatchFailed, BatchStarted, Event, GroupResult
from darts_server.rollout.batches.feed import EventFeed
from darts_server.rollout.batches.submission import Submission
from darts_server.serving.admission import caller

logger = logging.getLogger(__name__)


class StreamMode(Enum):
    """Which events of its batch a caller gets while it runs."""

    OFF = False
    GROUPS = "groups"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a caller wants its answer. ``chunk_tokens``: least number of tokens in a delta of a running candidate."""

    stream: StreamMode = StreamMode.OFF
    chunk_tokens: int = 100


class BatchRun:
    """Run a batch to its end, or until it is cancelled.

    Args:
        answer_format: how its listeners are answered.
        replayable: whether there may be several listeners, each from the first event on; otherwise there is one.
        interval: seconds between two polls of what candidates have generated.
        on_idle: called when the last listener has left.
        on_end: called when it has ended, with any outcome.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        submission: Submission[Any, Any],
        answer_format: AnswerFormat,
        *,
        replayable: bool,
        interval: float,
        on_idle: Callable[["BatchRun"], None],
        on_end: Callable[["BatchRun"], None],
        clock: Callable[[], float],
    ) -> None:
        self.batch_id = submission.batch_id
        self.policy = submission.plan.policy
        self.survivors = submission.plan.shaping.return_survivors
        self.sampling = submission.sampling
        self.owner = caller.get().name
        """Name of the caller that started it; ``None`` for callers without a key."""
        self._size = submission.size
        self.answer_format = answer_format
        self.feed = EventFeed(
            BatchStarted(self.batch_id, self.policy, submission.size, self.survivors, self.sampling),
            answer_format.chunk_tokens if answer_format.stream is StreamMode.TOKENS else None,
            interval,
            replayable,
            clock,
        )
        self.listeners = 0
        """Number of listeners."""
        self.end: BatchEnd | None = None
        """How it ended; ``None`` while it runs."""
        self._ended = asyncio.Event()
        self._submission: Submission[Any, Any] | None = submission
        self._on_idle = on_idle
        self._on_end = on_end
        self._clock = clock
        self._started_at = clock()
        self.task = asyncio.get_running_loop().create_task(self._run(submission), name=f"darts-{self.batch_id}")
        """Runs it, and ends a little after it, when prompts that it has taken are given back."""

    def listen(self, after: int = 0) -> "Listener":
        """Create a listener that gets the events after event number ``after``."""
        return Listener(self, after)

    async def wait(self) -> BatchDone:
        """Wait for the end of the batch.

        Raises:
            GroupAborted: it was cancelled.
        """
        await self._ended.wait()
        if isinstance(self.end, BatchFailed):
            raise self.end.error
        assert self.end is not None
        return self.end

    def cancel(self, why: str) -> bool:
        """End the batch with `GroupAborted`; whether it was running."""
        return self.fail(GroupAborted(why))

    def fail(self, error: DartsError) -> bool:
        """End the batch with an error, which its listeners get; whether it was running."""
        if self.end is not None:
            return False
        self._finish(BatchFailed(error))
        # In a later turn of the loop: a task that is cancelled before its first turn never runs its cleanup.
        asyncio.get_running_loop().call_soon(self.task.cancel)
        return True

    def interrupt(self, error: DartsError, *, keep: bool, keep_tokens: bool) -> None:
        """End the batch with what its groups have generated, see `Submission.interrupt`.

        One that still waits for the engine has generated nothing, and fails.
        """
        submission = self._submission
        if submission is not None and not submission.interrupt(error, keep=keep, keep_tokens=keep_tokens):
            self.fail(error)

    def remove_listener(self) -> None:
        self.listeners -= 1
        if not self.listeners:
            self._on_idle(self)

    async def _run(self, submission: Submission[Any, Any]) -> None:
        feed = self.feed if self.answer_format.stream is StreamMode.TOKENS else None
        results: list[GroupResult] = []
        try:
            async with aclosing(submission.results(feed)) as new_results:
                async for result in new_results:
                    results.append(result)
                    self.feed.group_ended(result)
        except Exception as error:  # a bug of ours: listeners get it
            logger.exception("batch %s failed", self.batch_id)
            self._finish(BatchFailed(error))
        else:
            if self.end is None:
                carried = submission.keep_undecided()
                seconds = self._clock() - self._started_at
                generated = submission.generated_tokens
                self._finish(BatchDone(self.batch_id, results, submission.unfinished, seconds, generated, carried))
        finally:
            self._submission = None  # a batch that is kept must not keep its prompts
            if isinstance(self.end, BatchFailed):  # its caller has no more than the groups that it was streamed
                submission.give_back(delivered=self.answer_format.stream is not StreamMode.OFF)

    def _finish(self, end: BatchEnd) -> None:
        if self.end is None:
            self.end = end
            self.feed.batch_ended(end)
            self._ended.set()
            self._log_end(end)
            self._on_end(self)

    def _log_end(self, end: BatchEnd) -> None:
        decided = len(end.results) if isinstance(end, BatchDone) else 0
        fields = {"batch_id": self.batch_id, "prompts": self._size, "decided": decided, "policy": self.policy}
        seconds = round(self._clock() - self._started_at, 3)
        logger.info(
            "rollouts %s: %d of %d prompts decided in %.3f s",
            *(self.batch_id, decided, self._size, seconds),
            extra={**fields, "seconds": seconds},
        )


class Listener:
    """Read the events of a batch for one caller. As a context manager it counts as a listener of the batch."""

    def __init__(self, batch: BatchRun, after: int) -> None:
        self._batch = batch
        self._feed = batch.feed
        self._number = after

    def __enter__(self) -> Self:
        self._batch.listeners += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._batch.remove_listener()

    def next_nowait(self) -> tuple[int, Event] | None:
        """The next event and its number; ``None`` if there is none yet."""
        found = self._feed.next_after(self._number)
        if found is not None:
            self._number = found[0]
        return found

    async def next(self) -> tuple[int, Event] | None:
        """Wait for the next event and its number; ``None`` after the last. Safe to cancel: no event is lost."""
        while (found := self.next_nowait()) is None:
            if self._feed.ends_at(self._number):
                return None
            await self._feed.wait()
        return found
