"""How much each owner and each of its jobs has in the queue, and may have."""

from collections import Counter
from dataclasses import dataclass

from darts_server.exceptions import QuotaReached, TooLarge
from darts_server.rollout.queue.entries import JobId

RETRY_SECONDS = 5
REMEDY = "take and acknowledge groups, and retry"

RESERVE_PART = 4
"""An owner whose limit is reached has this part of it more, for jobs that have little: one whose consumer has stalled,
and that has taken all of the limit, costs the others nothing."""
SHARE_PART = 4
"""A job may have this part of what is left of the reserve, so that something is always left for another one."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Of each owner. ``prompts``: that have not been acknowledged. ``bytes``: of prompts and of ready groups."""

    prompts: int = 100_000
    bytes: int = 1 << 29


class _Quota:
    """What the jobs of one owner have of something of which they may have ``limit`` together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.by_job: Counter[JobId] = Counter()
        self._small = limit // RESERVE_PART // SHARE_PART
        self._in_reserve: set[JobId] = set()
        self._taken = 0

    def add(self, job: JobId, amount: int) -> None:
        before = self.by_job[job]
        self._taken -= self._of_reserve(job)
        self.used += amount
        self.by_job[job] += amount
        if self.used <= self.limit:
            self._in_reserve.clear()
            self._taken = 0
        elif amount > 0 and before <= self._small:
            self._in_reserve.add(job)
        self._taken += self._of_reserve(job)

    def forget(self, job: JobId) -> None:
        """Forget what a job has."""
        self._taken -= self._of_reserve(job)
        del self.by_job[job]
        self._in_reserve.discard(job)

    @property
    def share(self) -> int:
        """How much a job may have although the limit is reached."""
        # Groups that were running when the limit was reached exceed it: those of large jobs take nothing from others.
        taken = min(max(0, self.used - self.limit), self._taken)
        return max(0, self.limit // RESERVE_PART - taken) // SHARE_PART

    def has_room(self, job: JobId, amount: int) -> bool:
        return self.used + amount <= self.limit or self.by_job[job] + amount <= self.share

    def _of_reserve(self, job: JobId) -> int:
        """Return how much of the reserve a job has, also when it has grown beyond a share since."""
        return min(self.by_job[job], self._small) if job in self._in_reserve else 0


class _Owner:
    def __init__(self, limits: QueueLimits) -> None:
        self.prompts = _Quota(limits.prompts)
        self.bytes = _Quota(limits.bytes)  # of prompts and groups
        self.group_bytes: Counter[JobId] = Counter()

    def forget(self, job: JobId) -> None:
        self.prompts.forget(job)
        self.bytes.forget(job)
        del self.group_bytes[job]


class Owners:
    """Count the prompts and bytes of each owner, and of each of its jobs."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._owners: dict[str, _Owner] = {}

    def add(self, job: JobId, *, prompts: int = 0, prompt_bytes: int = 0, group_bytes: int = 0) -> None:
        """Add to what a job has; negative numbers take away."""
        owner = self._owners.get(job[0])
        if owner is None:
            owner = self._owners[job[0]] = _Owner(self._limits)
        owner.prompts.add(job, prompts)
        owner.bytes.add(job, prompt_bytes + group_bytes)
        owner.group_bytes[job] += group_bytes
        if not owner.prompts.by_job[job]:
            owner.forget(job)
        if not owner.prompts.used:
            del self._owners[job[0]]

    def must_take_groups(self, job: JobId) -> bool:
        """Return whether groups of a job have to be taken before more are generated."""
        owner = self._owners.get(job[0])
        if owner is None or owner.bytes.used < owner.bytes.limit:
            return False
        return owner.group_bytes[job] > owner.bytes.share

    def check_room(self, job: JobId, prompts: int, size: int) -> None:
        """Check whether a job may have so many more prompts of so many bytes.

        Raises:
            TooLarge, QuotaReached
        """
        limits = self._limits
        if prompts > limits.prompts or size > limits.bytes:
            raise TooLarge(
                "prompts",
                f"must be at most {limits.prompts} (--queue-prompts), with {limits.bytes} bytes (half of "
                "--queue-bytes); send less per request",
            )
        owner = self._owners.get(job[0]) or _Owner(limits)
        if not owner.prompts.has_room(job, prompts):
            raise QuotaReached(
                f"this key has {owner.prompts.used} prompts in the queue, and {prompts} more would exceed "
                f"{limits.prompts} (--queue-prompts) and this job's share of {owner.prompts.share} beside; {REMEDY}",
                RETRY_SECONDS,
            )
        if not owner.bytes.has_room(job, size):
            raise QuotaReached(
                f"this key's prompts and groups in the queue have {owner.bytes.used} bytes, and {size} more would "
                f"exceed {limits.bytes} (half of --queue-bytes) and this job's share of {owner.bytes.share} beside; "
                f"{REMEDY}",
                RETRY_SECONDS,
            )
