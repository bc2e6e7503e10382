"""Request bodies that are read with care."""

from contextlib import aclosing
from io import BytesIO

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from darts_server.exceptions import InvalidRequest, TooLarge

STALL_SECONDS = 60.0
"""A sender from whom nothing came for so long is taken for gone: others may wait for it to end."""


async def read_body(request: Request, limit: int, stall: float = STALL_SECONDS) -> bytes:
    """All of the request's body, of which never more than ``limit`` bytes and one chunk are held.

    Raises:
        TooLarge: it has, or announces, more bytes.
        InvalidRequest: it did not come to its end, or nothing came for ``stall`` seconds.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise _too_large(limit)
    body = BytesIO()
    try:
        async with aclosing(request.stream()) as chunks:
            while True:
                with anyio.fail_after(stall):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return body.getvalue()
                if body.tell() + len(chunk) > limit:
                    raise _too_large(limit)
                body.write(chunk)
    except (ClientDisconnect, TimeoutError) as error:
        raise InvalidRequest("body", "did not come to its end; send it again") from error


def _too_large(limit: int) -> TooLarge:
    return TooLarge("body", f"at most {limit} bytes are taken")
