"""Coordinates weight updates: one at a time, with the engine paused and running groups treated by a rule.

After any failure, either the old weights are served or nothing is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from enum import StrEnum
from typing import TypeVar

from anyio import CancelScope

from darts_server.exceptions import Conflict, InvalidRequest, UpdateFailed, UpdateRunning, WeightsLost
from darts_server.observers import UpdateEvents
from darts_server.records import UpdateRecord
from darts_server.serving.gate import Gate
from darts_server.types import UpdateOutcome
from darts_server.weights.port import Groups, Model, Rule, Update, UpdateSettings

logger = logging.getLogger(__name__)

VLLM_ROUTES = "vllm"
"""Source of an update that is made through vLLM's own routes."""
UPDATE = "update"
TRAINER = "trainer"
"""Names under which the gate is closed."""
WEIGHTS = "weights"
KV_CACHE = "kv_cache"
MEMORY = (WEIGHTS, KV_CACHE)
"""vLLM's names of the parts that leave the device's memory while the engine sleeps."""
# vLLM's name of the part that sleeps if no memory is freed.
SCHEDULING = "scheduling"
WAKE_UP = "POST /wake_up first"

T = TypeVar("T")


class State(StrEnum):
    SERVING = "serving"
    STAGING = "staging"
    """The new weights are fetched and checked while the old weights are served."""
    ANNOUNCED = "announced"
    """Observers are notified, and the update's rule is applied to running groups."""
    UPDATING = "updating"
    """The engine is paused and the model is written: its weights are undefined."""
    RESTORING = "restoring"
    """Writing failed; the old weights are loaded again."""
    LOST = "lost"
    """The model's weights are undefined, or the engine does not resume. Final."""


