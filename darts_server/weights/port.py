"""A weight update with its steps, and the interfaces of this room: the model, its LoRA adapters, and running groups."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, TypedDict, TypeVar

from darts_server.exceptions import UpdateFailed
from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.tensors import ExpectedTensors, FilePlan, TensorSet

T = TypeVar("T")

STEP_TIMEOUT = 300.0
WAIT_FACTOR = 2
"""Timeout of the wait for running groups, in timeouts of another phase."""


class Rule(StrEnum):
    FINISH = "finish"
    """Wait for running groups. New groups wait until the update ends."""
    KEEP = "keep"
    """Pause running groups, and continue with the new weights. Their trajectories are marked as mixed."""
    RESTART = "restart"
    """Stop running groups, and restart them with the new weights. Wait for groups that were partly returned."""


RuleName = Literal["finish", "keep", "restart"]


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    rule: Rule = Rule.FINISH
    wait_timeout: float = WAIT_FACTOR * STEP_TIMEOUT
    """For running groups."""
    step_timeout: float = STEP_TIMEOUT
    """For any other phase, and between two calls of a trainer that updates the model through vLLM's routes."""


class LoraOptions(TypedDict, total=False):
    rule: Rule | None
    check_finite: bool
    when_staged: Callable[[], Awaitable[None]]


class WeightOptions(LoraOptions, total=False):
    partial: bool
    repeat_version: bool


@dataclass(slots=True, kw_only=True)
class Update:
    """A weight update in progress. Its steps are called in the order of the methods."""

    source: str
    rule: Rule | None = None
    """None for the server's rule; later also None if the trainer paused the engine itself."""
    partial: bool = False
    check_finite: bool = True
    repeat_version: bool = False
    lora: str | None = None
    """Name of the LoRA adapter that is updated, or None for the model."""
    when_staged: Callable[[], Awaitable[None]] | None = None
    """Awaited when the new weights were checked. A failure refuses the update."""
    version: int = 0
    timeout: float = STEP_TIMEOUT
    """Maximum seconds of each phase."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of each phase."""

    async def stage(self) -> None:
        """Fetch and check the new weights while the old weights are served. A failure changes nothing."""

    async def apply(self) -> None:
        """Load the staged weights into the paused engine. A failure leaves its weights undefined."""

    async def roll_back(self) -> str:
        """Load the previous weights into the paused engine after a failure. Return an addition to its message."""
        raise NotImplementedError

    def commit(self) -> None:
        """Record that the new weights are served."""

    def clean_up(self) -> None:
        """Remove staged files that are no longer needed. Called after every update."""

    async def run_phase(self, phase: str, step: Callable[[], Awaitable[T]], timeout: float | None = None) -> T:
        """Await ``step`` within the timeout, by default `timeout`, and add its duration to ``seconds``.

        Raises:
            UpdateFailed: the step timed out.
        """
        if timeout is None:
            timeout = self.timeout
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                return await step()
        except TimeoutError as error:
            remedy = "see --weights-timeout"
            if phase == "wait":
                # `WAIT_FACTOR` is 2.
                remedy = "groups still run; use the rule keep, or raise --weights-timeout, which is half of that"
            raise UpdateFailed(f"{phase} took longer than {timeout:g} s; {remedy}") from error
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


class LoraEngine(Protocol):
    """Loads LoRA adapters into the engine while no request uses them. Raises `UpdateFailed` if that fails."""

    async def layers(self) -> LoraLayers:
        """Return the layers of the model that LoRA adapters can change.

        Raises:
            UpdateUnsupported: LoRA adapters cannot be pushed to this server.
        """

    def check_name(self, name: str) -> None:
        """Raise `InvalidRequest` if another model is served under this name."""

    async def load(self, name: str, folder: Path) -> None:
        """Serve the LoRA adapter in ``folder`` as ``name``. The engine may read the folder again at any time."""

    async def unload(self, name: str) -> None:
        """Stop serving a LoRA adapter. Does nothing if it is not served."""


class Model(Protocol):
    """The model that an engine serves. Methods raise `UpdateFailed` if its weights may be undefined."""

    @property
    def loras(self) -> LoraEngine | None:
        """None if the server was started without LoRA."""

    @property
    def weight_version(self) -> int: ...

    async def expected_tensors(self) -> ExpectedTensors:
        """Return names, shapes and dtypes of a full set of weights.

        Raises:
            UpdateUnsupported: the weights of this model cannot be replaced.
        """

    async def checkpoint_tensors(self) -> TensorSet:
        """Return the checkpoint that the engine was started with. Raises as `expected_tensors`."""

    async def pause(self) -> None:
        """Pause all requests, and clear the caches that were computed with the weights."""

    async def resume(self) -> None:
        """Resume all requests. Does nothing if the engine is not paused."""

    async def abort_requests(self) -> None:
        """Abort all running requests, which would continue with undefined weights."""

    async def load(self, files: FilePlan) -> None:
        """Load a full set of weights into the paused engine."""

    async def abandon_update(self) -> None:
        """End an update through vLLM's own routes, if there is one. Incomplete layers keep their old tensors."""

    async def clear_caches(self) -> None:
        """Clear cached results of old weights that no paused request needs."""

    async def set_version(self, version: int) -> None:
        """Set `weight_version`, here and in the engine."""


class Groups(Protocol):
    async def suspend(self) -> None:
        """Stop every group that can be restarted, and return when all others have ended."""

    def prepare_weight_change(self) -> None:
        """Record that the present weights sampled all tokens since the last update. The model is paused."""

    def resume(self) -> None:
        """Restart the groups that `suspend` stopped, if there are any."""

    def abort_all(self, reason: str) -> None:
        """Abort every group, with an error for its caller."""


class NoGroups:
    async def suspend(self) -> None: ...

    def prepare_weight_change(self) -> None: ...

    def resume(self) -> None: ...

    def abort_all(self, reason: str) -> None: ...
