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
from darts_server.serving.fair_cache import FairCache

logger = logging.getLogger(__name__)

KEY_HEADER = "Idempotency-Key"
BATCH_BYTES = 6000
"""Memory of a batch without its groups."""
CANDIDATE_BYTES = 300
"""Memory of a candidate's record."""
CLOSE_SECONDS = 5.0
"""Time for batches to stop at shutdown."""
GROUP_BYTES = 2000
"""Memory of a group without its candidates."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """``body_digest``: hash of the only request that may have this key."""

    owner: str | None
    key: str
    body_digest: bytes = field(compare=False)
    body_bytes: int = field(default=0, compare=False)


RESUME_SECONDS = 60.0
"""A trainer or proxy is back within a minute. A caller that is gone for longer must not keep the engine busy."""
KEPT_SECONDS = 600.0
"""Time for a trainer to start again and load its model."""
KEPT_BATCHES = 64
"""More batches than a trainer has unread."""


@dataclass(frozen=True, slots=True)
class BatchRetention:
    """Limits of durable batches. Beyond a limit, the oldest ended batch of the caller that has most is dropped.

    ``resume_seconds``: time that a batch runs without a connected caller.
    ``kept_seconds``: time after the end.
    ``kept_batches``: number of ended batches.
    ``kept_bytes``: memory of all batches, with the requests of running batches. One caller may have half.
    """

    resume_seconds: float = RESUME_SECONDS
    kept_seconds: float = KEPT_SECONDS
    kept_batches: int = KEPT_BATCHES
    kept_bytes: int = 1 << 30


@dataclass(slots=True, eq=False)
class _DurableBatch:
    """``timer``: cancels the batch without listeners, or drops the ended batch."""

    key: IdempotencyKey
    start_task: asyncio.Task[BatchRun] | None = None
    batch: BatchRun | None = None
    has_ended: bool = False
    timer: asyncio.TimerHandle | None = None

    def schedule(self, seconds: float, action: Callable[["_DurableBatch"], None]) -> None:
        """``action`` takes the place of the previous action."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = asyncio.get_running_loop().call_later(seconds, action, self)


