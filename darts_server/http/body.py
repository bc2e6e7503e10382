"""Read request bodies, limited in size and time."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from io import BytesIO
from typing import TypeVar

import anyio
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from darts_server.exceptions import InvalidRequest, TooLarge

STALL_SECONDS = 60.0
"""Timeout for the next chunk of a body. A sender that is silent for longer counts as gone: other requests may wait for
this one."""

ModelT = TypeVar("ModelT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """``max_bytes``: of the whole body. ``stall_seconds``: timeout for the next chunk. ``flag``: sets ``max_bytes``."""

    max_bytes: int
    stall_seconds: float = STALL_SECONDS
    flag: str | None = None


class IncompleteBody(InvalidRequest):
    """The sender disconnected or fell silent before the end of its request's body."""

    def __init__(self) -> None:
        super().__init__("body", "is incomplete; send the request again")


class LimitedBody:
    """Receive the messages of a request, and raise if its body exceeds the limits."""

    def __init__(self, scope: Scope, receive: Receive, limits: BodyLimits) -> None:
        self._receive = receive
        self._limits = limits
        self._content_length = Headers(scope=scope).get("content-length", "")
        self._size = 0
        self._complete = False

    async def receive(self) -> Message:
        """Receive the next message.

        Raises:
            TooLarge: the body, or its announced length, exceeds the limit.
            IncompleteBody: the sender was silent for too long.
        """
        if self._complete:
            return await self._receive()
        if self._content_length.isdecimal() and int(self._content_length) > self._limits.max_bytes:
            raise self._too_large()
        try:
            with anyio.fail_after(self._limits.stall_seconds):
                message = await self._receive()
        except TimeoutError as error:
            raise IncompleteBody from error
        self._size += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._size > self._limits.max_bytes:
            raise self._too_large()
        return message

    def _too_large(self) -> TooLarge:
        flag = f" ({self._limits.flag})" if self._limits.flag else ""
        return TooLarge("body", f"must have at most {self._limits.max_bytes} bytes{flag}; send less per request")


def parsed(model: type[ModelT], body: bytes) -> ModelT:
    """Parse a JSON body.

    Raises:
        InvalidRequest: names the first invalid field, such as ``prompts[3].text``.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [part for part in first["loc"] if part != ""]  # an empty part is the tag of a union
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
        raise InvalidRequest(field or "body", str(first["msg"]).removeprefix("Value error, ")) from error


async def read_body(request: Request, max_bytes: int, stall_seconds: float = STALL_SECONDS) -> bytes:
    """Read a whole body. Never more than ``max_bytes`` and one chunk are held in memory.

    Raises:
        TooLarge: the body, or its announced length, exceeds ``max_bytes``.
        IncompleteBody: the sender disconnected, or was silent for ``stall_seconds``.
    """
    body = BytesIO()
    async for chunk in chunks_of(request, max_bytes, stall_seconds):
        body.write(chunk)
    return body.getvalue()


async def chunks_of(request: Request, max_bytes: int, stall_seconds: float = STALL_SECONDS) -> AsyncIterator[bytes]:
    """Stream a body as it arrives.

    Raises:
        TooLarge: the body, or its announced length, exceeds ``max_bytes``.
        IncompleteBody: the sender disconnected, or was silent for ``stall_seconds``.
    """
    limited = LimitedBody(request.scope, request.receive, BodyLimits(max_bytes, stall_seconds))
    try:
        async with aclosing(Request(request.scope, limited.receive).stream()) as chunks:
            async for chunk in chunks:
                yield chunk
    except ClientDisconnect as error:
        raise IncompleteBody from error
