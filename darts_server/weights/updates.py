"""Updates of a running engine's weights, one at a time: fetched and checked whole, then applied, or not at all."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from anyio.to_thread import run_sync

from darts_server.engine.gate import Gate
from darts_server.exceptions import (
    InvalidRequest,
    UpdateFailed,
    UpdateRunning,
    WeightsLost,
)
from darts_server.types import UpdateOutcome, UpdateRecord
from darts_server.weights.port import Model, UpdateObserver
from darts_server.weights.roots import allowed
from darts_server.weights.staging import Staging
from darts_server.weights.states import Machine, Move, State
from darts_server.weights.tensors import TensorSet, by_file, changed, check, read

logger = logging.getLogger(__name__)
T = TypeVar("T")

ELSEWHERE = "vllm"
"""The source of an update that came by vLLM's own routes."""


TOO_SLOW = "see --weights-timeout"
REMEDIES = {"wait": "groups still run; see --weights-wait, or use the rule keep"}


class Rule(StrEnum):
    """What becomes of groups that run."""

    FINISH = "finish"
    """They are waited for, and no others begin meanwhile."""
    KEEP = "keep"
    """They stand still and go on with the new weights, marked as mixed."""


@dataclass(frozen=True, slots=True)
class Wish:
    """How an update is to be made; ``None`` leaves it to the server: its rule, the next version."""

    rule: Rule | None = None
    version: int | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """``wait``: seconds that groups are waited for. ``step``: seconds of any other step."""

    rule: Rule = Rule.FINISH
    wait: float = 600.0
    step: float = 300.0


@dataclass(slots=True)
class _Update:
    """The one under way."""

    source: str
    rule: Rule
    partial: bool
    seconds: dict[str, float] = field(default_factory=dict)


