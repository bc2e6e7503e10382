"""Updates that a trainer makes step by step through vLLM's own routes. The trainer may stop at any time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from darts_server.exceptions import Conflict, UpdateFailed, WeightsLost
from darts_server.weights.coordinator import VLLM_ROUTES, Coordinator
from darts_server.weights.loaded import LoadedWeights
from darts_server.weights.port import Model, Update

MAX_NAMES = 3
"""Limit of tensors that an error message names."""

Step = Callable[[], Awaitable[None]]


@dataclass(slots=True, kw_only=True)
class _Session(Update):
    model: Model
    loaded: LoadedWeights
    num_writes: int = 0
    written_names: list[str] = field(default_factory=list)
    """Names of the written tensors, as far as vLLM reports them."""

    async def roll_back(self) -> str:
        """Restore the old weights. If they are in no file, serve the mixture that the model may hold."""
        await self.run_phase("restore", self.model.abandon_update)
        if not self.num_writes:
            return "no tensor had arrived, and the old weights are served"
        if await self.loaded.restore(self):
            return "the old weights were restored and are served"
        self.loaded.record_mixture()
        written = "1 call of /update_weights"
        if self.num_writes > 1:
            written = f"{self.num_writes} calls of /update_weights"
        if self.written_names:
            written += f", with {', '.join(self.written_names[:MAX_NAMES])}"
        if len(self.written_names) > MAX_NAMES:
            written += f" and {len(self.written_names) - MAX_NAMES} more"
        return (
            f"the model may hold a part of the new weights, layer by layer ({written}), and the old ones are in no "
            "file; send a full set"
        )


@dataclass(slots=True)
class ExternalUpdates:
    """Coordinates updates whose steps the engine does itself. The engine refuses steps outside of a session."""

    coordinator: Coordinator
    loaded: LoadedWeights
    model: Model
    _session: _Session | None = None
    # A start that closely follows a finish waits for the end of the finish. Otherwise the engine would resume with a
    # model without weights, and die.
    _step_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _timeout_task: asyncio.Task[None] | None = None
    """Waits for the trainer's next call."""

    async def start(self, start: Step) -> None:
        """Pause the engine by the server's rule, unless the trainer has paused it, and call ``start``.

        Raises:
            Conflict: the trainer's pause is still in progress.
            UpdateRunning, UpdateFailed, WeightsLost
        """
        coordinator = self.coordinator
        # Refuse at once: the lock's owner may be waiting for groups.
        coordinator.check_no_update()
        async with self._step_lock:
            # A pause in progress has not stopped the engine yet, and this update would change weights in use.
            if coordinator.trainer_pauses:
                raise Conflict("engine", "is being paused; begin the update when this request has been answered")
            rule = None if coordinator.paused_by_trainer else coordinator.settings.rule
            session = _Session(
                source=VLLM_ROUTES,
                rule=rule,
                model=self.model,
                loaded=self.loaded,
            )
            coordinator.begin(session, None)
            await coordinator.pause_for(session)
            self._session = session
            await self._run_step(session, "load", start)

    async def write(self, write: Step, names: Sequence[str]) -> None:
        """Write the tensors ``names``. A failure ends the update."""
        async with self._step_lock:
            session = self._session
            if session is None:
                # The engine raises the error.
                await write()
                return
            session.num_writes += 1
            session.written_names += names
            await self._run_step(session, "transfer", write)

    async def finish(self, finish: Callable[[int], Awaitable[None]]) -> None:
        """``finish`` is called with the version that is served from now on."""
        async with self._step_lock:
            session = self._session
            if session is None:
                # The engine raises the error.
                await finish(self.coordinator.version)
                return

            async def complete() -> None:
                # Without a rule the engine is in the trainer's own pause, which may have kept the caches
                # (clear_cache=false). Our pause clears them.
                if session.rule is None:
                    # Clear the caches before the last step, so that the old weights are restored if this fails.
                    await self.model.clear_caches()
                await finish(session.version)
                self._session = None

            await self._run_step(session, "load", complete)
            # The written weights are in no file.
            self.loaded.record(None)
            await self.coordinator.finish(session)

    async def _run_step(self, session: _Session, phase: str, step: Step) -> None:
        if self._timeout_task is not None:
            # This task has the lock, so the timeout has not begun to end the session.
            self._timeout_task.cancel()
        try:
            await session.run_phase(phase, step)
        except Exception as error:
            self._session = None
            # This runs in a task. A trainer that disconnects must not cancel it half-way, because the gate would stay
            # closed.
            restoring = asyncio.create_task(self.coordinator.roll_back(session, error))
            # Without a caller, no other task retrieves the exception, and asyncio would log it.
            restoring.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(restoring)
            raise
        finally:
            if self._session is not None:
                self._timeout_task = asyncio.create_task(self._end_after_timeout(session))

    async def _end_after_timeout(self, session: _Session) -> None:
        timeout = self.coordinator.settings.step_timeout
        # The trainer's next call cancels this task.
        await asyncio.sleep(timeout)
        async with self._step_lock:
            self._session = None
            error = f"the trainer began an update and did not call for {timeout:g} s; see --weights-timeout"
            # No caller waits for this task, and the gate raises the error for every request.
            with suppress(WeightsLost):
                await self.coordinator.roll_back(session, UpdateFailed(error))
