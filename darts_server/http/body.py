"""Request bodies that are read with care."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from io import BytesIO
from typing import TypeVar

import anyio
from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from darts_server.exceptions import InvalidRequest, TooLarge

STALL_SECONDS = 60.0
"""A sender from whom nothing came for so long is taken for gone: others may wait for it to end."""

ModelT = TypeVar("ModelT", bound=BaseModel)


def parsed(model: type[ModelT], body: bytes) -> ModelT:
    """The JSON body as that model.

    Raises:
        InvalidRequest: it is none; names the first field that is wrong, as ``prompts[3].text``.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        parts = [part for part in first["loc"] if part != ""]  # an empty one is the tag of a union
        where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
        raise InvalidRequest(where or "body", str(first["msg"]).removeprefix("Value error, ")) from error


async def read_body(request: Request, limit: int, stall: float = STALL_SECONDS) -> bytes:
    """All of the request's body, of which never more than ``limit`` bytes and one chunk are held.

    Raises:
        TooLarge: it has, or announces, more bytes.
        InvalidRequest: it did not come to its end, or nothing came for ``stall`` seconds.
    """
    body = BytesIO()
    async for chunk in chunks_of(request, limit, stall):
        body.write(chunk)
    return body.getvalue()


async def chunks_of(request: Request, limit: int, stall: float = STALL_SECONDS) -> AsyncIterator[bytes]:
    """The request's body as it comes, of ``limit`` bytes at most.

    Raises:
        TooLarge: it has, or announces, more bytes.
        InvalidRequest: it did not come to its end, or nothing came for ``stall`` seconds.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    size = 0
    try:
        async with aclosing(request.stream()) as chunks:
            while True:
                with anyio.fail_after(stall):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                yield chunk
    except (ClientDisconnect, TimeoutError) as error:
        raise InvalidRequest("body", "did not come to its end; send it again") from error


def _too_large(limit: int) -> TooLarge:
    return TooLarge("body", f"at most {limit} bytes are taken")
