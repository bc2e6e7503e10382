"""What this room needs of a model that is served, and who hears of its updates."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from darts_server.types import UpdateRecord
from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.tensors import ExpectedTensors, TensorSet


class LoraEngine(Protocol):
    """What of a model low-rank adapters change, and those that it has."""

    async def layers(self) -> LoraLayers:
        """
        Raises:
            UpdateUnsupported: adapters cannot be pushed here; the message says why.
        """
        ...

    def check_name(self, name: str) -> None:
        """
        Raises:
            InvalidRequest: another model is served under it.
        """
        ...

    async def put(self, name: str, folder: Path) -> None:
        """Serve the adapter in this folder under ``name``, in place of the one that was. Called while the model is
        paused. The folder is read again whenever the engine likes.

        Raises:
            UpdateFailed
        """
        ...

    async def remove(self, name: str) -> None:
        """Serve it no more. Called while nothing uses it. Harmless if it is not served.

        Raises:
            UpdateFailed
        """
        ...


class Model(Protocol):
    """A model in an engine."""

    @property
    def loras(self) -> LoraEngine | None:
        """``None``: it was started without adapters."""
        ...

    @property
    def weight_version(self) -> int:
        """The version that it serves."""
        ...

    async def expected(self) -> ExpectedTensors:
        """What a full set of its weights has.

        Raises:
            UpdateUnsupported: its weights cannot be replaced here; the message says why.
        """
        ...

    async def original(self) -> TensorSet:
        """Where it was loaded from when the engine started.

        Raises:
            UpdateUnsupported
        """
        ...

    async def pause(self) -> None:
        """Freeze everything that runs, and forget every cache that the weights have made."""
        ...

    async def resume(self) -> None:
        """Go on. Harmless if nothing was paused."""
        ...

    async def stop(self) -> None:
        """End everything that runs: it would go on with weights that nobody knows."""
        ...

    async def load(self, files: Mapping[Path, Sequence[str]]) -> None:
        """Give it all tensors of a full set, by file. Called while it is paused.

        Raises:
            UpdateFailed: the model may hold anything.
        """
        ...

    async def abandon(self) -> None:
        """End the update that vLLM's own routes have begun. Each layer that has not got all of its tensors keeps its
        old ones. Harmless if there is none.

        Raises:
            UpdateFailed: the model may hold anything.
        """
        ...

    async def clear(self) -> None:
        """Forget what the caches hold of old weights, but for what stands still and needs it."""
        ...

    async def became(self, version: int) -> None:
        """From now on it serves this version."""
        ...


class Groups(Protocol):
    """The groups that run."""

    async def suspend(self) -> None:
        """Stop every group that can be restarted, and return when the others have ended."""
        ...

    def resume(self) -> None:
        """Restart the groups that `suspend` stopped. Harmless if there are none."""
        ...

    def abort_all(self, reason: str) -> None:
        """Abort every group, with an error for its caller."""
        ...


class UpdateObserver(Protocol):
    """Told synchronously, in the event loop: return fast and never raise."""

    def update_announced(self, version: int) -> None:
        """The engine will be paused, to serve ``version`` afterwards."""
        ...

    def update_ended(self, record: UpdateRecord) -> None:
        """An update ended, whichever way. Said once per update."""
        ...
