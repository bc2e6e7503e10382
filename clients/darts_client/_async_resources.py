"""The attributes of the client: `client.groups`, `prompts`, `policy`, `state` and `weights`."""

import json
import os
from collections.abc import AsyncIterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from pydantic import RootModel

from ._async_transport import AsyncTransport
from ._io import AsyncBody, Source, async_run_blocking, write_atomically
from ._models import WireModel, parse_response
from ._prompts import drop_none
from ._records import GroupRecord, PromptRecord, WeightsRecord
from ._requests import API, quote_segment

Rule = Literal["finish", "keep", "restart"]


class _Groups(WireModel):
    groups: list[GroupRecord]


class _Restored(WireModel):
    prompts: int


class _Settings(RootModel[dict[str, Any]]):
    pass


class _AsyncApi:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport


class AsyncGroupsApi(_AsyncApi):
    """Records of groups."""

    async def get(self, group_id: str) -> list[GroupRecord]:
        """Return one group, or all groups of a batch or response, by its id. Raise NotFound if none is kept."""
        response = await self._transport.request("GET", f"{API}/groups/{quote_segment(group_id)}")
        return parse_response(_Groups, response).groups


class AsyncPromptsApi(_AsyncApi):
    """Statistics of prompts."""

    async def get(self, key: str) -> PromptRecord:
        """Return the statistics of a prompt by the `prompt_key` of its groups. Raise NotFound if it has none."""
        response = await self._transport.request("GET", f"{API}/prompts/{quote_segment(key)}")
        return parse_response(PromptRecord, response)


class AsyncPolicyApi(_AsyncApi):
    """The runtime settings that shape groups."""

    async def get(self) -> dict[str, Any]:
        """Return all runtime settings, and `policies`, the names that a request may use."""
        response = await self._transport.request("GET", f"{API}/policy")
        return parse_response(_Settings, response).root

    async def change(self, **settings: Any) -> dict[str, Any]:
        """Change settings for future groups, all or none, and return all settings. None unsets a setting."""
        response = await self._transport.request("PATCH", f"{API}/policy", json=settings)
        return parse_response(_Settings, response).root


class AsyncStateApi(_AsyncApi):
    """Everything that the server has learned, as one file."""

    async def save(self, path: str | PathLike[str]) -> None:
        """Write the file. After a failure `path` is the old file, or absent."""
        response = await self._transport.request("GET", f"{API}/state")
        await async_run_blocking(write_atomically, Path(path), response.content)

    async def load(self, path: str | PathLike[str]) -> int:
        """Replace the server's state by a saved file, all or nothing. Return the number of prompts in the file."""
        data = await async_run_blocking(Path(path).read_bytes)
        response = await self._transport.request("PUT", f"{API}/state", content=data)
        return parse_response(_Restored, response).prompts


