"""Which request each candidate of a group is started with."""

from collections.abc import Iterable
from typing import Generic

from darts_server.engine.port import RequestT


class CandidateRequests(Generic[RequestT]):
    """Assign requests to candidates: all share one, except those that were given a request of their own."""

    def __init__(self, shared: RequestT) -> None:
        self._shared = shared
        self._own: dict[int, RequestT] = {}
        self._suspended: list[RequestT] | None = None

    def assign(self, index: int, request: RequestT) -> None:
        """Give candidate ``index`` a request of its own; while suspended, the next candidate to be started."""
        if self._suspended is None:
            self._own[index] = request
        else:
            self._suspended.append(request)

    def of(self, index: int) -> tuple[RequestT, int]:
        """The request of a candidate, and the candidate's number within that request."""
        own = self._own.get(index)
        return (self._shared, index) if own is None else (own, 0)

    def suspend(self, indices: Iterable[int]) -> None:
        """Keep the requests of these candidates for their replacements."""
        self._suspended = [self._own[index] for index in indices if index in self._own]

    def resume(self, first_index: int) -> None:
        """Assign the kept requests to candidates from ``first_index`` on."""
        kept, self._suspended = self._suspended or [], None
        self._own |= dict(enumerate(kept, first_index))
