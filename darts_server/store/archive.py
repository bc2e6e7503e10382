"""Documents as text: each one as a flat JSON object, and all of them packed into one file.

A packed file is a line of ASCII, then gzip'd JSON lines. The first line is ``darts-state VERSION SHA256``, the SHA-256
(hex) of all bytes after it. Each JSON line is ``[kind, key, document]``, in ascending order of kind and key (by code
point).

It is text and not an image of the database, so it does not depend on SQLite's pages and can be read with
``tail -n +2 FILE | zcat``; and what is uploaded is parsed as JSON, never by a database engine or as a pickle.
"""

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping

from darts_server.exceptions import InvalidRequest, StateDamaged, StateTooNew

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
VERSION = 1
LIMIT_BYTES = 1024 * 1024 * 1024
"""Of JSON lines: some million prompts. A gzip bomb would decompress to a thousand times its own size."""
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FIRST_LINE = re.compile(rb"darts-state ([1-9][0-9]{0,8}) ([0-9a-f]{64})\n")
_LINE_BYTES = 6 * (KEY_BYTES + DOCUMENT_BYTES) + 100  # JSON may write a byte as \u00XX
_LEVEL = 3  # higher levels hardly compress digits better


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


def pack(rows: Iterable[Row]) -> bytes:
    """Pack rows, ordered by kind and key, into one file. The same rows give the same bytes."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits=31)
    packed = [
        compressor.compress(f"[{json.dumps(kind)},{json.dumps(key, ensure_ascii=False)},{text}]\n".encode())
        for kind, key, text in rows
    ]
    body = b"".join([*packed, compressor.flush()])
    return b"darts-state %d %s\n" % (VERSION, hashlib.sha256(body).hexdigest().encode()) + body


def unpack(data: bytes, limit: int) -> Iterator[Row]:
    """Yield the rows of a file that ``pack`` made. ``limit``: bytes of JSON lines.

    Raises:
        StateDamaged: the file is in another format, incomplete, or too large. Perhaps only after some rows.
        StateTooNew: a newer version made it.
    """
    first = _FIRST_LINE.match(data)
    if not first:
        raise damaged("is not a saved state")
    if int(first[1]) > VERSION:
        raise StateTooNew(
            f"the state given was saved by a newer darts-server (format {int(first[1])}, this one reads {VERSION}); "
            "nothing was changed. Upgrade this server"
        )
    if hashlib.sha256(memoryview(data)[first.end() :]).hexdigest().encode() != first[2]:
        raise damaged("is incomplete or was changed: its checksum is wrong")
    file = io.BytesIO(data)
    file.seek(first.end())
    size = 0
    previous: Name | None = None
    lines = gzip.GzipFile(fileobj=file, mode="rb")
    while True:
        try:
            line = lines.readline(_LINE_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(f"cannot be decompressed ({error})") from error
        if not line:
            return
        size += len(line)
        if size > limit:
            raise damaged(f"has more than {limit} bytes when decompressed")
        if not line.endswith(b"\n"):
            raise damaged("has a line that is too long or cut off")
        try:
            kind, key, document = json.loads(line)
            row = (*check_name(kind, key), encode(document))
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(f"has a line that is no document ({error})") from error
        if previous is not None and row[:2] <= previous:
            raise damaged(f"has {kind} {key[:64]!r} twice or out of order")
        previous = row[:2]
        yield row


def damaged(what: str) -> StateDamaged:
    """Return the error for a file that is not restored. ``what``: is wrong with it."""
    return StateDamaged(f"the state given {what}; nothing was changed. Send a saved file, byte for byte")
