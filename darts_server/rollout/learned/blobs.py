"""Bytes of any number in the store, whose documents are small.

A blob is cut into parts, one document each, and one more document, its entry, says which parts make it. New parts lie
beside those of the blob before, and the entry is put after them: whoever reads, and whenever a process is killed, finds
one blob or the other, whole.
"""

import hashlib
import logging
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.rollout.learned.documents import DocumentStore

logger = logging.getLogger(__name__)

PART_BYTES = 48_000
"""As base64 they take 64,000 bytes, which is within what a document may have."""


@dataclass(frozen=True, slots=True)
class Blob:
    """``numbers``: what was saved with the bytes."""

    data: bytes
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Entry:
    side: int
    parts: int
    digest: str
    numbers: Mapping[str, int]


class BlobStore:
    """BlobStore of one kind. One thread at a time may save a key."""

    def __init__(self, documents: DocumentStore, kind: str) -> None:
        self._documents = documents
        self._kind = kind

    def digest(self, key: str) -> str | None:
        """What tells one blob of that key from another; ``None`` if there is none, or one that cannot be read.

        Raises:
            StateError: nothing can be read at present.
        """
        entry = self._entry(key)
        return None if entry is None else entry.digest

    def load(self, key: str) -> Blob | None:
        """The blob; ``None`` if there is none, or one that is not whole.

        Raises:
            StateError: nothing can be read at present.
        """
        entry = self._entry(key)
        if entry is None:
            return None
        parts = [self._documents.get(f"{self._kind}_part", _part(key, entry.side, i)) for i in range(entry.parts)]
        try:
            data = b"".join(b64decode(str((part or {})["data"]), validate=True) for part in parts)
        except (KeyError, ValueError):
            data = b""
        if hashlib.sha256(data).hexdigest() != entry.digest:
            logger.warning("what was learned as %s %s is not whole; it is learned anew", self._kind, key)
            return None
        return Blob(data, entry.numbers)

    def save(self, key: str, data: bytes, numbers: Mapping[str, int]) -> str:
        """Put the blob in place of the one of that key; its digest.

        Raises:
            StateError: the one before is still there.
        """
        before = self._entry(key)
        side = 0 if before is None else 1 - before.side
        parts = range(0, len(data), PART_BYTES)
        for i, begin in enumerate(parts):
            text = b64encode(data[begin : begin + PART_BYTES]).decode()
            self._documents.put(f"{self._kind}_part", _part(key, side, i), {"data": text})
        digest = hashlib.sha256(data).hexdigest()
        self._documents.put(self._kind, key, {"side": side, "parts": len(parts), "digest": digest, **numbers})
        for i in range(0 if before is None else before.parts):  # nobody needs them any more
            self._documents.put(f"{self._kind}_part", _part(key, 1 - side, i), {"data": ""})
        return digest

    def _entry(self, key: str) -> _Entry | None:
        document = self._documents.get(self._kind, key)
        if document is None:
            return None
        match document:
            case {"side": int(side), "parts": int(parts), "digest": str(digest), **numbers} if side in (0, 1):
                return _Entry(side, parts, digest, {name: x for name, x in numbers.items() if isinstance(x, int)})
        logger.warning("what was learned as %s %s cannot be read; it is learned anew", self._kind, key)
        return None


def _part(key: str, side: int, number: int) -> str:
    return f"{key}/{side}/{number:05d}"
