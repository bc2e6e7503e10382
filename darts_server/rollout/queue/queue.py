"""The queue: callers put prompts in and take groups out, while the engine goes on with the next prompts."""

import asyncio
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import DartsError, ServerStopping, StateError, TooLarge
from darts_server.observers import QUEUE_EVENTS, QueueObserver
from darts_server.rollout.batches.request import BatchRequest, NewPlanner, check_terms
from darts_server.rollout.queue.entries import AckOutcome, Entry, EntryState, JobId, Terms
from darts_server.rollout.queue.history import PutResult
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.ledger import GROUP, Counts, Ledger, NewPrompt, QueueLimits
from darts_server.rollout.queue.prompts import digest_of, encode_prompt, encode_terms
from darts_server.rollout.queue.runner import Encode, QueueRunner, by_terms
from darts_server.rollout.queue.saving import Saver
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.admission import Caller
from darts_server.store.transactions import TransactionStore
from darts_server.types import PromptSpec, UpdateRecord

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.05
"""Between two looks at the engine while prompts are queued: about a decode step."""
IDLE_SECONDS = 1.0
MAX_TERMS_BYTES = 1 << 20
"""Of the sampling parameters and policy of a put."""
RETRY_SECONDS = 0.5
"""After the engine or the disk refused a prompt for a reason that is not the prompt's."""


