"""What outlives a restart, as this room sees it."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from darts_server.exceptions import StateError

logger = logging.getLogger(__name__)

Scalar = str | int | float | bool | None


class DocumentStore(Protocol):
    """The part of the store that is used here."""

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None: ...

    def put(self, kind: str, key: str, document: Mapping[str, Scalar]) -> None: ...


class StoredValues:
    """Small JSON values of one kind, read and written whole.

    They are read anew each time, so what another process learned or a restore brought counts at once. One that cannot
    be read counts as not there: that costs shaping some of its aim, and nobody a rollout.

    ``read``: what makes of the JSON what `load` gives; it raises where another version of this server, or somebody
    else, wrote something else.
    """

    def __init__(self, documents: DocumentStore, kind: str, read: Callable[[Any], Any] = lambda value: value) -> None:
        self._documents = documents
        self._kind = kind
        self._read = read
        self._unreadable: set[str] = set()

    def load(self, key: str) -> Any:
        """The value, or ``None``."""
        try:
            document = self._documents.get(self._kind, key)
            value = None if document is None else self._read(json.loads(str(document["value"])))
        except (StateError, ValueError, TypeError, KeyError, RecursionError) as error:
            if key not in self._unreadable:
                logger.warning("what was learned as %s cannot be read; it is learned anew: %r", self._kind, error)
            self._unreadable.add(key)
            return None
        self._unreadable.discard(key)
        return value

    def save(self, key: str, value: Any) -> None:
        try:
            self._documents.put(self._kind, key, {"value": json.dumps(value)})
        except StateError as error:
            logger.warning("%s %s was not kept: %s", self._kind, key, error)
