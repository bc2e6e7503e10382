"""Start batches, and find them again by id or by idempotency key."""

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

from darts_server.caller import caller
from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import RETRY_SECONDS, Conflict, DartsError, NotFound, Overloaded, QuotaReached, TooLarge
from darts_server.rollout.batches.batch import BatchRequest, NewPlanner, prepare_batch
from darts_server.rollout.batches.carried import CarriedPrompt, CarriedPrompts, CarryLimits, SavedPrompts
from darts_server.rollout.batches.events import BatchDone
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.kept import Kept

logger = logging.getLogger(__name__)

KEY_HEADER = "Idempotency-Key"
SEND_LESS = "send less per request, or without that header"
BATCH_BYTES = 5000
"""Memory of a batch without its groups."""
CANDIDATE_BYTES = 300
"""Memory of a candidate's record."""
CLOSE_SECONDS = 5.0
"""For cancelled batches to end: that takes as long as it takes to stop their candidates."""
GROUP_BYTES = 2000
"""Memory of a group without its candidates."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A caller's key for a batch, which makes the batch durable. Equal to others of the same name and caller.

    ``owner``: name of the caller, as keys of different callers are unrelated. ``body_digest``: hash of the request, to
    refuse another request under the same key. ``body_bytes``: the size of that request.
    """

    owner: str | None
    key: str
    body_digest: bytes = field(compare=False)
    body_bytes: int = field(default=0, compare=False)


RESUME_SECONDS = 60.0
"""A trainer that lost its connection is back within a minute, and so is a proxy that restarts. A caller that is gone
for longer must not keep the engine busy."""
KEPT_SECONDS = 600.0
"""Enough to start a trainer again, and for it to load its model."""
KEPT_BATCHES = 64
"""More than a trainer has unread; the memory of large batches is limited by their bytes."""


@dataclass(frozen=True, slots=True)
class BatchRetention:
    """How long durable batches are kept.

    ``resume_seconds``: how long a batch runs without a connected caller. ``kept_seconds``: how long a batch is kept
    after it has ended. ``kept_batches``: maximum number of ended batches. ``kept_bytes``: maximum memory of all durable
    batches, running ones by the size of their requests; one caller has half of it. At a limit, the oldest ended batch
    of the caller that has most is dropped.
    """

    resume_seconds: float = RESUME_SECONDS
    kept_seconds: float = KEPT_SECONDS
    kept_batches: int = KEPT_BATCHES
    kept_bytes: int = 1 << 30


