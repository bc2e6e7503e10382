"""How much each owner has in the queue, and may have."""

from collections import Counter
from dataclasses import dataclass

from darts_server.exceptions import QuotaReached, TooLarge

RETRY_SECONDS = 5
REMEDY = "take and acknowledge groups, and retry"


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Of each owner. ``prompts``: that have not been acknowledged. ``bytes``: of prompts and of ready groups."""

    prompts: int = 100_000
    bytes: int = 1 << 29


class Owners:
    """Count the prompts and bytes of each owner."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._prompts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()  # of prompts and groups
        self._group_bytes: Counter[str] = Counter()

    def add(self, owner: str, *, prompts: int = 0, prompt_bytes: int = 0, group_bytes: int = 0) -> None:
        """Add to what an owner has; negative numbers take away."""
        self._prompts[owner] += prompts
        self._bytes[owner] += prompt_bytes + group_bytes
        self._group_bytes[owner] += group_bytes
        if not self._prompts[owner]:
            for counter in (self._prompts, self._bytes, self._group_bytes):
                del counter[owner]

    def must_take_groups(self, owner: str) -> bool:
        """Return whether its groups have to be taken before more are generated."""
        return self._bytes[owner] >= self._limits.bytes and self._group_bytes[owner] > 0

    def check_room(self, owner: str, prompts: int, size: int) -> None:
        """Check whether an owner may have so many more prompts of so many bytes.

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
        if self._prompts[owner] + prompts > limits.prompts:
            raise QuotaReached(
                f"this key has {self._prompts[owner]} prompts in the queue, and {prompts} more would exceed "
                f"{limits.prompts} (--queue-prompts); {REMEDY}",
                RETRY_SECONDS,
            )
        if self._bytes[owner] + size > limits.bytes:
            raise QuotaReached(
                f"this key's prompts and groups in the queue have {self._bytes[owner]} bytes, and {size} more would "
                f"exceed {limits.bytes} (half of --queue-bytes); {REMEDY}",
                RETRY_SECONDS,
            )
