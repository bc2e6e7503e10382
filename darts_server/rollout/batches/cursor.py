"""The position of a batch's event stream within one candidate."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from darts_server.engine.port import TokenSlice
from darts_server.rollout.batches.events import CandidateDiscarded, TokenDelta, TrajectorySelected
from darts_server.rollout.run import GroupRun
from darts_server.types import DiscardReason, Sample


@dataclass(frozen=True, slots=True)
class TokenRange:
    """A reference to a delta that was sent: tokens ``start`` to ``stop`` of a candidate."""

    candidate: "CandidateCursor"
    start: int
    stop: int

    @property
    def delta(self) -> TokenDelta | None:
        """The delta; ``None`` if the candidate was discarded since."""
        return self.candidate.delta(self.start, self.stop)


class CandidateCursor:
    """Create the events of one candidate from what it has generated when `advance` is called.

    The tokens of its deltas are kept, to be sent again, until it is discarded: 12 bytes each with log-probs.
    """

    def __init__(self, run: GroupRun[Any, Any], trajectory_id: str, number: int, index: int) -> None:
        self.trajectory_id = trajectory_id
        self._number = number
        self._index = index
        self._run: GroupRun[Any, Any] | None = run
        self._end: TrajectorySelected | CandidateDiscarded | None = None
        self._end_sent = False
        self._token_ids = array("i")
        self._logprobs: array[float] | None = None

    def select(self, sample: Sample) -> None:
        """Record that the candidate belongs to its group."""
        assert self._run is not None
        cut = self._run.candidates[self._index].cut
        self._end = TrajectorySelected(self.trajectory_id, self._number, sample, cut)

    def close(self, reason: DiscardReason) -> None:
        """End the candidate: discard it unless it was selected. ``reason``: used if it has no reason of its own."""
        if self._end is None and self._run is not None:
            own_reason = self._run.candidates[self._index].reason
            length = self._run.runner.count_tokens(self._index)
            self._end = CandidateDiscarded(self.trajectory_id, self._number, length, own_reason or reason)
        self._run = None

    def advance(self, chunk: int) -> Iterator[TokenRange | TrajectorySelected | CandidateDiscarded]:
        """Yield the events since the last call.

        New tokens of a running candidate are held back until there are ``chunk`` of them.
        """
        if self._end_sent:
            return
        if self._end is None and self._run is not None:
            state = self._run.candidates[self._index]
            if state.reason is not None:
                self.close(state.reason)
            elif self._run.runner.count_tokens(self._index) - len(self._token_ids) >= (chunk if state.running else 1):
                yield from self._add_tokens(self._run.runner.read_tokens(self._index, len(self._token_ids)))
        if self._end is not None:
            yield from self._finish(self._end)

    def delta(self, start: int, stop: int) -> TokenDelta | None:
        """The delta with these tokens; ``None`` once the candidate was discarded."""
        if stop > len(self._token_ids):
            return None
        logprobs = None if self._logprobs is None else self._logprobs[start:stop].tolist()
        return TokenDelta(self.trajectory_id, self._number, start, self._token_ids[start:stop].tolist(), logprobs)

    def _finish(
        self, end: TrajectorySelected | CandidateDiscarded
    ) -> Iterator[TokenRange | TrajectorySelected | CandidateDiscarded]:
        if isinstance(end, TrajectorySelected):
            start, sample = len(self._token_ids), end.sample
            logprobs = None if sample.logprobs is None else sample.logprobs[start:]
            yield from self._add_tokens(TokenSlice(sample.token_ids[start:], logprobs))
        else:
            self._token_ids, self._logprobs = array("i"), None
        self._end_sent = True
        yield end

    def _add_tokens(self, generated: TokenSlice | None) -> Iterator[TokenRange]:
        if generated is None or not generated.token_ids:
            return
        start = len(self._token_ids)
        self._token_ids.extend(generated.token_ids)
        if generated.logprobs is not None:
            self._logprobs = self._logprobs or array("d")
            self._logprobs.extend(generated.logprobs)
        yield TokenRange(self, start, len(self._token_ids))
