"""Collect waiting answers into batches, and give the batches to runners."""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from darts_server.exceptions import DartsError
from darts_server.types import VerifierResult
from darts_server.verify.calls import Call
from darts_server.verify.types import Answer

DECAY = 0.95
"""Factor of the estimated time per answer with each faster batch. After a slow call, batches stay small for a while, so
that few answers wait behind the next slow call."""
MIN_SECONDS = 1e-6
CLOSED = Call(VerifierResult.CRASH, detail="was not called: the server is stopping")
LOST = Call(VerifierResult.CRASH, detail="was not called: its process died twice before the call")


class RunnerFailed(DartsError):
    """A runner cannot be started. The message says why."""


@dataclass(slots=True)
class BatchLimits:
    answers: int = 1
    seconds: float = math.inf
    """Time that a batch should take at most."""
    shared: bool = True
    """Whether waiting answers are divided equally among all runners."""


class Runner:
    """A process, or a connection, that runs one batch at a time."""

    limits = BatchLimits()

    @property
    def is_started(self) -> bool:
        """Whether the runner can run a batch without `prepare`."""
        return True

    async def prepare(self) -> None:
        """Start the runner. Raises `RunnerFailed`."""

    async def run(self, answers: Sequence[Answer]) -> Sequence[Call | None]:
        """Run a batch. Never raises. None stands for an answer that must be called again, alone."""
        raise NotImplementedError

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    answer: Answer
    future: asyncio.Future[Call]
    began: float
    alone: bool = False


class Batcher:
    """Runs the calls of a verifier. A runner is started when all others are busy.

    Args:
        wait_limit: seconds after which an answer has no reward, also if its call has not begun.
        ended: called with each call that ends, and its seconds including the wait for a runner.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        wait_limit: float,
        ended: Callable[[Call, float], None],
    ) -> None:
        self._ended = ended
        self._wait_limit = wait_limit
        self._late = Call(
            VerifierResult.TIMEOUT,
            detail=f"gave no verdict within {wait_limit:g} seconds, as too many answers wait: raise "
            "--verifier-processes (of a URL, --verifier-requests) or --verifier-timeout",
        )
        self._runners = runners
        # The runner that ended last is used first. Runners that must be started stand in front.
        self._free = list(runners)
        self._starting = 0
        self._waiting: deque[Job] = deque()
        # All answers that wait or are called, the oldest first.
        self._pending: dict[Job, None] = {}
        # Calls `_end_late` when the oldest answer may be late.
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds = math.inf
        self._is_scheduled = False
        self._is_closed = False

    async def start(self) -> None:
        """Start one runner.

        Raises:
            RunnerFailed
        """
        await self._free[-1].prepare()

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._end_waiting(CLOSED)
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(runner.close() for runner in self._runners))

    def call(self, answer: Answer) -> asyncio.Future[Call]:
        """Return a future, which never has an exception."""
        loop = asyncio.get_running_loop()
        job = Job(answer, loop.create_future(), loop.time())
        self._waiting.append(job)
        self._pending[job] = None
        # A timer for each answer would cost as much as the rest of the queue.
        if self._timer is None:
            self._timer = loop.call_later(self._wait_limit, self._end_late)
        # Answers of the same turn of the event loop go into the same batch.
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._dispatch)
        return job.future

    def _dispatch(self) -> None:
        """Give waiting answers to free runners.

        If no free runner has been started, start runners, at most one for each waiting answer.
        """
        self._is_scheduled = False
        if self._is_closed:
            self._end_waiting(CLOSED)
        while self._waiting and self._free:
            jobs: list[Job] = []
            if self._free[-1].is_started:
                jobs = self._take(self._free[-1].limits)
                # All waiting answers were late, or belonged to cancelled groups.
                if not jobs:
                    return
            # Each waiting answer already has a runner that is starting.
            elif self._starting >= len(self._waiting):
                return
            task = asyncio.create_task(self._serve(self._free.pop(), jobs))
            if not jobs:
                self._starting += 1
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take(self, limits: BatchLimits) -> list[Job]:
        """Remove and return the next batch."""
        most = limits.answers
        if limits.seconds < math.inf:
            most = max(1, min(most, int(limits.seconds / self._seconds)))
        if limits.shared:
            most = min(most, math.ceil(len(self._waiting) / len(self._runners)))
        jobs: list[Job] = []
        # A job that must be alone is a batch.
        while self._waiting and len(jobs) < most and not (jobs and self._waiting[0].alone):
            job = self._waiting.popleft()
            # The answer was late, or its group was cancelled.
            if job.future.done():
                self._pending.pop(job, None)
                continue
            jobs.append(job)
            most = 1 if job.alone else most
        return jobs

    async def _serve(self, runner: Runner, jobs: Sequence[Job]) -> None:
        """Run a batch, or start the runner if ``jobs`` is empty."""
        try:
            if jobs:
                await self._run(runner, jobs)
            else:
                await runner.prepare()
        except RunnerFailed as error:
            if self._starting == 1 and not any(each.is_started for each in self._runners):
                self._end_waiting(Call(VerifierResult.CRASH, detail=f"cannot be started: {error}"))
        finally:
            if not jobs:
                self._starting -= 1
            self._free.insert(len(self._free) if runner.is_started else 0, runner)
            # Also after an unexpected error, because other answers wait.
            self._dispatch()

    async def _run(self, runner: Runner, jobs: Sequence[Job]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        calls: Sequence[Call | None] = [CLOSED] * len(jobs)
        try:
            calls = await runner.run([job.answer for job in jobs])
        finally:
            seconds = max((loop.time() - began) / len(jobs), MIN_SECONDS)
            self._seconds = seconds if self._seconds == math.inf else max(seconds, DECAY * self._seconds)
            for job, call in zip(jobs, calls, strict=True):
                if call is None and not job.alone:
                    job.alone = True
                    self._waiting.appendleft(job)
                else:
                    self._end(job, call or LOST)

    def _end_waiting(self, call: Call) -> None:
        while self._waiting:
            self._end(self._waiting.popleft(), call)

    def _end_late(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for job in list(self._pending):
            late_at = job.began + self._wait_limit
            if late_at > loop.time():
                self._timer = loop.call_at(late_at, self._end_late)
                break
            self._end(job, self._late)

    def _end(self, job: Job, call: Call) -> None:
        self._pending.pop(job, None)
        if not job.future.done():
            job.future.set_result(call)
            self._ended(call, asyncio.get_running_loop().time() - job.began)
