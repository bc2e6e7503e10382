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
    """A trainer's update, from start to finish."""

    model: Model
    loaded: LoadedWeights
    writes: int = 0
    """Number of calls of /update_weights."""
    names: list[str] = field(default_factory=list)
    """Names of the written tensors, as far as vLLM reports them."""

    async def roll_back(self) -> str:
        """Restore the old weights. If they are in no file, record that the model may hold a mixture, and serve that."""
        await self.run_phase("restore", self.model.abandon_update)
        if not self.writes:
            return "no tensor had arrived, and the old weights are served"
        if await self.loaded.restore(self):
            return "the old weights were restored and are served"
        self.loaded.record_mixture()
        wrote = "1 call of /update_weights"
        if self.writes > 1:
            wrote = f"{self.writes} calls of /update_weights"
        if self.names:
            wrote += f", with {', '.join(self.names[:MAX_NAMES])}"
        if len(self.names) > MAX_NAMES:
            wrote += f" and {len(self.names) - MAX_NAMES} more"
        return (
            f"the model may hold a part of the new weights, layer by layer ({wrote}), and the old ones are in no file; "
            "send a full set"
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
    _steps: asyncio.Lock = field(default_factory=asyncio.Lock)
    _timeout: asyncio.Task[None] | None = None
    """Task that waits for the trainer's next call."""

    async def start(self, start: Step) -> None:
        """Pause the engine by the server's rule, unless the trainer has paused it, and call ``start``.

        Raises:
            Conflict: the trainer's pause is still in progress.
            UpdateRunning, UpdateFailed, WeightsLost
        """
        coordinator = self.coordinator
        # Refuse at once: the lock's owner may be waiting for groups.
        coordinator.check_no_update()
        async with self._steps:
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
            await coordinator.pause(session)
            self._session = session
            await self._run_step(session, "load", start)

    async def write(self, write: Step, names: Sequence[str]) -> None:
        """Write the tensors ``names`` by ``write``. A failure ends the update."""
        async with self._steps:
            session = self._session
            if session is None:
                # The engine raises the error.
                await write()
                return
            session.writes += 1
            session.names += names
            await self._run_step(session, "transfer", write)

    async def finish(self, finish: Callable[[int], Awaitable[None]]) -> None:
        """Finish the update. ``finish`` is called with the version that is served from now on."""
        async with self._steps:
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
            self.loaded.record(None)
            await self.coordinator.finish(session)

    async def _run_step(self, session: _Session, phase: str, step: Step) -> None:
        """Run a step, and start the timeout of the trainer's next call. A failure ends the update."""
        if self._timeout is not None:
            # This task has the lock, so the timeout has not begun to end the session.
            self._timeout.cancel()
        try:
            await session.run_phase(phase, step)
        except Exception as error:
            self._session = None
            # This runs in a task. A trainer that disconnects must not cancel it half-way, because the gate would stay
            # closed.
            restoring = asyncio.create_task(self.coordinator.fail(session, error))
            restoring.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(restoring)
            raise
        finally:
            if self._session is not None:
                self._timeout = asyncio.create_task(self._time_out(session))

    async def _time_out(self, session: _Session) -> None:
        """End the update if the trainer does not call in time."""
        timeout = self.coordinator.settings.step_timeout
        await asyncio.sleep(timeout)
        async with self._steps:
            self._session = None
            error = f"the trainer began an update and did not call for {timeout:g} s; see --weights-timeout"
            # No caller waits for this task, and the gate raises the error for every request.
            with suppress(WeightsLost):
                await self.coordinator.fail(session, UpdateFailed(error))
