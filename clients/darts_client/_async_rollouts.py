"""A batch of rollouts as an iterator. It reconnects after a lost connection, and cancels a batch that is left early."""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext, suppress
from typing import Any, Generic, Self, TypeVar

from ._async_transport import AsyncTransport
from ._errors import DartsError
from ._io import async_shield, async_sleep
from ._models import Event, Group, Unfinished, Usage
from ._progress import ProgressBar
from ._requests import TimeLimit
from ._stream import BatchReader

# Seconds. The server answers a cancellation at once.
CANCEL_TIMEOUT = 5.0

ItemT = TypeVar("ItemT")


class AsyncRollouts(Generic[ItemT]):
    """An iterator over a batch. If you leave it early, the end of `async with` cancels the batch."""

    def __init__(
        self,
        transport: AsyncTransport,
        batch: BatchReader,
        select_item: Callable[[Event], ItemT | None],
        bar: ProgressBar | None,
    ) -> None:
        self._transport = transport
        self._batch = batch
        self._select_item = select_item
        self._bar = bar
        self._items = self._read_items()

    @property
    def id(self) -> str | None:
        """Name of the batch, or None before the first event."""
        return self._batch.id

    @property
    def policy(self) -> str | None:
        """Policy of the batch, or None before the first event."""
        return self._batch.policy

    @property
    def sampling(self) -> Mapping[str, Any] | None:
        """Sampling parameters in force, or None before the first event."""
        return self._batch.sampling

    @property
    def usage(self) -> Usage | None:
        """Tokens and seconds of the batch, or None before its end."""
        return self._batch.usage

    @property
    def unfinished(self) -> Sequence[Unfinished]:
        """Prompts without a group, because others were complete first or because they were aborted."""
        return self._batch.unfinished

    @property
    def carried(self) -> int | None:
        """Number of prompts that the server keeps for later batches of this API key, or None before the end."""
        return self._batch.carried

    @property
    def shortfall(self) -> int | None:
        """Number of groups that are missing to `num_groups`, or None before the end."""
        return self._batch.shortfall

    @property
    def uninformative(self) -> Sequence[int]:
        """Numbers of the prompts whose groups did not count under `only`."""
        return self._batch.uninformative

    @property
    def failed(self) -> Sequence[Group]:
        """Groups that failed, each with its `error` and no trajectories."""
        return tuple(self._batch.failed)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        while True:
            item = await anext(self._items)
            # Only `start` waits for None.
            if item is not None:
                return item

    async def start(self) -> Self:
        """Start the batch before its first item is read, and return once the server has begun with it."""
        await anext(self._items)
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the batch if it still runs."""
        await self._items.aclose()

    async def _read_items(self) -> AsyncGenerator[ItemT | None]:
        try:
            with self._bar or nullcontext():
                async with aclosing(self._read_events()) as events:
                    async for event in events:
                        # None signals that the batch has begun.
                        if event is None:
                            yield None
                            continue
                        if self._bar is not None:
                            self._bar.update(event)
                        item = self._select_item(event)
                        if item is not None:
                            yield item
        finally:
            await self._cancel()

    async def _read_events(self) -> AsyncGenerator[Event | None]:
        while not self._batch.is_over:
            method, path, options = self._batch.next_request()
            try:
                async with self._transport.stream_events(method, path, self._batch.limit, **options) as events:
                    async for sse in events:
                        # The first event only brings the id of the batch: its None signals that the batch has begun.
                        is_first = self._batch.id is None
                        event = self._batch.read(sse)
                        if event is not None or is_first:
                            yield event
                        if self._batch.is_over:
                            return
                raise self._batch.connection_lost()
            except DartsError as exc:
                delay = self._batch.delay_after(exc)
            await async_sleep(delay)

    async def _cancel(self) -> None:
        # The caller may be cancelled, which must not stop this request. If it fails, the server cancels the batch a
        # minute after the connection was lost.
        with suppress(DartsError), async_shield(CANCEL_TIMEOUT):
            if self._batch.needs_id_to_cancel:
                await self._read_id()
            if self._batch.cancel_path is not None:
                await self._transport.send("DELETE", self._batch.cancel_path, timeout=CANCEL_TIMEOUT)

    async def _read_id(self) -> None:
        # The idempotency key of the repeated request finds the batch that the first request started.
        method, path, options = self._batch.next_request()
        async with self._transport.stream_events(method, path, TimeLimit(CANCEL_TIMEOUT), **options) as events:
            async for sse in events:
                self._batch.read(sse)
                if not self._batch.needs_id_to_cancel:
                    return
