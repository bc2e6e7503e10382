"""The outputs of a group's candidates, whole or cut."""

import asyncio
from typing import Generic

from darts_server.engine.port import Engine, OutputT, RequestT, TokenSlice
from darts_server.rollout.candidates.requests import CandidateRequests


class CandidateOutputs(Generic[RequestT, OutputT]):
    """Keep the output of each candidate that was started, by index, and truncate those that are cut."""

    def __init__(self, engine: Engine[RequestT, OutputT], requests: CandidateRequests[RequestT]) -> None:
        self._engine = engine
        self._requests = requests
        self._futures: dict[int, asyncio.Future[OutputT]] = {}
        self._cuts: dict[int, int] = {}

    def add(self, index: int) -> None:
        """Add a candidate that is being started, without an output so far."""
        self._futures[index] = asyncio.get_running_loop().create_future()

    def is_done(self, index: int) -> bool:
        """Whether the candidate has its output, or has failed."""
        return self._futures[index].done()

    def is_cut(self, index: int) -> bool:
        """Whether the candidate was cut before it had an output."""
        return index in self._cuts

    async def wait(self, index: int) -> OutputT:
        """Wait for the output of a candidate.

        Raises:
            EngineError: of a candidate that failed.
        """
        # A caller that is cancelled here must not cancel the future, which the candidate's task still sets.
        return await asyncio.shield(self._futures[index])

    def set(self, index: int, output: OutputT) -> None:
        """Set the output of a candidate that has none yet; of a cut one, its first tokens."""
        if index in self._cuts:
            output = self._truncate(index, output, self._cuts[index])
        self._futures[index].set_result(output)

    def fail(self, index: int, error: BaseException) -> None:
        """Fail the output that a caller may be waiting for; harmless if there is one already."""
        if not self._futures[index].done():
            self._futures[index].set_exception(error)
            self._futures[index].exception()  # marks it as retrieved: the caller may be gone

    def cut(self, index: int, tokens: int) -> None:
        """Keep the first ``tokens`` tokens of a candidate, of the output that it has or will have."""
        output = self._futures[index]
        if not output.done():
            self._cuts[index] = tokens
        elif output.exception() is None:
            self.add(index)
            self._futures[index].set_result(self._truncate(index, output.result(), tokens))

    def tokens_from(self, index: int, start: int) -> TokenSlice | None:
        """Return the tokens of a candidate that is done, from position ``start`` on; ``None`` if it failed."""
        output = self._futures[index]
        return None if output.exception() else self._engine.tokens_from(output.result(), start)

    def _truncate(self, index: int, output: OutputT, tokens: int) -> OutputT:
        request, _ = self._requests.of(index)
        return self._engine.truncate(request, output, tokens)
