"""Which request each candidate of a group is started with."""

from collections.abc import Iterable
from typing import Generic

from darts_server.engine.port import RequestT


class CandidateRequests(Generic[RequestT]):
    """Candidates share one request, but for those that were given one of their own."""

    def __init__(self, shared: RequestT) -> None:
        self._shared = shared
        self._own: dict[int, RequestT] = {}
        self._waiting: list[RequestT] | None = None

    def own(self, index: int, request: RequestT) -> None:
        """Candidate ``index`` has one of its own; while the group is halted, the next to be started."""
        if self._waiting is None:
            self._own[index] = request
        else:
            self._waiting.append(request)

    def of(self, index: int) -> tuple[RequestT, int]:
        """The request behind a candidate, and which of that request's candidates it is."""
        own = self._own.get(index)
        return (self._shared, index) if own is None else (own, 0)

    def halt(self, indices: Iterable[int]) -> None:
        """These candidates are to be started anew."""
        self._waiting = [self._own[index] for index in indices if index in self._own]

    def go_on(self, index: int) -> None:
        """Candidates from ``index`` on take their places."""
        waiting, self._waiting = self._waiting or [], None
        self._own |= dict(enumerate(waiting, index))
