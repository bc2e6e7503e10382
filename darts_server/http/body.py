"""Read the bodies of requests: limited in size, time and structure, and decoded strictly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from io import BytesIO
from typing import Any, Self, TypeVar, get_args

import anyio
import anyio.to_thread
import msgspec
from fastapi import Request
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from darts_server.caller import Caller
from darts_server.exceptions import GroupAborted, InvalidRequest, TooLarge, field_name

STALL_SECONDS = 60.0
"""Timeout for the next chunk of a body. Other requests may wait for a slow sender."""

INLINE_BYTES = 64 * 1024
"""Largest body that is parsed in the event loop: it takes up to 20 ms."""
MAX_ITEMS = 600_000
MAX_PARTS_AT_ONCE = 50_000
"""Strings, arrays and objects that are parsed while the event loop waits. Each takes up to 1 µs."""
MAX_VALUES_AT_ONCE = 1024 * 1024
"""Values that are parsed while the event loop waits: the longest contexts have a million tokens."""
MAX_NAME_CHARS = 100
UNKNOWN_FIELD = "unknown_field"

# Several parsing threads would take the interpreter from the event loop in turns.
one_at_a_time = anyio.CapacityLimiter(1)

ModelT = TypeVar("ModelT", bound="Body")
ValidatedT = TypeVar("ValidatedT")
T = TypeVar("T")


class Body(BaseModel):
    """Base class of JSON bodies: strict, without unknown fields."""

    # "forbid" would report unknown fields without the nearest name.
    model_config = ConfigDict(
        extra="allow",
        strict=True,
        validate_assignment=True,
        json_schema_extra={"additionalProperties": False},
    )

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name in self.model_extra or ():
            short_name = name[:MAX_NAME_CHARS]
            nearest = get_close_matches(short_name, type(self).model_fields, n=1)
            remedy = f"write {nearest[0]}" if nearest else "remove it"
            raise PydanticCustomError(UNKNOWN_FIELD, "is unknown; {remedy}", {"remedy": remedy, "name": short_name})
        return self


@dataclass(frozen=True, slots=True)
class BodyLimits:
    max_bytes: int
    stall_seconds: float = STALL_SECONDS
    flag: str | None = None
    """Command-line flag that sets ``max_bytes``."""


class IncompleteBody(InvalidRequest):
    """The sender disconnected or fell silent before the end of its request's body."""

    def __init__(self) -> None:
        super().__init__("body", "is incomplete; send the request again")


def limit_receive(
    scope: Scope,
    receive: Receive,
    limits: BodyLimits,
    caller: Caller | None = None,
) -> Receive:
    """Return a ``receive`` that raises `TooLarge` or `IncompleteBody`, and keeps the error in ``caller``."""
    content_length = Headers(scope=scope).get("content-length", "")
    announced_bytes = int(content_length) if content_length.isdecimal() else 0
    received_bytes = 0
    is_complete = False

    async def receive_limited() -> Message:
        nonlocal received_bytes, is_complete
        # After the body, routes wait for a disconnect, which has no timeout.
        if is_complete:
            return await receive()
        try:
            if announced_bytes <= limits.max_bytes:
                try:
                    with anyio.fail_after(limits.stall_seconds):
                        message = await receive()
                except TimeoutError as error:
                    raise IncompleteBody from error

                received_bytes += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if received_bytes <= limits.max_bytes:
                    return message

            flag = f" ({limits.flag})" if limits.flag else ""
            raise TooLarge("body", f"must have at most {limits.max_bytes} bytes{flag}; send less per request")
        # The error has no local name: its traceback and this frame would refer to each other, and keep the request in
        # memory.
        except InvalidRequest as error:
            if caller is not None:
                caller.refusal = error
            raise

    return receive_limited


async def read_body(request: Request, max_bytes: int) -> bytes:
    body = BytesIO()
    async for chunk in stream_body(request, max_bytes):
        body.write(chunk)
    return body.getvalue()


async def stream_body(request: Request, max_bytes: int, stall_seconds: float = STALL_SECONDS) -> AsyncIterator[bytes]:
    """Stream a body as it arrives.

    Raises:
        TooLarge: the body, or its announced length, exceeds ``max_bytes``.
        IncompleteBody: the sender disconnected, or was silent for ``stall_seconds``.
    """
    receive = limit_receive(request.scope, request.receive, BodyLimits(max_bytes, stall_seconds))
    is_complete = False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise IncompleteBody
        is_complete = not message.get("more_body", False)
        yield message.get("body", b"")


async def parse_body(model: type[ModelT], body: bytes, list_field: str | None = None) -> ModelT:
    """Parse as `parse` does, a large body in a thread."""
    if len(body) <= INLINE_BYTES:
        return parse(model, body)
    return await anyio.to_thread.run_sync(
        parse,
        model,
        body,
        list_field,
        limiter=one_at_a_time,
    )


async def convert_body(convert: Callable[[ModelT], ValidatedT], body: ModelT, *, num_bytes: int) -> ValidatedT:
    """Convert a parsed body that had ``num_bytes``, a large body in a thread."""
    if num_bytes <= INLINE_BYTES:
        return convert(body)
    return await anyio.to_thread.run_sync(convert, body)


