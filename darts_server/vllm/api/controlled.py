"""vLLM's control routes, through which trainers pause the engine and write its weights."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from anyio.to_thread import run_sync
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import UpdateFailed, UpdateUnsupported
from darts_server.serving.gate import Gate
from darts_server.vllm.api.lora import VllmLoras
from darts_server.vllm.api.routes import CHECK_FINITE, FINISH_UPDATE, checks_finite, is_abort_by_route, note_own_error
from darts_server.vllm.fleet.core import FleetCore
from darts_server.vllm.fleet.ranks import Ranks
from darts_server.vllm.requests.held import HeldRequests
from darts_server.weights.coordinator import KV_CACHE
from darts_server.weights.lora import check_adapter_numbers
from darts_server.weights.updates import Updates

T = TypeVar("T")


class ControlledLLM(AsyncLLM):
    """Coordinates vLLM's control calls with groups and with updates through our routes. Results and errors are vLLM's.

    ``updates`` and ``loras`` are set once, after construction; without ``updates`` every call is vLLM's own. With them
    calls raise `UpdateRunning`, `UpdateFailed` and `WeightsLost` too.
    """

    gate: Gate  # what every request passes. Set by `start_engine` before anything uses it
    updates: Updates | None = None
    loras: VllmLoras | None = None
    weight_version: int = 0
    written_by_trainer = False
    """Whether the weights are those that a trainer has written by vLLM's routes, and so in no file."""
    is_handling = False  # whether vLLM's task is at work on outputs that it has taken from its queue
    is_pause_wanted = False  # whether the engine is to be paused, see `pause_engine`

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.held = HeldRequests(self.engine_core, self.output_processor, self.logger_manager)
        """What the engine has generated, and keeps until it is wanted."""
        self._pauses = set[asyncio.Task[None]]()  # the event loop itself keeps weak references only

    @cached_property
    def ranks(self) -> Ranks:
        """Which data-parallel engine runs what."""
        return Ranks(self.vllm_config.parallel_config.data_parallel_size, self.engine_core)

    async def handle_received(self) -> None:
        """Wait until everything that engines have sent so far is handled, as by the count of a request's tokens.

        The answer to a call, such as a pause, comes at once, while outputs from before it wait for their turns.
        """
        queue: asyncio.Queue[Any] = self.engine_core.outputs_queue
        while self.is_handling or not queue.empty():
            if self.output_handler is None or self.output_handler.done():  # as after the engine's death
                return
            await asyncio.sleep(0)

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        """As vLLM's, but returns the answers of all data-parallel engines' workers, not of the first engine's alone."""
        core, call = self.engine_core, ("collective_rpc", method, timeout, args, kwargs)
        if isinstance(core, FleetCore):
            answers: list[Any] = await core.call_utility_async(*call)
            return answers
        calls = (core._call_utility_async(*call, engine=engine) for engine in core.core_engines)
        return [answer for answers in await asyncio.gather(*calls) for answer in answers]

    async def add_lora(self, lora_request: Any) -> bool:
        """As vLLM's, whose routes may not replace a pushed LoRA adapter: that is a `Conflict`.

        An adapter in a folder is refused if a tensor has NaN or infinity.
        """
        if self.loras is not None:
            self.loras.check_foreign_load(lora_request)
            await run_sync(check_adapter_numbers, Path(lora_request.lora_path))
        return await super().add_lora(lora_request)

    async def check_health(self) -> None:
        """As vLLM's; raises what the gate has failed with: nothing is served any more."""
        self.gate.check()
        await super().check_health()

    # --- pauses ------------------------------------------------------------------

    async def pause_engine(self, mode: Any, clear_cache: bool = True) -> None:
        """Pause the engine, whoever wants it; resume it again if it was resumed while it was being paused.

        In vLLM 0.31 a pause that waits for running requests takes effect when the engine is next idle, also after a
        resume (``EngineCoreProc.pause_scheduler`` leaves a callback). The engine would then be paused while the server
        takes it for resumed. The same holds for a pause whose caller gave up: it goes on here.
        """

        async def pause() -> None:
            try:
                await AsyncLLM.pause_generation(self, mode=mode, clear_cache=clear_cache)
                await self.handle_received()
            finally:
                if not self.is_pause_wanted:
                    await AsyncLLM.resume_generation(self)

        self.is_pause_wanted = True
        task = asyncio.create_task(pause())
        self._pauses.add(task)
        task.add_done_callback(self._pauses.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may have given up
        await asyncio.shield(task)

    async def resume_engine(self) -> None:
        """Resume the engine, whoever wants it."""
        self.is_pause_wanted = False
        await AsyncLLM.resume_generation(self)

    # --- control calls of trainers -------------------------------------------------

    async def _coordinate(self, vllms: Callable[[], Awaitable[T]], ours: Callable[[Updates], Awaitable[T]]) -> T:
        """Make a call of vLLM's as the coordinator of updates does, if there is one."""
        with note_own_error():
            return await (vllms() if self.updates is None else ours(self.updates))

    async def pause_generation(
        self, *, mode: Any = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """As vLLM's, but whole groups are waited for or aborted, and new requests wait until the engine resumes."""
        mode = "wait" if wait_for_inflight_requests else mode
        pause = partial(self.pause_engine, mode, clear_cache)
        await self._coordinate(pause, lambda updates: updates.coordinator.pause_by_trainer(mode, pause))

    async def resume_generation(self) -> None:
        """As vLLM's; during an update the engine resumes when that has ended. `Conflict`: it is asleep."""
        resume = self.resume_engine
        await self._coordinate(resume, lambda updates: updates.coordinator.resume_by_trainer(resume))

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """As vLLM's; all groups fail where ``/abort_requests`` aborts everything."""
        abort = partial(super().abort, request_id, internal=internal)
        if not is_abort_by_route():
            await abort()
            return
        # The route names internal ids if its caller named none.
        await self._coordinate(abort, lambda updates: updates.coordinator.abort_by_trainer(abort, everything=internal))

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """As vLLM's, but whole groups are waited for or aborted, and new requests wait until the engine is awake."""
        sleep, frees = partial(super().sleep, level, mode), level > 0
        await self._coordinate(
            sleep, lambda updates: updates.coordinator.sleep_by_trainer(mode, sleep, frees_memory=frees)
        )

    async def release_kv_cache_memory(self) -> None:
        free = super().release_kv_cache_memory
        await self._coordinate(free, lambda updates: updates.coordinator.free_by_trainer(KV_CACHE, free))

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        """As vLLM's, which since 0.32 returns whether the whole engine is awake."""
        wake_up: Callable[[], Awaitable[Any]] = partial(super().wake_up, tags)
        return await self._coordinate(wake_up, lambda updates: updates.coordinator.wake_up_by_trainer(wake_up, tags))

    async def scale_elastic_ep(self, *args: Any, **more: Any) -> None:
        """As vLLM's; it adds ranks to an engine, and several engines are not ranks of one."""
        with note_own_error():
            if isinstance(self.engine_core, FleetCore):
                raise UpdateUnsupported("the number of engines cannot be changed; restart with another --replicas")
            await super().scale_elastic_ep(*args, **more)

    async def start_weight_update(self) -> None:
        """As vLLM's, but the engine is paused by the server's rule, unless the trainer has paused it."""
        start = super().start_weight_update
        await self._coordinate(start, lambda updates: updates.external.start(start))

    async def start_draft_weight_update(self) -> None:
        """The same for a draft model."""
        start = super().start_draft_weight_update
        await self._coordinate(start, lambda updates: updates.external.start(start))

    async def update_weights(self, request: Any) -> None:
        """As vLLM's; a failure ends the update."""
        update = partial(super().update_weights, request)

        async def write() -> None:
            self.written_by_trainer = True
            await update()

        # The names of the tensors, where vLLM's transfer backend lists them beforehand.
        infos = request.update_info if isinstance(request.update_info, list) else [request.update_info]
        listed = infos[0].get("names") if infos and isinstance(infos[0], dict) else None
        names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        await self._coordinate(write, lambda updates: updates.external.write(write, names))

    async def write_weights(self, update_info: dict[str, Any]) -> None:
        """Call `update_weights` with what vLLM's route takes as ``update_info``."""
        await self.update_weights(SimpleNamespace(update_info=update_info))

    async def finish_weight_update(self, *args: Any, **more: Any) -> None:
        """As vLLM's; then groups continue."""
        finish = partial(super().finish_weight_update, *args, **more)

        async def finish_as(version: int) -> None:
            await finish()
            await self.collective_rpc("darts_complete_update")
            if checks_finite():
                await self._check_parameters()
            self.weight_version = version

        await self._coordinate(
            partial(finish_as, self.weight_version + 1), lambda updates: updates.external.finish(finish_as)
        )

    async def _check_parameters(self) -> None:
        """Raise `UpdateFailed` if the model has NaN or infinity: they came with the update that ends."""
        names = [name for name in await self.collective_rpc("darts_find_nonfinite") if name is not None]
        if names:
            raise UpdateFailed(
                f"the model's parameter {names[0]} has NaN or infinity; send finite numbers "
                f"(POST {FINISH_UPDATE}?{CHECK_FINITE}=false accepts others)"
            )
