"""vLLM's control routes, by which trainers pause the engine and write its weights: what goes with them here."""

from functools import partial
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.serving.gate import Gate
from darts_server.vllm.lora import VllmLoras
from darts_server.weights.updates import Updates


class ControlledLLM(AsyncLLM):
    """Answers and errors are vLLM's own. ``updates`` and ``loras`` are set once, after construction."""

    gate: Gate
    """What every request passes. Set once, right after construction."""
    updates: Updates | None = None
    loras: VllmLoras | None = None
    weight_version: int = 0
    asleep: bool = False
    """Whether it was sent to sleep and not woken."""

    async def add_request(self, *args: Any, **more: Any) -> Any:
        """As vLLM's; with the adapter as it is now.

        Raises:
            NotFound: the adapter was removed while the request waited.
        """
        if self.loras is not None and more.get("lora_request") is not None:
            more["lora_request"] = self.loras.current(more["lora_request"])
        return await super().add_request(*args, **more)

    async def add_lora(self, lora_request: Any) -> bool:
        """As vLLM's, whose routes may not change an adapter that was pushed.

        Raises:
            Conflict
        """
        if self.loras is not None:
            self.loras.check_foreign(lora_request)
        return await super().add_lora(lora_request)

    async def pause_generation(
        self, *, mode: Any = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """As vLLM's; but groups are waited for or aborted as wholes, and others wait before they begin.

        Raises:
            UpdateRunning, UpdateFailed
        """
        mode = "wait" if wait_for_inflight_requests else mode
        pause = partial(super().pause_generation, mode=mode, clear_cache=clear_cache)
        await (pause() if self.updates is None else self.updates.coordinator.hold(mode, pause))

    async def resume_generation(self) -> None:
        """As vLLM's; during an update, the engine goes on when that has ended."""
        resume = super().resume_generation
        await (resume() if self.updates is None else self.updates.coordinator.release(resume))

    async def sleep(self, *args: Any, **more: Any) -> None:
        """As vLLM's."""
        await super().sleep(*args, **more)
        self.asleep = True

    async def wake_up(self, *args: Any, **more: Any) -> None:
        """As vLLM's."""
        await super().wake_up(*args, **more)
        self.asleep = False

    async def start_weight_update(self) -> None:
        """As vLLM's; but the engine is paused by the server's rule, unless the trainer has paused it.

        Raises:
            UpdateRunning, UpdateFailed, WeightsLost
        """
        start = super().start_weight_update
        await (start() if self.updates is None else self.updates.external.start(start))

    async def start_draft_weight_update(self) -> None:
        """The same for a draft model."""
        start = super().start_draft_weight_update
        await (start() if self.updates is None else self.updates.external.start(start))

    async def update_weights(self, request: Any) -> None:
        """As vLLM's; what fails ends the update."""
        write = partial(super().update_weights, request)
        await (write() if self.updates is None else self.updates.external.write(write, _names(request)))

    async def finish_weight_update(self, *args: Any, **more: Any) -> None:
        """As vLLM's; and then groups go on."""
        finish = partial(super().finish_weight_update, *args, **more)

        async def finished(version: int) -> None:
            await finish()
            await self.collective_rpc("darts_pack_heads")
            self.weight_version = version

        await (finished(self.weight_version + 1) if self.updates is None else self.updates.external.finish(finished))


def _names(request: Any) -> list[str]:
    """Of the tensors that come, as far as vLLM's backends tell them beforehand."""
    infos = request.update_info if isinstance(request.update_info, list) else [request.update_info]
    names = infos[0].get("names") if infos and isinstance(infos[0], dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
