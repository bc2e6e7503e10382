"""Whose prompt starts next."""

from collections.abc import Collection, Mapping

from darts_server.rollout.queue.entries import Entry, JobId
from darts_server.rollout.queue.order import FairShare


class Shares:
    """Give owners the same number of tokens, and the jobs of an owner in proportion to their weights."""

    def __init__(self) -> None:
        self._owners: FairShare[str] = FairShare()
        self._jobs: dict[str, FairShare[JobId]] = {}
        self._charged: dict[int, float] = {}  # tokens that a running group is expected to take

    def choose(self, able: Mapping[str, Collection[JobId]]) -> JobId:
        """Return the job that goes next. ``able``: by owner, those of which a prompt may start; at least one."""
        owner = self._owners.choose(able.keys())
        return self._of(owner).choose(able[owner])

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
