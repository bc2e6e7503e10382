"""The jobs of the queue."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from darts_server.exceptions import QuotaReached
from darts_server.rollout.queue.entries import JOB, Entry, Job, JobId, JobOptions
from darts_server.rollout.queue.history import Changes
from darts_server.rollout.queue.job_entries import JobEntries
from darts_server.rollout.queue.owners import RETRY_SECONDS

MAX_JOBS = 1_000
"""Of each owner."""
EMPTY_SECONDS = 3600.0
"""A job without prompts that was not used for so long makes room for another one, if its owner has `MAX_JOBS`."""


class Jobs:
    """Keep the jobs of all owners, and how many groups of each were taken under the served weights.

    Args:
        changes: gets what has to be on the disk.
        default_options: of new jobs.
    """

    def __init__(self, changes: Changes, default_options: JobOptions) -> None:
        self.version = 0
        """Of the served weights."""
        self.clock = 0.0
        """Seconds for which the queue has worked; unlike the time it does not jump with the system's clock."""
        self.changed: set[JobId] = set()
        """Jobs of which other groups than before may be handed out; whoever notifies their consumers empties it."""
        self._changes = changes
        self._default_options = default_options
        self._jobs: dict[JobId, JobEntries] = {}
        self._counts: Counter[str] = Counter()

    def load(self, items: Iterable[tuple[str, bytes]]) -> None:
        for _, value in items:
            self._add(Job.decode(value))

    def __iter__(self) -> Iterator[JobEntries]:
        return iter(self._jobs.values())

    def __contains__(self, job_id: JobId) -> bool:
        return job_id in self._jobs

    def __getitem__(self, job_id: JobId) -> JobEntries:
        return self._jobs[job_id]

    def get(self, job_id: JobId) -> JobEntries | None:
        return self._jobs.get(job_id)

    def find_replaceable(self, job_id: JobId) -> JobId | None:
        """Return the job that has to be dropped before another is created: an empty one that was unused for longest.

        ``None`` if none has to be.

        Raises:
            QuotaReached: all have prompts, or were used a short time ago.
        """
        owner = job_id[0]
        if job_id in self._jobs or self._counts[owner] < MAX_JOBS:
            return None
        empty = [each for each in self if each.job.id[0] == owner and each.is_empty]
        oldest = min(empty, key=lambda each: each.used_at, default=None)
        if oldest is None or self.clock - oldest.used_at < EMPTY_SECONDS:
            raise QuotaReached(f"this key has {MAX_JOBS} jobs; delete one that is done, and retry", RETRY_SECONDS)
        return oldest.job.id

    def open(self, job_id: JobId, options: Mapping[str, Any], is_admin: bool, number: int) -> JobEntries:
        """Return a job after changing its options; if there is none, one with this number is created."""
        each = self._jobs.get(job_id)
        if each is None:
            each = self._add(Job(job_id, self._default_options, is_admin, self.version, number=number))
        self.use(each)
        each.job.options = replace(each.job.options, **options)
        self.save(each.job)
        self.changed.add(job_id)
        return each

    def use(self, each: JobEntries) -> None:
        """Note that a job is used now."""
        each.used_at = self.clock

    def remove(self, job_id: JobId) -> None:
        """Remove a job whose entries are gone."""
        del self._jobs[job_id]
        self._counts[job_id[0]] -= 1
        self._changes[JOB, json.dumps(job_id)] = None
        self.changed.add(job_id)

    def unused(self) -> list[JobId]:
        """Return the jobs that were not used for as long as their options say, and of which nothing is leased."""
        return [each.job.id for each in self if not each.leased and self._is_unused(each)]

    def set_taken(self, each: JobEntries, taken: int) -> None:
        """Set how many groups count as taken under the served weights."""
        each.job.taken, each.job.version = taken, self.version
        self.save(each.job)

    def count_taken(self, entry: Entry, more: int) -> None:
        """Count a group that was taken, or that came back, if that was under the served weights."""
        each = self._jobs[entry.job]
        if not entry.is_failed and (entry.leased_version, entry.takes) == (self.version, each.job.takes):
            self.set_taken(each, max(0, each.job.taken_under(self.version) + more))

    def save(self, job: Job) -> None:
        self._changes[JOB, json.dumps(job.id)] = job.encode()

    def _add(self, job: Job) -> JobEntries:
        each = self._jobs[job.id] = JobEntries(job, self.changed, self.clock)
        self._counts[job.id[0]] += 1
        return each

    def _is_unused(self, each: JobEntries) -> bool:
        after = each.job.options.expires_after
        return after is not None and self.clock - each.used_at >= after
