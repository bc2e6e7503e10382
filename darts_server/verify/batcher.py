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
        """Whether the runner can run a batch without `start`."""
        return True

    async def start(self) -> None:
        """Raises `RunnerFailed`."""

    async def run(self, answers: Sequence[Answer]) -> Sequence[Call | None]:
        """Run a batch. Never raises. None stands for an answer that must be called again, alone."""
        raise NotImplementedError

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Job:
    answer: Answer
    future: asyncio.Future[Call]
    submitted_at: float
    must_run_alone: bool = False


class Batcher:
    """Runs the calls of a verifier. A runner is started when all others are busy.

    Args:
        wait_limit: seconds after which an answer has no reward, also if its call has not begun.
        report_call: called with each call that ends, and its seconds including the wait for a runner.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        wait_limit: float,
        report_call: Callable[[Call, float], None],
    ) -> None:
        self._report_call = report_call
        self._wait_limit = wait_limit
        self._late_call = Call(
            VerifierResult.TIMEOUT,
            detail=f"gave no verdict within {wait_limit:g} seconds, as too many answers wait: raise "
            "--verifier-processes (of a URL, --verifier-requests) or --verifier-timeout",
        )
        self._runners = runners
        # The runner that ended last is used first. Runners that must be started stand in front.
        self._free_runners = list(runners)
        self._num_starting = 0
        self._waiting: deque[Job] = deque()
        # All jobs that wait or run, the oldest first.
        self._unfinished: dict[Job, None] = {}
        # Calls `_end_late_jobs` when the oldest job may be late.
        self._late_timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds_per_answer = math.inf
        self._is_dispatch_scheduled = False
        self._is_closed = False

    async def start(self) -> None:
        """Start one runner.

        Raises:
            RunnerFailed
        """
        await self._free_runners[-1].start()

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # A task that is cancelled before its first step ends none of its jobs.
        for job in list(self._unfinished):
            self._end_job(job, CLOSED)
        if self._late_timer is not None:
            self._late_timer.cancel()
        await asyncio.gather(*(runner.close() for runner in self._runners))

    def submit(self, answer: Answer) -> asyncio.Future[Call]:
        """Return a future, which never has an exception."""
        loop = asyncio.get_running_loop()
        job = Job(answer, loop.create_future(), loop.time())
        self._waiting.append(job)
        self._unfinished[job] = None
        # A timer for each answer would cost as much as the rest of the queue.
        if self._late_timer is None:
            self._late_timer = loop.call_later(self._wait_limit, self._end_late_jobs)
        # Answers of the same turn of the event loop go into the same batch.
        if not self._is_dispatch_scheduled:
            self._is_dispatch_scheduled = True
            loop.call_soon(self._dispatch)
        return job.future

    def _dispatch(self) -> None:
        self._is_dispatch_scheduled = False
        if self._is_closed:
            self._end_waiting_jobs(CLOSED)
        while self._waiting and self._free_runners:
            runner = self._free_runners[-1]
            if runner.is_started:
                jobs = self._take_batch(runner.limits)
                # All waiting jobs were late, or belonged to cancelled groups.
                if not jobs:
                    return
                work = self._run_batch(runner, jobs)
            else:
                # Each waiting job already has a runner that is starting.
                if self._num_starting >= len(self._waiting):
                    return
                self._num_starting += 1
                work = self._start_runner(runner)
            self._free_runners.pop()
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take_batch(self, limits: BatchLimits) -> list[Job]:
        max_jobs = limits.answers
        if limits.seconds < math.inf:
            max_jobs = max(1, min(max_jobs, int(limits.seconds / self._seconds_per_answer)))
        if limits.shared:
            max_jobs = min(max_jobs, math.ceil(len(self._waiting) / len(self._runners)))

        jobs: list[Job] = []
        while self._waiting and len(jobs) < max_jobs:
            if jobs and self._waiting[0].must_run_alone:
                break
            job = self._waiting.popleft()
            # The job was late, or its group was cancelled.
            if job.future.done():
                self._unfinished.pop(job, None)
                continue
            jobs.append(job)
            if job.must_run_alone:
                break
        return jobs

    async def _start_runner(self, runner: Runner) -> None:
        try:
            await runner.start()
        except RunnerFailed as error:
            # No other runner can serve the waiting jobs.
            if self._num_starting == 1 and not any(each.is_started for each in self._runners):
                self._end_waiting_jobs(Call(VerifierResult.CRASH, detail=f"cannot be started: {error}"))
        finally:
            self._num_starting -= 1
            self._release(runner)

    async def _run_batch(self, runner: Runner, jobs: Sequence[Job]) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        # If this task is cancelled, the server is stopping.
        calls: Sequence[Call | None] = [CLOSED] * len(jobs)
        try:
            calls = await runner.run([job.answer for job in jobs])
        finally:
            try:
                seconds = max((loop.time() - began) / len(jobs), MIN_SECONDS)
                if self._seconds_per_answer < math.inf:
                    seconds = max(seconds, DECAY * self._seconds_per_answer)
                self._seconds_per_answer = seconds
                for job, call in zip(jobs, calls, strict=True):
                    if call is None and not job.must_run_alone:
                        job.must_run_alone = True
                        self._waiting.appendleft(job)
                    else:
                        self._end_job(job, call or LOST)
            finally:
                # Also after an unexpected error, because other jobs wait.
                self._release(runner)

    def _release(self, runner: Runner) -> None:
        self._free_runners.insert(len(self._free_runners) if runner.is_started else 0, runner)
        self._dispatch()

    def _end_waiting_jobs(self, call: Call) -> None:
        while self._waiting:
            self._end_job(self._waiting.popleft(), call)

    def _end_late_jobs(self) -> None:
        loop = asyncio.get_running_loop()
        self._late_timer = None
        for job in list(self._unfinished):
            late_at = job.submitted_at + self._wait_limit
            if late_at > loop.time():
                self._late_timer = loop.call_at(late_at, self._end_late_jobs)
                break
            self._end_job(job, self._late_call)

    def _end_job(self, job: Job, call: Call) -> None:
        self._unfinished.pop(job, None)
        # A late job or a cancelled group has ended already.
        if not job.future.done():
            job.future.set_result(call)
            self._report_call(call, asyncio.get_running_loop().time() - job.submitted_at)
