"""Updates that a trainer makes step by step, by routes that are not ours. It may stop calling at any time."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from darts_server.exceptions import UpdateError, UpdateFailed
from darts_server.weights.coordinator import VLLM_ROUTES, Coordinator, Update
from darts_server.weights.loaded import LoadedWeights
from darts_server.weights.port import Model

NAMED = 3
"""Tensors that a message names."""

Step = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Session:
    """``calls``: how often tensors came. ``names``: theirs, as far as these were told. ``busy``: calls under way."""

    update: Update
    calls: int = 0
    names: list[str] = field(default_factory=list)
    busy: int = 0
    timer: asyncio.TimerHandle | None = None


class ExternalUpdates:
    """The engine does the steps; here is what goes with them. Without a session steps are the engine's own affair."""

    def __init__(self, coordinator: Coordinator, held: LoadedWeights, model: Model) -> None:
        self._coordinator = coordinator
        self._held = held
        self._model = model
        self._session: _Session | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self, start: Step) -> None:
        """A trainer is about to write the model. Pauses the engine, by the server's rule, unless the trainer has.

        Raises:
            UpdateRunning, UpdateFailed, WeightsLost: nothing was touched.
            Exception: of ``start``.
        """
        if self._session is not None:
            return await start()  # the engine refuses it
        coordinator = self._coordinator
        update = Update(VLLM_ROUTES, None if coordinator.held else coordinator.limits.rule)
        coordinator.begin(update, coordinator.version + 1)
        await coordinator.stop(update)
        session = self._session = _Session(update)
        coordinator.writes()
        await self._call(session, "load", start)
        return None

    async def write(self, write: Step, names: Sequence[str]) -> None:
        """Tensors come, and are written. What fails ends the update.

        Raises:
            Exception: of ``write``.
        """
        session = self._session
        if session is None:
            return await write()
        session.calls += 1
        session.names += names
        await self._call(session, "transfer", write)
        return None

    async def finish(self, finish: Callable[[int], Awaitable[None]]) -> None:
        """All have come. ``finish`` is told the version that is served from now on.

        Raises:
            Exception: of ``finish``.
        """
        session = self._session
        if session is None:
            return await finish(self._coordinator.version)
        await self._call(session, "load", lambda: finish(self._coordinator.target))
        self._close(session)
        if session.update.rule is None:
            await self._model.clear()
        self._held.became(None)
        await self._coordinator.go_on(session.update)
        return None

    # --- helpers ------------------------------------------------------------

    async def _call(self, session: _Session, phase: str, step: Step) -> None:
        self._disarm(session)
        session.busy += 1
        try:
            await self._coordinator.step(session.update, phase, step)
        except Exception as error:
            await self._break(session, error)
            raise
        finally:
            session.busy -= 1
            self._arm(session)

    def _arm(self, session: _Session) -> None:
        if session is self._session and not session.busy:
            seconds = self._coordinator.limits.step
            session.timer = asyncio.get_running_loop().call_later(seconds, self._expire, session, seconds)

    def _disarm(self, session: _Session) -> None:
        if session.timer is not None:
            session.timer.cancel()

    def _expire(self, session: _Session, seconds: float) -> None:
        error = UpdateFailed(f"the trainer has begun an update and not called for {seconds:g} s; see --weights-timeout")
        self._ending = asyncio.get_running_loop().create_task(self._break(session, error))
        self._ending.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _close(self, session: _Session) -> None:
        self._disarm(session)
        self._session = None

    async def _break(self, session: _Session, error: Exception) -> None:
        """End the update, with the old weights if they can be had."""
        if session is not self._session:
            return
        self._close(session)
        update = session.update
        self._coordinator.fails()
        try:
            await self._coordinator.step(update, "restore", self._model.abandon)
            became = await self._put_back(session)
        except Exception as second:
            lost = self._coordinator.lose(f"an update failed ({error}), and so did putting things right ({second})")
            try:
                await self._coordinator.step(update, "stop", self._model.stop)
            finally:
                await self._coordinator.go_on(update, lost)
        else:
            await self._coordinator.go_on(update, UpdateFailed(f"{error}; {became}"))

    async def _put_back(self, session: _Session) -> str:
        """What became of the model."""
        if not session.calls:
            return "no tensor had come, and the old weights are served"
        try:
            old = await self._held.whole()
        except UpdateError:
            old = None
        if old is not None:
            await self._held.put_back(self._coordinator, session.update)
            return "the old weights were put back and are served"
        self._held.spoiled()
        return (
            f"the model may hold a part of the new weights, layer by layer ({_told(session)}), and the old ones "
            "are in no file that is known; send a full set"
        )


def _told(session: _Session) -> str:
    calls = f"{session.calls} call{'s' if session.calls > 1 else ''} of /update_weights"
    if not session.names:
        return calls
    more = "" if len(session.names) <= NAMED else f" and {len(session.names) - NAMED} more"
    return f"{calls}, with {', '.join(session.names[:NAMED])}{more}"
