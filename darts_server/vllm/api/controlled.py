"""vLLM's control calls: trainers pause the engine and write its weights."""

import asyncio
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anyio.to_thread import run_sync
from vllm.v1.engine.async_llm import AsyncLLM

from darts_server.exceptions import UpdateFailed, UpdateUnsupported
from darts_server.serving.gate import Gate
from darts_server.vllm.api.lora import VllmLoras
from darts_server.vllm.api.routes import (
    CHECK_FINITE,
    FINISH_UPDATE,
    checks_finite,
    record_darts_error,
    take_route_abort,
)
from darts_server.vllm.compat import queue_while_paused
from darts_server.vllm.fleet.core import FleetCore
from darts_server.vllm.fleet.ranks import Ranks
from darts_server.vllm.requests.adding import share_processed_inputs
from darts_server.vllm.requests.held import HeldRequests
from darts_server.vllm.requests.receiver import receive_directly
from darts_server.weights.coordinator import KV_CACHE, Coordinator
from darts_server.weights.external import ExternalUpdates
from darts_server.weights.lora import check_adapter_numbers
from darts_server.weights.updates import Updates


class ControlledLLM(AsyncLLM):
    """Coordinates vLLM's control calls with groups, and with updates through our own routes.

    Results and errors are vLLM's. Calls also raise `UpdateRunning`, `UpdateFailed` and `WeightsLost`.
    """

    gate: Gate
    """Set by `start_engine`."""
    updates: Updates | None = None
    loras: VllmLoras | None = None
    weight_version: int = 0
    written_by_trainer = False
    """Whether a trainer has written the weights through vLLM's routes, so that no file has them."""
    is_processing_outputs = False
    """Whether vLLM's task has taken outputs from its queue, and has not processed them."""
    is_pause_wanted = False
    is_drafting = True
    """Whether the engines of ``--speculate auto`` draft tokens."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        queue_while_paused(self.engine_core)
        receive_directly(self.engine_core)
        share_processed_inputs(self.input_processor)
        self.held_requests = HeldRequests(self.engine_core, self.output_processor, self.logger_manager)
        # The event loop keeps only weak references to tasks.
        self._pause_tasks = set[asyncio.Task[None]]()

    @cached_property
    def ranks(self) -> Ranks:
        return Ranks(self.vllm_config.parallel_config.data_parallel_size, self.engine_core)

    async def wait_for_received_outputs(self) -> None:
        # The answer to a call, such as a pause, arrives while earlier outputs still wait in vLLM's queue.
        queue: asyncio.Queue[Any] = self.engine_core.outputs_queue
        while self.is_processing_outputs or not queue.empty():
            # The engine is dead, so no task empties the queue.
            if self.output_handler is None or self.output_handler.done():
                return
            await asyncio.sleep(0)

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
    ) -> list[Any]:
        # vLLM returns only the answers of the first engine's workers.
        answers_by_engine = await self._call_engines("collective_rpc", method, timeout, args, kwargs)
        return [answer for worker_answers in answers_by_engine for answer in worker_answers]

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return all(await self._call_engines("reset_prefix_cache", reset_running_requests, reset_connector))

    async def _call_engines(self, method: str, *args: Any) -> list[Any]:
        core = self.engine_core
        if isinstance(core, FleetCore):
            # A fleet joins the answers of its engines.
            return [await core.call_utility_async(method, *args)]
        calls = (core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines)
        return await asyncio.gather(*calls)

    async def set_drafting(self, is_on: bool) -> None:
        # Engines that start later read the attribute. A drafter that is off still learns.
        self.is_drafting = is_on
        await self.collective_rpc("darts_speculate", args=(is_on,))

    async def add_lora(self, lora_request: Any) -> bool:
        # Pushed adapters call vLLM's method, so this load comes from vLLM's flag or route.
        if self.loras is not None:
            self.loras.check_not_pushed(lora_request)
            await run_sync(check_adapter_numbers, Path(lora_request.lora_path))
        return await super().add_lora(lora_request)

    async def check_health(self) -> None:
        # After `ShapingLLM.fail` the server takes no requests, although the engine may be alive.
        self.gate.raise_failure()
        await super().check_health()

    # --- pauses ------------------------------------------------------------------

    async def pause_engine(self, mode: Any, clear_cache: bool = True) -> None:
        """Pause the engine. If it is resumed meanwhile, the pause is undone as soon as it takes effect."""

        # In vLLM 0.31 a pause that waits for running requests takes effect when the engine is next idle, even after a
        # resume (``EngineCoreProc.pause_scheduler`` leaves a callback). So this task must outlive its caller.
        async def pause() -> None:
            try:
                await AsyncLLM.pause_generation(self, mode=mode, clear_cache=clear_cache)
                await self.wait_for_received_outputs()
            finally:
                if not self.is_pause_wanted:
                    await AsyncLLM.resume_generation(self)

        self.is_pause_wanted = True
        task = asyncio.create_task(pause())
        self._pause_tasks.add(task)
        task.add_done_callback(self._pause_tasks.discard)
        # If the caller has given up, no other task reads the exception, and asyncio would log it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def resume_engine(self) -> None:
        # Pending pauses undo themselves.
        self.is_pause_wanted = False
        await AsyncLLM.resume_generation(self)

    # --- control calls of trainers -------------------------------------------------

    @property
    def _coordinator(self) -> Coordinator:
        assert self.updates is not None
        return self.updates.coordinator

    @property
    def _external(self) -> ExternalUpdates:
        assert self.updates is not None
        return self.updates.external

    async def pause_generation(
        self,
        *,
        mode: Any = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Wait for whole groups or abort them, and pause. New requests wait for the resume."""
        # vLLM's older parameter for the mode.
        if wait_for_inflight_requests:
            mode = "wait"
        pause = partial(self.pause_engine, mode, clear_cache)
        with record_darts_error():
            await self._coordinator.pause_by_trainer(mode, pause)

    async def resume_generation(self) -> None:
        """Resume the engine, now or after an update. `Conflict`: the engine is asleep."""
        with record_darts_error():
            await self._coordinator.resume_by_trainer(self.resume_engine)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort requests, and all groups if ``/abort_requests`` names no requests."""
        abort = partial(super().abort, request_id, internal=internal)
        # vLLM also calls this itself, for example when a caller disconnects.
        if not take_route_abort():
            await abort()
            return
        # The route passes internal ids only if its caller named no requests.
        with record_darts_error():
            await self._coordinator.abort_by_trainer(abort, everything=internal)

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        """Wait for whole groups or abort them, and sleep. New requests wait for the wake-up."""
        sleep = partial(super().sleep, level, mode)
        with record_darts_error():
            await self._coordinator.sleep_by_trainer(mode, sleep, frees_memory=level > 0)

    async def release_kv_cache_memory(self) -> None:
        with record_darts_error():
            await self._coordinator.free_by_trainer(KV_CACHE, super().release_kv_cache_memory)

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        """Wake up the parts in ``tags``, or all. Since vLLM 0.32 the result is whether all are awake."""
        wake_up = partial(super().wake_up, tags)
        with record_darts_error():
            return await self._coordinator.wake_up_by_trainer(wake_up, tags)

    async def scale_elastic_ep(self, *args: Any, **more: Any) -> None:
        # The engines of --replicas are not ranks of one engine.
        with record_darts_error():
            if isinstance(self.engine_core, FleetCore):
                raise UpdateUnsupported("the number of engines cannot be changed; restart with another --replicas")
            await super().scale_elastic_ep(*args, **more)

    async def start_weight_update(self) -> None:
        """Pause the engine, unless the trainer has paused it, and start an update."""
        with record_darts_error():
            await self._external.start(super().start_weight_update)

    async def start_draft_weight_update(self) -> None:
        with record_darts_error():
            await self._external.start(super().start_draft_weight_update)

    async def update_weights(self, request: Any) -> None:
        update = partial(super().update_weights, request)

        async def write() -> None:
            # Before the update, which may fail halfway.
            self.written_by_trainer = True
            await update()

        # Some of vLLM's transfer backends list the names of the tensors, for each worker or once for all.
        info = request.update_info
        if isinstance(info, list):
            info = next(iter(info), None)
        names: list[str] = []
        if isinstance(info, dict) and isinstance(info.get("names"), list):
            names = [name for name in info["names"] if isinstance(name, str)]
        with record_darts_error():
            await self._external.write(write, names)

    async def write_weights(self, update_info: dict[str, Any]) -> None:
        """Call `update_weights` with the ``update_info`` of a request to vLLM's route."""
        await self.update_weights(SimpleNamespace(update_info=update_info))

    async def finish_weight_update(self, *args: Any, **more: Any) -> None:
        """Finish the update, and resume the engine unless the trainer has paused it."""
        finish = partial(super().finish_weight_update, *args, **more)

        async def finish_with_version(version: int) -> None:
            await finish()
            # Both are methods of our worker extension, and return a result for each worker.
            await self.collective_rpc("darts_complete_update")
            if checks_finite.get():
                found = await self.collective_rpc("darts_find_nonfinite")
                nonfinite = [name for name in found if name is not None]
                if nonfinite:
                    raise UpdateFailed(
                        f"the model's parameter {nonfinite[0]} has NaN or infinity; send finite numbers "
                        f"(POST {FINISH_UPDATE}?{CHECK_FINITE}=false accepts others)"
                    )
            self.weight_version = version

        with record_darts_error():
            await self._external.finish(finish_with_version)
