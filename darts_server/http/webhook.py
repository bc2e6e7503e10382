"""Send the events of sessions to a URL, for harnesses that cannot wait for them."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import httpx

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000
"""Further events are dropped, and harnesses see stops in their answers."""
SENDERS = 8
TRIES = 3
PAUSE_SECONDS = 1.0
TIMEOUT_SECONDS = 10.0

Message = dict[str, str | None]


class Webhook:
    """Posts each event as JSON, in the background, up to `TRIES` times. ``transport``: for tests."""

    def __init__(self, url: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.dropped = 0
        """Events that the receiver did not get."""
        self._url = url
        self._transport = transport
        self._waiting: asyncio.Queue[Message] = asyncio.Queue(MAX_WAITING)

    def send(
        self,
        group_id: str,
        session_id: str | None,
        kind: str,
        reason: str | None,
    ) -> None:
        # The arguments are those of `GroupEvents.session_event`.
        try:
            self._waiting.put_nowait({"group_id": group_id, "session": session_id, "type": kind, "reason": reason})
        except asyncio.QueueFull:
            self._count_dropped("too many events wait for it")

    @asynccontextmanager
    async def run_senders(self) -> AsyncIterator[Self]:
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, transport=self._transport) as client:
            senders = [asyncio.create_task(self._send_waiting(client)) for _ in range(SENDERS)]
            try:
                yield self
            finally:
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)

    async def _send_waiting(self, client: httpx.AsyncClient) -> None:
        while True:
            message = await self._waiting.get()
            for earlier_tries in range(TRIES):
                await asyncio.sleep(PAUSE_SECONDS * earlier_tries)
                try:
                    answer = await client.post(self._url, json=message)
                    # A receiver that refuses the event would refuse it again.
                    if not answer.is_server_error:
                        break
                    problem = f"status {answer.status_code}"
                except httpx.HTTPError as error:
                    problem = repr(error)
            else:
                self._count_dropped(problem)

    def _count_dropped(self, problem: str) -> None:
        self.dropped += 1
        # Only the first event is logged, because a receiver that is down would fill the log.
        if self.dropped == 1:
            logger.warning(
                "--session-webhook %s did not get an event: %s; further ones are not logged", self._url, problem
            )
