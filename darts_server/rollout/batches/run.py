"""A submitted batch that runs by itself, for whoever listens."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self

from darts_server.exceptions import DartsError, GroupAborted
from darts_server.rollout.batches.events import BatchBegan, Broken, Done, EndOfBatch, Event
from darts_server.rollout.batches.feed import Feed
from darts_server.rollout.batches.submission import GroupResult, Submission

logger = logging.getLogger(__name__)


class Stream(Enum):
    """What a caller is told while its batch runs."""

    NOTHING = False
    GROUPS = "groups"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Form:
    """How a caller wants its answer. ``chunk_tokens``: tokens of a candidate that are told together, at least."""

    stream: Stream = Stream.NOTHING
    chunk_tokens: int = 100


class BatchRun:
    """Runs a batch in a task of its own, to its end or until it is cancelled.

    Args:
        form: how its listeners are answered.
        repeats: whether several may listen, from the first event on; if not there is one.
        interval: seconds between two looks at what candidates have generated.
        on_idle: called when the last listener has left.
        on_end: called when it has ended, whichever way.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        submission: Submission[Any, Any],
        form: Form,
        *,
        repeats: bool,
        interval: float,
        on_idle: Callable[["BatchRun"], None],
        on_end: Callable[["BatchRun"], None],
        clock: Callable[[], float],
    ) -> None:
        self.batch_id = submission.batch_id
        self.policy = submission.plan.policy
        self._size = submission.size
        self.form = form
        self.feed = Feed(
            BatchBegan(self.batch_id, self.policy, submission.size),
            form.chunk_tokens if form.stream is Stream.TOKENS else None,
            interval,
            repeats,
            clock,
        )
        self.listeners = 0
        self.end: EndOfBatch | None = None
        """How it ended; ``None`` while it runs."""
        self._ended = asyncio.Event()
        self._on_idle = on_idle
        self._on_end = on_end
        self._clock = clock
        self._began_at = clock()
        self._task = asyncio.get_running_loop().create_task(self._run(submission), name=f"darts-{self.batch_id}")

    def listen(self, after: int = 0) -> "Listener":
        """Hear its events that follow number ``after``."""
        return Listener(self, after)

    async def answer(self) -> Done:
        """Wait for its end.

        Raises:
            GroupAborted: it was cancelled.
        """
        await self._ended.wait()
        if isinstance(self.end, Broken):
            raise self.end.error
        assert self.end is not None
        return self.end

    def cancel(self, why: str) -> bool:
        """End it, with an error for its listeners; whether it was running."""
        return self.fail(GroupAborted(why))

    def fail(self, error: DartsError) -> bool:
        """The same, with that error."""
        if self.end is not None:
            return False
        self._finish(Broken(error))
        # In a turn of its own: a task that never had its first would not clear away.
        asyncio.get_running_loop().call_soon(self._task.cancel)
        return True

    def left(self) -> None:
        """A listener went away."""
        self.listeners -= 1
        if not self.listeners:
            self._on_idle(self)

    async def _run(self, submission: Submission[Any, Any]) -> None:
        follower = self.feed if self.form.stream is Stream.TOKENS else None
        results: list[GroupResult] = []
        try:
            async with aclosing(submission.results(follower)) as deciding:
                async for result in deciding:
                    results.append(result)
                    self.feed.decided(result)
        except Exception as error:  # a fault of ours; the listeners hear it
            logger.exception("batch %s failed", self.batch_id)
            self._finish(Broken(error))
        else:
            self._finish(Done(self.batch_id, results, submission.unfinished, self._clock() - self._began_at))

    def _finish(self, end: EndOfBatch) -> None:
        if self.end is None:
            self.end = end
            self.feed.ended(end)
            self._ended.set()
            self._log(end)
            self._on_end(self)

    def _log(self, end: EndOfBatch) -> None:
        decided = len(end.results) if isinstance(end, Done) else 0
        about = {"batch_id": self.batch_id, "prompts": self._size, "decided": decided, "policy": self.policy}
        seconds = round(self._clock() - self._began_at, 3)
        logger.info(
            "rollouts %s: %d of %d prompts decided in %.3f s",
            *(self.batch_id, decided, self._size, seconds),
            extra={**about, "seconds": seconds},
        )


class Listener:
    """One caller that hears the events of a batch. As a context it counts as listening."""

    def __init__(self, batch: BatchRun, after: int) -> None:
        self._batch = batch
        self._feed = batch.feed
        self._after = after

    def __enter__(self) -> Self:
        self._batch.listeners += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._batch.left()

    def ready(self) -> tuple[int, Event] | None:
        """The next event and its number, if there is one now."""
        found = self._feed.next(self._after)
        if found is not None:
            self._after = found[0]
        return found

    async def next(self) -> tuple[int, Event] | None:
        """The next event and its number; ``None`` after the last. Being cancelled loses nothing."""
        while (found := self.ready()) is None:
            if self._feed.over(self._after):
                return None
            await self._feed.news()
        return found
