"""The terms of prompts, each kept once."""

import json
from collections import Counter
from collections.abc import Iterable

from darts_server.rollout.queue.entries import TERMS, JobId, Terms
from darts_server.rollout.queue.history import Changes


class TermsTable:
    """Keep the terms of each job by a number while an entry has them.

    Args:
        changes: gets what has to be on the disk.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._terms: dict[int, tuple[JobId, Terms]] = {}
        self._numbers: dict[tuple[JobId, str], int] = {}
        self._used: Counter[int] = Counter()
        self._last = 0

    def load(self, items: Iterable[tuple[str, bytes]]) -> None:
        for key, value in items:
            (owner, name), terms = json.loads(value)
            self._keep(int(key), (owner, name), Terms(**terms))
        self._last = max(self._terms, default=0)

    def __getitem__(self, number: int) -> Terms:
        return self._terms[number][1]

    def number_of(self, job_id: JobId, terms: Terms) -> int:
        """Return the number of a job's terms, or a new one under which `use` will keep them."""
        number = self._numbers.get((job_id, terms.encoded))
        if number is None:
            number = self._last = self._last + 1
        return number

    def use(self, number: int, job_id: JobId, terms: Terms, count: int) -> None:
        """Count entries that have these terms."""
        if number not in self._terms:
            self._keep(number, job_id, terms)
            self._changes[TERMS, str(number)] = f"[{json.dumps(job_id)},{terms.encoded}]".encode()
        self._used[number] += count

    def count_loaded(self, number: int) -> None:
        """Count an entry that was on the disk."""
        self._used[number] += 1

    def release(self, number: int, count: int = 1) -> None:
        """Count entries out that had these terms."""
        self._used[number] -= count
        if not self._used[number]:
            del self._used[number]
            job_id, terms = self._terms.pop(number)
            if self._numbers.get((job_id, terms.encoded)) == number:
                del self._numbers[job_id, terms.encoded]
            self._changes[TERMS, str(number)] = None

    def _keep(self, number: int, job_id: JobId, terms: Terms) -> None:
        self._terms[number] = job_id, terms
        self._numbers[job_id, terms.encoded] = number
