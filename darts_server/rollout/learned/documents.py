"""Learned values that survive a restart, as documents in the store: small JSON values, and blobs of any size."""

import asyncio
import hashlib
import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from darts_server.policy.checks import check_count

logger = logging.getLogger(__name__)

Scalar = str | int | float | bool | None
Document = Mapping[str, Scalar]
T = TypeVar("T")
Parse = Callable[[Any], Any]

MAX_LOGGED = 100
"""Documents of a kind that are named in the log as unusable, each once."""
PART_SUFFIX = "_part"
PART_BYTES = 48_000
"""Of a blob: 64,000 bytes as base64, within the limit of a document."""
MAX_PARTS = (1 << 26) // PART_BYTES
"""64 MiB: several times the largest quality head."""


class DocumentStore(Protocol):
    """The part of the store that this room uses."""

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None: ...

    def put(self, kind: str, key: str, document: Document) -> None: ...

    def generation(self) -> int:
        """Count how often all documents were replaced by a saved state."""
        ...


def parse_document(document: Document, parse: Callable[[Document], T]) -> T:
    """Parse a document that may hold anything.

    Raises:
        ValueError: it cannot be used; the message says why.
    """
    try:
        return parse(document)
    except Exception as error:  # whatever a made-up document leads to: it must not reach a group
        raise ValueError(str(error) if type(error) is ValueError else repr(error)) from error


def parse_value(parse: Parse) -> Callable[[Document], Any]:
    """Return a function that parses the documents of `StoredValues`."""
    return lambda document: parse(json.loads(str(document["value"])))


class Debounce:
    """Run ``work`` within ``seconds`` of the first request for it, however many requests follow meanwhile."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.run_pending)

    def run_pending(self) -> None:
        """Run the work now if it was requested."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._work()


class Restores:
    """Notice when all documents were replaced by a saved state, so that nothing learned before overwrites it.

    ``count``: how often they were, as far as noticed.
    """

    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents
        self.count = documents.generation()

    def noticed(self) -> bool:
        """Return whether documents were replaced since the last call."""
        before, self.count = self.count, self._documents.generation()
        return self.count != before


class StoredDocuments:
    """Documents of one kind. One that cannot be used counts as missing, is logged once, and learned again.

    They are read at every use, so that what another process learned, or a restore, takes effect at once.

    ``parse``: makes a value from a document. It raises if another version of this server wrote something else.
    """

    def __init__(self, documents: DocumentStore, kind: str, parse: Callable[[Document], Any]) -> None:
        self._documents = documents
        self._kind = kind
        self._parse = parse
        self._logged: set[str] = set()

    def load(self, key: str) -> Any:
        """Return the value, or ``None`` if there is none that can be used: shaping aims worse for a while then."""
        document = self._documents.get(self._kind, key)
        try:
            value = None if document is None else parse_document(document, self._parse)
        except ValueError as error:
            if key not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(key)
                logger.warning(
                    "the learned %s %.64s cannot be used, and is learned again: %.200s", self._kind, key, error
                )
            return None
        self._logged.discard(key)
        return value

    def put(self, key: str, document: Document) -> None:
        self._documents.put(self._kind, key, document)


class StoredValues(StoredDocuments):
    """Small JSON values of one kind, each read and written as a whole.

    ``parse``: makes a value from its JSON, otherwise as for `StoredDocuments`.
    """

    def __init__(self, documents: DocumentStore, kind: str, parse: Parse = lambda value: value) -> None:
        super().__init__(documents, kind, parse_value(parse))

    def save(self, key: str, value: Any) -> None:
        self.put(key, {"value": json.dumps(value)})


@dataclass(frozen=True, slots=True)
class Blob:
    """``numbers``: saved together with the bytes."""

    data: bytes
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The document that lists a blob's parts. ``slot``: where they are."""

    slot: int
    parts: int
    digest: str
    numbers: Mapping[str, int]


class BlobStore:
    """Blobs of one kind. Only one thread at a time may save a key.

    A blob is split into parts, one document each, and a manifest: documents, and lines of a saved state, are small. A
    key has two slots: a new blob is written to the slot that the manifest does not name, and the manifest after it. So
    every reader finds one blob or the other complete, also in another process, or after one was killed while it saved.
    """

    def __init__(self, documents: DocumentStore, kind: str) -> None:
        self._documents = documents
        self._kind = kind
        self._manifests = StoredDocuments(documents, kind, _parse_manifest)

    def digest(self, key: str) -> str | None:
        """Return the SHA-256 of the key's blob; ``None`` if there is none that can be read."""
        manifest: Manifest | None = self._manifests.load(key)
        return None if manifest is None else manifest.digest

    def load(self, key: str) -> Blob | None:
        """Return the key's blob; ``None`` if there is none that is complete."""
        manifest: Manifest | None = self._manifests.load(key)
        if manifest is None:
            return None
        data = b""
        with suppress(KeyError, ValueError):  # a part is damaged: the digest tells
            parts = self._parts(key, manifest.slot, manifest.parts)
            data = b"".join(b64decode(str(part["data"]), validate=True) for _, part in parts)
        if hashlib.sha256(data).hexdigest() != manifest.digest:
            logger.warning("the learned %s %s is incomplete, and is learned again", self._kind, key)
            return None
        return Blob(data, manifest.numbers)

    def save(self, key: str, data: bytes, numbers: Mapping[str, int]) -> str:
        """Save a blob in place of the key's previous one. Returns its digest."""
        previous: Manifest | None = self._manifests.load(key)
        slot = 0 if previous is None else 1 - previous.slot
        parts = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
        for number, part in enumerate(parts):
            text = b64encode(part).decode()
            self._documents.put(self._kind + PART_SUFFIX, _part_key(key, slot, number), {"data": text})
        digest = hashlib.sha256(data).hexdigest()
        # The store's field is "side": it is in state files and archives.
        self._manifests.put(key, {"side": slot, "parts": len(parts), "digest": digest, **numbers})
        if previous is not None:  # the store cannot delete: empty the old parts
            for name, _ in self._parts(key, previous.slot, previous.parts):
                self._documents.put(self._kind + PART_SUFFIX, name, {"data": ""})
        return digest

    def _parts(self, key: str, slot: int, count: int) -> Iterator[tuple[str, Document]]:
        """Yield keys and documents of a slot in order, up to the first that is missing."""
        for number in range(count):
            name = _part_key(key, slot, number)
            part = self._documents.get(self._kind + PART_SUFFIX, name)
            if part is None:
                return
            yield name, part


def blob_parsers(kind: str) -> dict[str, Callable[[Document], object]]:
    """Return functions that parse the documents of blobs, by kind. They raise for what is none."""
    return {kind: _parse_manifest, kind + PART_SUFFIX: _check_part}


def _parse_manifest(document: Document) -> Manifest:
    match document:
        case {"side": int(slot), "parts": int(parts), "digest": str(digest), **numbers}:
            if slot not in (0, 1) or not 0 <= parts <= MAX_PARTS:
                raise ValueError(f"side must be 0 or 1, and parts in [0, {MAX_PARTS}]")
            for name, number in numbers.items():
                check_count(name, number)
            return Manifest(slot, parts, digest, {name: n for name, n in numbers.items() if isinstance(n, int)})
    raise ValueError("side and parts must be whole numbers, and digest a text")


def _check_part(document: Document) -> None:
    if not isinstance(document.get("data"), str):
        raise ValueError("data must be a text")


def _part_key(key: str, slot: int, number: int) -> str:
    return f"{key}/{slot}/{number:05d}"