class Updates:
    """Gives the model new weights.

    Args:
        gate: what all work for the engine passes.
        root: folder that callers may name files in; ``None`` for none.
        observers: hear of every update.
    """

    def __init__(
        self,
        model: Model,
        gate: Gate,
        staging: Staging,
        root: Path | None = None,
        limits: Limits | None = None,
        observers: Sequence[UpdateObserver] = (),
    ) -> None:
        self._model = model
        self._gate = gate
        self._staging = staging
        self._root = root
        self._limits = limits or Limits()
        self._observers = tuple(observers)
        self._machine = Machine(model.weight_version)
        self._held: TensorSet | None = None
        """Where all that the model holds came from; ``None`` at first."""
        self._known = True
        self._by: str | None = None
        self._task: asyncio.Task[UpdateRecord] | None = None
        self.last: UpdateRecord | None = None
        self.last_error: str | None = None

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def version(self) -> int:
        return self._machine.version

    @property
    def rule(self) -> Rule:
        """Where a caller names none."""
        return self._limits.rule

    async def push(self, body: Callable[[int], AsyncIterator[bytes]], wish: Wish) -> UpdateRecord:
        """Weights as the bytes of a safetensors file. ``body`` is told how many may come.

        Raises:
            InvalidRequest: the set is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """

        async def fetch() -> TensorSet:
            most = (await self._model.expected()).most_bytes
            path = await self._staging.write(body(most))
            return await run_sync(read, path, "body")

        return await self._update("push", fetch, wish, "body")

    async def load(self, path: str, wish: Wish) -> UpdateRecord:
        """Weights from a file or folder under the root, which must not change until others replace them.

        Raises:
            Forbidden: there is no root.
            InvalidRequest: the path or the set is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """

        async def fetch() -> TensorSet:
            await self._model.expected()
            return await run_sync(lambda: read(allowed(self._root, path), "path"))

        return await self._update("disk", fetch, wish, "path")

    # --- updates that others make -------------------------------------------

    def begin_elsewhere(self) -> None:
        """vLLM's own routes begin to write the model.

        Raises:
            UpdateRunning, WeightsLost
        """
        if self._by != ELSEWHERE:  # vLLM itself refuses a second one
            self._claim(ELSEWHERE)

    def end_elsewhere(self, version: int | None, *, touched: bool = True) -> None:
        """They are done, with ``version``; or they failed, with ``None``. ``touched``: whether they wrote."""
        if self._by != ELSEWHERE:  # they were not begun
            return
        self._by = None
        self._known = self._known and not touched
        if version is not None:
            self._machine.replaced(version)
            self._tell(UpdateRecord(version, UpdateOutcome.COMPLETED, ELSEWHERE, None, False, {}))

    # --- one update ---------------------------------------------------------

    async def _update(
        self, source: str, fetch: Callable[[], Awaitable[TensorSet]], wish: Wish, field: str
    ) -> UpdateRecord:
        version = self._wanted(wish)
        self._claim(source)
        update = _Update(source, wish.rule or self._limits.rule, wish.partial)
        self._machine.stage(version)
        try:
            tensors = await self._staged(update, fetch, field)
        except BaseException as error:
            self._machine.move(Move.FAIL)
            self._end(update, UpdateOutcome.REFUSED, error)
            raise
        # A caller that goes away now leaves an update that comes to its end.
        self._task = asyncio.create_task(self._applied(update, tensors))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    def _wanted(self, wish: Wish) -> int:
        if wish.version == self._machine.version:
            raise InvalidRequest("version", f"is {wish.version}, which is served already; give the new weights another")
        return self._machine.version + 1 if wish.version is None else wish.version

    def _claim(self, source: str) -> None:
        if self._machine.state is State.LOST:
            raise WeightsLost(self.last_error or "")
        if self._by is not None:
            ends = "POST /finish_weight_update ends it" if self._by == ELSEWHERE else f"it is {self.state}"
            raise UpdateRunning(f"an update by {self._by} is under way; {ends}; try again then")
        self._by = source

    async def _staged(self, update: _Update, fetch: Callable[[], Awaitable[TensorSet]], field: str) -> TensorSet:
        """All that the model will hold, if the new tensors fit."""
        given = await self._step(update, "transfer", fetch)

        async def checked() -> TensorSet:
            expected = await self._model.expected()
            taken = await run_sync(lambda: check(expected, given, partial=update.partial, field=field))
            if taken.keys() == expected.tensors.keys():
                return taken
            return {**await self._rest(field), **taken}

        return await self._step(update, "check", checked)

    async def _rest(self, field: str) -> TensorSet:
        """What a partial set is completed by. A layer of the engine takes all of its tensors or none."""
        remedy = "send a full set"
        if not self._known:
            raise InvalidRequest(field, f"is partial, and the other tensors came by vLLM's own routes; {remedy}")
        held = self._held or await self._model.original()
        if gone := await run_sync(changed, held):
            raise InvalidRequest(field, f"is partial, and {gone[0]}, which has the others, has changed since; {remedy}")
        return held

    async def _applied(self, update: _Update, tensors: TensorSet) -> UpdateRecord:
        assert self._machine.target is not None
        self._machine.move(Move.ANNOUNCE)
        for observer in self._observers:
            observer.update_announced(self._machine.target)
        self._gate.close()
        try:
            if update.rule is Rule.FINISH:
                await self._step(update, "wait", self._gate.emptied, self._limits.wait)
            await self._swapped(update, tensors)
        except Exception as error:
            self._fail(update, error)
            raise
        finally:
            self._gate.open()
        return self._end(update, UpdateOutcome.COMPLETED)

    async def _swapped(self, update: _Update, tensors: TensorSet) -> None:
        try:
            await self._step(update, "pause", self._model.pause)
            self._machine.move(Move.PAUSE)
            await self._written(update, tensors)
        finally:
            await self._resumed(update)
        self._machine.move(Move.SUCCEED)
        self._held, self._known = tensors, True

    async def _written(self, update: _Update, tensors: TensorSet) -> None:
        self._machine.move(Move.UPDATE)
        assert self._machine.target is not None
        try:
            await self._step(update, "load", lambda: self._model.load(by_file(tensors)))
            if gone := await run_sync(changed, tensors):
                raise UpdateFailed(f"{gone[0]} changed while it was loaded; write weights under a name of their own")
            await self._model.became(self._machine.target)
        except Exception as error:
            self._machine.move(Move.FAIL)
            await self._restored(update, error)
            raise

    async def _restored(self, update: _Update, error: Exception) -> None:
        """Give the model what it had before."""
        try:
            held = self._held or await self._model.original()
            if not self._known or len(await run_sync(changed, held)) > 0:
                raise UpdateFailed("the files with the old weights are gone or have changed")
            await self._step(update, "restore", lambda: self._model.load(by_file(held)))
        except Exception as second:
            lost = self._lost(f"an update failed ({error}), and so did putting back the old weights ({second})")
            try:
                await self._step(update, "stop", self._model.stop)
            finally:  # whether it stops or not
                raise lost from error

    async def _resumed(self, update: _Update) -> None:
        try:
            await self._step(update, "resume", self._model.resume)
        except Exception as error:
            if self.state is State.LOST:
                raise
            raise self._lost(f"the engine does not go on after an update ({error})") from error

    def _lost(self, what: str) -> WeightsLost:
        """From now on nothing is served."""
        self._machine.move(Move.LOSE)
        error = f"{what}; restart the server"
        self._gate.condemn(WeightsLost(error))
        return WeightsLost(error)

    # --- helpers ------------------------------------------------------------

    async def _step(self, update: _Update, phase: str, do: Callable[[], Awaitable[T]], limit: float | None = None) -> T:
        """One step, within its time."""
        limit = self._limits.step if limit is None else limit
        with _timed(update.seconds, phase):
            try:
                async with asyncio.timeout(limit):
                    return await do()
            except TimeoutError as error:
                raise UpdateFailed(f"{phase} took longer than {limit:g} s; {REMEDIES.get(phase, TOO_SLOW)}") from error

    def _fail(self, update: _Update, error: Exception) -> None:
        """After the update was announced."""
        if self.state in (State.ANNOUNCED, State.PAUSED):
            self._machine.move(Move.FAIL)
        elif self.state is State.RESTORING:
            self._machine.move(Move.SUCCEED)
        self._end(update, UpdateOutcome.LOST if self.state is State.LOST else UpdateOutcome.FAILED, error)

    def _end(self, update: _Update, outcome: UpdateOutcome, error: BaseException | None = None) -> UpdateRecord:
        self._by = None
        with suppress(OSError):
            self._staging.keep_only({file.path for file in (self._held or {}).values()})
        record = UpdateRecord(
            version=self._machine.version,
            outcome=outcome,
            source=update.source,
            rule=update.rule,
            partial=update.partial,
            seconds=update.seconds,
            error=None if error is None else str(error) or type(error).__name__,
        )
        self._tell(record)
        return record

    def _tell(self, record: UpdateRecord) -> None:
        self.last = record
        if record.error is not None:
            self.last_error = record.error
            logger.warning("an update of the weights was %s: %s", record.outcome, record.error)
        for observer in self._observers:
            observer.update_ended(record)


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = time.monotonic() - began
