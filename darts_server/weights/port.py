"""An update of the weights, its steps and what it does to running groups; and the interfaces of this room.

These are the served model, its LoRA adapters and the running groups.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from darts_server.exceptions import UpdateFailed
from darts_server.weights.lora_config import LoraLayers
from darts_server.weights.tensors import ExpectedTensors, FilePlan, TensorSet

T = TypeVar("T")

STEP_TIMEOUT = 300.0
WAIT_FACTOR = 2
"""Running groups may take so many times as long as another step of an update."""


class Rule(StrEnum):
    """What happens to running groups when the weights change."""

    FINISH = "finish"
    """Wait for them; new groups wait until the update has ended."""
    KEEP = "keep"
    """Pause them, and continue with the new weights. Their trajectories are marked as mixed."""
    RESTART = "restart"
    """Stop them, and restart them with the new weights. Groups that were partly returned already are waited for."""


RuleName = Literal["finish", "keep", "restart"]
"""The names of the rules, as callers write them."""


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """The default rule and the timeouts, in seconds.

    ``wait_timeout``: timeout of the wait for running groups. ``step_timeout``: timeout of any other phase of an update,
    and of the time between two calls of a trainer that updates the model through vLLM's routes.
    """

    rule: Rule = Rule.FINISH
    wait_timeout: float = WAIT_FACTOR * STEP_TIMEOUT
    step_timeout: float = STEP_TIMEOUT


@dataclass(slots=True, kw_only=True)
class Update:
    """A weight update in progress, whose steps are called in the order in which they are here.

    ``source``: how the weights arrive. ``rule``: ``None`` if the trainer paused the engine itself. ``lora``: name of
    the LoRA adapter that is updated; ``None`` for the model itself. ``when_staged``: awaited when the new weights have
    been checked; if it fails, the update is refused. ``version``: of the new weights. ``timeout``: seconds that each
    phase may take. Both are set when it begins. ``seconds``: duration of each phase so far.
    ``check_finite``: whether tensors with NaN or infinity are refused.
    """

    source: str
    rule: Rule | None
    partial: bool = False
    check_finite: bool = True
    lora: str | None = None
    when_staged: Callable[[], Awaitable[None]] | None = None
    version: int = 0
    timeout: float = STEP_TIMEOUT
    seconds: dict[str, float] = field(default_factory=dict)

    async def stage(self) -> None:
        """Fetch and check the new weights, while the engine serves the old ones. Errors: nothing was changed."""

    async def apply(self) -> None:
        """Load the staged weights into the paused engine. Errors: its weights are undefined."""

    async def roll_back(self) -> str:
        """Load the previous weights into the paused engine, after a failure. Returns what to add to its message."""
        raise NotImplementedError

    def commit(self) -> None:
        """Record the new weights as the ones that are served."""

    def clean_up(self) -> None:
        """Remove staged files that are no longer needed, whatever the outcome."""

    async def run_phase(self, phase: str, step: Callable[[], Awaitable[T]], timeout: float | None = None) -> T:
        """Await ``step`` within the timeout, and add its duration to the phase.

        Raises:
            UpdateFailed: it timed out.
        """
        timeout = self.timeout if timeout is None else timeout
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                return await step()
        except TimeoutError as error:
            wait = "groups still run; use the rule keep, or raise --weights-timeout, which is half of that"
            remedy = wait if phase == "wait" else "see --weights-timeout"
            raise UpdateFailed(f"{phase} took longer than {timeout:g} s; {remedy}") from error
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


class LoraEngine(Protocol):
    """Loads LoRA adapters into the engine, while no request uses them. Raises `UpdateFailed` where that fails."""

    async def layers(self) -> LoraLayers:
        """Layers of the model that LoRA adapters can change.

        Raises:
            UpdateUnsupported: LoRA adapters cannot be pushed to this server; the message says why.
        """

    def check_name(self, name: str) -> None:
        """Raise `InvalidRequest` if another model is served under this name."""

    async def load(self, name: str, folder: Path) -> None:
        """Serve the LoRA adapter in ``folder`` under ``name``, in place of the previous one. The engine may read the
        folder again at any time."""

    async def unload(self, name: str) -> None:
        """Stop serving a LoRA adapter. Harmless if it is not served."""


class Model(Protocol):
    """The model that an engine serves. Raises `UpdateFailed` where its weights may be undefined.

    ``loras``: ``None`` if the server was started without LoRA. ``weight_version``: the version that is served.
    """

    @property
    def loras(self) -> LoraEngine | None: ...

    @property
    def weight_version(self) -> int: ...

    async def expected_tensors(self) -> ExpectedTensors:
        """Names, shapes and dtypes of a full set of weights.

        Raises:
            UpdateUnsupported: the weights of this model cannot be replaced; the message says why.
        """

    async def checkpoint_tensors(self) -> TensorSet:
        """The checkpoint that the engine was started with. Raises as `expected_tensors`."""

    async def pause(self) -> None:
        """Pause all running requests, and clear every cache that was computed with the weights."""

    async def resume(self) -> None:
        """Resume after `pause`. Harmless if the engine is not paused."""

    async def abort_requests(self) -> None:
        """Abort all running requests: they would continue with undefined weights."""

    async def load(self, files: FilePlan) -> None:
        """Load a full set of weights into the paused engine, from the very files that were checked."""

    async def abandon_update(self) -> None:
        """End an update that was started by vLLM's own routes, if there is one. Each layer that has not received all of
        its tensors keeps its old ones."""

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


class NoGroups:
    """Those of an engine without groups."""

    async def suspend(self) -> None: ...

    def weights_change(self) -> None: ...

    def resume(self) -> None: ...

    def abort_all(self, reason: str) -> None: ...
