"""Limit the structure of the JSON bodies of vLLM's routes, which FastAPI would parse in the event loop."""

import json
from functools import partial
from typing import Any

import anyio.to_thread
import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute, request_response

from darts_server.caller import caller
from darts_server.exceptions import InvalidRequest
from darts_server.http.body import (
    INLINE_BYTES,
    MAX_PARTS_AT_ONCE,
    MAX_VALUES_AT_ONCE,
    check_structure,
    decode_shallowly,
    one_at_a_time,
    split_list,
)
from darts_server.http.security.access import RouteAccess
from darts_server.http.security.middleware import find_route_access

MAX_ADMIN_PARTS = 600_000
"""Strings, arrays and objects on routes for admins: a model has 100,000 names, types and shapes and more."""
MAX_NUMBERS = 8 * 1024 * 1024
"""Numbers in a body: 512 prompts of 8,192 token ids have half as many. pydantic needs 30 ns for each."""


class AnyArray(msgspec.Struct, array_like=True, gc=False):
    """Any JSON array. Its items are skipped."""


class _LimitedRequest(Request):
    def __init__(self, request: Request, max_parts: int) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._max_parts = max_parts

    async def json(self) -> Any:
        # Cached as by Starlette.
        if hasattr(self, "_json"):
            return self._json
        body = await self.body()
        try:
            if len(body) <= INLINE_BYTES:
                self._json = load_json(body, self._max_parts)
            else:
                self._json = await anyio.to_thread.run_sync(
                    load_json,
                    body,
                    self._max_parts,
                    limiter=one_at_a_time,
                )
        except InvalidRequest as error:
            # FastAPI gives all errors in this method the same answer; the middleware gives ours.
            caller.get().refusal = error
            raise
        return self._json


def limit_json(application: FastAPI) -> None:
    for route in application.routes:
        if isinstance(route, APIRoute):
            accesses = {find_route_access(method, route.path)[0] for method in route.methods}
            # pydantic needs 2 to 4 µs for each part, in the event loop.
            max_parts = MAX_PARTS_AT_ONCE if RouteAccess.USE in accesses else MAX_ADMIN_PARTS
            # FastAPI made `route.app` in the same way, without the limit.
            route.app = request_response(partial(_handle_limited, route.get_route_handler(), max_parts))


async def _handle_limited(route_handler: Any, max_parts: int, request: Request) -> Response:
    response: Response = await route_handler(_LimitedRequest(request, max_parts))
    return response


def load_json(body: bytes, max_parts: int) -> Any:
    """Parse a JSON text as ``json.loads`` does.

    Raises:
        InvalidRequest: the text is not UTF-8.
        TooLarge: the text has more than ``max_parts`` or `MAX_NUMBERS`, or too many numbers in one prompt.
        ValueError: the text is no JSON.
    """
    # `check_structure` counts bytes, and in other encodings the byte of a quote is not always a quote.
    if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        raise InvalidRequest("body", "must be UTF-8")
    check_structure(body, max_parts, MAX_NUMBERS, "in all")
    if len(body) <= INLINE_BYTES:
        return json.loads(body)

    try:
        fields = decode_shallowly(body, dict[str, msgspec.Raw])
    except InvalidRequest:
        # The body has NaN or Infinity, which json.loads accepts, or is no JSON.
        fields = None
    if fields is None:
        return _load_if_small(body, max_parts)
    values: dict[str, Any] = {}
    # json.loads keeps the interpreter until it returns, so a list of arrays is loaded array by array.
    for name, raw in fields.items():
        text = bytes(raw)
        arrays = split_list(text, AnyArray)
        if arrays is None:
            values[name] = _load_if_small(text, max_parts)
        else:
            values[name] = [_load_if_small(array, max_parts) for array in arrays]
    return values


def _load_if_small(text: bytes, max_parts: int) -> Any:
    check_structure(text, max_parts, MAX_VALUES_AT_ONCE, "in one prompt, or in a field that is no list of prompts")
    return json.loads(text)
