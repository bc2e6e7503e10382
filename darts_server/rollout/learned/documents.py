"""Learned values that survive a restart, as documents in the store."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from darts_server.exceptions import StateError

logger = logging.getLogger(__name__)

Scalar = str | int | float | bool | None


class DocumentStore(Protocol):
    """The part of the store that this room uses."""

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None: ...

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None: ...


class StoredValues:
    """Small JSON values of one kind, each read and written as a whole.

    They are read at every use, so that what another process learned, or a restore, takes effect at once. A value that
    cannot be read is learned again: shaping aims worse for a while, but no rollout fails.

    ``parse``: makes a value from its JSON. It raises if another version of this server wrote something else.
    """

    def __init__(self, documents: DocumentStore, kind: str, parse: Callable[[Any], Any] = lambda value: value) -> None:
        self._documents = documents
        self._kind = kind
        self._parse = parse
        self._unreadable: set[str] = set()

    def load(self, key: str) -> Any:
        """Return the value, or ``None`` if there is none that can be read."""
        try:
            document = self._documents.get(self._kind, key)
            value = None if document is None else self._parse(json.loads(str(document["value"])))
        except (StateError, ValueError, TypeError, KeyError, RecursionError) as error:
            if key not in self._unreadable:
                logger.warning("the learned %s cannot be read, and is learned again: %r", self._kind, error)
            self._unreadable.add(key)
            return None
        self._unreadable.discard(key)
        return value

    def save(self, key: str, value: Any) -> None:
        """Store the value. A failure is logged."""
        try:
            self._documents.put(self._kind, key, {"value": json.dumps(value)})
        except StateError as error:
            logger.warning("the learned %s %s was not stored: %s", self._kind, key, error)
