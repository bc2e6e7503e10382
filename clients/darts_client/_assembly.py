"""Candidates put together from the deltas of a token stream.

Each candidate grows by deltas without a gap, and ends in exactly one trajectory or discard before its group does.
"""

from dataclasses import dataclass, field

from ._errors import ProtocolError
from ._events import Delta, Discard, TrajectoryEvent
from ._group_wire import Tokens, ToldTrajectory
from ._models import FinishReason
from ._wire import Wire


class ToldEnd(Wire):
    """The `trajectory` event."""

    trajectory_id: str
    number: int
    length: int
    finish_reason: FinishReason
    text: str
    cut: bool


@dataclass(slots=True)
class _Candidate:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: int | None = None
    ended: bool = False


class Assembly:
    """The candidates of the groups that are not decided yet."""

    def __init__(self, wants_logprobs: bool) -> None:
        self._wants_logprobs = wants_logprobs
        self._groups: dict[int, dict[str, _Candidate]] = {}
        self._closed: set[int] = set()

    def grow(self, delta: Delta) -> Delta:
        """Take a delta; ProtocolError if it does not go on where the last one ended."""
        candidate = self._growing(delta.number, delta.trajectory_id)
        if delta.start != len(candidate.token_ids):
            at = f"starts at {delta.start}, not at {len(candidate.token_ids)}"
            raise ProtocolError(f"a delta of {delta.trajectory_id} {at}")
        if self._wants_logprobs:
            if delta.logprobs is None or len(delta.logprobs) != len(delta.token_ids):
                raise ProtocolError(f"a delta of {delta.trajectory_id} has not one logprob for each token")
            candidate.logprobs.extend(delta.logprobs)
        candidate.token_ids.extend(delta.token_ids)
        return delta

    def keep(self, end: ToldEnd) -> TrajectoryEvent:
        """A candidate belongs to its group."""
        candidate = self._growing(end.number, end.trajectory_id)
        have = len(candidate.token_ids)
        if end.length > have or (end.length < have and not end.cut):
            raise ProtocolError(f"trajectory {end.trajectory_id} has {have} tokens but says {end.length}")
        candidate.ended, candidate.kept = True, end.length
        token_ids, logprobs = self._tokens(candidate)
        return TrajectoryEvent(end.trajectory_id, end.number, token_ids, logprobs, end.text, end.finish_reason, end.cut)

    def discard(self, discard: Discard) -> Discard:
        """A candidate does not belong to its group."""
        candidate = self._growing(discard.number, discard.trajectory_id)
        candidate.ended = True
        candidate.token_ids.clear()
        candidate.logprobs.clear()
        return discard

    def tokens(self, number: int, told: ToldTrajectory) -> Tokens:
        """All tokens of a trajectory of the group that is decided."""
        candidate = self._groups.get(number, {}).get(told.trajectory_id)
        if candidate is None or candidate.kept is None:
            raise ProtocolError(f"trajectory {told.trajectory_id} is in its group but was not streamed")
        return self._tokens(candidate)

    def close(self, number: int) -> None:
        """Forget a group that is decided. ProtocolError if a candidate of it has not ended."""
        for trajectory_id, candidate in self._groups.pop(number, {}).items():
            if not candidate.ended:
                raise ProtocolError(f"group {number} is decided, but {trajectory_id} has not ended")
        self._closed.add(number)

    def _growing(self, number: int, trajectory_id: str) -> _Candidate:
        candidate = self._groups.setdefault(number, {}).setdefault(trajectory_id, _Candidate())
        if candidate.ended or number in self._closed:
            raise ProtocolError(f"something comes of {trajectory_id} after its end")
        return candidate

    def _tokens(self, candidate: _Candidate) -> Tokens:
        logprobs = tuple(candidate.logprobs[: candidate.kept]) if self._wants_logprobs else None
        return tuple(candidate.token_ids[: candidate.kept]), logprobs
