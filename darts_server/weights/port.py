"""Interfaces of this room: the served model, its LoRA adapters, the running groups; and transactions."""

from pathlib import Path
from typing import Protocol

from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.rules import Update
from darts_server.weights.tensors import ExpectedTensors, FilePlan, TensorSet


class Transaction(Protocol):
    """The steps of one update, in the order of their calls. `roll_back` is called only after a failure."""

    async def stage(self, update: Update) -> None:
        """Fetch and check the new weights, while the engine serves the old ones.

        Raises:
            InvalidRequest, UpdateError: nothing was changed.
        """

    async def apply(self, update: Update) -> None:
        """Load the staged weights into the paused engine.

        Raises:
            UpdateFailed: the engine's weights are undefined.
        """

    async def roll_back(self, update: Update) -> None:
        """Load the previous weights into the paused engine.

        Raises:
            UpdateFailed
        """

    def commit(self) -> None:
        """Record the new weights as the ones that are served."""

    def clean_up(self) -> None:
        """Remove staged files that are no longer needed, whatever the outcome."""


class LoraEngine(Protocol):
    """Loads LoRA adapters into the engine."""

    async def layers(self) -> LoraLayers:
        """Layers of the model that LoRA adapters can change.

        Raises:
            UpdateUnsupported: LoRA adapters cannot be pushed to this server; the message says why.
        """

    def check_name(self, name: str) -> None:
        """Check that a LoRA adapter may be served under this name.

        Raises:
            InvalidRequest: another model is served under it.
        """

    async def load(self, name: str, folder: Path) -> None:
        """Serve the LoRA adapter in ``folder`` under ``name``, in place of the previous one. Called while the model is
        paused. The engine may read the folder again at any time.

        Raises:
            UpdateFailed
        """

    async def unload(self, name: str) -> None:
        """Stop serving a LoRA adapter. Called while no request uses it. Harmless if it is not served.

        Raises:
            UpdateFailed
        """


class Model(Protocol):
    """The model that an engine serves."""

    @property
    def loras(self) -> LoraEngine | None:
        """``None`` if the server was started without LoRA."""

    @property
    def weight_version(self) -> int:
        """The version that is served."""

    async def expected_tensors(self) -> ExpectedTensors:
        """Names, shapes and dtypes of a full set of weights.

        Raises:
            UpdateUnsupported: the weights of this model cannot be replaced; the message says why.
        """

    async def checkpoint_tensors(self) -> TensorSet:
        """The checkpoint that the engine was started with.

        Raises:
            UpdateUnsupported
        """

    async def pause(self) -> None:
        """Pause all running requests, and clear every cache that was computed with the weights."""

    async def resume(self) -> None:
        """Resume after `pause`. Harmless if the engine is not paused."""

    async def abort_requests(self) -> None:
        """Abort all running requests: they would continue with undefined weights."""

    async def load(self, files: FilePlan) -> None:
        """Load a full set of weights, from the very files that were checked. Called while the engine is paused.

        Raises:
            UpdateFailed: the model's weights are undefined.
        """

    async def abandon_update(self) -> None:
        """End an update that was started by vLLM's own routes. Each layer that has not received all of its tensors
        keeps its old ones. Harmless if there is no such update.

        Raises:
            UpdateFailed: the model's weights are undefined.
        """

    async def clear_caches(self) -> None:
        """Clear cached results of old weights, except those that paused requests still need."""

    async def set_version(self, version: int) -> None:
        """Set the version that is served."""


class Groups(Protocol):
    """The running groups."""

    async def suspend(self) -> None:
        """Stop every group that can be restarted, and return when the others have ended."""

    def weights_change(self) -> None:
        """Record which tokens the present weights have sampled. Called while the model is paused."""

    def resume(self) -> None:
        """Restart the groups that `suspend` stopped. Harmless if there are none."""

    def abort_all(self, reason: str) -> None:
        """Abort every group, with an error for its caller."""
