"""Start batches, and find them again by id or by idempotency key."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Generic

from darts_server.engine.port import OutputT, PromptRenderer, RequestT
from darts_server.exceptions import Conflict, DartsError, NotFound, Overloaded, QuotaReached, TooLarge
from darts_server.rollout.batches.batch import BatchRequest, NewPlanner, prepare_batch
from darts_server.rollout.batches.carried import CarriedPrompt, CarriedPrompts, CarryLimits, SavedPrompts
from darts_server.rollout.batches.events import BatchDone
from darts_server.rollout.batches.run import AnswerFormat, BatchRun, StreamMode
from darts_server.rollout.rollouts import Rollouts
from darts_server.serving.admission import RETRY_SECONDS, caller

logger = logging.getLogger(__name__)

KEY_HEADER = "Idempotency-Key"
SEND_LESS = "send less per request, or without that header"
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


@dataclass(frozen=True, slots=True)
class BatchRetention:
    """How long durable batches are kept.

    ``resume_seconds``: while running without a listener. ``kept_seconds``, ``kept_batches``: after the end.
    ``kept_bytes``: of all durable batches, running ones by the size of their requests; one caller has half of it.
    """

    resume_seconds: float = 60.0
    kept_seconds: float = 600.0
    kept_batches: int = 64
    kept_bytes: int = 1 << 30


@dataclass(slots=True, eq=False)
class _DurableBatch:
    """A batch that can be found again: from its request on by its key, once it has opened by its id.

    ``bytes``: what it counts for. ``timer``: for what happens to it next, which is to cancel or to drop it.
    """

    key: IdempotencyKey
    bytes: int
    opening: asyncio.Task[BatchRun]
    timer: asyncio.TimerHandle | None = None

    @property
    def batch(self) -> BatchRun:
        """The batch, once it has opened."""
        return self.opening.result()

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
        interval: seconds between two polls of what candidates have generated.
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
        interval: float = 0.02,
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
        self._interval = interval
        self._clock = clock
        self._carried = CarriedPrompts(carry_limits, may_call)
        self._saved = saved
        self._has_initial_weights = has_initial_weights
        self._running: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._durable: dict[str, _DurableBatch] = {}
        self._ended: dict[_DurableBatch, None] = {}  # a set, the oldest first
        self._by_key: dict[IdempotencyKey, _DurableBatch] = {}

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
        keyed = self._by_key.get(key)
        if keyed is None:
            self._make_room(key)
            opening = asyncio.get_running_loop().create_task(self._open(request, answer_format, key))
            keyed = self._by_key[key] = _DurableBatch(key, key.body_bytes, opening)
            opening.add_done_callback(partial(self._forget_if_failed, key))
        elif keyed.key.body_digest != key.body_digest:
            raise Conflict(KEY_HEADER, "names a batch with another body; choose another key for this one")
        # Shielded, because another caller with the same key may be waiting for the same task.
        return await asyncio.shield(keyed.opening)

    def find(self, batch_id: str) -> BatchRun:
        """Find a durable batch of the caller that runs or is kept. The caller must start to listen in the same turn.

        Raises:
            NotFound
        """
        durable = self._durable.get(batch_id)
        if durable is None or not caller.get().may_see(durable.batch.owner):
            raise NotFound(
                "batch_id",
                f"no batch {batch_id!r} of yours is kept; only those sent with {KEY_HEADER} are, for a while",
            )
        return durable.batch

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
                batch.cancel(
                    "the server is stopping, and no caller was connected to the batch; send it to another server"
                )

    async def hand_back(self, reason: DartsError) -> None:
        """End all batches with what their groups have generated; their callers get it.

        Prompts that are carried over are kept for the next server instead, if they can be saved for it. So is what was
        generated for them, if that server can go on with it; otherwise their callers get it.
        """
        keep, keep_tokens = self._saved is not None, self._has_initial_weights()
        for batch in list(self._running.values()):
            batch.interrupt(reason, keep=keep, keep_tokens=keep_tokens)
        if self._tasks:
            await asyncio.wait(self._tasks)

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

    async def close(self) -> int:
        """Cancel what still runs, and save the prompts that are kept; how many of them could not be saved.

        Without a folder for them none are to be saved.
        """
        for batch in list(self._running.values()):
            batch.cancel("the server has stopped")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
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

    async def _open(self, request: BatchRequest, answer_format: AnswerFormat, key: IdempotencyKey | None) -> BatchRun:
        parts = self._rollouts, self._renderer
        batch = BatchRun(
            await prepare_batch(request, *parts, self._new_planner, self._carried),
            *parts,
            self._carried,
            answer_format,
            replayable=key is not None,
            interval=self._interval,
            on_idle=self._handle_idle,
            on_end=self._handle_end,
            clock=self._clock,
        )
        self._running[batch.batch_id] = batch
        self._tasks.add(batch.task)
        batch.task.add_done_callback(self._tasks.discard)
        if key is not None:
            self._durable[batch.batch_id] = self._by_key[key]
            self._handle_idle(batch)
        return batch

    def _forget_if_failed(self, key: IdempotencyKey, opening: asyncio.Task[BatchRun]) -> None:
        """Free the key of a batch that could not be opened, also if its caller has left."""
        if opening.cancelled() or opening.exception() is not None:
            del self._by_key[key]

    def _handle_idle(self, batch: BatchRun) -> None:
        """Cancel a batch that has no listener: now, or if it is durable after a while."""
        if (durable := self._durable.get(batch.batch_id)) is None:
            batch.cancel("the caller disconnected")
        else:
            durable.schedule(self._retention.resume_seconds, self._cancel_if_idle)

    def _cancel_if_idle(self, durable: _DurableBatch) -> None:
        if not durable.batch.listeners:
            durable.batch.cancel("no caller was connected to the batch for too long")
            self._drop(durable)

    def _handle_end(self, batch: BatchRun) -> None:
        """Keep a durable batch for a while, in place of the oldest ones if there are too many."""
        self._running.pop(batch.batch_id)
        if durable := self._durable.get(batch.batch_id):
            durable.schedule(self._retention.kept_seconds, self._drop)
            self._ended[durable] = None
            durable.bytes = kept_bytes(batch)
            if len(self._ended) > self._retention.kept_batches:
                self._drop(next(iter(self._ended)))
            self._drop_excess(durable.key.owner)

    def _make_room(self, key: IdempotencyKey) -> None:
        """Drop the oldest ended batches for one that is to start.

        Raises:
            TooLarge, QuotaReached, Overloaded: that would not suffice.
        """
        errors = (QuotaReached, "this key's"), (Overloaded, "all")
        for (limit, counted), (error, whose) in zip(self._shares(key.owner), errors, strict=True):
            if key.body_bytes > limit:
                raise TooLarge("body", f"must have at most {limit} bytes with {KEY_HEADER} (--kept-bytes); {SEND_LESS}")
            running = sum(durable.bytes for durable in counted if durable not in self._ended)
            if running + key.body_bytes > limit:
                raise error(
                    f"{whose} running batches with {KEY_HEADER} have {running} bytes, and {key.body_bytes} more would "
                    f"exceed {limit} (--kept-bytes); retry when some have ended",
                    RETRY_SECONDS,
                )
        self._drop_excess(key.owner, key.body_bytes)

    def _drop_excess(self, owner: str | None, more: int = 0) -> None:
        """Drop ended batches, the oldest first, until the others and ``more`` bytes may be kept."""
        for limit, counted in self._shares(owner):
            excess = sum(durable.bytes for durable in counted) + more - limit
            for durable in list(self._ended):
                if excess > 0 and durable in counted:
                    excess -= durable.bytes
                    self._drop(durable)

    def _shares(self, owner: str | None) -> Iterator[tuple[int, set[_DurableBatch]]]:
        """Yield the batches that share a number of bytes: those of this owner, then all."""
        kept = self._by_key.values()
        yield self._retention.kept_bytes // 2, {durable for durable in kept if durable.key.owner == owner}
        yield self._retention.kept_bytes, set(kept)

    def _drop(self, durable: _DurableBatch) -> None:
        """Drop a batch; harmless if it was dropped before."""
        if self._durable.pop(durable.batch.batch_id, None) is not None:
            if durable.timer is not None:
                durable.timer.cancel()
            self._by_key.pop(durable.key, None)
            self._ended.pop(durable, None)


def kept_bytes(batch: BatchRun) -> int:
    """Return about how much memory a batch takes after its end."""
    size = GROUP_BYTES + len(json.dumps(batch.sampling, default=repr))  # a caller may have sent as much as fits
    if not isinstance(batch.end, BatchDone):
        return size
    copies = 2 if batch.answer_format.stream is StreamMode.TOKENS else 1  # its deltas can be sent again
    size += sum(GROUP_BYTES + len(prompt.metadata or b"") for prompt in batch.end.unfinished)
    handed_back = (prompt.group for prompt in batch.end.unfinished if prompt.group is not None)
    for group in (*batch.end.results, *handed_back):
        candidates = 0 if group.record is None else len(group.record.candidates)
        size += GROUP_BYTES + CANDIDATE_BYTES * candidates + len(group.metadata or b"")
        samples = [(sample, copies) for sample in group.samples.values()]
        samples += [(aborted.sample, 1) for aborted in (group.aborted or {}).values()]
        for sample, times in samples:
            size += times * (sys.getsizeof(sample.token_ids) + sys.getsizeof(sample.logprobs))
            size += sys.getsizeof(sample.text)
    return size
