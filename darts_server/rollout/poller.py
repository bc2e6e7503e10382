"""One timer that polls the token counts of all groups."""

import asyncio
from typing import Protocol


class Pollable(Protocol):
    def poll(self) -> None:
        """Read the progress of what runs and act on it. Never raises."""
        ...


class ProgressPoller:
    """Poll every registered group each ``interval`` seconds; run no timer while there is none."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._groups: set[Pollable] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, group: Pollable) -> None:
        self._groups.add(group)
        if self._task is None:
            self._task = asyncio.create_task(self._poll(), name="darts-poller")

    def remove(self, group: Pollable) -> None:
        self._groups.discard(group)

    async def _poll(self) -> None:
        while self._groups:
            await asyncio.sleep(self._interval)
            for group in list(self._groups):
                group.poll()
        self._task = None
