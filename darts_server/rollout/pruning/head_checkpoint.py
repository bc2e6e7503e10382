"""The quality head in the store: saved while it is trained, and restored from there."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from darts_server.exceptions import InvalidRequest, StateError
from darts_server.rollout.learned.documents import BlobStore

logger = logging.getLogger(__name__)

KEY = "head"
SAVE_SECONDS = 10.0
"""Between two writes of up to 13 MB. A killed process loses that much training of the head."""


class Restorable(Protocol):
    """The part of a head that is used here."""

    def restore(self, data: bytes) -> None: ...


class HeadCheckpoint:
    """Saves the newest state of a head. Any thread may call any method; none waits for a write of another one."""

    def __init__(self, blobs: BlobStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._blobs = blobs
        self._clock = clock
        self._lock = threading.Lock()
        self._digest: str | None = None
        self._unsaved = b""
        self._saved_at = -SAVE_SECONDS

    def update(self, state: bytes) -> None:
        """Set the head's newest state, if ``state`` is not empty; save it if the last save was some time ago."""
        self._unsaved = state or self._unsaved
        if self._unsaved and self._clock() >= self._saved_at + SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Save the newest state, unless a restore of the store has replaced the last one: then `reload` loads that."""
        with self._lock:
            state = self._unsaved
            if not state:
                return
            try:
                if self._blobs.digest(KEY) == self._digest:
                    self._digest = self._blobs.save(KEY, state, {})
                    self._saved_at = self._clock()
                    if self._unsaved is state:  # a thread may have called `update` during the write
                        self._unsaved = b""
            except StateError as error:
                logger.warning("the quality head was not saved: %s", error)

    def reload(self, head: Restorable) -> None:
        """Restore the head from the store, if its state there is neither from here nor loaded already."""
        if not self._lock.acquire(blocking=False):
            return  # it is being written; the next call will do
        try:
            digest = self._blobs.digest(KEY)
            if digest == self._digest:
                return
            self._digest, self._unsaved = digest, b""
            blob = self._blobs.load(KEY)
            head.restore(b"" if blob is None else blob.data)
        except (InvalidRequest, StateError) as error:
            logger.warning("the saved quality head is not used, and a new one is trained: %s", error)
        finally:
            self._lock.release()
