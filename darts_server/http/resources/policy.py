"""``/darts/v1/policy``: read and change the runtime settings."""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from fastapi import APIRouter, Request

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import read_body

MAX_PATCH_BYTES = 16 * 1024
"""All settings together have some hundred bytes."""


class PolicyControl(Protocol):
    def current_settings(self) -> dict[str, object]:
        """Return the settings, and in ``policies`` the names that a request may use."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the settings."""

    async def change(self, patch: Mapping[str, object]) -> dict[str, object]:
        """Apply the whole patch or nothing, and return the new settings.

        Raises:
            InvalidRequest: names the invalid key.
        """


def add_routes(api: APIRouter, control: PolicyControl) -> None:
    schema = control.schema()
    policies = {"type": "array", "items": {"type": "string"}, "description": "Policies that a request may use."}
    properties = {**schema["properties"], "policies": policies}
    answer_schema = {**schema, "properties": properties, "required": list(properties)}
    responses: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": answer_schema}}}}

    @api.get("/policy", response_model=None, responses=responses)
    async def read() -> dict[str, object]:
        """Return the runtime settings, and the policies that a request may use."""
        return control.current_settings()

    @api.get("/policy/schema", response_model=None)
    async def describe() -> dict[str, object]:
        """Return the JSON schema of the runtime settings: types, limits, defaults and descriptions."""
        return control.schema()

    @api.patch(
        "/policy",
        response_model=None,
        responses=responses,
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
    )
    async def change(request: Request) -> dict[str, object]:
        """Change runtime settings, all in the body or none. Running groups keep theirs."""
        body = await read_body(request, MAX_PATCH_BYTES)
        try:
            patch = msgspec.json.decode(body, type=dict[str, Any])
        # msgspec raises RecursionError for deeply nested values.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest("body", "must be a JSON object with the settings to change") from error
        return await control.change(patch)
