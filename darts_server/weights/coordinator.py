"""One change of an engine's weights at a time: what becomes of groups, when it stands still, and who hears of it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from darts_server.exceptions import InvalidRequest, UpdateFailed, UpdateRunning, WeightsLost
from darts_server.serving.gate import Gate
from darts_server.types import UpdateOutcome, UpdateRecord
from darts_server.weights.port import Groups, Model, UpdateObserver
from darts_server.weights.states import Machine, Move, State

logger = logging.getLogger(__name__)
T = TypeVar("T")

VLLM_ROUTES = "vllm"
"""The source of an update that came by vLLM's own routes."""
UPDATE, TRAINER = "update", "trainer"
"""Who may close the gate."""
TOO_SLOW = "see --weights-timeout"
REMEDIES = {"wait": "groups still run; see --weights-wait, or use the rule keep"}


class Rule(StrEnum):
    """What becomes of groups that run."""

    FINISH = "finish"
    """They are waited for, and no others begin meanwhile."""
    KEEP = "keep"
    """They stand still and go on with the new weights, marked as mixed."""
    RESTART = "restart"
    """They are stopped, and started anew with the new weights. What has gone out in part is waited for."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """``wait``: seconds that groups are waited for. ``step``: seconds of any other step."""

    rule: Rule = Rule.FINISH
    wait: float = 600.0
    step: float = 300.0


@dataclass(slots=True)
class Update:
    """An update in progress.

    ``rule``: ``None`` if the trainer paused the engine itself. ``lora``: name of the LoRA adapter that is updated;
    ``None`` for the model itself.
    """

    source: str
    rule: Rule | None
    partial: bool = False
    lora: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Coordinator:
    """Knows which version is served, and by whom the engine stands still.

    Args:
        gate: what all work for the engine passes.
        observers: hear of every update.
        groups: those that run; ``None`` for an engine without.
    """

    def __init__(
        self,
        model: Model,
        gate: Gate,
        limits: UpdateSettings,
        observers: Sequence[UpdateObserver] = (),
        groups: Groups | None = None,
    ) -> None:
        self.limits = limits
        self.last: UpdateRecord | None = None
        self.last_error: str | None = None
        self.held = False
        """Whether a trainer has paused the engine, by a call of its own."""
        self._model = model
        self._gate = gate
        self._groups = groups
        self._observers = tuple(observers)
        self._machine = Machine(model.weight_version)
        self._by: str | None = None
        self._standing = False
        self._releases = 0

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def version(self) -> int:
        return self._machine.version

    @property
    def target(self) -> int:
        """The version that the update under way will bring."""
        assert self._machine.target is not None
        return self._machine.target

    # --- an update, from its beginning to its end ---------------------------

    def begin(self, update: Update, version: int | None) -> None:
        """``version``: of the new weights; ``None`` for the next one.

        Raises:
            InvalidRequest: it is served already.
            UpdateRunning, WeightsLost
        """
        if version == self.version:
            raise InvalidRequest("version", f"is {version}, which is served already; give the new weights another")
        if self.state is State.LOST:
            raise WeightsLost(self.last_error or "")
        if self._by is not None:
            raise self._busy()
        self._by = update.source
        self._machine.stage(self.version + 1 if version is None else version)

    def refuse(self, update: Update, error: BaseException) -> None:
        """It ends before anyone was told of it."""
        self._machine.move(Move.FAIL)
        self._end(update, UpdateOutcome.REFUSED, error)

    async def stop(self, update: Update) -> None:
        """Tell of it, do with groups what the rule says, and have the engine stand still. If that fails, it has ended.

        Raises:
            UpdateFailed, WeightsLost
        """
        self._machine.move(Move.ANNOUNCE)
        for observer in self._observers:
            observer.update_announced(self.target)
        self._gate.close(UPDATE)
        try:
            await self._let_out(update)
            self._standing = True
            if update.rule is not None:
                await self.step(update, "pause", self._model.pause)
            self._machine.move(Move.PAUSE)
        except Exception as error:
            await self.go_on(update, error)
            raise

    def writes(self) -> None:
        """From now on the model may hold anything."""
        self._machine.move(Move.UPDATE)

    def fails(self) -> None:
        """Writing failed; what the model had is put back."""
        self._machine.move(Move.FAIL)

    async def go_on(self, update: Update, error: Exception | None = None) -> UpdateRecord:
        """Have the engine go on, unless a trainer paused it; the update has ended. ``error``: why it failed.

        Raises:
            WeightsLost: it does not go on.
        """
        try:
            if self._standing:
                self._standing = False
                await self._resume(update)
        except WeightsLost as lost:
            error = lost
            raise
        finally:
            self._settle(error)
            self._gate.open(UPDATE)
            outcome = UpdateOutcome.COMPLETED if error is None else UpdateOutcome.FAILED
            record = self._end(update, UpdateOutcome.LOST if self.state is State.LOST else outcome, error)
            if self._groups is not None:
                self._groups.resume()
        return record

    def lose(self, what: str) -> WeightsLost:
        """From now on nothing is served."""
        self._machine.move(Move.LOSE)
        error = f"{what}; restart the server"
        self._gate.condemn(WeightsLost(error))
        return WeightsLost(error)

    async def step(self, update: Update, phase: str, do: Callable[[], Awaitable[T]], limit: float | None = None) -> T:
        """One step, within its time.

        Raises:
            UpdateFailed: it took longer.
        """
        limit = self.limits.step if limit is None else limit
        with _timed(update.seconds, phase):
            try:
                async with asyncio.timeout(limit):
                    return await do()
            except TimeoutError as error:
                raise UpdateFailed(f"{phase} took longer than {limit:g} s; {REMEDIES.get(phase, TOO_SLOW)}") from error

    # --- pauses that a trainer makes by itself ------------------------------

    async def hold(self, mode: str, pause: Callable[[], Awaitable[None]]) -> None:
        """A trainer pauses the engine by ``pause``; nothing new begins until `release`.

        ``mode``: what becomes of what runs. ``wait``: groups are waited for, not just those of their candidates that
        were started. ``abort``: groups end with an error for their callers. ``keep``: all stands still.

        Raises:
            UpdateRunning, UpdateFailed
        """
        if self.state in (State.ANNOUNCED, State.RESTORING) or (self._standing and mode == "wait"):
            raise self._busy()
        releases = self._releases
        self._gate.close(TRAINER)
        try:
            if mode == "wait" and not self.held:
                await self.step(Update(TRAINER, None), "wait", self._gate.emptied, self.limits.wait)
            elif mode == "abort" and self._groups is not None:
                self._groups.abort_all(
                    "the engine was paused with mode=abort while its group was running; send it again"
                )
            if releases != self._releases:
                raise UpdateFailed("the engine was resumed while groups were waited for")
            await pause()
            self.held = True
        finally:
            if not self.held:
                self._gate.open(TRAINER)

    async def release(self, resume: Callable[[], Awaitable[None]]) -> None:
        """The trainer lets the engine go on; during an update, as soon as that has ended."""
        if not self._standing:
            await resume()
        self._releases += 1
        self.held = False
        self._gate.open(TRAINER)

    # --- helpers ------------------------------------------------------------

    def _busy(self) -> UpdateRunning:
        ends = "POST /finish_weight_update ends it" if self._by == VLLM_ROUTES else f"it is {self.state}"
        return UpdateRunning(f"an update by {self._by} is under way; {ends}; try again then")

    async def _let_out(self, update: Update) -> None:
        if update.rule is Rule.FINISH:
            if self.held and self._gate.inside:
                raise UpdateFailed(
                    "groups cannot finish: the engine is paused; POST /resume first, or use the rule keep"
                )
            await self.step(update, "wait", self._gate.emptied, self.limits.wait)
        elif update.rule is Rule.RESTART:
            await self.step(update, "wait", self._restart, self.limits.wait)

    async def _restart(self) -> None:
        if self._groups is not None:
            await self._groups.suspend()
        await self._gate.emptied(but_for_groups=True)

    async def _resume(self, update: Update) -> None:
        try:
            if not self.held:
                await self.step(update, "resume", self._model.resume)
        except Exception as error:
            if self.state is State.LOST:
                return
            raise self.lose(f"the engine does not go on after an update ({error})") from error

    def _settle(self, error: Exception | None) -> None:
        match self.state:
            case State.ANNOUNCED | State.PAUSED:
                self._machine.move(Move.FAIL)
            case State.UPDATING if error is None:
                self._machine.move(Move.SUCCEED)
            case State.RESTORING:
                self._machine.move(Move.SUCCEED)

    def _end(self, update: Update, outcome: UpdateOutcome, error: BaseException | None = None) -> UpdateRecord:
        self._by = None
        record = UpdateRecord(
            version=self.version,
            outcome=outcome,
            source=update.source,
            rule=update.rule,
            partial=update.partial,
            lora=update.lora,
            seconds=update.seconds,
            error=None if error is None else str(error) or type(error).__name__,
        )
        self.last = record
        if record.error is not None:
            self.last_error = record.error
            logger.warning("an update of the weights was %s: %s", record.outcome, record.error)
        for observer in self._observers:
            observer.update_ended(record)
        return record


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds to what the phase has taken so far."""
    began = time.monotonic()
    try:
        yield
    finally:
        seconds[phase] = seconds.get(phase, 0.0) + time.monotonic() - began
