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
PART_SUFFIX = "_part"
PART_BYTES = 48_000
"""64,000 bytes as base64, within the limit of a document."""
MAX_PARTS = (1 << 26) // PART_BYTES
"""64 MiB: several times the largest quality head."""


class DocumentStore(Protocol):
    """The part of the store that this room uses."""

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None: ...

    def put(self, kind: str, key: str, document: Document) -> None: ...

    @property
    def generation(self) -> int:
        """Number of restores, which replace all documents."""


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """``create``: makes a value from a document's fields, or from its JSON."""

    name: str
    create: Callable[..., T]
    is_json: bool = False

    def parse(self, document: Document) -> T:
        """Parse an untrusted document.

        Raises:
            ValueError: why the document cannot be used.
        """
        try:
            fields: Any = document
            if self.is_json:
                fields = json.loads(str(document["value"]))
            return self.create(**fields) if isinstance(self.create, type) else self.create(fields)
        except Exception as error:
            # A damaged document may raise any exception, and must not end a group.
            message = str(error) if type(error) is ValueError else repr(error)
            raise ValueError(message) from error


def json_kind(name: str, create: Callable[..., T]) -> Kind[T]:
    return Kind(name, create, is_json=True)


class Debounce:
    """Run ``work`` once, ``seconds`` after the first of several requests."""

    def __init__(self, seconds: float, work: Callable[[], None]) -> None:
        self._seconds = seconds
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def request(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self.run_pending)

    def run_pending(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._work()


class StoredValues(Generic[T]):
    """Values of one kind, which are read at every use, so that a restore takes effect at once.

    A value that cannot be used is logged once, counts as missing, and is learned again.
    """

    def __init__(self, documents: DocumentStore, kind: Kind[T]) -> None:
        self._documents = documents
        self._kind = kind
        self._logged: set[str] = set()

    def load(self, key: str) -> T | None:
        document = self._documents.get(self._kind.name, key)
        if document is None:
            return None
        try:
            return self._kind.parse(document)
        except ValueError as error:
            if key not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(key)
                name = self._kind.name
                logger.warning("the learned %s %.64s cannot be used, and is learned again: %.200s", name, key, error)
            return None

    def save(self, key: str, value: Any) -> None:
        """Save a value of a `json_kind`, given as JSON values."""
        self._documents.put(self._kind.name, key, {"value": json.dumps(value)})


@dataclass(frozen=True, slots=True)
class Blob:
    data: bytes
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Describes a blob. ``slot``: 0 or 1, part of the keys of the blob's parts."""

    slot: int
    parts: int
    digest: str
    numbers: Mapping[str, int]


class BlobStore:
    """Blobs of one kind. Only one thread at a time may save a key.

    Documents are small, so a blob has parts. Each key has two slots, so a reader always finds a complete blob, also
    after a process was killed while it saved.
    """

    def __init__(self, documents: DocumentStore, kind: str) -> None:
        self._documents = documents
        self._kind = kind
        self._part_kind = kind + PART_SUFFIX
        self._manifests = StoredValues(documents, Kind(kind, _parse_manifest))

    def digest(self, key: str) -> str | None:
        manifest = self._manifests.load(key)
        return None if manifest is None else manifest.digest

    def load(self, key: str) -> Blob | None:
        manifest = self._manifests.load(key)
        if manifest is None:
            return None
        data = b""
        # If a part is missing or damaged, the digest differs.
        with suppress(KeyError, ValueError):
            parts = []
            for number in range(manifest.parts):
                part = self._documents.get(self._part_kind, _part_key(key, manifest.slot, number)) or {}
                parts.append(b64decode(str(part["data"]), validate=True))
            data = b"".join(parts)
        if hashlib.sha256(data).hexdigest() != manifest.digest:
            logger.warning("the learned %s %s is incomplete, and is learned again", self._kind, key)
            return None
        return Blob(data, manifest.numbers)

    def save(self, key: str, data: bytes, numbers: Mapping[str, int]) -> str:
        """Save a blob in place of the previous blob; return the digest."""
        # Write to the slot that readers do not use, then the manifest.
        previous = self._manifests.load(key)
        slot = 0 if previous is None else 1 - previous.slot
        starts = range(0, len(data), PART_BYTES)
        for number, start in enumerate(starts):
            part = b64encode(data[start : start + PART_BYTES]).decode()
            self._documents.put(self._part_kind, _part_key(key, slot, number), {"data": part})
        digest = hashlib.sha256(data).hexdigest()
        # State files and archives have the slot under the name "side".
        self._documents.put(self._kind, key, {"side": slot, "parts": len(starts), "digest": digest, **numbers})

        # The store cannot delete documents, so the previous parts are emptied.
        if previous is not None:
            for number in range(previous.parts):
                self._documents.put(self._part_kind, _part_key(key, previous.slot, number), {"data": ""})
        return digest


def blob_kinds(name: str) -> tuple[Kind[Manifest], Kind[None]]:
    return Kind(name, _parse_manifest), Kind(name + PART_SUFFIX, _check_part)


def _parse_manifest(document: Document) -> Manifest:
    match document:
        case {"side": int(slot), "parts": int(parts), "digest": str(digest), **numbers}:
            if slot not in (0, 1) or not 0 <= parts <= MAX_PARTS:
                raise ValueError(f"side must be 0 or 1, and parts in [0, {MAX_PARTS}]")
            counts = {}
            for name, number in numbers.items():
                check_count(name, number)
                # For the type checker.
                assert isinstance(number, int)
                counts[name] = number
            return Manifest(slot, parts, digest, counts)
    raise ValueError("side and parts must be whole numbers, and digest a text")


def _check_part(document: Document) -> None:
    if not isinstance(document.get("data"), str):
        raise ValueError("data must be a text")


def _part_key(key: str, slot: int, number: int) -> str:
    return f"{key}/{slot}/{number:05d}"
