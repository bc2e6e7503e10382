"""A backend behind a write buffer and a read cache, so that callers do not wait for the disk."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from darts_server.exceptions import StateError
from darts_server.store.backend import Backend
from darts_server.store.buffer import ReadCache, WriteBuffer, merge_rows
from darts_server.store.document import Name, Row

CACHE_ENTRIES = 16_384
"""Some batches' prompts; at some hundred bytes each they take a few MB."""
CACHE_SECONDS = 0.5
"""With the other process's ``FLUSH_SECONDS`` its documents are seen about a second after they were put."""


class BufferedBackend:
    """JSON texts by name, for all threads. Only ``write``, ``replace`` and ``close`` wait for the disk."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer = WriteBuffer()
        self._cache = ReadCache(CACHE_ENTRIES, CACHE_SECONDS)
        self._lock = threading.Lock()  # for all of the above but writes, which may take long
        self._write_lock = threading.Lock()  # one write or replacement at a time; taken before the other lock
        self._is_closed = False

    def put(self, name: Name, text: str) -> None:
        with self._locked():
            if not self._buffer.has_pending:
                self._buffer.begin(self._generation())
            self._buffer.put(name, text)
            self._cache.drop(name)

    def get(self, name: Name) -> str | None:
        with self._locked():
            if (text := self._buffer.get(name)) is not None:
                return text
            now = time.monotonic()
            if read := self._cache.get(name, now):
                return read.text
            text = self._backend.read(name)
            self._cache.put(name, text, now)
            return text

    def count(self, kind: str) -> int:
        with self._locked():
            return self._backend.count(kind, self._buffer.keys(kind))

    def generation(self) -> int:
        with self._locked():
            return self._backend.generation()

    def rows(self, kind: str | None) -> Iterator[Row]:
        """All rows of a kind, ordered by kind and key, as they are when the first one is taken."""
        with ExitStack() as reading:
            with self._locked():
                unwritten = self._buffer.rows(kind)
                written = reading.enter_context(self._backend.snapshot(kind))
            yield from merge_rows(written, unwritten)

    def write(self) -> None:
        """Write the buffer to the backend. After an error all of it is still buffered."""
        with self._write_lock:
            with self._locked():
                texts, generation = self._buffer.begin_write()
            try:
                is_current = not texts or self._backend.write(texts, generation)
            except BaseException:
                with self._lock:
                    self._buffer.cancel_write()
                raise
            with self._lock:
                self._buffer.end_write()
                if not is_current:  # another process replaced everything: what was learned before that is gone
                    self._clear()

    def replace(self, rows: Iterable[Row]) -> None:
        """Replace everything by these rows, at once. After an error nothing has changed."""
        with self._write_lock:
            with self._locked():
                pass  # raises if it is closed
            self._backend.replace(rows)
            with self._lock:
                self._clear()

    def close(self) -> None:
        """Close the backend. What was not written is lost."""
        with self._write_lock, self._lock:
            self._is_closed = True
            self._backend.close()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise StateError("the store is closed")
            yield

    def _generation(self) -> int | None:
        try:
            return self._backend.generation()
        except StateError:
            return None  # a file that cannot be read must not fail a put

    def _clear(self) -> None:
        self._buffer.clear()
        self._cache.clear()
