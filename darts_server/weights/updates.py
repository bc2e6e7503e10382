"""Updates of the served model's weights, one at a time: checked completely before the model changes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Unpack

from anyio.to_thread import run_sync

from darts_server.exceptions import UpdateFailed
from darts_server.observers import UpdateEvents
from darts_server.records import UpdateRecord
from darts_server.serving.gate import Gate
from darts_server.weights.coordinator import Coordinator
from darts_server.weights.external import ExternalUpdates
from darts_server.weights.loaded import LoadedWeights
from darts_server.weights.lora import Loras
from darts_server.weights.port import Groups, Model, NoGroups, Update, UpdateSettings, WeightOptions
from darts_server.weights.staging import Staging
from darts_server.weights.tensors import (
    TensorSet,
    changed_files,
    check_numbers,
    check_tensors,
    names_by_file,
    read_tensors,
    resolve_path,
)


class Updates:
    """Updates the model's weights.

    Args:
        root: folder that callers may name paths in.
        groups: by default, the engine has no groups.
    """

    def __init__(
        self,
        model: Model,
        gate: Gate,
        staging: Staging,
        root: Path | None,
        settings: UpdateSettings | None = None,
        observers: UpdateEvents | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.model = model
        self.staging = staging
        self._root = root
        self.loaded = LoadedWeights(model)
        self.coordinator = Coordinator(
            model,
            gate,
            settings or UpdateSettings(),
            observers or UpdateEvents(),
            groups or NoGroups(),
        )
        self.external = ExternalUpdates(self.coordinator, self.loaded, model)
        self.loras = Loras(self.coordinator, model.loras, staging, root)

    async def push(
        self,
        body: Callable[[int], AsyncIterator[bytes]],
        *,
        version: int | None = None,
        **options: Unpack[WeightOptions],
    ) -> UpdateRecord:
        """Update from the bytes of a safetensors file. Raises as `Coordinator.run`.

        ``body``: called with the largest number of bytes that it may yield. ``version``: None for the next version.
        """

        async def fetch() -> TensorSet:
            limit = (await self.model.expected_tensors()).max_bytes
            path = await self.staging.write(body(limit))
            return await run_sync(read_tensors, path, "body")

        update = _WeightUpdate(
            source="push",
            owner=self,
            fetch=fetch,
            field="body",
            **options,
        )
        return await self.coordinator.run(update, version)

    async def load(
        self,
        path: str,
        *,
        version: int | None = None,
        **options: Unpack[WeightOptions],
    ) -> UpdateRecord:
        """Update from a file or folder under the root. It must not change while its weights are served.

        Raises as `push`, and `Forbidden` without a root.
        """

        async def fetch() -> TensorSet:
            # Raises if the model is not supported.
            await self.model.expected_tensors()
            resolved, root = await run_sync(resolve_path, self._root, path)
            return await run_sync(read_tensors, resolved, "path", root)

        update = _WeightUpdate(
            source="disk",
            owner=self,
            fetch=fetch,
            field="path",
            **options,
        )
        return await self.coordinator.run(update, version)


@dataclass(slots=True, kw_only=True)
class _WeightUpdate(Update):
    owner: Updates
    fetch: Callable[[], Awaitable[TensorSet]]
    """Returns the tensors that ``field`` of the request has or names."""
    field: str
    tensors: TensorSet = dataclass_field(default_factory=dict)

    async def stage(self) -> None:
        given = await self.run_phase("transfer", self.fetch)

        async def check() -> TensorSet:
            expected = await self.owner.model.expected_tensors()
            tensors = await run_sync(
                lambda: check_tensors(
                    expected,
                    given,
                    partial=self.partial,
                    field=self.field,
                )
            )
            if self.check_finite:
                await run_sync(check_numbers, tensors, self.field)
            if tensors.keys() != expected.tensors.keys():
                return await self.owner.loaded.complete_partial(tensors, self.field)
            return tensors

        self.tensors = await self.run_phase("check", check)

    async def apply(self) -> None:
        await self.run_phase("load", lambda: self.owner.model.load(names_by_file(self.tensors)))
        changed = await run_sync(changed_files, self.tensors)
        if changed:
            raise UpdateFailed(f"{changed[0]} changed while it was loaded; write weights under a name of their own")

    async def roll_back(self) -> str:
        if not await self.owner.loaded.restore(self):
            raise UpdateFailed("the files with the old weights are gone or have changed")
        return ""

    def commit(self) -> None:
        self.owner.loaded.record(self.tensors)

    def clean_up(self) -> None:
        # The next update tries again to remove a file.
        with suppress(OSError):
            self.owner.staging.remove_all_except(self.owner.loaded.files)
