"""Pause and resume vLLM's engine, so that a resume holds."""

import asyncio
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM


class EnginePause:
    """Resume the engine again if it was resumed while it was being paused.

    In vLLM 0.31 a pause that waits for running requests takes effect when the engine is next idle, also after a resume
    (``EngineCoreProc.pause_scheduler`` leaves a callback). The engine would then be paused while the server takes it
    for resumed. The same holds for a pause whose caller gave up: it goes on here.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._is_wanted = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def pause(self, mode: Any, clear_cache: bool = True) -> None:
        """Pause the engine. ``mode`` and ``clear_cache``: as for `AsyncLLM.pause_generation`."""
        self._is_wanted = True
        task = asyncio.get_running_loop().create_task(self._pause(mode, clear_cache))
        self._tasks.add(task)  # the event loop itself keeps weak references only
        task.add_done_callback(self._forget)
        await asyncio.shield(task)

    async def resume(self) -> None:
        """Resume the engine."""
        self._is_wanted = False
        await AsyncLLM.resume_generation(self._llm)

    async def _pause(self, mode: Any, clear_cache: bool) -> None:
        try:
            await AsyncLLM.pause_generation(self._llm, mode=mode, clear_cache=clear_cache)
        finally:
            if not self._is_wanted:
                await AsyncLLM.resume_generation(self._llm)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have given up
