"""Groups out: each is leased, and acknowledged or handed out again."""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from darts_server.rollout.queue.entries import AckOutcome, Entry, EntryState, JobId
from darts_server.rollout.queue.entry_table import EntryTable
from darts_server.rollout.queue.history import Acknowledgements, Counts
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.jobs import Jobs
from darts_server.rollout.queue.lease_index import LeaseIndex

EXPIRED_AT_ONCE = 25
"""Leases that expire in one turn of the event loop: some milliseconds."""


class Returns(Protocol):
    """What happens to entries whose lease has ended."""

    def restart_if_stale(self, entry: Entry) -> None:
        """Start a group again that is too old to be handed out."""
        ...

    def delete(self, entry: Entry) -> None:
        """Delete an entry, wherever it is."""
        ...


class Leases:
    """Lease groups to consumers.

    Args:
        new_name: returns a string that cannot be guessed and that is never used twice.
    """

    def __init__(
        self,
        jobs: Jobs,
        table: EntryTable,
        acknowledgements: Acknowledgements,
        counts: Counts,
        returns: Returns,
        new_name: Callable[[], str],
    ) -> None:
        self.staleness: dict[str, int] = {}
        """Weight versions since the first token of each group that was leased, by its lease, until it is counted."""
        self._jobs = jobs
        self._table = table
        self._acknowledgements = acknowledgements
        self._counts = counts
        self._returns = returns
        self._new_name = new_name
        self._index = LeaseIndex()

    def load(self, entries: Iterable[Entry]) -> None:
        """Find entries by the leases that they had."""
        for entry in entries:
            if entry.lease is not None:
                self._index.add(entry)

    def take(
        self, job_id: JobId, count: int, at_least: int, now: float, lease_seconds: float, key: str | None = None
    ) -> list[Entry]:
        """Lease the next groups of a job: up to ``count``, and none if there are fewer than ``at_least``.

        ``now``: Unix seconds. ``key``: of the request; one that has leased groups before gets those that it still has.
        """
        self.expire(now)
        each = self._jobs.get(job_id)
        if each is None:
            return []
        self._jobs.use(each)
        if key is not None and (known := self._taken_before(each, key)):
            return known
        chosen = each.next_ready(count, at_least, self._jobs.version)
        for entry in chosen:
            each.remove(entry)
            self._index.remove(entry)
            entry.lease, entry.lease_until = f"{entry.number}-{self._new_name()}", now + lease_seconds
            entry.leased_version, entry.takes, entry.take_key = self._jobs.version, each.job.takes, key
            self._index.add(entry)
            each.place(entry, EntryState.LEASED)
            self._table.save(entry)
        groups = [entry for entry in chosen if not entry.is_failed]
        if groups:
            self._jobs.set_taken(each, each.job.taken_under(self._jobs.version) + len(groups))
        self.staleness |= {entry.lease or "": max(0, self._jobs.version - entry.version) for entry in groups}
        self._counts.handed_out += len(chosen)
        return chosen

    def release(self, lease: str) -> Entry | None:
        """Take a lease back that did not reach its consumer, and return its entry; ``None`` if it is not valid."""
        if (entry := self._index.find_valid(lease)) is not None:
            self._end(entry)
        return entry

    def is_valid(self, lease: str) -> bool:
        """Return whether a lease has neither been acknowledged nor expired."""
        return self._index.find_valid(lease) is not None

    def acknowledge(self, leases: Sequence[str], may_see: Callable[[str], bool]) -> list[AckOutcome]:
        """Acknowledge leases, in their order. ``may_see``: whether what belongs to an owner is the caller's."""
        return [self._acknowledge(lease, may_see) for lease in leases]

    def expire(self, now: float) -> bool:
        """Make groups ready again whose leases have expired, `EXPIRED_AT_ONCE` at most; whether there may be more."""
        expired = list(islice(self._index.pop_expired(now), EXPIRED_AT_ONCE))
        for entry in expired:
            self._counts.expired += 1
            self._end(entry)
        return len(expired) == EXPIRED_AT_ONCE

    def forget(self, entry: Entry) -> None:
        """Forget the lease of an entry that is deleted."""
        self.staleness.pop(entry.lease or "", None)
        self._index.remove(entry)

    @property
    def next_expiry(self) -> float | None:
        """When the next lease expires, or an earlier time; ``None`` if there is none."""
        return self._index.next_expiry

    def _taken_before(self, each: JobEntries, key: str) -> list[Entry]:
        """Return what a request has leased, without groups that have become too old for another hand-out."""
        known: list[Entry] = []
        for entry in self._index.taken_with(each.job.id, key):
            if each.is_stale(entry, self._jobs.version):
                self._end(entry)
            else:
                known.append(entry)
        return known

    def _end(self, entry: Entry) -> None:
        each = self._jobs[entry.job]
        each.remove(entry)
        self.staleness.pop(entry.lease or "", None)
        self._jobs.count_taken(entry, -1)
        each.place(entry, EntryState.READY)
        self._table.save(entry)
        self._returns.restart_if_stale(entry)

    def _acknowledge(self, lease: str, may_see: Callable[[str], bool]) -> AckOutcome:
        entry = self._index.find(lease)
        if entry is not None and may_see(entry.owner):
            self._jobs.use(self._jobs[entry.job])
            if entry.state is not EntryState.LEASED:  # it expired, but was not handed out again
                self._jobs.count_taken(entry, 1)
            self._returns.delete(entry)
            self._acknowledgements.add(entry, lease)
            self._counts.acknowledged += 1
            return AckOutcome.ACKNOWLEDGED
        number = _number_of(lease)
        if (known := self._table.by_number.get(number)) is not None:
            return AckOutcome.EXPIRED if may_see(known.owner) else AckOutcome.UNKNOWN
        if (done := self._acknowledgements.numbered(number, may_see)) is not None:
            return AckOutcome.ALREADY if done.lease == lease else AckOutcome.EXPIRED
        return AckOutcome.UNKNOWN


def _number_of(lease: str) -> int:
    head = lease.partition("-")[0]
    return int(head) if head.isascii() and head.isdecimal() and len(head) <= 18 else 0
