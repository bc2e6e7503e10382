"""Which of several jobs goes next, and which prompt of a job."""

import heapq
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeVar

from darts_server.rollout.queue.entries import Entry

T = TypeVar("T", bound=Hashable)

ROUND = 256
"""Most prompts of a job that are sorted by their expected length. All of a round start before the next one begins, so
that no short prompt waits for ever."""

HEAPIFY_PART = 16
"""A heap is rebuilt when more than this part of it is added: a push takes about as long as so many items of that."""


class FairShare(Generic[T]):
    """Give each of several users the same share of something, in proportion to their weights.

    Start-time fair queueing: each use advances its user's time, and the user whose time is the least goes next. One
    that comes, or comes back, starts at the least time of the others, so that nothing is saved up.
    """

    def __init__(self) -> None:
        self._times: dict[T, float] = {}
        self._active: set[T] = set()
        self._now = 0.0

    def choose(self, users: Collection[T], waiting: Collection[T] = ()) -> T:
        """Return which of ``users``, at least one, goes next.

        ``waiting``: who has something to do too, and cannot now; they keep their times. No other has.
        """
        active = {*users, *waiting}
        for user in active - self._active:
            self._times[user] = max(self._times.get(user, 0.0), self._now)
        self._active = active
        chosen = min(users, key=self._times.__getitem__)
        self._now = max(self._now, self._times[chosen])
        return chosen

    def time(self, user: T) -> float:
        """Return what a user got, divided by its weight, on the scale of all who have something to do."""
        return self._times[user]

    def charge(self, user: T, amount: float, weight: float = 1.0) -> None:
        """Count an amount that a user got, or less than none to correct an earlier one."""
        self._times[user] = self._times.get(user, self._now) + amount / weight

    def forget(self, user: T) -> None:
        self._times.pop(user, None)
        self._active.discard(user)


class PromptOrder:
    """The queued prompts of one job.

    Of the highest priority first; of these, prompts that start again, then those that came first. A round of them at a
    time is sorted by expected length, the longest first, so that no long one starts when the others are done.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, bool, int]] = []
        self._round: list[int] = []  # the next one is last
        self._priority = 0  # the least of the round
        self._numbers: set[int] = set()

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def add(self, entry: Entry) -> None:
        self._numbers.add(entry.number)
        heapq.heappush(self._waiting, (-entry.priority, not entry.was_restarted, entry.number))
        if self._round and entry.priority > self._priority:
            self._end_round()

    def extend(self, entries: Iterable[Entry]) -> None:
        """Add new entries of the same priority."""
        new = [(-entry.priority, not entry.was_restarted, entry.number) for entry in entries]
        self._numbers.update(number for _, _, number in new)
        if len(new) < len(self._waiting) // HEAPIFY_PART:
            for item in new:
                heapq.heappush(self._waiting, item)
        else:
            self._waiting += new
            heapq.heapify(self._waiting)
        if self._round and new and -new[0][0] > self._priority:
            self._end_round()

    def discard(self, number: int) -> None:
        self._numbers.discard(number)
        if self._round and self._round[-1] == number:
            self._round.pop()

    def peek(self, most: float, entries: dict[int, Entry], expected: Callable[[Entry], float]) -> int:
        """Return the number of the next prompt. ``most``: how many may start now, at least one."""
        while True:
            if not self._round:
                self._begin_round(most, entries, expected)
            if self._round[-1] in self._numbers:
                return self._round[-1]
            self._round.pop()

    def _begin_round(self, most: float, entries: dict[int, Entry], expected: Callable[[Entry], float]) -> None:
        chosen: list[Entry] = []
        while self._waiting and len(chosen) < min(most, ROUND):
            _, _, number = heapq.heappop(self._waiting)
            if number in self._numbers:
                chosen.append(entries[number])
        self._priority = min(entry.priority for entry in chosen)
        chosen.sort(key=lambda entry: (entry.priority, expected(entry), -entry.number))
        self._round = [entry.number for entry in chosen]
        self._entries = entries

    def _end_round(self) -> None:
        for number in self._round:
            if number in self._numbers:
                entry = self._entries[number]
                heapq.heappush(self._waiting, (-entry.priority, not entry.was_restarted, number))
        self._round = []
