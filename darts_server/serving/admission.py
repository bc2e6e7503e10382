"""Admission of requests by the number of candidates that wait for the engine."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from darts_server.exceptions import DartsError, InvalidRequest, Overloaded, QuotaReached

RETRY_SECONDS = 5
"""``Retry-After`` of a refused request: some hundred decode steps, after which some waiting candidates have started."""
QUEUE_ROUNDS = 64
MIN_QUEUE = 16_384
"""The default queue holds 64 times the candidates that run at once, at least 16,384. Trainers send all prompts of a
step at once, often as single requests, and none of these should be refused."""


@dataclass(slots=True, eq=False)
class Caller:
    """The caller of the request that is being handled.

    ``name``: equal for requests with the same key; ``None`` without one. ``refused``: why the request is refused.
    ``request_id``: the caller's own id of the request. ``trace``: trace context headers.
    """

    name: str | None = None
    refused: DartsError | None = None
    request_id: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)


NO_CALLER = Caller()
caller: ContextVar[Caller] = ContextVar("darts_caller", default=NO_CALLER)


@dataclass(frozen=True, slots=True)
class Bounds:
    """``max_waiting``: number of waiting candidates from which requests are refused. ``max_per_caller``: candidates in
    flight for one caller. ``None`` for no bound.
    """

    max_waiting: int | None = None
    max_per_caller: int | None = None


def default_max_waiting(capacity: int | None) -> int | None:
    """Return how many candidates may wait for an engine with that capacity."""
    return None if capacity is None else max(QUEUE_ROUNDS * capacity, MIN_QUEUE)


class Ticket:
    """The candidates of one admitted request."""

    def __init__(self, admission: "Admission", name: str | None) -> None:
        self._admission = admission
        self._name = name
        self._candidates = 0
        self._is_ahead = True

    def resize(self, candidates: int) -> None:
        """Change the number of candidates, before `mark_started`."""
        more = candidates - self._candidates
        self._candidates = candidates
        self._admission.ahead += more
        self._admission.add_to_caller(self._name, more)

    def mark_started(self) -> None:
        """Count the candidates as the engine's from now on."""
        if self._is_ahead:
            self._is_ahead = False
            self._admission.ahead -= self._candidates

    def release(self) -> None:
        self.mark_started()
        self._admission.add_to_caller(self._name, -self._candidates)


class Admission:
    """Count candidates ahead of the engine, in total and per caller. One event loop.

    Args:
        unfinished: returns the number of candidates that the engine runs or queues.
        capacity: maximum number of candidates that it runs at once; ``None``: unlimited, so none ever wait.
    """

    def __init__(self, unfinished: Callable[[], int], capacity: int | None, bounds: Bounds | None = None) -> None:
        self._unfinished = unfinished
        self._capacity = capacity
        self._bounds = bounds or Bounds()
        self._by_caller: Counter[str] = Counter()
        self.requests = 0
        """Admitted requests that have not been answered."""
        self.ahead = 0
        """Admitted candidates that have not reached the engine."""

    @property
    def waiting(self) -> int:
        """Number of candidates beyond the engine's capacity."""
        return 0 if self._capacity is None else max(0, self._unfinished() + self.ahead - self._capacity)

    def check(self, candidates: int, field: str = "n") -> None:
        """Check whether a request for so many candidates may start.

        The number counts only towards the caller's quota. If the request had to fit into the rest of the queue, a large
        one might never start.

        Raises:
            Overloaded: too many candidates wait.
            QuotaReached: the caller has too many in flight.
            InvalidRequest: the request exceeds the caller's quota by itself; ``field`` names its parameter.
        """
        try:
            self._check(candidates, field)
        except DartsError as error:
            if (who := caller.get()) is not NO_CALLER:
                who.refused = error
            raise

    @contextmanager
    def reserve(self, candidates: int) -> Iterator[Ticket]:
        """Count the candidates of an admitted request until the block ends."""
        ticket = Ticket(self, caller.get().name)
        ticket.resize(candidates)
        self.requests += 1
        try:
            yield ticket
        finally:
            self.requests -= 1
            ticket.release()

    def add_to_caller(self, name: str | None, candidates: int) -> None:
        """Add to the number of a caller's candidates in flight."""
        if name is None:
            return
        self._by_caller[name] += candidates
        if not self._by_caller[name]:
            del self._by_caller[name]

    def _check(self, candidates: int, field: str) -> None:
        limit, name = self._bounds.max_per_caller, caller.get().name
        if limit is not None and name is not None:
            if candidates > limit:
                raise InvalidRequest(
                    field,
                    f"requests {candidates} candidates, and a key may have {limit} in flight "
                    "(--max-candidates-per-key); request fewer at a time",
                )
            if self._by_caller[name] + candidates > limit:
                raise QuotaReached(
                    f"this key has {self._by_caller[name]} candidates in flight, and {candidates} more would exceed "
                    f"its quota of {limit} (--max-candidates-per-key); retry when some have finished",
                    RETRY_SECONDS,
                )
        limit, waiting = self._bounds.max_waiting, self.waiting
        if limit is not None and waiting >= limit:
            raise Overloaded(
                f"{waiting} candidates wait for the engine, and at most {limit} may (--max-queued-candidates); retry "
                "later",
                RETRY_SECONDS,
            )