def parse(model: type[ModelT], body: bytes, list_field: str | None = None) -> ModelT:
    """Parse a JSON body. ``list_field``: the field with a list of bodies, if any.

    Raises:
        InvalidRequest: names the first invalid field, such as ``prompts[3].text``.
        TooLarge: the list has more than `MAX_ITEMS`, or a text that is parsed at once has too many parts or values.
    """
    if list_field is None or len(body) <= INLINE_BYTES:
        return _parse_at_once(model, body)
    fields = decode_shallowly(body, dict[str, msgspec.Raw])
    item_texts = None
    if fields is not None and list_field in fields:
        item_texts = split_list(bytes(fields[list_field]), AnyObject)
    # pydantic reports the error of a body or a field of another type.
    if item_texts is None:
        return _parse_at_once(model, body)

    # Parse the other fields with an empty list: no list has a minimum length.
    parsed = _parse_at_once(model, msgspec.json.encode(fields | {list_field: msgspec.Raw(b"[]")}))

    # Parse the items one by one: pydantic keeps the interpreter while it reads a text, .1 s for a million token ids.
    (item_model,) = get_args(model.model_fields[list_field].annotation)
    items = []
    for number, text in enumerate(item_texts):
        _check_small_enough(text)
        items.append(_validate(item_model.model_validate_json, text, (list_field, number)))

    # The assignment validates the length of the list, and not the items again.
    _validate(lambda value: setattr(parsed, list_field, value), items)
    return parsed


def _parse_at_once(model: type[ModelT], body: bytes) -> ModelT:
    _check_small_enough(body)
    return _validate(model.model_validate_json, body)


class AnyObject(msgspec.Struct, gc=False):
    """Any JSON object. Its fields are skipped."""


def decode_shallowly(text: bytes, kind: Any) -> Any:
    """Decode a text as a container of ``msgspec.Raw``, or return ``None`` for another type or too deep nesting.

    Raises:
        InvalidRequest: the text is no JSON.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.ValidationError, RecursionError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", f"is no JSON: {error}") from None


def split_list(text: bytes, kind: type[msgspec.Struct]) -> list[bytes] | None:
    """Return the items of a list as texts, or ``None`` if the text is no list, or an item is no ``kind``.

    Raises:
        TooLarge: the list has more than `MAX_ITEMS` items.
    """
    # Check the number and the kind of the items first: a list of 30 million numbers would take 2 GB as texts.
    empty_items = decode_shallowly(text, list[kind])  # type: ignore[valid-type]
    if empty_items is None:
        return None
    if len(empty_items) > MAX_ITEMS:
        raise TooLarge("body", f"must have at most {MAX_ITEMS} items in a list; send less per request")
    return [bytes(item) for item in decode_shallowly(text, list[msgspec.Raw])]


def _validate(validate: Callable[[Any], ValidatedT], value: object, place: tuple[str | int, ...] = ()) -> ValidatedT:
    """Return ``validate(value)``, or raise `InvalidRequest`. ``place``: path of the value in the body."""
    try:
        return validate(value)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]

    # Raised outside of the except block: as its context, pydantic's error would keep the whole body.
    message = first_error["msg"].removeprefix("Value error, ")
    # A line number within the item would mislead.
    if first_error["type"] == "json_invalid" and place:
        message = message.partition(" at line ")[0]
    # The tags of unions are empty names.
    path = [part for part in (*place, *first_error["loc"]) if part != ""]
    if first_error["type"] == UNKNOWN_FIELD:
        path.append(first_error["ctx"]["name"])
    raise InvalidRequest(field_name(path) or "body", message)


def _check_small_enough(text: bytes) -> None:
    where = "in one prompt or reward, or in all other fields together"
    check_structure(text, MAX_PARTS_AT_ONCE, MAX_VALUES_AT_ONCE, where)


def check_structure(
    text: bytes,
    max_parts: int,
    max_values: int,
    where: str,
) -> None:
    """Check a JSON text before it is parsed. ``where`` names the text in messages.

    Raises:
        TooLarge: the text has more than ``max_parts`` strings, arrays and objects, or more than ``max_values`` values.
    """
    # Without escapes, every quote begins or ends a string.
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    parts = text.count(b'"') // 2
    values = 0
    # A text with too many strings is not split, because the pieces would take much memory.
    if parts <= max_parts:
        # Every second piece between quotes is outside of strings.
        outside_strings = b"".join(text.split(b'"')[::2])
        parts += outside_strings.count(b"[") + outside_strings.count(b"{")
        # Commas separate values, most of them numbers.
        values = outside_strings.count(b",")

    if parts > max_parts:
        raise TooLarge("body", f"must have at most {max_parts} strings, arrays and objects {where}; send less")
    if values > max_values:
        raise TooLarge("body", f"must have at most {max_values} numbers {where}; send less")


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of ``work``, or cancel it when the caller disconnects. The body must have been read.

    Raises:
        GroupAborted: the caller disconnected, and does not get this error.
    """

    # Starlette itself cancels only streaming responses.
    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return await work_task
        raise GroupAborted("the caller disconnected")
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
            # Errors of finished work are raised above.
            with suppress(asyncio.CancelledError, Exception):
                await task
