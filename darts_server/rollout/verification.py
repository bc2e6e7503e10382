import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from darts_server.verify.types import NO_VERDICT, Verdict

logger = logging.getLogger(__name__)

Verify = Callable[[Any], Awaitable[Verdict]]
"""Verifies an engine's output."""


class Verification:
    """Verifies the finished candidates of a group, each in a task of its own.

    Args:
        verify: None to verify nothing.
        on_verdict: called with the index and the reward, after the verdict is in `verdicts`.
    """

    def __init__(self, group_id: str, verify: Verify | None, on_verdict: Callable[[int, float | None], None]) -> None:
        self.verdicts: dict[int, Verdict] = {}
        """Verdicts by candidate index."""
        self._group_id = group_id
        self._verify = verify
        self._on_verdict = on_verdict
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def start(self, index: int, output: asyncio.Future[Any], *, has_new_output: bool = False) -> None:
        """Verify a candidate when it has its output, once, or again for a new output."""
        earlier_task = self._tasks.get(index)
        if self._verify is None or (earlier_task is not None and not has_new_output):
            return
        if earlier_task is not None:
            earlier_task.cancel()
            self.verdicts.pop(index, None)
        self._tasks[index] = asyncio.create_task(self._run(self._verify, index, output))

    def cancel(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def restart(self) -> None:
        self.cancel()
        self.verdicts.clear()

    async def finish(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _run(self, verify: Verify, index: int, output: asyncio.Future[Any]) -> None:
        try:
            # Without the shield, `cancel` would cancel the future that the candidate's task still sets.
            verdict = await verify(await asyncio.shield(output))
        except Exception as error:
            logger.warning("candidate %d of group %s was not verified: %r", index, self._group_id, error)
            verdict = NO_VERDICT
        self.verdicts[index] = verdict
        self._on_verdict(index, verdict.reward)
