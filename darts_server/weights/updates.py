"""Updates of the served model's weights, one at a time: fetched and checked completely, then applied, or not at all."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path

from anyio.to_thread import run_sync

from darts_server.exceptions import Conflict, UpdateFailed, UpdateRunning
from darts_server.records import UpdateRecord
from darts_server.serving.gate import Gate
from darts_server.weights.coordinator import Coordinator, State
from darts_server.weights.export import WeightsExport, open_weights
from darts_server.weights.external import ExternalUpdates
from darts_server.weights.loaded import LoadedWeights
from darts_server.weights.lora import Loras
from darts_server.weights.port import Groups, Model, StagedFileChanged, UpdateObserver
from darts_server.weights.rules import Rule, Update, UpdateSettings
from darts_server.weights.staged import StagedUpdates
from darts_server.weights.staging import Staging
from darts_server.weights.tensors import (
    TensorSet,
    changed_files,
    check_tensors,
    names_by_file,
    read_tensors,
    resolve_path,
)


@dataclass(frozen=True, slots=True)
class UpdateOptions:
    """Options of a weight update.

    ``rule``: ``None`` for the server's. ``version``: ``None`` for the next one. ``when_staged``: see `Update`.
    ``stage_seconds``: the weights are staged for so long, and not served before they are switched; ``None`` to serve
    them at once.
    """

    rule: Rule | None = None
    version: int | None = None
    partial: bool = False
    when_staged: Callable[[], Awaitable[None]] | None = None
    stage_seconds: float | None = None


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
        observers: Sequence[UpdateObserver] = (),
        groups: Groups | None = None,
    ) -> None:
        self._model = model
        self._staging = staging
        self._root = root
        self._loaded = LoadedWeights(model)
        self.coordinator = Coordinator(model, gate, settings or UpdateSettings(), observers, groups)
        self.external = ExternalUpdates(self.coordinator, self._loaded, model)
        """Updates through vLLM's own routes."""
        self.staged = StagedUpdates(self.coordinator)
        """Updates in two steps."""
        self.loras = Loras(self.coordinator, self.staged, model.loras, staging, root)

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

    async def push(self, body: Callable[[int], AsyncIterator[bytes]], options: UpdateOptions) -> UpdateRecord | None:
        """Update from the bytes of a safetensors file. Returns ``None`` if they are only staged.

        ``body`` is called with the largest number of bytes that it may yield.

        Raises:
            InvalidRequest: the weights are bad; nothing was changed.
            UpdateError: the old version is served.
            WeightsLost
        """

        async def fetch() -> TensorSet:
            limit = (await self._model.expected_tensors()).max_bytes
            self.staged.drop_previous()  # there is room for two models
            path = await self._staging.write(body(limit))
            return await run_sync(read_tensors, path, "body")

        return await self._update("push", fetch, options, "body")

    async def load(self, path: str, options: UpdateOptions) -> UpdateRecord | None:
        """Update from a file or folder under the root. It must not change until other weights have replaced it.

        Returns ``None`` if the weights are only staged.

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

        return await self._update("disk", fetch, options, "path")

    async def export(self) -> WeightsExport:
        """Open the served weights for reading.

        Raises:
            UpdateRunning
            Conflict: they are in no file.
        """
        self._check_settled()
        version, tensors = self.version, await self._loaded.restorable()
        if tensors is None:
            raise Conflict(
                "weights", "are in no file, as they came by vLLM's own routes, or it has changed; push a full set"
            )
        export = await run_sync(open_weights, tensors, version)
        try:
            self._check_settled(version)
        except UpdateRunning:
            export.close()
            raise
        return export

    def _check_settled(self, version: int | None = None) -> None:
        """Check that no update changes the weights. ``version``: that it had none to change them to meanwhile."""
        if self.state not in (State.SERVING, State.STAGING) or version not in (None, self.version):
            raise UpdateRunning("the weights are being updated; try again when that has ended")

    async def _update(
        self, source: str, fetch: Callable[[], Awaitable[TensorSet]], options: UpdateOptions, field: str
    ) -> UpdateRecord | None:
        timeout = self.coordinator.settings.step_timeout
        rule, staged = options.rule or self.rule, options.when_staged
        update = Update(source, rule, options.partial, timeout=timeout, when_staged=staged)
        transaction = _WeightUpdate(self._model, self._loaded, self._staging, self.staged, fetch, field)
        if options.stage_seconds is not None:
            await self.staged.stage(update, options.version, transaction, options.stage_seconds)
            return None
        return await self.coordinator.run(update, options.version, transaction)


@dataclass(slots=True)
class _WeightUpdate:
    """Implements :class:`darts_server.weights.port.StageableTransaction`: replaces the model's weights."""

    _model: Model
    _loaded: LoadedWeights
    _staging: Staging
    _staged: StagedUpdates
    _fetch: Callable[[], Awaitable[TensorSet]]
    _field: str
    _tensors: TensorSet = dataclass_field(default_factory=dict)

    @property
    def files(self) -> set[Path]:
        return {file.path for file in self._tensors.values()}

    async def stage(self, update: Update) -> None:
        given = await update.run_phase("transfer", self._fetch)

        async def check() -> TensorSet:
            expected = await self._model.expected_tensors()
            tensors = await run_sync(lambda: check_tensors(expected, given, partial=update.partial, field=self._field))
            is_full = tensors.keys() == expected.tensors.keys()
            return tensors if is_full else await self._loaded.complete(tensors, self._field)

        self._tensors = await update.run_phase("check", check)

    async def check_again(self) -> None:
        if changed := await run_sync(changed_files, self._tensors):
            raise StagedFileChanged("id", f"{changed[0]} has changed since it was staged")

    async def reversal(self) -> "_WeightUpdate":
        if (old := await self._loaded.restorable()) is None:
            raise Conflict(
                "keep_previous", "is not possible: the served weights are in no file, or it has changed; leave it out"
            )
        return replace(self, _tensors=old)

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
            self._staging.keep_only(self._loaded.files | self._staged.files)

    def discard(self) -> None:
        with suppress(OSError):
            self._staging.remove(self.files - self._loaded.files)
