"""Read and validate requests: bodies, limited in size, structure and time, and whether their callers still wait."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from typing import Any, Self, TypeVar, get_args

import anyio
import anyio.to_thread
import msgspec
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator
from pydantic_core.core_schema import no_info_wrap_validator_function
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from darts_server.caller import Caller
from darts_server.exceptions import GroupAborted, InvalidRequest, TooLarge

STALL_SECONDS = 60.0
"""Timeout for the next chunk of a body. A sender that is silent for longer counts as gone: other requests may wait for
this one."""

MAX_NAME_CHARS = 100
"""Of an unknown field in an error message."""
UNKNOWN = "unknown_field"
"""The type of pydantic's error for a field that a model does not have; an earlier version may have had it."""
PARTS = "strings, arrays and objects"
MAX_JSON_PARTS = 600_000
"""Strings, arrays and objects in a JSON body: 100,000 rewards by id have 500,002. They are what parsing is slow for, up
to a microsecond and some 100 bytes each; a number takes a tenth of that."""
MAX_PARTS_AT_ONCE = 50_000
"""Strings, arrays and objects of what is parsed at once: a prompt, or all beside the list of these."""
MAX_VALUES_AT_ONCE = 1024 * 1024
"""Numbers of it: as many as the longest contexts."""
MAX_UNQUOTED_AT_ONCE = 16 * 1024 * 1024
"""Bytes of it outside strings: numbers of 15 digits each, or fewer longer ones."""
MAX_DIGITS = 500
"""In a row in a number. Reading and writing an integer takes a time that grows with the square of its digits; the
largest float has 309."""
INLINE_BYTES = 64 * 1024
"""Bodies up to this size are validated in the event loop, within 20 ms; larger ones in a thread."""
WINDOW_BYTES = 64 * 1024
"""Searched at once, in some milliseconds at most."""
ONLY_DIGITS = bytes(ord("0") if chr(char).isdecimal() else ord(" ") for char in range(256))
"""Translates all digits to zeros, and all other bytes to spaces."""
LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)

one_at_a_time = anyio.CapacityLimiter(1)  # several threads would take the interpreter from the event loop in turns

ModelT = TypeVar("ModelT", bound="Body")
ValidatedT = TypeVar("ValidatedT")
T = TypeVar("T")


def _fail_fast(schema: object) -> None:
    """Let all lists of a schema end their validation at the first error."""
    if isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple", "set"):
            schema["fail_fast"] = True
        for key, part in schema.items():
            if key not in ("default", "metadata"):  # values, not schemas
                _fail_fast(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _fail_fast(part)


def fail_fast(application: FastAPI) -> None:
    """Let the bodies of an app's routes, vLLM's too, end their validation at the first error, whatever it is."""
    for route in application.routes:
        for field in route.dependant.body_params if isinstance(route, APIRoute) else ():
            adapter = field._type_adapter
            _fail_fast(adapter.core_schema)
            guarded = no_info_wrap_validator_function(_refuse_what_fails, adapter.core_schema)
            # Not with the validators that the models have built, which are those before the change.
            adapter.validator = SchemaValidator(guarded, _use_prebuilt=False)


def _refuse_what_fails(body: object, validate: Callable[[object], object]) -> object:
    """Validate a body, and refuse it if a validator fails.

    vLLM's validators see the fields before their types were checked: ``"structured_outputs": 1`` is an AttributeError.
    """
    try:
        return validate(body)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError) as error:
        raise ValueError(f"has a field of a wrong type ({type(error).__name__}: {error})") from error


class Body(BaseModel):
    """Base class of JSON bodies: strict, without unknown fields, and validated only up to the first error.

    pydantic would otherwise collect an error, of some 300 bytes, for each invalid item of a list and each unknown
    field.
    """

    # pydantic's "forbid" collects all unknown fields as errors. The schema says what holds: none are allowed.
    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra={"additionalProperties": False})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _fail_fast(schema)
        return schema

    @model_validator(mode="after")
    def _check_unknown(self) -> Self:
        if self.__pydantic_extra__:
            name = next(iter(self.__pydantic_extra__))
            raise PydanticCustomError(UNKNOWN, "unknown", {"name": name})
        return self


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


