"""What the server knows, as `client.groups`, `client.prompts`, `client.policy` and `client.state`."""

import asyncio
from os import PathLike
from pathlib import Path
from typing import Any

from . import _calls
from ._connection import AsyncConnection, Connection
from ._files import write_whole
from ._knowledge import GroupRecord, PromptRecord


class AsyncGroupsApi:
    """What became of groups."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def get(self, group_id: str) -> list[GroupRecord]:
        """One group; or all groups of a batch or of a response, by its id. NotFound if none is kept any more."""
        return await self._connection.answer(_calls.group(group_id))


class AsyncPromptsApi:
    """What is known of prompts."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def get(self, key: str) -> PromptRecord:
        """A prompt by its key, which is told with its groups. NotFound if nothing is known of it."""
        return await self._connection.answer(_calls.prompt(key))


class AsyncPolicyApi:
    """The settings that shape groups."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def get(self) -> dict[str, Any]:
        """Every setting that can change while the server runs, and `policies`: the names that a request may give."""
        return await self._connection.answer(_calls.policy())

    async def change(self, **settings: Any) -> dict[str, Any]:
        """Change some settings, all or none, for groups to come; then as `get`. None unsets an optional one."""
        return await self._connection.answer(_calls.change_policy(settings))


class AsyncStateApi:
    """Everything that the server has learned, as one file."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def save(self, path: str | PathLike[str]) -> None:
        """Write the file; whatever happens, `path` is the old file or the whole new one."""
        data = await self._connection.answer(_calls.save_state())
        await asyncio.to_thread(write_whole, Path(path), data)

    async def load(self, path: str | PathLike[str]) -> int:
        """Replace all that the server knows by a saved file, or nothing. Returns how many prompts it knows then."""
        data = await asyncio.to_thread(Path(path).read_bytes)
        return await self._connection.answer(_calls.load_state(data))


class GroupsApi:
    """What became of groups."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, group_id: str) -> list[GroupRecord]:
        """See `AsyncGroupsApi.get`."""
        return self._connection.answer(_calls.group(group_id))


class PromptsApi:
    """What is known of prompts."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self, key: str) -> PromptRecord:
        """See `AsyncPromptsApi.get`."""
        return self._connection.answer(_calls.prompt(key))


class PolicyApi:
    """The settings that shape groups."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def get(self) -> dict[str, Any]:
        """See `AsyncPolicyApi.get`."""
        return self._connection.answer(_calls.policy())

    def change(self, **settings: Any) -> dict[str, Any]:
        """See `AsyncPolicyApi.change`."""
        return self._connection.answer(_calls.change_policy(settings))


class StateApi:
    """Everything that the server has learned, as one file."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def save(self, path: str | PathLike[str]) -> None:
        """See `AsyncStateApi.save`."""
        write_whole(Path(path), self._connection.answer(_calls.save_state()))

    def load(self, path: str | PathLike[str]) -> int:
        """See `AsyncStateApi.load`."""
        return self._connection.answer(_calls.load_state(Path(path).read_bytes()))
