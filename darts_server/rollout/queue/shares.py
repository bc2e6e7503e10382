"""Whose prompt starts next."""

from dataclasses import dataclass, field
from math import inf

from darts_server.rollout.queue.entries import Entry, JobId
from darts_server.rollout.queue.order import FairShare


@dataclass(slots=True)
class _Able:
    """Jobs of one owner. ``waiting``: those whose next prompt may not start now.

    ``time_limit``: of jobs that may go before these.
    """

    jobs: dict[JobId, None] = field(default_factory=dict)
    waiting: list[JobId] = field(default_factory=list)
    time_limit: float = inf


class AbleJobs:
    """The jobs of which a prompt may start, by owner."""

    def __init__(self) -> None:
        self.by_owner: dict[str, _Able] = {}

    def __bool__(self) -> bool:
        return bool(self.by_owner)

    def add(self, job_id: JobId) -> None:
        self.by_owner.setdefault(job_id[0], _Able()).jobs[job_id] = None

    def remove(self, job_id: JobId) -> None:
        """Remove a job, and its owner if it was the last one."""
        able = self.by_owner[job_id[0]]
        del able.jobs[job_id]
        if not able.jobs:
            del self.by_owner[job_id[0]]


class Shares:
    """Give owners the same number of tokens, and the jobs of an owner in proportion to their weights."""

    def __init__(self) -> None:
        self._owners: FairShare[str] = FairShare()
        self._jobs: dict[str, FairShare[JobId]] = {}
        self._charged: dict[int, float] = {}  # tokens that a running group is expected to take

    def choose(self, able: AbleJobs) -> JobId | None:
        """Return the job that goes next; ``None`` if there is none. It may remove owners."""
        while able:
            owner = self._owners.choose(able.by_owner.keys())
            of_owner = able.by_owner[owner]
            jobs = self._of(owner)
            chosen = jobs.choose(of_owner.jobs, of_owner.waiting)
            if jobs.time(chosen) <= of_owner.time_limit:
                return chosen
            del able.by_owner[owner]  # the others have had more: the job that waits goes first
        return None

    def pass_over(self, able: AbleJobs, entry: Entry, expected: float, weight: float) -> None:
        """Let other jobs of an entry's owner go before it, until they are ahead by as much as it will take itself.

        So a large prompt that has no room yet delays no other job, and gets room
        in the end, unless other owners take it.
        """
        of_owner = able.by_owner[entry.owner]
        of_owner.waiting.append(entry.job)
        of_owner.time_limit = min(of_owner.time_limit, self._of(entry.owner).time(entry.job) + expected / weight)
        able.remove(entry.job)

    def start(self, entry: Entry, expected: float, weight: float) -> None:
        """Count the tokens that an entry's group is expected to take."""
        self._charged[entry.number] = expected
        self._charge(entry, expected, weight)

    def end(self, entry: Entry, tokens: float, weight: float) -> None:
        """Count the tokens that it took instead."""
        self._charge(entry, tokens - self._charged.pop(entry.number), weight)

    def forget(self, job_id: JobId) -> None:
        self._of(job_id[0]).forget(job_id)

    def _charge(self, entry: Entry, tokens: float, weight: float) -> None:
        self._owners.charge(entry.owner, tokens)
        self._of(entry.owner).charge(entry.job, tokens, weight)

    def _of(self, owner: str) -> FairShare[JobId]:
        return self._jobs.setdefault(owner, FairShare())
