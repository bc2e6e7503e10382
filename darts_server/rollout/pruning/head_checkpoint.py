"""The quality head in the store: kept as it is trained, and taken from there."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from darts_server.exceptions import InvalidRequest, StateError
from darts_server.rollout.learned.blobs import BlobStore

logger = logging.getLogger(__name__)

KEY = "head"
SECONDS = 10.0
"""Between two writes of up to 13 MB. A killed process loses as much of the head's training."""


class Restorable(Protocol):
    """The part of the head that is used here."""

    def restore(self, data: bytes) -> None: ...


class HeadCheckpoint:
    """Keeps the newest state of a head. Any thread may call any method; none waits for another's write."""

    def __init__(self, blobs: BlobStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._blobs = blobs
        self._clock = clock
        self._lock = threading.Lock()
        self._digest: str | None = None
        self._newest = b""
        self._kept_at = -SECONDS

    def trained(self, state: bytes) -> None:
        """The head has this state now. It is kept if the last one was kept some time ago."""
        self._newest = state or self._newest
        if self._newest and self._clock() >= self._kept_at + SECONDS:
            self.keep()

    def keep(self) -> None:
        """Keep what is newest, unless something else was put there meanwhile: that is to be restored."""
        with self._lock:
            state = self._newest
            if not state:
                return
            try:
                if self._blobs.digest(KEY) == self._digest:
                    self._digest = self._blobs.save(KEY, state, {})
                    self._kept_at = self._clock()
                    if self._newest is state:
                        self._newest = b""
            except StateError as error:
                logger.warning("the quality head was not kept: %s", error)

    def refresh(self, head: Restorable) -> None:
        """Have the head go on from what is kept, if that is not what this has kept or taken itself."""
        if not self._lock.acquire(blocking=False):
            return  # it is being written; another time
        try:
            digest = self._blobs.digest(KEY)
            if digest == self._digest:
                return
            self._digest, self._newest = digest, b""
            blob = self._blobs.load(KEY)
            head.restore(b"" if blob is None else blob.data)
        except (InvalidRequest, StateError) as error:
            logger.warning("the kept quality head is not taken, and is learned anew: %s", error)
        finally:
            self._lock.release()
