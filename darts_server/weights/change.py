"""Something about a model that changes while it is served: wholly, or not at all."""

import asyncio
from typing import Protocol

from darts_server.types import UpdateRecord
from darts_server.weights.coordinator import Coordinator, Update
from darts_server.weights.port import Model


class Change(Protocol):
    """What one update changes. Called in this order; ``put_back`` only after a failure."""

    async def stage(self, update: Update) -> None:
        """Fetch and check all of it. The engine serves, and is not touched.

        Raises:
            InvalidRequest, UpdateError: nothing was changed.
        """
        ...

    async def write(self, update: Update) -> None:
        """Give it to the engine, which stands still.

        Raises:
            UpdateFailed: the engine may hold anything.
        """
        ...

    async def put_back(self, update: Update) -> None:
        """Give the engine what it had before.

        Raises:
            UpdateFailed
        """
        ...

    def took(self) -> None:
        """It is what is served."""
        ...

    def tidy(self) -> None:
        """Remove what nobody needs any more, whatever became of it."""
        ...


class Changes:
    """Makes changes, one at a time."""

    def __init__(self, coordinator: Coordinator, model: Model) -> None:
        self._coordinator = coordinator
        self._model = model
        self._task: asyncio.Task[UpdateRecord] | None = None

    async def make(self, update: Update, version: int | None, change: Change) -> UpdateRecord:
        """``version``: that it brings; ``None`` for the next one.

        Raises:
            InvalidRequest: it is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """
        self._coordinator.begin(update, version)
        try:
            await change.stage(update)
        except BaseException as error:
            change.tidy()
            self._coordinator.refuse(update, error)
            raise
        # A caller that goes away now leaves an update that comes to its end.
        self._task = asyncio.create_task(self._applied(update, change))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    async def _applied(self, update: Update, change: Change) -> UpdateRecord:
        try:
            await self._coordinator.stop(update)
            try:
                await self._written(update, change)
            except Exception as error:
                await self._coordinator.go_on(update, error)
                raise
            change.took()
            return await self._coordinator.go_on(update)
        finally:
            change.tidy()

    async def _written(self, update: Update, change: Change) -> None:
        self._coordinator.writes()
        try:
            await change.write(update)
            await self._model.became(self._coordinator.target)
        except Exception as error:
            self._coordinator.fails()
            await self._restored(update, change, error)
            raise

    async def _restored(self, update: Update, change: Change, error: Exception) -> None:
        try:
            await change.put_back(update)
        except Exception as second:
            lost = self._coordinator.lose(
                f"an update failed ({error}), and so did putting back the old weights ({second})"
            )
            try:
                await self._coordinator.step(update, "stop", self._model.stop)
            finally:  # whether it stops or not
                raise lost from error
