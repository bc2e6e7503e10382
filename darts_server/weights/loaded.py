"""Where what a model holds came from, so that it can be put back."""

from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import InvalidRequest, UpdateFailed
from darts_server.weights.coordinator import Coordinator, Update
from darts_server.weights.port import Model
from darts_server.weights.tensors import TensorSet, by_file, changed


class LoadedWeights:
    """``tensors``: the files of all that the model holds; ``None``: those that the engine was started with."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tensors: TensorSet | None = None
        self._known = True
        self.intact = True
        """Whether all that the model holds is of one version."""

    @property
    def files(self) -> set[Path]:
        """Paths that must stay."""
        return {file.path for file in (self._tensors or {}).values()}

    def became(self, tensors: TensorSet | None) -> None:
        """It holds these now; ``None``: what no file has."""
        self._known, self.intact = tensors is not None, True
        self._tensors = tensors or self._tensors

    def spoiled(self) -> None:
        """It holds a part of other weights."""
        self._known = self.intact = False

    async def rest(self, field: str) -> TensorSet:
        """What a partial set is completed by. A layer of the engine takes all of its tensors or none.

        Raises:
            InvalidRequest: of ``field``; nobody has it.
        """
        remedy = "send a full set"
        if not self._known:
            raise InvalidRequest(field, f"is partial, and the other tensors came by vLLM's own routes; {remedy}")
        held = await self._all()
        if gone := await run_sync(changed, held):
            raise InvalidRequest(field, f"is partial, and {gone[0]}, which has the others, has changed since; {remedy}")
        return held

    async def put_back(self, coordinator: Coordinator, update: Update) -> None:
        """Give the model what it had before.

        Raises:
            UpdateFailed: it cannot be had, and the model was not touched, or it failed half-way.
        """
        held = await self.whole()
        if held is None:
            raise UpdateFailed("the files with the old weights are gone or have changed")
        await coordinator.step(update, "restore", lambda: self._model.load(by_file(held)))

    async def whole(self) -> TensorSet | None:
        """All that the model held, if it can still be had.

        Raises:
            UpdateUnsupported
        """
        if not self._known:
            return None
        held = await self._all()
        return None if await run_sync(changed, held) else held

    async def _all(self) -> TensorSet:
        return self._tensors or await self._model.original()