class AsyncWeightsApi(_AsyncApi):
    """The weights that the server samples with. Sending a file needs neither torch nor safetensors.

    After TimedOut or ConnectionFailed an update may still run; `get` returns its state.

    Raises:
        BadRequest: the weights are invalid, or another update is running.
        ServerFault: with status 501, the weights of this model cannot be replaced.
    """

    async def get(self) -> WeightsRecord:
        """Return the version that is served, and the result of the last update."""
        response = await self._transport.request("GET", f"{API}/weights")
        return parse_response(WeightsRecord, response)

    async def push(
        self,
        source: Source,
        *,
        rule: Rule | None = None,
        version: int | None = None,
        partial: bool = False,
        check_finite: bool = True,
    ) -> WeightsRecord:
        """Send new weights, all or nothing. Return when the server samples with them.

        ```python
        await client.weights.push("checkpoint/model.safetensors", rule="finish")
        ```

        Args:
            source: bytes or path of a safetensors file. A file may be larger than the memory.
            rule: "finish" waits for running groups, "keep" continues them with the new weights, "restart" starts them
                again. The default is the server's setting.
            version: by default the served version plus 1.
            partial: whether tensors may be missing. They keep their values.
            check_finite: whether to refuse NaN and infinity.
        """
        body = await async_run_blocking(AsyncBody, source)
        return await self.push_stream(
            body,
            body.size,
            rule=rule,
            version=version,
            partial=partial,
            check_finite=check_finite,
        )

    async def push_stream(
        self,
        content: AsyncIterable[bytes],
        size: int,
        *,
        rule: Rule | None = None,
        version: int | None = None,
        partial: bool = False,
        check_finite: bool = True,
    ) -> WeightsRecord:
        """Send new weights like `push`, from pieces of a safetensors file of `size` bytes. A retry iterates again."""
        params = _update_options(rule, version, check_finite, partial)
        return await self._upload(f"{API}/weights", content, size, params)

    async def load(
        self,
        path: str | PathLike[str],
        *,
        rule: Rule | None = None,
        version: int | None = None,
        partial: bool = False,
        check_finite: bool = True,
        repeat_version: bool = False,
    ) -> WeightsRecord:
        """Load new weights from a safetensors file, or a folder of such files, under the server's `--weights-root`.

        `repeat_version` allows the version that is served already. See `push`. Raises Unauthorized if the server has
        no such root.
        """
        body = {"path": os.fspath(path)} | _update_options(rule, version, check_finite, partial)
        if repeat_version:
            body["repeat_version"] = True
        return await self._update("POST", f"{API}/weights", json=body)

    async def push_lora(
        self,
        name: str,
        source: Source,
        *,
        config: Mapping[str, Any] | None = None,
        rule: Rule | None = None,
        version: int | None = None,
        check_finite: bool = True,
    ) -> WeightsRecord:
        """Send a LoRA adapter, all or nothing. Return when it is served under `name`. See `push`.

        ```python
        await client.weights.push_lora("step-12", "adapter/")
        ```

        Args:
            source: folder that PEFT has saved, or the bytes of its `adapter_model.safetensors`.
            config: PEFT's `adapter_config.json`, needed for bytes: `r`, `lora_alpha`, and `use_rslora` if it is set.

        Raises:
            Unauthorized: the server was started without `--enable-lora`.
        """
        params = {"config": await async_run_blocking(_encode_lora_config, source, config)}
        params |= _update_options(rule, version, check_finite)
        tensors = source if isinstance(source, bytes) else Path(source) / "adapter_model.safetensors"
        body = await async_run_blocking(AsyncBody, tensors)
        return await self._upload(_lora_path(name), body, body.size, params)

    async def load_lora(
        self,
        name: str,
        path: str | PathLike[str],
        *,
        rule: Rule | None = None,
        version: int | None = None,
        check_finite: bool = True,
    ) -> WeightsRecord:
        """Load a LoRA adapter from a folder under the server's `--weights-root`. See `push_lora`."""
        body = {"path": os.fspath(path)} | _update_options(rule, version, check_finite)
        return await self._update("POST", _lora_path(name), json=body)

    async def remove_lora(self, name: str) -> WeightsRecord:
        """Remove a LoRA adapter once all requests in flight have finished. Raise BadRequest if it does not exist."""
        return await self._update("DELETE", _lora_path(name))

    async def _upload(
        self,
        path: str,
        content: AsyncIterable[bytes],
        size: int,
        params: Mapping[str, Any],
    ) -> WeightsRecord:
        # With the size, the server can reject a body that is too large before it is sent.
        headers = {"Content-Length": str(size), "Content-Type": "application/octet-stream"}
        return await self._update(
            "PUT",
            path,
            content=content,
            headers=headers,
            params=params,
        )

    async def _update(self, method: str, path: str, **options: Any) -> WeightsRecord:
        # A second update would change the version again, so it is sent only if the first never reached the server.
        response = await self._transport.request(
            method,
            path,
            idempotent=False,
            **options,
        )
        return parse_response(WeightsRecord, response)


def _lora_path(name: str) -> str:
    return f"{API}/weights/lora/{quote_segment(name)}"


def _update_options(
    rule: Rule | None,
    version: int | None,
    check_finite: bool,
    partial: bool | None = None,
) -> dict[str, Any]:
    # None leaves the choice to the server. LoRA adapters have no `partial`.
    options = drop_none({"rule": rule, "version": version, "partial": partial})
    if not check_finite:
        options["check_finite"] = False
    return options


def _encode_lora_config(source: Source, config: Mapping[str, Any] | None) -> str:
    if config is None:
        if isinstance(source, bytes):
            raise ValueError("config: the bytes of an adapter need a configuration, such as {'r': 8, 'lora_alpha': 16}")
        config = json.loads((Path(source) / "adapter_config.json").read_text())
    # The server reads the target modules from the tensors' names, and the list may be too long for a URL.
    return json.dumps({key: value for key, value in config.items() if key != "target_modules"})