class BatchRegistry(Generic[RequestT, OutputT]):
    """Starts batches, and finds them again by id or by idempotency key.

    A batch with an idempotency key is durable: it continues for a while without its caller, and is kept after its end.
    Other batches are cancelled when their caller disconnects.

    Args:
        saved: keeps carried prompts for the next server, or None to lose them.
        has_initial_weights: returns whether the weights never changed.
        may_call: see `CarriedPrompts`.
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
        self.carried = CarriedPrompts(carry_limits, may_call)
        self._saved = saved
        # The next server starts with the initial weights, and cannot resume tokens of other weights.
        self._can_next_server_resume = has_initial_weights
        # Batches by id, until they have given back their carried prompts.
        self._running: dict[str, BatchRun] = {}
        self._durable: dict[IdempotencyKey, _DurableBatch] = {}
        self._ended: FairCache[IdempotencyKey, _DurableBatch] = FairCache(self._retention.kept_batches)
        # Requests of running durable batches, by owner.
        self._request_bytes: Counter[str | None] = Counter()

    async def start_or_find(
        self, request: BatchRequest, answer_format: AnswerFormat, key: IdempotencyKey | None = None
    ) -> BatchRun:
        """Start a batch, or find the batch with the same idempotency key.

        The caller must listen in the same turn of the event loop: a batch without listeners may be dropped.

        Raises:
            InvalidRequest
            Conflict: the key was used for another request.
            TooLarge, QuotaReached, Overloaded: the batch cannot be kept.
        """
        if key is None:
            return await self._start_batch(request, answer_format, None)
        durable = self._durable.get(key)
        if durable is None:
            self._make_room(key.owner, key.body_bytes)
            durable = _DurableBatch(key)
            self._durable[key] = durable
            self._request_bytes[key.owner] += key.body_bytes
            durable.start_task = asyncio.create_task(self._start_batch(request, answer_format, durable))
            # Otherwise asyncio would log the error if no caller waits any more.
            durable.start_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif durable.key.body_digest != key.body_digest:
            raise Conflict(KEY_HEADER, "names a batch with another body; choose another key for this one")
        assert durable.start_task is not None
        # Another caller with the same key may wait for the same task.
        return await asyncio.shield(durable.start_task)

    def find(self, batch_id: str) -> BatchRun:
        """Find a durable batch of the caller. The caller must listen in the same turn of the event loop."""
        for durable in self._durable.values():
            batch = durable.batch
            if batch is not None and batch.batch_id == batch_id and caller.get().may_see(batch.owner):
                return batch
        raise NotFound(
            "batch_id",
            f"no batch {batch_id!r} of yours is kept; batches that were sent with {KEY_HEADER} are kept for a while",
        )

    def cancel(self, batch_id: str) -> bool:
        batch = self._running.get(batch_id)
        if batch is None or not caller.get().may_see(batch.owner):
            batch = self.find(batch_id)
        return batch.cancel("the batch was cancelled; send it again under another key to run it again")

    def drain(self) -> None:
        """Cancel batches without listeners, which no caller can find later."""
        for batch in list(self._running.values()):
            if not batch.listeners:
                batch.cancel(
                    "the server is stopping, and no caller was connected to the batch; send it to another server"
                )

    async def hand_back(self, reason: DartsError) -> None:
        """End all batches, and give callers the tokens that the next server cannot resume."""
        may_carry_prompts = self._saved is not None
        may_carry_tokens = self._can_next_server_resume()
        for batch in list(self._running.values()):
            if batch.end is None:
                batch.interrupt(
                    reason,
                    may_carry_prompts=may_carry_prompts,
                    may_carry_tokens=may_carry_tokens,
                )
        if self._running:
            await asyncio.wait([batch.task for batch in self._running.values()])

    def restore_carried(self) -> None:
        """Move the prompts that the last server has saved into memory.

        Call this last: a server that fails to start must leave the prompts on the disk.
        """
        if self._saved is None:
            return
        # `put` copies all prompts of a caller, so call it once for each caller.
        by_owner: dict[str | None, list[CarriedPrompt]] = {}
        for owner, prompt in self._saved.take(self._rollouts.engine.weight_version):
            by_owner.setdefault(owner, []).append(prompt)
        for owner, prompts in by_owner.items():
            self.carried.put(owner, prompts)

    async def close(self) -> int:
        """Return how many carried prompts could not be saved."""
        for batch in list(self._running.values()):
            batch.cancel("the server has stopped")
        if self._running:
            await asyncio.wait([batch.task for batch in self._running.values()], timeout=CLOSE_SECONDS)
        if self._saved is None:
            return 0
        prompts = list(self.carried)
        try:
            with_tokens = self._can_next_server_resume()
            return await self._saved.save_in_time(prompts, self._renderer, with_tokens=with_tokens)
        except Exception:
            logger.exception("prompts that were carried over could not be saved, and are lost")
            return len(prompts)

    def fail(self, error: DartsError) -> None:
        """End all streamed batches. Other batches are answered when their groups have ended."""
        for batch in list(self._running.values()):
            if batch.answer_format.stream is not StreamMode.OFF:
                batch.fail(error)

    async def _start_batch(
        self, request: BatchRequest, answer_format: AnswerFormat, durable: _DurableBatch | None
    ) -> BatchRun:
        try:
            prepared = await prepare_batch(request, self._rollouts, self._renderer, self._new_planner, self.carried)
        except BaseException:
            # Free the key, also if the caller has left.
            if durable is not None:
                self._drop(durable)
            raise
        batch = BatchRun(
            prepared,
            self._rollouts,
            self._renderer,
            self.carried,
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
            # A kept batch keeps its task. Raising the error frees its frames with all tokens.
            with suppress(asyncio.CancelledError):
                task.exception()

    def _handle_idle(self, durable: _DurableBatch | None, batch: BatchRun) -> None:
        if durable is None:
            batch.cancel("the caller disconnected")
            return

        def cancel_if_idle(durable: _DurableBatch) -> None:
            if not batch.listeners:
                batch.cancel("no caller was connected to the batch for too long")
                self._drop(durable)

        durable.schedule(self._retention.resume_seconds, cancel_if_idle)

    def _handle_end(self, durable: _DurableBatch | None, batch: BatchRun) -> None:
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
        """Drop ended batches until ``more`` bytes fit: first of the owner, then of all callers.

        Raises:
            TooLarge, QuotaReached, Overloaded: dropping batches would not suffice, so no batch was dropped.
        """
        total_limit = self._retention.kept_bytes
        owner_limit = total_limit // 2
        if more > owner_limit:
            raise TooLarge(
                "body",
                f"must have at most {owner_limit} bytes with {KEY_HEADER} (--kept-bytes); send less per request, or "
                "without that header",
            )
        # Running batches cannot be dropped.
        owner_running = self._request_bytes[owner]
        total_running = self._request_bytes.total()
        for running, limit, error, whose in (
            (owner_running, owner_limit, QuotaReached, "this key's"),
            (total_running, total_limit, Overloaded, "all"),
        ):
            if running + more > limit:
                raise error(
                    f"{whose} running batches with {KEY_HEADER} have {running} bytes, and {more} more would exceed "
                    f"{limit} (--kept-bytes); retry when some have ended",
                    RETRY_SECONDS,
                )
        while self._ended.weight_of(owner) + owner_running + more > owner_limit:
            oldest = next(iter(self._ended.entries_of(owner).values()))
            self._drop(oldest)
        for _, dropped in self._ended.shrink(total_limit - total_running - more):
            self._drop(dropped)

    def _drop(self, durable: _DurableBatch) -> None:
        """Harmless if the batch was dropped before, even if another batch has its key now."""
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
    # Sampling parameters may be as large as a request.
    size = BATCH_BYTES + len(json.dumps(batch.sampling, default=repr))
    if batch.feed is not None:
        size += batch.feed.kept_bytes
    if not isinstance(batch.end, BatchDone):
        return size

    groups = list(batch.end.results)
    for prompt in batch.end.unfinished:
        size += GROUP_BYTES + len(prompt.metadata or b"")
        if prompt.group is not None:
            groups.append(prompt.group)
    for group in groups:
        size += GROUP_BYTES + len(group.metadata or b"")
        if group.record is not None:
            size += CANDIDATE_BYTES * len(group.record.candidates)
        samples = list(group.samples.values())
        if group.aborted is not None:
            samples += [aborted.sample for aborted in group.aborted.values()]
        for sample in samples:
            size += sys.getsizeof(sample.token_ids) + sys.getsizeof(sample.logprobs) + sys.getsizeof(sample.text)
    return size
