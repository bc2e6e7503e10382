"""Admission of requests: how many candidates may wait for the engine, and how many each key may have in flight.

Nothing awaits between a check and its count, so requests that arrive together cannot pass the same check.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import TracebackType
from typing import Self

from darts_server.caller import NO_CALLER, Caller, caller
from darts_server.exceptions import RETRY_SECONDS, DartsError, InvalidRequest, Overloaded, QuotaReached

QUEUE_ROUNDS = 64
MIN_QUEUE = 65_536
"""The default queue has 64 times the candidates that run at once, at least 65,536, because trainers send all prompts of
a step at once."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Numbers of candidates. None means no limit."""

    max_waiting: int | None = None
    max_per_caller: int | None = None
    """Candidates in flight. Admins have no limit."""


class Ticket:
    """Admitted candidates, which wait for the engine or run on it until `release`."""

    def __init__(self, admission: "Admission", key: str | None, request: Caller | None, candidates: int = 0) -> None:
        self._admission = admission
        # Name of the key that has a limit, or None without a limit.
        self._key = key
        # The request that was admitted, or None if `split` made the ticket.
        self._request = request
        self._is_released = False
        self.candidates = 0
        # Candidates that the engine does not have yet.
        self._ahead = 0
        if request is not None:
            admission.requests += 1
        self._add(candidates)

    def resize(self, candidates: int, field: str = "n") -> None:
        """Change the number of candidates.

        Raises:
            Overloaded, QuotaReached, InvalidRequest: see `Admission.admit`; nothing was changed.
        """
        more = candidates - self.candidates
        if more > 0:
            in_request = 0
            if self._request is not None:
                in_request = self._request.num_candidates
            self._admission.check(more, self._key, in_request, field)
        self._add(more)

    def fit(self, candidates: int) -> int:
        """Change the number to ``candidates``, or to the maximum within limits, and return it."""
        free = max(0, self._admission.count_free(self._key))
        self._add(int(min(candidates - self.candidates, free)))
        return self.candidates

    def split(self, candidates: int) -> "Ticket":
        """Move candidates to a new ticket, which may outlive this ticket."""
        part = Ticket(self._admission, self._key, request=None)
        _move(self, part, candidates)
        return part

    def merge(self, other: "Ticket") -> None:
        """Take over all candidates of another ticket of the same caller."""
        _move(other, self, other.candidates)

    def mark_started(self, candidates: int | None = None) -> None:
        """Note that the engine has candidates (None: all), and counts them itself."""
        started = self._ahead if candidates is None else min(candidates, self._ahead)
        self._ahead -= started
        self._admission.ahead -= started

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        self._add(-self.candidates)
        if self._request is not None:
            self._admission.requests -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _add(self, candidates: int) -> None:
        """Add candidates. If the number is negative, drop candidates, first those that the engine does not have yet."""
        self._count(candidates, max(candidates, -self._ahead))

    def _count(self, candidates: int, ahead: int) -> None:
        """Change all counts. ``ahead``: change of the candidates that the engine does not have yet."""
        self.candidates += candidates
        self._ahead += ahead
        self._admission.ahead += ahead
        if self._request is not None:
            self._request.num_candidates += candidates
        if self._key is not None:
            by_caller = self._admission.by_caller
            by_caller[self._key] += candidates
            if not by_caller[self._key]:
                del by_caller[self._key]


def _move(source: Ticket, target: Ticket, candidates: int) -> None:
    """Move candidates between tickets, first candidates that the engine does not have yet."""
    ahead = min(candidates, source._ahead)
    source._count(-candidates, -ahead)
    target._count(candidates, ahead)


class Admission:
    """Counts the candidates of all callers.

    Args:
        unfinished: returns the number of candidates that the engine runs or queues.
        capacity: number of candidates that the engine runs at once, or None if no candidate ever waits.
    """

    def __init__(
        self, unfinished: Callable[[], int], capacity: int | None, limits: AdmissionLimits | None = None
    ) -> None:
        self._unfinished = unfinished
        self._capacity = capacity
        self._limits = limits or AdmissionLimits()
        # Number of candidates that may run and wait together.
        self._limit: int | None = None
        if capacity is not None and self._limits.max_waiting is not None:
            self._limit = capacity + self._limits.max_waiting
        self.by_caller: Counter[str] = Counter()
        """Candidates in flight."""
        self.requests = 0
        """Admitted requests that have not been answered."""
        self.ahead = 0
        """Admitted candidates that have not reached the engine."""

    @property
    def waiting(self) -> int:
        """Number of candidates beyond the engine's capacity."""
        if self._capacity is None:
            return 0
        return max(0, self._unfinished() + self.ahead - self._capacity)

    def admit(self, candidates: int, field: str = "n") -> Ticket:
        """Admit all candidates that a request will start.

        Raises:
            Overloaded: too many candidates would wait.
            QuotaReached: the caller would have too many candidates in flight.
            InvalidRequest: the request alone exceeds a limit. ``field`` names the parameter to reduce.
        """
        who = caller.get()
        if who is NO_CALLER:
            # All work without a request shares `NO_CALLER`, whose count would never return to 0.
            who = Caller()
        name = None if who.is_admin else who.name
        try:
            self.check(candidates, name, who.num_candidates, field)
        except DartsError as error:
            who.refusal = error
            raise
        return Ticket(self, name, who, candidates)

    def count_free(self, name: str | None) -> float:
        """Return how many more candidates a key may have: inf without limits, below 0 after groups were restarted."""
        quota = self._limits.max_per_caller
        free = inf
        if quota is not None and name is not None:
            free = quota - self.by_caller[name]
        if self._limit is not None:
            free = min(free, self._limit - self._unfinished() - self.ahead)
        return free

    def check(self, candidates: int, name: str | None, in_request: int, field: str) -> None:
        """Raise an error of `admit` unless a request with ``in_request`` candidates may have ``candidates`` more."""
        total = in_request + candidates
        quota = self._limits.max_per_caller
        if quota is not None and name is not None:
            if total > quota:
                raise InvalidRequest(
                    field,
                    f"needs {total} candidates, and a key may have {quota} in flight (--max-candidates-per-key); "
                    "request fewer at a time",
                )
            if self.by_caller[name] + candidates > quota:
                raise QuotaReached(
                    f"this key has {self.by_caller[name]} candidates in flight, and {candidates} more would exceed "
                    f"its quota of {quota} (--max-candidates-per-key); retry when some have finished",
                    RETRY_SECONDS,
                )

        if self._limit is None:
            return
        if total > self._limit:
            raise InvalidRequest(
                field,
                f"needs {total} candidates, and at most {self._limit} may run and wait (--max-queued-candidates); "
                "request fewer at a time",
            )
        if self._unfinished() + self.ahead + candidates > self._limit:
            raise Overloaded(
                f"{self.waiting} candidates wait for the engine, and with {candidates} more there would be more than "
                f"{self._limits.max_waiting} (--max-queued-candidates); retry later",
                RETRY_SECONDS,
            )
