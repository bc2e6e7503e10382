"""Learned values that survive a restart, as documents in the store."""

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from darts_server.exceptions import StateError

logger = logging.getLogger(__name__)

Scalar = str | int | float | bool | None
Document = Mapping[str, Scalar]
T = TypeVar("T")
Parse = Callable[[Any], Any]

MAX_LOGGED = 100
"""Documents of a kind that are named in the log as unusable, each once."""


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


class Restores:
    """Notice when all documents were replaced by a saved state, so that nothing learned before overwrites it.

    ``count``: how often they were, as far as noticed.
    """

    def __init__(self, documents: DocumentStore) -> None:
        self._documents = documents
        self.count = 0
        self.noticed()

    def noticed(self) -> bool:
        """Return whether documents were replaced since the last call. It may read the disk, so not for each step."""
        before = self.count
        with suppress(StateError):  # what cannot be read cannot have been replaced either
            self.count = self._documents.generation()
        return self.count != before


class UnusableLog:
    """Log documents of one kind that cannot be used, each once."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._logged: set[str] = set()

    def add(self, key: str, error: Exception) -> None:
        if key not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(key)
            logger.warning("the learned %s %.64s cannot be used, and is learned again: %.200s", self._kind, key, error)

    def remove(self, key: str) -> None:
        """Record that the document can be used again."""
        self._logged.discard(key)


class StoredValues:
    """Small JSON values of one kind, each read and written as a whole.

    They are read at every use, so that what another process learned, or a restore, takes effect at once. A value that
    cannot be read is learned again: shaping aims worse for a while, but no rollout fails.

    ``parse``: makes a value from its JSON. It raises if another version of this server wrote something else.
    """

    def __init__(self, documents: DocumentStore, kind: str, parse: Parse = lambda value: value) -> None:
        self._documents = documents
        self._kind = kind
        self._parse = parse_value(parse)
        self._unusable = UnusableLog(kind)

    def load(self, key: str) -> Any:
        """Return the value, or ``None`` if there is none that can be read."""
        try:
            document = self._documents.get(self._kind, key)
            value = None if document is None else parse_document(document, self._parse)
        except (StateError, ValueError) as error:
            self._unusable.add(key, error)
            return None
        self._unusable.remove(key)
        return value

    def save(self, key: str, value: Any) -> None:
        """Store the value. A failure is logged."""
        try:
            self._documents.put(self._kind, key, {"value": json.dumps(value)})
        except StateError as error:
            logger.warning("the learned %s %s was not stored: %s", self._kind, key, error)
