"""Single requests that run alone on the engine, outside of any group, so that their callers can abort them by name."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from darts_server.records import VersionSpans, extend_spans
from darts_server.serving.admission import caller
from darts_server.types import Sample


class RunningRequest(Protocol):
    """A request for one trajectory that was sent to the engine."""

    def tokens(self) -> int | None:
        """Return the number of tokens generated so far; ``None`` if it does not run now."""
        ...

    async def abort(self) -> Sample | None:
        """Stop it, and return what it has generated, which its own caller gets too; ``None`` if it does not run now."""
        ...


@dataclass(slots=True, eq=False)
class SingleRequest:
    """A request that runs.

    ``names``: the engine's id of it, and its caller's own. ``owner``: name of its caller; ``None`` without a key.
    ``version``: of the weights when it started. ``version_spans``: of its tokens until the weights last changed.
    """

    request_id: str
    names: Collection[str | None]
    owner: str | None
    running: RunningRequest
    version: int
    version_spans: VersionSpans = ()


class SingleRequests:
    """Keep the requests that run. ``weight_version``: returns that of the next token."""

    def __init__(self, weight_version: Callable[[], int]) -> None:
        self._weight_version = weight_version
        self._requests: dict[SingleRequest, None] = {}

    @contextmanager
    def track(self, request_id: str, running: RunningRequest) -> Iterator[None]:
        """Let the current caller's request be found while it runs."""
        who = caller.get()
        names = (request_id, who.request_id)
        request = SingleRequest(request_id, names, who.name, running, self._weight_version())
        self._requests[request] = None
        try:
            yield
        finally:
            del self._requests[request]

    def find(self, name: str, may_see: Callable[[str | None], bool]) -> list[SingleRequest]:
        """Find the running requests with that name: several if callers have reused it."""
        return [request for request in self._requests if name in request.names and may_see(request.owner)]

    def weights_change(self) -> None:
        """Record which tokens the present weights have sampled, before the paused engine gets others."""
        for request in self._requests:
            if (tokens := request.running.tokens()) is not None:
                request.version_spans = extend_spans(request.version_spans, self._weight_version(), tokens)

    def version_spans(self, request: SingleRequest, tokens: int) -> VersionSpans:
        """Return which weights sampled the first ``tokens`` tokens of a request that runs, or has just been aborted."""
        return extend_spans(request.version_spans, self._weight_version(), tokens)
