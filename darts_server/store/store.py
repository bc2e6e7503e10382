"""The store of documents that the other rooms use."""

import heapq
import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from operator import itemgetter
from pathlib import Path

from darts_server.exceptions import StateDamaged, StateError, StateTooNew
from darts_server.store import archive
from darts_server.store.archive import LIMIT_BYTES, Document, Name, Row, Scalar, check_name
from darts_server.store.database import Database

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""Between two writes, so that one takes many documents. With the write itself it stays below the second that a killed
process may lose."""
CACHE_SECONDS = 0.5
"""How long a document that was read is kept. A server that starts while the previous one ends sees what that one still
writes."""
MAX_IN_MEMORY = 2**18
"""Documents of each kind. A prompt's takes some hundred bytes, and data sets seldom have more prompts."""

# Texts by kind and key. Ordered: to find the oldest of a plain dict takes longer the more were deleted before it.
_Texts = defaultdict[str, OrderedDict[str, str]]


class Store(AbstractContextManager["Store"]):
    """Documents by kind and key, in ``folder``/state.db, or in memory without a folder. For all threads.

    In memory only the last ``max_in_memory`` of each kind are kept, so that it does not grow without bound.

    ``put`` never waits for the disk: a thread writes new documents twice a second, so a killed process loses the last
    second at most. A failed write is retried until it succeeds; meanwhile ``fault`` says why, and the newest document
    of each key is in memory. ``get`` sees every put at once. One process uses a folder; the next one may start while it
    ends.

    ``check`` gets kind and document of everything to be restored; it raises ``ValueError`` for what cannot be used.

    Raises:
        StateDamaged, StateTooNew: the file is damaged, another program's or newer; it was not touched.
        StateError: the folder or file cannot be used.

    >>> with Store() as store:
    ...     store.put("prompt", "sum of primes", {"mean": 812.5, "count": 16})
    ...     store.get("prompt", "sum of primes")
    {'mean': 812.5, 'count': 16}
    """

    def __init__(
        self,
        folder: Path | None = None,
        max_in_memory: int = MAX_IN_MEMORY,
        check: Callable[[str, Document], None] = lambda kind, document: None,
    ) -> None:
        self.fault: str | None = None
        """Why nothing can be written at present; None if the last write succeeded."""
        self._check = check
        self._max_in_memory = max_in_memory
        self._database = None if folder is None else Database(folder)
        self._lock = threading.Lock()  # of all below, and of reading from the file
        self._write_lock = threading.Lock()  # one write or restore at a time; taken before the other lock
        self._pending = _Texts(OrderedDict)  # not written yet; without a file, all there is
        self._cache: dict[Name, str | None] = {}  # of reads, up to a point in time
        self._cached_until = 0.0
        self._restores = 0
        self._is_closed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write_until_stopped, name="darts-store", daemon=True)
        if self._database is not None:
            self._thread.start()

    def put(self, kind: str, key: str, document: Document) -> None:
        """Store the document, in place of the previous one of that name.

        Raises:
            InvalidRequest: the key is not well-formed Unicode of at most 64 KiB.
            TypeError: the document is not flat, or has a value that is no JSON scalar.
            ValueError: a number is not finite, the document has more than 64 KiB, ``kind`` is no identifier.
            StateError: the store is closed.
        """
        name, text = check_name(kind, key), archive.encode(document)
        with self._lock:
            self._refuse_closed()
            self._add(self._pending, (*name, text))
            self._cache.pop(name, None)

    def get(self, kind: str, key: str) -> dict[str, Scalar] | None:
        """Return a copy of the newest document of that name, or None.

        Raises:
            InvalidRequest, ValueError: as ``put``.
            StateError: the store is closed, or its file can no longer be read.
        """
        name = check_name(kind, key)
        with self._lock:
            self._refuse_closed()
            text = self._pending[kind].get(key)
            if text is None and self._database is not None:
                # The same few documents are read again and again, and each read of the file takes several system calls.
                if (now := time.monotonic()) >= self._cached_until:
                    self._cache, self._cached_until = {}, now + CACHE_SECONDS
                if name not in self._cache:
                    self._cache[name] = self._database.read(name)
                text = self._cache[name]
        return None if text is None else archive.decode(text)

    def count(self, kind: str) -> int:
        """Count the documents of a kind. Takes milliseconds per 100,000. Raises ``StateError`` as ``get``."""
        with self._lock:
            self._refuse_closed()
            if self._database is None:
                return len(self._pending[kind])
            return self._database.count(kind, self._pending[kind])

    def generation(self) -> int:
        """Count how often ``restore`` has replaced everything."""
        return self._restores

    def flush(self) -> None:
        """Write everything that was put before, and wait for it. Raises ``StateError`` if that fails."""
        if error := self._try_write():
            raise StateError(str(error)) from error

    def export(self) -> bytes:
        """Export everything as one file, see ``archive``. Takes seconds per million documents: call it in a thread."""
        return archive.pack(self._rows())

    def restore(self, data: bytes, limit: int = LIMIT_BYTES) -> None:
        """Replace everything by an exported file, atomically. Takes several times as long as ``export``.

        Documents that are put before it returns are lost too. ``limit``: bytes that the data may have when
        decompressed.

        Raises:
            StateDamaged, StateTooNew: ``data`` is incomplete, no saved state, too large or newer, or has a document
                that cannot be used; nothing was changed.
            StateError: it could not be written; nothing was changed.
        """
        for kind, key, text in archive.unpack(data, limit):  # check all of it before anything is changed
            try:
                self._check(kind, archive.decode(text))
            except ValueError as error:
                raise StateDamaged(
                    f"the state given has a document that cannot be used: {kind} {key[:64]!r}: {str(error)[:200]}; "
                    "nothing was changed. Send a saved file, byte for byte"
                ) from error
        restored, rows = _Texts(OrderedDict), archive.unpack(data, limit)
        with self._write_lock:
            with self._lock:
                self._refuse_closed()
            if self._database is None:
                for row in rows:
                    self._add(restored, row)
            else:
                try:
                    self._database.write(rows, replace=True)
                except (StateDamaged, StateTooNew) as error:  # of the state file: ``data`` was checked above
                    raise StateError(str(error)) from error
            with self._lock:
                self._pending, self._cache = restored, {}
                self._restores += 1

    def close(self) -> None:
        """Write what is pending and close. Raises ``StateError`` if that cannot be written; it is lost then."""
        if self._is_closed:
            return
        self._stop.set()
        if self._database is not None:
            self._thread.join()
        try:
            self.flush()
        finally:
            with self._write_lock, self._lock:
                self._is_closed = True
                if self._database is not None:
                    self._database.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add(self, texts: _Texts, row: Row) -> None:
        kind, key, text = row
        texts[kind][key] = text
        if self._database is None:
            texts[kind].move_to_end(key)
            if len(texts[kind]) > self._max_in_memory:
                texts[kind].popitem(last=False)

    def _rows(self) -> Iterator[Row]:
        """All rows, ordered by kind and key, as they are when the first one is taken."""
        with ExitStack() as reading:
            with self._lock:
                self._refuse_closed()
                unwritten = sorted(self._pending_rows())
                written = () if self._database is None else reading.enter_context(self._database.snapshot())
            previous: Name | None = None
            for row in heapq.merge(unwritten, written, key=itemgetter(0, 1)):  # of two the unwritten one comes first
                if row[:2] != previous:
                    yield row
                previous = row[:2]

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise StateError("the store is closed")

    def _write_until_stopped(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self._try_write()

    def _try_write(self) -> Exception | None:
        """Write what is pending, in the caller's thread. An error is returned, kept in ``fault`` and logged once."""
        with self._write_lock:
            with self._lock:
                if self._is_closed:
                    return StateError("the store is closed")
                rows = [] if self._database is None else list(self._pending_rows())
            error: Exception | None = None
            try:
                if self._database is not None and rows:
                    self._database.write(rows)
            except Exception as failure:
                error = failure
            else:
                with self._lock:
                    for kind, key, text in rows:
                        if self._pending[kind].get(key) is text:  # otherwise there is a newer one by now
                            del self._pending[kind][key]
            before, self.fault = self.fault, None if error is None else str(error)
            if error is not None and self.fault != before:
                logger.error("the learned state cannot be written and is kept in memory until it can: %s", error)
            elif error is None and before is not None:
                logger.warning("the learned state is written again")
            return error

    def _pending_rows(self) -> Iterator[Row]:
        return ((kind, key, text) for kind, texts in self._pending.items() for key, text in texts.items())
