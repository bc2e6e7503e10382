"""Limits of the candidates that wait for the engine, and that each key has in flight.

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
"""The default queue has 64 rounds of the engine's capacity, because trainers send all prompts of a step at once."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Numbers of candidates. None means no limit."""

    max_waiting: int | None = None
    max_per_caller: int | None = None
    """Candidates in flight. Admins have no limit."""


class Ticket:
    """Admitted candidates, which wait for the engine or run on it until `release`."""

    def __init__(
        self,
        admission: "Admission",
        limited_key: str | None,
        request: Caller | None,
        candidates: int = 0,
    ) -> None:
        self._admission = admission
        # Name of the caller's key, or None for an administrator or without a key.
        self._limited_key = limited_key
        # None if `split` made the ticket.
        self._request = request
        self._is_released = False
        self.candidates = 0
        self._not_in_engine = 0
        if request is not None:
            admission.unanswered_requests += 1
        self._add(candidates)

    def resize(self, candidates: int, field: str = "n") -> None:
        """Change the number of candidates, or raise an error of `Admission.admit` and change nothing."""
        added = candidates - self.candidates
        if added > 0:
            in_request = 0
            if self._request is not None:
                in_request = self._request.num_candidates
            self._admission.check_limits(added, self._limited_key, in_request, field)
        self._add(added)

    def resize_within_limits(self, candidates: int) -> int:
        """Change the number to ``candidates``, or to the maximum within limits, and return it."""
        max_added = max(0, self._admission.count_free(self._limited_key))
        self._add(int(min(candidates - self.candidates, max_added)))
        return self.candidates

    def split(self, candidates: int) -> "Ticket":
        """Move candidates to a new ticket, which may outlive this ticket."""
        part = Ticket(self._admission, self._limited_key, request=None)
        _move_candidates(self, part, candidates)
        return part

    def merge(self, other: "Ticket") -> None:
        """Take over all candidates of another ticket of the same caller."""
        _move_candidates(other, self, other.candidates)

    def mark_started(self, candidates: int | None = None) -> None:
        """Note that the engine has candidates (None: all), and counts them itself."""
        started = self._not_in_engine
        if candidates is not None:
            started = min(candidates, started)
        self._not_in_engine -= started
        self._admission.not_in_engine -= started

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        self._add(-self.candidates)
        if self._request is not None:
            self._admission.unanswered_requests -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _add(self, candidates: int) -> None:
        # A negative number drops candidates, first candidates that the engine does not have yet.
        self._change_counts(candidates, max(candidates, -self._not_in_engine))

    def _change_counts(self, candidates: int, not_in_engine: int) -> None:
        self.candidates += candidates
        self._not_in_engine += not_in_engine
        self._admission.not_in_engine += not_in_engine
        if self._request is not None:
            self._request.num_candidates += candidates
        if self._limited_key is not None:
            candidates_by_key = self._admission.candidates_by_key
            candidates_by_key[self._limited_key] += candidates
            if not candidates_by_key[self._limited_key]:
                del candidates_by_key[self._limited_key]


def _move_candidates(source: Ticket, target: Ticket, candidates: int) -> None:
    # Candidates that the engine does not have yet are moved first.
    not_in_engine = min(candidates, source._not_in_engine)
    source._change_counts(-candidates, -not_in_engine)
    target._change_counts(candidates, not_in_engine)


class Admission:
    """Counts the candidates of all callers.

    Args:
        count_unfinished: returns the number of candidates that the engine runs or queues.
        capacity: number of candidates that the engine runs at once, or None if no candidate ever waits.
    """

    def __init__(
        self, count_unfinished: Callable[[], int], capacity: int | None, limits: AdmissionLimits | None = None
    ) -> None:
        self._count_unfinished = count_unfinished
        self._capacity = capacity
        self._limits = limits or AdmissionLimits()
        self._max_running_and_waiting: int | None = None
        if capacity is not None and self._limits.max_waiting is not None:
            self._max_running_and_waiting = capacity + self._limits.max_waiting
        self.candidates_by_key: Counter[str] = Counter()
        """Candidates in flight."""
        self.unanswered_requests = 0
        self.not_in_engine = 0
        """Admitted candidates that have not reached the engine."""

    @property
    def waiting(self) -> int:
        """Number of candidates beyond the engine's capacity."""
        if self._capacity is None:
            return 0
        return max(0, self._count_unfinished() + self.not_in_engine - self._capacity)

    def admit(self, candidates: int, field: str = "n") -> Ticket:
        """Admit all candidates that a request will start.

        Raises:
            Overloaded: too many candidates would wait.
            QuotaReached: the caller would have too many candidates in flight.
            InvalidRequest: the request alone exceeds a limit. ``field`` names the parameter to reduce.
        """
        request_caller = caller.get()
        if request_caller is NO_CALLER:
            # All work without a request shares `NO_CALLER`, whose count would never return to 0.
            request_caller = Caller()
        limited_key = None if request_caller.is_admin else request_caller.name
        try:
            self.check_limits(candidates, limited_key, request_caller.num_candidates, field)
        except DartsError as error:
            request_caller.refusal = error
            raise
        return Ticket(self, limited_key, request_caller, candidates)

    def count_free(self, limited_key: str | None) -> float:
        """Return how many more candidates a key may have: inf without limits, below 0 after groups were restarted."""
        quota = self._limits.max_per_caller
        free = inf
        if quota is not None and limited_key is not None:
            free = quota - self.candidates_by_key[limited_key]
        if self._max_running_and_waiting is not None:
            free = min(free, self._max_running_and_waiting - self._count_unfinished() - self.not_in_engine)
        return free

    def check_limits(
        self,
        candidates: int,
        limited_key: str | None,
        in_request: int,
        field: str,
    ) -> None:
        """Raise an error of `admit` unless a request with ``in_request`` candidates may have ``candidates`` more."""
        needed = in_request + candidates
        quota = self._limits.max_per_caller
        if quota is not None and limited_key is not None:
            in_flight = self.candidates_by_key[limited_key]
            if needed > quota:
                raise InvalidRequest(
                    field,
                    f"needs {needed} candidates, and a key may have {quota} in flight (--max-candidates-per-key); "
                    "request fewer at a time",
                )
            if in_flight + candidates > quota:
                raise QuotaReached(
                    f"this key has {in_flight} candidates in flight, and {candidates} more would exceed its quota of "
                    f"{quota} (--max-candidates-per-key); retry when some have finished",
                    RETRY_SECONDS,
                )

        maximum = self._max_running_and_waiting
        if maximum is None:
            return
        if needed > maximum:
            raise InvalidRequest(
                field,
                f"needs {needed} candidates, and at most {maximum} may run and wait (--max-queued-candidates); "
                "request fewer at a time",
            )
        if self._count_unfinished() + self.not_in_engine + candidates > maximum:
            raise Overloaded(
                f"{self.waiting} candidates wait for the engine, and with {candidates} more there would be more than "
                f"{self._limits.max_waiting} (--max-queued-candidates); retry later",
                RETRY_SECONDS,
            )
