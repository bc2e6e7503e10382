"""Updates of a running engine's weights, one at a time: fetched and checked whole, then applied, or not at all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.engine.gate import Gate
from darts_server.exceptions import InvalidRequest, UpdateFailed
from darts_server.types import UpdateRecord
from darts_server.weights.coordinator import Coordinator, Limits, Rule, Update
from darts_server.weights.elsewhere import Elsewhere
from darts_server.weights.held import Held
from darts_server.weights.port import Groups, Model, UpdateObserver
from darts_server.weights.pull import Hosts, pulled
from darts_server.weights.roots import allowed
from darts_server.weights.staging import Staging
from darts_server.weights.states import State
from darts_server.weights.tensors import TensorSet, by_file, changed, check, read


@dataclass(frozen=True, slots=True)
class Wish:
    """How an update is to be made; ``None`` leaves it to the server: its rule, the next version."""

    rule: Rule | None = None
    version: int | None = None
    partial: bool = False


class Updates:
    """Gives the model new weights.

    Args:
        gate: what all work for the engine passes.
        root: folder that callers may name files in; ``None`` for none.
        observers: hear of every update.
        groups: those that run; ``None`` for an engine without.
        hosts: where weights may be pulled from; ``None`` for none.
    """

    def __init__(
        self,
        model: Model,
        gate: Gate,
        staging: Staging,
        root: Path | None = None,
        limits: Limits | None = None,
        observers: Sequence[UpdateObserver] = (),
        groups: Groups | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._model = model
        self._staging = staging
        self._root = root
        self._hosts = hosts or Hosts()
        self._held = Held(model)
        self._task: asyncio.Task[UpdateRecord] | None = None
        self.coordinator = Coordinator(model, gate, limits or Limits(), observers, groups)
        self.elsewhere = Elsewhere(self.coordinator, self._held, model)
        """Updates that do not come this way."""

    @property
    def state(self) -> State:
        return self.coordinator.state

    @property
    def version(self) -> int:
        return self.coordinator.version

    @property
    def intact(self) -> bool:
        """Whether all that the model holds is of that version."""
        return self._held.intact

    @property
    def rule(self) -> Rule:
        """Where a caller names none."""
        return self.coordinator.limits.rule

    @property
    def last(self) -> UpdateRecord | None:
        return self.coordinator.last

    @property
    def last_error(self) -> str | None:
        return self.coordinator.last_error

    async def push(self, body: Callable[[int], AsyncIterator[bytes]], wish: Wish) -> UpdateRecord:
        """Weights as the bytes of a safetensors file. ``body`` is told how many may come.

        Raises:
            InvalidRequest: the set is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """
        return await self._streamed("push", body, wish, "body")

    async def load(self, path: str, wish: Wish) -> UpdateRecord:
        """Weights from a file or folder under the root, which must not change until others replace them.

        Raises:
            Forbidden: there is no root.
            InvalidRequest: the path or the set is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """

        async def fetch() -> TensorSet:
            await self._model.expected()
            return await run_sync(lambda: read(allowed(self._root, path), "path"))

        return await self._update("disk", fetch, wish, "path")

    async def pull(self, url: str, wish: Wish) -> UpdateRecord:
        """Weights as a safetensors file that a host which the operator allowed serves.

        Raises:
            Forbidden: there is no such host.
            InvalidRequest: the URL or the set is bad, or could not be had whole; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """
        self._hosts.check(url)
        return await self._streamed("http", lambda limit: pulled(self._hosts, url, limit), wish, "url")

    async def _streamed(
        self, source: str, body: Callable[[int], AsyncIterator[bytes]], wish: Wish, field: str
    ) -> UpdateRecord:
        async def fetch() -> TensorSet:
            most = (await self._model.expected()).most_bytes
            path = await self._staging.write(body(most))
            return await run_sync(read, path, field)

        return await self._update(source, fetch, wish, field)

    # --- one update ---------------------------------------------------------

    async def _update(
        self, source: str, fetch: Callable[[], Awaitable[TensorSet]], wish: Wish, field: str
    ) -> UpdateRecord:
        version = self._wanted(wish)
        update = Update(source, wish.rule or self.rule, wish.partial)
        self.coordinator.begin(update, version)
        try:
            tensors = await self._staged(update, fetch, field)
        except BaseException as error:
            self._tidy()
            self.coordinator.refuse(update, error)
            raise
        # A caller that goes away now leaves an update that comes to its end.
        self._task = asyncio.create_task(self._applied(update, tensors))
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._task)

    def _wanted(self, wish: Wish) -> int:
        if wish.version == self.version:
            raise InvalidRequest("version", f"is {wish.version}, which is served already; give the new weights another")
        return self.version + 1 if wish.version is None else wish.version

    async def _staged(self, update: Update, fetch: Callable[[], Awaitable[TensorSet]], field: str) -> TensorSet:
        """All that the model will hold, if the new tensors fit."""
        given = await self.coordinator.step(update, "transfer", fetch)

        async def checked() -> TensorSet:
            expected = await self._model.expected()
            taken = await run_sync(lambda: check(expected, given, partial=update.partial, field=field))
            if taken.keys() == expected.tensors.keys():
                return taken
            return {**await self._held.rest(field), **taken}

        return await self.coordinator.step(update, "check", checked)

    async def _applied(self, update: Update, tensors: TensorSet) -> UpdateRecord:
        try:
            await self.coordinator.stop(update)
            try:
                await self._written(update, tensors)
            except Exception as error:
                await self.coordinator.go_on(update, error)
                raise
            self._held.became(tensors)
            return await self.coordinator.go_on(update)
        finally:
            self._tidy()

    async def _written(self, update: Update, tensors: TensorSet) -> None:
        self.coordinator.writes()
        try:
            await self.coordinator.step(update, "load", lambda: self._model.load(by_file(tensors)))
            if gone := await run_sync(changed, tensors):
                raise UpdateFailed(f"{gone[0]} changed while it was loaded; write weights under a name of their own")
            await self._model.became(self.coordinator.target)
        except Exception as error:
            self.coordinator.fails()
            await self._restored(update, error)
            raise

    async def _restored(self, update: Update, error: Exception) -> None:
        """Give the model what it had before."""
        try:
            await self._held.put_back(self.coordinator, update)
        except Exception as second:
            lost = self.coordinator.lose(
                f"an update failed ({error}), and so did putting back the old weights ({second})"
            )
            try:
                await self.coordinator.step(update, "stop", self._model.stop)
            finally:  # whether it stops or not
                raise lost from error

    def _tidy(self) -> None:
        with suppress(OSError):
            self._staging.keep_only(self._held.files)
