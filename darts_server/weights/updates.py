"""Updates of a running engine's weights, one at a time: fetched and checked whole, then applied, or not at all."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import UpdateFailed
from darts_server.serving.gate import Gate
from darts_server.types import UpdateRecord
from darts_server.weights.change import Changes
from darts_server.weights.coordinator import Coordinator, Rule, Update, UpdateSettings
from darts_server.weights.external import ExternalUpdates
from darts_server.weights.loaded import LoadedWeights
from darts_server.weights.lora import Loras
from darts_server.weights.port import Groups, Model, UpdateObserver
from darts_server.weights.pull import AllowedHosts, pulled
from darts_server.weights.roots import allowed
from darts_server.weights.staging import Staging
from darts_server.weights.states import State
from darts_server.weights.tensors import TensorSet, by_file, changed, check, read


@dataclass(frozen=True, slots=True)
class UpdateOptions:
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
        limits: UpdateSettings | None = None,
        observers: Sequence[UpdateObserver] = (),
        groups: Groups | None = None,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self._model = model
        self._staging = staging
        self._root = root
        self._hosts = hosts or AllowedHosts()
        self._held = LoadedWeights(model)
        self.coordinator = Coordinator(model, gate, limits or UpdateSettings(), observers, groups)
        self.external = ExternalUpdates(self.coordinator, self._held, model)
        """Updates that do not come this way."""
        self._changes = Changes(self.coordinator, model)
        self.loras = Loras(self.coordinator, self._changes, model.loras, staging, root)
        """Of the model that is served."""

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

    async def push(self, body: Callable[[int], AsyncIterator[bytes]], wish: UpdateOptions) -> UpdateRecord:
        """Weights as the bytes of a safetensors file. ``body`` is told how many may come.

        Raises:
            InvalidRequest: the set is bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """
        return await self._streamed("push", body, wish, "body")

    async def load(self, path: str, wish: UpdateOptions) -> UpdateRecord:
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

    async def pull(self, url: str, wish: UpdateOptions) -> UpdateRecord:
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
        self, source: str, body: Callable[[int], AsyncIterator[bytes]], wish: UpdateOptions, field: str
    ) -> UpdateRecord:
        async def fetch() -> TensorSet:
            most = (await self._model.expected()).most_bytes
            path = await self._staging.write(body(most))
            return await run_sync(read, path, field)

        return await self._update(source, fetch, wish, field)

    # --- one update ---------------------------------------------------------

    async def _update(
        self, source: str, fetch: Callable[[], Awaitable[TensorSet]], wish: UpdateOptions, field: str
    ) -> UpdateRecord:
        update = Update(source, wish.rule or self.rule, wish.partial)
        change = _Set(self._model, self._held, self._staging, self.coordinator, fetch, field)
        return await self._changes.make(update, wish.version, change)


@dataclass(slots=True)
class _Set:
    """Implements :class:`darts_server.weights.change.Change`: all that the model will hold, once it is staged."""

    _model: Model
    _held: LoadedWeights
    _staging: Staging
    _coordinator: Coordinator
    _fetch: Callable[[], Awaitable[TensorSet]]
    _field: str
    _tensors: TensorSet = dataclass_field(default_factory=dict)

    async def stage(self, update: Update) -> None:
        given = await self._coordinator.step(update, "transfer", self._fetch)

        async def checked() -> TensorSet:
            expected = await self._model.expected()
            taken = await run_sync(lambda: check(expected, given, partial=update.partial, field=self._field))
            if taken.keys() == expected.tensors.keys():
                return taken
            return {**await self._held.rest(self._field), **taken}

        self._tensors = await self._coordinator.step(update, "check", checked)

    async def write(self, update: Update) -> None:
        await self._coordinator.step(update, "load", lambda: self._model.load(by_file(self._tensors)))
        if gone := await run_sync(changed, self._tensors):
            raise UpdateFailed(f"{gone[0]} changed while it was loaded; write weights under a name of their own")

    async def put_back(self, update: Update) -> None:
        await self._held.put_back(self._coordinator, update)

    def took(self) -> None:
        self._held.became(self._tensors)

    def tidy(self) -> None:
        with suppress(OSError):
            self._staging.keep_only(self._held.files)
