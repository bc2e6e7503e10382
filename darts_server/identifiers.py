"""Identifiers that callers choose, such as request ids and prompt keys.

They appear in headers, log lines, JSON and paths. So they have no control characters, no line breaks, and no lone
surrogates, which JSON encoders refuse.
"""

from typing import Annotated
from urllib.parse import quote, unquote

from pydantic import AfterValidator, Field

from darts_server.exceptions import InvalidRequest

NAME_CHARS = 256
"""Enough for a path or a hash, and few enough for thousands of identifiers in memory."""
REQUEST_ID_CHARS = NAME_CHARS + 64
"""vLLM adds the route's name and the prompt's number to a request's id, and a random id to a beam's id."""
RULE = f"1 to {NAME_CHARS} printable characters"
UNENCODED = ":@+=,"
"""Characters that need no encoding, beside letters, digits and ``-._~``."""
SESSION_HEADERS = ("x-session-id", "x-smg-routing-key", "x-dynamo-session-id", "x-session-affinity")
"""Headers with a trajectory's name, for vLLM, routers in front of vLLM, NVIDIA Dynamo and Fireworks."""
LORA_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""Names of LoRA adapters are metric labels, and model names in requests."""


def is_name(text: str, max_chars: int = NAME_CHARS) -> bool:
    return 1 <= len(text) <= max_chars and text.isprintable() and not text.isspace()


def check_name(field: str, text: str, max_chars: int = NAME_CHARS) -> None:
    # An empty text means that the caller has sent no name.
    if text and not is_name(text, max_chars):
        raise InvalidRequest(field, f"must be {RULE}; shorten it, and omit line breaks and control characters")


def replace_unprintable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def encode_for_header(identifier: str) -> str:
    """Percent-encode an identifier for a header or a path."""
    return quote(identifier, safe=UNENCODED)


def decode_from_header(value: str) -> str:
    return unquote(value)


def _validate_name(text: str) -> str:
    if not is_name(text):
        raise ValueError(f"must be {RULE}")
    return text


Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARS), AfterValidator(_validate_name)]
