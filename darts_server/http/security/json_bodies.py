"""Limit the structure of the JSON bodies of vLLM's routes, which FastAPI would parse at once in the event loop."""

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
    MAX_JSON_PARTS,
    MAX_PARTS_AT_ONCE,
    check_at_once,
    check_structure,
    one_at_a_time,
)
from darts_server.http.security.access import RouteAccess
from darts_server.http.security.middleware import find_route

MAX_NUMBERS = 8 * 1024 * 1024
"""Limit of numbers in a body: 512 prompts of 8,192 token ids have half as many. pydantic needs 30 ns for each."""


class _AnyArray(msgspec.Struct, array_like=True, gc=False):
    """Any JSON array; its items are skipped."""


class _LimitedRequest(Request):
    """A request whose JSON is limited, and parsed in a thread if it is large.

    ``most_parts``: limit of strings, arrays and objects. pydantic needs 2 to 4 µs for each.
    """

    most_parts = MAX_PARTS_AT_ONCE

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                if len(body) <= INLINE_BYTES:
                    self._json = loaded(body, self.most_parts)
                else:
                    self._json = await anyio.to_thread.run_sync(loaded, body, self.most_parts, limiter=one_at_a_time)
            except InvalidRequest as error:
                caller.get().refused = error  # FastAPI answers all errors here alike
                raise
        return self._json


class _ControlRequest(_LimitedRequest):
    """A request of a route for admins. Names, types and shapes of a model's weights are 100,000 parts and more."""

    most_parts = MAX_JSON_PARTS


def limit_json(application: FastAPI) -> None:
    """Limit the JSON bodies of the routes that the app has now."""
    for route in application.routes:
        if isinstance(route, APIRoute):
            accesses = {find_route(method, route.path)[0] for method in route.methods}
            request_class = _LimitedRequest if RouteAccess.USE in accesses else _ControlRequest
            route.app = request_response(partial(_handle, route.get_route_handler(), request_class))


async def _handle(handler: Any, request_class: type[_LimitedRequest], request: Request) -> Response:
    response: Response = await handler(request_class(request.scope, request.receive, request._send))
    return response


def loaded(body: bytes, most_parts: int) -> Any:
    """Parse a JSON text as ``json.loads`` does, a list of arrays one by one: other threads run between two.

    Raises:
        InvalidRequest: it is not UTF-8, or has a number of too many digits.
        TooLarge: more than ``most_parts`` or `MAX_NUMBERS`; or more than `MAX_VALUES_AT_ONCE` numbers in one array of
            a list of arrays, or in a field that is no such list.
        ValueError: it is no JSON.
    """
    if json.detect_encoding(body) not in ("utf-8", "utf-8-sig"):
        raise InvalidRequest("body", "must be UTF-8")  # in other encodings a quote is not always a quote
    check_structure(body, most_parts, MAX_NUMBERS, len(body), "in all")
    if len(body) <= INLINE_BYTES:
        return json.loads(body)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        check_at_once(body, most_parts)
        return json.loads(body)
    return {name: _loaded_field(bytes(text), most_parts) for name, text in fields.items()}


def _loaded_field(text: bytes, most_parts: int) -> Any:
    try:
        msgspec.json.decode(text, type=list[_AnyArray])  # so that there are as many items as parts at most
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        check_at_once(text, most_parts)
        return json.loads(text)
    values = []
    for item in items:
        part = bytes(item)
        check_at_once(part, most_parts)
        values.append(json.loads(part))
    return values
