"""Find groups that were handed out by their lease, by when it expires, and by the request that took them."""

import heapq
from collections.abc import Iterator

from darts_server.rollout.queue.entries import Entry, EntryState, JobId

MIN_STALE = 1000
"""Expiries of leases that are gone are kept up to so many, and then while they are not more than the others."""


class LeaseIndex:
    """Keep the latest lease of each entry, also after it has expired."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._expiries: list[tuple[float, int, str]] = []
        self._taken: dict[tuple[JobId, str], dict[int, Entry]] = {}

    def add(self, entry: Entry) -> None:
        """Add an entry that was leased."""
        assert entry.lease is not None
        self._entries[entry.lease] = entry
        heapq.heappush(self._expiries, (entry.lease_until, entry.number, entry.lease))
        if entry.take_key is not None:
            self._taken.setdefault((entry.job, entry.take_key), {})[entry.number] = entry

    def remove(self, entry: Entry) -> None:
        """Remove the lease of an entry, if it has one."""
        if entry.lease is None:
            return
        del self._entries[entry.lease]
        if entry.take_key is not None:
            taken = self._taken[entry.job, entry.take_key]
            del taken[entry.number]
            if not taken:
                del self._taken[entry.job, entry.take_key]
        if len(self._expiries) > MIN_STALE + 2 * len(self._entries):
            self._expiries = [each for each in self._expiries if each[2] in self._entries]
            heapq.heapify(self._expiries)

    def find(self, lease: str) -> Entry | None:
        """Return the entry whose latest lease it is."""
        return self._entries.get(lease)

    def find_valid(self, lease: str) -> Entry | None:
        """Return the entry of a lease that was neither acknowledged nor has expired."""
        entry = self._entries.get(lease)
        return entry if entry is not None and entry.state is EntryState.LEASED else None

    def taken_with(self, job_id: JobId, key: str) -> list[Entry]:
        """Return the entries that a request with this key has leased, and that still are."""
        taken = self._taken.get((job_id, key), {})
        return [entry for entry in taken.values() if entry.state is EntryState.LEASED]

    def pop_expired(self, now: float) -> Iterator[Entry]:
        """Yield the entries whose lease has expired, once each; what is not iterated over comes the next time."""
        while self._expiries and self._expiries[0][0] <= now:
            _, _, lease = heapq.heappop(self._expiries)
            if (entry := self.find_valid(lease)) is not None:
                yield entry

    @property
    def next_expiry(self) -> float | None:
        return self._expiries[0][0] if self._expiries else None
