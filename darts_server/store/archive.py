"""Text format of documents: each is a flat JSON object, and all of them are packed into one file.

The first line of a packed file is ``darts-state VERSION SHA256``, with the SHA-256 (hex) of all bytes after the line.
Then come gzipped JSON lines ``[kind, key, document]``, in ascending order of kind and key (by code point).

The file does not depend on SQLite's pages, and ``tail -n +2 FILE | zcat`` shows its content. An uploaded file is parsed
as JSON, and never opened as a database or a pickle.
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
Row = tuple[str, str, str]
"""Kind, key and the document's JSON text."""

KEY_BYTES = 64 * 1024
"""Maximum size of a key in UTF-8. A whole prompt may be its own key."""
DOCUMENT_BYTES = 64 * 1024
"""Maximum size of a document in UTF-8. Statistics take some hundred bytes. With its key, it is below SQLite's limit."""
VERSION = 1
LIMIT_BYTES = 1024 * 1024 * 1024
"""Maximum size of all JSON lines: some million prompts. A gzip bomb has a thousand times its own size."""
_KIND = re.compile(r"[a-z][a-z0-9_]{0,63}")
_FIRST_LINE = re.compile(rb"darts-state ([1-9][0-9]{0,8}) ([0-9a-f]{64})\n")
# JSON may write one byte as six: \u00XX.
_LINE_BYTES = 6 * (KEY_BYTES + DOCUMENT_BYTES) + 100
# Higher levels hardly compress digits better.
_LEVEL = 3


def check_kind_and_key(kind: str, key: str) -> None:
    """Check that kind and key can be stored.

    Raises:
        ValueError: the kind is not a short lower-case identifier.
        InvalidRequest: the key, which callers choose, is too long or no well-formed Unicode.
    """
    if not _KIND.fullmatch(kind):
        raise ValueError(f"a kind is a lower-case identifier of at most 64 characters, not {kind!r}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(f"{kind} key", "is not well-formed Unicode (it has a lone surrogate)") from None
    if size > KEY_BYTES:
        raise InvalidRequest(f"{kind} key", f"has {size} bytes, and the limit is {KEY_BYTES}; send a hash of it")


def encode(document: Document) -> str:
    """Encode a document as compact JSON.

    Raises:
        TypeError: a name is no string, or a value is no JSON scalar.
        ValueError: a number is not finite, a string is not well-formed Unicode, or the document is too large.
    """
    for name, value in document.items():
        if not isinstance(name, str) or not isinstance(value, Scalar):
            raise TypeError(f"a document has JSON scalars by name, not {value!r} as {name!r}")
    text = json.dumps(
        dict(document),
        ensure_ascii=False,
        allow_nan=False,
        separators=(",", ":"),
    )
    if len(text.encode()) > DOCUMENT_BYTES:
        raise ValueError(f"a document has at most {DOCUMENT_BYTES} bytes of JSON")
    return text


def pack(rows: Iterable[Row]) -> bytes:
    """Pack rows in their order. The same rows give the same bytes."""
    # ``wbits=31`` is gzip's format, without the time that `gzip` would write.
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits=31)
    parts = []
    for kind, key, text in rows:
        line = f"[{json.dumps(kind)},{json.dumps(key, ensure_ascii=False)},{text}]\n"
        parts.append(compressor.compress(line.encode()))
    parts.append(compressor.flush())
    body = b"".join(parts)
    return b"darts-state %d %s\n" % (VERSION, hashlib.sha256(body).hexdigest().encode()) + body


def unpack(data: bytes, limit: int) -> Iterator[Row]:
    """Yield the rows of a file that ``pack`` made. ``limit``: maximum size of the JSON lines in bytes.

    Raises:
        StateDamaged: the file is in another format, incomplete or too large. May be raised after some rows.
        StateTooNew: a newer version made the file.
    """
    first_line = _FIRST_LINE.match(data)
    if not first_line:
        raise damaged_error("is not a saved state")
    version = int(first_line[1])
    if version > VERSION:
        raise StateTooNew(
            f"the state given was saved by a newer darts-server (format {version}, this one reads {VERSION}); "
            "nothing was changed. Upgrade this server"
        )
    body = memoryview(data)[first_line.end() :]
    if hashlib.sha256(body).hexdigest().encode() != first_line[2]:
        raise damaged_error("is incomplete or was changed: its checksum is wrong")

    file = io.BytesIO(data)
    file.seek(first_line.end())
    lines = gzip.GzipFile(fileobj=file, mode="rb")
    unpacked_bytes = 0
    previous: tuple[str, str] | None = None
    while True:
        try:
            line = lines.readline(_LINE_BYTES)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged_error(f"cannot be decompressed ({error})") from error
        if not line:
            return
        unpacked_bytes += len(line)
        if unpacked_bytes > limit:
            raise damaged_error(f"has more than {limit} bytes when decompressed")
        if not line.endswith(b"\n"):
            raise damaged_error("has a line that is too long or cut off")

        try:
            kind, key, document = json.loads(line)
            check_kind_and_key(kind, key)
            # Encoding checks the document, too.
            text = encode(document)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise damaged_error(f"has a line that is no document ({error})") from error
        # Rows in ascending order cannot repeat a key.
        if previous is not None and (kind, key) <= previous:
            raise damaged_error(f"has {kind} {key[:64]!r} twice or out of order")
        previous = (kind, key)
        yield kind, key, text


def damaged_error(problem: str) -> StateDamaged:
    return StateDamaged(f"the state given {problem}; nothing was changed. Send a saved file, byte for byte")
