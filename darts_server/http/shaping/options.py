"""What may stand in a caller's options, whether they come in headers or in the body."""

import re
from reprlib import repr as shortened

from darts_server.exceptions import InvalidRequest

NAME_CHARS = 256
"""Enough for a path or a hash; some thousand names in memory stay small."""
LARGEST_GROUP = 16384
"""What ``--max-group-size`` takes at most."""
_NAMES = {
    "policy": "the name of a policy",
    "prompt_key": "a key of the caller's choice for the prompt",
    "group_id": "an id of the caller's choice for the group, without ';'",
}


def checked_option(option: str, value: object, where: str) -> str | int:
    """The value of one of the ``RequestOptions``, wherever a caller wrote it. A size may be text or a float.

    Raises:
        InvalidRequest: names ``where`` (header or argument) and what may stand there.
    """
    if option == "group_size":
        size = _whole(value)
        if size is not None and 1 <= size <= LARGEST_GROUP:
            return size
        wanted = f"the group's size, a whole number from 1 to {LARGEST_GROUP}"
    else:
        if isinstance(value, str) and _is_name(value) and (option != "group_id" or ";" not in value):
            return value
        wanted = f"{_NAMES[option]}, 1 to {NAME_CHARS} printable characters"
    raise InvalidRequest(where, f"must be {wanted}, got {shortened(value)}; send that, or leave it out")


def _is_name(text: str) -> bool:
    return 1 <= len(text) <= NAME_CHARS and text.isprintable() and not text.isspace()


def _whole(value: object) -> int | None:
    if isinstance(value, str) and re.fullmatch("[0-9]{1,5}", value):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
