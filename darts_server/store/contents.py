"""What the store holds right now: the backend, and the memory that spares callers the wait for it."""

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from darts_server.exceptions import StateError
from darts_server.store.backend import Backend
from darts_server.store.buffer import Recent, Unwritten, overlaid
from darts_server.store.document import Name, Row

CACHE_ENTRIES = 16_384
"""Some batches' prompts; at some hundred bytes each they take a few MB."""
CACHE_SECONDS = 0.5
"""With the other process's ``FLUSH_SECONDS`` its documents are seen about a second after they were put."""


class Contents:
    """JSON texts by name, for all threads. Only ``write``, ``replace`` and ``close`` wait for the disk."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._unwritten = Unwritten()
        self._recent = Recent(CACHE_ENTRIES, CACHE_SECONDS)
        self._lock = threading.Lock()  # for all of the above but writes, which may take long
        self._writing = threading.Lock()  # one write or replacement at a time; taken before the other lock
        self._closed = False

    def put(self, name: Name, text: str) -> None:
        with self._open():
            if not self._unwritten.waiting:
                self._unwritten.begin(self._generation())
            self._unwritten.put(name, text)
            self._recent.drop(name)

    def get(self, name: Name) -> str | None:
        with self._open():
            if (text := self._unwritten.get(name)) is not None:
                return text
            now = time.monotonic()
            if read := self._recent.get(name, now):
                return read.text
            text = self._backend.read(name)
            self._recent.keep(name, text, now)
            return text

    def count(self, kind: str) -> int:
        with self._open():
            return self._backend.count(kind, self._unwritten.keys(kind))

    def rows(self, kind: str | None) -> Iterator[Row]:
        """Ordered by kind and key, as they are at the first step."""
        with ExitStack() as reading:
            with self._open():
                unwritten = self._unwritten.rows(kind)
                written = reading.enter_context(self._backend.snapshot(kind))
            yield from overlaid(written, unwritten)

    def write(self) -> None:
        """Brings to the backend what it lacks. After an error all of that is still here."""
        with self._writing:
            with self._open():
                texts, generation = self._unwritten.take()
            try:
                current = not texts or self._backend.write(texts, generation)
            except BaseException:
                with self._lock:
                    self._unwritten.take_back()
                raise
            with self._lock:
                self._unwritten.written()
                if not current:  # another process replaced everything: what was learned before that is gone
                    self._forget()

    def replace(self, rows: Iterable[Row]) -> None:
        """These rows, no others, at once. After an error nothing has changed."""
        with self._writing:
            with self._open():
                pass
            self._backend.replace(rows)
            with self._lock:
                self._forget()

    def close(self) -> None:
        """What was not written is lost."""
        with self._writing, self._lock:
            self._closed = True
            self._backend.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise StateError("the store is closed")
            yield

    def _generation(self) -> int | None:
        try:
            return self._backend.generation()
        except StateError:
            return None  # a file that cannot be read must not stop a put

    def _forget(self) -> None:
        self._unwritten.clear()
        self._recent.clear()
