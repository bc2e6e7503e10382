"""The port to the scorer of running trajectories."""

from dataclasses import dataclass
from typing import Protocol

from darts_server.engine.port import HiddenState
from darts_server.policy.pruning.survival import Pruning
from darts_server.records import GroupKey


@dataclass(frozen=True, slots=True)
class Assessment:
    """``quality``: the calibrated probability q of being correct. ``survival``: the probability to keep it with."""

    quality: float
    survival: float


class CandidateScorer(Protocol):
    """Scores trajectories, identified by their group and candidate index, and learns from their rewards.

    All methods are called in the event loop, return fast and never raise.
    """

    @property
    def detect_at(self) -> tuple[int, ...]:
        """Numbers of generated tokens, ascending, at which trajectories are scored. The latest score counts."""
        ...

    @property
    def uses_hidden_states(self) -> bool:
        """Whether scores are made from hidden states, alone or together with log-probs."""
        ...

    @property
    def uses_logprobs(self) -> bool:
        """Whether scores are made from log-probs, alone or together with hidden states."""
        ...

    def score_state(
        self, group: GroupKey, index: int, probed: HiddenState, logprobs: tuple[float, ...], pruning: Pruning
    ) -> Assessment:
        """Score a trajectory by its hidden state and, if it uses both, by the log-probs of its tokens so far."""
        ...

    def score_logprobs(self, group: GroupKey, index: int, logprobs: tuple[float, ...], pruning: Pruning) -> Assessment:
        """Score a trajectory by the log-probs of its tokens so far, in nats."""
        ...

    def record_kept(self, group: GroupKey, index: int, survival: float) -> None:
        """Record that a trajectory was kept, and with which probability it was kept so far, over all decisions."""
        ...

    def record_dropped(self, group: GroupKey, index: int) -> None:
        """Record that a trajectory will not be returned, so that no reward will come for it."""
        ...