@dataclass(slots=True, eq=False)
class _DurableBatch:
    """A batch that can be found again: from its request on by its key, once it has opened by its id.

    ``timer``: for what happens to it next, which is to cancel or to drop it.
    """

    key: IdempotencyKey
    opening: asyncio.Task[BatchRun] | None = None
    batch: BatchRun | None = None
    has_ended: bool = False
    timer: asyncio.TimerHandle | None = None

    def schedule(self, seconds: float, action: Callable[["_DurableBatch"], None]) -> None:
        """Call ``action`` with it after so many seconds, in place of what was scheduled before."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_later(seconds, action, self)


class BatchRegistry(Generic[RequestT, OutputT]):
    """Start batches and find them again.

    A batch with an idempotency key is durable: it runs on for a while without its caller, and is kept after its end. A
    batch without one is cancelled when its caller disconnects.

    Args:
        retention: how long durable batches are kept.
        clock: monotonic seconds.
        carry_limits: of what is carried over from batch to batch.
        saved: where that is kept from the end of this server to the start of the next; ``None`` for nowhere.
        has_initial_weights: whether the weights are those that the server was started with, and never were others.
            Those that the next one starts with have generated nothing else.
        may_call: whether a caller of that name can still send requests, see `CarriedPrompts`.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        renderer: PromptRenderer[RequestT, OutputT],
        new_planner: NewPlanner,
        retention: BatchRetention | None = None,
        clock: Callable[[], float] = time.monotonic,
        carry_limits: CarryLimits | None = None,
        saved: SavedPrompts | None = None,
        has_initial_weights: Callable[[], bool] = lambda: True,
        may_call: Callable[[str | None], bool] = lambda _: True,
    ) -> None:
        self._rollouts = rollouts
        self._renderer = renderer
        self._new_planner = new_planner
        self._retention = retention or BatchRetention()
        self._clock = clock
        self._carried = CarriedPrompts(carry_limits, may_call)
        self._saved = saved
        self._has_initial_weights = has_initial_weights
        self._running: dict[str, BatchRun] = {}  # by id, until they have given back what they had taken
        self._durable: dict[IdempotencyKey, _DurableBatch] = {}
        # The durable batches that have ended.
        self._ended: Kept[IdempotencyKey, _DurableBatch] = Kept(self._retention.kept_batches)
        self._request_bytes: Counter[str | None] = Counter()  # of durable batches that have not ended, by owner

    async def open(
        self, request: BatchRequest, answer_format: AnswerFormat, key: IdempotencyKey | None = None
    ) -> BatchRun:
        """Start a batch, or find the one that was started with the same idempotency key.

        The caller must start to listen in the same turn of the event loop: a batch without listeners may be dropped.

        Raises:
            InvalidRequest: names the field; nothing was started.
            Conflict: the key was used for another request.
            TooLarge, QuotaReached, Overloaded: the batch cannot be kept.
        """
        if key is None:
            return await self._open(request, answer_format, None)
        durable = self._durable.get(key)
        if durable is None:
            self._make_room(key.owner, key.body_bytes)
            durable = self._durable[key] = _DurableBatch(key)
            self._request_bytes[key.owner] += key.body_bytes
            durable.opening = asyncio.get_running_loop().create_task(self._open(request, answer_format, durable))
            # Its failure is then known to asyncio, also if no caller waits for it any more.
            durable.opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif durable.key.body_digest != key.body_digest:
            raise Conflict(KEY_HEADER, "names a batch with another body; choose another key for this one")
        assert durable.opening is not None
        # Shielded, because another caller with the same key may be waiting for the same task.
        return await asyncio.shield(durable.opening)

    def find(self, batch_id: str) -> BatchRun:
        """Find a durable batch of the caller that runs or is kept. The caller must start to listen in the same turn.

        Raises:
            NotFound
        """
        for durable in self._durable.values():
            batch = durable.batch
            if batch is not None and batch.batch_id == batch_id and caller.get().may_see(batch.owner):
                return batch
        raise NotFound(
            "batch_id", f"no batch {batch_id!r} of yours is kept; only those sent with {KEY_HEADER} are, for a while"
        )

    def cancel(self, batch_id: str) -> bool:
        """Cancel a batch of the caller, durable or not; whether it was running.

        Raises:
            NotFound
        """
        batch = self._running.get(batch_id)
        if batch is None or not caller.get().may_see(batch.owner):
            batch = self.find(batch_id)
        return batch.cancel("the batch was cancelled; send it again under another key to run it again")

    def drain(self) -> None:
        """Cancel batches without a listener: no caller will find them again once the server has stopped."""
        for batch in list(self._running.values()):
            if not batch.listeners:
                why = "the server is stopping, and no caller was connected to the batch; send it to another server"
                batch.cancel(why)

    async def hand_back(self, reason: DartsError) -> None:
        """End all batches with what their groups have generated; their callers get it.

        Prompts that are carried over are kept for the next server instead, if they can be saved for it. So is what was
        generated for them, if that server can go on with it; otherwise their callers get it.
        """
        keep, keep_tokens = self._saved is not None, self._has_initial_weights()
        for batch in list(self._running.values()):
            if batch.end is None:
                batch.interrupt(reason, keep=keep, keep_tokens=keep_tokens)
        if self._running:
            await asyncio.wait([batch.task for batch in self._running.values()])

    def restore(self) -> None:
        """Keep the prompts that the last server has saved, and remove them from the disk, for `close` to save again.

        Call it when the server is about to serve: one that fails to start must leave them for the next one.
        """
        by_owner: dict[str | None, list[CarriedPrompt]] = {}  # all of a caller at once: `put` copies what it has
        for owner, prompt in [] if self._saved is None else self._saved.take(self._rollouts.engine.weight_version):
            by_owner.setdefault(owner, []).append(prompt)
        for owner, prompts in by_owner.items():
            self._carried.put(owner, prompts)

    def keys_changed(self) -> None:
        """Drop the prompts that were carried over for callers whose keys are not valid any more."""
        self._carried.drop_without_caller()

    @property
    def carried_prompts(self) -> int:
        """Number of prompts that are kept for later batches."""
        return self._carried.prompts

    @property
    def carried_tokens(self) -> int:
        """Number of tokens that were generated for these prompts."""
        return self._carried.tokens

    async def close(self) -> int:
        """Cancel what still runs, and save the prompts that are kept; how many of them could not be saved.

        Without a folder for them none are to be saved.
        """
        for batch in list(self._running.values()):
            batch.cancel("the server has stopped")
        if self._running:
            await asyncio.wait([batch.task for batch in self._running.values()], timeout=CLOSE_SECONDS)
        if self._saved is None:
            return 0
        prompts = list(self._carried)
        try:
            return await self._saved.save_in_time(prompts, self._renderer, with_tokens=self._has_initial_weights())
        except Exception:
            logger.exception("prompts that were carried over could not be saved, and are lost")
            return len(prompts)

    def fail(self, error: DartsError) -> None:
        """End all streamed batches with that error. The others are answered when their groups have ended."""
        for batch in list(self._running.values()):
            if batch.answer_format.stream is not StreamMode.OFF:
                batch.fail(error)

    async def _open(
        self, request: BatchRequest, answer_format: AnswerFormat, durable: _DurableBatch | None
    ) -> BatchRun:
        parts = self._rollouts, self._renderer
        try:
            prepared = await prepare_batch(request, *parts, self._new_planner, self._carried)
        except BaseException:
            if durable is not None:  # its key is free again, also if its caller has left
                self._drop(durable)
            raise
        batch = BatchRun(
            prepared,
            *parts,
            self._carried,
            answer_format,
            replayable=durable is not None,
            on_idle=partial(self._handle_idle, durable),
            on_end=partial(self._handle_end, durable),
            clock=self._clock,
        )
        self._running[batch.batch_id] = batch
        batch.task.add_done_callback(partial(self._handle_task_end, batch.batch_id))
        if durable is not None:
            durable.batch = batch
            self._handle_idle(durable, batch)
        return batch

    def _handle_task_end(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._running[batch_id]
        if task.cancelled():
            # A batch that is kept has its task, whose error has frames with everything that was generated. It lets go
            # of the error when it has raised it.
            with suppress(asyncio.CancelledError):
                task.exception()

    def _handle_idle(self, durable: _DurableBatch | None, batch: BatchRun) -> None:
        """Cancel a batch that has no listener: now, or if it is durable after a while."""
        if durable is None:
            batch.cancel("the caller disconnected")
            return

        def cancel_if_idle(durable: _DurableBatch) -> None:
            if not batch.listeners:
                batch.cancel("no caller was connected to the batch for too long")
                self._drop(durable)

        durable.schedule(self._retention.resume_seconds, cancel_if_idle)

    def _handle_end(self, durable: _DurableBatch | None, batch: BatchRun) -> None:
        """Keep a batch for a while. If there are too many, the oldest of the key that has most is dropped."""
        if durable is None:
            return
        durable.has_ended = True
        self._request_bytes[durable.key.owner] -= durable.key.body_bytes
        durable.schedule(self._retention.kept_seconds, self._drop)
        for _, dropped in self._ended.put(durable.key.owner, durable.key, durable, kept_bytes(batch)):
            self._drop(dropped)
        if not self._retention.kept_batches:
            self._drop(durable)
        self._make_room(durable.key.owner)

    def _make_room(self, owner: str | None, more: int = 0) -> None:
        """Drop ended batches until there is room for the others and ``more`` bytes of a new one.

        First the oldest ones of the owner, until it has no more than its half. Then the oldest of the owner that has
        most, until all have no more than the whole.

        Raises:
            TooLarge, QuotaReached, Overloaded: that would not suffice; none was dropped.
        """
        whole = self._retention.kept_bytes
        half = whole // 2
        if more > half:
            raise TooLarge("body", f"must have at most {half} bytes with {KEY_HEADER} (--kept-bytes); {SEND_LESS}")
        of_owner = self._request_bytes[owner]
        of_all = self._request_bytes.total()
        for limit, running, error, whose in (
            (half, of_owner, QuotaReached, "this key's"),
            (whole, of_all, Overloaded, "all"),
        ):
            if running + more > limit:
                raise error(
                    f"{whose} running batches with {KEY_HEADER} have {running} bytes, and {more} more would exceed "
                    f"{limit} (--kept-bytes); retry when some have ended",
                    RETRY_SECONDS,
                )
        while self._ended.weight_of(owner) + of_owner + more > half:
            self._drop(next(iter(self._ended.of(owner).values())))
        for _, dropped in self._ended.shrink(whole - of_all - more):
            self._drop(dropped)

    def _drop(self, durable: _DurableBatch) -> None:
        """Drop a batch; harmless if it was dropped before, also if another one has its key now."""
        key = durable.key
        if self._durable.get(key) is not durable:
            return
        del self._durable[key]
        self._ended.pop(key.owner, key)
        if not durable.has_ended:
            self._request_bytes[key.owner] -= key.body_bytes
        if not self._request_bytes[key.owner]:
            del self._request_bytes[key.owner]
        if durable.timer is not None:
            durable.timer.cancel()


def kept_bytes(batch: BatchRun) -> int:
    """Return about how much memory a batch takes after its end."""
    size = BATCH_BYTES + len(json.dumps(batch.sampling, default=repr))  # a caller may have sent as much as fits
    if batch.feed is not None:
        size += batch.feed.kept_bytes
    if not isinstance(batch.end, BatchDone):
        return size
    size += sum(GROUP_BYTES + len(prompt.metadata or b"") for prompt in batch.end.unfinished)
    handed_back = (prompt.group for prompt in batch.end.unfinished if prompt.group is not None)
    for group in (*batch.end.results, *handed_back):
        candidates = 0 if group.record is None else len(group.record.candidates)
        size += GROUP_BYTES + CANDIDATE_BYTES * candidates + len(group.metadata or b"")
        samples = [*group.samples.values(), *(aborted.sample for aborted in (group.aborted or {}).values())]
        for sample in samples:
            size += sys.getsizeof(sample.token_ids) + sys.getsizeof(sample.logprobs) + sys.getsizeof(sample.text)
    return size