def limited(scope: Scope, receive: Receive, limits: BodyLimits, who: Caller | None = None) -> Receive:
    """Return what receives the messages of a request, and raises if its body exceeds the limits.

    ``who``: the caller, in which the refusal is noted. It raises:
        TooLarge: the body, or its announced length, exceeds the limit.
        IncompleteBody: the sender was silent for too long.
    """
    announced = Headers(scope=scope).get("content-length", "")
    size, is_complete = 0, False

    async def receive_limited() -> Message:
        nonlocal size, is_complete
        if is_complete:
            return await receive()
        try:
            if not (announced.isdecimal() and int(announced) > limits.max_bytes):
                try:
                    with anyio.fail_after(limits.stall_seconds):
                        message = await receive()
                except TimeoutError as error:
                    raise IncompleteBody from error
                size += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if size <= limits.max_bytes:
                    return message
            flag = f" ({limits.flag})" if limits.flag else ""
            raise TooLarge("body", f"must have at most {limits.max_bytes} bytes{flag}; send less per request")
        except InvalidRequest as error:  # no name outside of this block: it would keep the request's frames in a cycle
            if who is not None:
                who.refused = error
            raise

    return receive_limited


async def parse_body(model: type[ModelT], body: bytes, items: str | None = None) -> ModelT:
    """Parse a JSON body, a large one in a thread and one after the other. ``items``, raises: see `parsed`."""
    if len(body) <= INLINE_BYTES:
        return parsed(model, body)
    return await anyio.to_thread.run_sync(parsed, model, body, items, limiter=one_at_a_time)


async def converted(convert: Callable[[ModelT], ValidatedT], body: ModelT, text: bytes) -> ValidatedT:
    """Convert a body that was parsed from the text, a large one in a thread."""
    return convert(body) if len(text) <= INLINE_BYTES else await anyio.to_thread.run_sync(convert, body)


def parsed(model: type[ModelT], body: bytes, items: str | None = None) -> ModelT:
    """Parse a JSON body.

    The event loop is not served while pydantic reads a text. So the objects of a long list are read one by one, and
    every text that is read at once has few enough parts and values: a million token ids take a tenth of a second, text
    a few thousandths per MB.

    Args:
        items: the field with that list, of bodies.

    Raises:
        InvalidRequest: names the first invalid field, such as ``prompts[3].text``; or a number has too many digits.
        TooLarge: more than `MAX_JSON_PARTS`; or more than `MAX_PARTS_AT_ONCE`, `MAX_VALUES_AT_ONCE` or
            `MAX_UNQUOTED_AT_ONCE` in one object of the list, beside it, or in a body whose list has something else
            in it.
    """
    if items is None or len(body) <= INLINE_BYTES or (split := split_objects(body, items)) is None:
        check_at_once(body)
        return _validated(model.model_validate_json, body)
    head, objects = split
    check_at_once(head)
    whole = _validated(model.model_validate_json, head)
    (item,) = get_args(model.__annotations__[items])
    values = []
    for number, text in enumerate(objects):
        check_at_once(text)
        values.append(_validated(item.model_validate_json, text, (items, number)))
    assign = partial(model.__pydantic_validator__.validate_assignment, whole, items)
    _validated(assign, values)  # by what the field requires beyond its items, which are not validated again
    return whole


class _AnyObject(msgspec.Struct, gc=False):
    """Any JSON object; its fields are skipped."""


@cache
def _with_list(field: str) -> Any:
    """Return the type of a JSON object with a field, as ``items``; its other fields are skipped."""
    return msgspec.defstruct("_WithList", [("items", msgspec.Raw)], rename={"items": field})


