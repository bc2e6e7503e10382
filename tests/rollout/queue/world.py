"""A queue with a disk, consumers and a clock of its own."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from itertools import count
from pathlib import Path
from typing import Any

from darts_server.rollout.queue.entries import AckOutcome, Entry, EntryState, JobId, Terms
from darts_server.rollout.queue.history import Changes, Counts, PutResult
from darts_server.rollout.queue.ledger import Ledger
from darts_server.rollout.queue.new_entries import NewPrompt, build_entries
from darts_server.rollout.queue.owners import QueueLimits
from darts_server.store.transactions import TransactionStore

JOB = ("owner", "train")
TERMS = Terms(4, {"max_tokens": 16}, {})
LEASE = 100.0


def prompts(*names: str) -> list[NewPrompt]:
    return [NewPrompt(name.encode(), name, name) for name in names]


class Disk:
    """A store in memory that takes no time."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], bytes] = {}

    def write(self, changes: Changes) -> None:
        for name, value in changes.items():
            if value is None:
                self.rows.pop(name, None)
            else:
                self.rows[name] = value

    def items(self, kind: str) -> Iterator[tuple[str, bytes]]:
        return iter([(key, value) for (each, key), value in self.rows.items() if each == kind])


class World:
    """Everything around a ledger. What is not written when the server is killed is lost.

    ``acknowledged``: ids of entries, as often as the queue said to a consumer that it has acknowledged them.
    ``late``: how many of them after their lease had expired. ``leases``: that were written.
    ``staleness``: of each group that was handed out.
    ``folder``: of real files; by default the disk is a dictionary.
    """

    def __init__(self, folder: Path | None = None, limits: QueueLimits | None = None, staleness: int = 1) -> None:
        self._folder, self._limits, self._staleness = folder, limits or QueueLimits(), staleness
        self._names = map(str, count())
        self.now = 0.0
        self.version = 0
        self.model = ""
        self.disk: Disk | TransactionStore = Disk() if folder is None else TransactionStore(folder / "0")
        self._kills = 0
        self._earlier = Counts()
        self._written = Counts()
        self.ledger = self._open()
        self.acknowledged: list[str] = []
        self.late = 0
        self.leases: set[str] = set()
        self.staleness: list[int] = []

    def _open(self) -> Ledger:
        ledger = Ledger(self._limits, self._staleness, lambda: next(self._names))
        ledger.load(self.disk.items)
        ledger.set_version(self.version, self.model)
        return ledger

    def commit(self) -> None:
        self.disk.write(self.ledger.changes)
        self.ledger.changes.clear()
        self._written = replace(self.ledger.counts)

    def kill(self) -> None:
        """End the server without any further write, and start it again on what is in its files at this moment."""
        self._kills += 1
        self._earlier, self._written = self.counts, Counts()
        if isinstance(self.disk, TransactionStore):
            assert self._folder is not None
            last, now = (self._folder / str(number) for number in (self._kills - 1, self._kills))
            shutil.copytree(last, now)  # the open file itself is locked for as long as this process lives
            self.disk.close()
            shutil.rmtree(last)
            self.disk = TransactionStore(now)
        self.ledger = self._open()

    @property
    def counts(self) -> Counts:
        """What has happened since the first start, without what was not written when the server was killed."""
        return Counts(*map(sum, zip(astuple(self._earlier), astuple(self._written), strict=True)))

    def close(self) -> None:
        if isinstance(self.disk, TransactionStore):
            self.disk.close()

    def put(self, *names: str, **options: object) -> None:
        self.put_to(JOB, prompts(*names), options=options)
        self.commit()

    def put_to(self, job: JobId, new: list[NewPrompt], *, priority: int = 0, **more: Any) -> PutResult:
        numbers = self.ledger.reserve_numbers(job, TERMS, len(new))
        entries = build_entries(job, new, numbers, self.now, lambda: next(self._names), priority)
        return self.ledger.put(job, entries, TERMS, **more)

    def start(self, most: int = 1000, expected: Callable[[Entry], float] = lambda _: 1.0) -> list[Entry]:
        return self.ledger.start(most, expected)

    def end(self, entry: Entry, *, failed: bool = False) -> None:
        self.ledger.end(entry.number, b"group", None, 10, failed=failed)

    def take(self, most: int = 1, at_least: int = 1, key: str | None = None) -> list[Entry]:
        taken = self.ledger.leases.take(JOB, most, at_least, self.now, LEASE, key)
        self.commit()
        self.leases.update(entry.lease or "" for entry in taken)
        staleness = [self.ledger.leases.staleness.pop(entry.lease or "", None) for entry in taken]
        self.staleness += [each for each in staleness if each is not None]
        return taken

    def acknowledge(self, *leases: str) -> list[AckOutcome]:
        names = dict(self._named(leases))
        late = {entry.name for each in self.ledger.jobs for entry in each if entry.state is not EntryState.LEASED}
        outcomes = self.ledger.leases.acknowledge(leases, lambda _: True)
        self.commit()
        done = [names[lease] for lease, done in zip(leases, outcomes, strict=True) if done is AckOutcome.ACKNOWLEDGED]
        self.acknowledged += done
        self.late += len(late.intersection(done))
        return outcomes

    def update(self, version: int | None = None) -> None:
        self.version = self.version + 1 if version is None else version
        self.ledger.update(self.version)

    def names(self, state: EntryState) -> set[str]:
        return {entry.name for each in self.ledger.jobs for entry in each if entry.state is state}

    def _named(self, leases: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for lease in leases:
            if (entry := self.ledger.entries.by_number.get(int(lease.partition("-")[0]))) is not None:
                yield lease, entry.name
