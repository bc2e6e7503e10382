"""Learned values that survive a restart, as documents in the store: small JSON values, and blobs of any size."""

import asyncio
import hashlib
import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from darts_server.estimates.checks import check_count

logger = logging.getLogger(__name__)

Scalar = str | int | float | bool | None
Document = Mapping[str, Scalar]
T = TypeVar("T")

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

    @property
    def generation(self) -> int:
        """How often all documents were replaced by a saved state."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """A kind of documents, each of fields, or with ``is_json`` of the JSON of a value.

    ``create``: makes a value from either, if it is a class from its fields by name; it raises for what another version
    wrote.
    """

    name: str
    create: Callable[..., T]
    is_json: bool = False

    def parse(self, document: Document) -> T:
        """Parse a document that may hold anything.

        Raises:
            ValueError: it cannot be used; the message says why.
        """
        try:
            value = json.loads(str(document["value"])) if self.is_json else document
            return self.create(**value) if isinstance(self.create, type) else self.create(value)
        except Exception as error:  # whatever a made-up document leads to: it must not reach a group
            raise ValueError(str(error) if type(error) is ValueError else repr(error)) from error


def json_kind(name: str, create: Callable[..., T]) -> Kind[T]:
    """Return the kind of documents that `StoredValues.save` writes. ``create``: see `Kind`."""
    return Kind(name, create, is_json=True)


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


class StoredValues(Generic[T]):
    """Values of one kind. One that cannot be used counts as missing, is logged once, and learned again.

    They are read at every use, so that a restore takes effect at once.
    """

    def __init__(self, documents: DocumentStore, kind: Kind[T]) -> None:
        self._documents = documents
        self._kind = kind
        self._logged: set[str] = set()

    def load(self, key: str) -> T | None:
        """Return the value, or ``None`` if there is none that can be used: shaping aims worse for a while then."""
        document = self._documents.get(self._kind.name, key)
        try:
            return None if document is None else self._kind.parse(document)
        except ValueError as error:
            if key not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(key)
                name = self._kind.name
                logger.warning("the learned %s %.64s cannot be used, and is learned again: %.200s", name, key, error)
            return None

    def save(self, key: str, value: Any) -> None:
        """Save a value of a `json_kind`, given as JSON values, in place of the previous one."""
        self._documents.put(self._kind.name, key, {"value": json.dumps(value)})


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
    every reader finds one blob or the other complete, also after a process was killed while it saved.
    """

    def __init__(self, documents: DocumentStore, kind: str) -> None:
        self._documents = documents
        self._kind = kind
        self._manifests = StoredValues(documents, Kind(kind, _parse_manifest))

    def digest(self, key: str) -> str | None:
        """Return the SHA-256 of the key's blob; ``None`` if there is none that can be read."""
        manifest = self._manifests.load(key)
        return None if manifest is None else manifest.digest

    def load(self, key: str) -> Blob | None:
        """Return the key's blob; ``None`` if there is none that is complete."""
        if (manifest := self._manifests.load(key)) is None:
            return None
        names = (_part_key(key, manifest.slot, number) for number in range(manifest.parts))
        parts = (self._documents.get(self._kind + PART_SUFFIX, name) or {} for name in names)
        data = b""
        with suppress(KeyError, ValueError):  # a part is missing or damaged: the digest tells
            data = b"".join(b64decode(str(part["data"]), validate=True) for part in parts)
        if hashlib.sha256(data).hexdigest() != manifest.digest:
            logger.warning("the learned %s %s is incomplete, and is learned again", self._kind, key)
            return None
        return Blob(data, manifest.numbers)

    def save(self, key: str, data: bytes, numbers: Mapping[str, int]) -> str:
        """Save a blob in place of the key's previous one. Returns its digest."""
        kind, previous = self._kind + PART_SUFFIX, self._manifests.load(key)
        slot = 0 if previous is None else 1 - previous.slot
        parts = [data[begin : begin + PART_BYTES] for begin in range(0, len(data), PART_BYTES)]
        for number, part in enumerate(parts):
            self._documents.put(kind, _part_key(key, slot, number), {"data": b64encode(part).decode()})
        digest = hashlib.sha256(data).hexdigest()
        # The store's field is "side": it is in state files and archives.
        self._documents.put(self._kind, key, {"side": slot, "parts": len(parts), "digest": digest, **numbers})
        # The store cannot delete: empty the old parts.
        for number in range(0 if previous is None else previous.parts):
            self._documents.put(kind, _part_key(key, 1 - slot, number), {"data": ""})
        return digest


def blob_kinds(name: str) -> tuple[Kind[Manifest], Kind[None]]:
    """Return the kinds of documents that blobs consist of."""
    return Kind(name, _parse_manifest), Kind(name + PART_SUFFIX, _check_part)


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
