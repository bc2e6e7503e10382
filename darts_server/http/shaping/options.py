"""Options of shaping in a request: from headers, from the model alias and from ``vllm_xargs``."""

import re
from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from darts_server.exceptions import InvalidRequest
from darts_server.identifiers import RULE, is_name
from darts_server.types import RequestOptions

MAX_GROUP_SIZE = 16384
"""The maximum of ``--max-group-size``."""
_NAMES = {
    "policy": "the name of a policy",
    "prompt_key": "a key of the caller's choice for the prompt",
    "group_id": "an id of the caller's choice for the group, without ';'",
    "session": "an id of the caller's choice for the trajectory",
}
ON_STOP = ("answer", "fail")
XARG_PREFIX = "darts_"
HEADERS = {
    "policy": "header X-Darts-Policy or the model name",
    "prompt_key": "header X-Darts-Prompt-Key",
    "group_id": "header X-Darts-Group",
    "group_size": "header X-Darts-Group",
    "session": "header X-Darts-Session",
    "on_stop": "header X-Darts-On-Stop",
}
"""Alternatives to ``vllm_xargs`` for each option."""


def merge_options(options: RequestOptions, extra_args: Mapping[str, Any]) -> RequestOptions:
    """Merge options from header and model alias with those in ``vllm_xargs``.

    Raises:
        InvalidRequest: an unknown ``darts_`` argument, an impossible value, or two places that contradict each other.
    """
    merged: dict[str, Any] = {}
    for name, value in extra_args.items():
        if not name.startswith(XARG_PREFIX):
            continue
        where, option = f"vllm_xargs.{name}", name.removeprefix(XARG_PREFIX)
        if option not in HEADERS:
            raise InvalidRequest(
                where, f"unknown option; supported options are {', '.join(XARG_PREFIX + o for o in HEADERS)}"
            )
        merged[option] = checked_option(option, value, where)
        if (other := getattr(options, option)) not in (None, merged[option]):
            raise InvalidRequest(
                where, f"{merged[option]!r} contradicts {other!r} of the {HEADERS[option]}; send it in one place"
            )
    return replace(options, **merged)


def checked_option(option: str, value: object, where: str) -> str | int:
    """Validate the value of one of the `RequestOptions`. A size may be text or a float.

    Raises:
        InvalidRequest: names ``where`` (header or argument) and the allowed values.
    """
    if option == "group_size":
        size = _whole(value)
        if size is not None and 1 <= size <= MAX_GROUP_SIZE:
            return size
        wanted = f"the group's size, a whole number from 1 to {MAX_GROUP_SIZE}"
    elif option == "on_stop":
        if value in ON_STOP:
            return str(value)
        wanted = f"one of {', '.join(ON_STOP)}"
    else:
        if isinstance(value, str) and is_name(value) and (option != "group_id" or ";" not in value):
            return value
        wanted = f"{_NAMES[option]}, {RULE}"
    raise InvalidRequest(where, f"must be {wanted}, got {shortened(value)}; correct or omit it")


def _whole(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,5}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
