"""The batches that run, and those that are kept for their callers to come back."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from darts_server.engine.port import OutputT, Prompter, RequestT
from darts_server.exceptions import Conflict, DartsError, NotFound
from darts_server.rollout.batches.run import BatchRun, Form, Stream
from darts_server.rollout.batches.submission import BatchRequest, NewPlanner, Submission
from darts_server.rollout.rollouts import Rollouts

KEY_HEADER = "Idempotency-Key"


@dataclass(frozen=True, slots=True)
class Claim:
    """A caller's name for a batch, which makes it durable.

    ``owner``: whose name it is. ``digest``: of all that was asked for.
    """

    owner: bytes
    key: str
    digest: bytes

    @property
    def name(self) -> tuple[bytes, str]:
        return (self.owner, self.key)


@dataclass(frozen=True, slots=True)
class Keeping:
    """For how long durable batches stay.

    ``resume_seconds``: running without a listener. ``kept_seconds``, ``kept_batches``: after the end.
    """

    resume_seconds: float = 60.0
    kept_seconds: float = 600.0
    kept_batches: int = 64


@dataclass(frozen=True, slots=True)
class _Claimed:
    digest: bytes
    opening: asyncio.Task[BatchRun]


class _Durable:
    """A batch that can be found again, and the one thing that is to happen to it next."""

    def __init__(self, batch: BatchRun, name: tuple[bytes, str]) -> None:
        self.batch = batch
        self.name = name
        self._timer: asyncio.TimerHandle | None = None

    def later(self, seconds: float, act: Callable[[str], None]) -> None:
        self.never()
        self._timer = asyncio.get_running_loop().call_later(seconds, act, self.batch.batch_id)

    def never(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class BatchRegistry(Generic[RequestT, OutputT]):
    """Starts batches and finds them again.

    A batch with a claim is durable: it goes on for a while without its caller, and is kept after its end. One without
    ends when its caller leaves.

    Args:
        interval: seconds between two looks at what candidates have generated.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rollouts: Rollouts[RequestT, OutputT],
        prompter: Prompter[RequestT, OutputT],
        new_planner: NewPlanner,
        keeping: Keeping | None = None,
        interval: float = 0.02,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rollouts = rollouts
        self._prompter = prompter
        self._new_planner = new_planner
        self._keeping = keeping or Keeping()
        self._interval = interval
        self._clock = clock
        self._running: dict[str, BatchRun] = {}
        self._durable: dict[str, _Durable] = {}
        self._kept: dict[str, None] = {}  # durable ones that have ended, the oldest first
        self._claims: dict[tuple[bytes, str], _Claimed] = {}

    async def open(self, request: BatchRequest, form: Form, claim: Claim | None = None) -> BatchRun:
        """A batch that begins now, or began before under the same claim. The caller is to listen in the same turn.

        Raises:
            InvalidRequest: names the field; nothing was started.
            Conflict: something else was asked for under the same claim.
        """
        if claim is None:
            return await self._open(request, form, None)
        claimed = self._claims.get(claim.name)
        if claimed is None:
            opening = asyncio.get_running_loop().create_task(self._open(request, form, claim))
            claimed = self._claims[claim.name] = _Claimed(claim.digest, opening)
        elif claimed.digest != claim.digest:
            raise Conflict(KEY_HEADER, "names a batch with another body; choose another key for this one")
        try:
            return await asyncio.shield(claimed.opening)
        except Exception:
            if self._claims.get(claim.name) is claimed:
                del self._claims[claim.name]
            raise

    def find(self, batch_id: str) -> BatchRun:
        """A durable batch that runs or is kept. The caller is to listen in the same turn.

        Raises:
            NotFound
        """
        if (durable := self._durable.get(batch_id)) is None:
            raise NotFound("batch_id", f"no batch {batch_id!r} is kept; one is for a while, if sent with {KEY_HEADER}")
        return durable.batch

    def cancel(self, batch_id: str) -> bool:
        """End a batch, durable or not; whether it was running.

        Raises:
            NotFound
        """
        batch = self._running.get(batch_id) or self.find(batch_id)
        return batch.cancel("the batch was cancelled; send it under another key to have it run again")

    def drain(self) -> None:
        """Cancel batches without a listener: no caller will find them again once the server has stopped."""
        for batch in list(self._running.values()):
            if not batch.listeners:
                batch.cancel(
                    "the server is stopping, and no caller was connected to the batch; send it to another server"
                )

    def fail(self, error: DartsError) -> None:
        """End those that are told as they run, with that error. Others are answered when their groups have ended."""
        for batch in list(self._running.values()):
            if batch.form.stream is not Stream.NOTHING:
                batch.fail(error)

    async def _open(self, request: BatchRequest, form: Form, claim: Claim | None) -> BatchRun:
        submission = await Submission.prepare(request, self._rollouts, self._prompter, self._new_planner)
        batch = BatchRun(
            submission,
            form,
            repeats=claim is not None,
            interval=self._interval,
            on_idle=self._idle,
            on_end=self._ended,
            clock=self._clock,
        )
        self._running[batch.batch_id] = batch
        if claim is not None:
            self._durable[batch.batch_id] = _Durable(batch, claim.name)
            self._idle(batch)
        return batch

    def _idle(self, batch: BatchRun) -> None:
        """Nobody listens."""
        durable = self._durable.get(batch.batch_id)
        if durable is None:
            batch.cancel("the caller went away")
        elif batch.end is None:
            durable.later(self._keeping.resume_seconds, self._give_up)

    def _give_up(self, batch_id: str) -> None:
        """Nobody came back, or there is a listener now."""
        batch = self._durable[batch_id].batch
        if not batch.listeners:
            batch.cancel("nobody listened to the batch")
            self._forget(batch_id)

    def _ended(self, batch: BatchRun) -> None:
        self._running.pop(batch.batch_id)
        if durable := self._durable.get(batch.batch_id):
            durable.later(self._keeping.kept_seconds, self._forget)
            self._kept[batch.batch_id] = None
            if len(self._kept) > self._keeping.kept_batches:
                self._forget(next(iter(self._kept)))

    def _forget(self, batch_id: str) -> None:
        if durable := self._durable.pop(batch_id, None):
            durable.never()
            self._claims.pop(durable.name, None)
            self._kept.pop(batch_id, None)
