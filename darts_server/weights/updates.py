"""Updates of the served model's weights, one at a time: fetched and checked completely, then applied, or not at all."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import UpdateFailed
from darts_server.observers import UpdateEvents
from darts_server.records import UpdateRecord
from darts_server.serving.gate import Gate
from darts_server.weights.coordinator import Coordinator, State
from darts_server.weights.external import ExternalUpdates
from darts_server.weights.loaded import LoadedWeights
from darts_server.weights.lora import Loras
from darts_server.weights.port import Groups, Model, Rule, Update, UpdateSettings
from darts_server.weights.staging import Staging
from darts_server.weights.tensors import (
    TensorSet,
    changed_files,
    check_tensors,
    names_by_file,
    read_tensors,
    resolve_path,
)


class Updates:
    """Updates the model's weights.

    Args:
        gate: admits all work to the engine.
        root: folder that callers may name paths in; ``None`` to allow none.
        observers: notified of every update.
        groups: the running groups; ``None`` for an engine without groups.
    """

    def __init__(
        self,
        model: Model,
        gate: Gate,
        staging: Staging,
        root: Path | None = None,
        settings: UpdateSettings | None = None,
        observers: UpdateEvents | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._model = model
        self._staging = staging
        self._root = root
        self._loaded = LoadedWeights(model)
        self.coordinator = Coordinator(model, gate, settings or UpdateSettings(), observers, groups)
        self.external = ExternalUpdates(self.coordinator, self._loaded, model)
        """Updates through vLLM's own routes."""
        self.loras = Loras(self.coordinator, model.loras, staging, root)

    @property
    def state(self) -> State:
        return self.coordinator.state

    @property
    def version(self) -> int:
        return self.coordinator.version

    @property
    def intact(self) -> bool:
        """Whether all of the model's weights are of that version."""
        return self._loaded.intact

    @property
    def are_initial(self) -> bool:
        """Whether the weights are those that the server was started with."""
        return self._loaded.are_initial

    @property
    def rule(self) -> Rule:
        """Rule of updates that name none."""
        return self.coordinator.settings.rule

    @property
    def last(self) -> UpdateRecord | None:
        return self.coordinator.last

    @property
    def last_error(self) -> str | None:
        return self.coordinator.last_error

    async def push(
        self,
        body: Callable[[int], AsyncIterator[bytes]],
        rule: Rule | None = None,
        version: int | None = None,
        partial: bool = False,
    ) -> UpdateRecord:
        """Update from the bytes of a safetensors file.

        ``body`` is called with the largest number of bytes that it may yield. ``rule``: ``None`` for the server's.
        ``version``: ``None`` for the next one.

        Raises:
            InvalidRequest: the weights are bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """

        async def fetch() -> TensorSet:
            limit = (await self._model.expected_tensors()).max_bytes
            path = await self._staging.write(body(limit))
            return await run_sync(read_tensors, path, "body")

        return await self._update(Update("push", rule or self.rule, partial), version, fetch, "body")

    async def load(
        self,
        path: str,
        rule: Rule | None = None,
        version: int | None = None,
        partial: bool = False,
        when_staged: Callable[[], Awaitable[None]] | None = None,
    ) -> UpdateRecord:
        """Update from a file or folder under the root. It must not change until other weights have replaced it.

        ``rule``, ``version``: as for `push`. ``when_staged``: see `Update`.

        Raises:
            Forbidden: there is no root.
            InvalidRequest: the path or the weights are bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """

        async def fetch() -> TensorSet:
            await self._model.expected_tensors()  # raises where the model is not supported
            resolved, root = await run_sync(resolve_path, self._root, path)
            return await run_sync(read_tensors, resolved, "path", root)

        update = Update("disk", rule or self.rule, partial, when_staged=when_staged)
        return await self._update(update, version, fetch, "path")

    async def _update(
        self, update: Update, version: int | None, fetch: Callable[[], Awaitable[TensorSet]], field: str
    ) -> UpdateRecord:
        transaction = _WeightUpdate(self._model, self._loaded, self._staging, fetch, field)
        return await self.coordinator.run(update, version, transaction)


@dataclass(slots=True)
class _WeightUpdate:
    """Implements :class:`darts_server.weights.port.Transaction`: replaces the model's weights."""

    _model: Model
    _loaded: LoadedWeights
    _staging: Staging
    _fetch: Callable[[], Awaitable[TensorSet]]
    _field: str
    _tensors: TensorSet = dataclass_field(default_factory=dict)

    async def stage(self, update: Update) -> None:
        given = await update.run_phase("transfer", self._fetch)

        async def check() -> TensorSet:
            expected = await self._model.expected_tensors()
            tensors = await run_sync(lambda: check_tensors(expected, given, partial=update.partial, field=self._field))
            is_full = tensors.keys() == expected.tensors.keys()
            return tensors if is_full else await self._loaded.complete(tensors, self._field)

        self._tensors = await update.run_phase("check", check)

    async def apply(self, update: Update) -> None:
        await update.run_phase("load", lambda: self._model.load(names_by_file(self._tensors)))
        if changed := await run_sync(changed_files, self._tensors):
            raise UpdateFailed(f"{changed[0]} changed while it was loaded; write weights under a name of their own")

    async def roll_back(self, update: Update) -> None:
        await self._loaded.restore(update)

    def commit(self) -> None:
        self._loaded.record(self._tensors)

    def clean_up(self) -> None:
        with suppress(OSError):
            self._staging.keep_only(self._loaded.files)
