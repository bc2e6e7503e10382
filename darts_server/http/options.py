"""Read a request's options from our headers, the model alias and ``vllm_xargs``."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from darts_server.exceptions import InvalidRequest
from darts_server.identifiers import RULE, is_name
from darts_server.types import MAX_GROUP_SIZE, RequestOptions

_MEANINGS = {
    "policy": "the name of a policy",
    "prompt_key": "a key of the caller's choice for the prompt",
    "group_id": "an id of the caller's choice for the group, without ';'",
    "session": "an id of the caller's choice for the trajectory",
}
ON_STOP = ("answer", "fail")
PREFIX = "x-darts-"
GROUP = "x-darts-group"
HEADERS = {
    "x-darts-policy": "policy",
    "x-darts-prompt-key": "prompt_key",
    GROUP: "group_id",
    "x-darts-session": "session",
    "x-darts-on-stop": "on_stop",
}
"""`GROUP` may have the group's size too."""
GROUP_PARTS = {"id": "group_id", "size": "group_size"}
XARG_PREFIX = "darts_"
OTHER_PLACES = {
    "policy": "header X-Darts-Policy or the model name",
    "prompt_key": "header X-Darts-Prompt-Key",
    "group_id": "header X-Darts-Group",
    "group_size": "header X-Darts-Group",
    "session": "header X-Darts-Session",
    "on_stop": "header X-Darts-On-Stop",
}
"""Place of each option outside ``vllm_xargs``, for errors."""


def read_options(headers: Mapping[str, str]) -> RequestOptions:
    """Parse our headers, or raise `InvalidRequest` for an unknown, empty, malformed or contradictory header."""
    our_headers: dict[str, str] = {}
    for sent_name, value in headers.items():
        name = sent_name.lower()
        if not name.startswith(PREFIX):
            continue
        # An unknown header is refused, because a misspelt header must not silently shape an evaluation.
        if name not in HEADERS:
            raise InvalidRequest(name, f"unknown header; supported headers are {', '.join(HEADERS)}")
        # HTTP servers decode a value as Latin-1, but most clients send UTF-8. A value that is no UTF-8 stays as it is.
        with suppress(UnicodeError):
            value = value.encode("latin-1").decode()
        value = value.strip()
        if our_headers.setdefault(name, value) != value:
            raise InvalidRequest(name, f"repeated with the values {our_headers[name]!r} and {value!r}; send it once")

    options: dict[str, Any] = {}
    for name, value in our_headers.items():
        if name == GROUP:
            options |= _parse_group_header(value)
        else:
            options[HEADERS[name]] = validate_option(HEADERS[name], value, name)
    return RequestOptions(**options)


def _parse_group_header(value: str) -> dict[str, str | int]:
    options: dict[str, str | int] = {}
    # The header reads "id=NAME;size=8", or has one of the two parts.
    for part in value.split(";"):
        name, equals, text = part.partition("=")
        option = GROUP_PARTS.get(name.strip().lower())
        if option is None or not equals or option in options:
            raise InvalidRequest(GROUP, f"write id=STRING;size=INT, or one of the two parts, not {value!r}")
        options[option] = validate_option(option, text.strip(), GROUP)
    return options


def merge_options(options: RequestOptions, extra_args: Mapping[str, Any]) -> RequestOptions:
    """Merge the options of headers and the model alias with ``vllm_xargs``, or raise `InvalidRequest`."""
    merged: dict[str, Any] = {}
    for name, value in extra_args.items():
        if not name.startswith(XARG_PREFIX):
            continue
        where = f"vllm_xargs.{name}"
        option = name.removeprefix(XARG_PREFIX)
        if option not in OTHER_PLACES:
            supported = ", ".join(XARG_PREFIX + option for option in OTHER_PLACES)
            raise InvalidRequest(where, f"unknown option; supported options are {supported}")

        valid_value = validate_option(option, value, where)
        value_elsewhere = getattr(options, option)
        if value_elsewhere not in (None, valid_value):
            place = OTHER_PLACES[option]
            raise InvalidRequest(
                where, f"{valid_value!r} contradicts {value_elsewhere!r} of the {place}; send it in one place"
            )
        merged[option] = valid_value
    return replace(options, **merged)


def validate_option(option: str, value: object, where: str) -> str | int:
    """Return the valid value. A size may be a string or a float. ``where`` names the place in `InvalidRequest`."""
    if option == "group_size":
        size = _parse_whole_number(value)
        if size is not None and 1 <= size <= MAX_GROUP_SIZE:
            return size
        wanted = f"the group's size, a whole number from 1 to {MAX_GROUP_SIZE}"
    elif option == "on_stop":
        if value in ON_STOP:
            return str(value)
        wanted = f"one of {', '.join(ON_STOP)}"
    else:
        # In the header of a group, ";" ends the id.
        if isinstance(value, str) and is_name(value) and (option != "group_id" or ";" not in value):
            return value
        wanted = f"{_MEANINGS[option]}, {RULE}"
    raise InvalidRequest(where, f"must be {wanted}, got {shortened(value)}; correct or omit it")


def _parse_whole_number(value: object) -> int | None:
    # Numbers with more digits exceed every size.
    if isinstance(value, str) and re.fullmatch("[0-9]{1,5}", value):
        return int(value)
    # Some clients have only floats, and send 8.0.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None
