"""Remembers which files the model's weights were loaded from, so that they can be restored."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import InvalidRequest, UpdateUnsupported
from darts_server.weights.port import Model, Update
from darts_server.weights.tensors import TensorSet, changed_files, names_by_file


@dataclass(slots=True)
class LoadedWeights:
    """The files that the model's weights were loaded from."""

    model: Model
    intact: bool = True
    """Whether all weights have the same version."""
    _tensors: TensorSet | None = None
    """None for the checkpoint that the engine was started with."""
    _are_in_files: bool = True
    """Whether the served weights are the weights in these files."""

    @property
    def files(self) -> set[Path]:
        """Files that must stay."""
        return {file.path for file in (self._tensors or {}).values()}

    @property
    def are_initial(self) -> bool:
        """Whether the weights were never updated."""
        return self._tensors is None and self._are_in_files

    def record(self, tensors: TensorSet | None) -> None:
        """Record the files that the model was loaded from, or None for weights that are in no file."""
        self._are_in_files = tensors is not None
        self.intact = True
        if tensors:
            self._tensors = tensors

    def record_mixture(self) -> None:
        self._are_in_files = False
        self.intact = False

    async def complete_partial(self, partial: TensorSet, field: str) -> TensorSet:
        """Return a full set: the partial set, and the served tensors that it lacks.

        Raises:
            InvalidRequest: about ``field``; the other tensors are in no file, or their file has changed.
        """
        # The engine can load a fused layer (q, k and v in one matrix) only as a whole, so it always gets a full set.
        remedy = "send a full set"
        if not self._are_in_files:
            raise InvalidRequest(field, f"is partial, and the other tensors came by vLLM's own routes; {remedy}")
        served = self._tensors or await self.model.checkpoint_tensors()
        changed = await run_sync(changed_files, served)
        if changed:
            raise InvalidRequest(
                field, f"is partial, and {changed[0]}, which has the others, has changed since; {remedy}"
            )
        return {**served, **partial}

    async def restore(self, update: Update) -> bool:
        """Load the weights into the model again. Return False, and touch nothing, if no unchanged files have them.

        Raises:
            UpdateFailed: loading failed half-way.
        """
        served: TensorSet = {}
        # The checkpoint of an unsupported model cannot be loaded again, as if its files were gone.
        with suppress(UpdateUnsupported):
            if self._are_in_files:
                served = self._tensors or await self.model.checkpoint_tensors()
        changed = await run_sync(changed_files, served)
        if changed or not served:
            return False
        await update.run_phase("restore", lambda: self.model.load(names_by_file(served)))
        return True
