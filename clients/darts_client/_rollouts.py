"""A batch as an iterator, blocking and not: connects, reads, connects again, and stops what its caller leaves."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, closing, suppress
from typing import Generic, Self, TypeVar

import anyio

from ._batch import Batch
from ._connection import AsyncConnection, Connection
from ._errors import DartsError
from ._events import Event, GroupEvent
from ._models import Group, Unfinished, Usage
from ._progress import Bar, NoBar
from ._time_limit import TimeLimit

# The server answers this at once. One that does not notices by itself, a minute later, that nobody listens.
LEAVE_SECONDS = 5.0

ItemT = TypeVar("ItemT")


class _Told(Generic[ItemT]):
    """What a batch has told so far: all of it once the iteration has ended by itself."""

    def __init__(self, batch: Batch, pick: Callable[[Event], ItemT | None], bar: Bar | NoBar) -> None:
        self._batch = batch
        self._pick = pick
        self._bar = bar

    @property
    def id(self) -> str | None:
        """The server's name for the batch; None before the first event."""
        return self._batch.id

    @property
    def policy(self) -> str | None:
        """The policy that shapes it; None before the first event."""
        return self._batch.policy

    @property
    def usage(self) -> Usage | None:
        """Tokens and seconds; None before the end."""
        return self._batch.usage

    @property
    def unfinished(self) -> Sequence[Unfinished]:
        """Prompts that were not needed, for there were `num_groups` groups without them."""
        return self._batch.unfinished

    @property
    def failed(self) -> Sequence[Group]:
        """Groups that could not be made, each with its `error` and no trajectories."""
        return tuple(self._batch.failed)


class AsyncRollouts(_Told[ItemT]):
    """An asynchronous iterator over a batch. To leave it, as a context manager or by cancellation, stops the batch."""

    def __init__(
        self, connection: AsyncConnection, batch: Batch, pick: Callable[[Event], ItemT | None], bar: Bar | NoBar
    ) -> None:
        super().__init__(batch, pick, bar)
        self._connection = connection
        self._items = self._read()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ItemT:
        return await anext(self._items)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop the batch if it still runs."""
        await self._items.aclose()

    async def _read(self) -> AsyncGenerator[ItemT, None]:
        try:
            with self._bar:
                async with aclosing(self._events()) as events:
                    async for event in events:
                        self._bar.see(event)
                        if (item := self._pick(event)) is not None:
                            yield item
        finally:
            await self._leave()

    async def _events(self) -> AsyncGenerator[Event, None]:
        while not self._batch.over:
            method, path, options = self._batch.connect()
            try:
                async with self._connection.events(method, path, self._batch.limit, **options) as source:
                    async for sse in source:
                        if (event := self._batch.take(sse)) is not None:
                            yield event
                        if self._batch.over:
                            return
                raise self._batch.lost()
            except DartsError as exc:
                delay = self._batch.delay_after(exc)
            await asyncio.sleep(delay)

    async def _leave(self) -> None:
        with suppress(DartsError), anyio.move_on_after(LEAVE_SECONDS, shield=True):
            if self._batch.unnamed:
                await self._learn_id()
            if (call := self._batch.leave()) is not None:
                await self._connection.send(call.method, call.path)

    async def _learn_id(self) -> None:
        method, path, options = self._batch.connect()
        async with self._connection.events(method, path, TimeLimit(LEAVE_SECONDS), **options) as source:
            async for sse in source:
                self._batch.take(sse)
                if not self._batch.unnamed:
                    return


class Rollouts(_Told[ItemT]):
    """An iterator over a batch. To leave it, as a context manager or for good, stops the batch."""

    def __init__(
        self, connection: Connection, batch: Batch, pick: Callable[[Event], ItemT | None], bar: Bar | NoBar
    ) -> None:
        super().__init__(batch, pick, bar)
        self._connection = connection
        self._items = self._read()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ItemT:
        return next(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the batch if it still runs."""
        self._items.close()

    def _read(self) -> Generator[ItemT, None, None]:
        try:
            with self._bar, closing(self._events()) as events:
                for event in events:
                    self._bar.see(event)
                    if (item := self._pick(event)) is not None:
                        yield item
        finally:
            self._leave()

    def _events(self) -> Generator[Event, None, None]:
        while not self._batch.over:
            method, path, options = self._batch.connect()
            try:
                with self._connection.events(method, path, self._batch.limit, **options) as source:
                    for sse in source:
                        if (event := self._batch.take(sse)) is not None:
                            yield event
                        if self._batch.over:
                            return
                raise self._batch.lost()
            except DartsError as exc:
                delay = self._batch.delay_after(exc)
            time.sleep(delay)

    def _leave(self) -> None:
        with suppress(DartsError):
            if self._batch.unnamed:
                self._learn_id()
            if (call := self._batch.leave()) is not None:
                self._connection.send(call.method, call.path, timeout=LEAVE_SECONDS)

    def _learn_id(self) -> None:
        method, path, options = self._batch.connect()
        with self._connection.events(method, path, TimeLimit(LEAVE_SECONDS), **options) as source:
            for sse in source:
                self._batch.take(sse)
                if not self._batch.unnamed:
                    return


def whole_group(event: Event) -> Group | None:
    """The group that an event completes, if it does."""
    return event.group if isinstance(event, GroupEvent) and event.group.error is None else None


def any_event(event: Event) -> Event | None:
    """The event itself."""
    return event
