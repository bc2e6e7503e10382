"""Hand out groups that were leased."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from darts_server.exceptions import StateDamaged
from darts_server.observers import QueueObserver
from darts_server.rollout.queue.entries import GROUP, Entry
from darts_server.rollout.queue.ledger import Ledger
from darts_server.rollout.queue.saving import Saver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TakenGroup:
    """A group that was handed out. ``staleness``: weight versions since its first token. ``group``: encoded."""

    name: str
    lease: str
    lease_until: float
    staleness: int
    group: bytes


class Handout:
    """Read leased groups. ``on_change``: called when leases were handed out or taken back."""

    def __init__(self, ledger: Ledger, saver: Saver, observer: QueueObserver, on_change: Callable[[], None]) -> None:
        self._ledger = ledger
        self._saver = saver
        self._observer = observer
        self._on_change = on_change

    async def read(self, entries: list[Entry], key: str | None) -> list[TakenGroup]:
        """Return groups that were leased, when the leases are on the disk; those that are damaged start again.

        If that fails the leases are taken back. Those of a request that is cancelled and has a ``key`` wait for the
        request that comes again with it.

        Raises:
            StateError: the disk cannot be written or read now.
        """
        version = self._ledger.version
        leases = [(entry, entry.lease or "", entry.lease_until, max(0, version - entry.version)) for entry in entries]
        try:
            await self._saver.save()
            groups = [await self._read_one(entry.number, lease) for entry, lease, _, _ in leases]
        except BaseException as error:
            if key is None or isinstance(error, Exception):
                for _, lease, _, _ in leases:
                    self._ledger.leases.release(lease)
                self._on_change()
            raise
        for _, lease, _, _ in leases:
            if (staleness := self._ledger.leases.staleness.pop(lease, None)) is not None:
                self._observer.group_handed_out(staleness)
        self._on_change()
        return [
            TakenGroup(entry.name, lease, until, staleness, group)
            for (entry, lease, until, staleness), group in zip(leases, groups, strict=True)
            if group is not None  # its job was deleted meanwhile, or it is damaged
        ]

    async def _read_one(self, number: int, lease: str) -> bytes | None:
        """Read a leased group; ``None`` if it is gone, or damaged and starts again.

        Raises:
            StateError: the disk cannot be read now.
        """
        try:
            return await self._saver.read(GROUP, str(number))
        except StateDamaged as error:
            logger.error("group %d of the queue starts again: %s", number, error)
            self._ledger.restart_damaged(lease)
            return None