class Coordinator:
    """Calls raise `UpdateRunning` if an update forbids them, and `WeightsLost` after weights were lost."""

    def __init__(
        self,
        model: Model,
        gate: Gate,
        settings: UpdateSettings,
        observers: UpdateEvents,
        groups: Groups,
    ) -> None:
        self.settings = settings
        self.state = State.SERVING
        self.version = model.weight_version
        """The version that is served, or was served last."""
        self.last: UpdateRecord | None = None
        self.last_error: str | None = None
        self.paused_by_trainer = False
        """Whether the trainer paused the engine through vLLM's routes. Then only the trainer resumes it."""
        self.trainer_pauses = 0
        self._model = model
        self._gate = gate
        self._groups = groups
        self._observers = observers
        self._source: str | None = None
        self._task: asyncio.Task[UpdateRecord] | None = None
        self._paused_by_update = False
        self._num_trainer_resumes = 0
        self._sleeping_parts: set[str] = set()

    @property
    def is_settled(self) -> bool:
        """Whether all engines have the same weights in memory, until the event loop's next turn."""
        return self.state in (State.SERVING, State.STAGING) and not self._sleeping_parts

    # --- an update, from its beginning to its end ---------------------------

    async def run(self, update: Update, version: int | None) -> UpdateRecord:
        """Run an update of our own routes. ``version``: None for the next version.

        Raises:
            InvalidRequest: the request is bad; nothing was changed.
            UpdateError: the old version is served.
        """
        self.begin(update, version)
        update.rule = update.rule or self.settings.rule
        try:
            await update.stage()
            if update.when_staged is not None:
                await update.when_staged()
        except BaseException as error:
            update.clean_up()
            await self.finish(update, error)
            raise
        # The rest runs in a task, because a caller that disconnects must not cancel the update half-way.
        self._task = asyncio.create_task(self._run_staged(update))
        # Without a caller, no other task retrieves the exception, and asyncio would log it.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    async def _run_staged(self, update: Update) -> UpdateRecord:
        try:
            await self.pause_for(update)
            try:
                await update.apply()
                await self._model.set_version(update.version)
            except Exception as error:
                lost = await self.roll_back(update, error)
                if lost is not None:
                    raise lost from error
                raise
            update.commit()
            return await self.finish(update)
        finally:
            update.clean_up()

    def begin(self, update: Update, version: int | None) -> None:
        """Begin an update, which excludes other updates until `finish`.

        Raises:
            InvalidRequest: the version is served already.
            Conflict: the weights are not in memory.
        """
        if version == self.version and not update.repeat_version:
            raise InvalidRequest("version", f"is {version}, which is served already; give the new weights another")
        self.check_no_update()
        self._check_weights_awake()
        self._source = update.source
        self.state = State.STAGING
        update.timeout = self.settings.step_timeout
        if version is None:
            version = self.version + 1
        update.version = version

    def check_no_update(self) -> None:
        """Raise an error if an update is in progress in any state, or if the weights are lost."""
        self._check_not_lost()
        if self._source is not None:
            raise self._update_running()

    async def pause_for(self, update: Update) -> None:
        """Announce the update, apply its rule to running groups, and pause the engine until `finish`.

        Raises:
            Conflict: the engine was put to sleep meanwhile; the update has ended.
            UpdateFailed: groups did not finish in time, or the engine could not be paused; the update has ended.
        """
        self.state = State.ANNOUNCED
        self._observers.announced(update.version)
        self._gate.close(UPDATE)

        async def suspend_groups() -> None:
            # Suspended groups stay inside the gate, but have no requests in the engine.
            await self._groups.suspend()
            await self._gate.wait_until_empty(except_groups=True)

        try:
            self._check_weights_awake()
            if update.rule is Rule.FINISH:
                if self.paused_by_trainer and self._gate.work_inside:
                    raise UpdateFailed(
                        "groups cannot finish: the engine is paused; POST /resume first, or use the rule keep"
                    )
                await update.run_phase("wait", self._gate.wait_until_empty, self.settings.wait_timeout)
            elif update.rule is Rule.RESTART:
                await update.run_phase("wait", suspend_groups, self.settings.wait_timeout)
            # This is set before the pause, because a pause that fails half-way must be resumed too.
            self._paused_by_update = True
            # Without a rule, the trainer has paused the engine.
            if update.rule is not None:
                await update.run_phase("pause", self._model.pause)
            self._groups.prepare_weight_change()
            self.state = State.UPDATING
        except BaseException as error:
            # This includes the cancellation, if the trainer disconnects while groups are awaited.
            await self.finish(update, error)
            raise

    async def roll_back(self, update: Update, error: Exception) -> WeightsLost | None:
        """Restore the old weights after ``error``, and end the update. Raises as `finish`.

        Return the error that the caller must raise if the weights are lost, otherwise None.
        """
        self.state = State.RESTORING
        try:
            addition = await update.roll_back()
        except Exception as second_error:
            lost = self._enter_lost(
                f"an update failed ({error}), and restoring the old weights failed too ({second_error})"
            )
            try:
                # The caller must learn that the weights are lost, whatever fails here.
                with suppress(Exception):
                    await update.run_phase("stop", self._model.abort_requests)
            finally:
                await self.finish(update, lost)
            return lost
        if addition:
            error = UpdateFailed(f"{error}; {addition}")
        await self.finish(update, error)
        return None

    async def finish(self, update: Update, error: BaseException | None = None) -> UpdateRecord:
        """Resume the engine, unless the trainer paused it, and end the update. ``error``: why the update failed.

        Raises:
            WeightsLost: the engine does not resume.
        """
        try:
            if self._paused_by_update:
                self._paused_by_update = False
                if not self.paused_by_trainer:
                    # The engine must resume, even if the caller has disconnected.
                    with CancelScope(shield=True):
                        await update.run_phase("resume", self._model.resume)
        except Exception as resume_error:
            # If the weights are lost, that error is reported, and nothing is served anyway.
            if self.state is not State.LOST:
                error = self._enter_lost(f"the engine does not resume after an update ({resume_error})")
                raise error from resume_error
        finally:
            outcome = UpdateOutcome.FAILED
            if self.state is State.LOST:
                outcome = UpdateOutcome.LOST
            elif error is None:
                outcome = UpdateOutcome.COMPLETED
                self.version = update.version
            elif self.state is State.STAGING:
                outcome = UpdateOutcome.REFUSED
            if self.state is not State.LOST:
                self.state = State.SERVING
            self._source = None
            self._gate.open(UPDATE)
            record = UpdateRecord(
                version=self.version,
                outcome=outcome,
                source=update.source,
                rule=update.rule,
                partial=update.partial,
                lora=update.lora,
                seconds=update.seconds,
                error=None if error is None else _describe_error(error),
            )
            self.last = record
            if record.error is not None:
                self.last_error = record.error
                logger.warning("a weight update was %s: %s", record.outcome, record.error)
            self._observers.ended(record)
            self._groups.resume()
        return record

    def _enter_lost(self, reason: str) -> WeightsLost:
        self.state = State.LOST
        error = f"{reason}; restart the server"
        # The gate keeps its error for ever, so that error must not get the cause and the traceback of this update.
        self._gate.fail(WeightsLost(error))
        return WeightsLost(error)

    # --- pauses by the trainer, through vLLM's routes -----------------------

    async def pause_by_trainer(self, mode: str, pause: Callable[[], Awaitable[None]]) -> None:
        """Pause the engine by ``pause``, and admit no new work until `resume_by_trainer`.

        ``mode``: ``wait`` waits for whole groups, ``abort`` fails groups, and ``keep`` pauses everything.

        Raises:
            UpdateFailed: groups did not end, or the engine was resumed meanwhile.
        """
        self._check_not_lost()
        # While the update has paused groups, a wait for them would not end.
        if self.state in (State.ANNOUNCED, State.RESTORING) or (self._paused_by_update and mode == "wait"):
            raise self._update_running()
        was_paused = self.paused_by_trainer
        resumes_before = self._num_trainer_resumes
        self._gate.close(TRAINER)
        try:
            if mode == "wait" and not was_paused:
                # No update is made. `run_phase` has the timeout and its error.
                timed_wait = Update(source=TRAINER, rule=None)
                await timed_wait.run_phase("wait", self._gate.wait_until_empty, self.settings.wait_timeout)
            elif mode == "abort":
                self._groups.abort_all(
                    "the engine was paused with mode=abort while its group was running; send it again"
                )
            if resumes_before != self._num_trainer_resumes:
                raise UpdateFailed("the engine was resumed while groups were waited for")
            # This is set before the pause, because an update that ends meanwhile must not resume the engine.
            self.paused_by_trainer = True
            self.trainer_pauses += 1
            try:
                await pause()
            except BaseException:
                # An earlier pause still holds, unless it was resumed meanwhile.
                self.paused_by_trainer = was_paused and resumes_before == self._num_trainer_resumes
                # The pause may have failed half-way.
                if not self.paused_by_trainer and not self._paused_by_update:
                    await self._model.resume()
                raise
            finally:
                self.trainer_pauses -= 1
        finally:
            if not self.paused_by_trainer:
                self._gate.open(TRAINER)
        if not self.paused_by_trainer:
            raise UpdateFailed("the engine was resumed while it was being paused")

    async def resume_by_trainer(self, resume: Callable[[], Awaitable[None]]) -> None:
        """Resume the engine by ``resume``. During an update, the engine resumes when the update ends.

        Raises:
            Conflict: the engine is asleep.
        """
        if self._sleeping_parts:
            raise Conflict("engine", f"is asleep ({', '.join(sorted(self._sleeping_parts))}); {WAKE_UP}")
        with self._ending_trainer_pause():
            # An update that has paused the engine resumes it.
            if not self._paused_by_update:
                await resume()

    async def abort_by_trainer(self, abort: Callable[[], Awaitable[None]], *, everything: bool) -> None:
        """``everything``: fail whole groups, with an error for their callers."""
        self._check_not_lost()
        # The update resumes these requests, unless the trainer has paused them too.
        if self._paused_by_update and not self.paused_by_trainer:
            raise self._update_running()
        if everything:
            self._groups.abort_all("all requests were aborted while its group was running; send it again")
        await abort()

    # --- sleep, through vLLM's routes ---------------------------------------

    async def sleep_by_trainer(self, mode: str, sleep: Callable[[], Awaitable[None]], *, frees_memory: bool) -> None:
        """Pause the engine as in `pause_by_trainer`, and put it to sleep by ``sleep`` until `wake_up_by_trainer`.

        ``frees_memory``: whether the parts of `MEMORY` are freed.
        """
        # If no memory is freed, only scheduling sleeps, which is a pause.
        parts = set(MEMORY) if frees_memory else set()

        async def fall_asleep() -> None:
            # Check again, because an update may have been announced while groups were awaited.
            self._check_no_update_announced()
            with self._marking_asleep(parts):
                await sleep()
            # Set these again, because the engine may have been woken up before it slept.
            self.paused_by_trainer = True
            self._gate.close(TRAINER)
            self._sleeping_parts = self._sleeping_parts | parts

        self._check_no_update_announced()
        await self.pause_by_trainer(mode, fall_asleep)

    async def free_by_trainer(self, part: str, free: Callable[[], Awaitable[None]]) -> None:
        """Free one part of `MEMORY` by ``free``, which fails unless the engine is paused."""
        self._check_no_update_announced()
        with self._marking_asleep([part]):
            await free()

    async def wake_up_by_trainer(self, wake_up: Callable[[], Awaitable[T]], parts: Collection[str] | None = None) -> T:
        """Wake up parts of `MEMORY`, by default all."""
        self._check_no_update_announced()
        sleeping_before = self._sleeping_parts
        woken = set(MEMORY) if parts is None else set(parts) - {SCHEDULING}
        # vLLM does nothing if one of the parts is not asleep.
        if parts is not None and not woken <= sleeping_before:
            woken = set()
        # No part stays asleep. This includes a sleep that freed no memory, which has no parts.
        ends_pause = woken >= sleeping_before
        with self._ending_trainer_pause() if ends_pause else nullcontext():
            answer = await wake_up()
            # Another set means that the engine was put to sleep meanwhile, so its parts are asleep again.
            if self._sleeping_parts is sleeping_before:
                self._sleeping_parts = sleeping_before - woken
        return answer

    @contextmanager
    def _ending_trainer_pause(self) -> Iterator[None]:
        """Count the trainer's pause as ended while the block resumes the engine. If it fails, the pause holds."""
        was_paused = self.paused_by_trainer
        self._num_trainer_resumes += 1
        self.paused_by_trainer = False
        try:
            yield
        except BaseException:
            self.paused_by_trainer |= was_paused
            raise
        # The trainer may have paused the engine again meanwhile.
        if not self.paused_by_trainer:
            self._gate.open(TRAINER)

    @contextmanager
    def _marking_asleep(self, parts: Collection[str]) -> Iterator[None]:
        # Mark the parts before they are freed, because no update may write them from now on.
        sleeping_before = self._sleeping_parts
        self._sleeping_parts = sleeping_before | set(parts)
        try:
            yield
        except BaseException:
            self._sleeping_parts = sleeping_before
            raise

    def _check_not_lost(self) -> None:
        if self.state is State.LOST:
            raise WeightsLost(self.last_error or "")

    def _check_no_update_announced(self) -> None:
        self._check_not_lost()
        # A staging update has changed nothing yet. It checks again that the weights are awake before it goes on.
        if self.state not in (State.SERVING, State.STAGING):
            raise self._update_running()

    def _check_weights_awake(self) -> None:
        if WEIGHTS in self._sleeping_parts:
            raise Conflict("engine", f"is asleep, and its weights are not in memory; {WAKE_UP}")

    def _update_running(self) -> UpdateRunning:
        progress = f"it is {self.state}"
        if self._source == VLLM_ROUTES:
            progress = "POST /finish_weight_update ends it"
        return UpdateRunning(f"an update by {self._source} is in progress; {progress}; try again then")


def _describe_error(error: BaseException) -> str:
    # The text of a cancellation is about the task.
    if isinstance(error, asyncio.CancelledError):
        return "the caller has disconnected"
    return str(error) or type(error).__name__
