"""Read and validate request bodies, limited in size, structure and time."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache, partial
from io import BytesIO
from itertools import islice
from typing import Annotated, Any, Self, TypeVar

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, TypeAdapter, ValidationError, model_validator
from pydantic_core import CoreSchema, SchemaValidator
from pydantic_core.core_schema import no_info_wrap_validator_function
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope

from darts_server.exceptions import InvalidRequest, TooLarge
from darts_server.http.json_slices import find_objects, strings_and_brackets
from darts_server.removed import FIELDS

STALL_SECONDS = 60.0
"""Timeout for the next chunk of a body. A sender that is silent for longer counts as gone: other requests may wait for
this one."""

MAX_NAME_CHARS = 100
"""Of an unknown field in an error message."""
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
COUNTED_BYTES = 256 * 1024
DIGITS = b"0123456789"

_one_at_a_time = anyio.CapacityLimiter(1)  # several threads would take the interpreter from the event loop in turns

ModelT = TypeVar("ModelT", bound="Body")
ValidatedT = TypeVar("ValidatedT")


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


class UnknownField(ValueError):
    """A JSON object has a field that its model does not have. ``remedy``: what to use instead, if it had it once."""

    def __init__(self, name: str, remedy: str | None = None) -> None:
        super().__init__(name)
        self.remedy = remedy


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
            raise UnknownField(name, FIELDS.get((type(self).__name__, name)))
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


async def parse_body(model: type[ModelT], body: bytes, items: str | None = None) -> ModelT:
    """Parse a JSON body, a large one in a thread and one after the other.

    The event loop is not served while pydantic reads a text. So a list of objects is read in slices of some 64 KiB, and
    every text that is read at once has few enough parts and values: a million token ids take a tenth of a second, text
    a few thousandths per MB.

    Args:
        items: the field with that list.

    Raises:
        InvalidRequest: names the first invalid field, such as ``prompts[3].text``; or a number has too many digits.
        TooLarge: more than `MAX_JSON_PARTS`; or more than `MAX_PARTS_AT_ONCE`, `MAX_VALUES_AT_ONCE` or
            `MAX_UNQUOTED_AT_ONCE` in one object of the list, beside it, or in a body whose list has something else
            in it.
    """
    if len(body) <= INLINE_BYTES:
        return parsed(model, body)
    return await anyio.to_thread.run_sync(parsed, model, body, items, limiter=_one_at_a_time)


async def converted(convert: Callable[[ModelT], ValidatedT], body: ModelT, text: bytes) -> ValidatedT:
    """Convert a body that was parsed from the text, a large one in a thread."""
    return convert(body) if len(text) <= INLINE_BYTES else await anyio.to_thread.run_sync(convert, body)


def parsed(model: type[ModelT], body: bytes, items: str | None = None) -> ModelT:
    """Parse a JSON body. Raises as `parse_body`."""
    everything = (0, len(body))
    if _parts(body, MAX_JSON_PARTS, everything) > MAX_JSON_PARTS:
        raise TooLarge("body", f"must have at most {MAX_JSON_PARTS} strings, arrays and objects; send less per request")
    if has_long_number(body):
        raise InvalidRequest("body", f"has a number of more than {MAX_DIGITS} digits; send it as a string")
    found = None if items is None or len(body) <= INLINE_BYTES else find_objects(body, items)
    if items is None or found is None:
        _check_at_once(body, everything)
        return _validated(model.model_validate_json, body)
    _check_at_once(body, (0, found.start), (found.end, len(body)))
    for span in found.spans:
        _check_at_once(body, span)
    head = body[: found.start] + b"[]" + body[found.end :]
    whole = _validated(model.model_validate_json, head, f", counted with {items} as []")
    count, read = _list_readers(model, items)
    _validated(count, found.spans, items=items)
    values: list[Any] = []
    for start, end in found.slices(INLINE_BYTES):
        where = f", counted from {items}[{len(values)}] on"
        values += _validated(read, b"[" + body[start:end] + b"]", where, items, len(values))
    assign = partial(model.__pydantic_validator__.validate_assignment, whole, items)
    _validated(assign, values)  # by what the field requires beyond its items, which are not validated again
    return whole


@cache
def _list_readers(model: type[Body], items: str) -> tuple[Callable[[Any], object], Callable[[bytes], list[Any]]]:
    """Return what checks the number of items of a field, and what reads some of them."""
    number: TypeAdapter[list[Any]] = TypeAdapter(Annotated[list[Any], Field(), *model.model_fields[items].metadata])
    schema: TypeAdapter[list[Any]] = TypeAdapter(model.__annotations__[items])
    return number.validate_python, schema.validate_json


def _validated(
    validate: Callable[[Any], ValidatedT], value: object, where: str = "", items: str | None = None, number: int = 0
) -> ValidatedT:
    """Validate a value, or items of the field ``items``, of which the first is that ``number``.

    ``where``: says what a position in the text is counted from.
    """
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        loc = first["loc"]
        if first["type"] == "json_invalid":
            message += where
        if items is not None:
            loc = (items, number + int(loc[0]), *loc[1:]) if loc else (items,)
        parts = [part for part in loc if part != ""]  # an empty part is the tag of a union
        if isinstance(unknown := first.get("ctx", {}).get("error"), UnknownField):
            message = "is unknown; remove it" if unknown.remedy is None else f"is gone; {unknown.remedy}"
            parts = [*parts, str(unknown)[:MAX_NAME_CHARS]]
        field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")
        raise InvalidRequest(field or "body", message) from None  # the cause would keep the whole body


def _check_at_once(text: bytes, *spans: tuple[int, int]) -> None:
    """Raise ``TooLarge`` for parts of a text that take too long to parse at once."""
    if sum(end - start for start, end in spans) <= MAX_PARTS_AT_ONCE:
        return  # most prompts are: each part has a byte
    if _parts(text, MAX_PARTS_AT_ONCE, *spans) > MAX_PARTS_AT_ONCE:
        most = f"{MAX_PARTS_AT_ONCE} strings, arrays and objects"
    elif _values(text, *spans) > MAX_VALUES_AT_ONCE:
        most = f"{MAX_VALUES_AT_ONCE} numbers"
    elif _unquoted(text, *spans) > MAX_UNQUOTED_AT_ONCE:
        most = f"{MAX_UNQUOTED_AT_ONCE} bytes outside strings"
    else:
        return
    raise TooLarge(
        "body",
        f"must have at most {most} in one prompt or reward, or in all fields beside a list of these alone; send less",
    )


def _parts(text: bytes, most: int, *spans: tuple[int, int]) -> int:
    """Count strings, arrays and objects, up to one more than ``most``.

    What stands in strings counts, too, if there are no more with it.
    """
    upper = sum(
        _count(text, b'"', *span) // 2 + _count(text, b"[", *span) + _count(text, b"{", *span) for span in spans
    )
    if upper <= most:
        return upper  # not the exact number, which does not include what stands in strings
    parts = (at for span in spans for at, _ in strings_and_brackets(text, *span) if text[at] not in b"]}")
    return sum(1 for _ in islice(parts, most + 1))


def _values(text: bytes, *spans: tuple[int, int]) -> int:
    """Count commas. Those in strings count, too, if there are few enough with them."""
    everywhere = sum(_count(text, b",", *span) for span in spans)
    if everywhere <= MAX_VALUES_AT_ONCE:
        return everywhere
    return sum(_count(text, b",", *between) for span in spans for between in _between_strings(text, *span))


def _unquoted(text: bytes, *spans: tuple[int, int]) -> int:
    """Count the bytes outside strings and brackets. Those in strings count, too, if there are few enough with them."""
    everywhere = sum(end - start for start, end in spans)
    if everywhere <= MAX_UNQUOTED_AT_ONCE:
        return everywhere
    return sum(end - start for span in spans for start, end in _between_strings(text, *span))


def _between_strings(text: bytes, begin: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of what stands between strings and brackets."""
    for start, end in strings_and_brackets(text, begin, stop):
        yield begin, start
        begin = end
    yield begin, stop


def has_long_number(text: bytes) -> bool:
    """Whether a number in a JSON text has more than `MAX_DIGITS` digits in a row."""
    if not _has_long_run(text, 0, len(text)):
        return False
    return any(_has_long_run(text, *between) for between in _between_strings(text, 0, len(text)))  # not in a string


def _has_long_run(text: bytes, start: int, end: int) -> bool:
    """Whether a part of a text has more than `MAX_DIGITS` digits in a row.

    Such a row contains a whole step of half that length, wherever it begins.
    """
    step = MAX_DIGITS // 2
    for at in range(start, end - step + 1, step):
        if text[at : at + step].isdigit():
            before, after = text[max(start, at - MAX_DIGITS) : at], text[at : min(end, at + MAX_DIGITS + 1)]
            if len(before) - len(before.rstrip(DIGITS)) + len(after) - len(after.lstrip(DIGITS)) > MAX_DIGITS:
                return True
    return False


def _count(text: bytes, part: bytes, start: int = 0, end: int | None = None) -> int:
    """Count a byte, in steps between which the event loop is served."""
    stop = len(text) if end is None else end
    return sum(text.count(part, at, min(at + COUNTED_BYTES, stop)) for at in range(start, stop, COUNTED_BYTES))


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
