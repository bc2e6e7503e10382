"""One update as a transaction: it is applied completely, or rolled back."""

import asyncio
from pathlib import Path
from typing import Protocol

from darts_server.exceptions import Conflict
from darts_server.records import UpdateRecord
from darts_server.weights.coordinator import Coordinator
from darts_server.weights.phases import Update
from darts_server.weights.port import Model


class StagedFileChanged(Conflict):
    """A file was changed since it was staged, so its weights can never be applied."""


class Transaction(Protocol):
    """The steps of one update, in the order of their calls. `roll_back` is called only after a failure."""

    async def stage(self, update: Update) -> None:
        """Fetch and check the new weights, while the engine serves the old ones.

        Raises:
            InvalidRequest, UpdateError: nothing was changed.
        """
        ...

    async def apply(self, update: Update) -> None:
        """Load the staged weights into the paused engine.

        Raises:
            UpdateFailed: the engine's weights are undefined.
        """
        ...

    async def roll_back(self, update: Update) -> None:
        """Load the previous weights into the paused engine.

        Raises:
            UpdateFailed
        """
        ...

    def commit(self) -> None:
        """Record the new weights as the ones that are served."""
        ...

    def clean_up(self) -> None:
        """Remove staged files that are no longer needed, whatever the outcome."""
        ...


class StageableTransaction(Transaction, Protocol):
    """A transaction that may be applied some time after `stage`."""

    @property
    def files(self) -> set[Path]:
        """Paths that must not be removed until it is applied."""
        ...

    async def check_again(self) -> None:
        """Check that what was staged can still be applied.

        Raises:
            StagedFileChanged: it never can.
            InvalidRequest: it cannot now.
        """
        ...

    async def reversal(self) -> "StageableTransaction":
        """Return a staged transaction that goes back to what is served now. Called before `apply`.

        Raises:
            InvalidRequest: that is not possible.
        """
        ...

    def discard(self) -> None:
        """Remove what was staged, except what is served. Other weights may be on their way into the same folder."""
        ...


class TransactionRunner:
    """Runs transactions, one at a time."""

    def __init__(self, coordinator: Coordinator, model: Model) -> None:
        self._coordinator = coordinator
        self._model = model
        self._task: asyncio.Task[UpdateRecord] | None = None

    async def run(self, update: Update, version: int | None, transaction: Transaction) -> UpdateRecord:
        """Run a transaction. ``version``: of the new weights; ``None`` for the next one.

        Raises:
            InvalidRequest: the request is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """
        self._coordinator.begin(update, version)
        await self.stage(update, transaction)
        # From here on a caller that disconnects must not cancel the update half-way: it runs in a task of its own.
        self._task = asyncio.create_task(self._run_staged(update, transaction))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    async def stage(self, update: Update, transaction: Transaction) -> None:
        """Stage the weights of an update that has begun. If that fails, the update ends.

        Raises:
            InvalidRequest, UpdateError: nothing was changed.
        """
        try:
            await transaction.stage(update)
            if update.when_staged is not None:
                await update.when_staged()
        except BaseException as error:
            transaction.clean_up()
            self._coordinator.refuse(update, error)
            raise

    async def _run_staged(self, update: Update, transaction: Transaction) -> UpdateRecord:
        try:
            await self._coordinator.pause(update)
            try:
                await self._apply(update, transaction)
            except Exception as error:
                await self._coordinator.finish(update, error)
                raise
            transaction.commit()
            return await self._coordinator.finish(update)
        finally:
            transaction.clean_up()

    async def _apply(self, update: Update, transaction: Transaction) -> None:
        self._coordinator.mark_updating()
        try:
            await transaction.apply(update)
            await self._model.set_version(self._coordinator.target)
        except Exception as error:
            self._coordinator.mark_restoring()
            await self._roll_back(update, transaction, error)
            raise

    async def _roll_back(self, update: Update, transaction: Transaction, error: Exception) -> None:
        try:
            await transaction.roll_back(update)
        except Exception as second:
            lost = self._coordinator.mark_lost(
                f"an update failed ({error}), and restoring the old weights failed too ({second})"
            )
            try:
                await update.run_phase("stop", self._model.abort_requests)
            finally:  # also if aborting fails: the caller must learn that the weights are lost
                raise lost from error
