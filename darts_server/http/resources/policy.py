"""``/darts/v1/policy``: read and change shaping while the server runs."""

import json
from collections.abc import Mapping
from typing import Any, NoReturn, Protocol

from fastapi import APIRouter, Request

from darts_server.exceptions import InvalidRequest
from darts_server.http.body import read_body

LARGEST_PATCH = 16 * 1024
"""Bytes; all settings together have some hundred."""


class PolicyControl(Protocol):
    """Whoever holds the settings."""

    def current(self) -> dict[str, object]:
        """Every setting that can change while running, and ``policies``: the names that a request may give."""
        ...

    def schema(self) -> dict[str, object]:
        """JSON schema of an object with some of these settings."""
        ...

    def change(self, patch: Mapping[str, object]) -> dict[str, object]:
        """Changes all that the patch names, or nothing; then as ``current``.

        Raises:
            InvalidRequest: names the key.
        """
        ...


def routes(control: PolicyControl) -> APIRouter:
    """The routes."""
    api = APIRouter()
    settings = {"application/json": {"schema": control.schema()}}
    in_force: dict[int | str, dict[str, Any]] = {200: {"content": {"application/json": {"schema": _all(control)}}}}

    @api.get("/policy", response_model=None, responses=in_force)
    async def read() -> dict[str, object]:
        """The settings that can change while running, and the policies that a request may name."""
        return control.current()

    @api.get("/policy/schema", response_model=None)
    async def describe() -> dict[str, object]:
        """JSON schema of an object with some of these settings: types, limits, defaults and what each does."""
        return control.schema()

    @api.patch(
        "/policy",
        response_model=None,
        responses=in_force,
        openapi_extra={"requestBody": {"required": True, "content": settings}},
    )
    async def change(request: Request) -> dict[str, object]:
        """Changes some of these settings, all at once or none. Groups that run keep what they began with."""
        return control.change(_object(await read_body(request, LARGEST_PATCH)))

    return api


def _all(control: PolicyControl) -> dict[str, object]:
    """JSON schema of what is told."""
    names = {"type": "array", "items": {"type": "string"}, "description": "What a request may name as its policy."}
    schema = control.schema()
    properties = schema["properties"]
    assert isinstance(properties, dict)
    return {**schema, "properties": {**properties, "policies": names}, "required": [*properties, "policies"]}


def _object(body: bytes) -> dict[str, object]:
    try:
        patch = json.loads(body, parse_constant=_refuse)
        json.dumps(patch, ensure_ascii=False).encode()  # a lone surrogate could not be said in an answer
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", "is not JSON; send an object with the settings to change") from error
    if not isinstance(patch, dict):
        raise InvalidRequest("body", "must be a JSON object with the settings to change")
    return patch


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