def split_objects(body: bytes, field: str) -> tuple[bytes, list[bytes]] | None:
    """Split a JSON object: return it with ``[]`` in one field, and each object of the list in that field.

    ``None`` if there is no such list, or it has something else in it. msgspec creates no values for what it skips, but
    keeps the interpreter meanwhile, four times: 70 ms each if 64 MB are token ids, 200 ms if they are escapes alone.

    Raises:
        InvalidRequest: it is no JSON.
        TooLarge: more than `MAX_JSON_PARTS`, or more than `MAX_PARTS_AT_ONCE` beside the list.
    """
    if (parts := sum(map(_count_parts, _outside_strings(body)))) > MAX_JSON_PARTS:
        raise TooLarge("body", f"must have at most {MAX_JSON_PARTS} {PARTS}; send less per request")
    try:
        listed = bytes(msgspec.json.decode(body, type=_with_list(field)).items)
        msgspec.json.decode(listed, type=list[_AnyObject])  # so that there are as many as parts at most
        objects = msgspec.json.decode(listed, type=list[msgspec.Raw])
        if parts - sum(map(_count_parts, _outside_strings(listed))) > MAX_PARTS_AT_ONCE:  # each name is one below
            raise _too_much(MAX_PARTS_AT_ONCE, PARTS, "beside the list")
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.ValidationError, RecursionError):
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest("body", f"is no JSON: {error}") from None
    return msgspec.json.encode(fields | {field: msgspec.Raw(b"[]")}), list(map(bytes, objects))


def _validated(validate: Callable[[Any], ValidatedT], value: object, place: tuple[str | int, ...] = ()) -> ValidatedT:
    """Validate a value. ``place``: where it is in the body, for error messages."""
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "json_invalid":
            message = message.partition(" at line ")[0] if place else message
        parts = [part for part in (*place, *first["loc"]) if part != ""]  # an empty part is the tag of a union
        if first["type"] == UNKNOWN:
            message = "is unknown; remove it"
            parts.append(first["ctx"]["name"][:MAX_NAME_CHARS])
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
        raise InvalidRequest(field or "body", message) from None  # the cause would keep the whole body


def check_at_once(text: bytes, most_parts: int | None = None) -> None:
    """Check a text that is parsed at once. ``most_parts``: in place of `MAX_PARTS_AT_ONCE`.

    Raises as `check_structure`.
    """
    where = "in one prompt or reward, or in all fields beside a list of these alone"
    check_structure(text, most_parts or MAX_PARTS_AT_ONCE, MAX_VALUES_AT_ONCE, MAX_UNQUOTED_AT_ONCE, where)


def check_structure(text: bytes, most_parts: int, most_values: int, most_unquoted: int, where: str) -> None:
    """Check how much a JSON text has in it. ``where``: what the limits hold for, for messages.

    Raises:
        InvalidRequest: it has a number of more than `MAX_DIGITS` digits.
        TooLarge: parsing takes too long.
    """
    if len(text) <= MAX_DIGITS:
        return  # most rewards are
    parts = values = unquoted = 0
    digits = b""
    for outside in _outside_strings(text):
        digits = digits[-MAX_DIGITS:] + outside.translate(ONLY_DIGITS)
        if LONG_NUMBER in digits:
            raise InvalidRequest("body", f"has a number of more than {MAX_DIGITS} digits; send it as a string")
        parts, values, unquoted = parts + _count_parts(outside), values + outside.count(b","), unquoted + len(outside)
        for count, most, what in (
            (parts, most_parts, PARTS),
            (values, most_values, "numbers"),
            (unquoted, most_unquoted, "bytes outside strings"),
        ):
            if count > most:
                raise _too_much(most, what, where)


def _too_much(most: int, what: str, where: str) -> TooLarge:
    return TooLarge("body", f"must have at most {most} {what} {where}; send less")


def _count_parts(outside: bytes) -> int:
    return outside.count(b'"') // 2 + outside.count(b"[") + outside.count(b"{")


def _outside_strings(text: bytes) -> Iterator[bytes]:
    """Yield a JSON text in parts, each string as two quotes. The event loop is served between two parts."""
    begin = b""
    for at in range(0, len(text), WINDOW_BYTES):
        outside = _STRING.sub(rb'"\1', begin + text[at : at + WINDOW_BYTES])
        begin = b""
        if outside.count(b'"') % 2:  # the last string goes on, perhaps after half of an escape
            outside, _, escape = outside.rpartition(b'"')
            begin = b'"' + escape
        yield outside


async def read_body(request: Request, max_bytes: int, stall_seconds: float = STALL_SECONDS) -> bytes:
    """Read a whole body, and raise as `chunks_of`. Never more than ``max_bytes`` and one chunk are held in memory."""
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
    receive, is_complete = limited(request.scope, request.receive, BodyLimits(max_bytes, stall_seconds)), False
    while not is_complete:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise IncompleteBody
        is_complete = not message.get("more_body", False)
        yield message.get("body", b"")


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
