"""Who is let in while much waits for the engine: by candidates, not by requests."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from darts_server.exceptions import DartsError, InvalidRequest, Overloaded, QuotaReached

RETRY_SECONDS = 5
"""What a refused caller is told to wait: some hundred decode steps, in which some of what waits has begun."""


MOST_ROUNDS = 64
LEAST_QUEUE = 16_384
"""What waits unless the operator says otherwise: so many times what runs at once, and at least so many. Trainers send a
step's prompts all together, often as single requests, and none of these should be refused."""


@dataclass(slots=True, eq=False)
class Caller:
    """Who sent the request that is being handled.

    ``name``: equal for requests with the same key; ``None`` without one. ``request_id``: by which the caller knows the
    request, if it said so. ``trace``: where the request belongs in the caller's trace, by header. ``refused``: why its
    request is not served.
    """

    name: str | None = None
    refused: DartsError | None = None
    request_id: str | None = None
    trace: Mapping[str, str] = field(default_factory=dict)


NOBODY = Caller()
caller: ContextVar[Caller] = ContextVar("darts_caller", default=NOBODY)


@dataclass(frozen=True, slots=True)
class Bounds:
    """``most_waiting``: candidates that wait when no others are let in any more. ``most_per_caller``: candidates of one
    caller's unanswered requests. ``None`` for no such bound.
    """

    most_waiting: int | None = None
    most_per_caller: int | None = None


def most_queued(capacity: int | None) -> int | None:
    """How many candidates may wait for an engine of that capacity."""
    return None if capacity is None else max(MOST_ROUNDS * capacity, LEAST_QUEUE)


class Ticket:
    """The place of one request's candidates."""

    def __init__(self, ledger: "Admission", name: str | None) -> None:
        self._ledger = ledger
        self._name = name
        self._candidates = 0
        self._ahead = True

    def grow(self, candidates: int) -> None:
        """It has so many now, before it has `begun`."""
        more = candidates - self._candidates
        self._candidates = candidates
        self._ledger.ahead += more
        self._ledger.count(self._name, more)

    def begun(self) -> None:
        """The engine counts them from now on."""
        if self._ahead:
            self._ahead = False
            self._ledger.ahead -= self._candidates

    def end(self) -> None:
        self.begun()
        self._ledger.count(self._name, -self._candidates)


class Admission:
    """Counts what is ahead of the engine and whose it is. One event loop.

    Args:
        unfinished: candidates that the engine runs or keeps waiting.
        capacity: most candidates that it runs at once; ``None`` for no such bound, and then nothing ever waits.
    """

    def __init__(self, unfinished: Callable[[], int], capacity: int | None, bounds: Bounds | None = None) -> None:
        self._unfinished = unfinished
        self._capacity = capacity
        self._bounds = bounds or Bounds()
        self._held: Counter[str] = Counter()
        self.requests = 0
        """Requests that are let in and not answered."""
        self.ahead = 0
        """Candidates that are let in and have not come to the engine."""

    @property
    def waiting(self) -> int:
        """Candidates for which the engine has no room now."""
        return 0 if self._capacity is None else max(0, self._unfinished() + self.ahead - self._capacity)

    def check(self, candidates: int, field: str = "n") -> None:
        """Whether a request for so many more may begin.

        How many they are matters to their caller's share alone: if they had to fit into what is left of the queue, a
        large request might never begin.

        Raises:
            Overloaded: too much waits.
            QuotaReached: the caller has too many already.
            InvalidRequest: more than the caller may ever have; ``field`` says where it is asked for.
        """
        try:
            self._check(candidates, field)
        except DartsError as error:
            if (who := caller.get()) is not NOBODY:
                who.refused = error
            raise

    @contextmanager
    def held(self, candidates: int) -> Iterator[Ticket]:
        """The place of a request for so many candidates, until the block ends."""
        ticket = Ticket(self, caller.get().name)
        ticket.grow(candidates)
        self.requests += 1
        try:
            yield ticket
        finally:
            self.requests -= 1
            ticket.end()

    def count(self, name: str | None, candidates: int) -> None:
        """So many more candidates are a caller's."""
        if name is None:
            return
        self._held[name] += candidates
        if not self._held[name]:
            del self._held[name]

    def _check(self, candidates: int, field: str) -> None:
        most, name = self._bounds.most_per_caller, caller.get().name
        if most is not None and name is not None:
            if candidates > most:
                raise InvalidRequest(
                    field,
                    f"asks for {candidates} candidates at once, and a key may have {most} (--max-candidates-per-key); "
                    "ask for fewer at a time",
                )
            if self._held[name] + candidates > most:
                raise QuotaReached(
                    f"this key has {self._held[name]} candidates under way, and {candidates} more would be above its "
                    f"{most} (--max-candidates-per-key); send this again when some have ended",
                    RETRY_SECONDS,
                )
        most, waiting = self._bounds.most_waiting, self.waiting
        if most is not None and waiting >= most:
            raise Overloaded(
                f"{waiting} candidates wait for the engine, and from {most} on (--max-queued-candidates) none are "
                "taken; send this again later",
                RETRY_SECONDS,
            )
