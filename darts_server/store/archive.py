"""Packs everything learned into one file: a line of ASCII, then gzip'd JSON lines.

The first line is ``darts-state VERSION SHA256``, the SHA-256 (hex) of all bytes after it. Each JSON line is
``[kind, key, document]``, in ascending order of kind and key (by code point).

It is text and not an image of the database, so it does not depend on SQLite's pages and can be read with
``tail -n +2 FILE | zcat``; and what is uploaded is parsed as JSON, never by a database engine or as a pickle.
"""

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator

from darts_server.exceptions import StateDamaged, StateTooNew
from darts_server.store.document import DOCUMENT_BYTES, KEY_BYTES, Row, check_name, encode

VERSION = 1
LIMIT_BYTES = 1024 * 1024 * 1024
"""Of JSON lines: some million prompts. A gzip bomb would decompress to a thousand times its own size."""
_FIRST_LINE = re.compile(rb"darts-state ([1-9][0-9]{0,8}) ([0-9a-f]{64})\n")
_LINE_BYTES = 6 * (KEY_BYTES + DOCUMENT_BYTES) + 100  # JSON may write a byte as \u00XX
_LEVEL = 3  # higher levels hardly compress digits better


def pack(rows: Iterable[Row]) -> bytes:
    """Pack rows, ordered by kind and key, into one file. The same rows give the same bytes."""
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits=31)
    packed = [compressor.compress(_line(row)) for row in rows]
    packed.append(compressor.flush())
    body = b"".join(packed)
    return b"darts-state %d %s\n" % (VERSION, hashlib.sha256(body).hexdigest().encode()) + body


def _line(row: Row) -> bytes:
    kind, key, text = row
    return f"[{json.dumps(kind)},{json.dumps(key, ensure_ascii=False)},{text}]\n".encode()


def unpack(data: bytes, limit: int) -> Iterator[Row]:
    """Yield the rows of a file that ``pack`` made. ``limit``: bytes of JSON lines.

    Raises:
        StateDamaged: the file is in another format, incomplete, or too large. Perhaps only after some rows.
        StateTooNew: a newer version made it.
    """
    first = _FIRST_LINE.match(data)
    if not first:
        raise _damaged("is not a saved state")
    if int(first[1]) > VERSION:
        raise StateTooNew(
            f"the state given was saved by a newer darts-server (format {int(first[1])}, this one reads {VERSION}); "
            "nothing was changed. Upgrade this server"
        )
    if hashlib.sha256(memoryview(data)[first.end() :]).hexdigest().encode() != first[2]:
        raise _damaged("is incomplete or was changed: its checksum is wrong")
    file = io.BytesIO(data)
    file.seek(first.end())
    previous: tuple[str, str] | None = None
    for line in _lines(file, limit):
        row = _row(line)
        if previous is not None and row[:2] <= previous:
            raise _damaged(f"has {row[0]} {row[1][:64]!r} twice or out of order")
        previous = row[:2]
        yield row


def _lines(file: io.BytesIO, limit: int) -> Iterator[bytes]:
    size = 0
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as lines:
            while line := lines.readline(_LINE_BYTES):
                size += len(line)
                if size > limit:
                    raise _damaged(f"has more than {limit} bytes when decompressed")
                if not line.endswith(b"\n"):
                    raise _damaged("has a line that is too long or cut off")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(f"cannot be decompressed ({error})") from error


def _row(line: bytes) -> Row:
    try:
        kind, key, document = json.loads(line)
        return *check_name(kind, key), encode(document)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(f"has a line that is no document ({error})") from error


def _damaged(what: str) -> StateDamaged:
    return StateDamaged(f"the state given {what}; nothing was changed. Send a saved file, byte for byte")
