"""The queue: callers put prompts in and take groups out, while the engine goes on with the next prompts."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import DartsError, ServerStopping, StateError
from darts_server.observers import QueueObserver
from darts_server.records import UpdateRecord
from darts_server.rollout.batches.request import BatchRequest, NewPlanner, check_terms
from darts_server.rollout.queue.consumers import Consumers
from darts_server.rollout.queue.entries import AckOutcome, WaitsFor
from darts_server.rollout.queue.handout import Handout, TakenGroup
from darts_server.rollout.queue.history import PutResult
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.ledger import Ledger
from darts_server.rollout.queue.meter import QueueMeter
from darts_server.rollout.queue.owners import QueueLimits
from darts_server.rollout.queue.puts import Put
from darts_server.rollout.queue.runner import Encode, QueueRunner
from darts_server.rollout.queue.saving import Saver
from darts_server.rollout.queue.starting import Starter
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.admission import Caller
from darts_server.store.transactions import TransactionStore

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.05
"""Between two looks at the engine while prompts are queued: about a decode step."""
IDLE_SECONDS = 1.0
ACKNOWLEDGED_AT_ONCE = 500
"""Leases that are acknowledged in one turn of the event loop: ten milliseconds."""


class PromptQueue(Generic[RequestT, OutputT]):
    """Keep prompts until their groups are acknowledged.

    Implements :class:`darts_server.weights.port.UpdateObserver`.

    Args:
        disk: where everything is kept.
        encode: of groups, as consumers get them; called in a thread.
        max_staleness: of jobs that name none.
        observer: notified of what happens.
        model: what is served; groups of another one start again.
        clock: Unix seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        new_planner: NewPlanner,
        disk: TransactionStore,
        encode: Encode,
        limits: QueueLimits | None = None,
        max_staleness: int = 1,
        observer: QueueObserver | None = None,
        model: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._rollouts = rollouts
        self._renderer = renderer
        self._new_planner = new_planner
        self._clock = clock
        self._ledger = Ledger(limits or QueueLimits(), max_staleness, new_name)
        self._ledger.load(disk.items)
        self._ledger.set_version(rollouts.weight_version, model)
        self._saver = Saver(disk, self._ledger.changes)
        observer = observer or QueueObserver()
        self.meter = QueueMeter(self._ledger, observer, clock)
        self._handout = Handout(self._ledger, self._saver, observer, self._wake_up)
        self._runner = QueueRunner(
            self._ledger,
            self._saver,
            rollouts,
            renderer,
            new_planner,
            encode,
            self._wake_up,
            self._pause,
        )
        self._starter = Starter(self._ledger, rollouts, renderer, new_planner, self._runner)
        self._consumers = Consumers()
        self._is_durable = disk.is_durable
        self._wake = asyncio.Event()
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._last_turn = time.monotonic()
        self._look_for_unused_at = 0.0

    def open(self) -> None:
        """Begin to run prompts."""
        self._task = asyncio.get_running_loop().create_task(self._work(), name="darts-queue")

    # --- callers ------------------------------------------------------------

    async def put(self, who: Caller, put: Put) -> PutResult:
        """Add prompts to a job of the caller. They are on the disk when this returns.

        Raises:
            InvalidRequest: names the field; nothing was added.
            Conflict, NotFound, TooLarge, QuotaReached, StateError
        """
        if put.prompts:
            request = BatchRequest(put.prompts, put.terms.group_size, put.terms.sampling, put.terms.policy)
            check_terms(request, self._rollouts, self._renderer, self._new_planner)
        job_id, now = (who.name or "", put.job), self._clock()
        numbers = self._ledger.reserve_numbers(job_id, put.terms, len(put.prompts))
        # In a thread: many prompts take a while.
        new = await asyncio.to_thread(put.build, job_id, numbers, now, new_name)
        result = self._ledger.put(
            job_id,
            new,
            put.terms,
            options=put.options,
            taken=put.taken,
            is_admin=who.is_admin,
            key=put.key,
            digest=put.digest,
        )
        await self._saver.save()
        self._wake_up()
        return result

    def count_consumer(self, who: Caller) -> AbstractContextManager[None]:
        """Count a request that takes groups until the block ends.

        Raises:
            QuotaReached: the caller has too many.
        """
        return self._consumers.count(who.name or "")

    async def take(
        self,
        who: Caller,
        job: str,
        count: int,
        wait: float,
        lease_seconds: float,
        at_least: int | None = None,
        key: str | None = None,
    ) -> list[TakenGroup]:
        """Lease the next groups of a job of the caller: when there are ``count``, or those that there are after a wait.

        ``wait``: seconds. ``at_least``: that are enough; ``None`` for ``count``. ``key``: an idempotency key; a request
        with the same one gets the groups that it has leased and still has, so that no answer is lost.

        Raises:
            StateError, ServerStopping
        """
        loop, job_id = asyncio.get_running_loop(), (who.name or "", job)
        deadline = loop.time() + wait
        while True:
            if self._is_stopping:
                raise ServerStopping("the server is stopping, and its groups wait for the next one; retry then", 5)
            is_over = loop.time() >= deadline
            self._follow_weights()
            enough = 1 if is_over else at_least or count
            entries = self._ledger.leases.take(job_id, count, enough, self._clock(), lease_seconds, key)
            self._notify()
            groups = await self._handout.read(entries, key) if entries else []
            if groups or is_over:
                return groups
            if not entries:
                await self._consumers.wait(job_id, deadline - loop.time())

    def unacknowledged(self, leases: Sequence[str]) -> list[str]:
        """Return those of the leases that have neither been acknowledged nor expired."""
        return [lease for lease in leases if self._ledger.leases.is_valid(lease)]

    async def wait_for_change(self, who: Caller, job: str, seconds: float) -> None:
        """Wait until something has happened to a job's groups, or for so long."""
        await self._consumers.wait((who.name or "", job), seconds)

    async def acknowledge(self, who: Caller, leases: Sequence[str]) -> list[AckOutcome]:
        """Acknowledge leases of the caller's groups. They are done for good when this returns.

        Raises:
            StateError
        """
        outcomes: list[AckOutcome] = []
        for start in range(0, len(leases), ACKNOWLEDGED_AT_ONCE):
            some = leases[start : start + ACKNOWLEDGED_AT_ONCE]
            outcomes += self._ledger.leases.acknowledge(some, lambda owner: who.may_see(owner or None))
            await asyncio.sleep(0)
        await self._saver.save()
        self._wake_up()
        return outcomes

    async def drop(self, who: Caller, job: str, owner: str | None = None) -> int:
        """Delete a job of the caller; how many prompts and groups it had. ``owner``: whose job instead, for admins.

        Raises:
            NotFound, StateError
        """
        dropped = self._ledger.drop((who.name or "" if owner is None else owner, job))
        await self._saver.save()
        self._wake_up()
        return dropped

    def jobs(self, who: Caller) -> list[JobEntries]:
        """Return the caller's jobs; for an admin, all."""
        return [each for each in self._ledger.jobs if who.may_see(each.job.id[0] or None)]

    def waits_for(self, job: JobEntries) -> WaitsFor | None:
        """Return why no prompt of a job may start, see `Ledger.waits_for`."""
        return self._ledger.waits_for(job)

    @property
    def is_durable(self) -> bool:
        """Whether it outlives the server."""
        return self._is_durable

    @property
    def is_stopping(self) -> bool:
        """Whether no more groups will come: streams should end."""
        return self._is_stopping

    @property
    def version(self) -> int:
        """The served weight version."""
        return self._ledger.version

    # --- weights and the server's end ---------------------------------------

    def update_announced(self, version: int) -> None:
        """Stop groups that would be too old after the update, so that it does not wait for them."""
        self._see_versions(self._ledger.version)
        # The update does not wait for ready ones, and they stay good if it fails.
        self._ledger.restart_stale(version)
        self._stop_unwanted()

    def update_ended(self, record: UpdateRecord) -> None:
        self._follow_weights()
        self._wake_up()

    def drain(self) -> None:
        """Start nothing more, and stop what runs; all of it starts again with the next server."""
        self._is_stopping = True
        self._ending = asyncio.get_running_loop().create_task(self._runner.stop_all())
        self._wake_up()
        self._consumers.notify_all()

    async def hand_back(self, reason: DartsError) -> None:
        """Do nothing: `drain` has stopped what ran, and its prompts start again with the next server."""

    def fail(self, error: DartsError) -> None:
        """Stop everything."""
        self.drain()

    # --- running ------------------------------------------------------------

    async def _work(self) -> None:
        while not self._is_stopping:
            try:
                await self._move()
                self._turn()
                await self._saver.save()
            except StateError as error:
                logger.error("the queue cannot be written, and is kept in memory until it can: %s", error)
            except Exception:
                logger.exception("the queue failed, and goes on")
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval()):
                    await self._wake.wait()
            self._wake.clear()

    async def _move(self) -> None:
        """Move what is too old, and expired leases, some in each turn of the event loop."""
        self._follow_weights()
        while self._ledger.leases.expire(self._clock()):
            await asyncio.sleep(0)
        while self._ledger.restart_ready():
            await asyncio.sleep(0)

    def _turn(self) -> None:
        now = time.monotonic()
        elapsed, self._last_turn = now - self._last_turn, now
        # Not more than between two turns: a machine that was suspended has not left its jobs unused.
        self._ledger.jobs.clock += min(elapsed, IDLE_SECONDS)
        self._follow_weights()
        self._stop_unwanted()
        self._drop_unused()
        self._starter.start()
        self.meter.report(elapsed)
        self._notify()

    def _drop_unused(self) -> None:
        """Drop jobs that were not used for as long as their options say."""
        if time.monotonic() < self._look_for_unused_at:
            return
        self._look_for_unused_at = time.monotonic() + IDLE_SECONDS
        for job_id in self._ledger.jobs.unused():
            dropped = self._ledger.drop_unused(job_id)
            logger.warning("job %r of the queue was not used for its expires_after: %d dropped", job_id[1], dropped)

    def _follow_weights(self) -> None:
        """Follow a change of the weights."""
        if (version := self._rollouts.weight_version) != self._ledger.version:
            self._see_versions(version)
            self._ledger.update(version)
            self._stop_unwanted()
            self._consumers.notify_all()
            self._wake.set()  # for what is still to be moved

    def _see_versions(self, version: int) -> None:
        """See which versions running groups have begun under. ``version``: of those that have not begun."""
        for each in self._ledger.jobs:
            for number in list(each.running):
                first = self._runner.first_version(number)
                self._ledger.begun_under(number, version if first is None else first)

    def _stop_unwanted(self) -> None:
        for number in self._ledger.stopped:
            self._runner.stop(number)
        self._ledger.stopped.clear()

    def _interval(self) -> float:
        """Return after how many seconds the next turn is due."""
        if any(len(each.order) for each in self._ledger.jobs):
            return TURN_SECONDS
        expiry = self._ledger.leases.next_expiry
        return IDLE_SECONDS if expiry is None else min(IDLE_SECONDS, max(TURN_SECONDS, expiry - self._clock()))

    def _pause(self, owner: str | None) -> None:
        self._starter.pause(owner)

    def _wake_up(self) -> None:
        self._wake.set()
        self._notify()

    def _notify(self) -> None:
        """Let consumers look whose jobs have changed."""
        self._consumers.notify(self._ledger.jobs.changed)
        self._ledger.jobs.changed.clear()


def new_name() -> str:
    """Return a string that cannot be guessed."""
    return secrets.token_urlsafe(12)
