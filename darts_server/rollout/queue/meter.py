"""Measure the queue, for metrics."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from darts_server.observers import QUEUE_EVENTS, QueueObserver
from darts_server.rollout.queue.entries import EntryState
from darts_server.rollout.queue.history import Counts
from darts_server.rollout.queue.ledger import Ledger


class QueueMeter:
    """Count what is in the queue, and report what has happened to it. ``clock``: Unix seconds."""

    def __init__(self, ledger: Ledger, observer: QueueObserver, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._observer = observer
        self._clock = clock
        self._observed = Counts()

    @property
    def counts(self) -> Counts:
        """What has happened since the start."""
        return self._ledger.counts

    def totals(self) -> Counter[EntryState]:
        """Return the number of prompts in each state."""
        totals: Counter[EntryState] = Counter()
        for each in self._ledger.jobs:
            totals[EntryState.QUEUED] += len(each.order)
            totals[EntryState.RUNNING] += len(each.running)
            totals[EntryState.READY] += len(each.ready)
            totals[EntryState.LEASED] += len(each.leased)
        return totals

    def age(self) -> float:
        """Return since how many seconds the oldest prompt waits for its acknowledgement; 0 without one."""
        oldest = self._ledger.entries.oldest()
        return 0.0 if oldest is None else max(0.0, self._clock() - oldest)

    def report(self, elapsed: float) -> None:
        """Report to the observer what has happened since the last call, ``elapsed`` seconds ago."""
        totals = self.totals()
        waits = "waiting" if totals[EntryState.QUEUED] else "empty"
        self._observer.queue_active("running" if totals[EntryState.RUNNING] else waits, elapsed)
        counts = self._ledger.counts
        for event in QUEUE_EVENTS:
            if more := getattr(counts, event) - getattr(self._observed, event):
                self._observer.queue_events(event, more)
        self._observed = replace(counts)
