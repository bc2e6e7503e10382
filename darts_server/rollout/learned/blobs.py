"""Blobs of any size in the store, whose documents are small.

A blob is split into parts, one document each, and a manifest, the document that lists them. A key has two slots: a new
blob is written to the slot that the manifest does not name, and the manifest after it. So every reader finds one blob
or the other complete, also after a process was killed while it saved.
"""

import hashlib
import logging
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass

from darts_server.rollout.learned.documents import DocumentStore

logger = logging.getLogger(__name__)

PART_BYTES = 48_000
"""64,000 bytes as base64, within the limit of a document."""


@dataclass(frozen=True, slots=True)
class Blob:
    """``numbers``: saved together with the bytes."""

    data: bytes
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Manifest:
    slot: int
    parts: int
    digest: str
    numbers: Mapping[str, int]


class BlobStore:
    """Blobs of one kind. Only one thread at a time may save a key."""

    def __init__(self, documents: DocumentStore, kind: str) -> None:
        self._documents = documents
        self._kind = kind

    def digest(self, key: str) -> str | None:
        """Return the SHA-256 of the key's blob; ``None`` if there is none that can be read.

        Raises:
            StateError: nothing can be read at present.
        """
        manifest = self._manifest(key)
        return None if manifest is None else manifest.digest

    def load(self, key: str) -> Blob | None:
        """Return the key's blob; ``None`` if there is none that is complete.

        Raises:
            StateError: nothing can be read at present.
        """
        manifest = self._manifest(key)
        if manifest is None:
            return None
        parts = [
            self._documents.get(f"{self._kind}_part", _part_key(key, manifest.slot, i)) for i in range(manifest.parts)
        ]
        try:
            data = b"".join(b64decode(str((part or {})["data"]), validate=True) for part in parts)
        except (KeyError, ValueError):
            data = b""
        if hashlib.sha256(data).hexdigest() != manifest.digest:
            logger.warning("the learned %s %s is incomplete, and is learned again", self._kind, key)
            return None
        return Blob(data, manifest.numbers)

    def save(self, key: str, data: bytes, numbers: Mapping[str, int]) -> str:
        """Save a blob in place of the key's previous one. Returns its digest.

        Raises:
            StateError: the previous one is still there.
        """
        previous = self._manifest(key)
        slot = 0 if previous is None else 1 - previous.slot
        parts = range(0, len(data), PART_BYTES)
        for i, begin in enumerate(parts):
            text = b64encode(data[begin : begin + PART_BYTES]).decode()
            self._documents.put(f"{self._kind}_part", _part_key(key, slot, i), {"data": text})
        digest = hashlib.sha256(data).hexdigest()
        # The store's field is "side": it is in state files and archives.
        self._documents.put(self._kind, key, {"side": slot, "parts": len(parts), "digest": digest, **numbers})
        for i in range(0 if previous is None else previous.parts):  # the store cannot delete: empty the old parts
            self._documents.put(f"{self._kind}_part", _part_key(key, 1 - slot, i), {"data": ""})
        return digest

    def _manifest(self, key: str) -> _Manifest | None:
        document = self._documents.get(self._kind, key)
        if document is None:
            return None
        match document:
            case {"side": int(slot), "parts": int(parts), "digest": str(digest), **numbers} if slot in (0, 1):
                return _Manifest(slot, parts, digest, {name: x for name, x in numbers.items() if isinstance(x, int)})
        logger.warning("the learned %s %s cannot be read, and is learned again", self._kind, key)
        return None


def _part_key(key: str, slot: int, number: int) -> str:
    return f"{key}/{slot}/{number:05d}"
