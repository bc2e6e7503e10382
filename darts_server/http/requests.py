"""What is read of a request beside its body: the form of the answer that it prefers, and whether it still waits."""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers

from darts_server.exceptions import GroupAborted

T = TypeVar("T")
_RANGE = re.compile(r"\s*([^\s;,/]+/[^\s;,/]+)\s*((?:;[^,]*)?)$")
_WEIGHT = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.IGNORECASE)


def choose_media_type(headers: Headers, offers: Sequence[str]) -> str | None:
    """Return the offer that a request's ``Accept`` header prefers, the first of equal ones.

    ``None`` if it accepts none of them; without the header it accepts all. Of the ranges that an offer is in, the
    narrowest counts (RFC 9110, 12.5.1).
    """
    lines = headers.getlist("accept")
    if not "".join(lines).strip():
        return offers[0]
    weights: dict[str, float] = {}
    for part in ",".join(lines).split(","):
        if found := _RANGE.match(part):
            weight = _WEIGHT.search(found[2])
            weights[found[1].lower()] = float(weight[1]) if weight else 1.0

    def weight_of(offer: str) -> float:
        ranges = (offer, offer.split("/")[0] + "/*", "*/*")
        return next((weights[one] for one in ranges if one in weights), 0.0)

    best = max(offers, key=weight_of)  # the first of the largest
    return best if weight_of(best) > 0 else None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, or cancel it when the caller disconnects.

    The request's body must have been read. Starlette cancels only streaming responses.

    Raises:
        GroupAborted: the caller disconnected. No one receives this error.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, disconnecting = asyncio.ensure_future(work), asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((working, disconnecting), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return await working
        raise GroupAborted("the caller disconnected")
    finally:
        for task in (working, disconnecting):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
