"""One candidate as those see it who follow its tokens."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from darts_server.engine.port import Generated
from darts_server.rollout.batches.events import Belongs, Delta, Discarded
from darts_server.rollout.run import GroupRun
from darts_server.types import DiscardReason, Sample


@dataclass(frozen=True, slots=True)
class Passage:
    """Tokens ``start`` to ``stop`` of a candidate were told."""

    candidate: "CandidateCursor"
    start: int
    stop: int

    @property
    def delta(self) -> Delta | None:
        """What was told; ``None`` of a candidate that was discarded since."""
        return self.candidate.between(self.start, self.stop)


class CandidateCursor:
    """Makes the events of one candidate, from what it has generated at the moment of each.

    What was told of it is remembered in 12 bytes a token, to be told again, until it is discarded.
    """

    def __init__(self, run: GroupRun[Any, Any], trajectory_id: str, number: int, index: int) -> None:
        self.trajectory_id = trajectory_id
        self._number = number
        self._index = index
        self._run: GroupRun[Any, Any] | None = run
        self._end: Belongs | Discarded | None = None
        self._ended = False
        self._token_ids = array("i")
        self._logprobs: array[float] | None = None

    def belongs(self, sample: Sample) -> None:
        """It belongs to its group."""
        assert self._run is not None
        self._end = Belongs(self.trajectory_id, self._number, sample, self._run.candidates[self._index].cut)

    def close(self, reason: DiscardReason) -> None:
        """Nothing more comes of it. ``reason``: why it is discarded, if it is without having a reason of its own."""
        if self._end is None and self._run is not None:
            own = self._run.candidates[self._index].reason
            length = self._run.token_count(self._index)
            self._end = Discarded(self.trajectory_id, self._number, length, own or reason)
        self._run = None

    def news(self, chunk: int) -> Iterator[Passage | Belongs | Discarded]:
        """Its events since the last ones: tokens once there are ``chunk`` of them, or when it has all."""
        if self._ended:
            return
        if self._end is None and self._run is not None:
            state = self._run.candidates[self._index]
            if state.reason is not None:
                self.close(state.reason)
            elif self._run.token_count(self._index) - len(self._token_ids) >= (chunk if state.running else 1):
                yield from self._told(self._run.tokens_from(self._index, len(self._token_ids)))
        if self._end is not None:
            yield from self._last(self._end)

    def between(self, start: int, stop: int) -> Delta | None:
        """These tokens of it, as they were told; ``None`` once it was discarded."""
        if stop > len(self._token_ids):
            return None
        logprobs = None if self._logprobs is None else self._logprobs[start:stop].tolist()
        return Delta(self.trajectory_id, self._number, start, self._token_ids[start:stop].tolist(), logprobs)

    def _last(self, end: Belongs | Discarded) -> Iterator[Passage | Belongs | Discarded]:
        if isinstance(end, Belongs):
            start, sample = len(self._token_ids), end.sample
            logprobs = None if sample.logprobs is None else sample.logprobs[start:]
            yield from self._told(Generated(sample.token_ids[start:], logprobs))
        else:
            self._token_ids, self._logprobs = array("i"), None
        self._ended = True
        yield end

    def _told(self, generated: Generated | None) -> Iterator[Passage]:
        if generated is None or not generated.token_ids:
            return
        start = len(self._token_ids)
        self._token_ids.extend(generated.token_ids)
        if generated.logprobs is not None:
            self._logprobs = self._logprobs or array("d")
            self._logprobs.extend(generated.logprobs)
        yield Passage(self, start, len(self._token_ids))
