"""Admission of requests: how many candidates may wait for the engine, and how many each key may have in flight.

`Admission.admit` checks and holds in one step, with nothing awaited in between, so that requests that arrive together
cannot pass the same check. All routes use the same `Admission`.
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
"""The default queue holds 64 times the candidates that run at once, at least 65,536. Trainers send all prompts of a
step at once, often as single requests or as one batch, and none of these should be refused."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """``max_waiting``: candidates that may wait. ``max_per_caller``: candidates in flight for one caller; admins have
    no bound. ``None`` for no bound.
    """

    max_waiting: int | None = None
    max_per_caller: int | None = None


class Ticket:
    """Candidates that were admitted and are held until `release`: they wait for the engine, or run on it.

    Synchronous, and of one event loop. Leaving it as a context manager releases it.
    """

    def __init__(self, admission: "Admission", name: str | None, who: Caller | None, candidates: int = 0) -> None:
        self._admission = admission
        self._name = name
        self._who = who  # of the request that it was admitted for; None if it holds a part of that
        self._is_released = False
        self.candidates = 0
        self._ahead = 0
        if who is not None:
            admission.requests += 1
        self._hold(candidates)

    def resize(self, candidates: int, field: str = "n") -> None:
        """Hold so many candidates instead.

        Raises:
            Overloaded, QuotaReached, InvalidRequest: as `Admission.admit`; it holds what it held before.
        """
        more = candidates - self.candidates
        if more > 0:
            self._admission.check(more, self._name, 0 if self._who is None else self._who.held, field)
        self._hold(more)

    def fit(self, candidates: int) -> int:
        """Hold so many candidates instead, or as many as there is room for if that is fewer; return the number."""
        more = candidates - self.candidates
        self._hold(int(min(more, max(0, self._admission.room(self._name)))))
        return self.candidates

    def split(self, candidates: int) -> "Ticket":
        """Move so many of its candidates to a ticket of their own, which may be released later than this one."""
        part = Ticket(self._admission, self._name, None)
        part._hold(candidates, -self._hold(-candidates))
        return part

    def merge(self, other: "Ticket") -> None:
        """Take over all candidates of another ticket of the same caller."""
        self._hold(other.candidates, -other._hold(-other.candidates))

    def mark_started(self, candidates: int | None = None) -> None:
        """Count candidates as the engine's from now on; ``None``: all of them."""
        started = self._ahead if candidates is None else min(candidates, self._ahead)
        self._ahead -= started
        self._admission.ahead -= started

    def release(self) -> None:
        """Hold nothing any more. Harmless if it was released before."""
        if self._is_released:
            return
        self._is_released = True
        self._hold(-self.candidates)
        if self._who is not None:
            self._admission.requests -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def _hold(self, more: int, ahead: int | None = None) -> int:
        """Hold so many more candidates, and return by how many more of them the engine has not got yet.

        ``ahead``: that number; ``None``: all, and of fewer candidates first those that it has not got.
        """
        ahead = max(more, -self._ahead) if ahead is None else ahead
        self.candidates += more
        self._ahead += ahead
        self._admission.ahead += ahead
        if self._who is not None:
            self._who.held += more
        if self._name is not None:
            by_caller = self._admission.by_caller
            by_caller[self._name] += more
            if not by_caller[self._name]:
                del by_caller[self._name]
        return ahead


class Admission:
    """Count candidates ahead of the engine, in total and per caller. One event loop.

    Args:
        unfinished: returns the number of candidates that the engine runs or queues.
        capacity: maximum number of candidates that it runs at once; ``None``: unlimited, so none ever wait.
    """

    def __init__(self, unfinished: Callable[[], int], capacity: int | None, bounds: Bounds | None = None) -> None:
        self._unfinished = unfinished
        self._capacity = capacity
        self._bounds = bounds = bounds or Bounds()
        # How many candidates may run and wait.
        self._most = None if capacity is None or bounds.max_waiting is None else capacity + bounds.max_waiting
        self.by_caller: Counter[str] = Counter()
        """Candidates in flight."""
        self.requests = 0
        """Admitted requests that have not been answered."""
        self.ahead = 0
        """Admitted candidates that have not reached the engine."""

    @property
    def waiting(self) -> int:
        """Number of candidates beyond the engine's capacity."""
        return 0 if self._capacity is None else max(0, self._unfinished() + self.ahead - self._capacity)

    def admit(self, candidates: int, field: str = "n") -> Ticket:
        """Hold the candidates of a request, as many as it will start, until its ticket is released.

        Raises:
            Overloaded: with them too many candidates would wait.
            QuotaReached: with them the caller would have too many in flight.
            InvalidRequest: the request needs more than either allows, whatever else runs; ``field`` names its
                parameter.
        """
        who = caller.get()
        name = None if who.is_admin else who.name
        try:
            self.check(candidates, name, 0 if who is NO_CALLER else who.held, field)
        except DartsError as error:
            if who is not NO_CALLER:
                who.refused = error
            raise
        # What has no caller is counted by itself, as nothing ends its request.
        return Ticket(self, name, Caller() if who is NO_CALLER else who, candidates)

    def room(self, name: str | None) -> float:
        """How many more candidates there is room for; negative if there are too many, as when groups were restarted."""
        quota = self._bounds.max_per_caller
        of_caller = inf if quota is None or name is None else quota - self.by_caller[name]
        return of_caller if self._most is None else min(of_caller, self._most - self._unfinished() - self.ahead)

    def check(self, candidates: int, name: str | None, held: int, field: str) -> None:
        """Check whether a caller's request may have so many candidates, beside the ``held`` ones that it has already.

        Raises:
            Overloaded, QuotaReached, InvalidRequest: see `admit`.
        """
        whole, quota, most = held + candidates, self._bounds.max_per_caller, self._most
        if quota is not None and name is not None:
            if whole > quota:
                raise InvalidRequest(
                    field,
                    f"needs {whole} candidates, and a key may have {quota} in flight (--max-candidates-per-key); "
                    "request fewer at a time",
                )
            if self.by_caller[name] + candidates > quota:
                raise QuotaReached(
                    f"this key has {self.by_caller[name]} candidates in flight, and {candidates} more would exceed "
                    f"its quota of {quota} (--max-candidates-per-key); retry when some have finished",
                    RETRY_SECONDS,
                )
        if most is None:
            return
        if whole > most:
            raise InvalidRequest(
                field,
                f"needs {whole} candidates, and at most {most} may run and wait (--max-queued-candidates); request "
                "fewer at a time",
            )
        if self._unfinished() + self.ahead + candidates > most:
            raise Overloaded(
                f"{self.waiting} candidates wait for the engine, and with {candidates} more there would be more than "
                f"{self._bounds.max_waiting} (--max-queued-candidates); retry later",
                RETRY_SECONDS,
            )
