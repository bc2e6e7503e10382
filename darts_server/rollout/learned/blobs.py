"""Blobs of any size in the store, whose documents are small.

A blob is split into parts, one document each, and a manifest, the document that lists them. A key has two slots: a new
blob is written to the slot that the manifest does not name, and the manifest after it. So every reader finds one blob
or the other complete, also after a process was killed while it saved.
"""

import hashlib
import logging
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from darts_server.policy.checks import check_count
from darts_server.rollout.learned.documents import Document, DocumentStore, UnusableLog, parse_document

logger = logging.getLogger(__name__)

PART_SUFFIX = "_part"
PART_BYTES = 48_000
"""64,000 bytes as base64, within the limit of a document."""
MAX_PARTS = (1 << 26) // PART_BYTES
"""64 MiB: several times the largest quality head."""


@dataclass(frozen=True, slots=True)
class Blob:
    """``numbers``: saved together with the bytes."""

    data: bytes
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a blob's manifest says. ``slot``: where its parts are."""

    slot: int
    parts: int
    digest: str
    numbers: Mapping[str, int]


class BlobStore:
    """Blobs of one kind. Only one thread at a time may save a key."""

    def __init__(self, documents: DocumentStore, kind: str) -> None:
        self._documents = documents
        self._kind = kind
        self._unusable = UnusableLog(kind)

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
        try:
            data = b"".join(
                b64decode(str(part["data"]), validate=True) for part in self._parts(key, manifest.slot, manifest.parts)
            )
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
            self._documents.put(self._kind + PART_SUFFIX, _part_key(key, slot, i), {"data": text})
        digest = hashlib.sha256(data).hexdigest()
        # The store's field is "side": it is in state files and archives.
        self._documents.put(self._kind, key, {"side": slot, "parts": len(parts), "digest": digest, **numbers})
        if previous is not None:  # the store cannot delete: empty the old parts
            for i, _ in enumerate(self._parts(key, 1 - slot, previous.parts)):
                self._documents.put(self._kind + PART_SUFFIX, _part_key(key, 1 - slot, i), {"data": ""})
        return digest

    def _parts(self, key: str, slot: int, count: int) -> Iterator[Document]:
        """Yield the parts of a slot in order, up to the first that is missing."""
        for i in range(count):
            part = self._documents.get(self._kind + PART_SUFFIX, _part_key(key, slot, i))
            if part is None:
                return
            yield part

    def _manifest(self, key: str) -> Manifest | None:
        document = self._documents.get(self._kind, key)
        if document is None:
            return None
        try:
            return parse_document(document, parse_manifest)
        except ValueError as error:
            self._unusable.add(key, error)
            return None


def parse_manifest(document: Document) -> Manifest:
    """Parse the document that lists a blob's parts.

    Raises:
        ValueError: it does not.
    """
    match document:
        case {"side": int(slot), "parts": int(parts), "digest": str(digest), **numbers}:
            if slot not in (0, 1) or not 0 <= parts <= MAX_PARTS:
                raise ValueError(f"side must be 0 or 1, and parts in [0, {MAX_PARTS}]")
            for name, number in numbers.items():
                check_count(name, number)
            return Manifest(slot, parts, digest, {name: n for name, n in numbers.items() if isinstance(n, int)})
    raise ValueError("side and parts must be whole numbers, and digest a text")


def check_part(document: Document) -> None:
    """
    Raises:
        ValueError: it is no part of a blob.
    """
    if not isinstance(document.get("data"), str):
        raise ValueError("data must be a text")


def _part_key(key: str, slot: int, number: int) -> str:
    return f"{key}/{slot}/{number:05d}"
