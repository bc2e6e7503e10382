"""The entries of one job, by their state."""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice

from darts_server.rollout.queue.entries import Entry, EntryState, Job, JobId
from darts_server.rollout.queue.order import PromptOrder
from darts_server.rollout.queue.staleness import is_stale, may_hand_out, startable

MAX_TAKEN_BYTES = 1 << 26
"""Of groups that are handed out together, but for the last one."""
_Due = tuple[bool, int, int, int]


class JobEntries:
    """Keep the entries of a job. `place`, `extend` and `remove` are all that moves one.

    Args:
        changed: gets the job's id when other groups than before may be handed out, or leased ones are gone.
        used_at: when it was last put into, taken from or acknowledged, see `Jobs.clock`.
    """

    def __init__(self, job: Job, changed: set[JobId] | None = None, used_at: float = 0.0) -> None:
        self.job = job
        self.used_at = used_at
        self.order = PromptOrder()
        self.running: dict[int, Entry] = {}
        self.ready: dict[int, Entry] = {}
        self.leased: dict[int, Entry] = {}
        self.names: dict[str, Entry] = {}
        self.bytes = 0
        self._changed = set() if changed is None else changed
        self._ready_bytes = 0
        self._due: list[_Due] = []  # a heap of ready ones; those that were moved since are skipped
        self._open: Counter[int] = Counter()  # groups that run or are ready, by version
        self._ready_by_version: dict[int, dict[int, Entry]] = {}  # without failed ones

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self.names.values()))

    def place(self, entry: Entry, state: EntryState) -> None:
        """Add an entry, new or removed before, in this state."""
        entry.state = state
        self.names[entry.name] = entry
        self.bytes += entry.size
        match state:
            case EntryState.QUEUED:
                self.order.add(entry)
            case EntryState.RUNNING:
                self.running[entry.number] = entry
            case EntryState.READY:
                self.ready[entry.number] = entry
                self._ready_bytes += entry.group_bytes
                self._changed.add(self.job.id)
                heapq.heappush(self._due, _due(entry))
                if not entry.is_failed:
                    self._ready_by_version.setdefault(entry.version, {})[entry.number] = entry
            case EntryState.LEASED:
                self.leased[entry.number] = entry
        if state.is_open and not entry.is_failed:
            self._open[entry.version] += 1

    def extend(self, new: Mapping[str, Entry]) -> None:
        """Add new entries, by name, that are queued and have the same priority."""
        self.names.update(new)
        self.bytes += sum(entry.prompt_bytes for entry in new.values())
        self.order.extend(new.values())

    def remove(self, entry: Entry) -> None:
        """Remove an entry, before anything of it changes."""
        if entry.state is not EntryState.QUEUED:  # one that runs may have held younger ones back
            self._changed.add(self.job.id)
        if entry.state is EntryState.READY:
            self._ready_bytes -= entry.group_bytes
            if not entry.is_failed:
                same = self._ready_by_version[entry.version]
                del same[entry.number]
                if not same:
                    del self._ready_by_version[entry.version]
        del self.names[entry.name]
        self.bytes -= entry.size
        self.order.discard(entry.number)
        for entries in (self.running, self.ready, self.leased):
            entries.pop(entry.number, None)
        if entry.state.is_open and not entry.is_failed:
            self._open[entry.version] -= 1
            if not self._open[entry.version]:
                del self._open[entry.version]

    def startable(self, version: int) -> float:
        """Return how many prompts may be started."""
        return startable(self.job.options, self._open.total(), self.job.taken_under(version))

    @property
    def is_empty(self) -> bool:
        return not self.names

    def is_stale(self, entry: Entry, version: int) -> bool:
        return not entry.is_failed and is_stale(self.job.options, entry.version, version)

    def must_restart(self, first: int, version: int) -> bool:
        """Return whether a group of version ``first`` is too old, or of a version that is gone."""
        return first > version or is_stale(self.job.options, first, version)

    def has_stale(self, version: int) -> bool:
        """Return whether a group that runs or is ready must start again."""
        return any(self.must_restart(first, version) for first in self._open)

    def stale_ready(self, version: int, count: int) -> list[Entry]:
        """Return up to ``count`` ready groups that must start again."""
        stale = (same for first, same in self._ready_by_version.items() if self.must_restart(first, version))
        return list(islice(chain.from_iterable(same.values() for same in stale), count))

    def next_ready(self, count: int, at_least: int, version: int) -> list[Entry]:
        """Return the groups that go out next, up to ``count``: failed ones, then by version, then as they were ready.

        Those that are returned must be moved; if there are fewer than ``at_least``, none are.
        `MAX_TAKEN_BYTES` are always enough. Nothing goes out until all that must start again has been moved.
        """
        if self.stale_ready(version, 1):
            return []
        if not self.ready or (len(self.ready) < at_least and self._ready_bytes < MAX_TAKEN_BYTES):
            return []
        chosen: list[Entry] = []
        size = 0
        passed: list[_Due] = []
        open_groups, taken = dict(self._open), self.job.taken_under(version)
        while self._due and len(chosen) < count:
            item = heapq.heappop(self._due)
            entry = self.ready.get(item[-1])
            if entry is None or item != _due(entry) or item in passed[-1:]:
                continue
            passed.append(item)
            if not entry.is_failed:
                if not may_hand_out(self.job.options, open_groups, taken, version, entry.version):
                    break  # those that follow are not older
                open_groups[entry.version] -= 1
                taken += 1
            chosen.append(entry)
            size += entry.group_bytes
            if size >= MAX_TAKEN_BYTES:
                break
        if len(chosen) < at_least and size < MAX_TAKEN_BYTES:
            chosen = []
        # Those that are chosen are pushed when they become ready again.
        for item in passed[len(chosen) :]:
            heapq.heappush(self._due, item)
        return chosen


def _due(entry: Entry) -> _Due:
    """Return the place of a ready group: failed ones first, as they need no tokens."""
    return (not entry.is_failed, entry.version, entry.ready_number, entry.number)
