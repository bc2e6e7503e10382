"""One stored document: a flat JSON object, named by its kind and key."""

import json
import re
import zlib
from collections.abc import Mapping

from darts_server.exceptions import InvalidRequest, StateDamaged

Scalar = str | int | float | bool | None
Document = Mapping[str, Scalar]
Name = tuple[str, str]
"""Kind and key."""
Row = tuple[str, str, str]
"""Kind, key and the document's JSON text."""

KEY_BYTES = 64 * 1024
"""In UTF-8. A whole prompt may be its own key; callers hash what is larger."""
DOCUMENT_BYTES = 64 * 1024
"""In UTF-8. Statistics take some hundred. With the key's limit every row is within SQLite's own."""
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")


def check_name(kind: str, key: str) -> Name:
    """Check that kind and key can be stored, and return both.

    Raises:
        ValueError: ``kind`` is not a short lower-case identifier.
        InvalidRequest: ``key``, which callers choose, is not Unicode text of at most ``KEY_BYTES``.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"a kind is a lower-case identifier of at most 64 characters, not {kind!r}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{kind} key", "is not well-formed Unicode (it has a lone surrogate)") from None
    if size > KEY_BYTES:
        raise InvalidRequest(f"{kind} key", f"has {size} bytes, and {KEY_BYTES} are the most; send a hash of it")
    return kind, key


def encode(document: Document) -> str:
    """Encode a document as compact JSON.

    Raises:
        TypeError: it is not flat: a name is no string, or a value no JSON scalar.
        ValueError: a number is not finite, a string is not well-formed Unicode, or it has more than ``DOCUMENT_BYTES``.
    """
    for name, value in document.items():
        if not isinstance(name, str) or not isinstance(value, Scalar):
            raise TypeError(f"a document holds JSON scalars by name, not {value!r} as {name!r}")
    text = json.dumps(dict(document), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    if len(text.encode()) > DOCUMENT_BYTES:
        raise ValueError(f"a document has at most {DOCUMENT_BYTES} bytes of JSON")
    return text


def decode(text: str) -> dict[str, Scalar]:
    """Decode a JSON text that ``encode`` made.

    Raises:
        StateDamaged: ``encode`` did not make it.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise StateDamaged(f"the state holds {text[:40]!r} where a JSON object should be")
    return document


def checksum(kind: str, key: str, text: str) -> int:
    """CRC-32 of a row. SQLite checks the structure of its pages, but not their content."""
    return zlib.crc32(f"{kind}\0{key}\0{text}".encode())