@dataclass(frozen=True, slots=True)
class Put:
    """Prompts that a caller puts into a job.

    ``names``: the caller's ids, ``None`` for one of ours. ``options``: of the job, those that change; see `JobOptions`.
    ``key``, ``digest``: an idempotency key, and a hash of the request.
    """

    job: str
    prompts: Sequence[PromptSpec]
    names: Sequence[str | None]
    terms: Terms
    priority: int = 0
    options: Mapping[str, object] | None = None
    key: str | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group that was handed out. ``staleness``: weight versions since its first token. ``group``: encoded."""

    name: str
    lease: str
    lease_until: float
    staleness: int
    group: bytes


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
        self._observer = observer or QueueObserver()
        self._clock = clock
        self._ledger = Ledger(limits or QueueLimits(), max_staleness, lambda: secrets.token_urlsafe(12))
        self._ledger.load(disk.items)
        self._ledger.set_version(rollouts.weight_version, model)
        self._saver = Saver(disk, self._ledger.changes)
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
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._paused_until = 0.0
        self._is_stopping = False
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._last_turn = time.monotonic()
        self._observed = Counts()

    def open(self) -> None:
        """Begin to run prompts."""
        self._task = asyncio.get_running_loop().create_task(self._work(), name="darts-queue")

    # --- callers ------------------------------------------------------------

    async def put(self, who: Caller, put: Put) -> PutResult:
        """Add prompts to a job of the caller. They are on the disk when this returns.

        Raises:
            InvalidRequest: names the field; nothing was added.
            Conflict, TooLarge, QuotaReached, StateError
        """
        if put.prompts:
            request = BatchRequest(put.prompts, put.terms.group_size, put.terms.sampling, put.terms.policy)
            check_terms(request, self._rollouts, self._renderer, self._new_planner)
        new = await asyncio.to_thread(_new_prompts, put)
        result = self._ledger.put(
            (who.name or "", put.job),
            new,
            put.terms,
            self._clock(),
            priority=put.priority,
            options=put.options,
            is_admin=who.is_admin,
            key=put.key,
            digest=put.digest,
        )
        await self._saver.save()
        self._wake_up()
        return result

    async def take(
        self, who: Caller, job: str, count: int, wait: float, lease_seconds: float, at_least: int | None = None
    ) -> list[TakenGroup]:
        """Lease the next groups of a job of the caller: when there are ``count``, or those that there are after a wait.

        ``wait``: seconds. ``at_least``: that are enough; ``None`` for ``count``.

        Raises:
            StateError, ServerStopping
        """
        loop, job_id = asyncio.get_running_loop(), (who.name or "", job)
        deadline = loop.time() + wait
        while True:
            if self._is_stopping:
                raise ServerStopping("the server is stopping, and its groups wait for the next one; retry then", 5)
            is_over = loop.time() >= deadline
            changed = self._changed
            self._follow_weights()
            enough = 1 if is_over else at_least or count
            entries = self._ledger.take(job_id, count, enough, self._clock(), lease_seconds)
            if entries or is_over:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
        return await self._hand_out(entries) if entries else []

    def unacknowledged(self, leases: Sequence[str]) -> list[str]:
        """Return those of the leases that have neither been acknowledged nor expired."""
        return [lease for lease in leases if self._ledger.is_leased(lease)]

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until something may have happened to the queue, or for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def acknowledge(self, who: Caller, leases: Sequence[str]) -> list[AckOutcome]:
        """Acknowledge leases of the caller's groups. They are done for good when this returns.

        Raises:
            StateError
        """
        outcomes = self._ledger.acknowledge(leases, lambda owner: who.may_see(owner or None))
        await self._saver.save()
        self._wake_up()
        return outcomes

    async def drop(self, who: Caller, job: str) -> int:
        """Delete a job of the caller; how many prompts and groups it had.

        Raises:
            NotFound, StateError
        """
        dropped = self._ledger.drop((who.name or "", job))
        await self._saver.save()
        self._wake_up()
        return dropped

    def jobs(self, who: Caller) -> list[JobEntries]:
        """Return the caller's jobs; for an admin, all."""
        return list(self._ledger.jobs(lambda owner: who.may_see(owner or None)))

    def waits_for(self, job_id: JobId) -> str | None:
        """Return why no prompt of a job may start, see `Ledger.waits_for`."""
        return self._ledger.waits_for(job_id)

    @property
    def is_stopping(self) -> bool:
        """Whether no more groups will come: streams should end."""
        return self._is_stopping

    @property
    def version(self) -> int:
        """The served weight version."""
        return self._ledger.version

    # --- metrics ------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        return self._ledger.counts

    def totals(self) -> Counter[EntryState]:
        """Return the number of prompts in each state."""
        totals: Counter[EntryState] = Counter()
        for each in self._ledger.jobs():
            totals[EntryState.QUEUED] += len(each.order)
            totals[EntryState.RUNNING] += len(each.running)
            totals[EntryState.READY] += len(each.ready)
            totals[EntryState.LEASED] += len(each.leased)
        return totals

    def age(self) -> float:
        """Return since how many seconds the oldest prompt waits for its acknowledgement; 0 without one."""
        oldest = self._ledger.oldest()
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest)

    # --- weights and the server's end ---------------------------------------

    def update_announced(self, version: int) -> None:
        """Stop groups that would be too old after the update, so that it does not wait for them."""
        self._see_versions(self._ledger.version)
        # The update does not wait for ready ones, and they stay good if it fails.
        self._ledger.restart_stale(version, ready=False)
        self._stop_unwanted()

    def update_ended(self, record: UpdateRecord) -> None:
        self._follow_weights()
        self._wake_up()

    def drain(self) -> None:
        """Start nothing more, and stop what runs; all of it starts again with the next server."""
        self._is_stopping = True
        self._ending = asyncio.get_running_loop().create_task(self._runner.stop_all())
        self._wake_up()

    def fail(self, error: DartsError) -> None:
        """Stop everything."""
        self.drain()

    # --- running ------------------------------------------------------------

    async def _work(self) -> None:
        while not self._is_stopping:
            try:
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

    def _turn(self) -> None:
        self._follow_weights()
        self._ledger.expire(self._clock())
        self._stop_unwanted()
        self._start_prompts()
        self._observe()
        self._notify()

    def _observe(self) -> None:
        now, totals = time.monotonic(), self.totals()
        waits = "waiting" if totals[EntryState.QUEUED] else "empty"
        self._observer.queue_active("running" if totals[EntryState.RUNNING] else waits, now - self._last_turn)
        self._last_turn = now
        counts = self._ledger.counts
        for event in QUEUE_EVENTS:
            if more := getattr(counts, event) - getattr(self._observed, event):
                self._observer.queue_events(event, more)
        self._observed = replace(counts)

    def _start_prompts(self) -> None:
        """Start as many prompts as fill the engine: what starts later is chosen later."""
        gate = self._rollouts.gate
        if gate.closed or gate.has_failed or time.monotonic() < self._paused_until:
            return
        room = self._rollouts.admission.free - self._runner.preparing
        started: list[Entry] = []
        while room > 0 and (entry := self._ledger.start_next(self._expected_tokens)) is not None:
            room -= self._ledger.terms(entry).group_size
            started.append(entry)
        for entries in by_terms(started).values():
            job = self._ledger.job(entries[0].job)
            assert job is not None
            self._runner.start(job, entries)

    def _expected_tokens(self, entry: Entry) -> float:
        statistics = self._rollouts.statistics
        mean = None if entry.prompt_key is None else statistics.prompts.mean(entry.prompt_key)
        return (mean or statistics.dataset.stats.mean or 1.0) * self._ledger.terms(entry).group_size

    def _follow_weights(self) -> None:
        """Follow a change of the weights."""
        if (version := self._rollouts.weight_version) != self._ledger.version:
            self._see_versions(version)
            self._ledger.update(version)
            self._stop_unwanted()

    def _see_versions(self, version: int) -> None:
        """See which versions running groups have begun under. ``version``: of those that have not begun."""
        for each in self._ledger.jobs():
            for number in list(each.running):
                first = self._runner.first_version(number)
                self._ledger.begun_under(number, version if first is None else first)

    def _stop_unwanted(self) -> None:
        for number in self._ledger.stopped:
            self._runner.stop(number)
        self._ledger.stopped.clear()

    async def _hand_out(self, entries: list[Entry]) -> list[TakenGroup]:
        """Return groups that were leased, when the leases are on the disk. If that fails they are taken back."""
        version = self._ledger.version
        leases = [(entry, entry.lease or "", entry.lease_until, max(0, version - entry.version)) for entry in entries]
        try:
            await self._saver.save()
            groups = [await self._saver.read(GROUP, str(entry.number)) for entry in entries]
        except BaseException:
            for _, lease, _, _ in leases:
                self._ledger.release(lease)
            self._wake_up()
            raise
        for staleness in self._ledger.staleness:
            self._observer.group_handed_out(staleness)
        self._ledger.staleness.clear()
        self._wake_up()
        return [
            TakenGroup(entry.name, lease, until, staleness, group)
            for (entry, lease, until, staleness), group in zip(leases, groups, strict=True)
            if group is not None  # its job was deleted meanwhile
        ]

    def _interval(self) -> float:
        """Return after how many seconds the next turn is due."""
        if any(len(each.order) for each in self._ledger.jobs()):
            return TURN_SECONDS
        expiry = self._ledger.next_expiry
        return IDLE_SECONDS if expiry is None else min(IDLE_SECONDS, max(TURN_SECONDS, expiry - self._clock()))

    def _pause(self) -> None:
        self._paused_until = time.monotonic() + RETRY_SECONDS

    def _wake_up(self) -> None:
        self._wake.set()
        self._notify()

    def _notify(self) -> None:
        """Let everyone look who waits for groups."""
        self._changed.set()
        self._changed = asyncio.Event()


def _new_prompts(put: Put) -> list[NewPrompt]:
    terms = encode_terms(put.terms, put.priority)
    if len(terms) > MAX_TERMS_BYTES:
        raise TooLarge("sampling", f"and policy must have at most {MAX_TERMS_BYTES} bytes in the queue; send less")
    documents = [encode_prompt(prompt) for prompt in put.prompts]
    return [
        NewPrompt(document, digest_of(document, terms), name, prompt.key, f"prompts[{number}]")
        for number, (prompt, document, name) in enumerate(zip(put.prompts, documents, put.names, strict=True))
    ]


def terms_of(group_size: int, sampling: Mapping[str, Any], policy: Mapping[str, Any]) -> Terms:
    """Return terms that are the same after they were written and read."""
    return Terms(group_size, json.loads(json.dumps(dict(sampling))), json.loads(json.dumps(dict(policy))))
